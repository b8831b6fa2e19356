"""MPI, through mpi4py: for workers that are processes, each started by mpirun.

A process knows of the others only what they send it. So the members of a collective first tell
each other what they are about to do, in notes, and then either all do it or all raise. Every
operation is begun, and looked after whenever this worker waits for one or asks whether it is done:
a wait is never inside of MPI, and an interrupt ends it. (But for the making of a communicator, at
a group's first collective and at the start: the members have said that they are there.) Why
another process does not come can't be seen from here: give a timeout, or interrupt.

An `MpiBackend` belongs to the one worker of its process, and is used on its thread alone.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Generator
from typing import Any, Protocol

import numpy as np
import torch

from ...runtime.errors import ArgumentError, CollectiveAborted, CollectiveError, WaitTimeoutError
from ...runtime.failures import name_ranks
from ...runtime.worker import Worker
from .. import memory
from ..backend import Backend, BackendStatistics, Tensor, Tensors
from ..board.diagnosis import where
from ..call import DONE, P2P, Call, CallCounts, kind
from ..groups import Group
from ..pattern import Pattern
from ..work import CallWork, Finished, Work, wrong_thread
from . import encoding, steps

FIRST_PAUSE, LONGEST_PAUSE = 1e-5, 1e-3  # seconds between two looks at MPI

Requests = Generator[Any, None, None]  # yields a request, or None to be asked again


class Owner(Protocol):
    """What a work needs of its backend."""

    def progress(self) -> None:
        """Look after all that was begun; never waits."""

    def leave(self, work: MpiWork) -> None:
        """Nobody waits for it any more."""


class MpiWork(CallWork):
    """An operation that has begun; it goes on whenever this worker waits for any."""

    def __init__(self, owner: Owner, call: Call, requests: Requests) -> None:
        super().__init__(call)
        self._owner, self._requests = owner, requests
        self._pending: Any = None

    def done(self) -> bool:
        if not self.over:
            if self.call.worker.thread_id != threading.get_ident():
                raise wrong_thread(self.call)
            self._owner.progress()
        return self.over

    def advance(self) -> None:
        """Go as far as is possible without waiting."""
        try:
            while self._pending is None or self._pending.Test():
                self._pending = next(self._requests)
                if self._pending is None:
                    return
        except StopIteration:
            self.end(None)
        except Exception as exc:
            self.end(exc)

    def complete(self, timeout: float | None) -> None:
        worker, pause, left = self.call.worker, FIRST_PAUSE, timeout
        try:
            while left is None or left > 0:
                step = pause if left is None else min(pause, left)
                try:
                    worker.wait_for(self.done, self.call, step)
                    return
                except WaitTimeoutError:
                    left = None if left is None else left - step
                pause = min(1.3 * pause, LONGEST_PAUSE)
        except BaseException as exc:
            self._leave(f"{self.call} was left: {type(exc).__name__}")
            raise
        text = f"gave up after {timeout:g} s waiting for {self.call}"
        self._leave(text)
        raise WaitTimeoutError(text)

    def _leave(self, text: str) -> None:
        if not self.over:
            self.end(CollectiveAborted(text))
            self._owner.leave(self)


Communicator = Any  # mpi4py has its types, but need not be installed
Key = tuple[Any, ...]
_TAG = 1


class MessageQueues:
    """The messages of one process.

    Parameters
    ----------
    world
        A communicator on which nobody else sends messages.
    """

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self._leaving: list[Any] = []
        self._arrived: dict[tuple[int, Key], deque[Any]] = {}

    def send(self, rank: int, key: Key, value: Any) -> None:
        """Send; does not wait."""
        data = np.frombuffer(pickle.dumps((key, value)), np.uint8)
        self._leaving.append(self._world.Isend(data, rank, _TAG))  # keeps the data

    def look(self) -> None:
        """Take in what has come; never waits."""
        from mpi4py import MPI

        self._leaving = [request for request in self._leaving if not request.Test()]
        status = MPI.Status()
        while (message := self._world.Improbe(MPI.ANY_SOURCE, _TAG, status)) is not None:
            data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            message.Recv(data)
            key, value = pickle.loads(data.tobytes())
            self._arrived.setdefault((status.source, key), deque()).append(value)

    def first(self, rank: int, key: Key) -> Any:
        """The oldest message that has come from there; None without one."""
        line = self._arrived.get((rank, key))
        return line[0] if line else None

    def take(self, rank: int, key: Key) -> Any:
        """As `first`, and removes it."""
        line = self._arrived.get((rank, key))
        if not line:
            return None
        value = line.popleft()
        if not line:
            del self._arrived[rank, key]
        return value

    def count(self, kind: str) -> int:
        """How many messages lie here whose keys begin with `kind`."""
        return sum(len(line) for (_, key), line in self._arrived.items() if key[0] == kind)


INSTALL = "pip install 'discolab[mpi]' brings it, and an MPI library with mpirun"

Turn = tuple[int, int]  # the ordinal of the command, and the number of the collective in it


def obstacle(worker: Worker) -> str:
    """Why a worker can't use MPI, "" if it can."""
    if len(worker.peers) > 1:
        return (
            f"'mpi' needs a process for every worker, started by mpirun; these {len(worker.peers)} "
            "are threads of one process: use 'local', or --engine sockets"
        )
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as exc:
        return (
            f"'mpi' needs the package mpi4py and an MPI library ({exc}): {INSTALL}; "
            "else use 'local'"
        )
    size, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
    if (size, rank) != (worker.num_workers, worker.worker_id):
        return (
            f"this is process {rank} of {size} for MPI, and worker {worker.worker_id} of "
            f"{worker.num_workers}; 'mpi' needs mpirun to start each worker as the process of "
            "its rank, and no others: else use 'local'"
        )
    return ""


