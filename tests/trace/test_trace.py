"""Recording on workers and collecting it, on every engine."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from discolab import ArgumentError, Session, WorkerError, ccl, current_worker, trace
from discolab.ccl.call import Call
from discolab.runtime import sources
from discolab.trace import Follower, mark, span
from discolab.trace.recorder import recorder_of


def step(count: int = 1) -> None:
    worker = current_worker()
    for number in range(count):
        with span("forward"):
            time.sleep(0.002 * (1 + worker.worker_id))
        with span("sync"):
            ccl.all_reduce(torch.ones(8))
        mark(f"step {number}")


def fail_on_one() -> None:
    with span("doomed"):
        if current_worker().worker_id == 1:
            raise ValueError("on purpose")


def wait_for(path: str) -> None:
    from tests.conftest import Gate

    with span("waiting"):
        Gate(path).wait(10)


def in_collective(path: str) -> None:
    if current_worker().worker_id == 1:
        wait_for(path)
    ccl.barrier()


@contextmanager
def recording(session: Session) -> Iterator[None]:
    """From scratch: a session of an earlier test may have recorded before."""
    trace.start(session)
    trace.clear(session)
    yield
    if not session.closed:
        trace.stop(session)


def interrupted_trace(session: Session) -> trace.Trace:
    """What is left of a trace whose block raises."""
    found = None
    try:
        with trace.tracing(session) as found:
            session.call_packed(step)
            session.sync_all()
            raise KeyError
    except KeyError:
        assert found is not None
        return found


def names(found: trace.Trace, rank: int, kind: str) -> list[str]:
    return [event.name for event in found.events[rank] if event.kind == kind]


@pytest.mark.conformance
def test_a_trace_has_commands_collectives_spans_and_marks(pair: Session) -> None:
    with trace.tracing(pair) as found:
        pair.call_packed(step, 3)
    assert not found.missing
    for rank in (0, 1):
        assert names(found, rank, "command") == ["step"]
        assert names(found, rank, "collective") == ["all_reduce"] * 3
        assert names(found, rank, "span") == ["forward", "sync"] * 3
        assert names(found, rank, "mark") == ["step 0", "step 1", "step 2"]
        (command,) = [event for event in found.events[rank] if event.kind == "command"]
        assert all(
            command.begin <= event.begin <= event.end <= command.end
            and event.ordinal == command.ordinal
            and event.state == "done"
            for event in found.events[rank]
        )
        assert "test_trace.py" in command.site
    rounds = found.rounds()
    assert [one.complete for one in rounds] == [True] * 3
    assert all(one.slowest == max(one.begins, key=one.begins.__getitem__) for one in rounds)
    assert all(one.size == 32 and one.detail == "float32[8], sum" for one in rounds)


def test_nothing_is_recorded_before_and_after(pair: Session) -> None:
    pair.call_packed(step)
    with recording(pair):
        pair.call_packed(fail_on_one)
    pair.call_packed(step)
    with pytest.raises(WorkerError):
        pair.sync_all()
    found = trace.collect(pair)
    assert names(found, 0, "command") == ["fail_on_one"]
    assert [event.state for event in found.events[0]] == ["done", "done"]
    assert [event.state for event in found.events[1]] == ["failed", "failed"]
    assert trace.is_on(pair, timeout=5) == {0: False, 1: False}
    trace.clear(pair)
    pair.sync_all()
    assert trace.collect(pair).events == {0: (), 1: ()}


def test_only_the_new_is_asked_for(pair: Session) -> None:
    with recording(pair):
        pair.call_packed(step)
        pair.sync_all()
        first = trace.collect(pair)
        pair.call_packed(step)
        pair.sync_all()
    both = trace.collect(pair, since=first)
    assert both.events == trace.collect(pair).events
    assert both.events[1][: len(first.events[1])] == first.events[1]
    assert names(both, 1, "command") == ["step", "step"]


def test_the_ring_drops_the_oldest_and_says_so(pair: Session) -> None:
    with trace.tracing(pair, capacity=10) as found:
        for _ in range(30):
            pair.call_packed(int, 1)
    assert len(found.events[0]) == 10
    assert found.dropped[0] >= 20
    assert "were dropped" in found._repr_mimebundle_()["text/plain"]
    with pytest.raises(ArgumentError, match="1 or more"):
        trace.start(pair, capacity=0)


def test_what_was_cleared_or_came_before_the_block_was_not_dropped(pair: Session) -> None:
    with recording(pair):
        pair.call_packed(step)
        trace.clear(pair)
        pair.call_packed(step)
        pair.sync_all()
        assert trace.collect(pair, timeout=5).dropped == {}
        trace.start(pair, 10)
        pair.call_packed(step, 50)
    with trace.tracing(pair) as found:
        pair.call_packed(int, 1)
    assert found.dropped == {}
    assert names(found, 0, "command") == ["int"]


def test_the_last_command_is_known_before_all_is_read(pair: Session) -> None:
    with recording(pair):
        pair.call_packed(step, 9)
        pair.sync_all()
    follower = Follower(pair)
    follower.poll(timeout=5, most=4)
    assert follower.behind
    assert [len(events) for events in follower.events.values()] == [5, 5]
    assert [events[-1].name for events in follower.events.values()] == ["step", "step"]
    assert not follower.goes_on
    follower.catch_up(5)
    assert follower.trace().events == trace.collect(pair, timeout=5).events


def test_what_discolab_asks_for_itself_is_no_call_of_the_user(pair: Session) -> None:
    from discolab.views.before_after import record_of

    with trace.tracing(pair) as found:
        ref = pair.call_packed(fail_on_one)
        pair.call_packed(record_of, ref)
    with pytest.raises(WorkerError):
        pair.sync_all()
    calls = found.summary().workers
    assert [(one.commands, one.failed) for one in calls] == [(1, 0), (1, 1)]


def test_since_must_be_a_trace_of_this_session(pair: Session) -> None:
    other = trace.Trace("another", {0: (), 7: ()})
    for since in (other, 5):
        with pytest.raises(ArgumentError, match="since is"):
            trace.collect(pair, since=since)  # type: ignore[arg-type]
    for timeout in ("x", -1, float("nan")):
        with pytest.raises(ArgumentError, match="timeout is"):
            trace.collect(pair, timeout=timeout)  # type: ignore[arg-type]


@pytest.mark.conformance
def test_a_follower_sees_what_runs(pair: Session, gate: Any) -> None:
    with recording(pair):
        pair.call_packed(in_collective, gate.path)
    follower = Follower(pair)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        follower.poll(timeout=5)
        kinds = {rank: [e.kind for e in events] for rank, events in follower.events.items()}
        if kinds == {0: ["collective", "command"], 1: ["command", "span"]}:
            break
    assert not follower.missing
    waiting, command = follower.events[0]
    assert (waiting.name, waiting.state, waiting.end) == ("barrier", "waiting", 0)
    assert (command.state, command.end, command.seq) == ("running", 0, -1)
    assert trace.collect(pair, timeout=5).summary().workers[0].waiting > 0
    begin, end = follower.extent()
    assert {one.kind for one in follower.fold(begin, end, 200)[1]} == {"command", "span"}
    gate.set()
    pair.sync_all()
    assert follower.poll(timeout=5) > 0
    assert follower.poll(timeout=5) == 0
    barrier = follower.events[0][0]
    assert (barrier.state, barrier.name) == ("done", "barrier")
    assert follower.waits[0][barrier.seq] > 0
    assert follower.trace().events == trace.collect(pair, timeout=5).events
    for lane in follower._lanes.values():
        lane.validate()


def test_who_was_stopped_while_waiting_has_waited(make: Any, gate: Any, engine: str) -> None:
    if engine not in ("threads", "processes"):
        pytest.skip("the loop of a worker is the same on all engines")
    session = make(2)
    trace.start(session)
    session.call_packed(in_collective, gate.path)
    follower = Follower(session)
    deadline = time.monotonic() + 10
    while {event.kind for events in follower.events.values() for event in events} != {
        "command", "collective", "span",
    }:  # fmt: skip
        assert time.monotonic() < deadline
        follower.poll(timeout=5)
    assert session.interrupt(timeout=10) == []
    follower.catch_up(5)
    (barrier,) = [event for event in follower.events[0] if event.kind == "collective"]
    assert barrier.state == "stopped"
    assert follower.waits[0][barrier.seq] == barrier.end - barrier.begin
    (waited,) = [event for event in follower.events[1] if event.kind == "span"]
    assert waited.state == "stopped"
    (site,) = follower.trace().summary().sites
    assert (site.waited, site.going) == (barrier.end - barrier.begin, 0)


def test_messages_are_bounded(pair: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discolab.trace.follower.A_LOOK", 7)
    with trace.tracing(pair) as found:
        for _ in range(50):
            pair.call_packed(int, 1)
    assert [len(events) for events in found.events.values()] == [50, 50]


@pytest.mark.one_process
def test_a_cell_is_called_as_in_the_notebook(
    pair: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    from discolab.notebook.cell import run_cell  # here: workers import this file, not IPython

    monkeypatch.setattr(
        sources, "namers", [lambda file: "Cell In[7]" if file == "/tmp/7.py" else None]
    )
    with trace.tracing(pair) as found:
        pair.call_packed(run_cell, "with discolab.trace.span('part'):\n    1", "/tmp/7.py", None)
        pair.call_packed(run_cell, "import discolab", "/tmp/7.py", None)
        pair.call_packed(run_cell, "\nwith discolab.trace.span('part'):\n    1", "/tmp/7.py", None)
    first, second, third = [event for event in found.events[0] if event.kind == "command"]
    assert {first.name, second.name, third.name} == {"Cell In[7]"}
    assert first.state == "failed"
    (part,) = [event for event in found.events[0] if event.kind == "span"]
    assert part.site == "Cell In[7], line 2"


def test_a_session_closed_in_the_block(make: Any, engine: str) -> None:
    if engine == "ray":
        pytest.skip("it would take the session that all tests share")
    session = make(2)
    with trace.tracing(session) as found:
        session.call_packed(step)
        session.sync_all()
        session.shutdown()
    rows = found._repr_mimebundle_()["text/plain"]
    kept = [0, 1] if engine == "threads" else [0]
    for rank in (0, 1):
        assert names(found, rank, "command") == ["step"] * (rank in kept)
        assert (f"worker {rank}: gone with the session" in rows) == (rank not in kept)


def test_a_block_that_raises_leaves_what_was_recorded(pair: Session) -> None:
    found = interrupted_trace(pair)
    assert names(found, 1, "collective") == ["all_reduce"]
    assert trace.collect(pair).events[0]  # it was kept


def test_a_dead_worker_is_said_to_be_missing(make: Any, engine: str) -> None:
    if engine != "processes":
        pytest.skip("one engine whose workers can die is enough")
    import os
    import signal

    session = make(2)
    trace.start(session)
    session.call_packed(step)
    session.sync_all()
    (pid,) = [s["pid"] for r, s in session.look(trace.sample, timeout=5).items() if r == 1]
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while session.status()[1].state != "dead" and time.monotonic() < deadline:
        time.sleep(0.01)
    found = trace.collect(session)
    assert found.missing == {1: "dead; what was recorded there is lost"}
    assert names(found, 0, "command") == ["step"]


def test_the_lane_of_a_dead_worker_ends_with_it(make: Any, engine: str, gate: Any) -> None:
    if engine != "processes":
        pytest.skip("one engine whose workers can die is enough")
    import os
    import signal

    session = make(2)
    trace.start(session)
    session.call_packed(wait_for, gate.path)
    follower = Follower(session)
    pid = session.look(trace.sample, timeout=5)[1]["pid"]
    deadline = time.monotonic() + 10
    while not follower.events[1] and time.monotonic() < deadline:
        follower.poll(5)
    os.kill(pid, signal.SIGKILL)
    while 1 not in follower.missing or not follower.events[1][0].end:
        assert time.monotonic() < deadline
        follower.poll(0.1)
    assert follower.missing == {1: "dead; what came after the last look is lost"}
    lane = follower.events[1]
    assert {event.state for event in lane} == {"failed"}
    follower.poll(0.1)
    assert follower.events[1] == lane
    assert follower.goes_on  # the other
    gate.set()


@pytest.mark.one_process
def test_a_trace_is_begun_again_after_a_restart(make: Any, engine: str) -> None:
    if engine not in ("threads", "processes"):
        pytest.skip("workers that are threads, and workers that are not")
    session = make(2)
    trace.start(session)
    session.call_packed(step)
    session.sync_all()
    session.restart_worker(1)
    assert trace.is_on(session, timeout=5) == {0: True, 1: False}
    trace.start(session)
    session.call_packed(step)
    session.sync_all()
    found = trace.collect(session, timeout=5)
    assert names(found, 1, "command") == ["step"]
    assert names(found, 1, "span") == ["forward", "sync"]
    assert names(found, 1, "collective") == ["all_reduce"]


def test_nothing_is_on_any_path_when_off(pair: Session) -> None:
    workers = pair.workers_here().values()
    before = [list(worker.dispatch) for worker in workers]
    with trace.tracing(pair):
        pair.call_packed(step)
        pair.sync_all()
        assert Call.watch is not None
        assert [list(worker.dispatch) for worker in workers] != before
    pair.sync_all()
    assert Call.watch is None
    assert [list(worker.dispatch) for worker in workers] == before


@pytest.mark.one_process
def test_the_ring_keeps_no_tensor_and_no_function(pair: Session) -> None:
    kept: list[weakref.ref[Any]] = []

    def make_one(value: torch.Tensor) -> None:
        ccl.all_reduce(value)
        kept.append(weakref.ref(value))

    kept.append(weakref.ref(make_one))
    with trace.tracing(pair) as found:
        pair.call_packed(make_one, torch.ones(4))
    del make_one
    pair.call_packed(int, 1)
    pair.sync_all()
    gc.collect()
    assert len(kept) == 3
    assert [ref() for ref in kept] == [None] * 3
    assert found.events[0]


def test_off_workers_spans_do_nothing() -> None:
    with span("nowhere"):
        mark("nothing")

    @span("decorated")
    def answer() -> int:
        return 42

    assert answer() == 42


@pytest.mark.one_process
def test_spans_of_other_threads_and_out_of_order(pair: Session) -> None:
    import threading

    def tangled() -> None:
        worker = current_worker()
        one, two = span("one"), span("two")
        one.__enter__()
        two.__enter__()
        one.__exit__(None, None, None)
        two.__exit__(None, None, None)
        span("left open").__enter__()

        def beside() -> None:
            from discolab.runtime.worker import bind_thread

            bind_thread(worker)
            with span("beside"):
                pass

        thread = threading.Thread(target=beside, name="helper")
        thread.start()
        thread.join()

    with trace.tracing(pair) as found:
        pair.call_packed(tangled)
    spans = [event for event in found.events[0] if event.kind == "span"]
    assert sorted(event.name for event in spans) == ["beside", "left open", "one", "two"]
    assert {event.name: event.detail for event in spans}["beside"] == "helper"
    recorder = recorder_of(pair.workers_here()[0])
    assert recorder is not None
    assert recorder.spans == []


def test_a_profile_has_the_operations_of_torch(make: Any, engine: str) -> None:
    if engine != "threads":
        pytest.skip("torch's profiler takes seconds to start in each process")
    session = make(2)
    with trace.profile(session) as found:
        session.call_packed(step)
    for rank in (0, 1):
        (command,) = [event for event in found.events[rank] if event.kind == "command"]
        ones = [e for e in found.events[rank] if e.kind == "cpu" and e.name == "aten::ones"]
        assert len(ones) == 1
        assert command.begin < ones[0].begin < ones[0].end < command.end
    again = trace.collect(session, since=found)
    assert names(again, 0, "cpu").count("aten::ones") == 1
