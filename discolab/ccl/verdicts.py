"""When a wait on the board can never end, and what to say then.

Functions on a `Board` whose lock the caller holds; no state. They run only while somebody has
waited for a tick, or once something went wrong, so they may be slow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import NamedTuple

from ..runtime.actions import site_text
from ..runtime.errors import CollectiveAborted, CollectiveError
from ..runtime.failures import Failure, name_ranks
from ..runtime.interruptible import TICK
from ..runtime.worker import Worker
from .backend import Site
from .board import Board
from .cycles import cycle_of, is_gone, sender_lost, to_fail
from .waits import PENDING, RUNNING, Meeting, Post, Reception, Wait

_OWN_MODULES = __name__.partition(".")[0] + "."
_CALL_PACKED = Worker._call_packed.__code__


class Verdict(NamedTuple):
    """These waits are hopeless, and why."""

    waits: list[Wait]
    error: type[CollectiveError]
    text: str


def judge(board: Board, wait: Wait, worker: Worker, *, patient: bool) -> Verdict | None:
    """Whether the wait of `worker` can never end; None while it may.

    Parameters
    ----------
    patient
        The user gave a timeout: a sender that is idle may be sent to work later.

    Returns
    -------
    Verdict or None
        On this wait or, in a deadlock, on those of the call in which it began.
    """
    if wait.settled():
        return None
    if isinstance(wait, Meeting):
        text = disagreement(board, wait, worker)
        if text is not None:
            return Verdict([wait], CollectiveError, text)
        gone = [m for m in _needed(wait) if is_gone(worker.peers.get(m), wait)]
        if gone:
            return _absent(board, wait, worker, gone)
    else:
        verdict = lost(board, wait, worker)
        if verdict is not None:
            return verdict
    cycle = cycle_of(worker.worker_id, board.waiting, worker.peers)
    idle = isinstance(wait, Reception) and not patient and _is_idle(wait, worker)
    if not wait.stable(bool(cycle) or idle, TICK / 2):
        return None
    if cycle:
        return _deadlock(cycle)
    assert isinstance(wait, Reception)
    return _no_sender(board, wait, worker)


def lost(board: Board, wait: Wait, worker: Worker) -> Verdict | None:
    """On a recv whose sender has ended, or failed in the same call: nothing for it can come."""
    if isinstance(wait, Reception) and sender_lost(wait, worker.peers.get(wait.pair[0])):
        return _no_sender(board, wait, worker)
    return None


def disagreement(board: Board, meeting: Meeting, worker: Worker) -> str | None:
    """What the members of a meeting disagree about, None if they do not."""
    if not meeting.disagree:
        return None
    posts = list(meeting.posts.values())
    differ = [
        "operation" if f.name == "op" else f.name
        for f in fields(posts[0].signature)
        if len({getattr(post.signature, f.name) for post in posts}) > 1
    ]
    if "operation" in differ:
        differ = ["operation"]
    head = f"collective #{meeting.number + 1} in {meeting.group}: members disagree on the "
    return head + " and the ".join(differ) + _account(board, meeting, worker)


def gave_up(board: Board, wait: Wait, worker: Worker, timeout: float) -> str:
    """The text of a timeout: who has joined, who has not, and what those do."""
    head = f"gave up after {timeout:g} s waiting for {wait}"
    if isinstance(wait, Meeting):
        return head + _account(board, wait, worker)
    assert isinstance(wait, Reception)
    sender = wait.pair[0]
    return f"{head}\n  worker {sender} {_state(board, wait, worker, sender)}{_dropped(board, wait)}"


def call_site(worker: Worker) -> Site | None:
    """Where the user's code is: the nearest frame outside of discolab, or the session's call."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL_PACKED:
        if not frame.f_globals.get("__name__", "").startswith(_OWN_MODULES):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    command = worker.current
    return command[-1] if command is not None else None


def where(site: Site | None) -> str:
    """`` at file:line, in function``, "" if unknown."""
    if site is None:
        return ""
    name = getattr(site[0], "co_name", None)
    return f" at {site_text(site)}" + (f", in {name}" if name else "")


# -- reasons ---------------------------------------------------------------------------------


def _needed(wait: Wait) -> Iterable[int]:
    """The workers that must not leave the command before the wait is over."""
    if not isinstance(wait, Meeting):
        return ()
    return (wait.executor,) if wait.state is RUNNING else wait.group.ranks


