"""Builds a C++ file into a library, once per machine and version of it, and loads it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from specpaged_kernels.cpu.library_cache import LibraryCache

logger = logging.getLogger("specpaged_kernels")

# Nothing here lets a compiler reorder or contract arithmetic: what a kernel says is what every build of it computes.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-shared", "-fPIC")
CACHE = "SPECPAGED_CACHE"  # the environment variable that names the folder of built libraries
_LOADS = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"


class BuildError(RuntimeError):
    """No library can be had here, and why, in one line."""


def cache_folder() -> Path | None:
    """Where built libraries are kept; None for a user who has no home."""
    if os.environ.get(CACHE):
        return Path(os.environ[CACHE])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "specpaged"
    try:
        return Path.home() / ".cache" / "specpaged"
    except RuntimeError:
        return None


def compiler() -> list[str]:
    """The command of $CXX, which may have arguments, of g++ or of clang++, whichever is there first. BuildError."""
    try:
        wanted = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"$CXX={os.environ['CXX']!r} is no command: {error}") from None
    for words in (wanted, ["g++"], ["clang++"]):
        path = shutil.which(words[0]) if words else None
        if path:
            return [path, *words[1:]]
    raise BuildError("there is no C++ compiler ($CXX, g++ or clang++)")


@functools.cache
def load(source: Path) -> ctypes.CDLL:
    """The library built from `source`. Raises BuildError."""
    if os.name != "posix":
        raise BuildError(f"C++ kernels are for POSIX systems, not {os.name!r}")
    command = compiler()
    name = f"{source.stem}-{_key(command, source)}.so"
    folder = cache_folder()
    if folder is not None:
        try:
            return _opened(_cached(LibraryCache(folder), command, source, name))
        except OSError as error:  # of the folder: BuildError says what the compiler says
            reason = f"{folder} cannot be used: {error}"
    else:
        reason = "there is no home to keep it in"
    logger.warning("%s is built for this process alone, as %s; %s=FOLDER names another", source.stem, reason, CACHE)
    try:
        with tempfile.TemporaryDirectory(prefix="specpaged-") as private:
            built = Path(private) / name
            _compile(command, source, built)
            return _opened(built)  # which outlives its file
    except OSError as error:
        raise BuildError(f"there is no folder to build in: {error}") from None


def _key(command: list[str], source: Path) -> str:
    """Names what a build depends on: its sources, the compiler, and what -march=native is to that, by its macros."""
    # Any file of the folder may be included.
    texts = [path.read_text() for pattern in ("*.h", "*.cpp") for path in sorted(source.parent.glob(pattern))]
    macros = _run(command, ["-dM", "-E", "-x", "c++", os.devnull], "does not run")
    if not macros:
        raise BuildError(f"{_name(command)} does not run: it says nothing of this processor")
    return hashlib.sha256("\0".join([source.name, *texts, *command, *FLAGS, macros]).encode()).hexdigest()[:16]


def _cached(cache: LibraryCache, command: list[str], source: Path, name: str) -> Path:
    """The library of this name, built unless it is there, by one process of all that ask."""
    found = cache.find(name)
    if found is not None:
        return found
    with cache.lock(source.stem):
        found = cache.find(name)
        if found is not None:
            return found
        built = cache.new_file(source.stem)
        try:
            _compile(command, source, built)
            path = cache.add(built, name)
        finally:
            built.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            cache.prune(source.stem)
        return path


def _compile(command: list[str], source: Path, built: Path) -> None:
    """Builds, and loads what came of it in a process that may die of it."""
    _run(command, [str(source), "-o", str(built)], f"does not build {source.name}")
    try:
        done = _output([sys.executable, "-I", "-S", "-c", _LOADS, str(built)])
    except OSError:
        return  # an interpreter within a program has no file: there is nothing to test with
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise BuildError(f"what {_name(command)} builds of {source.name} cannot be loaded: {said[-1]}")


def _run(command: list[str], arguments: list[str], failure: str) -> str:
    """What the compiler prints. Raises BuildError, with the first error that it names."""
    try:
        done = _output([*command, *FLAGS, *arguments])
    except OSError as error:
        raise BuildError(f"{_name(command)} {failure}: {error}") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error: " in line]
        error = errors[0].partition("error: ")[2] if errors else f"status {done.returncode}"
        raise BuildError(f"{_name(command)} {failure}: {error}")
    return done.stdout


def _output(command: list[str]) -> subprocess.CompletedProcess[str]:
    """What a command says, in English, whatever its bytes are. OSError if it cannot be started."""
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=False, env=environment
    )


def _name(command: list[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:]])


def _opened(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"{library.name} cannot be loaded: {error}") from None