def backend(worker: Worker) -> Backend:
    """The backend of the worker of this process; all of them make theirs at once."""
    from mpi4py import MPI

    return MpiBackend(MPI.COMM_WORLD.Dup())  # so that nothing of the program's own gets in between


class MpiBackend(Backend):
    """Collectives of CPU tensors between processes.

    Parameters
    ----------
    world
        The communicator of all workers, in the order of their ranks; for this backend alone.
    """

    name = "mpi"

    def __init__(self, world: Communicator) -> None:
        self._world, self._queues = world, MessageQueues(world)
        self._communicators: dict[Group, Communicator] = {}
        self._counts = CallCounts()
        self._begun: list[MpiWork] = []
        self._left: list[MpiWork] = []  # MPI may still write to their memory
        self._cut = 0

    # -- the backend ---------------------------------------------------------------------------

    def start(self, call: Call, pattern: Pattern, srcs: Tensors, outs: Tensors) -> Work:
        if not pattern.count:  # a barrier: that all say that they have come is all there is to it
            return self._begin(call, self._agree(call, [], []))
        _refuse_gpu(call, (*srcs, *outs))
        return self._begin(call, self._carry_out(pattern, call, srcs, outs))

    def send(self, call: Call, src: Tensor, peer: int, tag: str) -> Work:
        """See `Backend`. Copies at once and never waits."""
        _refuse_gpu(call, [src])
        self._refresh(call.worker)
        data = memory.data_of([src])
        message = (call.ordinal, src.dtype, tuple(src.shape), where(call.site), data)
        self._queues.send(peer, ("message", tag), message)
        call.close(DONE)
        return Finished()

    def recv(self, call: Call, out: Tensor, peer: int | None, tag: str) -> Work:
        _refuse_gpu(call, [out])
        return self._begin(call, self._receive(call, out, peer, tag))

    def statistics(self) -> BackendStatistics:
        begun = [work for work in self._begun if not work.over]
        waiting = tuple(str(work.call) for work in begun)
        return BackendStatistics(self.name, len(begun), self._queues.count("message"), waiting)

    # -- progress ------------------------------------------------------------------------------

    def progress(self) -> None:
        """Look after all that was begun; never waits. In each group in the order of the calls."""
        self._queues.look()
        busy: set[Group] = set()
        for work in self._begun:
            collective = work.call.signature.op not in P2P
            if collective and work.call.group in busy:
                continue
            work.advance()
            if collective and not work.over:
                busy.add(work.call.group)
        self._begun = [work for work in self._begun if not work.over]

    def leave(self, work: MpiWork) -> None:
        """Nobody waits for it any more; what MPI has begun stays in memory."""
        self._left.append(work)

    def _begin(self, call: Call, requests: Requests) -> Work:
        self._refresh(call.worker)
        work = MpiWork(self, call, requests)
        self._begun.append(work)
        self.progress()
        return work

    def _refresh(self, worker: Worker) -> None:
        """After an interrupt: what was begun before it is over, on all workers."""
        if worker.resumed_at <= self._cut:
            return
        self._cut = worker.resumed_at
        for work in self._begun:
            work.end(CollectiveAborted(f"{work.call} was interrupted"))
            self.leave(work)
        self._begun.clear()
        self._communicators.clear()  # the others may be in the middle of something there

    # -- operations ------------------------------------------------------------------------------

    def _carry_out(self, pattern: Pattern, call: Call, srcs: Tensors, outs: Tensors) -> Requests:
        group = call.group
        yield from self._agree(call, [s.nbytes for s in srcs], [o.nbytes for o in outs])
        communicator = self._communicator(group)
        place = steps.Place(group.index(call.rank), len(group), encoding.ALL_OPS)
        member = steps.program(pattern, place, srcs, outs)
        while True:
            try:
                step = next(member)
            except StopIteration as end:
                with torch.inference_mode():
                    end.value()
                return
            yield _begin_step(communicator, step)

    def _agree(self, call: Call, gives: list[int], takes: list[int]) -> Requests:
        """Tell the other members of the group what this one is about to do, and hear them.

        Raises
        ------
        CollectiveError
            If they do not do the same.
        """
        group, key = call.group, ("note", call.group)
        call.number = self._counts.number(call)
        turn: Turn = call.ordinal, call.number
        signature = call.signature
        counted = signature.counted() if signature.any_shape else signature
        note = (str(signature), gives, takes, where(call.site), str(counted))
        heard = {call.rank: note}
        for rank in group.ranks:
            if rank != call.rank:
                self._queues.send(rank, key, (turn, note))
        for rank in group.ranks:
            while rank not in heard:
                message = self._queues.first(rank, key)
                if message is None:
                    yield None
                elif message[0] > turn:
                    raise CollectiveError(
                        f"{call} can't complete: worker {rank} never called it, and has gone on to "
                        f"{message[1][0]}{message[1][3]}"
                    )
                else:
                    self._queues.take(rank, key)
                    if message[0] == turn:  # an older one is of a collective that was left
                        heard[rank] = message[1]
        _check_notes(call, [heard[rank] for rank in group.ranks])

    def _communicator(self, group: Group) -> Communicator:
        made = self._communicators.get(group)
        if made is None:
            made = self._world.Create_group(self._world.Get_group().Incl(group.ranks))
            self._communicators[group] = made
        return made

    def _receive(self, call: Call, out: Tensor, peer: int | None, tag: str) -> Requests:
        senders = [peer] if peer is not None else [r for r in call.group.ranks if r != call.rank]
        while True:
            for sender in senders:
                message = self._queues.take(sender, ("message", tag))
                if message is not None and message[0] >= self._cut:
                    _fill(call, out, sender, *message[1:])
                    return
            yield None


