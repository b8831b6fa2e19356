"""The end of the interpreter: prompt and silent, whatever the workers do."""

import subprocess
import time
from collections.abc import Callable

import pytest

from tests.selection import slow

Run = Callable[..., subprocess.CompletedProcess[str]]

BUSY = {
    "an endless loop": "while True: pass",
    "a loop that swallows": """
    while True:
        try:
            while True: pass
        except BaseException: pass""",
    "a long sleep": "time.sleep(1000)",
    "a sleep imported before": "sleep(1000)",
    "a wait for a lock": "threading.Lock().acquire() and lock.acquire()",
    "matrix products": "a = torch.ones(300, 300)\n    while True: a = torch.tanh(a @ a)",
    "nothing": "pass",
}


SELDOM = ("an endless loop", "a sleep imported before", "a wait for a lock", "matrix products")


@pytest.mark.parametrize("what", [slow(what) if what in SELDOM else what for what in BUSY])
def test_a_busy_worker_does_not_hold_up_the_exit(run_python: Run, what: str) -> None:
    program = f"""
import threading, time
from time import sleep
import torch, discolab
lock = threading.Lock()
lock.acquire()
started = threading.Event()
def busy():
    started.set()
    {BUSY[what]}
session = discolab.ThreadedSession(2)
ref = session.call_packed(busy)
more = [session.call_packed(torch.ones, 3) for _ in range(100)]
assert started.wait(20)
print("end", time.time())
"""
    done = run_python(program)
    took = time.time() - float(done.stdout.split()[1])
    assert (done.returncode, done.stderr) == (0, "")
    assert took < 5


def test_sessions_of_every_kind_may_be_left_at_exit(run_python: Run) -> None:
    done = run_python(
        """
        import discolab, torch
        closed = discolab.ThreadedSession(2)
        ref = closed.call_packed(torch.ones, 2)
        closed.shutdown()
        idle = discolab.ThreadedSession(2)
        value = idle.empty(2, "float32")
        ring = [discolab.ThreadedSession(1)]
        ring.append(ring)
        dropped = discolab.ThreadedSession(1)
        del dropped, ring
        failing = discolab.ThreadedSession(1)
        failing.call_packed(lambda: 1 / 0)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_error_of_the_program_keeps_its_exit_code(run_python: Run) -> None:
    done = run_python(
        """
        import discolab
        with discolab.ThreadedSession(2) as session:
            session.call_packed(lambda: 1 / 0).debug_get_from_all()
        """
    )
    assert done.returncode == 1
    assert "WorkerError: workers 0-1 failed" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_ctrl_c_ends_a_program_that_waits(run_python: Run) -> None:
    done = run_python(
        """
        import os, signal, threading, time, discolab
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def spin():
            while True: pass
        session = discolab.ThreadedSession(2)
        session.call_packed(spin)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        try:
            session.sync_all()
        except KeyboardInterrupt:
            print(time.monotonic() - start < 2.5, session.call_packed(int).debug_get_from_all())
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True [0, 0]\n", "")
