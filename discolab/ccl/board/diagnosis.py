"""Why a collective or a message can't complete, in words. Functions of the board's state; no state.

First the cycles of workers that wait for each other, then the verdicts and their texts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ...runtime.actions import site_text
from ...runtime.errors import CollectiveAborted, CollectiveError
from ...runtime.failures import Failure, name_ranks
from ...runtime.interpreter_lock import copied
from ..call import WAITING, Signature, Site, count, kind, shown_tag
from .p2p_queue import Message, Pair, failed_in
from .peers import Peer
from .rendezvous import RUNNING, Board, PendingCollective, Reception, Wait


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
    """Which waits of a cycle to fail: of the first call in it, for a member that has left that.

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
    if isinstance(wait, PendingCollective):
        return wait.disagree or any(is_gone(peers.get(rank), wait) for rank in needed(wait))
    assert isinstance(wait, Reception)
    return all(sender_lost(wait, peers.get(rank)) for rank in wait.senders)


def needed(wait: Wait) -> Collection[int]:
    """The workers that must not leave the command before the wait is over."""
    if not isinstance(wait, PendingCollective):
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
    return (
        sender is None
        or sender.ended
        or wait.ordinal < sender.joined_at
        or bool(failed_in(sender, wait.ordinal))
    )


def _over(wait: Wait) -> bool:
    return isinstance(wait, PendingCollective) and wait.state is not WAITING


def _reach(rank: int, waits: Mapping[int, Wait]) -> set[int]:
    """The members that `rank` waits for, and theirs; itself only if it is in a cycle."""
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


SECOND_LOOK = 0.02  # seconds from a suspicion to the next look
_CERTAIN = 0.018  # for so long workers must be seen to wait for each other,
_IDLE = 0.05  # and a sender to have nothing to do: the session may be about to give it something


class Verdict(NamedTuple):
    """These waits are hopeless, and why."""

    waits: list[Wait]
    error: type[CollectiveError]
    text: str


def judge(board: Board, wait: Wait, worker: Peer) -> Verdict | None:
    """Whether the wait of `worker` can never end; None while it may.

    Returns
    -------
    Verdict or None
        On this wait or, in a deadlock, on those of the call in which it began.
    """
    if wait.settled():
        return None
    if isinstance(wait, PendingCollective):
        text = disagreement(board, wait, worker)
        if text is not None:
            return Verdict([wait], CollectiveError, text)
        verdict = absent(board, wait, worker)
    else:
        verdict = lost(board, wait, worker)
    if verdict is not None:
        return verdict
    cycle = cycle_of(worker.worker_id, board.waiting, worker.peers)
    from_any = isinstance(wait, Reception) and len(wait.pairs) > 1
    held = stuck(worker.worker_id, board.waiting, worker.peers) if from_any else {}
    idle = isinstance(wait, Reception) and not wait.patient and _is_idle(wait, worker)
    enough = _CERTAIN if cycle or held else _IDLE
    if not wait.stable(bool(cycle or held) or idle, enough):
        return None
    if cycle:
        return Verdict(to_fail(cycle), CollectiveError, _deadlock(cycle, board))
    assert isinstance(wait, Reception)
    if held and all(sender in held for sender in wait.senders):
        return Verdict([wait], CollectiveError, _deadlock(held, board))
    return _no_sender(board, wait, worker)


def absent(board: Board, collective: PendingCollective, worker: Peer) -> Verdict | None:
    """On a collective that a member has left, or to which one can't come any more."""
    gone = [rank for rank in needed(collective) if is_gone(worker.peers.get(rank), collective)]
    return _absent(board, collective, worker, gone) if gone else None


def poll(
    board: Board, collective: PendingCollective, worker: Peer, late: float | None
) -> Verdict | None:
    """On a collective of which a worker asks whether it is over; `late`: the deadline that is."""
    if collective.settled():
        return None
    verdict = absent(board, collective, worker)
    if verdict is None and late is not None and collective.state is not RUNNING:
        text = gave_up(board, collective, worker, late)
        verdict = Verdict([collective], CollectiveAborted, text)
    return verdict


def fail(board: Board, verdict: Verdict | None) -> Sequence[Wait]:
    """Carry a verdict out; the waits that it ends."""
    waits = [] if verdict is None else verdict.waits
    for wait in waits:
        assert verdict is not None
        board.fail(wait, verdict.error, verdict.text)
    return waits


def abandon(board: Board, worker: Peer) -> None:
    """Fail what can't complete, be it that nobody waits: started, and left alone by a member."""
    for collective in list(board.open.values()):
        fail(board, absent(board, collective, worker))