def _begin_step(communicator: Communicator, step: steps.Step) -> Any:
    """Begin this process's part of a step; MPI's request."""
    from mpi4py import MPI

    ops = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
    ops |= {"band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}
    data = step.data
    match step:
        case steps.AllReduce(_, op):
            return communicator.Iallreduce(MPI.IN_PLACE, data, ops[op])
        case steps.Reduce(_, op, root):
            if communicator.rank == root:
                return communicator.Ireduce(MPI.IN_PLACE, data, ops[op], root)
            return communicator.Ireduce(data, None, ops[op], root)
        case steps.ReduceScatter(_, out, op):
            return communicator.Ireduce_scatter_block(data, out, ops[op])
        case steps.AllGather(_, out):
            return communicator.Iallgather(data, out)
        case steps.Broadcast(_, root):
            return communicator.Ibcast(data, root)
        case steps.AllToAll(_, out, gives, takes):
            return communicator.Ialltoallv([data, gives], [out, takes])


def _check_notes(call: Call, notes: list[Any]) -> None:
    ranks = call.group.ranks
    lines: dict[str, list[int]] = {}
    for rank, (signature, _, _, site, _) in zip(ranks, notes, strict=True):
        lines.setdefault(f"called {signature}{site}", []).append(rank)
    told = "".join(f"\n  {name_ranks(members)}: {text}" for text, members in lines.items())
    head = f"collective #{call.number + 1} in {call.group}"
    if len({counted for *_, counted in notes}) > 1:
        raise CollectiveError(f"{head}: members disagree{told}")
    if call.signature.op != "all_to_all":
        return
    for i, sender in enumerate(ranks):
        for j, receiver in enumerate(ranks):
            given, wanted = notes[i][1][j], notes[j][2][i]
            if given != wanted:
                raise CollectiveError(
                    f"{head}: worker {sender} has {given} bytes for worker {receiver}, which has "
                    f"room for {wanted}{told}"
                )


def _fill(
    call: Call, out: Tensor, sender: int, dtype: torch.dtype, shape: Any, site: str, data: bytes
) -> None:
    """Copy what was sent to where it belongs."""
    if not call.signature.takes(dtype, shape):
        raise CollectiveError(
            f"recv{call.signature.of} on worker {call.rank}{where(call.site)}: worker {sender} "
            f"sent {kind(dtype, shape)}{site}; shape and dtype must be the same (the message is "
            "used up)"
        )
    with torch.inference_mode():
        whole = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
        memory.unpack(whole, [out])


def _refuse_gpu(call: Call, tensors: Tensors) -> None:
    for tensor in tensors:
        if tensor.is_cuda:
            raise ArgumentError(
                f"{call.name}: the backend 'mpi' moves CPU tensors, and this one is on "
                f"{tensor.device}; call it with tensor.cpu()"
            )
