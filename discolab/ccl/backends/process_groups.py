"""Backends over torch's process group objects, for workers of one address space: Gloo and NCCL.

Members meet on the session's board as for `local` (rendezvous/local.py), so what they disagree
about, or that one never comes, is found before the library hears of it. The last to arrive starts a
conductor: a thread that makes the members' process groups if they are new, packs their tensors,
starts every member's part of each step, waits, writes the results, and ends the collective. So a
worker never waits inside of the library: its wait is the board's, which an interrupt ends.

The library works on packed copies. What it still does after an interrupt disturbs nobody; its
process groups are not used again.

There is one backend object a session; its process groups are kept in `_connections`, whose lock is
held while they are made and while the members' parts of one step are started, so that these come
in the same order on all of them. Only conductors take it. Messages and barriers need no library
where all share one address space; they are those of `local`, and so are collectives of tensors on
devices that the library can't reach.
"""

from __future__ import annotations

import queue
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch

# torch does not export the option classes from torch.distributed
from torch._C import _distributed_c10d as c10d

from ...runtime.errors import CollectiveAborted, CollectiveError
from ...runtime.interruptible import TICK
from ...runtime.worker import Worker
from .. import moves
from ..backend import Backend, BackendStatistics, Tensor, Tensors
from ..board.rendezvous import Contribution, PendingCollective
from ..call import Call
from ..groups import Group
from ..pattern import Pattern
from ..work import Work
from . import background, steps
from .connections import Connections, ProcessGroup
from .local import LocalBackend

R = TypeVar("R")

_NOTHING = threading.Event()  # to wait for
_NOTHING.set()

CONNECT_SECONDS = 30
STEP_SECONDS = 120  # without any progress; all members are there, so none should pass

_TAG = 0  # of all that goes from one member to another
_REDUCE_OPS: dict[str, Any] = {
    "sum": c10d.ReduceOp.SUM,
    "prod": c10d.ReduceOp.PRODUCT,
    "min": c10d.ReduceOp.MIN,
    "max": c10d.ReduceOp.MAX,
    "band": c10d.ReduceOp.BAND,
    "bor": c10d.ReduceOp.BOR,
    "bxor": c10d.ReduceOp.BXOR,
}


class _Left(Exception):
    """Nobody waits for the result any more."""


