"""A catalog in the making: what all formats check of names, files and ranges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..catalog import Catalog, Entry, File, Piece
from ..errors import CheckpointError
from .checks import name_ok, shallow, tiles
from .paths import file_size

Shape = tuple[int, ...]


class Builder:
    """Collects files, ranges and entries; `done` makes the catalog of them.

    Attributes
    ----------
    index
        The file that says all this; named in messages that are about no data file.
    """

    def __init__(self, path: Path, format: str, index: Path) -> None:
        self.path = path
        self.format = format
        self.index = index
        self.files: list[File] = []
        self.entries: dict[str, Entry] = {}
        self._numbers: dict[str, int] = {}
        self._ranges: dict[int, list[tuple[int, int, str]]] = {}

    def file(self, path: Path, size: int | None = None, md5: str | None = None) -> int:
        """The number of a data file, which is looked at unless its size is given."""
        number = self._numbers.get(str(path))
        if number is None:
            number = self._numbers[str(path)] = len(self.files)
            size = file_size(path) if size is None else size
            self.files.append(File.seen(str(path), size, md5))
        return number

    def claim(self, file: int, offset: int, nbytes: int, name: str) -> None:
        """Bytes of a file that belong to `name` and to nothing else.

        Raises
        ------
        CheckpointError
            If the file ends before.
        """
        found = self.files[file]
        if offset + nbytes > found.size:
            raise CheckpointError(
                found.path,
                f"has {found.size} bytes; expected {nbytes} bytes at {offset}, as "
                f"{self.index.name} says",
                name,
            )
        if nbytes:
            self._ranges.setdefault(file, []).append((offset, offset + nbytes, name))

    def entry(
        self,
        name: Any,
        shape: Shape,
        dtype: torch.dtype,
        pieces: Sequence[Piece],
        stored: torch.dtype | None = None,
    ) -> None:
        """A parameter whose pieces lie in their files already.

        Raises
        ------
        CheckpointError
            If the name is there, or the pieces do not tile the shape.
        """
        name_ok(name, self.index)
        if name in self.entries:
            raise CheckpointError(self.index, "is there twice", name)
        wrong = tiles([(piece.start, piece.shape) for piece in pieces], shape)
        if wrong:
            raise CheckpointError(self.index, f"shape {shape}: {wrong}", name)
        self.entries[name] = Entry(name, shape, dtype, stored or dtype, tuple(pieces))

    def whole(
        self,
        name: Any,
        shape: Shape,
        dtype: torch.dtype,
        file: int,
        offset: int,
        stored: torch.dtype | None = None,
    ) -> None:
        """A parameter that lies in one piece in C order."""
        name_ok(name, self.index)
        self.claim(file, offset, math.prod(shape) * (stored or dtype).itemsize, name)
        piece = Piece(file, offset, (0,) * len(shape), shape)
        self.entry(name, shape, dtype, [piece], stored)

    def done(self, metadata: Mapping[str, Any] | None = None) -> Catalog:
        """The catalog.

        Raises
        ------
        CheckpointError
            If two ranges of a file overlap.
        """
        for number, ranges in self._ranges.items():
            ranges.sort()
            for (_, end, one), (begin, _, other) in itertools.pairwise(ranges):
                if begin < end:
                    raise CheckpointError(
                        self.files[number].path,
                        f"begins at byte {begin}, and {one!r} ends at {end}: they overlap; "
                        f"expected each to have its own bytes, see {self.index.name}",
                        other,
                    )
        about = dict(metadata or {})
        shallow(about, self.index)
        return Catalog(str(self.path), self.format, tuple(self.files), self.entries, about)
