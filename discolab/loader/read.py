"""Bytes of files into tensors: the only place where a tensor's bytes are read.

What lies in one run in a file and lands in one run of a tensor is read straight into that tensor's
memory; anything else (columns, another dtype) is one strided copy from a mapping of the file. Both
let go of Python's lock. On a GPU a block is put together in page-locked memory and sent from there,
while the next one is read.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap as _mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch

from ..layouts.layout import REPLICATE, Cut, Workers
from ..layouts.layout import cut as cut_of
from ..runtime.accelerators import current_stream, on_accelerator
from ..runtime.interrupts import plain_lock, shield
from .catalog import Copy, Entry, File, Shape, c_strides, copies
from .errors import CheckpointError

BLOCK = 16 << 20  # bytes in one go: a load can be stopped, and shows progress, between two
_STAGES = 2  # page-locked buffers of a thread that loads to a GPU

Report = Callable[[int], None]


class Files:
    """The files of a catalog, opened when they are first read; used by one thread.

    Parameters
    ----------
    files
        As the catalog has them.
    mmap
        False: files are read, never mapped. Slower for columns, but a file that shrinks while it is
        read is an error instead of the end of the process (SIGBUS).
    report
        Called with the number of bytes that have landed.
    fresh
        Whether tensors on the CPU are filled that nobody has touched yet. Each block of one is
        touched before it is read into: page faults inside of a read are a quarter slower.
    """

    def __init__(
        self,
        files: Sequence[File],
        mmap: bool = True,
        report: Report | None = None,
        fresh: bool = False,
    ) -> None:
        self._files = files
        self._fresh = fresh
        self._mmap = mmap
        self._report = report or (lambda _: None)
        self._fds: dict[int, int] = {}
        # of a load that fails on another worker, this one's files are dropped rather than closed
        weakref.finalize(self, close_all, self._fds).atexit = False
        self._maps: dict[int, _Mapping] = {}
        self._staging: _Staging | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def finish(self) -> None:
        """Wait for what is on its way to a GPU."""
        if self._staging is not None:
            self._staging.finish()

    def close(self) -> None:
        """Close the files, when all has landed."""
        self.finish()
        self._maps.clear()
        with shield():
            close_all(self._fds)

    def path_of(self, entry: Entry) -> str:
        """The file in which an entry begins."""
        return str(self._files[entry.pieces[0].file].path)

    def read(self, copy: Copy, stored: torch.dtype, into: torch.Tensor, name: str) -> None:
        """Copy a box of a file into the box of `into` that begins at `copy.at`, as `into`'s dtype.

        Raises
        ------
        CheckpointError
            If the file is not there, or not as long as it was when its index was read.
        """
        box = into[tuple(slice(a, a + n) for a, n in zip(copy.at, copy.shape, strict=True))]
        straight = copy.contiguous and box.is_contiguous() and stored == into.dtype
        if on_accelerator(into.device):
            self._stage(copy, stored, box, name)
        elif straight:
            self._pread(copy.file, copy.offset, box.reshape(-1).view(torch.uint8), name)
        else:
            for start, shape in _blocks(copy.shape, stored.itemsize):
                part = box[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]
                part.copy_(self._source(copy, stored, start, shape, name))
                self._report(part.numel() * part.element_size())

    def _stage(self, copy: Copy, stored: torch.dtype, box: torch.Tensor, name: str) -> None:
        if self._staging is None:
            self._staging = _Staging(box.device)
        for start, shape in _blocks(copy.shape, stored.itemsize):
            part = box[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]
            with self._staging.buffer(shape, stored) as buffer:
                if copy.contiguous:
                    into = sum(s * step for s, step in zip(start, copy.strides, strict=True))
                    offset = copy.offset + into * stored.itemsize
                    self._pread(copy.file, offset, buffer.reshape(-1).view(torch.uint8), name, 0)
                else:
                    buffer.copy_(self._source(copy, stored, start, shape, name))
                part.copy_(buffer, non_blocking=True)
            self._report(part.numel() * part.element_size())

    # -- one way in: the bytes, read -----------------------------------------------------------

    def _pread(
        self, file: int, offset: int, into: torch.Tensor, name: str, counts: int = 1
    ) -> None:
        """Fill a vector of bytes from the file."""
        fd = self._open(file, name)
        # Not into.numpy(): torch would refuse for good to resize the storage, as FSDP does.
        memory = memoryview((ctypes.c_char * len(into)).from_address(into.data_ptr()))
        done = 0
        while done < len(memory):
            if self._fresh:
                into[done : done + BLOCK : _mmap.PAGESIZE] = 0
            got = os.preadv(fd, [memory[done : done + BLOCK]], offset + done)
            if got <= 0:
                self._checked(file, fd, name)
                raise CheckpointError(
                    self._files[file].path,
                    f"ends at byte {offset + done:,}, {len(memory) - done:,} bytes too early",
                    name,
                )
            done += got
            self._report(got * counts)

    # -- the other: a tensor over the mapped file ----------------------------------------------

    def _source(
        self, copy: Copy, stored: torch.dtype, start: Shape, shape: Shape, name: str
    ) -> torch.Tensor:
        """A part of a box as it lies in the file."""
        into = sum(s * step for s, step in zip(start, copy.strides, strict=True))
        offset = copy.offset + into * stored.itemsize
        reach = sum((n - 1) * step for n, step in zip(shape, copy.strides, strict=True)) + 1
        if self._mmap and offset % stored.itemsize == 0:
            whole = self._map(copy.file, name)
            span = whole[offset : offset + reach * stored.itemsize]
        else:
            # no mapping, or elements at odd places in it: a copy of the run that has them all
            span = torch.empty(reach * stored.itemsize, dtype=torch.uint8)
            self._pread(copy.file, offset, span, name, 0)
        return span.view(stored).as_strided(shape, copy.strides)

    def _map(self, file: int, name: str) -> torch.Tensor:
        found = self._maps.get(file)
        if found is None:
            fd = self._open(file, name)
            found = self._maps[file] = _mapping(fd, self._checked(file, fd, name))
        return found.memory

    def _open(self, file: int, name: str) -> int:
        fd = self._fds.get(file)
        if fd is None:
            path = self._files[file].path
            try:
                with shield():  # an interrupt in between would leave it open
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                    self._fds[file] = fd
            except OSError as exc:
                raise CheckpointError(
                    path, f"can't be opened on this worker: {exc.strerror}", name
                ) from None
            self._checked(file, fd, name)
        return fd

    def _checked(self, file: int, fd: int, name: str) -> os.stat_result:
        """What the system says of a file that is still the one of the catalog."""
        facts = os.fstat(fd)
        why = self._files[file].why_another(facts)
        if why:
            raise CheckpointError(self._files[file].path, why, name)
        return facts


def close_all(fds: dict[int, int]) -> None:
    """Close file descriptors, and forget them."""
    while fds:
        os.close(fds.popitem()[1])


class _Mapping:
    """A file in memory. Private and writable, though never written: torch takes no other."""

    def __init__(self, fd: int, size: int) -> None:
        flags = _mmap.MAP_PRIVATE | getattr(_mmap, "MAP_NORESERVE", _NORESERVE)
        memory = _mmap.mmap(fd, size, flags=flags, prot=_mmap.PROT_READ | _mmap.PROT_WRITE)
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)


_mappings: weakref.WeakValueDictionary[tuple[int, ...], _Mapping] = weakref.WeakValueDictionary()
_mapping_lock = plain_lock()  # guards `_mappings`
_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # Python 3.11 and 3.12 do not have its name


def _mapping(fd: int, facts: os.stat_result) -> _Mapping:
    """The file's mapping: one for all threads, as each would pay for its pages anew."""
    key = facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns
    with _mapping_lock:
        found = _mappings.get(key)
        if found is None:
            found = _mappings[key] = _Mapping(fd, facts.st_size)
        return found