class ProcessGroupBackend(Backend):
    """Collectives by a library of torch's, with one process group a worker and group."""

    ops: frozenset[str]
    """The reductions that the library has."""

    def __init__(self, local: LocalBackend) -> None:
        self._local = local
        self._rendezvous = local.rendezvous
        self._connections = Connections(self._files, self._close, self._abort)
        self._turns: dict[Group, tuple[int, threading.Event]] = {}

    # -- what a library adds -------------------------------------------------------------------

    @abstractmethod
    def _reaches(self, call: Call) -> bool:
        """Whether the library can have the tensors of a call; if not, `local` moves them."""

    @abstractmethod
    def _make(self, store: c10d.Store, place: int, worker: Worker, group: Group) -> ProcessGroup:
        """One member's process group; runs for all members at once, each on its own thread."""

    @abstractmethod
    def _perform(
        self,
        collective: PendingCollective,
        contributions: Sequence[Contribution],
        todo: list[steps.Step],
    ) -> None:
        """Do one step of all members, whose parts are in `todo`."""

    def _files(self, count: int) -> int:
        """How many file descriptors the process groups of so many members need; 0: unknown."""
        return 0

    def _close(self, groups: list[ProcessGroup]) -> None:
        """End process groups that are idle in good order, before they are let go of."""

    def _abort(self, groups: list[ProcessGroup]) -> None:
        """End what process groups may be in the middle of, if it does not end by itself."""

    def _place(self, contributions: Sequence[Contribution]) -> AbstractContextManager[Any]:
        """Where the conductor works; made on the thread of the last member."""
        return nullcontext()

    # -- the backend -----------------------------------------------------------------------------

    def admit(self, worker: Worker) -> None:
        """See `Backend`."""
        self._connections.admit(worker)

    def dismiss(self, worker: Worker) -> None:
        """See `Backend`."""
        self._connections.dismiss(worker)

    def forget(self, worker: Worker, group: Group) -> None:
        """See `Backend`."""
        self._connections.forget(worker, group)

    def send(self, call: Call, src: Tensor, peer: int, tag: str) -> Work:
        """See `Backend`. Copies at once and never waits."""
        return self._local.send(call, src, peer, tag)

    def recv(self, call: Call, out: Tensor, peer: int | None, tag: str) -> Work:
        """See `Backend`."""
        return self._local.recv(call, out, peer, tag)

    def statistics(self) -> BackendStatistics:
        """See `Backend`."""
        return self._rendezvous.statistics(self.name)

    def start(self, call: Call, pattern: Pattern, srcs: Tensors, outs: Tensors) -> Work:
        """See `Backend`."""
        if not pattern.count or not self._reaches(call):
            return self._local.start(call, pattern, srcs, outs)
        program = steps.program(pattern)

        def execute(collective: PendingCollective, contributions: Sequence[Contribution]) -> None:
            place, (before, mine) = (
                self._place(contributions),
                self._turn(collective.group, call.worker),
            )
            collective.abroad = True
            try:
                with call.worker.sheltered():
                    background.begin(
                        self._conduct, collective, contributions, program, place, before, mine
                    )
            except BaseException:
                mine.set()  # or the next one waits for it: no thread could be had
                raise

        return self._rendezvous.start(call, srcs, outs, execute)

    # -- conductors ------------------------------------------------------------------------------

    def _conduct(
        self,
        collective: PendingCollective,
        contributions: Sequence[Contribution],
        program: steps.Program,
        place: AbstractContextManager[Any],
        before: threading.Event,
        mine: threading.Event,
    ) -> None:
        rendezvous = self._rendezvous
        before.wait()
        try:
            with place, torch.no_grad():
                finishes = self._drive(collective, contributions, program)
                if _is_void(collective, contributions):
                    raise _Left
                with torch.inference_mode():  # or a result could be no inference tensor
                    for finish in finishes:
                        finish()
                if collective.first.on_gpu:
                    collective.done = moves.posted(*((*p.srcs, *p.outs) for p in contributions))
            rendezvous.finish(collective)
        except BaseException as exc:
            self._connections.drop(collective.group, collective.ordinal)
            if isinstance(exc, _Left):
                rendezvous.fail(
                    collective, CollectiveAborted, f"{collective.title()} was interrupted"
                )
            else:
                text = f"{collective.title()} failed in {self.name}: {type(exc).__name__}: {exc}"
                rendezvous.fail(collective, CollectiveError, text)
        finally:
            mine.set()

    def _turn(self, group: Group, worker: Worker) -> tuple[threading.Event, threading.Event]:
        """What to wait for first, and what to set at the end: a group's are done in order.

        Only the last member of a group's collective is here, so one at a time. What an interrupt
        has cut off is not waited for.
        """
        cut, before = self._turns.get(group, (-1, _NOTHING))
        mine = threading.Event()
        self._turns[group] = (worker.resumed_at, mine)
        return before if cut == worker.resumed_at else _NOTHING, mine

    def _drive(
        self,
        collective: PendingCollective,
        contributions: Sequence[Contribution],
        program: steps.Program,
    ) -> list[steps.Finish]:
        """Run the members' programs side by side; what writes their results."""
        members = [
            program(
                steps.Place(i, len(contributions), self.ops), contribution.srcs, contribution.outs
            )
            for i, contribution in enumerate(contributions)
        ]
        while True:
            todo: list[steps.Step] = []
            finishes: list[steps.Finish] = []
            for member in members:
                try:
                    todo.append(next(member))
                except StopIteration as end:
                    finishes.append(end.value)
            if finishes:
                assert not todo
                return finishes
            if any(len(step.data) for step in todo):
                self._perform(collective, contributions, todo)

    def _leased(
        self, collective: PendingCollective, contributions: Sequence[Contribution]
    ) -> AbstractContextManager[list[ProcessGroup]]:
        """The members' process groups for one step; new ones after an interrupt."""
        workers = [contribution.call.worker for contribution in contributions]

        def make() -> list[ProcessGroup]:
            store = c10d.HashStore()
            store.set_timeout(timedelta(seconds=CONNECT_SECONDS))
            return self._each(
                collective, lambda i: self._make(store, i, workers[i], collective.group)
            )

        cut = max(worker.resumed_at for worker in workers)
        return self._connections.lease(collective.group, cut, make)

    def _each(self, collective: PendingCollective, do: Callable[[int], R]) -> list[R]:
        """``do(i)`` for every member at once, each on a thread of its own; their results.

        Raises
        ------
        BaseException
            The first that one of them raises; or that the collective has failed meanwhile.
        """
        count = len(collective.group)
        ended: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

        def one(i: int) -> None:
            try:
                ended.put((i, do(i), None))
            except BaseException as exc:
                ended.put((i, None, exc))

        for i in range(count):
            background.begin(one, i)
        results: dict[int, R] = {}
        while len(results) < count:
            try:
                i, result, error = ended.get(timeout=TICK)
            except queue.Empty:
                if collective.settled():
                    raise _Left from None
                continue
            if error is not None:
                raise error
            results[i] = result
        return [results[i] for i in range(count)]


