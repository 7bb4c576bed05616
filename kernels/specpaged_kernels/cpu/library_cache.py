"""A folder of built libraries, which other processes share and other users must not have touched."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LONGEST_BUILD = 600.0  # seconds: what takes longer is stuck
MOST_VERSIONS = 8  # of a library that are kept: other checkouts, compilers and processors of a shared home
_DIGEST_SIZE = hashlib.sha256().digest_size


class LibraryCache:
    """Libraries by name, of which a name says all that the library was built from.

    An entry is the library with the SHA-256 of its bytes behind them, which a loader does not read: a file that was
    cut, or that nobody finished, is no entry. Nor is one that another user could have written. All methods may raise
    OSError; PermissionError where the folder is another user's to write.
    """

    def __init__(self, folder: Path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder.resolve()
        for path in (self.folder, *self.folder.parents):
            _check_is_ours(path)

    def find(self, name: str) -> Path | None:
        """The entry of this name."""
        path = self.folder / name
        try:
            _check_is_ours(path)
            content = path.read_bytes()
        except (FileNotFoundError, PermissionError):
            return None
        if content[-_DIGEST_SIZE:] != hashlib.sha256(content[:-_DIGEST_SIZE]).digest():
            return None
        with contextlib.suppress(OSError):  # of a folder that is only read
            os.utime(path)  # so that `prune` sees who is used
        return path

    @contextlib.contextmanager
    def lock(self, stem: str) -> Iterator[None]:
        """Held by one process at a time, for all versions of a library; gone with its holder, however that ends.

        TimeoutError, which is an OSError, if nobody gives it away within LONGEST_BUILD seconds.
        """
        import fcntl  # POSIX alone has it

        handle = os.open(self.folder / f"{stem}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = time.monotonic() + LONGEST_BUILD
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{stem} has been built by another process for {LONGEST_BUILD} s") from None
                    time.sleep(0.05)
            yield
        finally:
            os.close(handle)

    def new_file(self, stem: str) -> Path:
        """An empty file to build into, under the lock. What a killed builder has left is removed first."""
        for left in self.folder.glob(f"{stem}-*.building"):
            left.unlink(missing_ok=True)
        handle, path = tempfile.mkstemp(prefix=f"{stem}-", suffix=".building", dir=self.folder)
        os.close(handle)
        return Path(path)

    def add(self, built: Path, name: str) -> Path:
        """Makes a file of `new_file` the entry of this name: a power cut leaves all of it or nothing."""
        content = built.read_bytes()
        with open(built, "ab") as file:
            file.write(hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        built.chmod(0o700)
        path = self.folder / name
        os.replace(built, path)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return path

    def prune(self, stem: str) -> None:
        """Removes all but the versions of a library that were used last, under the lock."""
        versions = sorted(self.folder.glob(f"{stem}-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in versions[MOST_VERSIONS:]:
            path.unlink(missing_ok=True)


def _check_is_ours(path: Path) -> None:
    """Raises PermissionError where somebody but this user and root could write, or replace, what lies there.

    A folder that many write to is safe where it is sticky, as /tmp is: there one renames and removes one's own.
    """
    status = os.lstat(path)
    is_sticky_folder = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    others = stat.S_IWOTH | (stat.S_IWGRP if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid) else 0)
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path.name!r} belongs to user {status.st_uid}")
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(f"{path.name!r} is a symbolic link")
    if status.st_mode & others and not is_sticky_folder:
        raise PermissionError(f"others may write {path.name!r}")


def _is_own_group(group_id: int) -> bool:
    """Whether this user is alone in a group, as by the custom of most distributions everybody has one of his name."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(group_id), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