def lost(board: Board, wait: Wait, worker: Peer) -> Verdict | None:
    """On a recv whose senders have ended, or failed in the same call: nothing for it can come."""
    if isinstance(wait, Reception) and all(
        sender_lost(wait, worker.peers.get(rank)) for rank in wait.senders
    ):
        return _no_sender(board, wait, worker)
    return None


def disagreement(board: Board, collective: PendingCollective, worker: Peer) -> str | None:
    """What the members of a collective disagree about, None if they do not."""
    if collective.disagree:
        what = " and the ".join(
            _differences([p.call.signature for p in collective.contributions.values()])
        )
        head = (
            f"collective #{collective.number + 1} in {collective.group}: members disagree on the "
        )
        return head + what + account(board, collective, worker)
    if collective.state is RUNNING and collective.first.signature.op == "all_to_all":
        misfit = _misfit(collective)
        if misfit:
            return f"{collective.title()}: {misfit}" + account(board, collective, worker)
    return None


def _differences(signatures: list[Signature]) -> list[str]:
    """What is not the same in all of them, in words."""
    names = {"op": "operation", "reduction": "reduction", "root": "root", "device": "device"}
    differ = [
        word for name, word in names.items() if len({getattr(s, name) for s in signatures}) > 1
    ]
    if "operation" in differ:
        return ["operation"]
    if len({len(s.kinds) for s in signatures}) > 1:
        return [*differ, "number of tensors"]
    dtypes = {tuple(dtype for dtype, _ in s.kinds) for s in signatures}
    if any(s.any_shape for s in signatures):
        signatures = [s.counted() for s in signatures]
    shapes = {tuple(shape for _, shape in s.kinds) for s in signatures}
    return [*differ, *["dtype"] * (len(dtypes) > 1), *["shape"] * (len(shapes) > 1)]


def _misfit(collective: PendingCollective) -> str:
    """The first part of an all-to-all whose size is not what its receiver has room for."""
    ranks, any_shape = collective.group.ranks, collective.first.signature.any_shape
    for i, sender in enumerate(ranks):
        for j, receiver in enumerate(ranks):
            src, out = (
                collective.contributions[sender].srcs[j],
                collective.contributions[receiver].outs[i],
            )
            fits = src.shape == out.shape or (any_shape and count(src.shape) == count(out.shape))
            if not fits:
                return (
                    f"worker {sender} has {kind(src.dtype, src.shape)} for worker {receiver}, "
                    f"which has room for {kind(out.dtype, out.shape)}"
                )
    return ""


def gave_up(board: Board, wait: Wait, worker: Peer, timeout: float) -> str:
    """The text of a timeout: the members that have joined, the missing ones, and what those do."""
    head = f"gave up after {timeout:g} s waiting for {wait}"
    if isinstance(wait, PendingCollective):
        return head + account(board, wait, worker)
    assert isinstance(wait, Reception)
    return head + _accounts(board, wait, worker, wait.senders) + _dropped(board, wait)


def where(site: Site | None) -> str:
    """`` at file:line, in function``, "" if unknown."""
    if site is None:
        return ""
    name = getattr(site[0], "co_name", None)
    return f" at {site_text(site)}" + (f", in {name}" if name else "")


# -- reasons ---------------------------------------------------------------------------------


def _absent(board: Board, collective: PendingCollective, worker: Peer, gone: list[int]) -> Verdict:
    """A member has ended the command (or for ever) without the others."""
    failed = any(_failure(collective, worker, worker.peers.get(rank)) is not None for rank in gone)
    error = CollectiveAborted if failed else CollectiveError
    text = f"{collective.title()} can't complete" + account(board, collective, worker)
    return Verdict([collective], error, text)


def _deadlock(cycle: Mapping[int, Wait], board: Board) -> str:
    first = min(wait.ordinal for wait in cycle.values())
    lines = {}
    for wait in cycle.values():
        before = "" if wait.ordinal == first else "has left this call, and in a later one is "
        waiting = [rank for rank in wait.members() if board.waiting.get(rank) is wait]
        for rank in waiting:  # a worker that has started it and gone on may wait for something else
            lines[rank] = f"{before}waiting in {wait}{where(_site(wait, rank))}"
    head = "deadlock: these workers wait for each other for ever"
    messages = "".join(_dropped(board, wait) for wait in _unique(cycle))
    return head + _folded(sorted(lines.items())) + messages


def _is_idle(wait: Reception, worker: Peer) -> bool:
    """Whether the senders have done all their work without sending."""
    return all(is_idle(worker.peers[rank], wait) for rank in wait.senders)


