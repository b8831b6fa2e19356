"""Frames: what travels on a connection. One header, a body, and parts that are large as a rule.

    2s   b"DL"
    u8   version
    u8   kind
    u16  number of parts, the body among them
    u16  0, or the number of the shared buffer that the sender wants to use again

    BARE     the body: what follows
    PARTS    parts x (u64 size in bytes, i64 place)     place -1: here, else an offset in the buffer
             the parts that are here, one after the other
    MANY     the same, of three parts: the body, the sizes of all others, and they in one
    BUNDLE   u32 sizes of several frames, and they one after the other
    HELLO    which peer has connected (see `handshake`)

A *shared buffer* is memory that travels as a file descriptor beside the frame, within one machine:
what is large is written to it once, sealed where the system can do that, and mapped by the
receiver, which gets a private copy-on-write view. It has no name, goes with the last process that
holds it, however that ends. Writing to new memory costs more than the copy itself, so a sender
keeps its buffers in a `BufferPool` and writes to one again once its receiver holds nothing of it.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import resource
import struct
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..runtime.errors import DiscoError
from ..runtime.interrupts import plain_lock
from .loop import PORTABLE

KEEP_FREE = 10.0  # seconds for which a free buffer is kept
INLINE = 16_384  # bytes of one part that still go within a frame
LARGEST = 60_000  # bytes of a frame that goes with a shared buffer
MOST_PARTS = 1000  # in the header; more go as one
VERSION = 2  # of all that is said between processes
BARE, PARTS, MANY, BUNDLE, HELLO = range(5)
HEADER = struct.Struct("<2sBBHH")
MAGIC = b"DL"
_BARE = HEADER.pack(MAGIC, VERSION, BARE, 1, 0)
_SIZE = HEADER.size
_PART = struct.Struct("<Qq")
_ALIGN = 64  # bytes; where a part begins in a buffer

_FIXED = _SEALED = 0
if not PORTABLE:
    _FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    _SEALED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class FrameError(DiscoError):
    """What came on a connection is no frame; the connection is of no use any more."""


def new_memory() -> int:
    """A descriptor of memory without a name, that another process can map too."""
    if not PORTABLE:
        return os.memfd_create("discolab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        return os.dup(file.fileno())


class SharedBuffer:
    """Memory with a file descriptor; closes it in the end."""

    __slots__ = ("fd", "memory", "number")

    def __init__(self, parts: Sequence[Any], number: int = 0) -> None:
        self.number = number  # of one that is used again; it stays writable
        self.memory: torch.Tensor | None = None  # that one's, once it has been used again
        self.fd = new_memory()
        for part in parts:
            _write(self.fd, part)
        if not PORTABLE:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _FIXED if number else _FIXED | _SEALED)

    def write_again(self, parts: Sequence[Any], room: int) -> None:
        """Put other parts in it: its memory is there already."""
        if self.memory is None:
            self.memory = torch.frombuffer(mmap.mmap(self.fd, room), dtype=torch.uint8)
        at = 0
        for part in parts:
            size = memoryview(part).nbytes
            if size:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # it may be read-only, and is only read
                    source = torch.frombuffer(part, dtype=torch.uint8)
                self.memory[at : at + size].copy_(source)  # without the GIL
            at += size

    def __del__(self) -> None:
        try:
            os.close(self.fd)
        except (AttributeError, OSError):
            pass


class _Mapping(mmap.mmap):
    """Mapped memory that can be watched."""


class BufferPool:
    """Shared buffers that one process sends to one other, and uses again; `lock` guards them.

    A buffer is free once its receiver has said so (`free`). `tidy` closes those that were not
    wanted for a while.
    """

    def __init__(self) -> None:
        self.lock = plain_lock()
        self._free: dict[int, tuple[SharedBuffer, int, float]] = {}
        self._lent: dict[int, tuple[SharedBuffer, int]] = {}
        self._numbers = itertools.cycle(range(1, 1 << 16))

    def take(self, parts: Sequence[Any], size: int) -> SharedBuffer:
        """A buffer with `parts` in it, `size` bytes together; lent until it is freed."""
        with self.lock:
            fitting = [n for n, (_, room, _) in self._free.items() if size <= room <= 2 * size]
            kept = self._free.pop(min(fitting, key=lambda n: self._free[n][1])) if fitting else None
        if kept is not None:
            buffer, room, _ = kept
            buffer.write_again(parts, room)
        else:
            with self.lock:
                used = (self._lent, self._free)
                number = next(n for n in self._numbers if not any(n in one for one in used))
            buffer, room = SharedBuffer(parts, number), size
        with self.lock:
            self._lent[buffer.number] = buffer, room
        return buffer

    @property
    def lent(self) -> int:
        """How many buffers receivers hold."""
        return len(self._lent)

    def free(self, number: int) -> None:
        """The receiver holds nothing of a buffer any more."""
        with self.lock:
            lent = self._lent.pop(number, None)
            if lent is not None:
                self._free[number] = (*lent, time.monotonic())

    def tidy(self) -> None:
        """Close what has been free for long."""
        if self._free:
            before = time.monotonic() - KEEP_FREE
            with self.lock:
                for number in [n for n, (_, _, since) in self._free.items() if since < before]:
                    del self._free[number]


class Frame:
    """A frame ready to be sent: bytes, and perhaps a shared buffer that goes with them."""

    __slots__ = ("buffer", "data")

    def __init__(self, data: bytes, buffer: SharedBuffer | None = None) -> None:
        self.data = data
        self.buffer = buffer


def pack(
    body: bytes,
    parts: Sequence[Any] = (),
    shared: bool = False,
    pool: BufferPool | None = None,
) -> Frame:
    """Make a frame; with `shared`, large parts go in a shared buffer, from `pool` if given.

    Raises
    ------
    OSError
        If there is no memory for the buffer.
    """
    if not parts and (len(body) <= INLINE or not shared):
        return Frame(_BARE + body)
    kind = PARTS
    if len(parts) > MOST_PARTS:
        kind, parts = MANY, _gather(parts)
    count = 1 + len(parts)
    here: list[Any] = []
    apart: list[Any] = []
    heads = []
    offset = room = 0
    for part in (body, *parts):
        size = len(part) if type(part) is bytes else memoryview(part).nbytes
        if shared and (size > INLINE or room + size > LARGEST - 16 * count - 64):
            heads.append(_PART.pack(size, offset))
            padding = -size % _ALIGN
            apart += [part, bytes(padding)] if padding else [part]
            offset += size + padding
        else:
            heads.append(_PART.pack(size, -1))
            here.append(part)
            room += size
    buffer = None
    if apart:
        buffer = pool.take(apart, offset) if pool is not None else SharedBuffer(apart)
    number = buffer.number if buffer is not None else 0
    head = HEADER.pack(MAGIC, VERSION, kind, count, number)
    return Frame(b"".join([head, *heads, *here]), buffer)


def _gather(parts: Sequence[Any]) -> list[Any]:
    """Very many parts as two: their sizes, and all of them."""
    sizes = [memoryview(part).nbytes for part in parts]
    aligned: list[Any] = []
    for part, size in zip(parts, sizes, strict=True):
        aligned += (part, bytes(-size % _ALIGN))
    return [struct.pack(f"<{len(sizes)}Q", *sizes), b"".join(aligned)]


def _scatter(parts: list[Any]) -> list[Any]:
    """What `_gather` was given."""
    if len(parts) != 2 or len(parts[0]) % 8:
        raise FrameError("a frame of many parts has no sizes of them")
    whole, at, scattered = memoryview(parts[1]), 0, []
    for size in struct.unpack(f"<{len(parts[0]) // 8}Q", parts[0]):
        scattered.append(whole[at : at + size])
        at += size + -size % _ALIGN
    if at != len(whole):
        raise FrameError(f"many parts of {at} bytes are in a frame of {len(whole)}")
    return scattered


def bundle(frames: Sequence[Frame]) -> list[Frame]:
    """Frames as few larger ones, for `unbundle`; one with a buffer stays by itself."""
    bundles: list[Frame] = []
    some: list[bytes] = []
    size = 0
    for frame in frames:
        apart = frame.buffer is not None
        if some and (apart or size + len(frame.data) > LARGEST // 2):
            bundles.append(_bundle(some))
            some, size = [], 0
        if apart:
            bundles.append(frame)
            continue
        some.append(frame.data)
        size += len(frame.data) + 4
    if some:
        bundles.append(_bundle(some))
    return bundles


def _bundle(some: Sequence[bytes]) -> Frame:
    if len(some) == 1:
        return Frame(some[0])
    sizes = struct.pack(f"<{len(some)}I", *map(len, some))
    head = HEADER.pack(MAGIC, VERSION, BUNDLE, len(some), 0)
    return Frame(b"".join([head, sizes, *some]))


def unbundle(data: Any) -> list[Any]:
    """The frames in what was received, one as a rule.

    Raises
    ------
    FrameError
        If the sizes do not fit.
    """
    if len(data) < _SIZE or data[3] != BUNDLE or data[:2] != MAGIC:
        return [data]
    count = HEADER.unpack_from(data)[3]
    at = _SIZE + 4 * count
    if at > len(data):
        raise FrameError(f"a bundle of {len(data)} bytes claims to have {count} frames")
    frames = []
    for size in struct.unpack_from(f"<{count}I", data, _SIZE):
        frames.append(data[at : at + size])
        at += size
    if at != len(data):
        raise FrameError(f"a bundle of {len(data)} bytes has frames of {at} bytes")
    return frames


def unload(frame: Frame) -> tuple[bytes, bytes]:
    """A frame with a buffer as bytes: the frame, and what the buffer held; for `reload`."""
    assert frame.buffer is not None
    with mmap.mmap(frame.buffer.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
        content = memory[:]
    magic, version, kind, count, _ = HEADER.unpack_from(frame.data)
    return HEADER.pack(magic, version, kind, count, 0) + frame.data[_SIZE:], content


def reload(data: bytes, content: bytes) -> Frame:
    """The frame again, with a buffer of its own."""
    return Frame(data, SharedBuffer([content]))


def unpack(
    data: Any,
    fd: int | None = None,
    dropped: Callable[[int], None] | None = None,
    copied: bool = False,
) -> tuple[Any, list[Any]]:
    """The body and the parts of a frame, as views on `data` and on the buffer; closes `fd`.

    `dropped` is called with a buffer's number, on any thread, once nothing of it is held here.
    Each buffer that is held takes a file descriptor, here and in its sender. So once half of those
    that this process may have are taken, what is in a buffer is copied; with `copied`, what is in
    one without a number always is.

    Raises
    ------
    FrameError
        If the frame is malformed.
    """
    if fd is None and data[:_SIZE] == _BARE:  # as nearly all are
        return data[_SIZE:], []
    total = len(data)
    head = HEADER.unpack_from(data) if total >= _SIZE else (b"", 0, 0, 0, 0)
    magic, version, kind, count, number = head
    mapping: Any = None
    try:
        if fd is not None:
            size = os.fstat(fd).st_size
            if size and ((copied and not number) or _are_many_open(fd)):
                mapping = _read(fd, size)
                if dropped is not None and number:
                    dropped(number)
            elif size:
                held = _Mapping(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
                if dropped is not None and number:
                    weakref.finalize(held, dropped, number).atexit = False
                mapping = memoryview(held)
    finally:
        if fd is not None:
            os.close(fd)
    if total < _SIZE:
        raise FrameError(f"a frame of {total} bytes has no header")
    if magic != MAGIC or version != VERSION:
        raise FrameError(f"a frame does not begin as ours do: {bytes(data[:8])!r}")
    place = _SIZE + count * _PART.size
    if kind not in (PARTS, MANY) or not count or place > total:
        raise FrameError(f"a frame of {total} bytes and kind {kind} claims to have {count} parts")
    view = memoryview(data)
    parts: list[Any] = []
    for index in range(count):
        size, offset = _PART.unpack_from(data, _SIZE + index * _PART.size)
        whole, start = (view, place) if offset == -1 else (mapping, offset)
        if offset != -1 and fd is None:
            raise FrameError(
                "the shared memory of a frame did not arrive, as it does where a process has as "
                f"many files open as it may ({_most_descriptors()}, see ulimit -n)"
            )
        if whole is None or start < 0 or size > len(whole) - start:
            raise FrameError(f"part {index} of a frame claims {size} bytes that are not there")
        parts.append(whole[start : start + size])
        if offset == -1:
            place += size
    if place != total:
        raise FrameError(f"a frame of {total} bytes has {total - place} too many")
    body, *rest = parts
    return body, _scatter(rest) if kind == MANY else rest


def _most_descriptors() -> int:
    """How many files this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _are_many_open(fd: int) -> bool:
    """Whether half of the files are open that this process may have; a new one gets the lowest
    number that is free, and `fd` has come where one was free before.
    """
    try:
        another = os.dup(fd)
    except OSError:
        return True
    os.close(another)
    return another > _most_descriptors() // 2


def _read(fd: int, size: int) -> memoryview:
    whole = memoryview(bytearray(size))
    at = 0
    while at < size:
        count = os.preadv(fd, [whole[at : at + (1 << 30)]], at)
        if not count:
            raise FrameError(f"a buffer of {size} bytes has no more than {at}")
        at += count
    return whole


def _write(fd: int, part: Any) -> None:
    view = memoryview(part).cast("B") if type(part) is not bytes else memoryview(part)
    while view:
        view = view[os.write(fd, view[: 1 << 30]) :]
