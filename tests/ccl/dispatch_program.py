"""What torch's dispatcher gets to know of collectives: the same program on Gloo and on workers."""

import contextlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """The names of the operators ``c10d::…`` that come by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def collectives() -> dict[str, Callable[[], Any]]:
    """Each gives what it has got, so that its numbers can be compared too."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def mine(n: int) -> torch.Tensor:
        return torch.arange(float(n)) + 10 * rank

    def pieces(n: int) -> list[torch.Tensor]:
        return [torch.zeros(n) for _ in range(size)]

    def into(out: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = function(out, *args, **kwargs)
        if work is not None:
            work.wait()
        return out

    def gathered() -> Any:
        out = pieces(3) if rank == 0 else None
        dist.gather(mine(3), out, 0)
        return out

    def objects() -> Any:
        out: list[Any] = [None] * size
        dist.all_gather_object(out, {"rank": rank})
        return out

    def ring() -> Any:
        got = torch.zeros(3)
        ops = [
            dist.P2POp(dist.isend, mine(3), (rank + 1) % size),
            dist.P2POp(dist.irecv, got, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return got

    def reduced_to_root() -> Any:
        out = into(mine(3), dist.reduce, 1)
        return out if rank == 1 else None  # Gloo leaves partial sums with the others

    def spread() -> list[torch.Tensor]:
        return [mine(2) + 100 * i for i in range(size)]

    return {
        "all_reduce": lambda: into(mine(4), dist.all_reduce),
        "all_reduce, maximum, async": lambda: into(
            mine(4), dist.all_reduce, op=dist.ReduceOp.MAX, async_op=True
        ),
        "broadcast": lambda: into(mine(4), dist.broadcast, 1),
        "reduce": reduced_to_root,
        "all_gather": lambda: into(pieces(3), dist.all_gather, mine(3)),
        "all_gather_single": lambda: into(
            torch.zeros(3 * size), dist.all_gather_single, mine(3)
        ),
        "reduce_scatter": lambda: into(torch.zeros(2), dist.reduce_scatter, spread()),
        "reduce_scatter_single": lambda: into(
            torch.zeros(2), dist.reduce_scatter_single, torch.cat(spread())
        ),
        "gather": gathered,
        "scatter": lambda: into(torch.zeros(2), dist.scatter, spread() if rank == 1 else None, 1),
        "all_to_all_single": lambda: into(
            torch.zeros(2 * size), dist.all_to_all_single, torch.cat(spread())
        ),
        "barrier": dist.barrier,
        "objects": objects,
        "send and receive": ring,
        "a group": lambda: into(mine(2), dist.all_reduce, group=pair()),
    }  # fmt: skip


def pair() -> Any:
    """A group of this worker and another."""
    return dist.new_subgroups(2)[0]


def plain(value: Any) -> Any:
    """For JSON."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, list) else value


def sharded() -> None:
    """DTensors and a step of a sharded model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(16.0).view(4, 4)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    rows.redistribute(placements=[Replicate()])
    rows.redistribute(placements=[Shard(1)])
    distribute_tensor(whole, mesh, [Replicate()]).sum().redistribute(placements=[Replicate()])
    (rows.sum(0)).redistribute(placements=[Replicate()])
    assert rows.sum(0).placements == (Partial(),)
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)))
    with warnings.catch_warnings(action="ignore"):  # torch's own, of its hooks
        model(torch.ones(2, 4)).sum().backward()


def facts() -> dict[str, Any]:
    """What this rank sees."""
    found: dict[str, Any] = {}
    for name, run in collectives().items():
        with Recorder() as recorder:
            got = run()
        found[name] = [recorder.seen, plain(got)]
        with CommDebugMode() as counter:
            run()
        found[f"{name}, counted"] = {str(k): v for k, v in counter.get_comm_counts().items()}
        if name not in ("objects", "a group"):  # which read what they get
            with FakeTensorMode():
                run()
    with CommDebugMode() as counter:
        sharded()
    found["sharded"] = {str(k): v for k, v in counter.get_comm_counts().items()}
    # in threads there is one profiler for the process
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profiler if dist.get_rank() == 0 else contextlib.nullcontext():
        dist.all_reduce(torch.ones(3))
        dist.all_gather_single(torch.zeros(3 * dist.get_world_size()), torch.ones(3))
    if dist.get_rank() == 0:
        keys = sorted(event.key for event in profiler.key_averages())
        found["profiled"] = [key for key in keys if key.startswith("c10d::")]
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(facts()))
    dist.destroy_process_group()
