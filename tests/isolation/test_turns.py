"""Turns: who has had one leaves it to the others."""

import pytest

from discolab import ThreadedSession
from discolab.isolation.turns import Holder, Turn
from discolab.runtime import current_worker


@pytest.mark.one_process
def test_a_turn_that_was_asked_for_twice_ends_once(pair: ThreadedSession) -> None:
    """A worker that waits may ask again in the moment in which its turn has come."""

    def take_turns() -> list[bool]:
        turn, worker = Turn("try"), current_worker()
        one = Holder(worker.thread_id or 0, worker, worker.executed)
        other = Holder(1, None, 1)
        found = [turn._take(one), turn._take(one), turn._take(other)]
        turn._end(one)
        return [*found, turn._take(other)]

    assert pair.call_packed(take_turns).debug_get_from_all() == [[True, True, False, True]] * 2
