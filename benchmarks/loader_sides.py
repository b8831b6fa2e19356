"""The bound and discolab's ways to have 4 workers hold their shards, for loader_child.py.

All have the methods of `Side`; the peers are in loader_peers.py. Imports and the start
of workers lie in `__init__`, which is not timed. What `load` makes stays until the process ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from loader_weights import PLAN, WORKERS, Checkpoint, Weight, checksum, cut

CHUNK = 8 << 20  # bytes of one read of the bound: 256 KB to 1 GB make no difference
Shards = list[dict[str, torch.Tensor]]  # by worker


def in_threads(work: Callable[[int], None]) -> None:
    """Do `work` for each rank in a thread of its own, and wait."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as exc:  # raised below
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Side:
    """A way to load."""

    version = ""
    extras: dict[str, float]  # further figures

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.extras = {}

    @property
    def files(self) -> list[Path]:
        """What it reads."""
        return self.checkpoint.files

    def touch(self) -> None:
        """Make the memory that `load` is to fill, where that is the point."""

    def load(self) -> None:
        """What is timed: until each worker has its shards."""
        raise NotImplementedError

    def sums(self, name: str) -> list[int]:
        """`checksum` of a parameter's shards, by worker."""
        raise NotImplementedError

    def close(self) -> None:
        """End what was started."""


# -- helpers -----------------------------------------------------------------------------------


def empty(shape: tuple[int, ...]) -> torch.Tensor:
    """Fresh memory."""
    return torch.empty(shape, dtype=torch.bfloat16)


def shard_shape(weight: Weight) -> tuple[int, ...]:
    """Of each worker's part."""
    parts = (WORKERS if dim == weight.dim else 1 for dim in range(len(weight.shape)))
    return tuple(size // part for size, part in zip(weight.shape, parts, strict=True))


def load_files(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """All parameters by safetensors."""
    from safetensors.torch import load_file

    whole = {}
    for path in checkpoint.files:
        whole.update(load_file(path))
    return whole


# -- the bound ---------------------------------------------------------------------------------


class Bound(Side):
    """4 threads read a quarter of the bytes each, one after the other, into memory of their own."""

    version = f"Python {sys.version.split()[0]}"
    touched: ClassVar[bool] = False

    def touch(self) -> None:
        """Nothing, or read all once."""
        count = len(self.files)
        sizes = [path.stat().st_size for path in self.files]
        # a quarter of each file: (file, offset, bytes), for each thread
        self._runs = [
            [(i, r * sizes[i] // WORKERS, (r + 1) * sizes[i] // WORKERS) for i in range(count)]
            for r in range(WORKERS)
        ]
        self._memory: list[memoryview | None] = [None] * WORKERS
        if self.touched:
            self.load()

    def load(self) -> None:
        """Read all."""
        files = [os.open(path, os.O_RDONLY) for path in self.files]

        def read(rank: int) -> None:
            memory = self._memory[rank]
            if memory is None:
                size = sum(end - begin for _, begin, end in self._runs[rank])
                memory = memoryview(torch.empty(size, dtype=torch.uint8).numpy())
                self._memory[rank] = memory
            for index, begin, end in self._runs[rank]:
                while begin < end:
                    most = min(CHUNK, end - begin)
                    got = os.preadv(files[index], [memory[:most]], begin)
                    memory, begin = memory[got:], begin + got

        try:
            in_threads(read)
        finally:
            for file in files:
                os.close(file)

    def sums(self, name: str) -> list[int]:
        """By the place of the bytes in the file: each worker's shard, from whole quarters."""
        weight = next(w for w in self.checkpoint.weights if w.name == name)
        whole = bytearray()
        for rank, runs in enumerate(self._runs):
            memory = self._memory[rank]
            assert memory is not None
            at = 0
            for index, begin, end in runs:
                first = max(begin, weight.offset)
                last = min(end, weight.offset + weight.nbytes)
                if index == weight.file and first < last:
                    whole += memory[at + first - begin : at + last - begin]
                at += end - begin
        tensor = torch.frombuffer(whole, dtype=torch.bfloat16).view(weight.shape)
        return [checksum(cut(tensor, weight.dim, rank)) for rank in range(WORKERS)]


class BoundTouched(Bound):
    """The same into memory that was read into before."""

    touched = True


# -- discolab ----------------------------------------------------------------------------------


class Discolab(Side):
    """`sess.load` with worker threads, into new tensors."""

    engine: ClassVar[str] = "threads"
    touched: ClassVar[bool] = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        import discolab

        self.version = discolab.__version__
        self.session = discolab.make_session(WORKERS, engine=self.engine)
        self.session.sync_all()
        # the first load of a process also imports; what that takes is told, not counted
        begin = time.perf_counter()
        least = min(checkpoint.weights, key=lambda weight: weight.nbytes).name
        self.load(names=[least])
        self.extras["first_s"] = time.perf_counter() - begin
        del self.weights

    def touch(self) -> None:
        """Nothing, or load all once."""
        self.into: Any = None
        if self.touched:
            self.load()
            self.into = self.weights

    def load(self, **options: Any) -> None:
        """Load by the plan."""
        if getattr(self, "into", None) is not None:
            options["into"] = self.into
        path = self.checkpoint.folder
        self.weights = self.session.load(path, PLAN, progress=False, **options)

    def sums(self, name: str) -> list[int]:
        """Made by the workers."""
        found = self.session.call_packed(checksum, self.weights[name])
        return found.debug_get_from_all()  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the session."""
        self.session.shutdown()


class DiscolabInto(Discolab):
    """`sess.load(into=...)`: into tensors that are there already."""

    touched = True


class DiscolabProcesses(Discolab):
    """`sess.load` where worker 0 is a thread and three are processes."""

    engine = "processes"


class DiscolabProcessesInto(Discolab):
    """The same into tensors that are there already."""

    engine = "processes"
    touched = True
