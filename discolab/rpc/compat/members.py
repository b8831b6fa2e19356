"""Who takes part in a program of PyTorch RPC: `init_rpc` to `shutdown`, and where all meet.

A `Member` is one worker between the two; each is its own thread's, in `_members`. Members meet on
rank 0: each calls it with what it has to say, and is answered once all have come. `_lock` guards
`_members` and `_gatherings`.
"""

from __future__ import annotations

import re
import time
import uuid
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch

from ...runtime.errors import ArgumentError, SessionError, WaitTimeoutError
from ...runtime.interrupts import plain_lock, shield, wait_in_shield
from ...runtime.restart import at_replaced
from ...runtime.worker import Worker
from ..context import NODE, current_node, place_here
from ..errors import WorkerLostError, restarted
from ..futures import Future, async_execution, call_later
from ..names import CONTROLLER
from ..node import Node
from ..outcome import waiter
from .options import BackendType

_NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}")
_LOOK = 0.002  # seconds between two looks at calls that are under way
_LEAVE_WITHIN = 2.0  # seconds that rank 0 may take to hear that a member waits no more

_lock = plain_lock()
_members: weakref.WeakKeyDictionary[Node, dict[int, Member]] = weakref.WeakKeyDictionary()


class _Arrival(NamedTuple):
    """A member that has come to a gathering and waits for the others."""

    id: str
    node: int
    value: Any
    answer: Future


# on the node of rank 0: the members that have come to a gathering, by its key and their ranks
_gatherings: weakref.WeakKeyDictionary[Node, dict[Any, dict[int, _Arrival]]]
_gatherings = weakref.WeakKeyDictionary()
_left: deque[str] = deque(maxlen=256)  # arrivals that were taken back, perhaps before they came


class Member:
    """One worker of a program.

    Attributes
    ----------
    node, rank
        Where it is.
    world_size
        How many take part: the ranks below.
    program
        What tells this program from others of the same session; the same on all ranks.
    replaced
        A rank of the same process that was restarted since; None: none was.
    """

    def __init__(self, node: Node, rank: int, world_size: int) -> None:
        self.node, self.rank, self.world_size = node, rank, world_size
        self._nodes = [node.node_of(member) for member in range(world_size)]
        self.program = ""
        self.replaced: int | None = None
        self._gathered = 0

    def gather(
        self, value: Any, what: str, timeout: float | None = None
    ) -> tuple[str, dict[int, Any]]:
        """Wait for all members to come; a new id, and what they have given, by rank.

        Raises
        ------
        WorkerLostError
            If one has died.
        WaitTimeoutError
        """
        node = self.node
        key = self.program, self._gathered, self.world_size
        self._gathered += 1
        arrival = uuid.uuid4().hex
        with shield():  # an interrupt ends the wait; nothing may come between that and `_leave`
            try:
                answer = self._ask_rank_0(_come, key, self.rank, self.node.id, arrival, value)
                waiter().wait_for(answer.done, what, timeout, self._check_lost)
                gathering, values = answer.wait()
            except BaseException:
                with shield():  # the first one may have lasted too long
                    if not node.closed and 0 not in node.lost:
                        left = self._ask_rank_0(_leave, key, self.rank, arrival)
                        # or members that come anew could meet the arrival that was taken back
                        wait_in_shield(left.done, _LEAVE_WITHIN)
                raise
        return gathering, dict(values)

    def _ask_rank_0(self, func: Any, *args: Any) -> Future:
        return call_later(self.node, self.rank, 0, func, args, None, 0)

    def _check_lost(self) -> None:
        if self.replaced is not None:
            raise restarted(self.replaced)
        for node in self._nodes:
            if not self.node.is_current(node):
                raise self.node.lost_error(node)

    def is_void(self) -> bool:
        """Whether a member is lost, so that the program can't go on."""
        try:
            self._check_lost()
        except WorkerLostError:
            return True
        return False

    def is_idle(self) -> bool:
        """Whether all calls that it has made are over."""
        return not any(call.caller == self.rank for call in list(self.node.calls.values()))


@async_execution
def _come(key: Any, rank: int, node: int, arrival: str, value: Any) -> Future:
    """On rank 0: a member has come."""
    answer, here = Future(), current_node()
    with _lock:
        if arrival in _left:
            _left.remove(arrival)
            answer.set_result(None)  # nobody waits for it
            return answer
        gatherings = _gatherings.setdefault(here, {})
        came = gatherings.setdefault(key, {})
        for other in [r for r, arrived in came.items() if not here.is_current(arrived.node)]:
            del came[other]
        if rank in came:  # it has left, and that takes long
            came[rank].answer.set_result(None)
        came[rank] = _Arrival(arrival, node, value, answer)
        if len(came) < key[-1]:
            return answer
        del gatherings[key]
    everything = {who: arrived.value for who, arrived in came.items()}
    gathering = uuid.uuid4().hex
    for arrived in came.values():
        arrived.answer.set_result((gathering, everything))
    return answer


def _leave(key: Any, rank: int, arrival: str) -> None:
    """On rank 0: a member was interrupted and does not wait any more."""
    with _lock:
        came = _gatherings.get(current_node(), {}).get(key, {})
        if rank in came and came[rank].id == arrival:
            came.pop(rank).answer.set_result(None)
        else:
            _left.append(arrival)


