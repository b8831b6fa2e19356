"""What threaded sessions change in the process while one of them lives, and put back after.

- The interpreter's switch interval: 0.5 ms, so that a command does not wait 5 ms for a busy
  Python thread of another worker.
- torch's number of threads for threads to come, which the workers' own setting changes.
- All that the table of `isolation` lists.
- A housekeeper thread that sends the registers nobody holds any more when no command does.

All of it lasts as long as one worker thread lives. `_lock` guards `_threads`, `_ending`, `_before`
(what was there) and what of the table is installed. Nothing here runs in a finalizer, so a
dropped session is noticed by the housekeeper.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch

from ..isolation import table
from ..runtime.interrupts import bind_waiter
from ..runtime.session import Session, started_sessions
from ..runtime.worker import (
    Worker,
    at_leave,
    bind_thread,
    current_worker_or_none,
    own_process,
)

SWITCH_INTERVAL = 0.0005  # seconds; 50 us was erratic, 5 ms (Python's own) slow
_PERIOD = 0.25  # seconds

_lock = threading.RLock()
_ending = threading.Event()  # set: the housekeeper ends
_threads: list[threading.Thread] = []
_before: dict[str, Any] = {}


def enter(worker: Worker) -> None:
    """Prepare a worker's own thread, on it, before its first command."""
    table.enter(worker)


def leave(worker: Worker) -> None:
    """Clean up a worker's own thread, on it, as it ends."""
    for function in tuple(at_leave):
        function(worker)
    table.leave(worker)


def hold(session: Session | None, threads: Iterable[threading.Thread]) -> None:
    """Put the hooks in place while any of `threads`, the workers of `session`, lives; start those.

    What goes wrong there ends the session (None: it is in another process, and its worker has this
    one for itself), and leaves nothing in place.
    """
    with _lock:
        first = not _threads
        if session is not None:
            started_sessions.add(session)
        try:
            if first:
                _begin()
            table.install(own_process=session is None, loaded=sys.modules)
            for thread in threads:
                if thread.ident is None:
                    thread.start()
                _threads.append(thread)
        except BaseException:
            settle()
            if session is not None:
                session.shutdown(cancel=True)
            raise


def _begin() -> None:
    """Prepare the process for its first worker; under the lock."""
    global _ending
    _before["interval"] = sys.getswitchinterval()
    _before["num_threads"] = torch.get_num_threads()
    sys.setswitchinterval(SWITCH_INTERVAL)
    _ending = threading.Event()
    threading.Thread(
        target=_keep_house, args=(_ending,), name="discolab-housekeeper", daemon=True
    ).start()


def settle() -> bool:
    """Take the hooks away if no worker lives; what others changed since is left alone."""
    with _lock:
        _threads[:] = [thread for thread in _threads if thread.is_alive()]
        if _threads:
            return False
        if abs(sys.getswitchinterval() - SWITCH_INTERVAL) < 1e-6:
            sys.setswitchinterval(_before["interval"])
        table.uninstall()
        _ending.set()
        return True


def _keep_house(rest: threading.Event) -> None:
    """Body of the housekeeper: tidy up a few times a second until no worker lives.

    A session made after that starts a housekeeper of its own, with an event of its own.
    """
    bind_thread(None)
    while not rest.wait(_PERIOD):
        for session in list(started_sessions):
            session.forget_dropped()
            del session
        with _lock:
            if not rest.is_set():
                settle()


def _in_child() -> None:
    """Put all back in a forked child: it has no worker and no housekeeper, but may get its own."""
    global _lock, _ending
    _lock = threading.RLock()  # another thread may have held them
    _ending = threading.Event()
    started_sessions.clear()
    forked_in = current_worker_or_none()
    installed = table.installed()
    own_process(None)
    if forked_in is not None:
        bind_thread(None)
        bind_waiter(None)
        for worker in forked_in.peers.values():
            worker.ended = True
    if _threads:
        _threads.clear()
        settle()
    if forked_in is not None:
        table.inherit(forked_in, installed)
    for function in table.at_child:
        function()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
