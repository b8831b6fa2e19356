"""Decides when to check what workers wait for, for a deadlock or a missing member.

Pure state, under the coordinator's lock. Workers are asked what they do once somebody has waited
for 5 ms, and then less and less often; what they answer is judged as soon as all have answered, or
when the time for that is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...runtime.interrupts import FIRST_LOOK, TICK
from ..board import diagnosis
from ..board.diagnosis import SECOND_LOOK, is_gone
from ..board.rendezvous import RUNNING, Board, PendingCollective, Reception, Wait
from . import protocol
from .collectives import RemoteCall, Tell
from .protocol import SERVICE

ANSWER_SECONDS = 0.1  # that workers are given to say what they do
_PATIENCE = 0.05  # seconds for members that are on their way: the report names all that are not


class Question:
    """Asks some workers what they do; calls `do` once they have answered."""

    __slots__ = ("do", "due", "ranks")

    def __init__(self, ranks: set[int], due: float, do: Callable[[], None]) -> None:
        self.ranks, self.due, self.do = ranks, due, do


class StallDetector:
    """Checks the waits on a board.

    Attributes
    ----------
    asking
        The workers that are still to be asked what they do.
    """

    def __init__(self, board: Board, peers: Mapping[int, Any], tell: Tell) -> None:
        self._board, self._peers, self._tell = board, peers, tell
        self._questions: list[Question] = []
        self._looking = False  # whether one of them is ours
        self._pause, self._looked_at = FIRST_LOOK, 0.0
        self.asking: set[int] = set()

    # -- questions -------------------------------------------------------------------------------

    def inquire(self, ranks: Iterable[int], now: float, do: Callable[[], None]) -> None:
        """Ask workers what they do, and then call `do`, under the lock."""
        asked = {rank for rank in ranks if not (self._peers[rank].here or self._peers[rank].ended)}
        if not asked:
            do()
            return
        self.asking |= asked
        self._questions.append(Question(asked, now + ANSWER_SECONDS, do))

    def to_ask(self) -> list[int]:
        """The workers to ask now, once the lock is free."""
        asked, self.asking = self.asking, set()
        return sorted(asked)

    def answered(self, rank: int) -> None:
        """Note that a worker has answered, or has ended."""
        if not self._questions:
            return
        for question in self._questions:
            question.ranks.discard(rank)
        self._close([question for question in self._questions if not question.ranks])

    def _close(self, done: list[Question]) -> None:
        if done:
            self._questions = [one for one in self._questions if one not in done]
            for question in done:
                question.do()

    # -- when --------------------------------------------------------------------------------------

    def wanted(self) -> None:
        """A worker begins to wait."""
        self._pause = min(self._pause, SECOND_LOOK)

    def due(self) -> float | None:
        """When to call `look` next."""
        soonest = min([question.due for question in self._questions]) if self._questions else None
        if not self._looking and self._board.waiting:
            since = _since(*next(iter(self._board.waiting.items())))
            due = max(since + FIRST_LOOK, self._looked_at + self._pause)
            soonest = due if soonest is None else min(soonest, due)
        return soonest

    def look(self, now: float) -> None:
        """Do what is due."""
        self._close([question for question in self._questions if question.due <= now])
        waiting = self._board.waiting
        if self._looking or not waiting:
            return
        since = _since(*next(iter(waiting.items())))
        if now < max(since + FIRST_LOOK, self._looked_at + self._pause):
            return
        if since + 2 * self._pause > now:
            self._pause = FIRST_LOOK  # nobody waits for long
        self._looking = True
        self.inquire(self._of_interest(), now, lambda: self._judge(now))

    def _of_interest(self) -> set[int]:
        found: set[int] = set()
        for wait in self._board.waiting.values():
            if isinstance(wait, Reception):
                found.update(wait.senders)
            elif isinstance(wait, PendingCollective) and wait.state is not RUNNING:
                found.update(wait.missing())
            # what is known of an interrupt may be from before its end
            found.update(rank for rank in wait.members() if self._peers[rank].interrupts)
        return found

    # -- judging -----------------------------------------------------------------------------------

    def _judge(self, now: float) -> None:
        """Fail what can never be."""
        self._looking, self._looked_at = False, now
        board, peers = self._board, self._peers
        suspected = False
        for rank, wait in self._to_judge():
            if wait.settled() or self._interrupted(wait):
                continue
            if self._grows(wait, now - _since(rank, wait)):
                suspected = True
                continue
            verdict = diagnosis.judge(board, wait, peers[rank])
            suspected = suspected or wait.suspected is not None
            diagnosis.fail(board, verdict)
        self._pause = SECOND_LOOK if suspected else min(2 * self._pause, TICK)
        for rank, wait in board.waiting.items():
            if isinstance(wait, PendingCollective) and wait.state is not RUNNING:
                self._tell_missing(rank, wait)

    def _to_judge(self) -> list[tuple[int, Wait]]:
        """One of those that wait for each thing; all for whom others wait, be it in a circle."""
        waiting = dict(self._board.waiting)
        wanted = {rank for wait in waiting.values() for rank in wait.missing()}
        chosen = {
            rank: wait
            for rank, wait in waiting.items()
            if rank in wanted or isinstance(wait, Reception)
        }
        seen = {id(wait) for wait in chosen.values()}
        for rank, wait in waiting.items():
            if id(wait) not in seen:
                seen.add(id(wait))
                chosen[rank] = wait
        return sorted(chosen.items())

    def _grows(self, wait: Wait, seconds: float) -> bool:
        """Whether more members may come any moment to what has begun just now."""
        if not isinstance(wait, PendingCollective) or seconds > _PATIENCE:
            return False
        board, peers = self._board, self._peers
        return any(
            rank not in board.waiting and not is_gone(peers[rank], wait) for rank in wait.missing()
        )

    def _interrupted(self, wait: Wait) -> bool:
        """Whether an interrupt is under way that will end it on all of them."""
        ranks = {*wait.members(), *wait.missing()}
        return any(self._peers[rank].interrupts for rank in ranks if not self._peers[rank].ended)

    def _tell_missing(self, rank: int, collective: PendingCollective) -> None:
        """Let a worker that waits know for whom; its status shows it."""
        call, missing = collective.call_of(rank), tuple(collective.missing())
        if isinstance(call, RemoteCall) and call.reported_missing != missing:
            call.reported_missing = missing
            self._tell(rank, SERVICE, (protocol.MISSING, call.seq, missing))


def _since(rank: int, wait: Wait) -> float:
    call = wait.call_of(rank)
    return call.waits_since if isinstance(call, RemoteCall) else 0.0
