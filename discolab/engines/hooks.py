"""What threaded sessions change in the process while one of them lives, and put back after.

- The interpreter's switch interval: 0.5 ms, so that a command does not wait 5 ms for a busy
  Python thread of another worker.
- `threading.Thread.start`: a thread started by a worker's code belongs to that worker.
- `time.sleep`: in a worker it can be interrupted.
- torch's random functions, Python's and numpy's: a worker draws from a state of its own
  (randomness.py, host_randomness.py).
- ``__main__``: for a worker it is its own program (main_module.py).
- torch's number of threads for threads to come, which the workers' own setting changes.
- ``torch.autograd.Function.apply``: safe for leaves that workers share (shared_leaves.py).
- What layers above have added with `extend`.
- A keeper thread that sends the registers nobody holds any more when no command does.

All of it lasts as long as one worker thread lives. `_lock` guards `_threads`, `_rest`,
`_before` (what was there), `_ours` (what we put there) and `_extensions`. Nothing here runs in a
finalizer, so a dropped session is noticed by the keeper.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..runtime.errors import WaitTimeoutError
from ..runtime.session import Session
from ..runtime.waiter import bind_waiter, waiter_here
from ..runtime.worker import Worker, bind_thread, current_worker_or_none
from . import host_randomness, main_module, randomness, shared_leaves

SWITCH_INTERVAL = 0.0005  # seconds; 50 us was erratic, 5 ms (Python's own) slow
_KEEPER_PERIOD = 0.25  # seconds

_lock = threading.RLock()
_rest = threading.Event()  # set: the keeper ends
_threads: list[threading.Thread] = []
_before: dict[str, Any] = {}
_ours: dict[str, Any] = {}
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class Extension(NamedTuple):
    """What a layer above changes in the process while worker threads live.

    Attributes
    ----------
    install, uninstall
        Called before the first worker's first command, and after the last worker has ended; after
        an `install` that raised too, or was not reached.
    leave
        Called on each worker's own thread when it ends.
    """

    install: Callable[[], None]
    uninstall: Callable[[], None]
    leave: Callable[[Worker], None]


_extensions: list[Extension] = []


def extend(extension: Extension) -> None:
    """Add an extension; for as long as the process lives."""
    with _lock:
        if _threads:
            try:
                extension.install()
            except BaseException:
                extension.uninstall()
                raise
        _extensions.append(extension)


def leave(worker: Worker) -> None:
    """On a worker's own thread: it ends."""
    for extension in tuple(_extensions):
        extension.leave(worker)


def hold(session: Session | None, threads: Iterable[threading.Thread]) -> None:
    """Put the hooks in place while any of `threads`, the workers of `session`, lives.

    What goes wrong there ends the session (None: it is in another process), and leaves nothing in
    place.
    """
    with _lock:
        first = not _threads
        _threads.extend(threads)
        if session is not None:
            _sessions.add(session)
        if first:
            try:
                _install()
            except BaseException:
                _threads.clear()
                settle()
                if session is not None:
                    session.shutdown(cancel=True)
                raise


def _install() -> None:
    """Put them in place; under the lock."""
    global _rest
    _before["interval"] = sys.getswitchinterval()
    _before["num_threads"] = torch.get_num_threads()
    _before["start"] = threading.Thread.start
    _before["sleep"] = time.sleep
    sys.setswitchinterval(SWITCH_INTERVAL)
    _rest = threading.Event()
    threading.Thread(target=_keep, args=(_rest,), name="discolab-keeper", daemon=True).start()
    _ours["start"] = _start_over(threading.Thread.start)
    _ours["sleep"] = _sleep_over(time.sleep)
    threading.Thread.start = _ours["start"]  # type: ignore[method-assign]
    time.sleep = _ours["sleep"]
    randomness.install()
    host_randomness.install()
    main_module.install()
    shared_leaves.install()
    for extension in _extensions:
        extension.install()


def settle() -> bool:
    """Take the hooks away if no worker lives; what others changed since is left alone."""
    with _lock:
        _threads[:] = [thread for thread in _threads if thread.is_alive()]
        if _threads:
            return False
        if abs(sys.getswitchinterval() - SWITCH_INTERVAL) < 1e-6:
            sys.setswitchinterval(_before["interval"])
        if threading.Thread.start is _ours.get("start"):
            threading.Thread.start = _before["start"]  # type: ignore[method-assign]
        if time.sleep is _ours.get("sleep"):
            time.sleep = _before["sleep"]
        for extension in reversed(_extensions):
            extension.uninstall()
        randomness.uninstall()
        host_randomness.uninstall()
        main_module.uninstall()
        shared_leaves.uninstall()
        _rest.set()
        return True


def _keep(rest: threading.Event) -> None:
    """Body of the keeper: tidy up a few times a second until no worker lives.

    A session made after that starts a keeper of its own, with an event of its own.
    """
    while not rest.wait(_KEEPER_PERIOD):
        for session in list(_sessions):
            session.forget_dropped()
            del session
        with _lock:
            if not rest.is_set():
                settle()


def _in_child() -> None:
    """A forked child has no worker and no keeper: put all back, so that it can have its own."""
    global _lock, _rest
    _lock = threading.RLock()  # another thread may have held them
    _rest = threading.Event()
    _sessions.clear()
    forked_in = current_worker_or_none()
    if forked_in is not None:
        bind_thread(None)
        bind_waiter(None)
        for worker in forked_in.peers.values():
            worker.ended = True
    if _threads:
        _threads.clear()
        settle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


# New functions each time: who wrapped ours, and left the wrapper there when we went, ends up
# below the next ones and still calls what was there before ours.


def _start_over(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @functools.wraps(start)
    def start_for_worker(self: threading.Thread) -> None:
        worker = current_worker_or_none()
        if worker is not None:
            run = self.run

            def run_for_worker() -> None:
                bind_thread(worker)
                run()

            self.run = run_for_worker  # type: ignore[method-assign]
            with worker.sheltered():
                start(self)
        else:
            start(self)

    return start_for_worker


def _sleep_over(sleep: Callable[[float], None]) -> Callable[[float], None]:
    @functools.wraps(sleep)
    def sleep_or_end(seconds: float, /) -> None:
        waiter = waiter_here()
        if waiter is None or not seconds > 0:
            sleep(seconds)
            return
        until = time.monotonic() + seconds  # the worker's own clock may stand
        try:
            waiter.wait_for(lambda: time.monotonic() >= until, f"time.sleep({seconds:g})", seconds)
        except WaitTimeoutError:
            pass

    return sleep_or_end


def open_sessions() -> list[Session]:
    """The sessions of this process that were not shut down."""
    return [session for session in list(_sessions) if not session.closed]
