"""Messages as bytes on a line: one header, the body, the frames.

    u32  magic and version
    u16  number of parts: the body and the frames
    u16  0, or the number of the segment that the sender wants to use again
    parts x (u64 size in bytes, i64 place)      place -1: here, else an offset in the segment
    the parts that are here, one after the other

A *segment* is memory that travels as a file descriptor beside the message, where the transport can
do that (Linux, one machine): what is large is written to it once, sealed, and mapped by whoever
receives it, each a private copy-on-write view. It has no name and goes with the last who holds it,
however that ends. Writing to new memory costs more than the copy itself, so a worker keeps segments
in a `SegmentPool` and writes to one again once its receiver holds nothing of it any more.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...runtime.errors import DiscoError

MAGIC = 0x0144_4C31  # "1LD", version 1
KEEP_FREE = 10.0  # seconds for which a segment that nobody uses is kept
BUNDLE = 0x0144_4C42  # "BLD", version 1: several messages, each with its size before them
INLINE = 16_384  # bytes of one part that still go inside of a message
LARGEST = 60_000  # bytes of a message on a local line
MOST_PARTS = 4096
_ALIGN = 64  # bytes; where a part begins in a segment

_HEAD = struct.Struct("<IHH")
_PART = struct.Struct("<Qq")
_ONE = struct.Struct("<IHHQq")  # the head of a message with one part

HAVE_SEGMENTS = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
_FIXED = _SEALED = 0
if HAVE_SEGMENTS:
    _FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    _SEALED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class LineError(DiscoError):
    """What came over a line is no message; the line is of no use any more."""


class Segment:
    """Sealed memory with a file descriptor; closes it in the end."""

    __slots__ = ("fd", "memory", "number")

    def __init__(self, parts: Sequence[Any], number: int = 0) -> None:
        self.number = number  # of one that is used again; it stays writable
        self.memory: torch.Tensor | None = None  # that one's, once it has been used again
        self.fd = os.memfd_create("discolab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        for part in parts:
            _write(self.fd, part)
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


class SegmentPool:
    """Segments that one process sends to one other, and uses again; `lock` guards them.

    A segment is free once its receiver has said so (`free`); free ones are let go of when they have
    not been wanted for a while (`tidy`).
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._free: dict[int, tuple[Segment, int, float]] = {}
        self._lent: dict[int, tuple[Segment, int]] = {}
        self._numbers = itertools.cycle(range(1, 1 << 16))

    def take(self, parts: Sequence[Any], size: int) -> Segment:
        """A segment with `parts` in it, `size` bytes together; lent until it is freed."""
        with self.lock:
            fitting = [n for n, (_, room, _) in self._free.items() if size <= room <= 2 * size]
            found = (
                self._free.pop(min(fitting, key=lambda n: self._free[n][1])) if fitting else None
            )
        if found is not None:
            segment, room, _ = found
            segment.write_again(parts, room)
        else:
            number = next(n for n in self._numbers if n not in self._lent and n not in self._free)
            segment, room = Segment(parts, number), size
        with self.lock:
            self._lent[segment.number] = segment, room
        return segment

    @property
    def lent(self) -> int:
        """How many segments receivers hold."""
        return len(self._lent)

    def free(self, number: int) -> None:
        """Its receiver holds nothing of it any more."""
        with self.lock:
            found = self._lent.pop(number, None)
            if found is not None:
                self._free[number] = (*found, time.monotonic())

    def tidy(self) -> None:
        """Let go of what has been free for long."""
        if self._free:
            before = time.monotonic() - KEEP_FREE
            with self.lock:
                for number in [n for n, (_, _, since) in self._free.items() if since < before]:
                    del self._free[number]


class Parcel:
    """A message ready to be sent: bytes, and perhaps a segment that goes with them."""

    __slots__ = ("data", "segment")

    def __init__(self, data: bytes, segment: Segment | None = None) -> None:
        self.data = data
        self.segment = segment


def pack(
    body: bytes,
    frames: Sequence[Any] = (),
    segments: bool = False,
    pool: SegmentPool | None = None,
) -> Parcel:
    """Make a parcel of a message; with `segments`, large parts go in one, from `pool` if given.

    Raises
    ------
    OSError
        If there is no memory for the segment.
    """
    if not frames and (len(body) <= INLINE or not segments):
        return Parcel(_ONE.pack(MAGIC, 1, 0, len(body), -1) + body)
    parts = [body, *frames]
    sizes = [len(part) if type(part) is bytes else memoryview(part).nbytes for part in parts]
    here: list[Any] = []
    apart: list[Any] = []
    heads = []
    offset = room = 0
    for part, size in zip(parts, sizes, strict=True):
        if segments and (size > INLINE or room + size > LARGEST - 16 * len(parts) - 64):
            heads.append(_PART.pack(size, offset))
            padding = -size % _ALIGN
            apart += [part, bytes(padding)] if padding else [part]
            offset += size + padding
        else:
            heads.append(_PART.pack(size, -1))
            here.append(part)
            room += size
    segment = None
    if apart:
        segment = pool.take(apart, offset) if pool is not None else Segment(apart)
    number = segment.number if segment is not None else 0
    return Parcel(b"".join([_HEAD.pack(MAGIC, len(parts), number), *heads, *here]), segment)