def _worker_replaced(worker: Worker) -> None:
    """A new worker thread has a lost one's place: it is no member; no gathering can complete."""
    node, rank = worker.shared.get(NODE), worker.worker_id
    if node is None:
        return
    with _lock:
        members = _members.get(node, {})
        members.pop(rank, None)
        node.default_timeouts.pop(rank, None)
        # of a program that goes on, as far as it can, the others keep their names
        node.names = {one: name for one, name in node.names.items() if members and one != rank}
        for member in members.values():
            member.replaced = rank
        gatherings = _gatherings.pop(node, {})
    for came in gatherings.values():
        for arrived in came.values():
            arrived.answer.set_exception(restarted(rank))


at_replaced.append(_worker_replaced)


def member_here() -> Member:
    """The calling worker as a member.

    Raises
    ------
    SessionError
        Before `init_rpc` and after `shutdown`.
    """
    node, rank = place_here()
    member = _members.get(node, {}).get(rank)
    if member is None:
        where = " on this worker" if rank != CONTROLLER else ": workers do, the notebook is none"
        raise SessionError(f"RPC has not been initialized. Call init_rpc first{where}")
    return member


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Take part in a program under that name; waits until all ranks do.

    Parameters
    ----------
    name
        Letters, digits, ``_``, ``:`` and ``-``; no two ranks have the same.
    backend
        `BackendType.TENSORPIPE` or None.
    rank
        The worker's own, which -1 stands for.
    world_size
        How many take part: the first so many workers; None: all.
    rpc_backend_options
        `TensorPipeRpcBackendOptions`, also torch's; `rpc_timeout` is taken from it.

    Raises
    ------
    RuntimeError
        On the controller, if it was called before, but for a program that has lost a member, or if
        two ranks have the same name.
    TypeError, ValueError
        If something else makes no sense.
    """
    if backend is not None and getattr(backend, "name", None) != BackendType.TENSORPIPE.name:
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not hasattr(rpc_backend_options, "rpc_timeout"):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ArgumentError(f"a worker's name has letters, digits, _, : and -, got {name!r}")
    node, here = place_here()
    if here == CONTROLLER:
        raise SessionError("init_rpc is called by workers: run the program on them")
    before = _members.get(node, {}).get(here)
    if before is not None and not before.is_void():
        raise SessionError("RPC is already initialized")
    if before is not None:
        _forget(before)
    count = node.num_workers if world_size is None else world_size
    if rank not in (-1, here):
        raise ArgumentError(f"rank={rank} was given to init_rpc on worker {here}: give its own")
    if not here < count <= node.num_workers:
        raise ArgumentError(
            f"world_size={count} was given to init_rpc on worker {here} of {node.num_workers}"
        )
    _check_device_maps(rpc_backend_options)
    member = Member(node, here, count)
    member.program, names = member.gather(name, "the other ranks to call init_rpc")
    if len(set(names.values())) < count:
        listed = ", ".join(names[other] for other in sorted(names))
        raise SessionError(f"two ranks gave the same name to init_rpc: {listed}")
    with _lock:
        node.names = names
        if rpc_backend_options is not None:
            node.default_timeouts[here] = node.seconds(rpc_backend_options.rpc_timeout, here)
        _members.setdefault(node, {})[here] = member
    try:
        member.gather(None, "the other ranks in init_rpc")  # or a call could come before its end
    except BaseException:
        _forget(member)
        raise


def _check_device_maps(options: Any) -> None:
    for to, device_map in (getattr(options, "device_maps", None) or {}).items():
        for source, target in device_map.items():
            if torch.device(source) != torch.device(target):
                raise ArgumentError(
                    f"the device map for {to!r} takes {source} to {target}: tensors go to the "
                    "device of the same name here"
                )


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """End the program on this rank.

    Parameters
    ----------
    graceful
        Wait until all ranks have come here and no call is under way any more.
    timeout
        Seconds for that; 0: no limit.

    Raises
    ------
    RuntimeError
        Before `init_rpc`, at the deadline, or if a rank has died.
    """
    member = member_here()
    deadline = time.monotonic() + timeout if timeout else None
    try:
        idle = 0  # gatherings in a row at which nobody had a call under way
        while graceful and idle < 2:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            waiter().wait_for(member.is_idle, "calls of this rank", left, lambda: _LOOK)
            _, given = member.gather(member.is_idle(), "the other ranks to call shutdown", left)
            idle = idle + 1 if all(given.values()) else 0
    except WaitTimeoutError as exc:
        raise WaitTimeoutError(f"shutdown of RPC: {exc}") from exc
    finally:
        _forget(member)


def _forget(member: Member) -> None:
    node = member.node
    with _lock:
        if _members.get(node, {}).get(member.rank) is not member:
            return  # it was lost, and left behind: the new worker may be a member
        del _members[node][member.rank]
        node.default_timeouts.pop(member.rank, None)
        if not _members.get(node):
            node.names = {}


def get_rpc_timeout() -> float:
    """Seconds for calls of this rank that say nothing of it; 0: no limit."""
    member = member_here()
    return member.node.seconds(None, member.rank) or 0
