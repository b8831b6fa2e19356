"""Calls that wait for each other for ever, as far as that is seen on one node. No state.

A thread that serves a call and waits for an outcome follows what that waits for: a call that is
served here waits for what its thread waits for, and a value for the call that makes it. If that
leads back to its own call, nothing but a deadline ends it. Whoever has set a deadline himself may
count on that, and is left alone. So is what leads to another node, and a future that somebody is
to complete by hand.

Other threads go on meanwhile, so a circle counts if it is there twice, `_AGAIN` seconds apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..runtime.channel import Ticket
from ..runtime.controller import Controller, in_vain
from ..runtime.errors import DiscoError
from ..runtime.interrupts import Interruptible, waiter_here
from .names import format_rank
from .outcome import Outcome

if TYPE_CHECKING:
    from .calls import Call
    from .node import Node

_AGAIN = 0.3  # seconds between two looks
_MOST = 512  # calls that are followed


def looking_for_one(me: Interruptible, what: Any) -> Callable[[], float] | None:
    """What a thread that serves a call, and begins to wait, is to do now and then.

    It raises a `DiscoError` if the thread waits in a circle.
    """
    return partial(_look, me, what, []) if isinstance(what, Outcome) else None


def _look(me: Interruptible, what: Outcome, before: list[list[Call]]) -> float:
    mine: Any = me.work()
    found = _calls_to(me, what, mine.node) if _is_patient(me, mine.node, mine.callee) else None
    if found is not None and [found] == before:
        lines = [
            f"{_named(call)} waits for {_named(other) if other is not call else 'itself'}"
            for call, other in zip([mine, *found], found, strict=False)
        ]
        raise DiscoError("\n  ".join(["deadlock: these calls wait for ever", *lines]))
    before[:] = [] if found is None else [found]
    return _AGAIN


def _named(call: Call) -> str:
    site = call.describe_site()
    where = f" (called at {site})" if site else ""
    return f"the {call.describe()} on {format_rank(call.callee)}{where}"


def _calls_to(me: Interruptible, what: Any, node: Node) -> list[Call] | None:
    """The calls through which an outcome waits for the thread `me`; None: it does not."""
    found: list[Call] = []
    while len(found) < _MOST:
        call = _made_by(what, node)
        if call is None or call.settled or call in found or not _has_time(call):
            return None
        found.append(call)
        thread = call.running_on
        if thread is None or thread.task is not call:
            return None
        if thread is me:
            return found
        what = thread.waiting_for
        if not _is_patient(thread, call.node, call.callee):
            return None
    return None


def _made_by(what: Any, node: Node) -> Call | None:
    """The call whose end settles an outcome, as far as that is known."""
    if hasattr(what, "running_on"):
        return what  # type: ignore[no-any-return]
    return next((call for call in _under_way(node) if call.target is what), None)


def _under_way(node: Node) -> Iterator[Any]:
    yield from list(node.calls.values())
    yield from list(node.serving.values())


def _has_time(call: Call) -> bool:
    """Whether no deadline of its own ends a call."""
    return _is_long(call.timeout, call.node, call.caller)


def _is_patient(thread: Interruptible, node: Node, rank: int) -> bool:
    """Whether no deadline of its own ends what a thread waits for."""
    return _is_long(thread.wait_limit, node, rank)


def _is_long(seconds: float | None, node: Node, rank: int) -> bool:
    usual = node.seconds(None, rank)
    return seconds is None or (usual is not None and seconds >= usual)


# -- a wait of the controller's -------------------------------------------------------------------


def _why_in_vain(session: Controller, ticket: Ticket) -> str:
    """Why the calling thread waits in vain for workers: one waits for the call that it serves."""
    me = waiter_here()
    mine: Any = None if me is None else me.work()
    if me is None or not hasattr(mine, "running_on"):
        return ""
    for rank in ticket.missing:
        worker = session.workers_here().get(rank)
        if worker is None or mine.node.workers.get(rank) is not worker:
            continue
        what, command = worker.waiting_for, worker.current
        patient = _is_patient(worker, mine.node, rank)
        if command is not None and patient and _calls_to(me, what, mine.node) is not None:
            return (
                f"deadlock: worker {rank} waits for {what}, and {_named(mine)} for {ticket.what} "
                f"of worker {rank}, which comes only after what that does now. Have the call "
                "return a DRef without waiting for its value, or have the worker go on without "
                "the answer (rpc.rpc_async)"
            )
    return ""


in_vain.append(_why_in_vain)
