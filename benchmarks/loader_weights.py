"""The weights that loader.py loads: their shapes, their cut, their files, and the page cache.

Made once, seeded, in a folder that is used again: as one or more safetensors files, and as the
presharded tensor-cache that TVM's loader reads. Nothing here imports discolab.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

WORKERS = 4
SEED = 20240229
TVM_FILE = 32 << 20  # bytes at which TVM's own tools begin another file
BLOCK = 8 << 20
PLACES, SUMS = "places.json", "sums.json"
HIDDEN, INTERMEDIATE, KEYS, VOCABULARY = 2048, 5632, 256, 8000

# The rules, as discolab's plan has them; the first match wins.
PLAN = {
    "*.o_proj.weight": "shard(1)",
    "*.down_proj.weight": "shard(1)",
    "*norm.weight": "replicate",
    "*": "shard(0)",
}


@dataclass(frozen=True)
class Weight:
    """One parameter, bfloat16: its name, its shape, and where its bytes begin in which file."""

    name: str
    shape: tuple[int, ...]
    file: int = 0
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return 2 * math.prod(self.shape)

    @property
    def dim(self) -> int | None:
        """The dimension that is cut, None if each worker has all of it."""
        if self.name.endswith("norm.weight"):
            return None
        return 1 if self.name.endswith(("o_proj.weight", "down_proj.weight")) else 0


@dataclass(frozen=True)
class Checkpoint:
    """Where the weights lie."""

    folder: Path
    weights: tuple[Weight, ...]

    @property
    def files(self) -> list[Path]:
        """The safetensors files."""
        count = 1 + max(weight.file for weight in self.weights)
        return [self.folder / file_name(i, count) for i in range(count)]

    @property
    def tvm(self) -> Path:
        """The folder of the presharded copy for TVM."""
        return self.folder / "tvm"

    @property
    def tvm_files(self) -> list[Path]:
        """Its data files; none if there is no copy."""
        return sorted(self.tvm.glob("*.bin"))

    @property
    def torch_file(self) -> Path:
        """The copy that `torch.save` has written."""
        return self.folder / "torch" / "model.pt"

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def shard_bytes(self) -> int:
        """Bytes of all shards of all workers: what is copied counts for each."""
        return sum(w.nbytes * (WORKERS if w.dim is None else 1) for w in self.weights)

    @property
    def column_share(self) -> float:
        """The part of the bytes that is cut along columns, so that a shard lies in many places."""
        return sum(w.nbytes for w in self.weights if w.dim == 1) / self.nbytes

    def checked(self) -> list[Weight]:
        """Some parameters of every kind, from begin, middle and end, to compare."""
        last = len(self.weights) - 1
        kinds = ("layers.0.o_proj", "layers.0.k_proj", "layers.0.input_norm", "down_proj")
        found = [self.weights[0], self.weights[last // 2], self.weights[last]]
        for kind in kinds:
            found += [w for w in self.weights if kind in w.name][-1:]
        return list({weight.name: weight for weight in found}.values())


def shapes(megabytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as those of a Llama with so many layers that about `megabytes` result."""
    layer = 2 * (2 * HIDDEN * HIDDEN + 2 * KEYS * HIDDEN + 3 * INTERMEDIATE * HIDDEN + 2 * HIDDEN)
    ends = 2 * 2 * VOCABULARY * HIDDEN
    yield "embed.weight", (VOCABULARY, HIDDEN)
    for i in range(max(1, round((megabytes * 1e6 - ends) / layer))):
        at = f"layers.{i}."
        yield at + "input_norm.weight", (HIDDEN,)
        yield at + "q_proj.weight", (HIDDEN, HIDDEN)
        yield at + "k_proj.weight", (KEYS, HIDDEN)
        yield at + "v_proj.weight", (KEYS, HIDDEN)
        yield at + "o_proj.weight", (HIDDEN, HIDDEN)
        yield at + "post_norm.weight", (HIDDEN,)
        yield at + "gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield at + "up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield at + "down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def file_name(index: int, count: int) -> str:
    """The name of a safetensors file, as is usual."""
    return "model.safetensors" if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"


def cut(tensor: torch.Tensor, dim: int | None, rank: int) -> torch.Tensor:
    """A worker's part as a view."""
    return tensor if dim is None else tensor.chunk(WORKERS, dim)[rank]


# -- files -------------------------------------------------------------------------------------


