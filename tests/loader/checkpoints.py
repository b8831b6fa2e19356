"""Small checkpoints of every format, written by hand: nothing of discolab's own is used here."""

from __future__ import annotations

import hashlib
import json
import struct
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]

TENSOR_CACHE_NAMES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
SAFETENSORS_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
# What round trips of every format must cover.
COMMON_DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in C order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit, NaNs too."""
    return one.shape == other.shape and one.dtype == other.dtype and raw(one) == raw(other)


def filled(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of the dtype whose elements differ from each other as far as they can."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tuple(shape), generator=generator).to(dtype)
    return torch.randint(0, 100, tuple(shape), generator=generator).to(dtype)


def write_tensor_cache(
    folder: Path,
    tensors: Tensors,
    *,
    index: str = "tensor-cache.json",
    formats: Mapping[str, str] | None = None,
    per_file: int = 2,
    gap: int = 0,
    md5: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """A tensor-cache folder; returns its index.

    Parameters
    ----------
    formats
        ``{name: "f32-to-bf16"}`` for those that aren't ``"raw"``. A float32 is stored as bfloat16
        then, cut off as TVM reads it: give values that bfloat16 has to get them back.
    per_file
        Tensors in one file.
    gap
        Unused bytes before each record; 1 makes offsets odd.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    groups = [names[i : i + per_file] for i in range(0, len(names), per_file)]
    files = []
    for number, group in enumerate(groups):
        data, records = b"", []
        for name in group:
            tensor, form = tensors[name], (formats or {}).get(name, "raw")
            encoded = form == "f32-to-bf16" and tensor.dtype == torch.float32
            content = raw(tensor.bfloat16() if encoded else tensor)
            data += b"\xee" * gap
            records.append(
                {
                    "name": name,
                    "shape": list(tensor.shape),
                    "dtype": TENSOR_CACHE_NAMES[tensor.dtype],
                    "format": form,
                    "nbytes": len(content),
                    "byteOffset": len(data),
                }
            )
            data += content
        path = f"params_shard_{number}.bin"
        (folder / path).write_bytes(data)
        about = {"dataPath": path, "format": "raw-shard", "nbytes": len(data), "records": records}
        files.append(about | ({"md5sum": hashlib.md5(data).hexdigest()} if md5 else {}))
    text = json.dumps({"metadata": dict(metadata or {}), "records": files}, indent=2)
    (folder / index).write_text(text)
    return folder / index


def write_safetensors(
    path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None
) -> Path:
    """One safetensors file, its header padded to 8 bytes; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, tensor in tensors.items():
        content = raw(tensor)
        header[name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    return write_safetensors_parts(path, json.dumps(header), data)


def write_safetensors_parts(path: Path, header: str | bytes, data: bytes) -> Path:
    """A safetensors file of this header, whatever it says, and this data."""
    text = header.encode() if isinstance(header, str) else header
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write_safetensors_index(
    folder: Path,
    shards: Mapping[str, Tensors] | Sequence[Tensors],
    *,
    index: str = "model.safetensors.index.json",
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Several safetensors files and their index, which it returns.

    Parameters
    ----------
    shards
        What is in each file, by file name, or in order with the usual names.
    """
    if not isinstance(shards, Mapping):
        count = len(shards)
        shards = {f"model-{i + 1:05}-of-{count:05}.safetensors": t for i, t in enumerate(shards)}
    for name, tensors in shards.items():
        write_safetensors(folder / name, tensors, {"format": "pt"})
    total = sum(len(raw(t)) for tensors in shards.values() for t in tensors.values())
    where = {name: file for file, tensors in shards.items() for name in tensors}
    about = {"metadata": {"total_size": total, **(metadata or {})}, "weight_map": where}
    (folder / index).write_text(json.dumps(about, indent=2))
    return folder / index


def write_torch(path: Path, state: Any) -> Path:
    """A file of `torch.save`; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)
    return path


def write_torch_index(folder: Path, shards: Sequence[Tensors]) -> Path:
    """Several files of `torch.save` under the names of Hugging Face, and their index."""
    where = {}
    for number, tensors in enumerate(shards):
        name = f"pytorch_model-{number + 1:05}-of-{len(shards):05}.bin"
        write_torch(folder / name, dict(tensors))
        where.update(dict.fromkeys(tensors, name))
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return index


def write_dcp(folder: Path, state: Mapping[str, Any], **writer: Any) -> Path:
    """A DCP folder of one process, each tensor whole; `writer` goes to torch's FileSystemWriter."""
    import torch.distributed.checkpoint as dcp

    folder.mkdir(parents=True, exist_ok=True)
    made = dcp.FileSystemWriter(folder, **writer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process is what we want
        dcp.save(dict(state), storage_writer=made, no_dist=True)
    return folder


def write_dcp_chunks(folder: Path, tensors: Tensors, parts: int, dim: int = 0) -> Path:
    """A DCP folder in which each tensor is cut along `dim`, as `torch.chunk` does it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.metadata import TensorProperties as Properties
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            items = []
            for name, tensor in tensors.items():
                begin = 0
                for chunk in tensor.chunk(parts, dim) if tensor.ndim else (tensor,):
                    at = [0] * tensor.ndim
                    if tensor.ndim:
                        at[dim] = begin
                        begin += chunk.shape[dim]
                    box = ChunkStorageMetadata(torch.Size(at), chunk.shape)
                    about = Properties.create_from_tensor(tensor)
                    data = TensorWriteData(box, about, tensor.shape)
                    where = MetadataIndex(name, at)
                    items.append(WriteItem(where, WriteItemType.SHARD, tensor_data=data))
            self.plan = SavePlan(items, planner_data={})
            return self.plan

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
            assert write_item.tensor_data is not None
            box = write_item.tensor_data.chunk
            found = tensors[write_item.index.fqn]
            for axis, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                found = found.narrow(axis, start, size)
            return found.contiguous()

    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        dcp.save(dict(tensors), checkpoint_id=folder, planner=Planner(), no_dist=True)
    return folder
