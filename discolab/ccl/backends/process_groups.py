"""Backends over torch's process group objects, for workers of one address space: Gloo and NCCL.

Members meet on the session's board as for `local` (rendezvous/local.py), so what they disagree
about, or that one never comes, is found before the library hears of it. The last to arrive hands
each member's part to that member's conductor (rendezvous/conductor.py), which makes its process
group if that is new, packs the tensors, and does the steps. So a worker never waits inside of the
library: its wait is the board's, which an interrupt ends.

The library works on packed copies. What it still does after an interrupt disturbs nobody; its
process groups are not used again. The last conductor to be done writes all results, if they are
still wanted.

There is one backend object a session. `_lock` guards its state, and is held while the parts of a
collective are handed out, so that they come in the same order to all conductors. Messages and
barriers need no library where all share one address space; they are those of `local`, and so are
collectives of tensors on devices that the library can't reach.
"""

from __future__ import annotations

import functools
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakValueDictionary

import torch

# torch does not export the option classes from torch.distributed
from torch._C import _distributed_c10d as c10d

from ...runtime.errors import CollectiveAborted, CollectiveError, SessionError
from ...runtime.interrupts import TICK, plain_lock
from ...runtime.worker import Worker
from ..backend import Backend, BackendStatistics, Tensor, Tensors
from ..board.handles import GroupHandle, GroupHandles
from ..board.rendezvous import Contribution, PendingCollective
from ..call import Call
from ..groups import Group
from ..memory import Event
from ..pattern import Pattern
from ..rendezvous.conductor import Conductor, Connect, Gone, ProcessGroup, Ranks, Task
from ..rendezvous.store import LocalGroupStore, SharedValues
from ..work import Work
from . import steps
from .local import LocalBackend

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

CONNECT_SECONDS = 30
STEP_SECONDS = 120  # without any progress; all members are there, so none should pass
SPARE_FILES = 32  # that the program may want to open meanwhile
CLOSING_SECONDS = 1.0  # that conductors may take to close what is dropped

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


