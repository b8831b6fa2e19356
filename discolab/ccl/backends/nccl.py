"""NCCL, or RCCL where torch is built for ROCm: collectives between GPUs, one for each worker.

This project's own tests run it with one worker at most, as they have no two GPUs: what is here
besides the process group itself is little, and the rest is shared with Gloo, which they run.

Each member's part is started by its conductor, because the members of one process wait for each
other inside of the library, on a stream of its own that waits for the worker's; the workers' then
wait for those. The library is told to leave the process alone when something goes wrong: by itself
it would end it, and the notebook's kernel with it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ...runtime.errors import ArgumentError
from ...runtime.failures import name_ranks
from ...runtime.worker import Worker
from .. import memory
from ..backend import Tensors
from ..board.rendezvous import Contribution
from ..call import Call
from ..pattern import Pattern
from ..rendezvous.conductor import ProcessGroup
from ..work import Work
from . import encoding, steps
from .local import LocalBackend
from .process_groups import STEP_SECONDS, ProcessGroupBackend, start

# Read by torch whenever it makes a process group. What the user has set stays.
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # abort communicators, never the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # or a watchdog of the watchdog ends it
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "CUDA_MODULE_LOADING": "EAGER",  # loading a kernel may wait for one that waits for us
}


class NcclBackend(ProcessGroupBackend):
    """Collectives of tensors on the workers' own GPUs by NCCL, within one address space."""

    name = "nccl"
    ops = encoding.ARITHMETIC

    def __init__(self, local: LocalBackend) -> None:
        super().__init__(local)
        set_environment()
        self._streams: dict[int, torch.cuda.Stream] = {}

    def admit(self, worker: Worker) -> None:
        """See `Backend`."""
        self._streams[worker.worker_id] = torch.cuda.Stream(worker.device)
        super().admit(worker)

    def _reaches(self, call: Call) -> bool:
        return call.on_gpu

    def start(self, call: Call, pattern: Pattern, srcs: Tensors, outs: Tensors) -> Work:
        """See `Backend`."""
        check_devices(call, [tensor for tensor in (*srcs, *outs) if tensor.is_cuda], "local")
        return super().start(call, pattern, srcs, outs)

    def _connect(self, store: Any, place: int, size: int, worker: Worker) -> ProcessGroup:
        return connect(store, place, size, worker.device)

    def _perform(self, worker: Worker, end: ProcessGroup, step: steps.Step) -> None:
        perform(end, step)

    def _carry_out(
        self,
        worker: Worker,
        contribution: Contribution,
        program: steps.Steps,
        do: Callable[[steps.Step], None],
    ) -> Callable[[], Sequence[memory.Event]]:
        stream = self._streams[worker.worker_id]
        srcs, outs = contribution.srcs, contribution.outs
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            finish = run(program, do, stream, contribution.events, srcs, outs)

        def write() -> Sequence[memory.Event]:
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                finish()
                return memory.record(srcs, outs)

        return write


# -- shared with processes -------------------------------------------------------------------------


def set_environment() -> None:
    """Have torch leave the process alone when NCCL fails, unless the user wants it otherwise."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def check_devices(call: Call, tensors: Tensors, other: str) -> None:
    """Refuse tensors that NCCL does not move; the backend `other` moves any."""
    for tensor in tensors:
        if tensor.device != call.worker.device:
            raise ArgumentError(
                f"{call.name}: the tensor is on {tensor.device}, and 'nccl' moves those on the "
                f"worker's own GPU, {call.worker.device}; init_ccl({other!r}) moves any"
            )


def connect(store: Any, place: int, size: int, device: torch.device) -> ProcessGroup:
    """One member's process group, connected before anything else is started."""
    torch.cuda.set_device(device)
    options: Any = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=STEP_SECONDS)
    made: Any = c10d.ProcessGroupNCCL(store, place, size, options)
    # torch's threads ask the store for as long as there is the group, and it is an object of Python
    weakref.finalize(made, id, store).atexit = False
    made.allreduce([torch.ones(1, device=device)], c10d.AllreduceOptions()).wait()
    torch.cuda.current_stream().synchronize()
    return made


def run(
    program: steps.Steps,
    do: Callable[[steps.Step], None],
    stream: torch.cuda.Stream,
    begun: Iterable[memory.Event],
    srcs: Tensors,
    outs: Tensors,
) -> steps.Finish:
    """Run one member's program on the current stream, once what the worker has begun is over."""
    memory.wait_for(begun, srcs, outs)
    for tensor in (*srcs, *outs):
        tensor.record_stream(stream)
    return steps.run(program, do)


def perform(end: ProcessGroup, step: steps.Step) -> None:
    """Do one member's part of a step, in the order of the current stream."""
    for work in start(end, step):
        work.wait()  # for the stream, not for the host


def obstacle(workers: Sequence[Worker]) -> str:
    """Why these workers can't use NCCL, "" if they can. Touches no GPU."""
    way_out = "; use 'local', which moves tensors on any devices"
    text = lacking_gpus(
        {w.worker_id: str(w.device) if w.device.type == "cuda" else "" for w in workers},
        way_out,
        named=True,
    )
    if text or torch.distributed.is_nccl_available():
        return text
    return f"this torch ({torch.__version__}) was built without NCCL{way_out}"


def lacking_gpus(gpus: dict[int, Any], way_out: str, *, named: bool) -> str:
    """Which workers have no GPU of their own, "" if all have; `gpus` by rank, "" for none."""
    without = [rank for rank, gpu in gpus.items() if not gpu]
    if without:
        missing = f"there is none for {name_ranks(without)}"
        return f"'nccl' needs a GPU for every worker, and {missing}{way_out}"
    by_gpu: dict[Any, list[int]] = {}
    for rank, gpu in gpus.items():
        by_gpu.setdefault(gpu, []).append(rank)
    for gpu, ranks in by_gpu.items():
        if len(ranks) > 1:
            return (
                f"{name_ranks(ranks)} share {f'the GPU {gpu}' if named else 'a GPU'}, and 'nccl' "
                f"needs one for each worker{way_out}, or one worker for each GPU"
            )
    return ""
