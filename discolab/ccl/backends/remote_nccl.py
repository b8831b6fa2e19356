"""NCCL, or RCCL, between workers in several processes: collectives of tensors on their own GPUs.

Not run by this project's own tests, which have no two GPUs. Members meet at the coordinator as for
Gloo; what they then do is done by their conductors, each on a stream of its own that waits for the
worker's, and for which the worker's waits. Everything else (CPU tensors, messages, barriers) is as
for Gloo.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ...runtime.errors import ArgumentError
from ...runtime.failures import name_ranks
from ...runtime.worker import Worker
from .. import moves
from ..backend import Tensors
from ..call import Call
from ..pattern import CROSSWISE, Pattern
from ..rendezvous.client import CoordinatorClient
from ..rendezvous.conductor import Connect, Gone, ProcessGroup, Ranks
from ..rendezvous.remote import Job
from ..rendezvous.store import GroupStore
from ..work import Work
from . import nccl as in_process
from . import steps, wire
from .process_groups import STEP_SECONDS, start
from .remote_gloo import RemoteGlooBackend


class RemoteNcclBackend(RemoteGlooBackend):
    """Collectives of tensors on the workers' own GPUs by NCCL, of others by Gloo."""

    name = "nccl"

    def __init__(self, worker: Worker) -> None:
        for name, value in in_process._ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        super().__init__(worker)
        self._stream = torch.cuda.Stream(worker.device)
        self._connect_nccl: Connect = functools.partial(_connect, self.client, worker.device)

    def start(self, call: Call, pattern: Pattern, srcs: Tensors, outs: Tensors) -> Work:
        """See `RemoteGlooBackend`."""
        if not call.on_gpu or len(call.group) == 1:
            return super().start(call, pattern, srcs, outs)
        for tensor in (*srcs, *outs):
            if tensor.device != call.worker.device:
                raise ArgumentError(
                    f"{call.name}: the tensor is on {tensor.device}, and 'nccl' moves those on the "
                    f"worker's own GPU, {call.worker.device}; init_ccl('gloo') moves any"
                )
        me = call.group.index(call.rank)
        job = _DeviceJob(pattern, me, srcs, outs, self._stream, self._connect_nccl)
        parts = (srcs, outs) if pattern.kind == CROSSWISE else None
        return self.join(call, job, None, parts)


class _DeviceJob(Job):
    """A collective by NCCL."""

    def __init__(
        self,
        pattern: Pattern,
        me: int,
        srcs: Tensors,
        outs: Tensors,
        stream: torch.cuda.Stream,
        connect: Connect,
    ) -> None:
        self.connect = connect
        self._program = steps.program(pattern)(
            steps.Place(me, pattern.members, wire.ARITHMETIC), srcs, outs
        )
        self._srcs, self._outs, self._stream = srcs, outs, stream
        self._begun = moves.posted(srcs, outs)
        self._done: Sequence[moves.Event] = ()

    def carry_out(self, end: ProcessGroup, void: Callable[[], bool]) -> None:
        """See `Job`."""
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            moves.enter(self._begun, self._srcs, self._outs)
            for tensor in (*self._srcs, *self._outs):
                tensor.record_stream(self._stream)

            def do(step: steps.Step) -> None:
                if void():
                    raise Gone
                for work in start(end, step) if len(step.data) else ():
                    work.wait()  # for the stream, not for the host

            steps.run(self._program, do)()
            self._done = moves.posted(self._srcs, self._outs)

    def adopt(self) -> None:
        """See `Job`."""
        moves.adopt(self._done, self._srcs, self._outs)


def _connect(
    client: CoordinatorClient,
    device: torch.device,
    ranks: Ranks,
    number: int,
    unwanted: Callable[[], bool],
) -> ProcessGroup:
    """This worker's end of a process group of NCCL."""
    torch.cuda.set_device(device)
    options: Any = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=STEP_SECONDS)
    store = GroupStore(client, f"{number}/nccl/", STEP_SECONDS, unwanted)
    place = ranks.index(client.worker.worker_id)
    made: Any = c10d.ProcessGroupNCCL(store, place, len(ranks), options)
    made.allreduce([torch.ones(1, device=device)], c10d.AllreduceOptions()).wait()
    torch.cuda.current_stream().synchronize()
    store.connected = True
    return made


def obstacle(fellows: Sequence[Any]) -> str:
    """Why workers can't use NCCL, "" if they can; from what they have told (agree.py)."""
    way_out = "; use 'gloo', which moves tensors on any devices"
    without = [fellow.rank for fellow in fellows if not fellow.device.startswith("cuda")]
    if without:
        missing = f"there is none for {name_ranks(without)}"
        return f"'nccl' needs a GPU for every worker, and {missing}{way_out}"
    by_gpu: dict[tuple[str, str], list[int]] = {}
    for fellow in fellows:
        by_gpu.setdefault((fellow.machine, fellow.gpu), []).append(fellow.rank)
    for ranks in by_gpu.values():
        if len(ranks) > 1:
            return (
                f"{name_ranks(ranks)} share a GPU, and 'nccl' needs one for each worker{way_out}, "
                "or one worker for each GPU"
            )
    lacking = [fellow.rank for fellow in fellows if not fellow.nccl]
    if lacking:
        return f"torch was built without NCCL on {name_ranks(lacking)}{way_out}"
    return ""