def has_segment(data: Any) -> bool:
    """Whether a segment goes with the bytes of a parcel of one part."""
    return len(data) >= _ONE.size and bool(_ONE.unpack_from(data)[4] != -1)


def bundle(parcels: Sequence[Parcel]) -> list[Parcel]:
    """Parcels as few larger ones, for `unbundle`; one with a segment stays by itself."""
    bundles: list[Parcel] = []
    some: list[bytes] = []
    size = 0
    for parcel in parcels:
        apart = parcel.segment is not None
        if some and (apart or size + len(parcel.data) > LARGEST // 2):
            bundles.append(_bundle(some))
            some, size = [], 0
        if apart:
            bundles.append(parcel)
            continue
        some.append(parcel.data)
        size += len(parcel.data) + 4
    if some:
        bundles.append(_bundle(some))
    return bundles


def _bundle(some: Sequence[bytes]) -> Parcel:
    if len(some) == 1:
        return Parcel(some[0])
    sizes = struct.pack(f"<{len(some)}I", *map(len, some))
    return Parcel(b"".join([_HEAD.pack(BUNDLE, len(some), 0), sizes, *some]))


def unbundle(data: Any) -> list[Any]:
    """The messages in what has come, one as a rule.

    Raises
    ------
    LineError
        If the sizes do not fit.
    """
    if len(data) < _HEAD.size or _HEAD.unpack_from(data)[0] != BUNDLE:
        return [data]
    count = _HEAD.unpack_from(data)[1]
    at = _HEAD.size + 4 * count
    if at > len(data):
        raise LineError(f"a bundle of {len(data)} bytes claims to have {count} messages")
    found = []
    for size in struct.unpack_from(f"<{count}I", data, _HEAD.size):
        found.append(data[at : at + size])
        at += size
    if at != len(data):
        raise LineError(f"a bundle of {len(data)} bytes has messages of {at} bytes")
    return found


def unload(parcel: Parcel) -> tuple[bytes, bytes]:
    """A parcel with a segment as bytes: the message, and what the segment held; for `reload`."""
    segment = parcel.segment
    assert segment is not None
    with mmap.mmap(segment.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
        content = memory[:]
    magic, count, _ = _HEAD.unpack_from(parcel.data)
    return _HEAD.pack(magic, count, 0) + parcel.data[_HEAD.size :], content


def reload(data: bytes, content: bytes) -> Parcel:
    """The parcel again, with a segment of its own."""
    return Parcel(data, Segment([content]))


def unpack(
    data: Any,
    fd: int | None = None,
    dropped: Callable[[int], None] | None = None,
    copied: bool = False,
) -> tuple[Any, list[Any]]:
    """The body and frames of a message, as views on `data` and on the segment; closes `fd`.

    `dropped` is called with a segment's number, on any thread, once nothing of it is held here.
    With `copied`, what is in a segment without a number is copied: each one that is held takes a
    file descriptor.

    Raises
    ------
    LineError
        If the message is malformed.
    """
    if fd is None and type(data) is bytes and len(data) >= _ONE.size:  # as nearly all are
        magic, count, _, size, offset = _ONE.unpack_from(data)
        if magic == MAGIC and count == 1 and offset == -1 and size == len(data) - _ONE.size:
            return data[_ONE.size :], []
    mapping: Any = None
    try:
        if fd is not None:
            size = os.fstat(fd).st_size
            if size and copied and len(data) >= _HEAD.size and not _HEAD.unpack_from(data)[2]:
                mapping = _read(fd, size)
            elif size:
                held = _Mapping(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
                if dropped is not None and len(data) >= _HEAD.size and _HEAD.unpack_from(data)[2]:
                    weakref.finalize(held, dropped, _HEAD.unpack_from(data)[2]).atexit = False
                mapping = memoryview(held)
    finally:
        if fd is not None:
            os.close(fd)
    total = len(data)
    if total < _HEAD.size:
        raise LineError(f"a message of {total} bytes has no header")
    magic, count, _ = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise LineError(f"a message does not begin as ours do: {bytes(data[:8])!r}")
    place = _HEAD.size + count * _PART.size
    if not 1 <= count <= MOST_PARTS or place > total:
        raise LineError(f"a message of {total} bytes claims to have {count} parts")
    view = memoryview(data)
    parts: list[Any] = []
    for number in range(count):
        size, offset = _PART.unpack_from(data, _HEAD.size + number * _PART.size)
        whole, start = (view, place) if offset == -1 else (mapping, offset)
        if whole is None or start < 0 or size > len(whole) - start:
            raise LineError(f"part {number} of a message claims {size} bytes that are not there")
        parts.append(whole[start : start + size])
        if offset == -1:
            place += size
    if place != total:
        raise LineError(f"a message of {total} bytes has {total - place} too many")
    return parts[0], parts[1:]


def _read(fd: int, size: int) -> memoryview:
    whole = memoryview(bytearray(size))
    at = 0
    while at < size:
        count = os.preadv(fd, [whole[at : at + (1 << 30)]], at)
        if not count:
            raise LineError(f"a segment of {size} bytes has no more than {at}")
        at += count
    return whole


def _write(fd: int, part: Any) -> None:
    view = memoryview(part).cast("B") if type(part) is not bytes else memoryview(part)
    while view:
        view = view[os.write(fd, view[: 1 << 30]) :]