def _no_sender(board: Board, wait: Reception, worker: Peer) -> Verdict:
    failed = any(
        _failure(wait, worker, worker.peers.get(rank)) is not None for rank in wait.senders
    )
    error = CollectiveAborted if failed else CollectiveError
    if len(wait.pairs) > 1:
        accounts = _accounts(board, wait, worker, wait.senders)
        return Verdict([wait], error, f"{wait} can't complete{accounts}{_dropped(board, wait)}")
    (sender,) = wait.senders
    state = _state(board, wait, worker, sender)
    extra = "" if failed else ", and has nothing left to do"
    text = f"{wait} can't complete: worker {sender} {state}{extra}{_dropped(board, wait)}"
    return Verdict([wait], error, text)


def _dropped(board: Board, wait: Wait) -> str:
    """What has become of messages that a recv may be waiting for: dropped, or of another tag."""
    if not isinstance(wait, Reception):
        return ""
    texts = [board.messages.dropped(pair) for pair in wait.pairs]
    for (sender, receiver, tag), message in _of_other_tags(board, wait):
        what = kind(message.tensor.dtype, message.tensor.shape)
        with_tag = f"with tag {shown_tag(tag)}" if shown_tag(tag) else "without a tag"
        texts.append(
            f"worker {sender} has sent worker {receiver} {what} {with_tag}{where(message.site)}"
        )
    return "".join(f"\n  {text}" for text in texts if text)


def _of_other_tags(board: Board, wait: Wait) -> list[tuple[Pair, Message]]:
    """The first message of each other tag that those have sent who are waited for."""
    if not isinstance(wait, Reception):
        return []
    return [
        (pair, messages[0])
        for pair, messages in board.messages.waiting()
        if pair[0] in wait.senders and pair[1] == wait.call.rank and pair not in wait.pairs
    ]


# -- accounts --------------------------------------------------------------------------------


def account(board: Board, collective: PendingCollective, worker: Peer) -> str:
    """One line for each thing that members did, in the order of their ranks."""
    return _accounts(board, collective, worker, collective.group.ranks)


def _accounts(board: Board, wait: Wait, worker: Peer, ranks: Iterable[int]) -> str:
    return _folded((rank, _state(board, wait, worker, rank)) for rank in ranks)


def _folded(lines: Iterable[tuple[int, str]]) -> str:
    same: dict[str, list[int]] = {}
    for rank, text in lines:
        same.setdefault(text, []).append(rank)
    return "".join(f"\n  {name_ranks(ranks)}: {text}" for text, ranks in same.items())


def _state(board: Board, wait: Wait, worker: Peer, rank: int) -> str:
    """What one worker did about a wait that `worker` takes part in."""
    peer = worker.peers.get(rank)
    if isinstance(wait, PendingCollective) and rank in wait.contributions:
        call = wait.contributions[rank].call
        left = ", and has left it" if _left(peer, wait, rank) else ""
        if peer is not None and peer.died:
            left = ", and has died"
        return f"called {call.signature}{where(call.site)}{left}"
    if peer is None:
        return "is not in this process"
    failure = _failure(wait, worker, peer) if peer.executed > wait.ordinal else None
    if failure is not None:
        if failure.victim:  # its words would be nested once more with each worker
            return f"failed with another: {failure.type_name}"
        return f"failed: {failure.headline.splitlines()[0]}"
    if peer.ended and not peer.gives_way:
        return "has died" if peer.died else "has ended"
    if peer.ended or wait.ordinal < peer.joined_at:
        return "was lost; the new worker in its place begins after this call"
    if peer.sat_out == wait.ordinal:
        return "is not among the workers that were asked to run this (-t)"
    if peer.executed > wait.ordinal:
        missing = "finished the call without it"
        if isinstance(wait, PendingCollective):
            return missing
        it = " it" if any(pair[0] == rank for pair, _ in _of_other_tags(board, wait)) else ""
        return f"finished the call without sending{it}"
    other = board.waiting.get(rank)
    if other is not None and not other.settled():
        return f"waiting in {other}{where(_site(other, rank))}"
    if peer.current is None or peer.executed < wait.ordinal:
        return "has not come to this call yet"
    return f"has not come to it yet: {' '.join(filter(None, peer.doing()[:2]))}"


def _left(peer: Peer | None, collective: PendingCollective, rank: int) -> bool:
    call = collective.call_of(rank)
    went_on = call is not None and call.asynchronous
    return collective.state is WAITING and not went_on and is_gone(peer, collective)


def _site(wait: Wait, rank: int) -> Site | None:
    call = wait.call_of(rank)
    return call.site if call is not None else None


def _failure(wait: Wait, worker: Peer, peer: Peer | None) -> Failure | None:
    """What went wrong on `peer` in the call of a wait, be it in binding an argument."""
    if peer is None:
        return None
    for ordinal, failure in reversed(copied(peer.failed_calls)):
        if ordinal == wait.ordinal:
            return failure
    command = worker.current
    if command is None or worker.executed != wait.ordinal:
        return None
    found = peer.registers.get(command[1]) if command[1] else None
    return found if isinstance(found, Failure) else None
