"""What layouts make of a tensor, worked out with torch's own words; sources to read from."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.nn.functional import pad

from discolab.loader.catalog import Catalog
from discolab.loader.convert import shard
from discolab.loader.presharded import shard_name
from discolab.loader.read import Files, read_entry

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.bool,
)
SOURCES = ("torch", "safetensors", "dcp", "tensor-cache")
TARGETS = ("safetensors", "tensor-cache")


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits that the dtype can have, NaNs too; of bool those two."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=generator)
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and every bit are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*flat)


def chunks(tensor: torch.Tensor, parts: int, dim: int) -> list[torch.Tensor]:
    """As `torch.chunk`, with empty ones at the end."""
    raw = bytes_of(tensor)
    found = list(raw.chunk(parts, dim))[:parts]
    empty = raw.narrow(dim, 0, 0)
    found += [empty] * (parts - len(found))
    return [typed(one, tensor.dtype) for one in found]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """With a last dimension of bytes: some dtypes can't be padded or joined."""
    return (
        tensor.contiguous().reshape(-1).view(torch.uint8).reshape(*tensor.shape, -1)
        if (tensor.numel())
        else torch.zeros(*tensor.shape, tensor.dtype.itemsize, dtype=torch.uint8)
    )


def typed(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The way back."""
    if not raw.numel():
        return torch.zeros(raw.shape[:-1], dtype=torch.uint8).to(dtype)
    return raw.contiguous().reshape(-1).view(dtype).reshape(raw.shape[:-1])


def replicated(tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """The same on each."""
    return [tensor] * parts


def padded(tensor: torch.Tensor, parts: int, dim: int, multiple: int) -> list[torch.Tensor]:
    """Zeros behind, then cut."""
    raw = bytes_of(tensor)
    missing = -tensor.shape[dim] % multiple
    sides = [0, 0] * (raw.dim() - 1 - dim) + [0, missing]
    return chunks(typed(pad(raw, sides), tensor.dtype), parts, dim)


def fused(
    tensor: torch.Tensor, parts: int, dim: int, segments: list[int], heads: list[int] | None = None
) -> list[torch.Tensor]:
    """Each segment by itself, whole heads, a worker's pieces one after the other."""
    columns: list[list[torch.Tensor]] = [[] for _ in range(parts)]
    raw = bytes_of(tensor)
    for number, segment in enumerate(raw.split(segments, dim)):
        count = heads[number] if heads else segments[number]
        by_head = list(segment.split(segments[number] // count, dim))
        for rank in range(parts):
            if count < parts:
                if heads is None:
                    mine = by_head[rank : rank + 1]
                else:
                    mine = [by_head[rank // (parts // count)]]
            else:
                each = -(-count // parts)
                mine = by_head[rank * each : (rank + 1) * each]
            columns[rank] += mine or [segment.narrow(dim, 0, 0)]
    return [typed(torch.cat(column, dim), tensor.dtype) for column in columns]


def write_source(kind: str, folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A checkpoint of that format, written by its own library where it has one."""
    folder.mkdir()
    if kind == "torch":
        torch.save(dict(tensors), folder / "model.pt")
    elif kind == "safetensors":
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "x.safetensors")
    elif kind == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that there is one process only
            dcp.save(dict(tensors), checkpoint_id=folder)
    else:
        torch.save(dict(tensors), folder / "model.pt")
        shard(folder / "model.pt", folder, format=kind, presharded=False, progress=False)
    return folder


def read_all(catalog: Catalog) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    with Files(catalog.files) as files:
        return {name: read_entry(files, entry) for name, entry in catalog.entries.items()}


def check_shards(catalog: Catalog, wanted: Mapping[str, list[torch.Tensor]]) -> None:
    """Whether a presharded checkpoint holds these, and no others."""
    found = read_all(catalog)
    names = {shard_name(n, rank, len(s)) for n, s in wanted.items() for rank in range(len(s))}
    assert set(found) == names
    for name, shards in wanted.items():
        for rank, one in enumerate(shards):
            there = found[shard_name(name, rank, len(shards))]
            assert same_bits(there, one), f"{name}, worker {rank} of {len(shards)}"
