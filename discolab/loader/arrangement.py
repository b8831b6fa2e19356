"""What is to be written, and where each tensor lies in which file. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .catalog import Shape


@dataclass(frozen=True, slots=True)
class Record:
    """A tensor to be written.

    Attributes
    ----------
    dtype
        What it is once it is loaded.
    stored
        What its bytes are in the file; other than `dtype` for f32-to-bf16 only.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    stored: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.stored.itemsize


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor.

    Attributes
    ----------
    file
        Index in `Arranged.files`.
    offset
        Bytes from the file's begin.
    """

    record: Record
    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to be written.

    Attributes
    ----------
    name
        In the checkpoint's folder.
    size
        Bytes, `head` included.
    head
        What stands before the tensors.
    """

    name: str
    size: int
    head: bytes = b""


@dataclass(frozen=True, slots=True)
class Arranged:
    """All files of a checkpoint and the places in them, in the order of the records."""

    files: tuple[NewFile, ...]
    slots: tuple[Slot, ...]

    def by_file(self) -> list[list[Slot]]:
        """The tensors of each file, as they lie in it."""
        found: list[list[Slot]] = [[] for _ in self.files]
        for slot in self.slots:
            found[slot.file].append(slot)
        return [sorted(slots, key=lambda slot: slot.offset) for slots in found]
