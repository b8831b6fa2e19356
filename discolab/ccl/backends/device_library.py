"""NCCL (or RCCL), or whatever library a type of accelerator has: a device for each worker.

What is here besides the process group itself is little, and the rest is shared with Gloo.

Each member's part is started by its conductor, because the members of one process wait for each
other inside of the library, on a stream of its own that waits for the worker's; the workers' then
wait for those. The library is told to leave the process alone when something goes wrong: by itself
it would end it, and the notebook's kernel with it (nccl.py).

A device comes to a collective when it has done what it was given before, hours later maybe, and
the others' wait for it in the library. That is no fault, so the library's own deadline is far away:
all that it could do is to leave wrong numbers. Stop ends such a wait, by `end_if_stuck`.
"""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ...runtime import accelerators
from ...runtime.errors import ArgumentError, SessionError, WaitTimeoutError
from ...runtime.failures import name_ranks
from ...runtime.interrupts import TICK, Interruptible, at_interrupt
from ...runtime.worker import Worker
from .. import memory
from ..backend import Tensors
from ..board.rendezvous import Contribution
from ..call import Call
from ..pattern import Pattern
from ..rendezvous.conductor import LET_GO_SECONDS, ProcessGroup, abort_beside
from ..rendezvous.store import GroupStore, LocalGroupStore
from ..work import Work
from . import encoding, libraries, nccl, steps
from .local import LocalBackend
from .process_groups import ProcessGroupBackend, start

CONNECTION_LASTS = timedelta(days=30)  # for one operation; see the module


class DeviceLibraryBackend(ProcessGroupBackend):
    """Collectives of tensors on the workers' own devices by their library, in one address space."""

    ops = encoding.ARITHMETIC
    devices_only = True

    def __init__(self, local: LocalBackend) -> None:
        self.name = libraries.library_name()
        super().__init__(local)
        nccl.set_environment()
        self._streams: dict[int, torch.Stream] = {}

    def admit(self, worker: Worker) -> None:
        self._streams[worker.worker_id] = torch.Stream(worker.device)
        super().admit(worker)
        end_if_stuck(worker, functools.partial(self._end_all_of, worker.worker_id))

    def _end_all_of(self, rank: int) -> None:
        with self._lock:
            self._handles.leave(rank)

    def _reaches(self, call: Call) -> bool:
        return call.on_gpu

    def start(self, call: Call, pattern: Pattern, srcs: Tensors, outs: Tensors) -> Work:
        there = [tensor for tensor in (*srcs, *outs) if accelerators.on_accelerator(tensor.device)]
        check_devices(call, there, self.name, "local")
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
        with on(stream):
            finish = run(program, do, stream, contribution.events, srcs, outs)

        def write() -> Sequence[memory.Event]:
            with on(stream):
                finish()
                return memory.record(srcs, outs)

        return write


# -- shared with processes -------------------------------------------------------------------------

_ends: weakref.WeakKeyDictionary[Interruptible, Callable[[], None]] = weakref.WeakKeyDictionary()
_since: weakref.WeakKeyDictionary[Interruptible, tuple[int, float]] = weakref.WeakKeyDictionary()


def end_if_stuck(worker: Worker, end: Callable[[], None]) -> None:
    """Have a worker's process groups ended by `end` if an interrupt does not stop the worker.

    It may wait for its device, and the device in the library for others that do not come: no
    exception of Python ends that.
    """
    _ends[worker] = end


def _look_whether_stuck(thread: Interruptible) -> None:
    end = _ends.get(thread)
    if end is None or not isinstance(thread, Worker) or not thread.running:
        return
    ordinal, since = _since.get(thread, (-1, 0.0))
    if ordinal != thread.executed:  # the first try
        _since[thread] = thread.executed, time.monotonic()
    elif time.monotonic() - since > LET_GO_SECONDS:
        _since[thread] = ordinal, math.inf
        end()


