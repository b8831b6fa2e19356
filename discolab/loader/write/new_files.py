"""Files that come to be, with all their room and on the disk, and errors that name them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ...runtime.interrupts import shield
from ..errors import CheckpointError
from .records import NewFile

_ZEROS = 1 << 20  # bytes in one go, where the system has no call for it


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Say of errors of the system which file they are about.

    Raises
    ------
    CheckpointError
        For any `OSError` in the block.
    """
    try:
        yield
    except OSError as exc:
        file = exc.filename if isinstance(exc.filename, str) else path
        raise CheckpointError(file, f"can't be written: {exc.strerror or exc}") from exc


class _Opened:
    """A descriptor, closed at the end of ``with``, and also if an interrupt comes before that."""

    def __init__(self, path: str, flags: int) -> None:
        self._fd = -1
        with shield():
            self._fd = os.open(path, flags | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        with shield():
            self.__del__()

    def __del__(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def create_file(path: str, file: NewFile) -> None:
    """A file with all its room, so that a full disk is found out before anything is written."""
    with _Opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        if file.size:
            _allocate(fd, file.size)
        pwrite_all(fd, file.head, 0)


def _allocate(fd: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    zeros = bytes(min(size, _ZEROS))
    for offset in range(0, size, _ZEROS):
        pwrite_all(fd, zeros[: size - offset], offset)


def write_new(path: str, content: bytes) -> None:
    """A small file that is not there yet; on the disk at the end."""
    with _Opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        pwrite_all(fd, content, 0)
        os.fsync(fd)


def pwrite_all(fd: int, content: bytes, offset: int) -> None:
    """As `os.pwrite`, however many calls it takes."""
    view = memoryview(content)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def sync_folder(folder: str) -> None:
    """Have the names in a folder on the disk."""
    with _Opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        try:
            os.fsync(fd)
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some file systems can't
                raise


def remove(folder: str, names: Iterable[str]) -> None:
    """Remove files of a folder, as far as that can be done."""
    for name in names:
        try:
            os.unlink(os.path.join(folder, name))
        except OSError:
            pass  # it has not come to be, or the next save clears it
