"""Stop ends Python's own waits on a worker, and they do what they do elsewhere."""

import asyncio
import concurrent.futures
import gc
import multiprocessing
import multiprocessing.util
import os
import queue
import random
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from discolab import Session, current_worker


@pytest.fixture(autouse=True)
def none_is_left_to_later_tests() -> Iterator[None]:
    """An interrupt may land as `__exit__` of a `Popen` begins: `subprocess` keeps it, and drops it,
    with a warning of its pipe, as anybody starts a program."""
    yield
    gc.collect()
    kept: list[Any] = subprocess._active  # type: ignore[attr-defined]
    deadline = time.monotonic() + 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        while kept and time.monotonic() < deadline:
            subprocess._cleanup()  # type: ignore[attr-defined]
            time.sleep(0.01)


def wait_for_future() -> None:
    concurrent.futures.Future[None]().result()


def wait_for_thread() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        thread.join()
    finally:
        over.set()


def run_loop_for_ever() -> None:
    loop = asyncio.new_event_loop()
    try:
        loop.run_forever()
    finally:
        loop.close()


def put_into_full_queue() -> None:
    full: queue.Queue[int] = queue.Queue(1)
    full.put(1)
    full.put(2)


WAITS: dict[str, Callable[[], Any]] = {
    "event": lambda: threading.Event().wait(),
    "event with a deadline": lambda: threading.Event().wait(1000),
    "queue": lambda: queue.Queue().get(),
    "full queue": put_into_full_queue,
    "semaphore": lambda: threading.Semaphore(0).acquire(),
    "barrier": lambda: threading.Barrier(2).wait(),
    "future": wait_for_future,
    "thread": wait_for_thread,
    "process": lambda: subprocess.run(["sleep", "1000"], check=True),
    "output of a process": lambda: subprocess.check_output(["sleep", "1000"]),
    "asyncio": lambda: asyncio.run(asyncio.sleep(1000)),
    "asyncio, for ever": run_loop_for_ever,
}


@pytest.mark.parametrize("wait", WAITS)
def test_an_interrupt_ends_pythons_waits(sess: Session, wait: str) -> None:
    sess.call_packed(WAITS[wait])
    deadline = time.monotonic() + 20
    while not {status.state for status in sess.status()} <= {"running", "waiting"}:
        assert time.monotonic() < deadline, sess.status()
        time.sleep(0.01)
    time.sleep(0.1)
    began = time.monotonic()
    assert sess.interrupt(timeout=10) == []
    assert time.monotonic() - began < 4
    ranks = sess.call_packed(lambda: current_worker().rank).debug_get_from_all()
    assert ranks == list(range(sess.num_workers))


def test_a_wait_for_a_program_is_told_as_one(pair: Session) -> None:
    """Not as the sleeps between two looks at it, and without the program's arguments."""
    pair.call_packed(WAITS["process"])
    deadline = time.monotonic() + 20
    while not all("a program (sleep)" in status.detail for status in pair.status()):
        assert time.monotonic() < deadline, pair.status()
        time.sleep(0.01)
    assert pair.interrupt(timeout=10) == []


def hand_over(count: int) -> tuple[list[int], bool, bool]:
    """Many things through a small queue, between this thread and another one."""
    small: queue.Queue[int] = queue.Queue(2)
    found: list[int] = []

    def take() -> None:
        for number in range(count):
            if number % 50 == 0:
                time.sleep(0.06)  # longer than a slice
            found.append(small.get())

    taker = threading.Thread(target=take)
    taker.start()
    for number in range(count):
        small.put(number)
    taker.join()
    event = threading.Event()
    threading.Timer(0.15, event.set).start()
    return found, event.wait(10), threading.Event().wait(0.12)


def test_waits_in_slices_lose_nothing(sess: Session) -> None:
    for found, came, did_not in sess.call_packed(hand_over, 300).debug_get_from_all():
        assert found == list(range(300))
        assert came
        assert not did_not


def test_waits_keep_their_deadlines_and_errors(pair: Session) -> None:
    def wait() -> list[Any]:
        began = time.monotonic()
        found: list[Any] = []
        with pytest.raises(queue.Empty):
            queue.Queue[int]().get(timeout=0.12)
        with pytest.raises(RuntimeError, match="un-acquired lock"):
            threading.Condition().wait()
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(["sleep", "1000"], timeout=0.12, check=True)
        found.append(subprocess.run(["sh", "-c", "exit 3"], check=False).returncode)
        found.append(subprocess.check_output(["echo", "word"], text=True))
        found.append(asyncio.run(asyncio.sleep(0.12, "slept")))
        return [*found, 0.36 <= time.monotonic() - began < 5]

    for found in pair.call_packed(wait).debug_get_from_all():
        assert found == [3, "word\n", "slept", True]


def _run_sleep() -> None:
    subprocess.run(["sleep", "1000"], check=True)


def _children() -> list[str]:
    """What calls have started in this process and was left running, or not waited for."""
    children = psutil.Process(os.getpid()).children()
    return [f"{child.pid} {child.status()}" for child in children if child.name() == "sleep"]


def test_an_interrupt_leaves_no_process(sess: Session) -> None:
    """However early it comes: as the process is being started, too."""
    moments = random.Random(3)
    for _ in range(15):
        sess.call_packed(_run_sleep)
        time.sleep(moments.random() * 0.02)
        assert sess.interrupt(timeout=10) == []
        left = sess.call_packed(_children).debug_get_from_all()
        assert left == [[]] * sess.num_workers


_KNOWN: set[int] = set()