def layout(folder: Path, megabytes: int, files: int) -> Checkpoint:
    """The weights in `files` files of like size, whether or not they are written."""
    plain = [Weight(name, shape) for name, shape in shapes(megabytes)]
    total = sum(weight.nbytes for weight in plain)
    groups: list[list[Weight]] = [[] for _ in range(files)]
    done = 0
    for weight in plain:
        groups[min(files - 1, done * files // total)].append(weight)
        done += weight.nbytes
    placed = []
    for index, group in enumerate(group for group in groups if group):
        at = len(_header(group))
        for weight in group:
            placed.append(Weight(weight.name, weight.shape, index, at))
            at += weight.nbytes
    return Checkpoint(folder / f"llama-{megabytes}-{files}", tuple(placed))


def make(folder: Path, megabytes: int, files: int, copies: Sequence[str] = ()) -> Checkpoint:
    """Write what is not there yet; what lies there with a part's last file is whole.

    Beside the weights lie ``places.json``, which `opened` reads, and ``sums.json``: what
    `checksum` must give for each checked parameter, by worker. `copies`: ``"tvm"``, ``"torch"``.
    """
    found = layout(folder, megabytes, files)
    if not (found.folder / SUMS).exists():
        found.folder.mkdir(parents=True, exist_ok=True)
        _write_safetensors(found)
        places = [[w.name, w.shape, w.file, w.offset] for w in found.weights]
        (found.folder / PLACES).write_text(json.dumps(places))
        (found.folder / SUMS).write_text(json.dumps(right_sums(found)))
    if "tvm" in copies and not (found.tvm / "tensor-cache.json").exists():
        found.tvm.mkdir(exist_ok=True)
        _write_tvm(found)
    if "torch" in copies and not found.torch_file.exists():
        found.torch_file.parent.mkdir(exist_ok=True)
        part = found.torch_file.with_suffix(".part")
        with part.open("wb") as file:
            torch.save({w.name: read_whole(found, w) for w in found.weights}, file)
            _to_disk(file)
        part.replace(found.torch_file)
    return found


def opened(folder: str) -> Checkpoint:
    """The checkpoint that `make` has put there."""
    places = json.loads((Path(folder) / PLACES).read_text())
    weights = (Weight(name, tuple(shape), file, at) for name, shape, file, at in places)
    return Checkpoint(Path(folder), tuple(weights))


def _header(weights: list[Weight]) -> bytes:
    at, entries = 0, {}
    for w in weights:
        place = [at, at + w.nbytes]
        entries[w.name] = {"dtype": "BF16", "shape": list(w.shape), "data_offsets": place}
        at += w.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_safetensors(found: Checkpoint) -> None:
    random = torch.Generator().manual_seed(SEED)
    count = len(found.files)
    for index, path in enumerate(found.files):
        mine = [weight for weight in found.weights if weight.file == index]
        with path.open("wb") as file:
            file.write(_header(mine))
            for w in mine:
                values = torch.empty(w.shape, dtype=torch.bfloat16)
                values.normal_(0, 0.02, generator=random)
                file.write(values.view(torch.uint8).numpy().data)
            _to_disk(file)
    if count > 1:
        names = {weight.name: file_name(weight.file, count) for weight in found.weights}
        index_text = {"metadata": {"total_size": found.nbytes}, "weight_map": names}
        text = json.dumps(index_text)
        (found.folder / "model.safetensors.index.json").write_text(text)


def _write_tvm(found: Checkpoint) -> None:
    """Each worker's shards in files of its own, of 32 MiB at most unless one shard is larger."""
    files: list[dict[str, object]] = []
    for rank in range(WORKERS):
        pending: list[tuple[dict[str, object], torch.Tensor]] = []
        size = 0
        for number, weight in enumerate(found.weights):
            shard = cut(read_whole(found, weight), weight.dim, rank).contiguous()
            if pending and size + shard.nbytes > TVM_FILE:
                files.append(_write_tvm_file(found.tvm, len(files), pending))
                pending, size = [], 0
            record: dict[str, object] = {
                "name": f"param_{number}_shard-{rank + 1}-of-{WORKERS}",
                "shape": list(shard.shape), "dtype": "bfloat16", "format": "raw",
                "nbytes": shard.nbytes, "byteOffset": size,
            }  # fmt: skip
            pending.append((record, shard))
            size += shard.nbytes
        files.append(_write_tvm_file(found.tvm, len(files), pending))
    (found.tvm / "tensor-cache.json").write_text(json.dumps({"metadata": {}, "records": files}))


def _write_tvm_file(
    folder: Path, number: int, pending: list[tuple[dict[str, object], torch.Tensor]]
) -> dict[str, object]:
    name = f"params_shard_{number}.bin"
    with (folder / name).open("wb") as file:
        for _, shard in pending:
            file.write(shard.view(torch.uint8).numpy().data)
        size = file.tell()
        _to_disk(file)
    records = [record for record, _ in pending]
    return {"dataPath": name, "format": "raw-shard", "nbytes": size, "records": records}


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def read_whole(found: Checkpoint, weight: Weight) -> torch.Tensor:
    """A parameter, read from its place in the file by nothing but a read."""
    into = torch.empty(weight.shape, dtype=torch.bfloat16)
    with found.files[weight.file].open("rb", buffering=0) as file:
        file.seek(weight.offset)
        view = memoryview(into.view(torch.uint8).numpy().reshape(-1))
        while view:
            view = view[file.readinto(view) :]
    return into


def checksum(shard: torch.Tensor) -> int:
    """Of the values in C order."""
    return zlib.crc32(shard.contiguous().view(torch.uint8).numpy().data)


def right_sums(found: Checkpoint) -> dict[str, list[int]]:
    """By parameter, then by worker."""
    sums = {}
    for weight in found.checked():
        whole = read_whole(found, weight)
        sums[weight.name] = [checksum(cut(whole, weight.dim, r)) for r in range(WORKERS)]
    return sums


# -- page cache --------------------------------------------------------------------------------


def warm(files: list[Path]) -> None:
    """Have all bytes in the page cache."""
    block = bytearray(BLOCK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def evict(files: list[Path]) -> None:
    """Have no byte in the page cache, as far as the system follows the advice."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(files: list[Path]) -> float:
    """The part of all pages that is in the page cache, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    here = total = 0
    for path in files:
        with path.open("rb") as file, _map(file) as mapped:
            pages = -(-len(mapped) // page)
            found = (ctypes.c_ubyte * pages)()
            start = ctypes.c_char.from_buffer(mapped)
            address = ctypes.c_void_p(ctypes.addressof(start))
            if libc.mincore(address, ctypes.c_size_t(len(mapped)), found):
                raise OSError(ctypes.get_errno(), "mincore failed")
            del start
            here += sum(byte & 1 for byte in bytes(found))
            total += pages
    return here / total


def _map(file: BinaryIO) -> mmap.mmap:
    """A private mapping; ctypes gives an address only of what may be written."""
    return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