def _absent(board: Board, meeting: Meeting, worker: Worker, gone: list[int]) -> Verdict:
    """A member has ended the command (or for ever) without the others."""
    failed = any(_failure(worker, worker.peers.get(rank)) is not None for rank in gone)
    error = CollectiveAborted if failed else CollectiveError
    text = f"{meeting.title()} can't complete" + _account(board, meeting, worker)
    return Verdict([meeting], error, text)


def _deadlock(cycle: Mapping[int, Wait]) -> Verdict:
    first = min(wait.ordinal for wait in cycle.values())
    lines = {}
    for wait in cycle.values():
        before = "" if wait.ordinal == first else "has left this call, and in a later one is "
        for rank in wait.members():
            site = wait.site if isinstance(wait, Reception) else _post_site(wait, rank)
            lines[rank] = f"{before}waiting in {wait}{where(site)}"
    text = "deadlock: these workers wait for each other for ever" + _folded(sorted(lines.items()))
    return Verdict(to_fail(cycle), CollectiveError, text)


def _is_idle(wait: Reception, worker: Worker) -> bool:
    """Whether the sender has done all its work without sending."""
    peer = worker.peers[wait.pair[0]]
    return peer.executed > wait.ordinal and peer.current is None and peer.channel.pending() == 0


def _no_sender(board: Board, wait: Reception, worker: Worker) -> Verdict:
    sender = wait.pair[0]
    failed = _failure(worker, worker.peers.get(sender)) is not None
    told = _state(board, wait, worker, sender)
    extra = "" if failed else ", and has nothing left to do"
    text = f"{wait} can't complete: worker {sender} {told}{extra}{_dropped(board, wait)}"
    return Verdict([wait], CollectiveAborted if failed else CollectiveError, text)


def _dropped(board: Board, wait: Reception) -> str:
    told = board.mailbox.dropped(wait.pair)
    return f"\n  {told}" if told else ""


# -- accounts --------------------------------------------------------------------------------


def _account(board: Board, meeting: Meeting, worker: Worker) -> str:
    """One line for each thing that members did, in the order of their ranks."""
    return _folded((rank, _state(board, meeting, worker, rank)) for rank in meeting.group.ranks)


def _folded(lines: Iterable[tuple[int, str]]) -> str:
    same: dict[str, list[int]] = {}
    for rank, text in lines:
        same.setdefault(text, []).append(rank)
    return "".join(f"\n  {name_ranks(ranks)}: {text}" for text, ranks in same.items())


def _state(board: Board, wait: Wait, worker: Worker, rank: int) -> str:
    """What one worker did about a wait that `worker` takes part in."""
    peer = worker.peers.get(rank)
    if isinstance(wait, Meeting) and rank in wait.posts:
        post = wait.posts[rank]
        left = "" if not _left(peer, wait) else ", and has left it"
        return f"called {post.signature}{where(post.site)}{left}"
    if peer is None:
        return "is not in this process"
    failure = _failure(worker, peer) if peer.executed > wait.ordinal else None
    if failure is not None:
        return f"failed: {failure.headline.splitlines()[0]}"
    if peer.ended:
        return "has ended"
    if peer.executed > wait.ordinal:
        missing = "finished the call without it"
        return missing if isinstance(wait, Meeting) else "finished the call without sending"
    other = board.waiting.get(rank)
    if other is not None and not other.settled():
        site = other.site if isinstance(other, Reception) else _post_site(other, rank)
        return f"waiting in {other}{where(site)}"
    if peer.current is None or peer.executed < wait.ordinal:
        return "has not come to this call yet"
    return f"has not come to it yet: {' '.join(filter(None, peer.doing()[:2]))}"


def _left(peer: Worker | None, meeting: Meeting) -> bool:
    return meeting.state is PENDING and is_gone(peer, meeting)


def _post_site(wait: Wait, rank: int) -> Site | None:
    post: Post | None = wait.posts.get(rank) if isinstance(wait, Meeting) else None
    return post.site if post is not None else None


def _failure(worker: Worker, peer: Worker | None) -> Failure | None:
    """What went wrong on `peer` in the call that `worker` runs, be it in binding an argument."""
    command = worker.current
    if command is None or peer is None or peer is worker:
        return None
    for ordinal, failure in reversed(peer.failed_calls.copy()):
        if ordinal == worker.executed:
            return failure
    found = peer.registers.get(command[1]) if command[1] else None
    return found if isinstance(found, Failure) else None