def _new_processes(*, now_known: bool) -> list[str]:
    """Those that were forked from this process and run, but for those that were known before."""
    gc.collect()
    ended = psutil.STATUS_ZOMBIE  # the next process that multiprocessing starts lets it go
    children = psutil.Process(os.getpid()).children()
    children = [c for c in children if c.pid not in _KNOWN and c.status() != ended]
    if now_known:
        _KNOWN.update(child.pid for child in children)
    return [f"{child.pid} {child.status()}" for child in children]


def _start_pool() -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(time.sleep, [1000.0] * 2)


# an interrupt may land as CPython begins `__exit__`: the object then waits for the collector; or in
# `__init__`: what `__del__` looks at is not there yet
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore:.*Pool.__del__:pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_leaves_no_process_of_a_pool(pair: Session) -> None:
    """However early it comes: as processes are forked, too."""
    moments = random.Random(4)
    pair.call_packed(_new_processes, now_known=True).debug_get_from_all()
    for _ in range(15):
        pair.call_packed(_start_pool)
        time.sleep(moments.random() * 0.04)
        assert pair.interrupt(timeout=10) == []
    until = time.monotonic() + 10
    while any(left := pair.call_packed(_new_processes, now_known=False).debug_get_from_all()):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_a_finalizer_of_multiprocessing_runs_whole(pair: Session) -> None:
    """However long it takes: an interrupt is sent again, and nothing calls the rest of it."""

    def clean_up(found: dict[str, bool]) -> None:
        threading.Event().wait(0.7)
        found["cleaned up"] = True

    def work(found: dict[str, bool]) -> None:
        finalizer = multiprocessing.util.Finalize(None, clean_up, (found,), exitpriority=0)
        try:
            time.sleep(1000)
        finally:
            finalizer()

    found = pair.call_packed(dict)
    pair.call_packed(work, found)
    until = time.monotonic() + 20
    while any(status.state != "waiting" for status in pair.status()):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert pair.interrupt(timeout=20) == []
    assert found.debug_get_from_all() == [{"cleaned up": True}] * 2


def _begin_and_sleep(begun: Any) -> None:
    begun.set()
    time.sleep(60)


def test_ctrl_c_ends_a_child_that_the_notebook_has_forked(pair: Session) -> None:
    fork = multiprocessing.get_context("fork")
    begun = fork.Event()
    child = fork.Process(target=_begin_and_sleep, args=(begun,))
    with warnings.catch_warnings():  # CPython 3.12 warns of threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    assert begun.wait(20)
    time.sleep(0.1)
    os.kill(child.pid or 0, signal.SIGINT)
    child.join(20)
    assert not child.is_alive()


def _read_pipe(seconds: str) -> None:
    with subprocess.Popen(f"echo; sleep {seconds}", shell=True, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        for _ in program.stdout:
            pass


def _in_shell(seconds: str) -> None:
    os.system(f"sleep {seconds}")


def _map_in_processes(seconds: str) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(time.sleep, [float(seconds)] * 2)


def _sleeping_for(seconds: str) -> list[int]:
    found = psutil.process_iter(["pid", "cmdline"])
    return [p.info["pid"] for p in found if p.info["cmdline"] == ["sleep", seconds]]


_real_children = psutil.Process.children


def _look_slowly(gate: str) -> None:
    """Have whoever looks for the children of a program see them as they were a moment ago."""

    def children(self: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        found = _real_children(self, recursive=recursive)
        with open(gate, "w", encoding="ascii"):
            select.select([], [], [], 0.2)  # an interrupt ends `time.sleep` on a worker
        return found

    psutil.Process.children = children


def _look_as_usual() -> None:
    psutil.Process.children = _real_children


_STARTS_LATE = """
import os, sys
open(sys.argv[1] + ".awaited", "w").close()
while not os.path.exists(sys.argv[1]):
    pass
os.spawnlp(os.P_WAIT, "sleep", "sleep", sys.argv[2])
"""


def _read_pipe_of_late_child(gate: str, seconds: str) -> None:
    command = [sys.executable, "-ISc", _STARTS_LATE, gate, seconds]
    if current_worker().worker_id == 1:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
            assert program.stdout is not None
            for _ in program.stdout:
                pass


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupt_reaches_what_a_program_starts_just_then(
    sess: Session, tmp_path: Path
) -> None:
    seconds, gate = f"{99 + random.random():.9f}", str(tmp_path / "gate")
    sess.call_packed(_look_slowly, gate).debug_get_from_all()
    try:
        sess.call_packed(_read_pipe_of_late_child, gate, seconds)
        deadline = time.monotonic() + 20
        while not os.path.exists(gate + ".awaited"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert sess.interrupt(timeout=10) == []
        assert _sleeping_for(seconds) == []
    finally:
        for pid in _sleeping_for(seconds):
            os.kill(pid, signal.SIGKILL)
        sess.call_packed(_look_as_usual).debug_get_from_all()


# an interrupt may land as CPython begins `__exit__`: the object then waits for the collector
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("work", [_read_pipe, _in_shell, _map_in_processes])
def test_an_interrupt_reaches_programs_and_theirs(sess: Session, work: Any) -> None:
    seconds = f"{99 + random.random():.9f}"  # not what another run of this test waits for
    # a worker has filters of its own; a session that is kept has programs of tests before this one
    sess.call_packed(warnings.simplefilter, "ignore", ResourceWarning)
    for _ in range(3):
        sess.call_packed(work, seconds)
        time.sleep(0.2)
        assert sess.interrupt(timeout=10) == []
    assert sess.call_packed(int, 3).debug_get_from_all() == [3] * sess.num_workers
    until = time.monotonic() + 10
    while _sleeping_for(seconds) and time.monotonic() < until:
        time.sleep(0.05)
    assert _sleeping_for(seconds) == []
    gc.collect()
