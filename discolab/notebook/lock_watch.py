"""Do workers that are threads of one process wait for Python's lock? Measured, not guessed.

A thread that runs Python and has not the interpreter's lock (the GIL) sleeps, and wakes hundreds of
times a second to ask for it; a thread in a large operation of torch computes and hardly sleeps. So
of workers that run the same call all the time a window is looked at: the processor time of each,
how often it has gone to sleep by itself, and the share of looks that find it in a wait of
discolab's own (a collective, say). Time without processor and without such a wait is waiting for
the lock, if they wake that often and are not all idle.

`look` runs on the thread that waits for the workers, or that asks for their status; workers do
nothing for it. Linux only: elsewhere nothing is measured, nor where the lock is off.
"""

from __future__ import annotations

import os
import sysconfig
import threading
import time
from typing import NamedTuple

from ..runtime.interpreter_lock import is_on
from ..runtime.session import Session
from ..runtime.worker import Worker

_WINDOW = 0.5  # seconds, of a window that closes by itself
_SHORTEST = 0.1  # seconds, of one that is closed because somebody asks
_STEP = 0.01  # seconds between two looks then
_WAKES = 60.0  # times a second that a thread wakes, at least, when it asks for the lock
_BUSY = 0.25  # cores that workers use together, at least: one has the lock, and computes
_LEAST = 0.3  # share of the time below which it is not worth a word


_CAN_DO_WITHOUT = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
_FREE = "this Python with PYTHON_GIL=0" if _CAN_DO_WITHOUT else "a free-threaded Python"


def lock_note(session: Session) -> str:
    """Whether the lock is on, of a session whose workers are threads; "" where it always is."""
    if not _CAN_DO_WITHOUT or len(session.workers_here()) < 2:
        return ""
    if is_on():
        return "Python's lock is on: a module in C has turned it on, or PYTHON_GIL=1"
    return "Python's lock is off: workers run Python side by side"


class _Mark(NamedTuple):
    """What a worker's thread had used at one moment."""

    executed: int
    seconds: float
    switches: int


class LockWatch:
    """Watches the workers of one session.

    Attributes
    ----------
    share
        What part of their time workers waited for the lock, 0 to 1, in the last window in which two
        or more of them ran one call all the time; None before there was one.
    """

    def __init__(self, session: Session) -> None:
        here = session.workers_here()
        self._workers = list(here.values()) if len(here) == session.num_workers > 1 else []
        self._threads: dict[int, int] = {}
        self._began = 0.0
        self._marks: dict[int, _Mark] = {}
        self._looks = 0
        self._in_waits: dict[int, int] = {}
        self.share: float | None = None

    def look(self) -> None:
        """Take note of what workers do; closes a window that is long enough."""
        if not self._workers or not is_on():
            return
        now = time.monotonic()
        if self._marks and now - self._began >= _WINDOW:
            self._close(now)
        if not self._marks:
            self._open(now)
        self._looks += 1
        for worker in self._workers:
            if worker.waiting_for is not None:
                self._in_waits[worker.worker_id] = self._in_waits.get(worker.worker_id, 0) + 1

    def rest(self) -> None:
        """Nobody looks for a while: what was begun is dropped."""
        self._marks = {}

    def measure(self) -> None:
        """Look for a tenth of a second, if two workers or more run."""
        if not is_on() or sum(worker.current is not None for worker in self._workers) < 2:
            return
        self.rest()
        end = time.monotonic() + _SHORTEST
        while time.monotonic() < end:
            self.look()
            time.sleep(_STEP)
        self._close(time.monotonic())

    def hint(self) -> str:
        """A word for people, if there is something to say."""
        if not self.waits():
            return ""
        busy = any(worker.current is not None for worker in self._workers)
        verb, runs = ("spend", "runs") if busy else ("spent", "would have run")
        return (
            f"workers {verb} about {self._share} of their time waiting for Python's lock: "
            f"%disco_session {len(self._workers)} --engine processes {runs} them side by side, and "
            f"so {'does' if busy else 'would have'} {_FREE}"
        )

    def parting_words(self) -> str:
        """What to say of it, if anything, to who starts another session of threads."""
        if not self.waits():
            return ""
        return (
            f"workers of the session before spent about {self._share} of their time waiting for "
            f"Python's lock: --engine processes would run them side by side, and so would {_FREE}"
        )

    def waits(self) -> bool:
        """Whether workers waited for the lock so much that it is worth a word."""
        return self.share is not None and self.share >= _LEAST and _cores() > 1

    @property
    def _share(self) -> str:
        return f"{round(self.share or 0.0, 1):.0%}"

    def _open(self, now: float) -> None:
        self._began, self._looks, self._in_waits = now, 0, {}
        marks = {worker.worker_id: self._mark(worker) for worker in self._workers}
        self._marks = {rank: mark for rank, mark in marks.items() if mark is not None}

    def _close(self, now: float) -> None:
        seconds, before, self._marks = now - self._began, self._marks, {}
        used, waited, wakes = 0.0, [], []
        for worker in self._workers:
            mark, was = self._mark(worker), before.get(worker.worker_id)
            if mark is None or was is None or mark.executed != was.executed:
                continue
            core = (mark.seconds - was.seconds) / seconds
            elsewhere = self._in_waits.get(worker.worker_id, 0) / max(1, self._looks)
            used += core
            waited.append(max(0.0, 1 - core - elsewhere))
            wakes.append((mark.switches - was.switches) / seconds)
        if len(waited) < 2:
            return
        asks = sum(wakes) / len(wakes) >= _WAKES
        self.share = sum(waited) / len(waited) if asks and used >= _BUSY else 0.0

    def _mark(self, worker: Worker) -> _Mark | None:
        """The mark of a worker that runs a call; None if it does not, or nothing can be read."""
        executed = worker.executed
        if worker.current is None:
            return None
        if worker.thread_id not in self._threads:
            self._threads = {t.ident: t.native_id for t in threading.enumerate()}  # type: ignore[misc]
        thread = self._threads.get(worker.thread_id)
        try:
            used = int(_read(thread, "schedstat").split()[0])
            words = _read(thread, "status").partition("\nvoluntary_ctxt_switches:")[2].split()
            return _Mark(executed, used / 1e9, int(words[0]))
        except (OSError, ValueError, IndexError):
            return None


def _read(thread: int | None, name: str) -> str:
    with open(f"/proc/self/task/{thread}/{name}", encoding="ascii", errors="replace") as file:
        return file.read()


def _cores() -> int:
    """How many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1
