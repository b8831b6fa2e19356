"""Probes: what is seen of workers from beside them, while they compute."""

from __future__ import annotations

import time

import pytest

from discolab import ArgumentError, DiscoError, Session, current_worker
from discolab.runtime import Worker, probe


@probe
def registers_of(worker: Worker, factor: int) -> tuple[int, int]:
    return worker.worker_id * factor, len(worker.registers)


@probe
def fails(worker: Worker) -> None:
    raise ValueError(f"nothing to see at {worker.worker_id}")


def sleep_a_while(seconds: float) -> None:
    current_worker()
    time.sleep(seconds)


@pytest.mark.conformance
def test_a_look_does_not_wait_for_the_workers(sess: Session) -> None:
    kept = sess.call_packed(int, 3)
    sess.sync_all()
    sess.call_packed(sleep_a_while, 3.0)
    while any(status.state == "idle" for status in sess.status()):
        time.sleep(0.01)
    began = time.monotonic()
    found = sess.look(registers_of, 10, timeout=2.5)
    assert time.monotonic() - began < 2.5
    assert [value for value, _ in found.values()] == [0, 10, 20, 30]
    assert all(count >= 1 for _, count in found.values())
    assert any(status.state == "waiting" for status in sess.status())  # for time.sleep
    sess.interrupt()
    del kept


@pytest.mark.conformance
def test_a_look_at_some(sess: Session) -> None:
    assert list(sess.look(registers_of, 1, ranks=[2, 1], timeout=5)) == [1, 2]
    with pytest.raises(ArgumentError, match="out of range"):
        sess.look(registers_of, 1, ranks=[4])


def test_what_is_no_probe(sess: Session) -> None:
    with pytest.raises(ArgumentError, match="no probe"):
        sess.look(sleep_a_while, 1.0)


@pytest.mark.conformance
def test_a_probe_that_fails_says_so(sess: Session) -> None:
    with pytest.raises((DiscoError, ValueError), match="nothing to see at"):
        sess.look(fails, timeout=5)
    assert len(sess.look(registers_of, 1, timeout=5)) == 4  # the workers are none the worse


def test_a_closed_session_is_looked_at_without_waiting(make) -> None:  # type: ignore[no-untyped-def]
    session = make(2)
    session.shutdown()
    assert set(session.look(registers_of, 1)) <= {0, 1}
