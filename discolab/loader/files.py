"""Files of a checkpoint that is being written: made with all their room, filled, and synced.

Errors of the system name the file that they are about (`writing`). A `Sink` puts boxes of tensors
into files that are there.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch

from ..runtime.interrupts import shield
from ..runtime.regions import array_of
from .arrangement import NewFile, Slot
from .catalog import Shape, c_strides
from .errors import CheckpointError
from .read import close_all

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
    """A descriptor, closed at the end of ``with``, and also if an interrupt comes before that.

    No `__del__`: a Ctrl-C that comes in one is lost, and one would be called after each use.
    """

    def __init__(self, path: str, flags: int) -> None:
        with shield():
            self._fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
            self._close = close_in_the_end(self, self._fd)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        with shield():
            self._close()


def close_in_the_end(owner: object, fd: int) -> Callable[[], object]:
    """Give what closes a descriptor; an owner that goes without having called it has it closed."""
    closer = weakref.finalize(owner, os.close, fd)
    closer.atexit = False
    return closer


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


# -- boxes of tensors ------------------------------------------------------------------------------


BLOCK = 16 << 20  # bytes written in one go: it can be stopped, and shows progress, between two
_LONG = 1 << 16  # bytes: shorter runs are copied through a mapping, if that is allowed


class Sink:
    """Data files, opened when they are first written to; used by one thread.

    Parameters
    ----------
    paths
        The files, which have their full size already.
    mapped
        Whether files may be mapped: not where other machines write to them at the same time.
    report
        Called with the number of bytes that have been written.
    """

    def __init__(
        self,
        paths: Sequence[str],
        mapped: bool = True,
        report: Callable[[int], None] | None = None,
    ) -> None:
        self._paths, self._mapped = paths, mapped
        self._report = report or (lambda _: None)
        self._fds: dict[int, int] = {}
        # where an interrupt comes before the end is reached
        weakref.finalize(self, close_all, self._fds).atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for number, fd in self._fds.items():
                    with writing(self._paths[number]):
                        os.fsync(fd)
        finally:
            with shield():
                close_all(self._fds)

    def put(self, slot: Slot, part: torch.Tensor, start: Shape) -> None:
        """Write a box of a tensor.

        Parameters
        ----------
        slot
            Where the whole tensor lies.
        part
            The box; of any dtype and device, cast to what is stored.
        start
            Where it begins in the whole tensor.

        Raises
        ------
        CheckpointError
            With the system's reason.
        """
        if not part.numel():
            return
        stored, shape = slot.record.stored, slot.record.shape
        strides = c_strides(shape)
        begin = sum(s * step for s, step in zip(start, strides, strict=True))
        offset = slot.offset + begin * stored.itemsize
        part = part.detach()
        with writing(self._paths[slot.file]):
            fd = self._open(slot.file)
            run = _run(shape, part.shape)
            if run == part.numel():
                self._write(fd, offset, part, stored)
            elif self._mapped and run * stored.itemsize < _LONG:
                self._copy(fd, offset, part, strides, stored)
            else:
                for at, row in _runs(part, run, strides):
                    self._write(fd, offset + at * stored.itemsize, row, stored)

    def _open(self, number: int) -> int:
        fd = self._fds.get(number)
        if fd is None:
            # no O_CREAT: what an abandoned save has removed must not come back
            try:
                with shield():  # an interrupt in between would leave it open
                    fd = os.open(self._paths[number], os.O_RDWR | os.O_CLOEXEC)
                    self._fds[number] = fd
            except FileNotFoundError:
                raise CheckpointError(
                    self._paths[number],
                    "is not there to be written to: all workers need the same file system, and "
                    "nothing else may empty the folder",
                ) from None
        return fd

    def _write(self, fd: int, offset: int, part: torch.Tensor, stored: torch.dtype) -> None:
        memory = array_of(_bytes(part, stored)).data
        done = 0
        while done < len(memory):
            wrote = os.pwrite(fd, memory[done : done + BLOCK], offset + done)
            done += wrote
            self._report(wrote)

    def _copy(
        self, fd: int, offset: int, part: torch.Tensor, strides: Shape, stored: torch.dtype
    ) -> None:
        """One strided copy into a mapping of the range that the box spans."""
        size = stored.itemsize
        span = sum((n - 1) * step for n, step in zip(part.shape, strides, strict=True)) + 1
        first = offset - offset % mmap.ALLOCATIONGRANULARITY
        memory = mmap.mmap(fd, offset + span * size - first, offset=first)
        try:
            # bytes, as elements may begin at odd offsets
            raw = torch.frombuffer(memory, dtype=torch.uint8, offset=offset - first)
            steps = (*(step * size for step in strides), 1)
            raw.as_strided((*part.shape, size), steps).copy_(
                _bytes(part, stored).view(*part.shape, size)
            )
            del raw
        finally:
            memory.close()
        self._report(part.numel() * size)


def md5_of(path: str) -> str:
    """The checksum of a file, in hexadecimal."""
    with writing(path), open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _bytes(part: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """The elements one after the other, as bytes in this machine's memory."""
    part = part.resolve_conj().resolve_neg()
    return part.to("cpu", stored).contiguous().reshape(-1).view(torch.uint8)


def _run(whole: Shape, part: Sequence[int]) -> int:
    """How many elements of a box follow each other in the whole."""
    run = 1
    for size, there in zip(reversed(whole), reversed(part), strict=True):
        run *= there
        if there != size:
            break
    return run


def _runs(part: torch.Tensor, run: int, strides: Shape) -> Iterator[tuple[int, torch.Tensor]]:
    """Its runs, and where each begins in the whole, in elements from the box's begin."""
    axis, inner = part.dim(), 1
    while inner < run:
        axis -= 1
        inner *= part.shape[axis]
    for place in itertools.product(*map(range, part.shape[:axis])):
        yield sum(p * step for p, step in zip(place, strides, strict=False)), part[place]