at_interrupt.append(_look_whether_stuck)


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """A block in which the calling thread works on a stream, and on its device."""
    with torch.accelerator.device_index(stream.device.index), stream:
        yield


def check_devices(call: Call, tensors: Tensors, name: str, other: str) -> None:
    """Refuse tensors that the library `name` does not move; the backend `other` moves any."""
    for tensor in tensors:
        if tensor.device != call.worker.device:
            raise ArgumentError(
                f"{call.name}: the tensor is on {tensor.device}, and {name!r} moves those on the "
                f"worker's own GPU, {call.worker.device}; init_ccl({other!r}) moves any"
            )


def connect(
    store: GroupStore | LocalGroupStore, place: int, size: int, device: torch.device
) -> ProcessGroup:
    """One member's process group, connected before anything else is started.

    The library makes its communicator in the first collective, and waits there for the other
    members: in a call that nothing ends, on a thread beside, and on a stream of its own, as the
    worker's may have much to do before.

    Raises
    ------
    WaitTimeoutError
        If it takes longer than `store.seconds`.
    SessionError
        If nobody waits for it any more.
    """
    made: list[ProcessGroup] = []
    failed: list[BaseException] = []
    over, given_up = threading.Event(), threading.Event()

    def begin() -> None:
        try:
            accelerators.set_current(device)
            end = libraries.make(store, place, size, CONNECTION_LASTS)
            made.append(end)
            if given_up.is_set():
                raise SessionError("nobody waits for it any more")
            # torch's threads ask the store as long as there is the group: an object of Python
            weakref.finalize(end, id, store).atexit = False
            stream = torch.Stream(device)
            with on(stream):
                end.allreduce([torch.ones(1, device=device)], c10d.AllreduceOptions()).wait()
                stream.synchronize()
        except BaseException as exc:
            failed.append(exc)
        finally:
            over.set()

    threading.Thread(target=begin, name="discolab-connect", daemon=True).start()
    deadline = time.monotonic() + store.seconds
    error: Exception | None = None
    while error is None and not over.wait(TICK):
        if store.unwanted():
            error = SessionError("nobody waits for the other workers to connect any more")
        elif time.monotonic() > deadline:
            error = WaitTimeoutError(
                f"gave up after {store.seconds:g} s waiting for the {size} workers to connect "
                f"their devices: the first collective of {libraries.library_name()!r}, on {device} "
                "here, does not come to its end"
            )
    if error is not None or failed:
        given_up.set()
        for end in made:
            abort_beside(end)
        raise error or failed[0]
    return made[0]


def run(
    program: steps.Steps,
    do: Callable[[steps.Step], None],
    stream: torch.Stream,
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
    """Why these workers can't use their devices' library, "" if they can. Touches no device."""
    way_out = "; use 'local', which moves tensors on any devices"
    gpus = {w.worker_id: str(w.device) if libraries.has_library(w.device) else "" for w in workers}
    text = lacking_gpus(gpus, way_out, named=True)
    if text or libraries.is_available():
        return text
    name = libraries.library_name().upper()
    return f"this torch ({torch.__version__}) was built without {name}{way_out}"


def lacking_gpus(gpus: dict[int, Any], way_out: str, *, named: bool) -> str:
    """Which workers have no GPU of their own, "" if all have; `gpus` by rank, "" for none."""
    name = libraries.library_name()
    without = [rank for rank, gpu in gpus.items() if not gpu]
    if without:
        missing = f"there is none for {name_ranks(without)}"
        return f"{name!r} needs a GPU for every worker, and {missing}{way_out}"
    by_gpu: dict[Any, list[int]] = {}
    for rank, gpu in gpus.items():
        by_gpu.setdefault(gpu, []).append(rank)
    for gpu, ranks in by_gpu.items():
        if len(ranks) > 1:
            return (
                f"{name_ranks(ranks)} share {f'the GPU {gpu}' if named else 'a GPU'}, and {name!r} "
                f"needs one for each worker{way_out}, or one worker for each GPU"
            )
    return ""
