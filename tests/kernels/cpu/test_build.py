"""Libraries are built once, nobody else's is loaded, and a machine that cannot build them says why."""

import grp
import logging
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from specpaged_kernels.cpu import build, library_cache
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


def compiler(tmp_path: Path, monkeypatch, before: str = "") -> Path:
    """Makes $CXX a compiler that writes a line for each library that it builds, after `before`; where the lines are."""
    lines, script = tmp_path / "built", tmp_path / "compiler"
    lines.write_text("")
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *" -o "*) {before or ":"}; echo "$*" >> {lines};; esac\n'
        f'exec {shutil.which("g++")} "$@"\n'
    )
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    return lines


def num_built(lines: Path) -> int:
    return len(lines.read_text().splitlines())


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def loading(path: Path) -> subprocess.Popen:
    """A process that says what the library answers."""
    imports = "import pathlib, specpaged_kernels.cpu.build as build"
    says = f"{imports}; print(build.load(pathlib.Path({str(path)!r})).answer())"
    return subprocess.Popen([sys.executable, "-c", says], stdout=subprocess.PIPE, text=True)


def test_a_library_is_built_once_and_again_for_another_source(tmp_path, folder, monkeypatch):
    lines = compiler(tmp_path, monkeypatch)
    path = source(tmp_path)
    assert load(path).answer() == 42
    (first,) = libraries(folder)
    load.cache_clear()
    assert load(path).answer() == 42
    assert num_built(lines) == 1
    load.cache_clear()
    source(tmp_path, SOURCE.replace("42", "43"))
    assert load(path).answer() == 43
    assert first in libraries(folder)
    assert len(libraries(folder)) == num_built(lines) == 2


def spoil(library: Path, how: str) -> None:
    content = library.read_bytes()
    library.unlink()
    if how == "truncated":
        library.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        library.write_bytes(b"")
    elif how == "one byte":
        library.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif how == "another's":
        library.write_bytes(Path(torch._C.__file__).read_bytes()[:5000])
    elif how == "a link":
        library.with_suffix(".kept").write_bytes(content)
        library.symlink_to(library.with_suffix(".kept"))
    elif how == "others may write it":
        library.write_bytes(content)
        library.chmod(0o666)


SPOILT = ["truncated", "empty", "one byte", "another's", "a link", "others may write it"]


@pytest.mark.parametrize("how", SPOILT)
def test_a_library_that_is_not_as_it_was_built_is_built_anew(how, tmp_path, folder, monkeypatch):
    lines = compiler(tmp_path, monkeypatch)
    path = source(tmp_path)
    with loading(path) as first:  # a process of its own: here the file would be open
        assert first.communicate()[0] == "42\n"
    (library,) = libraries(folder)
    whole = library.read_bytes()
    spoil(library, how)
    for _ in range(2):
        with loading(path) as process:
            assert process.communicate()[0] == "42\n"
    assert num_built(lines) == 2
    assert libraries(folder) == [library]
    assert len(library.read_bytes()) == len(whole)


def owned_by_another(monkeypatch, name: str) -> None:
    honest = os.lstat

    def lstat(path, *arguments, **options):
        status = honest(path, *arguments, **options)
        if Path(path).name == name:
            return os.stat_result([*status[:4], status.st_uid + 4242, *status[5:]])
        return status

    monkeypatch.setattr(library_cache.os, "lstat", lstat)


def test_a_library_of_another_user_is_not_loaded(tmp_path, folder, monkeypatch):
    lines = compiler(tmp_path, monkeypatch)
    path = source(tmp_path)
    assert load(path).answer() == 42
    owned_by_another(monkeypatch, libraries(folder)[0].name)
    load.cache_clear()
    assert load(path).answer() == 42
    assert num_built(lines) == 2


@pytest.mark.parametrize("whose", ["the folder", "a folder above", "all may write it", "its group may write it"])
def test_a_folder_that_others_could_write_is_done_without(whose, tmp_path, folder, monkeypatch, caplog):
    lines = compiler(tmp_path, monkeypatch)
    path = source(tmp_path)
    folder.mkdir(mode=0o700)
    if whose == "all may write it":
        folder.chmod(0o777)
    elif whose == "its group may write it":
        folder.chmod(0o770)
        group = grp.getgrgid(os.lstat(folder).st_gid)
        shared = grp.struct_group([group.gr_name, group.gr_passwd, group.gr_gid, ["somebody"]])
        monkeypatch.setattr(grp, "getgrgid", {group.gr_gid: shared}.__getitem__)
    else:
        owned_by_another(monkeypatch, folder.name if whose == "the folder" else tmp_path.name)
    with caplog.at_level(logging.WARNING, "specpaged_kernels"):
        assert load(path).answer() == 42
    assert "answer is built for this process alone, as" in caplog.text
    assert num_built(lines) == 1
    assert not list(folder.iterdir())


