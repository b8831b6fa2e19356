"""The ledger: the last collectives that each worker has called, as pure state.

One `Ledger` a session and address space. Each worker enters its own calls, on its own thread;
everybody may read at any time. An entry is the `Call` itself, so it shows how far it has come.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ...runtime.interpreter_lock import copied
from ...runtime.worker import Worker
from ..call import DONE, FAILED, WAITING, Call

LENGTH = 256  # calls that are kept for each worker
_LEDGER = "discolab.ccl.ledger"


class Ledger:
    """The last `LENGTH` calls of each worker, the oldest first."""

    def __init__(self) -> None:
        self._calls: dict[int, deque[Call]] = {}
        self._cleared = 0.0

    def enter(self, call: Call) -> None:
        """Add a call that the worker makes now."""
        line = self._calls.get(call.rank)
        if line is None:
            line = self._calls.setdefault(call.rank, deque(maxlen=LENGTH))
        line.append(call)

    def story(self, rank: int) -> list[Call]:
        """What one worker has called, the oldest first."""
        line = self._calls.get(rank)
        calls = [] if line is None else copied(line)
        return [call for call in calls if call.ended == 0.0 or call.ended > self._cleared]

    def last(self, rank: int) -> Call | None:
        """What one worker has called last, at next to no cost."""
        line = self._calls.get(rank)
        return line[-1] if line else None

    def clear(self) -> None:
        """Forget what is over; what still waits stays."""
        self._cleared = time.monotonic()  # no deque is touched: its worker may be writing

    def validate(self) -> None:
        """Check what must always hold; for tests.

        Raises
        ------
        AssertionError
        """
        for rank, line in self._calls.items():
            calls = copied(line)
            assert len(calls) <= LENGTH
            for call in calls:
                assert call.rank == rank
                assert call.state in (WAITING, DONE, FAILED)
                assert (call.ended == 0.0) == (call.state == WAITING)
                assert call.ended == 0.0 or call.ended >= call.began
            _check_order(calls)


def _check_order(calls: Sequence[Call]) -> None:
    """Commands only go forward; within one, the collectives of a group are counted one by one."""
    last: dict[tuple[Any, ...], int] = {}
    for before, after in itertools.pairwise(calls):
        assert before.ordinal <= after.ordinal
    for call in calls:
        if call.number >= 0:
            key = (call.ordinal, call.group.ranks, call.group.tag)
            assert last.get(key, call.number - 1) == call.number - 1
            last[key] = call.number


def enter(call: Call) -> None:
    """Add a call to the ledger of its worker's session."""
    ledger: Ledger | None = call.worker.shared.get(_LEDGER)
    (ledger_of(call.worker) if ledger is None else ledger).enter(call)


def ledger_of(worker: Worker) -> Ledger:
    """The ledger of a worker's session."""
    ledger: Ledger | None = worker.shared.get(_LEDGER)
    if ledger is None:
        ledger = worker.shared.setdefault(_LEDGER, Ledger())
    return ledger
