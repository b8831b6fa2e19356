"""Peers of four processes that meet over Gloo, for loader_child.py: see loader_peers.py.

The first is the child itself; it starts the three others, which run `Member` alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from loader_sides import Side, empty, load_files, shard_shape
from loader_weights import WORKERS, Checkpoint, checksum, opened


class Gloo(Side):
    """Worker 0 loads all by safetensors, then torch's `scatter` and `broadcast` on Gloo."""

    program: ClassVar[str] = "scatter"

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.version = torch.__version__
        store = checkpoint.folder / f"store-{os.getpid()}"
        store.unlink(missing_ok=True)
        script = str(Path(__file__).with_name("loader_child.py"))
        tail = [str(checkpoint.folder), str(store)]
        self._others = [
            subprocess.Popen([sys.executable, script, "member", self.program, str(rank), *tail])
            for rank in range(1, WORKERS)
        ]
        self._store = store
        self.member = Member(self.program, 0, *tail)

    def load(self) -> None:
        """All four begin when this one does."""
        self.member.load()

    def sums(self, name: str) -> list[int]:
        """Gathered; also ends the others after the last parameter."""
        return self.member.sums()[name]

    def close(self) -> None:
        """Wait for the others."""
        for other in self._others:
            other.wait(30)
        self._store.unlink(missing_ok=True)


class GlooAll(Gloo):
    """The same after `torch.load`, which has the whole checkpoint in memory before it returns."""

    program = "torch-load"

    @property
    def files(self) -> list[Path]:
        """A file of its own."""
        return [self.checkpoint.torch_file]


class FastSharded(Gloo):
    """fastsafetensors' `get_sharded` in 4 processes on Gloo, as its README has it for several."""

    program = "fastsafetensors"


class Member:
    """One of four processes of `Gloo`; all do the same calls."""

    def __init__(self, program: str, rank: int, folder: str, store: str) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        torch.set_num_threads(1)  # as torchrun has it
        if program == "scatter":
            import safetensors.torch  # noqa: F401
        elif program == "fastsafetensors":
            import fastsafetensors  # noqa: F401
        url, wait = f"file://{store}", timedelta(seconds=120)
        dist.init_process_group(
            "gloo", init_method=url, rank=rank, world_size=WORKERS, timeout=wait
        )
        dist.barrier()
        self.rank, self.program = rank, program
        self.checkpoint = opened(folder)
        self.shards: dict[str, torch.Tensor] = {}
        self._sums: dict[str, list[int]] | None = None

    def load(self) -> None:
        """Until all are done."""
        import torch.distributed as dist

        dist.barrier()
        if self.program == "fastsafetensors":
            self._fast()
        else:
            self._scatter()
        dist.barrier()

    def _scatter(self) -> None:
        import torch.distributed as dist

        whole = self._whole() if self.rank == 0 else {}
        for weight in self.checkpoint.weights:
            if weight.dim is None:
                mine = whole[weight.name].clone() if self.rank == 0 else empty(weight.shape)
                dist.broadcast(mine, 0)
            else:
                mine, parts = empty(shard_shape(weight)), None
                if self.rank == 0:
                    chunks = whole[weight.name].chunk(WORKERS, weight.dim)
                    parts = [chunk.contiguous() for chunk in chunks]
                dist.scatter(mine, parts, 0)
            self.shards[weight.name] = mine

    def _whole(self) -> dict[str, torch.Tensor]:
        if self.program == "scatter":
            return load_files(self.checkpoint)
        return torch.load(self.checkpoint.torch_file, weights_only=True)  # type: ignore[no-any-return]

    def _fast(self) -> None:
        import torch.distributed as dist
        from fastsafetensors import SafeTensorsFileLoader

        loader = SafeTensorsFileLoader(dist.group.WORLD, device="cpu", nogds=True)
        files: dict[int, list[str]] = {rank: [] for rank in range(WORKERS)}
        for index, path in enumerate(self.checkpoint.files):
            files[index % WORKERS].append(str(path))
        loader.add_filenames(files)
        buffers = loader.copy_files_to_device()
        for weight in self.checkpoint.weights:
            dim = -1 if weight.dim is None else weight.dim
            self.shards[weight.name] = buffers.get_sharded(weight.name, dim).clone()
        buffers.close()
        loader.close()

    def sums(self) -> dict[str, list[int]]:
        """Of all checked parameters, by worker."""
        import torch.distributed as dist

        if self._sums is None:
            mine = {w.name: checksum(self.shards[w.name]) for w in self.checkpoint.checked()}
            found: list[Any] = [None] * WORKERS
            dist.all_gather_object(found, mine)
            self._sums = {name: [sums[name] for sums in found] for name in mine}
            dist.destroy_process_group()
        return self._sums
