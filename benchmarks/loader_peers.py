"""The other ways to have 4 workers hold their shards, as their users would write them.

Adapters as in loader_sides.py. None reads a byte that it need not; where a library gives views of
a file or of the whole parameter, the worker's part is copied, as workers are to own their shards.
"""

from __future__ import annotations

from pathlib import Path

import torch
from loader_gloo import FastSharded, Gloo, GlooAll
from loader_sides import (
    Bound,
    BoundTouched,
    Discolab,
    DiscolabInto,
    DiscolabProcesses,
    DiscolabProcessesInto,
    Side,
    empty,
    in_threads,
    load_files,
    shard_shape,
)
from loader_weights import WORKERS, Checkpoint, checksum, cut, opened

Shards = list[dict[str, torch.Tensor]]  # by worker


def cut_all(checkpoint: Checkpoint, whole: dict[str, torch.Tensor]) -> Shards:
    """A copy of each worker's part of each; a parameter is let go once it is cut."""
    shards: Shards = [{} for _ in range(WORKERS)]
    for weight in checkpoint.weights:
        tensor = whole.pop(weight.name)
        for rank, mine in enumerate(shards):
            part = cut(tensor, weight.dim, rank)
            mine[weight.name] = part.clone(memory_format=torch.contiguous_format)
    return shards


class DiscolabScatter(Side):
    """Worker 0 loads all by safetensors, then `ccl.scatter` and `ccl.broadcast_`, as Disco does."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        import safetensors.torch  # noqa: F401

        import discolab

        self.version = discolab.__version__
        self.session = discolab.ThreadedSession(WORKERS)
        self.session.init_ccl("local")
        self.session.sync_all()

    def load(self) -> None:
        """One call on all workers."""
        self.weights = self.session.call_packed(load_and_scatter, str(self.checkpoint.folder))
        self.session.sync_all()

    def sums(self, name: str) -> list[int]:
        """Made by the workers."""
        found = self.session.call_packed(sum_of, self.weights, name)
        return found.debug_get_from_all()  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the session."""
        self.session.shutdown()


def load_and_scatter(folder: str) -> dict[str, torch.Tensor]:
    """On a worker of discolab."""
    from discolab import ccl, current_worker

    checkpoint = opened(folder)
    rank = current_worker().worker_id
    whole = load_files(checkpoint) if rank == 0 else {}
    mine = {}
    for weight in checkpoint.weights:
        if weight.dim is None:
            tensor = whole[weight.name].clone() if rank == 0 else empty(weight.shape)
            mine[weight.name] = ccl.broadcast_(tensor)
            continue
        # a scatter cuts the first dimension only: others are brought there by a copy
        parts = None
        if rank == 0:
            tensor = whole[weight.name]
            parts = tensor if weight.dim == 0 else torch.cat(tensor.chunk(WORKERS, weight.dim))
        shape = shard_shape(weight)
        mine[weight.name] = ccl.scatter(parts, out=empty(shape))
    return mine


def sum_of(shards: dict[str, torch.Tensor], name: str) -> int:
    """`checksum` of one of a worker's shards."""
    return checksum(shards[name])


class InProcess(Side):
    """A peer whose shards are tensors of this process."""

    shards: Shards

    def sums(self, name: str) -> list[int]:
        """Made here."""
        return [checksum(mine[name]) for mine in self.shards]


class LoadFile(InProcess):
    """safetensors' `load_file`, then a copy of each worker's part."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        import safetensors.torch

        self.version = safetensors.__version__

    def load(self) -> None:
        """In this thread."""
        self.shards = cut_all(self.checkpoint, load_files(self.checkpoint))


class GetSlice(InProcess):
    """safetensors' `get_slice` in 4 threads; what it gives may be a view of the file: copied."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        import safetensors

        self.version = safetensors.__version__
        self.shards = [{} for _ in range(WORKERS)]

    def load(self) -> None:
        """A thread for each worker, which opens the files itself."""
        in_threads(self._load)

    def _load(self, rank: int) -> None:
        from safetensors import safe_open

        for index, path in enumerate(self.files):
            with safe_open(path, framework="pt") as file:
                for weight in self.checkpoint.weights:
                    if weight.file != index:
                        continue
                    found = file.get_slice(weight.name)
                    if weight.dim is None:
                        part = found[:]
                    else:
                        size = weight.shape[weight.dim] // WORKERS
                        rows = slice(rank * size, (rank + 1) * size)
                        part = found[rows] if weight.dim == 0 else found[:, rows]
                    copied = part.clone(memory_format=torch.contiguous_format)
                    self.shards[rank][weight.name] = copied


class FastSafetensors(InProcess):
    """fastsafetensors' loader on the CPU, then a copy of each worker's part."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        from importlib.metadata import version

        import fastsafetensors

        self.version = version("fastsafetensors")
        self.make = fastsafetensors.SafeTensorsFileLoader

    def load(self) -> None:
        """With its own threads."""
        loader = self.make(None, device="cpu", nogds=True)
        loader.add_filenames({0: [str(path) for path in self.files]})
        buffers = loader.copy_files_to_device()
        whole = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        self.shards = cut_all(self.checkpoint, whole)
        buffers.close()
        loader.close()


class Tvm(Side):
    """TVM's `ShardLoader` on a `ThreadedSession`, from a copy that was cut for 4 workers before."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        from control_plane_child import load_disco

        disco, self.version = load_disco()
        self.session = disco.ThreadedSession(WORKERS)
        path = checkpoint.tvm / "tensor-cache.json"
        create = self.session.get_global_func("runtime.disco.ShardLoader")
        self.loader = create(str(path), path.read_text(), "{}", None)
        name = "runtime.disco.ShardLoaderLoadAllPresharded"
        self.function = self.session.get_global_func(name)
        self.session._sync_all()

    @property
    def files(self) -> list[Path]:
        """Files of its own."""
        return self.checkpoint.tvm_files

    def load(self) -> None:
        """Each worker reads its own files."""
        self.weights = self.function(self.loader)
        self.session._sync_all()

    def sums(self, name: str) -> list[int]:
        """Made here: worker threads share their tensors with us."""
        index = [weight.name for weight in self.checkpoint.weights].index(name)
        found = [self.weights.debug_get_from_remote(rank)[index] for rank in range(WORKERS)]
        return [checksum(torch.from_dlpack(tensor)) for tensor in found]


SIDES: dict[str, type[Side]] = {
    "bound": Bound,
    "bound-touched": BoundTouched,
    "discolab": Discolab,
    "discolab-into": DiscolabInto,
    "discolab-processes": DiscolabProcesses,
    "discolab-processes-into": DiscolabProcessesInto,
    "get-slice": GetSlice,
    "load-file": LoadFile,
    "fastsafetensors": FastSafetensors,
    "fastsafetensors-sharded": FastSharded,
    "scatter-discolab": DiscolabScatter,
    "scatter-gloo": Gloo,
    "scatter-torch-load": GlooAll,
    "tvm": Tvm,
}
