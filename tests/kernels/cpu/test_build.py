"""Libraries are built once, and a machine that cannot build them says why."""

import os
import stat
from pathlib import Path

import pytest
import torch

from specpaged_kernels.cpu import build
from specpaged_kernels.cpu.build import BuildError, cache_folder, load

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECPAGED_CACHE", str(tmp_path / "cache"))
    load.cache_clear()
    yield tmp_path / "cache"
    load.cache_clear()


def source(tmp_path: Path, text: str = SOURCE) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(text)
    return path


def test_a_library_is_built_once_and_again_for_another_source(tmp_path, folder, monkeypatch):
    path = source(tmp_path)
    assert load(path).answer() == 42
    (first,) = folder.glob("*")
    load.cache_clear()
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("built twice"))
    assert load(path).answer() == 42
    monkeypatch.undo()
    monkeypatch.setenv("SPECPAGED_CACHE", str(folder))
    load.cache_clear()
    source(tmp_path, SOURCE.replace("42", "43"))
    assert load(path).answer() == 43
    assert first in folder.glob("*")
    assert len(list(folder.glob("*"))) == 2


def test_headers_count_as_source(tmp_path, folder):
    (tmp_path / "number.h").write_text("#define NUMBER 1\n")
    path = source(tmp_path, '#include "number.h"\nextern "C" int answer() { return NUMBER; }\n')
    assert load(path).answer() == 1
    (tmp_path / "number.h").write_text("#define NUMBER 2\n")
    load.cache_clear()
    assert load(path).answer() == 2


def test_without_a_compiler_the_reason_is_one_line(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"^there is no C\+\+ compiler \(\$CXX, g\+\+ or clang\+\+\)$"):
        load(source(tmp_path))


def test_what_does_not_compile_is_named(tmp_path, folder):
    with pytest.raises(BuildError, match=r"does not build answer\.cpp: 'nonsense' was not"):
        load(source(tmp_path, 'extern "C" int answer() { return nonsense; }\n'))
    assert not list(folder.glob("*")), "nothing is left behind"


def test_a_folder_that_cannot_be_read_is_done_without(tmp_path, folder, monkeypatch):
    def refusing(honest):
        def call(path, *arguments, **options):
            if str(path).startswith(str(folder)):
                raise PermissionError(13, "Permission denied")
            return honest(path, *arguments, **options)

        return call

    for name in ("stat", "mkdir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    assert load(source(tmp_path)).answer() == 42


def test_a_user_without_a_home_builds_for_this_process(monkeypatch):
    for name in ("SPECPAGED_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    first, second = cache_folder(), cache_folder()
    assert first != second
    assert first.is_dir()


def test_a_folder_that_cannot_be_written_to_is_done_without(tmp_path, folder, monkeypatch):
    folder.write_text("a file, no folder")
    assert load(source(tmp_path)).answer() == 42


def test_a_broken_compiler_is_named(tmp_path, folder, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BuildError, match="broken does not run"):
        load(source(tmp_path))


def test_the_folder_is_the_users_cache(monkeypatch):
    monkeypatch.delenv("SPECPAGED_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/specpaged")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path(os.path.expanduser("~")) / ".cache" / "specpaged"


def test_a_machine_without_a_compiler_runs_on_torch_and_says_so(tmp_path, monkeypatch):
    from specpaged.modeling import backend

    monkeypatch.setattr(backend.library, "why_not", lambda dtype: "there is no C++ compiler")
    placement = (torch.device("cpu"), torch.float32, {(4, 2, 16)}, 16, 300, "exact")
    assert backend.choose_backend("auto", *placement) == ("torch", "there is no C++ compiler")
    with pytest.raises(ValueError, match="attention_backend='cpp' cannot be used: there is no C"):
        backend.choose_backend("cpp", *placement)
