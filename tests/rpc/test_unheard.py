"""Failures that nobody asks for are logged; those that somebody is told of are not."""

import gc
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import Session, WorkerError
from tests.rpc import functions
from tests.rpc.functions import eventually


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What was logged here so far."""
    with caplog.at_level(logging.WARNING, "discolab.rpc"):
        yield lambda: [r.getMessage() for r in caplog.records if r.name == "discolab.rpc"]


def test_a_future_that_is_dropped(sess: Session, warnings_of: Any) -> None:
    sess.rpc.rpc_async(2, functions.fail, ("value",))
    eventually(lambda: gc.collect() >= 0 and warnings_of())
    assert len(warnings_of()) == 1
    text = warnings_of()[0]
    assert "worker 2 failed in rpc of 'fail' (called at " in text
    assert "ValueError: ('it is bad', 7)" in text
    assert "functions.py" in text, "its stack is shown"


def test_what_follows_a_future_that_is_dropped(sess: Session, warnings_of: Any) -> None:
    sess.rpc.rpc_async(2, functions.fail, ("value",)).then(lambda done: done.value())
    sess.rpc.rpc_async(2, functions.add, (1,)).then(lambda done: done.value() / 0)
    eventually(lambda: len(warnings_of()) == 2)
    assert sorted("division by zero" in text for text in warnings_of()) == [False, True]


def test_a_reference_that_is_never_read(sess: Session, warnings_of: Any) -> None:
    """Its owner says it."""
    sess.rpc.remote(-1, functions.fail, ("value",))
    eventually(lambda: len(warnings_of()) == 1)
    kept = [sess.rpc.remote(-1, functions.fail, ("key",))]
    eventually(lambda: "KeyError" in repr(kept[0]))
    assert len(warnings_of()) == 1
    kept.clear()
    eventually(lambda: len(warnings_of()) == 2)


def test_what_was_asked_for(sess: Session, warnings_of: Any) -> None:
    rpc = sess.rpc
    for ask in (
        lambda: rpc.rpc_sync(2, functions.fail, ("value",)),
        lambda: rpc.rpc_async(2, functions.fail, ("value",)).wait(),
        lambda: rpc.remote(2, functions.fail, ("value",)).to_here(),
        lambda: rpc.remote(-1, functions.fail, ("value",)).to_here(),
        lambda: rpc.remote(-1, functions.fail, ("value",)).rpc_sync().upper(),
        lambda: rpc.wait_all([rpc.rpc_async(n, functions.fail, ("value",)) for n in range(4)]),
        lambda: torch.futures.wait_all([rpc.rpc_async(2, functions.fail, ("value",))] * 2),
        lambda: list(rpc.stream(2, functions.fail, ("value",))),
    ):
        with pytest.raises((WorkerError, ValueError)):
            ask()
    told: list[Any] = []
    future = rpc.rpc_async(2, functions.fail, ("value",))
    future.add_done_callback(told.append)
    eventually(lambda: told)
    cancelled = rpc.rpc_async(2, functions.sleep, (1000,))
    cancelled.cancel()
    del future, cancelled
    told.clear()
    rpc.rpc_async(2, functions.fail, ("key",))
    eventually(lambda: any("KeyError" in text for text in warnings_of()))
    assert len(warnings_of()) == 1


def test_what_is_held_until_the_end(fresh: Any, warnings_of: Any) -> None:
    sess = fresh(2)
    future = sess.rpc.rpc_async(1, functions.fail, ("value",))
    ref = sess.rpc.remote(-1, functions.fail, ("key",))
    waiting = sess.rpc.rpc_async(1, functions.sleep, (1000,))
    eventually(lambda: future.done() and "KeyError" in repr(ref))
    assert warnings_of() == []
    sess.shutdown(cancel=True)
    assert sorted("ValueError" in text for text in warnings_of()) == [False, True]
    del waiting


PROGRAM = """
import threading
from discolab import make_session

def never(began):
    began.set() if began else None
    lock = threading.Lock()
    with lock:
        lock.acquire()

def fail():
    raise ValueError("it is bad")

if __name__ == "__main__":
    sess = make_session(2, {engine!r}, devices="cpu")
    kept = sess.rpc.remote(1, fail), sess.rpc.rpc_async(1, never, (None,), timeout=0)
    sess.rpc.remote(1, never, (None,))
    try:
        sess.rpc.wait_all([sess.rpc.rpc_async(1, never, (None,)), sess.rpc.rpc_async(1, fail)])
    except ValueError:
        print("told")
    if {shutdown}:
        sess.shutdown()
"""


@pytest.mark.parametrize("shutdown", [True, False])
@pytest.mark.parametrize("name", ["threads", "processes"])
def test_a_callee_that_never_returns_holds_nobody(
    name: str, *, shutdown: bool, tmp_path: Path
) -> None:
    """Neither the end of the session nor that of the interpreter; and what failed is said."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(engine=name, shutdown=shutdown))
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "told" in done.stdout
    if shutdown:
        assert "nobody has asked for this failure: worker 1 failed" in done.stderr + done.stdout
