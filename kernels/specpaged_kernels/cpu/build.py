"""Builds a C++ file into a library, once per machine and version of it, and loads it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

# Nothing here lets a compiler reorder or contract arithmetic: what a kernel says is what every build of it computes.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
CACHE = "SPECPAGED_CACHE"  # the environment variable that names the folder of built libraries


class BuildError(RuntimeError):
    """No library can be had here, and why, in one line."""


def cache_folder() -> Path:
    """Where built libraries are kept."""
    if CACHE in os.environ:
        return Path(os.environ[CACHE])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "specpaged"
    try:
        return Path.home() / ".cache" / "specpaged"
    except RuntimeError:  # a user without a home
        return Path(tempfile.mkdtemp(prefix="specpaged-"))


def compiler() -> str:
    """$CXX, g++ or clang++, whichever is there first. Raises BuildError."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        path = name and shutil.which(name)
        if path:
            return path
    raise BuildError("there is no C++ compiler ($CXX, g++ or clang++)")


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("flags", "Features", "model name"))))


@functools.cache
def load(source: Path) -> ctypes.CDLL:
    """The library built from `source`. Raises BuildError."""
    cxx = compiler()
    try:
        version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{Path(cxx).name} does not run: {error}") from None
    # Any file of the folder may be included.
    texts = [path.read_text() for pattern in ("*.h", "*.cpp") for path in sorted(source.parent.glob(pattern))]
    key = hashlib.sha256("\0".join([source.name, *texts, *FLAGS, version, _cpu()]).encode()).hexdigest()
    library = cache_folder() / f"{source.stem}-{key[:16]}.so"
    if not os.path.isfile(library):
        library = _build(cxx, source, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"{library.name} cannot be loaded: {error}") from None


def _build(cxx: str, source: Path, library: Path) -> Path:
    """Builds beside the place where it belongs, and moves it there: others may build it at the same time."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(dir=library.parent)
    except OSError:  # a home that cannot be written to
        folder = tempfile.mkdtemp()
        library = Path(folder) / library.name
    built = Path(folder) / "built.so"
    command = [cxx, *FLAGS, str(source), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        shutil.rmtree(folder)
        errors = [line for line in done.stderr.splitlines() if "error: " in line]
        error = errors[0].partition("error: ")[2] if errors else f"status {done.returncode}"
        raise BuildError(f"{Path(cxx).name} does not build {source.name}: {error}")
    os.replace(built, library)
    if library.parent != Path(folder):
        shutil.rmtree(folder)
    return library
