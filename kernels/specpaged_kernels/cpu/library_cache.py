"""A folder of built libraries, which other processes share and other users must not have touched."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
        """Held by one process at a time, for all versions of a library; gone with its holder, however that ends."""
        import fcntl  # POSIX alone has it

        with open(self.folder / f"{stem}.lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

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
    # A group of the user's own, by the custom of most distributions, has the user's number.
    others = stat.S_IWOTH | (0 if status.st_gid in (0, os.geteuid()) else stat.S_IWGRP)
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path.name!r} belongs to user {status.st_uid}")
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(f"{path.name!r} is a symbolic link")
    if status.st_mode & others and not is_sticky_folder:
        raise PermissionError(f"others may write {path.name!r}")