def test_a_library_is_on_the_disk_before_it_has_its_name_and_the_name_before_it_is_used(tmp_path, folder, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        honest = getattr(os, name)
        monkeypatch.setattr(library_cache.os, name, lambda *args, n=name, f=honest: done.append(n) or f(*args))
    assert load(source(tmp_path)).answer() == 42
    assert done == ["fsync", "replace", "fsync"]


def test_a_group_of_the_users_own_may_write(tmp_path, folder, monkeypatch):
    lines = compiler(tmp_path, monkeypatch)
    path = source(tmp_path)
    folder.mkdir(mode=0o700)
    folder.chmod(0o770)
    own = grp.struct_group([pwd.getpwuid(os.geteuid()).pw_name, "x", os.lstat(folder).st_gid, []])
    monkeypatch.setattr(grp, "getgrgid", lambda _: own)
    assert load(path).answer() == 42
    assert len(libraries(folder)) == num_built(lines) == 1


def test_a_builder_who_is_stuck_is_not_waited_for(tmp_path, folder, monkeypatch, caplog):
    monkeypatch.setattr(library_cache, "LONGEST_BUILD", 0.2)
    path = source(tmp_path)
    with library_cache.LibraryCache(folder).lock("answer"), caplog.at_level(logging.WARNING, "specpaged_kernels"):
        assert stat.S_IMODE((folder / "answer.lock").stat().st_mode) == 0o600
        assert load(path).answer() == 42
    assert "for this process alone, as" in caplog.text
    assert "answer has been built by another process for 0.2 s" in caplog.text
    assert not libraries(folder)


def test_a_machine_without_a_folder_to_build_in_says_so(tmp_path, monkeypatch):
    path = source(tmp_path)
    monkeypatch.setenv("SPECPAGED_CACHE", str(path))  # a file
    monkeypatch.setattr(build.tempfile, "TemporaryDirectory", lambda **_: os.chdir(tmp_path / "nowhere"))
    load.cache_clear()
    with pytest.raises(BuildError, match=r"there is no folder to build in: .*No such file"):
        load(path)


def test_an_interpreter_without_a_file_builds_without_a_test(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    assert load(source(tmp_path)).answer() == 42
    assert len(libraries(folder)) == 1


def test_a_compiler_whose_words_are_no_utf_8_is_quoted_all_the_same(tmp_path, folder, monkeypatch):
    script = tmp_path / "compiler"
    script.write_bytes(b"#!/bin/sh\nprintf 'x: error: \\351t\\351\\n' >&2\nexit 1\n")
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(BuildError, match=r"compiler does not run: .t."):
        load(source(tmp_path))


def test_three_processes_at_once_build_it_once(tmp_path, folder, monkeypatch):
    lines = compiler(tmp_path, monkeypatch, before="sleep 0.5")
    path = source(tmp_path)
    processes = [loading(path) for _ in range(3)]
    assert [process.communicate()[0] for process in processes] == ["42\n"] * 3
    assert num_built(lines) == 1
    assert len(libraries(folder)) == 1


def test_what_a_killed_builder_has_left_is_cleaned_up(tmp_path, folder, monkeypatch):
    path = source(tmp_path)
    compiler(tmp_path, monkeypatch, before="touch $PWD/begun; sleep 60")
    monkeypatch.chdir(tmp_path)
    with loading(path) as process:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert len(list(folder.glob("*.building"))) == 1
    lines = compiler(tmp_path, monkeypatch)
    assert load(path).answer() == 42
    assert num_built(lines) == 1
    assert not list(folder.glob("*.building"))
    assert len(libraries(folder)) == 1


def test_versions_that_nobody_uses_any_more_are_removed(tmp_path, folder, monkeypatch):
    path = source(tmp_path)
    assert load(path).answer() == 42
    (oldest,) = libraries(folder)
    others = [folder / f"answer-{i:016x}.so" for i in range(library_cache.MOST_VERSIONS)]
    for age, other in enumerate(others, 1):
        other.write_bytes(b"")
        os.utime(other, (time.time() - 100 * age,) * 2)
    unrelated = folder / "question-0123.so"
    unrelated.write_bytes(b"")
    os.utime(unrelated, (1, 1))
    os.utime(oldest, (2, 2))
    load.cache_clear()
    assert load(path).answer() == 42  # which counts as use
    source(tmp_path, SOURCE.replace("42", "43"))
    load.cache_clear()
    assert load(path).answer() == 43
    assert set(libraries(folder)) >= {oldest, unrelated, *others[:-2]}
    assert not any(other.exists() for other in others[-2:])


def test_a_compiler_may_have_arguments(tmp_path, folder, monkeypatch):
    lines = compiler(tmp_path, monkeypatch)
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} -DANSWER=44 '-DTEXT=a b'")
    path = source(tmp_path, 'extern "C" int answer() { return ANSWER; }\n')
    assert load(path).answer() == 44
    assert "-DTEXT=a b" in lines.read_text()
    monkeypatch.setenv("CXX", os.environ["CXX"].replace("ANSWER=44", "ANSWER=45"))
    load.cache_clear()
    assert load(path).answer() == 45
    monkeypatch.setenv("CXX", "g++ '")
    load.cache_clear()
    with pytest.raises(BuildError, match=r"\$CXX=\"g\+\+ '\" is no command: No closing quotation"):
        load(path)


def test_what_cannot_be_loaded_is_found_in_a_child_and_not_kept(tmp_path, folder):
    path = source(tmp_path, 'extern int nowhere;\nextern "C" int answer() { return nowhere; }\n')
    with pytest.raises(BuildError, match=r"builds of answer\.cpp cannot be loaded: .*undefined symbol: nowhere"):
        load(path)
    assert not libraries(folder)
    dies = '#include <cstdlib>\nstatic int now = (abort(), 0);\nextern "C" int answer() { return now; }\n'
    load.cache_clear()
    with pytest.raises(BuildError, match="cannot be loaded: status -6"):
        load(source(tmp_path, dies))
    assert not libraries(folder)


def test_another_processor_has_another_library(tmp_path, folder, monkeypatch):
    path = source(tmp_path)
    assert load(path).answer() == 42
    monkeypatch.setattr(build, "FLAGS", tuple(flag for flag in build.FLAGS if flag != "-march=native"))
    load.cache_clear()
    assert load(path).answer() == 42
    assert len(libraries(folder)) == 2


def test_a_compiler_that_says_nothing_of_its_processor_is_not_used(tmp_path, folder, monkeypatch):
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexit 0\n")
    silent.chmod(0o700)
    monkeypatch.setenv("CXX", str(silent))
    with pytest.raises(BuildError, match="silent does not run: it says nothing of this processor"):
        load(source(tmp_path))


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
    assert [path.name for path in folder.glob("*")] == ["answer.lock"], "nothing is left behind"


@pytest.mark.parametrize("name", ["lstat", "mkdir"])
def test_a_folder_that_cannot_be_read_is_done_without(name, tmp_path, folder, monkeypatch, caplog):
    honest = getattr(os, name)

    def refusing(path, *arguments, **options):
        if str(path).startswith(str(folder)):
            raise PermissionError(13, "Permission denied")
        return honest(path, *arguments, **options)

    monkeypatch.setattr(os, name, refusing)
    with caplog.at_level(logging.WARNING, "specpaged_kernels"):
        assert load(source(tmp_path)).answer() == 42
    assert "Permission denied; SPECPAGED_CACHE=FOLDER names another" in caplog.text


def test_a_folder_that_is_only_read_serves_those_who_find_their_library(tmp_path, folder, monkeypatch):
    lines = compiler(tmp_path, monkeypatch)
    path = source(tmp_path)
    assert load(path).answer() == 42

    def refusing(*_arguments, **_options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(library_cache.os, "utime", refusing)
    monkeypatch.setattr(library_cache.tempfile, "mkstemp", refusing)
    load.cache_clear()
    assert load(path).answer() == 42
    assert num_built(lines) == 1
    source(tmp_path, SOURCE.replace("42", "43"))
    load.cache_clear()
    assert load(path).answer() == 43
    assert num_built(lines) == 2
    assert len(libraries(folder)) == 1


def test_a_user_without_a_home_builds_for_this_process(tmp_path, monkeypatch, caplog):
    for name in ("SPECPAGED_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cache_folder() is None
    load.cache_clear()
    with caplog.at_level(logging.WARNING, "specpaged_kernels"):
        assert load(source(tmp_path)).answer() == 42
    assert "there is no home to keep it in" in caplog.text


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


def test_a_machine_without_a_compiler_runs_on_torch_and_says_so(tmp_path, monkeypatch, caplog):
    from specpaged.modeling import backend

    monkeypatch.setattr(backend.library, "why_not", lambda dtype: "there is no C++ compiler")
    placement = (torch.device("cpu"), torch.float32, {(4, 2, 16)}, 16, 300, "exact")
    backend._warn_of_torch.cache_clear()
    with caplog.at_level(logging.WARNING, "specpaged"):
        for _ in range(2):
            assert backend.choose_backend("auto", *placement) == ("torch", "there is no C++ compiler")
    (record,) = caplog.records
    assert record.getMessage().endswith("several times slower than ours: there is no C++ compiler")
    with pytest.raises(ValueError, match="attention_backend='cpp' cannot be used: there is no C"):
        backend.choose_backend("cpp", *placement)