def fill(files: Files, entry: Entry, cut: Cut, into: torch.Tensor) -> None:
    """Read what a worker holds of a parameter into its tensor, zeros where there is nothing.

    Parameters
    ----------
    into
        Of shape `cut.shape` and any dtype and device. Of a dtype other than the entry's, elements
        are cast as `Tensor.copy_` does.

    Raises
    ------
    CheckpointError
        As `Files.read`.
    """
    if cut.padded:
        into.zero_()
    for copy in copies(entry, cut):
        files.read(copy, entry.stored, into, entry.name)


def whole(entry: Entry) -> Cut:
    """The cut of one that holds all of a parameter."""
    found = cut_of(REPLICATE, entry.shape, Workers((1,)), 0)
    assert found is not None
    return found


def read_entry(
    files: Files,
    entry: Entry,
    cut: Cut | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Read a parameter, or what one worker holds of it, into a new tensor. Raises as `fill`."""
    cut = cut or whole(entry)
    into = new_tensor(files, entry, cut.shape, dtype or entry.dtype, device)
    fill(files, entry, cut, into)
    return into


def new_tensor(
    files: Files, entry: Entry, shape: Shape, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Make room for what a worker holds of a parameter.

    Raises
    ------
    CheckpointError
        If there is not so much memory.
    """
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as exc:  # the allocators', of which some say "out of memory"
        size = math.prod(shape) * dtype.itemsize
        where = "" if str(device) == "cpu" else f" on {device}"
        raise CheckpointError(
            files.path_of(entry),
            f"there is no memory{where} for the {size:,} bytes of it that this worker holds",
            entry.name,
        ) from exc


def _blocks(shape: Shape, itemsize: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a box in boxes of some `BLOCK` bytes: begin and shape of each."""
    if not shape:
        yield (), ()
        return
    inner = c_strides(shape)
    # the first dimension of which one step is no more than a block
    axis = next(
        i for i, step in enumerate(inner) if step * itemsize <= BLOCK or i == len(shape) - 1
    )
    rows = max(1, BLOCK // max(1, inner[axis] * itemsize))
    for lead in itertools.product(*map(range, shape[:axis])):
        for begin in range(0, shape[axis], rows):
            size = min(rows, shape[axis] - begin)
            rest = shape[axis + 1 :]
            yield (*lead, begin, *(0 for _ in rest)), (*(1 for _ in lead), size, *rest)


class _Staging:
    """Page-locked buffers, used in turn: one is read into while another is sent."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)
        self._device = device
        self._buffers = [torch.empty(BLOCK, dtype=torch.uint8).pin_memory() for _ in range(_STAGES)]
        self._sent: list[Any] = [None] * _STAGES
        self._turn = 0

    def buffer(self, shape: Shape, dtype: torch.dtype) -> _Turn:
        """The next buffer, once what was in it has been sent."""
        self._turn = (self._turn + 1) % _STAGES
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._buffers[self._turn]):  # one row of a tensor can be larger
            self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8).pin_memory()
        return _Turn(self, self._buffers[self._turn][:size].view(dtype).view(shape))

    def finish(self) -> None:
        """Wait until all has been sent."""
        self._stream.synchronize()


class _Turn:
    """One use of a buffer: copies in the block run on the stream of `_Staging`."""

    def __init__(self, staging: _Staging, buffer: torch.Tensor) -> None:
        self._staging, self._buffer = staging, buffer
        self._stream = staging._stream

    def __enter__(self) -> torch.Tensor:
        staging = self._staging
        # the tensor that is filled was made, and zeroed, on the worker's stream
        staging._stream.wait_stream(current_stream(staging._device))
        self._stream.__enter__()
        return self._buffer

    def __exit__(self, *exc: Any) -> None:
        staging = self._staging
        staging._sent[staging._turn] = staging._stream.record_event()
        self._stream.__exit__(*exc)
