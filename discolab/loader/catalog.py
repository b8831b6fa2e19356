"""What a checkpoint holds and where: read from its index, without a byte of a tensor.

A `Catalog` is made by `formats` and is valid as a whole: each file was there with its size, each
piece lies inside its file, and the pieces of an entry tile it. `copies` says which of its bytes
land where in a worker's tensor. Everything here is frozen and plain, so that it can be sent to
workers.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..layouts.layout import Cut

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint, as it was when the index was read.

    Attributes
    ----------
    path
        Absolute, without symbolic links.
    size
        Bytes.
    md5
        Of the whole file, in hexadecimal, if the index has it.
    inode, changed_ns, host
        Which file it was, when it was last written to, and on which machine that was seen; an inode
        of 0 where it was not seen.
    """

    path: str
    size: int
    md5: str | None = None
    inode: int = 0
    changed_ns: int = 0
    host: str = ""

    @classmethod
    def seen(cls, path: str, size: int | None = None, md5: str | None = None) -> File:
        """The file as it is now; `size` is what its index says of one that is not there."""
        try:
            facts = os.stat(path)
        except OSError:
            return cls(path, size or 0, md5)
        expected = facts.st_size if size is None else size
        return cls(path, expected, md5, facts.st_ino, facts.st_mtime_ns, platform.node())

    def why_another(self, facts: os.stat_result) -> str:
        """Why the file of these facts is not this one any more; "" if it is, as far as can be seen.

        On another machine it may be a copy, of which only the size is known.
        """
        if facts.st_size != self.size:
            return (
                f"has {facts.st_size:,} bytes here, and had {self.size:,} when its index was read"
            )
        same = facts.st_ino == self.inode
        if self.inode and (same or platform.node() == self.host):
            if not same:
                return "was replaced by another file after its index was read"
            if facts.st_mtime_ns != self.changed_ns:
                return "was written to after its index was read"
        return ""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a parameter as it lies in a file.

    Attributes
    ----------
    file
        Index in `Catalog.files`.
    offset
        Bytes from the file's begin to the box's first element.
    start, shape
        The box within the whole parameter, in elements.
    strides
        In the file, in elements; None: one after the other in C order.
    """

    file: int
    offset: int
    start: Shape
    shape: Shape
    strides: Shape | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter.

    Attributes
    ----------
    shape
        Of the whole parameter, in elements.
    dtype
        What it is once it is loaded.
    stored
        What it is in the file: differs where the format says so (f32-to-bf16).
    pieces
        Boxes that tile it: one, or the shards that it was cut into.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    stored: torch.dtype
    pieces: tuple[Piece, ...]

    def loaded_as(self, dtype: torch.dtype | None) -> torch.dtype:
        """What it is once it is loaded and cast to `dtype`: only floating-point ones are cast."""
        return dtype if dtype is not None and self.dtype.is_floating_point else self.dtype

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the whole parameter in the files."""
        return self.numel * self.stored.itemsize


@dataclass(frozen=True, slots=True, repr=False)
class Catalog:
    """A checkpoint.

    Attributes
    ----------
    path
        What was opened: a file or a folder.
    format
        ``"tensor-cache"``, ``"safetensors"``, ``"dcp"`` or ``"torch"``.
    entries
        By name, in the order of the index.
    metadata
        What the index says of the whole.
    """

    path: str
    format: str
    files: tuple[File, ...]
    entries: Mapping[str, Entry]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        count = len(self.entries)
        return (
            f"<{self.format} checkpoint of {count} parameter{'s' if count != 1 else ''}, "
            f"{self.stored_bytes:,} bytes in {len(self.files)} "
            f"file{'s' if len(self.files) != 1 else ''}: {self.path}>"
        )

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parameters in the files."""
        return sum(entry.stored_bytes for entry in self.entries.values())

    def file_of(self, entry: Entry) -> str:
        """The path of the first file that has a part of `entry`, for messages."""
        return self.files[entry.pieces[0].file].path if entry.pieces else self.path


# -- into a worker's tensor ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Copy:
    """A box in a file that lands in a box of a worker's tensor.

    Attributes
    ----------
    file
        Index in `Catalog.files`.
    offset
        Bytes to its first element.
    shape, strides
        Of the box as it lies in the file, in elements of the stored dtype.
    at
        Where it begins in the worker's tensor.
    """

    file: int
    offset: int
    shape: Shape
    strides: Shape
    at: Shape

    @property
    def contiguous(self) -> bool:
        """Whether its elements follow each other in the file."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


def copies(entry: Entry, cut: Cut) -> list[Copy]:
    """All that a worker with this cut reads of `entry`; none overlap in its tensor."""
    found = []
    for piece in entry.pieces:
        strides = piece.strides or c_strides(piece.shape)
        for box in cut.boxes:
            start = tuple(map(max, piece.start, box.start))
            ends = (
                min(p + n, b + m)
                for p, n, b, m in zip(piece.start, piece.shape, box.start, box.shape, strict=True)
            )
            shape = tuple(end - begin for begin, end in zip(start, ends, strict=True))
            if any(size <= 0 for size in shape):
                continue
            into = sum(
                (s - p) * step for s, p, step in zip(start, piece.start, strides, strict=True)
            )
            at = tuple(a + s - b for a, s, b in zip(box.at, start, box.start, strict=True))
            offset = piece.offset + into * entry.stored.itemsize
            found.append(Copy(piece.file, offset, shape, strides, at))
    return found


def c_strides(shape: Shape) -> Shape:
    """Strides of a tensor whose elements follow each other, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
