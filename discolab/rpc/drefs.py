"""From a DRef to RRefs and back: both ways are commands of the session, in order with others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError, WorkerError
from ..runtime.failures import Failure
from ..runtime.functions import worker_function
from ..runtime.interrupts import shield
from ..runtime.session import Session
from ..runtime.worker import current_worker
from .context import node_of_worker
from .names import CONTROLLER
from .node import Node
from .outcome import Value
from .refs.records import Fork
from .rref import RRef, held


def rref_of(session: Session, node: Node, dref: Any, rank: Any) -> RRef:
    """See `SessionRpc.rref`."""
    node.check_open()
    if not isinstance(dref, DRef):
        raise ArgumentError(f"rref takes a DRef, got {type(dref).__name__}")
    register = session.register_of(dref)
    owner = node.rank_of(rank)
    if owner == CONTROLLER:
        raise ArgumentError("a DRef has its values on workers: give the rank of one of them")
    if node.is_here(owner):
        value = Value(owner)
        ref = node.references.own(value)
        node.references.hold(ref)  # until the worker has come to it
        session.call_without_result(adopt_here, register, owner, list(ref))
        return held(node, ref, owner)
    fork = node.references.create(node.node_of(owner))
    rref = held(node, fork[:3], owner)
    try:
        session.call_without_result(adopt, register, owner, list(fork))
    except BaseException:
        node.references.undo([fork])
        raise
    return rref


@worker_function("making an RRef of a DRef")
def adopt_here(register: int, owner: int, ref: list[int]) -> None:
    """Make a register's value that of a reference from this node (a worker function)."""
    worker = current_worker()
    if worker.worker_id == owner:
        references = node_of_worker(worker).references
        key = (ref[0], ref[1], ref[2])
        with shield():
            _fill(references.value_of(key), worker.registers.get(register))
            references.release(key)


@worker_function("making an RRef of a DRef")
def adopt(register: int, owner: int, fork: list[int]) -> None:
    """The same of a reference from the controller's node (a worker function)."""
    worker = current_worker()
    if worker.worker_id == owner:
        arrived: Fork = (fork[0], fork[1], fork[2], fork[3], fork[4])
        node = node_of_worker(worker)
        if fork[0] != node.id:  # that of a worker whose place this one has
            return
        with shield():
            value = node.references.adopted(arrived, 0, owner)
            _fill(value, worker.registers.get(register))


def _fill(value: Value, result: Any) -> None:
    if isinstance(result, Failure):
        value.settle(None, WorkerError([result]))
    else:
        value.settle(result)


def dref_of(
    session: Session, node: Node, rrefs: Any, placements: Sequence[Any] | None = None
) -> DRef:
    """See `SessionRpc.dref`."""
    node.check_open()
    given = list(rrefs) if isinstance(rrefs, Sequence) else None
    if given is None or len(given) != node.num_workers:
        got = type(rrefs).__name__ if given is None else len(given)
        raise ArgumentError(
            f"dref takes {node.num_workers} references, one for each worker, got {got}"
        )
    for number, rref in enumerate(given):
        if not isinstance(rref, RRef) or rref.node is not node:
            what = "belongs to another session" if isinstance(rref, RRef) else "is no RRef"
            raise ArgumentError(f"dref takes references of this session: number {number} {what}")
    tickets = [_ticket(node, rref, rank) for rank, rref in enumerate(given)]
    made = session.call_packed(take, tickets)
    made.placements = placements
    return made


def _ticket(node: Node, rref: RRef, rank: int) -> list[int]:
    """A reference on its way to a worker in a command: to which node, owner, fork or reference."""
    to = node.node_of(rank)
    if to == node.id:
        node.references.hold(rref.ref)
        return [to, rref.owner_rank, *rref.ref]
    return [to, rref.owner_rank, *node.references.fork(rref.ref, to)]


@worker_function("making a DRef of RRefs")
def take(tickets: list[list[int]]) -> Any:
    """The value that this worker's reference is to (a worker function)."""
    worker = current_worker()
    node = node_of_worker(worker)
    to, owner, *name = tickets[worker.worker_id]
    ref = (name[0], name[1], name[2])
    if to != node.id:
        raise node.lost_error(to)
    with shield():
        if len(name) == 5:
            node.references.arrived((*ref, name[3], name[4]), 0)
        rref = held(node, ref, owner)  # the ticket's hold is its own from here
    return rref.local_value() if rref.is_owner() else rref.to_here()