class ProcessGroupBackend(Backend):
    """Collectives by a library of torch's, with one process group a worker and group."""

    ops: frozenset[str]
    """The reductions that the library has."""

    def __init__(self, local: LocalBackend) -> None:
        self._local = local
        self._rendezvous = local.rendezvous
        self._lock = plain_lock()
        self._members: dict[int, _Member] = {}
        self._handles = _Handles(self._close, self._files)
        # by the numbers of process groups; each is held by what is under way
        self._stores: WeakValueDictionary[int, SharedValues] = WeakValueDictionary()
        self._under_way: set[_Parts] = set()
        self._cut = 0

    # -- what a library adds -------------------------------------------------------------------

    @abstractmethod
    def _reaches(self, call: Call) -> bool:
        """Whether the library can have the tensors of a call; if not, `local` moves them."""

    @abstractmethod
    def _connect(self, store: Any, place: int, size: int, worker: Worker) -> ProcessGroup:
        """One member's process group, on its conductor; waits for the others, which make theirs."""

    @abstractmethod
    def _perform(self, worker: Worker, end: ProcessGroup, step: steps.Step) -> None:
        """Do one member's part of a step."""

    def _files(self, members: int) -> int:
        """How many file descriptors the process groups of so many members need; 0: unknown."""
        return 0

    def _carry_out(
        self,
        worker: Worker,
        contribution: Contribution,
        program: steps.Steps,
        do: Callable[[steps.Step], None],
    ) -> Callable[[], Sequence[Event]]:
        """Run one member's program; what writes its results, and gives events of a GPU for that."""
        finish = steps.run(program, do)

        def write() -> Sequence[Event]:
            finish()
            return ()

        return write

    # -- the backend -----------------------------------------------------------------------------

    def admit(self, worker: Worker) -> None:
        rank = worker.worker_id
        if rank not in self._members:
            connect: Connect = functools.partial(self._connect_to, worker)
            member = _Member(Conductor(worker, self.name), connect)
            with self._lock:
                self._members[rank] = member

    def dismiss(self, worker: Worker) -> None:
        with self._lock:
            self._handles.leave(worker.worker_id)
            member = self._members.pop(worker.worker_id, None)
        if member is not None:
            member.conductor.end()

    def replaced(self, worker: Worker) -> None:
        with self._lock:
            for parts in tuple(self._under_way):
                if parts.has(worker.worker_id):
                    parts.drop()
        self.dismiss(worker)

    def forget(self, worker: Worker, group: Group) -> None:
        with self._lock:
            self._handles.forget(group.ranks, group.tag)

    def send(self, call: Call, src: Tensor, peer: int, tag: str) -> Work:
        """See `Backend`. Copies at once and never waits."""
        return self._local.send(call, src, peer, tag)

    def recv(self, call: Call, out: Tensor, peer: int | None, tag: str) -> Work:
        return self._local.recv(call, out, peer, tag)

    def statistics(self) -> BackendStatistics:
        return self._rendezvous.statistics(self.name)

    def start(self, call: Call, pattern: Pattern, srcs: Tensors, outs: Tensors) -> Work:
        if not pattern.count or not self._reaches(call):
            return self._local.start(call, pattern, srcs, outs)
        self._members[call.rank].conductor.come_out()

        def execute(collective: PendingCollective, contributions: Sequence[Contribution]) -> None:
            parts = _Parts(self, collective, contributions, pattern)
            patience = time.monotonic() + CLOSING_SECONDS
            while not self._hand_out(parts, call, time.monotonic() > patience):
                time.sleep(TICK / 10)  # conductors close what was dropped to make room

        return self._rendezvous.start(call, srcs, outs, execute, abroad=True)

    def _hand_out(self, parts: _Parts, call: Call, at_last: bool) -> bool:
        """Hand the parts of a collective out, or fail it `at_last`; False: there is no room yet."""
        with self._lock:
            if call.worker.resumed_at > self._cut:  # in what state they are nobody knows
                self._cut = call.worker.resumed_at
                self._handles.drop_all()
            for other in [other for other in self._under_way if other.void()]:
                other.drop()
            gone = [rank for rank in call.group.ranks if rank not in self._members]
            if gone:  # it has begun asynchronously, and ended: `replaced` may yet come
                parts.refuse(f"{self.name}: worker {gone[0]} was lost")
                return True
            try:
                handle = self._handles.take(call.group.ranks, call.group.tag)
            except OSError as exc:
                if at_last:
                    parts.refuse(f"{self.name}: OSError: {exc}")
                return at_last
            parts.values = self._stores.setdefault(handle.number, SharedValues())
            self._under_way.add(parts)
            parts.hand_out(handle)
            return True

    # -- for conductors --------------------------------------------------------------------------

    def _connect_to(
        self, worker: Worker, ranks: Ranks, number: int, unwanted: Callable[[], bool]
    ) -> ProcessGroup:
        store = LocalGroupStore(self._stores[number], CONNECT_SECONDS, unwanted)
        made = self._connect(store, ranks.index(worker.worker_id), len(ranks), worker)
        store.connected = True
        return made

    def _close(self, handle: GroupHandle) -> None:
        """A process group is dropped; under the lock."""
        for rank in handle.ranks:
            if rank in self._members:
                self._members[rank].conductor.close(handle.ranks, handle.number)


@dataclass(frozen=True, slots=True)
class _Member:
    """Of a worker that uses the backend: the thread that uses its process groups, and makes one."""

    conductor: Conductor
    connect: Connect


class _Handles(GroupHandles):
    """Process groups that need files, of which a process has so many."""

    def __init__(self, close: Callable[[GroupHandle], None], files: Callable[[int], int]) -> None:
        super().__init__(close)
        self._files = files

    def _make_room(self, members: int) -> None:
        """Drop those longest unused; raises OSError while there are too few files."""
        super()._make_room(members)
        need = self._files(members) + SPARE_FILES
        left = _files_left() if need > SPARE_FILES else None
        if left is not None and left[0] < need:
            self.drop_oldest()
            raise OSError(
                f"to connect {members} workers takes {need} file descriptors ({SPARE_FILES} of "
                f"them to spare), and {max(0, left[0])} are left of this process's {left[1]} "
                "(ulimit -n): raise that limit, or use init_ccl('local'), which needs none"
            )


