"""Recording survives interrupts: what was torn has its end, and what comes after is recorded."""

from __future__ import annotations

import itertools
import time

import pytest

from discolab import Session, current_worker, trace
from discolab.trace import Trace, mark, span

CAPACITY = 1_000_000  # events of a worker
ROUNDS = 50


def busy() -> None:
    """Everything that records, over and over, so that an interrupt lands anywhere in it."""
    current_worker()
    while True:
        with span("outer"):
            with span("inner"):
                mark("here")
            time.perf_counter()


def answer() -> int:
    with span("after"):
        return 42


def check(found: Trace, rounds: int) -> None:
    assert not found.missing
    for events in found.events.values():
        commands = [event for event in events if event.kind == "command"]
        torn = [event for event in commands if event.name == "busy"]
        assert 0 < len(torn) <= rounds  # one may have been cancelled before it began
        assert {event.state for event in torn} == {"stopped"}
        answers = [event.state for event in commands if event.name == "answer"]
        assert answers == ["done"] * len(answers)
        # a worker that nobody stops for long, on a busy machine, fills all the room: first go first
        assert len(answers) == rounds or (answers and len(events) >= CAPACITY)
        for before, after in itertools.pairwise(commands):
            assert before.begin <= before.end <= after.begin
        spans = {event.ordinal: event for event in commands}
        for event in events:
            assert event.end
            assert event.state in ("done", "stopped")
            around = spans[event.ordinal]
            assert around.begin <= event.begin <= event.end <= around.end
        assert all(event.state != "running" for event in events)


@pytest.mark.usefixtures("drops_exceptions")
def test_fifty_interrupts_of_traced_work(make, engine: str) -> None:  # type: ignore[no-untyped-def]
    if engine not in ("threads", "processes"):
        pytest.skip("the loop of a worker is the same on all engines")
    session: Session = make(2)
    rounds = ROUNDS if engine == "threads" else 10
    with trace.tracing(session, capacity=CAPACITY) as found:
        for number in range(rounds):
            session.call_packed(busy)
            time.sleep(0.0005 * (number % 7))
            assert session.interrupt(timeout=10) == []
            assert session.call_packed(answer).debug_get_from_all() == [42, 42]
    check(found, rounds)
    for worker in session.workers_here().values():
        recorder = trace.recorder.recorder_of(worker)
        assert recorder is not None
        assert recorder.open is None
        assert recorder.spans == []
