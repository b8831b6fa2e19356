"""What is replaced in a process that a worker has for itself: what the session needs there."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest

from discolab import Session, current_worker
from discolab.runtime.worker import current_worker_or_none

NEEDED = {
    # Stop comes from another thread: it ends a sleep, and must not cut an import or hit a thread
    # that is just being started
    "importlib._bootstrap._find_and_load",
    "importlib._bootstrap._lock_unlock_module",
    "threading.Thread.start",
    "time.sleep",
    "os.fork",
    "os.forkpty",
    # and other waits of Python, which it ends too
    "selectors.EpollSelector.select",
    "selectors._PollLikeSelector.select",
    "selectors.SelectSelector.select",
    "subprocess.Popen.__exit__",
    "subprocess.Popen.__init__",
    "subprocess.Popen.communicate",
    "subprocess.Popen.kill",
    "subprocess.Popen.wait",
    "threading.Condition.wait",
    "threading.Thread.join",
    # functions of a script are called at its end, before that of the process
    "atexit.register",
    "atexit.unregister",
    # the rank and its like, which the session says later
    "os.environ",
    "os.environb",
    "os.posix_spawn",
    "os.posix_spawnp",
    "os.system",
    "subprocess._fork_exec",
    # `torch.distributed` works through the session: see ccl/distributed
    "concurrent.futures.ThreadPoolExecutor.submit",
}

LOOK = """
import atexit, builtins, concurrent.futures, importlib, logging, multiprocessing.context, os, random
import selectors, signal, subprocess, sys, threading, time, types, warnings
import numpy.random
import torch

def look():
    owners = [atexit, builtins, importlib._bootstrap, logging, logging.Logger, os, random, signal,
              selectors.EpollSelector, selectors._PollLikeSelector, selectors.SelectSelector,
              subprocess, subprocess.Popen, sys, threading, threading.Condition, threading.Thread,
              time, warnings, numpy.random,
              torch, torch.Tensor, torch._VF, torch.nn.functional, torch.autograd, torch.random,
              concurrent.futures.ThreadPoolExecutor, multiprocessing.context.DefaultContext]
    found = set()
    for owner in owners:
        where = getattr(owner, "__name__", str(owner))
        if isinstance(owner, type):
            where = f"{owner.__module__}.{owner.__qualname__}"
        where = where.replace("concurrent.futures.thread.", "concurrent.futures.")
        where = where.replace("_frozen_importlib", "importlib._bootstrap")
        if type(owner).__module__.startswith("discolab"):
            found.add(where)
        for name, value in list(vars(owner).items()):
            code = value.__code__ if type(value) is types.FunctionType else None
            homes = [code.co_filename if code else "", str(type(value).__module__)]
            if any("discolab" in home for home in homes):
                found.add(f"{where}.{name}")
    return found
"""


def replaced() -> set[str]:
    """On a worker: the names of Python and torch that are discolab's."""
    names: dict[str, Any] = {}
    exec(LOOK, names)
    found: set[str] = names["look"]()
    return found


@pytest.fixture
def looks(sess: Session) -> list[set[str]]:
    """What is replaced on each worker."""
    if sess.engine == "threads":
        pytest.skip("no worker has a process for itself")
    return sess.call_packed(replaced).debug_get_from_all()


def test_a_worker_process_is_as_python_has_made_it(looks: list[set[str]]) -> None:
    for found in looks[1:]:  # worker 0 is a thread of the notebook's process
        assert {n for n in found if n not in {"sys.stdout", "sys.stderr"}} == NEEDED


def test_a_plain_interpreter_has_nothing_replaced() -> None:
    command = [sys.executable, "-c", f"{LOOK}\nprint(look())"]
    assert subprocess.check_output(command, text=True).strip() == "set()"


class Mine:
    """For a program's own class."""


def main_module() -> list[Any]:
    """What ``__main__`` is on a worker, and whose a thread that it starts."""
    module = sys.modules["__main__"]
    exec("class Own:\n    pass", current_worker().namespace)
    own = current_worker().namespace["Own"]
    own.__module__ = "__main__"
    module.added = 1  # type: ignore[attr-defined]
    whose: list[Any] = []
    thread = threading.Thread(target=lambda: whose.append(current_worker_or_none()))
    thread.start()
    thread.join()
    return [
        module.__dict__ is current_worker().namespace,
        type(pickle.loads(pickle.dumps(own()))) is own,
        current_worker().namespace["added"],
        whose == [current_worker()],
        type(module).__name__,
    ]


def test_main_is_the_program_of_a_worker(sess: Session) -> None:
    seen = sess.call_packed(main_module).debug_get_from_all()
    assert [found[:4] for found in seen] == [[True, True, 1, True]] * 4
    if sess.engine != "threads":
        assert [found[4] for found in seen[1:]] == ["module"] * 3


def test_sessions_in_a_worker_process_have_all(sess: Session) -> None:
    if sess.engine != "processes":
        pytest.skip("processes are enough")

    def nested() -> set[str] | None:
        if current_worker().rank != 1:
            return None
        from discolab import ThreadedSession

        with ThreadedSession(2, devices="cpu", timeout=20) as inner:
            found: set[str] = inner.call_packed(replaced).debug_get_from_remote(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", BytesWarning)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BytesWarning)
        return found

    found = sess.call_packed(nested).debug_get_from_remote(1)
    assert {"sys", "warnings", "os.chdir", "logging.Logger.level"} <= found
