"""Tensor-caches to load with Disco's ShardLoader, and calls of its functions."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from discolab import DRef, Session

FUNCTIONS = """
import json
import torch

def dim_0(src, parts, out):
    out.copy_(src.view(parts, src.shape[0] // parts, *src.shape[1:]))

def dim_1(src, parts, out):
    out.copy_(src.view(src.shape[0], parts, -1).transpose(0, 1))

def qkv(src, parts, q_heads, kv_heads, out):
    head = src.shape[0] // (q_heads + 2 * kv_heads)
    split = src.split([q_heads * head, kv_heads * head, kv_heads * head])
    out.copy_(torch.cat([part.reshape(parts, -1, head, src.shape[1]) for part in split], 1))

def flat(src, out):
    out.copy_(src.flatten(1, 2))

def half(src, out):
    out.copy_(src / 2)

def resizes(src, parts, out):
    out.resize_(1)

def returns(src, parts, out):
    return src.view(out.shape) + 1

def piecewise(src, parts, out):
    for part, piece in zip(out, src.chunk(parts), strict=True):
        part.copy_(piece)
    return part

def fails(src, parts, out):
    raise RuntimeError("no more shards today")

def get_shard_info():
    return json.dumps({"param_0": [["dim_0", [[4, 2, 6], "float32"], 4]]})
"""


def write_functions(folder: Path) -> str:
    """A Python file with shard functions."""
    path = folder / "shard_functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


def write(folder: Path, *files: dict[str, torch.Tensor], name: str = "tensor-cache.json") -> str:
    """A tensor-cache with these records in these files; the path of its index."""
    records = []
    for number, params in enumerate(files):
        data = b""
        inner = []
        for key, tensor in params.items():
            raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
            inner.append(
                {
                    "name": key,
                    "shape": list(tensor.shape),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "format": "raw",
                    "nbytes": len(raw),
                    "byteOffset": len(data),
                }
            )
            data += raw
        path = f"params_shard_{number}.bin"
        (folder / path).write_bytes(data)
        records.append(
            {"dataPath": path, "format": "raw-shard", "nbytes": len(data), "records": inner}
        )
    index = folder / name
    index.write_text(json.dumps({"metadata": {}, "records": records}))
    return str(index)


def parts_of(params: dict[str, torch.Tensor], dims: dict[str, int], n: int) -> dict[str, Any]:
    """As MLC shards them: one worker's parts after another's."""
    return {
        f"{name}_shard-{k + 1}-of-{n}": tensor.chunk(n, dims[name])[k]
        for k in range(n)
        for name, tensor in params.items()
    }


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def call(sess: Session, name: str, *args: Any) -> DRef:
    return sess.get_global_func(f"runtime.disco.ShardLoader{name}")(*args)


def create(sess: Session, index: str, info: Any = None, module: Any = None) -> DRef:
    text = Path(index).read_text()
    return call(sess, "", index, text, json.dumps(info or {}), module)


def values(ref: DRef) -> list[Any]:
    return ref.debug_get_from_all()


def same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(
        g.dtype == w.dtype and torch.equal(g, w) for g, w in zip(got, want, strict=True)
    )
