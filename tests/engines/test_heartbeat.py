"""What the silence of a worker means: frozen where there is evidence, else late and waited for."""

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from discolab import DiscoError, ProcessSession, current_worker
from discolab.engines.heartbeat import Heartbeats, process_state
from discolab.runtime.interpreter_lock import is_on

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def pass_time(heartbeats: Heartbeats, seconds: float, state: str = "", step: float = 0.25) -> None:
    began = heartbeats._last_turn or 0.0
    for number in range(1, round(seconds / step) + 1):
        heartbeats.turn(began + number * step)
        heartbeats.sample(1, state)


def silent(limit: float = 10.0) -> Heartbeats:
    heartbeats = Heartbeats(limit)
    heartbeats.turn(0.0)
    heartbeats.heard(1)
    return heartbeats


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("T", "it is stopped (SIGSTOP)"),
        ("t", "a debugger holds it"),
        ("S", "all its threads sleep, in code that keeps Python's lock"),
        ("R", ""),
        ("D", ""),
        ("", ""),
    ],
)
def test_a_silent_worker_is_frozen_only_if_something_shows_it(state: str, why: str) -> None:
    heartbeats = silent()
    pass_time(heartbeats, 9, state)
    assert (heartbeats.is_overdue(1), heartbeats.why_frozen(1)) == (False, "")
    pass_time(heartbeats, 2, state)
    assert (heartbeats.is_overdue(1), heartbeats.why_frozen(1)) == (True, why)
    assert heartbeats.first_told(1)
    assert not heartbeats.first_told(1)
    heartbeats.heard(1)
    assert (heartbeats.is_overdue(1), heartbeats.why_frozen(1)) == (False, "")


def test_threads_that_sleep_must_be_seen_asleep_again_and_again() -> None:
    heartbeats = silent()
    for _ in range(20):  # as a process does that gets a core now and then
        pass_time(heartbeats, 0.75, "S")
        pass_time(heartbeats, 0.25, "R")
    assert heartbeats.silent_for(1) == 20
    assert heartbeats.why_frozen(1) == ""


def test_while_the_reader_thread_is_late_itself_nobody_is_silent() -> None:
    heartbeats = silent()
    pass_time(heartbeats, 60, "S", step=30)
    assert heartbeats.silent_for(1) == 1


def test_a_process_runs_if_any_of_its_threads_does() -> None:
    program = """if True:
        import threading
        def spin():
            while True:
                pass
        thread = threading.Thread(target=spin)
        thread.start()
        thread.join()
    """
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            states = set()
            deadline = time.monotonic() + 20
            while "R" not in states and time.monotonic() < deadline:
                time.sleep(0.05)
                states.add(process_state(process.pid))
            time.sleep(0.2)
            assert {process_state(process.pid) for _ in range(20)} == {"R"}
            process.send_signal(signal.SIGSTOP)
            while process_state(process.pid) != "T":
                time.sleep(0.01)
        finally:
            process.kill()
    assert process_state(process.pid) == ""


def keep_lock_and_sleep() -> None:
    if current_worker().rank == 1:
        ctypes.PyDLL(None).sleep(600)


def keep_lock_and_compute(seconds: float) -> str:
    """On another thread than the worker's, which waits for it meanwhile."""
    if current_worker().rank == 1:
        until = time.monotonic() + seconds
        many = 10_000_000

        def compute() -> None:
            sys.setswitchinterval(600)
            try:
                while time.monotonic() < until:
                    sum(itertools.repeat(1, many))
            finally:
                sys.setswitchinterval(0.005)

        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    return "done"


def test_c_code_that_sleeps_with_pythons_lock_is_told_as_frozen() -> None:
    session = ProcessSession(2, devices="cpu", heartbeat=2)
    try:
        session.call_packed(keep_lock_and_sleep)
        began = time.monotonic()
        with pytest.raises(DiscoError, match=r"worker 1 .*no sign of life.*all its threads sleep"):
            session.sync_all(timeout=30)
        assert time.monotonic() - began < 8
        assert "all its threads sleep" in session.status()[1].detail
    finally:
        session.shutdown(cancel=True)


@pytest.mark.skipif(not is_on(), reason="nobody keeps a lock that is off")
def test_a_worker_that_computes_with_pythons_lock_is_late_and_waited_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with ProcessSession(2, devices="cpu", heartbeat=0.5) as session:
        ref = session.call_packed(keep_lock_and_compute, 2.0)
        assert ref.debug_get_from_all(timeout=60) == ["done", "done"]
        pid = session.processes()[1]
    told = [line for line in capfd.readouterr().err.splitlines() if "has not answered" in line]
    assert len(told) == 1, told
    assert told[0].startswith(f"worker 1 (pid {pid}) has not answered for ")
    assert "it computes in code that keeps Python's lock, or waits for a core" in told[0]
    assert told[0].endswith("It is waited for.")


def test_a_busy_controller_takes_no_idle_worker_for_frozen() -> None:
    with ProcessSession(2, devices="cpu", heartbeat=0.5) as session:
        session.sync_all()
        before = sys.getswitchinterval()
        sys.setswitchinterval(600)  # the reader thread gets no turn
        try:
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                sum(itertools.repeat(1, 1_000_000))
        finally:
            sys.setswitchinterval(before)
        session._check_alive()
        assert "no sign of life" not in session.status()[1].detail
        os.kill(session.processes()[1], 0)