class _Parts:
    """The parts of one collective, each with its member's conductor.

    All members make their process groups even if an interrupt has ended it meanwhile: one that
    left alone would have the others wait for it, inside of the library.
    """

    def __init__(
        self,
        backend: Any,
        collective: PendingCollective,
        contributions: Sequence[Contribution],
        pattern: Pattern,
    ) -> None:
        self._backend, self._collective, self._contributions = backend, collective, contributions
        self._pattern = pattern
        self._empty = not any(t.numel() for c in contributions for t in (*c.srcs, *c.outs))
        self._handle: GroupHandle | None = None
        self.values: SharedValues | None = None  # with which its process group is made
        self._broken = False  # a member could not do its part: the others need not wait for it
        self._writes: list[tuple[Contribution, Callable[[], Sequence[Event]]]] = []
        self._left = len(contributions)  # under the backend's lock

    def has(self, rank: int) -> bool:
        """Whether that worker takes part."""
        return self._handle is not None and rank in self._handle.ranks

    def hand_out(self, handle: GroupHandle) -> None:
        """Have each member's conductor do its part; under the backend's lock."""
        self._handle = handle
        members = [self._backend._members[rank] for rank in handle.ranks]
        for place, member in enumerate(members):
            perform = functools.partial(self._perform, place)
            task = Task(
                handle.ranks, handle.number, member.connect, self.void, perform, self._over,
                self._failed, lambda: self._broken,
            )  # fmt: skip
            member.conductor.submit(task)

    def void(self) -> bool:
        """Whether an interrupt has ended it for somebody: then nothing may be written any more."""
        collective = self._collective
        return collective.settled() or any(
            contribution.call.worker.interrupts
            or contribution.call.worker.resumed_at > collective.ordinal
            for contribution in self._contributions
        )

    def _perform(self, place: int, end: ProcessGroup) -> None:
        contribution, backend = self._contributions[place], self._backend
        worker = contribution.call.worker

        def do(step: steps.Step) -> None:
            if self.void():
                raise Gone
            if not (self._empty or moves_nothing(step)):
                backend._perform(worker, end, step)

        try:
            here = steps.Place(place, len(self._contributions), backend.ops)
            program = steps.program(self._pattern, here, contribution.srcs, contribution.outs)
            write = backend._carry_out(worker, contribution, program, do)
        except Exception as exc:
            # before the conductor lets go of the process group: the others' errors are of that
            self._failed("" if isinstance(exc, Gone) else _text_of(backend.name, exc))
            raise
        with backend._lock:
            self._writes.append((contribution, write))

    def _over(self) -> None:
        """A member's part is done; the last one writes all results."""
        backend, collective = self._backend, self._collective
        with backend._lock:
            self._left -= 1
            if self._left:
                return
            assert self._handle is not None
            backend._handles.give_back(self._handle)
            backend._under_way.discard(self)
        if self.void():
            self._failed("")
            return
        try:
            with torch.inference_mode():  # or a result could be no inference tensor
                for contribution, write in self._writes:  # of no other member's device
                    contribution.done = write()
        except Exception as exc:
            self._failed(_text_of(backend.name, exc))
            return
        backend._rendezvous.finish(collective)

    def _failed(self, text: str) -> None:
        """A part could not be done, with what the library said, or nobody wants it any more."""
        self._broken = self._broken or bool(text)
        with self._backend._lock:
            self.drop()
        self.refuse(text)

    def drop(self) -> None:
        """Use the process group no more: nobody knows what is on its way there; under the lock."""
        self._backend._under_way.discard(self)
        if self._handle is not None:
            self._backend._handles.drop(self._handle)

    def refuse(self, text: str) -> None:
        """Fail it for all members; the first reason stays."""
        title = self._collective.title()
        error = CollectiveError if text else CollectiveAborted
        why = f"failed in {text}" if text else "was interrupted"
        self._backend._rendezvous.fail(self._collective, error, f"{title} {why}")


def moves_nothing(step: steps.Step) -> bool:
    """Whether a step is left out: by all members, for in these all give as much."""
    return not (isinstance(step, steps.AllToAll) or len(step.data))


def _text_of(name: str, exc: Exception) -> str:
    return "" if isinstance(exc, SessionError) else f"{name}: {type(exc).__name__}: {exc}"


def _files_left() -> tuple[int, int] | None:
    """How many files this process may still open, and its limit; None where nobody tells."""
    if resource is None:
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        return limit - len(os.listdir("/dev/fd")), limit
    except OSError:
        return None


def start(group: ProcessGroup, step: steps.Step | steps.Exchange) -> list[Any]:
    """Start one member's part of a step with its process group; torch's own work objects."""
    if isinstance(step, steps.Exchange):
        works = [group.recv([room], of, _TAG) for of, room in step.takes if room.numel()]
        return works + [group.send([data], to, _TAG) for to, data in step.gives if data.numel()]
    return [_start(group, step)]


def await_all(works: list[Any]) -> None:
    """Wait for works of torch's."""
    while works:
        works.pop(0).wait()  # and let go of it: it holds the sockets open


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
    there = [getattr(group, name) for name in names if hasattr(group, name)]
    return cast(Callable[..., Any], there[0])
