"""NCCL, or RCCL where torch is built for ROCm: collectives between GPUs, one for each worker.

Not run by this project's own tests, which have no GPU: what is here besides the process group
itself is little, and the rest is shared with Gloo, which they run.

All work is put on the streams of the last member to arrive, which wait for the others' (as for
`local`); the others' then wait for those. Each member's part is started on a thread of its own,
because the members of one process wait for each other inside of the library. The library is
told to leave the process alone when something goes wrong: by itself it would end it, and the
notebook's kernel with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ...runtime.errors import ArgumentError
from ...runtime.failures import name_ranks
from ...runtime.worker import Worker
from ..backend import Tensors
from ..board.rendezvous import Contribution, PendingCollective
from ..call import Call
from ..groups import Group
from ..pattern import Pattern
from ..work import Work
from . import background, steps, wire
from .connections import ProcessGroup
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
    """Collectives of tensors on the workers' own GPUs by NCCL."""

    name = "nccl"
    ops = wire.ARITHMETIC

    def __init__(self, local: LocalBackend) -> None:
        super().__init__(local)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)

    def _reaches(self, call: Call) -> bool:
        return call.on_gpu

    def start(self, call: Call, pattern: Pattern, srcs: Tensors, outs: Tensors) -> Work:
        """See `Backend`."""
        for tensor in (*srcs, *outs):
            if tensor.is_cuda and tensor.device != call.worker.device:
                raise ArgumentError(
                    f"{call.name}: the tensor is on {tensor.device}, and 'nccl' moves those on the "
                    f"worker's own GPU, {call.worker.device}; init_ccl('local') moves any"
                )
        return super().start(call, pattern, srcs, outs)

    def _place(self, contributions: Sequence[Contribution]) -> AbstractContextManager[Any]:
        return _on(
            [
                torch.cuda.current_stream(contribution.call.worker.device)
                for contribution in contributions
            ]
        )

    def _make(self, store: c10d.Store, place: int, worker: Worker, group: Group) -> ProcessGroup:
        torch.cuda.set_device(worker.device)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=STEP_SECONDS)
        made: ProcessGroup = c10d.ProcessGroupNCCL(store, place, len(group), options)
        made.allreduce([torch.ones(1, device=worker.device)], c10d.AllreduceOptions()).wait()
        torch.cuda.current_stream().synchronize()  # connected, before anything else is started
        return made

    def _perform(
        self,
        collective: PendingCollective,
        contributions: Sequence[Contribution],
        todo: list[steps.Step],
    ) -> None:
        devices = [contribution.call.worker.device for contribution in contributions]
        streams = [torch.cuda.current_stream(device) for device in devices]

        def issue(i: int) -> None:
            with torch.cuda.stream(streams[i]):
                for work in start(groups[i], todo[i]):
                    work.wait()  # for the stream, not for the host

        with self._leased(collective, contributions) as groups, self._connections.lock:
            self._each(collective, issue)

    def _close(self, groups: list[ProcessGroup]) -> None:
        for group in groups:  # side by side, for they may wait for each other and for the device
            background.begin(group.shutdown)

    def _abort(self, groups: list[ProcessGroup]) -> None:
        for group in groups:
            background.begin(group.abort)  # it may wait for the device


@contextmanager
def _on(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Have these be the current streams of their devices."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield


def obstacle(workers: Sequence[Worker]) -> str:
    """Why these workers can't use NCCL, "" if they can. Touches no GPU."""
    way_out = "; use 'local', which moves tensors on any devices"
    without = [worker.worker_id for worker in workers if worker.device.type != "cuda"]
    if without:
        missing = f"there is none for {name_ranks(without)}"
        return f"'nccl' needs a GPU for every worker, and {missing}{way_out}"
    by_device: dict[torch.device, list[int]] = {}
    for worker in workers:
        by_device.setdefault(worker.device, []).append(worker.worker_id)
    for device, ranks in by_device.items():
        if len(ranks) > 1:
            return (
                f"{name_ranks(ranks)} share the GPU {device}, and 'nccl' needs one for each "
                f"worker{way_out}, or one worker for each GPU"
            )
    if not torch.distributed.is_nccl_available():
        return f"this torch ({torch.__version__}) was built without NCCL{way_out}"
    return ""
