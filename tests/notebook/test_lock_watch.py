"""The hint that worker threads wait for Python's lock: for Python loops, not for matmuls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from discolab.notebook import lock_watch
from discolab.notebook.lock_watch import LockWatch, lock_note
from discolab.runtime.interpreter_lock import is_on

from .conftest import Kernel

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/task") or lock_watch._cores() < 2 or not is_on(),
    reason="needs Linux, two cores, and the interpreter lock",
)

LOOP = "import time\nend = time.monotonic() + 1.2\nn = 0\nwhile time.monotonic() < end: n += 1"
SMALL = """
a, end = torch.randn(16, 16), time.monotonic() + 1.2
while time.monotonic() < end: a = torch.relu(a + 1) - 1
"""
LARGE = """
a, end = torch.randn(1200, 1200), time.monotonic() + 1.2
while time.monotonic() < end: a = (a @ a) / 1e3
"""
HINT = "of their time waiting for Python's lock: %disco_session 4 --engine processes"


@pytest.fixture(scope="module")
def nb() -> Iterator[Any]:
    kernel = Kernel()
    kernel.ok("%load_ext discolab\n%disco_session 4 --devices cpu\n%disco import time")
    yield kernel
    kernel.close()


@pytest.mark.alone  # workers that wait for a core do not wait for the lock
@pytest.mark.parametrize("body", [LOOP, SMALL], ids=["loop", "small"])
def test_python_gives_a_hint_after_the_cell(nb: Any, body: str) -> None:
    for _ in range(3):  # on a machine that does much else a window may miss it
        nb.ok(f"%%disco\n{body}")
        text = nb.ok("%disco_status").stdout
        if HINT in text:
            break
    assert "workers spent about " in text
    assert HINT in text


def test_large_operations_give_none(nb: Any) -> None:
    nb.ok(f"%%disco\n{LARGE}")
    assert HINT not in nb.ok("%disco_status").stdout


@pytest.mark.alone
def test_while_a_cell_runs_in_the_background(nb: Any) -> None:
    for body, hinted in ((LOOP, True), (LARGE, False)):
        nb.ok(f"%%disco -a\n{body}")
        result = nb.ok("import time; time.sleep(0.3)\n%disco_status")
        assert (HINT in result.stdout) == hinted
        assert ("workers spend about" in result.stdout) == hinted
        assert result.seconds < 1.2
        nb.ok("sess.sync_all()")


def test_who_starts_another_session_of_threads_is_told_once(nb: Any) -> None:
    words = "workers of the session before spent about "
    again = "%disco_session 4 --devices cpu\n%disco import time"
    for _ in range(3):
        nb.ok(f"%%disco\n{LOOP}")
        if HINT in nb.ok("%disco_status").stdout:
            break
    said = nb.ok(again, watched=True).stdout
    assert words in said
    assert "so would a free-threaded Python" in said
    nb.ok(f"%%disco\n{LOOP}")
    assert words not in nb.ok(again, watched=True).stdout


def test_whether_the_lock_is_on_is_told_where_it_may_be_off(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_watch, "_CAN_DO_WITHOUT", False)
    assert lock_note(pair) == ""
    monkeypatch.setattr(lock_watch, "_CAN_DO_WITHOUT", True)
    threads = len(pair.workers_here()) == 2
    assert ("lock is on" in lock_note(pair)) == threads
    monkeypatch.setattr(lock_watch, "is_on", lambda: False)
    assert ("lock is off" in lock_note(pair)) == threads


@pytest.mark.slow
def test_workers_that_wait_for_each_other_or_sleep_are_no_sign(nb: Any) -> None:
    nb.ok("%%disco\ntime.sleep(0.9 if rank else 0.1)\nccl.barrier()")
    assert HINT not in nb.ok("%disco_status").stdout
    nb.ok("%disco_shutdown")
    nb.ok("%disco_session 2 --devices cpu --engine processes", timeout=100)
    nb.ok(f"%%disco\n{LOOP}")
    assert "lock" not in nb.ok("%disco_status").stdout


def test_idle_workers_and_those_of_other_processes_are_left_alone(pair: Any) -> None:
    watch = LockWatch(pair)
    watch.look()
    watch.measure()
    assert watch.hint() == ""
