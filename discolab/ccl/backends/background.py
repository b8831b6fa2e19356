"""Threads in which collectives go on while workers wait; they belong to no worker.

When the interpreter ends they are given a moment: one that frees tensors while it goes would abort
the process. `_running` is changed by the threads themselves.
"""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...runtime.errors import SessionError
from ...runtime.worker import bind_thread

END_SECONDS = 5.0

_running: set[int] = set()  # by their identifiers
_ended = False


def begin(target: Callable[..., None], *arguments: Any) -> None:
    """Run it on a thread of its own. A worker that calls this must be `sheltered`.

    Raises
    ------
    SessionError
        While the interpreter ends.
    """
    if _ended:
        raise SessionError("no collective can begin any more: the process ends")
    start(_run, [target, *arguments])


def start(target: Callable[..., None], *arguments: Any) -> None:
    """Start a thread, and wait until it calls its first argument; the others are `arguments`.

    A worker that calls this must be `sheltered`. Unlike `Thread.start` this has or has not
    happened, wherever an interrupt lands. Until it runs a thread bears the identifier of its
    maker, and would get what an interrupt sends to that.
    """
    begun = threading.Lock()
    begun.acquire()
    _thread.start_new_thread(target, (begun.release, *arguments))
    begun.acquire()


@contextmanager
def busy() -> Iterator[None]:
    """Within it the thread of the caller, which may live as long as the process, is one of them."""
    me = threading.get_ident()
    _running.add(me)
    try:
        yield
    finally:
        _running.discard(me)


def idle() -> bool:
    """Whether none runs."""
    return not _running


def _run(begun: Callable[[], None], todo: list[Any]) -> None:
    me = threading.get_ident()
    _running.add(me)
    begun()
    bind_thread(None)
    try:
        todo[0](*todo[1:])
    finally:
        todo.clear()  # the list itself outlives us, and its tensors must not
        _running.discard(me)


if hasattr(os, "register_at_fork"):  # a child process has none of them
    os.register_at_fork(after_in_child=_running.clear)


@atexit.register
def _end_all() -> None:
    global _ended
    _ended = True
    deadline = time.monotonic() + END_SECONDS
    while not idle() and time.monotonic() < deadline:
        time.sleep(0.01)
