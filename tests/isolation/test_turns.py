"""Turns: who has had one leaves it to the others."""

import threading
from typing import Any

import pytest

from discolab import ThreadedSession
from discolab.isolation.turns import Exclusive, Holder, Turn
from discolab.runtime import WorkerInterrupted, current_worker


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


@pytest.mark.one_process
def test_an_interrupt_in_the_moment_of_taking_leaves_it_free(pair: ThreadedSession) -> None:
    exclusive = Exclusive("try")

    class Lock:
        """Interrupts the worker when it has just been taken."""

        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.release = self.lock.release

        def acquire(self, **how: Any) -> bool:
            assert self.lock.acquire(**how)
            worker = current_worker()
            sender = threading.Thread(target=worker.interrupt)
            sender.start()
            sender.join()
            return True

    lock: Any = Lock()
    exclusive._lock = lock

    def take() -> str:
        if current_worker().worker_id:
            return ""
        try:
            exclusive.enter("it")
        except WorkerInterrupted:
            return "interrupted"
        finally:
            current_worker().interrupts = 0
        return "taken"

    assert pair.call_packed(take).debug_get_from_remote(0) == "interrupted"
    assert not lock.lock.locked()
