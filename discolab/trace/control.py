"""Switching recording on and off, and collecting what was recorded: the controller's side.

Recording begins and ends with a command like any other, so it never waits, and what was called
before is not recorded. Which sessions were asked to record is in `_wanted`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns as clock

from ..runtime.errors import ArgumentError, DiscoError
from ..runtime.functions import worker_function
from ..runtime.services import probe
from ..runtime.session import Session
from ..runtime.worker import Worker
from .follower import Follower
from .recorder import CAPACITY, OWN_WORDS, begin_recording, end_recording, forget, recorder_of
from .result import Trace

_ANSWER = 0.5  # seconds that workers are given for an answer, as they may hang
_PATIENCE = 5.0  # the same, when they are known to be idle
_ALL = sys.maxsize // 4  # events to hold
_wanted: weakref.WeakSet[Session] = weakref.WeakSet()


def start(session: Session, capacity: int = CAPACITY) -> None:
    """Have the workers record what they do from the next call on; does not wait for them.

    It is a call like any other: an interrupt that comes before they have got to it drops it.

    Parameters
    ----------
    capacity
        Events that each worker keeps, 1 or more; then the oldest are dropped.

    Raises
    ------
    ArgumentError, SessionClosedError
    """
    _check(session)
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise ArgumentError(f"capacity is how many events to keep, 1 or more; got {capacity!r}")
    session.call_without_result(begin_recording, min(capacity, sys.maxsize))
    _wanted.add(session)


def stop(session: Session) -> None:
    """Record no more after the calls that are queued; what was recorded can be collected."""
    _check(session)
    _wanted.discard(session)
    if not session.closed:
        session.call_without_result(end_recording)


def clear(session: Session) -> None:
    """Forget what was recorded up to now."""
    _check(session)
    session.call_without_result(forget)


@probe
def records(worker: Worker) -> bool:
    """Whether a worker records."""
    recorder = recorder_of(worker)
    return recorder is not None and recorder.on


def is_on(session: Session, timeout: float = 0.3) -> dict[int, bool]:
    """Whether each worker records at this moment; one that does not answer is not in it."""
    _check(session)
    recording: dict[int, bool] = session.look(records, timeout=timeout)
    return recording


def collect(session: Session, since: Trace | None = None, timeout: float = _ANSWER) -> Trace:
    """What the workers have recorded, also while they compute or hang.

    Parameters
    ----------
    since
        An earlier trace of this session: only what came after it is asked for. The result has both.
    timeout
        Seconds that workers in other processes are given for each answer.

    Raises
    ------
    ArgumentError
        If `since` is no trace, or one of another session.
    """
    _check(session)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise ArgumentError(f"timeout is a number of seconds, as 0.5; got {timeout!r:.60}")
    if since is not None:
        _check_since(session, since)
    follower = Follower(session, most=_ALL)
    if since is not None:
        follower.load(since)
    follower.catch_up(timeout)
    return follower.trace()


@contextmanager
def tracing(
    session: Session,
    capacity: int = CAPACITY,
    timeout: float | None = None,
    finish: Callable[[Session, float | None], None] | None = None,
) -> Iterator[Trace]:
    """Record what is called in the ``with`` block; its trace is there when the block ends.

    It begins when the workers have got to it, and ends when they have done what was called in it;
    both within `timeout` seconds (None: the session's). If the block raises it ends at once, with
    what was recorded by then. `finish` is called with session and timeout when all is done, before
    the trace is collected.

    Examples
    --------
    >>> with discolab.trace.tracing(sess) as trace:  # doctest: +SKIP
    ...     train(sess)
    >>> trace.to_chrome("train.json")  # doctest: +SKIP
    """
    _check(session)
    already = session in _wanted
    trace = Trace(f"{session.num_workers} workers, engine {session.engine}")
    start(session, capacity)
    begun, patience = clock(), _ANSWER
    follower = Follower(session, most=_ALL)
    try:
        session.peek(session.call_packed(_done), timeout=timeout)
        begun = clock()
        follower.skip(_PATIENCE)
        yield trace
        if not session.closed:
            session.peek(session.call_packed(_done), timeout=timeout)
            if finish is not None:
                finish(session, timeout)
            patience = _PATIENCE
    finally:
        try:
            follower.catch_up(patience)
            recorded = follower.trace()
            error = max(recorded.clock_error.values(), default=0)
            trace.fill(recorded.between(begun - error, clock() + error))
        finally:
            if not already:
                _stop_quietly(session)


@worker_function(OWN_WORDS)
def _done() -> None:
    """Nothing (a worker function): whoever waits for it has waited for all before it."""


def _stop_quietly(session: Session) -> None:
    try:
        stop(session)
    except DiscoError:
        pass  # it was closed, or has died: then it records no more anyway


def _check(session: Session) -> None:
    if not isinstance(session, Session):
        raise ArgumentError(f"a session is traced, got {session!r:.60}")


def _check_since(session: Session, since: Trace) -> None:
    if not isinstance(since, Trace):
        raise ArgumentError(f"since is an earlier trace of this session, got {since!r:.60}")
    if not since.events.keys() <= set(range(session.num_workers)):
        raise ArgumentError(
            f"since is a trace of another session, {since.title}; this one has "
            f"{session.num_workers} workers"
        )
