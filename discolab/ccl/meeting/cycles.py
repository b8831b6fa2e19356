"""Workers that wait for each other for ever. Functions of what the board holds; no state."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..call import WAITING
from .mailbox import failed_in
from .peers import Peer
from .waits import RUNNING, Meeting, Reception, Wait


def cycle_of(rank: int, waiting: Mapping[int, Wait], peers: Mapping[int, Peer]) -> dict[int, Wait]:
    """The workers that wait for `rank` and for which it waits, through others; with their waits.

    A wait with a timeout of its own is not for ever. One that is hopeless by itself is no part of
    a cycle: it will fail alone, and then its worker goes on. So the fault of one call is not
    taken for one of the next call, in which the others wait for that worker already.
    """
    waits = {
        other: wait
        for other, wait in waiting.items()
        if not wait.settled()
        and not _over(wait)
        and not _patient(wait, other)
        and not hopeless(wait, peers)
    }
    mine = _reach(rank, waits)
    if rank not in mine:
        return {}
    return {other: waits[other] for other in sorted(mine) if rank in _reach(other, waits)}


def stuck(rank: int, waiting: Mapping[int, Wait], peers: Mapping[int, Peer]) -> dict[int, Wait]:
    """For a recv from any worker: whom it waits for, with their waits, if none can ever go on.

    The largest set of workers each of which waits for one that is in it too; of a recv from
    any worker all senders must be, but for those that will not send anyway.
    """
    held = {
        other: wait
        for other, wait in waiting.items()
        if not wait.settled() and not _patient(wait, other)
    }
    while True:
        free = [other for other, wait in held.items() if not _held_by(wait, held, peers)]
        if not free:
            break
        for other in free:
            del held[other]
    return held if rank in held else {}


def _patient(wait: Wait, rank: int) -> bool:
    call = wait.call_of(rank)
    return call is not None and call.patient


def _held_by(wait: Wait, held: Mapping[int, Wait], peers: Mapping[int, Peer]) -> bool:
    if isinstance(wait, Reception):
        return all(
            sender in held
            or sender_lost(wait, peers.get(sender))
            or (not wait.patient and is_idle(peers[sender], wait))
            for sender in wait.senders
        )
    return any(member in held for member in wait.missing())


def to_fail(cycle: Mapping[int, Wait]) -> list[Wait]:
    """Which waits of a cycle to fail: of the first call in it, those for who has left that call.

    If all are in one call, all of them.
    """
    first = min(wait.ordinal for wait in cycle.values())
    if all(wait.ordinal == first for wait in cycle.values()):
        return _unique(cycle)
    return [
        wait
        for wait in _unique(cycle)
        if wait.ordinal == first
        and any(rank in cycle and cycle[rank].ordinal > first for rank in wait.missing())
    ]


def hopeless(wait: Wait, peers: Mapping[int, Peer]) -> bool:
    """Whether this wait will fail whatever the others do."""
    if isinstance(wait, Meeting):
        return wait.disagree or any(is_gone(peers.get(rank), wait) for rank in needed(wait))
    assert isinstance(wait, Reception)
    return all(sender_lost(wait, peers.get(rank)) for rank in wait.senders)


def needed(wait: Wait) -> Collection[int]:
    """The workers that must not leave the command before the wait is over."""
    if not isinstance(wait, Meeting):
        return ()
    if wait.state is RUNNING:
        return () if wait.abroad else (wait.executor,)
    calls = {rank: wait.call_of(rank) for rank in wait.group.ranks}
    return [rank for rank, call in calls.items() if call is None or not call.asynchronous]


def is_idle(peer: Peer, wait: Wait) -> bool:
    """Whether a worker has done all its work, and was in the call of the wait."""
    return peer.executed > wait.ordinal and peer.current is None and peer.channel.pending() == 0


def is_gone(peer: Peer | None, wait: Wait) -> bool:
    """Whether a worker has left the call of a wait, or ended."""
    return peer is None or peer.ended or peer.executed > wait.ordinal


def sender_lost(wait: Reception, sender: Peer | None) -> bool:
    """Whether the sender has ended, or failed in the call of the recv."""
    return sender is None or sender.ended or bool(failed_in(sender, wait.ordinal))


def _over(wait: Wait) -> bool:
    return isinstance(wait, Meeting) and wait.state is not WAITING


def _reach(rank: int, waits: Mapping[int, Wait]) -> set[int]:
    """For whom `rank` waits, and those for others; itself only if it is in a cycle."""
    found: set[int] = set()
    todo = [rank]
    while todo:
        wait = waits.get(todo.pop())
        new = [m for m in wait.missing() if m in waits and m not in found] if wait else []
        found.update(new)
        todo += new
    return found


def _unique(cycle: Mapping[int, Wait]) -> list[Wait]:
    return list({id(wait): wait for wait in cycle.values()}.values())
