"""What a checkpoint is written as: the format and its options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..layouts.layout import cut
from ..runtime.errors import ArgumentError
from .arrangement import Arranged, Record, Slot
from .atomic import Replacement
from .catalog import Catalog, Shape
from .formats import open_checkpoint, safetensors, tensor_cache
from .formats.checks import MAX_DEPTH, SAFETENSORS_NAMES, TENSOR_CACHE_NAMES
from .presharded import KEY, Sharding, shard_name

FORMATS = ("safetensors", "tensor-cache")
_NAMES = {"safetensors": SAFETENSORS_NAMES, "tensor-cache": TENSOR_CACHE_NAMES}
_BF16 = ("raw", "f32-to-bf16")


@dataclass(frozen=True)
class Kind:
    """The dtype of a parameter that is to be written, and what its bytes are."""

    dtype: torch.dtype
    stored: torch.dtype


@dataclass(frozen=True)
class Target:
    """What to write, see `saving.save`.

    Raises
    ------
    ArgumentError
        If there is no such thing.
    """

    format: str
    presharded: bool
    max_file_bytes: int | None = None
    bf16_as: str = "raw"
    metadata: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ArgumentError(
                f"format={self.format!r} can't be written; one of {', '.join(map(repr, FORMATS))}"
            )
        if self.bf16_as not in _BF16:
            raise ArgumentError(f"bf16_as= is one of {_BF16}, got {self.bf16_as!r}")
        if self.bf16_as != "raw" and self.format != "tensor-cache":
            raise ArgumentError(f"bf16_as={self.bf16_as!r} is for format='tensor-cache' alone")
        limit = self.max_file_bytes
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
            raise ArgumentError(f"max_file_bytes= is a number of bytes, got {limit!r}")
        if limit is not None and limit < 1:
            raise ArgumentError(f"max_file_bytes= is 1 or more, got {limit}")
        if self.metadata is not None:
            _check_metadata(self.metadata)

    def kind(self, name: str, dtype: torch.dtype, stored: torch.dtype | None = None) -> Kind:
        """How a parameter of `dtype` is written.

        Parameters
        ----------
        stored
            What its bytes are where it comes from.

        Raises
        ------
        ArgumentError
            If the format has no such dtype.
        """
        if dtype not in _NAMES[self.format]:
            raise ArgumentError(f"{name!r} is of {dtype}, which {self.format} does not have")
        as_float32 = (torch.float32, torch.bfloat16)
        if self.format == "tensor-cache":
            if dtype == torch.bfloat16 and self.bf16_as != "raw":
                return Kind(*as_float32)
            if (dtype, stored) == as_float32:
                return Kind(*as_float32)
        return Kind(dtype, dtype)

    def arrange(
        self, place: Replacement, kinds: Mapping[str, Kind], sharding: Sharding
    ) -> Arranged:
        """Where each tensor goes.

        Parameters
        ----------
        kinds
            By the parameters' names.
        sharding
            Their shapes; and their layouts, if it is to be presharded.
        """
        parts = _shards(kinds, sharding) if self.presharded else [_wholes(kinds, sharding.shapes)]
        if self.format == "tensor-cache":
            cap = self.max_file_bytes or tensor_cache.CAP
            return tensor_cache.arrange(parts, cap, place.tag, in_order=self.presharded)
        cap = self.max_file_bytes or safetensors.CAP
        about = self._about(sharding)
        return safetensors.arrange(parts, cap, place.tag, about, place.single)

    def write(
        self,
        folder: str | os.PathLike[str],
        kinds: Mapping[str, Kind],
        sharding: Sharding,
        fill: Callable[[Sequence[str], Mapping[str, Slot]], None],
        checksums: Callable[[Sequence[str]], list[str]],
    ) -> Catalog:
        """Make the files, have them filled, and put them in place of what the folder has.

        Parameters
        ----------
        fill
            Writes what `kinds` are to the files at these paths, each to its slot, and to the disk.
        checksums
            Gives those of the files, for a format that has them in its index.
        """
        with Replacement(folder, self.format) as place:
            arranged = self.arrange(place, kinds, sharding)
            paths = place.create(arranged)
            fill(paths, {slot.record.name: slot for slot in arranged.slots})
            md5 = checksums(paths) if self.format == "tensor-cache" else []
            place.commit(arranged, self.index(arranged, md5, sharding))
        return open_checkpoint(place.folder)

    def index(self, arranged: Arranged, md5: Sequence[str], sharding: Sharding) -> bytes:
        """The content of the index file."""
        about = self._about(sharding)
        if self.format == "tensor-cache":
            return tensor_cache.index(arranged, md5, about)
        return safetensors.index(arranged, about)

    def _about(self, sharding: Sharding) -> dict[str, Any]:
        given = dict(self.metadata or {})
        return {**given, KEY: sharding.to_dict()} if self.presharded else given


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
        raise ArgumentError(f"metadata= is a dict with names as keys, got {metadata!r}")
    if KEY in metadata:
        raise ArgumentError(f"metadata[{KEY!r}] is discolab's own: take another name")
    try:
        for value in metadata.values():
            safetensors.text(value)
            _depth(value)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ArgumentError(f"metadata= holds what JSON can't: {exc}") from None


def _depth(value: Any, left: int = MAX_DEPTH - 8) -> None:
    """Whether what nests is read again; the index itself nests a little."""
    if not left:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH - 8} levels")
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            _depth(item, left - 1)


def _wholes(kinds: Mapping[str, Kind], shapes: Mapping[str, Shape]) -> list[Record]:
    return [Record(name, shapes[name], k.dtype, k.stored) for name, k in kinds.items()]


def _shards(kinds: Mapping[str, Kind], sharding: Sharding) -> list[list[Record]]:
    """The tensors of each worker."""
    count = sharding.workers.count
    found: list[list[Record]] = []
    for rank in range(count):
        mine = []
        for name, kind in kinds.items():
            layout, shape = sharding.layouts[name], sharding.shapes[name]
            made = cut(layout, shape, sharding.workers, rank)
            if made is not None:
                shard = shard_name(name, rank, count)
                mine.append(Record(shard, made.shape, kind.dtype, kind.stored))
        found.append(mine)
    return found