def _is_void(collective: PendingCollective, contributions: Sequence[Contribution]) -> bool:
    """Whether an interrupt has ended it for somebody: then nothing may be written any more."""
    return collective.settled() or any(
        contribution.call.worker.interrupts
        or contribution.call.worker.resumed_at > collective.ordinal
        for contribution in contributions
    )


def start(group: ProcessGroup, step: steps.Step | steps.Exchange) -> list[Any]:
    """Start one member's part of a step with its process group; torch's own work objects."""
    if isinstance(step, steps.Exchange):
        works = [group.recv([room], of, _TAG) for of, room in step.takes if room.numel()]
        return works + [group.send([data], to, _TAG) for to, data in step.gives if data.numel()]
    return [_start(group, step)]


def _start(group: ProcessGroup, step: steps.Step) -> Any:
    match step:
        case steps.AllReduce(data, op):
            reducing = c10d.AllreduceOptions()
            reducing.reduceOp = _REDUCE_OPS[op]
            return group.allreduce([data], reducing)
        case steps.Reduce(data, op, root):
            to_one = c10d.ReduceOptions()
            to_one.reduceOp, to_one.rootRank = _REDUCE_OPS[op], root
            return group.reduce([data], to_one)
        case steps.ReduceScatter(data, out, op):
            scattering = c10d.ReduceScatterOptions()
            scattering.reduceOp = _REDUCE_OPS[op]
            return _method(group, "_reduce_scatter_base", "reduce_scatter_single")(
                out, data, scattering
            )
        case steps.AllGather(data, out):
            gathering = c10d.AllgatherOptions()
            return _method(group, "_allgather_base", "all_gather_single")(out, data, gathering)
        case steps.Broadcast(data, root):
            from_one = c10d.BroadcastOptions()
            from_one.rootRank = root
            return group.broadcast([data], from_one)
        case steps.AllToAll(data, out, gives, takes):
            exchanging = c10d.AllToAllOptions()
            return _method(group, "alltoall_base", "all_to_all_single")(
                out, data, takes, gives, exchanging
            )


def _method(group: ProcessGroup, *names: str) -> Callable[..., Any]:
    """The first that there is: torch gives some of them new names, from 2.13 on."""
    found = [getattr(group, name) for name in names if hasattr(group, name)]
    return cast(Callable[..., Any], found[0])
