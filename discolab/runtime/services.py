"""Services: what passes between a session and its workers besides commands and replies.

A *service* is a layer's part on the controller, one object a session (`SERVICES`). Where workers
are in several processes, what it and a worker say to each other goes over the worker's
`ServiceChannel`; where all share the controller's address space, `Worker.link` is None.

A *probe* looks at a worker from beside it, while it computes, without waiting for its thread. It is
a module-level function of the worker, run by `Session.look`: on the caller's thread for workers of
this process, on the link thread of a worker that has a process of its own. It may read what other
threads may read (see worker.py), must be quick, and changes nothing that the worker's own thread
owns. What it returns must travel: None, bool, int, float, str, bytes, lists, tuples and dicts.

Between processes a probe is called ``module:name``; only functions marked here are found by that.
Its module should be imported with discolab, as an import on the link thread may meet one on the
worker's own. An answer is ``(number of the question, whether it succeeded, value or message)``.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .errors import ArgumentError, DiscoError
from .failures import Failure

F = TypeVar("F", bound=Callable[..., Any])

SERVICE = "probes"
RESTART = "restart"  # what restart.py hears of the workers
_MARK = "disco_probe"
_MOST_KEPT = 64  # questions whose answers are kept


class ServiceChannel(Protocol):
    """The worker's end. `tell` may be called on any thread.

    `host` is the address of this machine at which the session's other workers reach it.
    """

    host: str

    def tell(self, service: str, value: Any) -> None:
        """Send a value to a service of the session, in order with this worker's replies."""

    def call_failed(self, ordinal: int) -> None:
        """Report the worker's state, if the call that has failed has sent anything to a service."""

    def flush_waiting(self) -> None:
        """Send what this worker has printed, before something is sent by another way."""

    def listen(self, service: str, handler: Callable[[Any], None]) -> None:
        """Have `handler` called with what the service sends: on the link's thread, so be quick."""


class Dispatcher:
    """Hands what services say to a worker to its handlers, and keeps what comes before these.

    Any thread may use it; single operations on its dicts need no lock.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Callable[[Any], None]] = {}
        self._early: dict[str, list[Any]] = {}

    def listen(self, service: str, handler: Callable[[Any], None]) -> None:
        """Register a handler; it is given at once what came before."""
        self._hand_over(service, handler)
        self._handlers[service] = handler
        self._hand_over(service, handler)

    def dispatch(self, worker: Any, service: str, value: Any) -> None:
        """Give the worker's handler what a service has sent."""
        handler = self._handlers.get(service)
        if handler is not None:
            handler(value)
            return
        self._early.setdefault(service, []).append(value)
        if service in LISTENERS:
            LISTENERS[service](worker)
        handler = self._handlers.get(service)
        if handler is not None:  # it may have begun to listen before the value was among these
            self._hand_over(service, handler)

    def _hand_over(self, service: str, handler: Callable[[Any], None]) -> None:
        for value in self._early.pop(service, ()):
            handler(value)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What one worker was at one moment; made where it lives.

    Attributes
    ----------
    executed, sat_out, resumed_at, ended, interrupts
        As `Worker` has them.
    received
        How many commands it has received.
    busy
        Whether a call runs.
    state, detail, seconds
        As `Worker.doing` tells them.
    failed_calls
        The last calls that failed, by their ordinal.
    """

    rank: int
    executed: int
    sat_out: int
    resumed_at: int
    ended: bool
    interrupts: int
    received: int
    busy: bool
    state: str
    detail: str
    seconds: float
    failed_calls: tuple[tuple[int, Failure], ...]


class Service:
    """A layer's part on the controller. Nothing here may block or raise; a base that does nothing.

    All but `close` are called on the session's reader thread, or, for worker 0 of it, on that
    worker's own thread.
    """

    def receive(self, rank: int, value: Any) -> None:
        """A worker has sent a value."""

    def state(self, rank: int, state: WorkerState) -> None:
        """The state of a worker has come in, after all that it sent before."""

    def lost(self, rank: int) -> None:
        """A worker has died."""

    def frozen(self, rank: int, why: str) -> None:
        """A worker is shown not to run, so that it answers nothing; "": it has come back."""

    def replaced(self, rank: int, executed: int) -> None:
        """Another worker takes the place of one that was lost, before it says anything.

        `executed` is how many calls all workers were sent before it; it takes part from there on.
        Called under the session's lock.
        """

    def next_look(self) -> float | None:
        """When `look` is to be called, on the clock of `time.monotonic`; None: not."""
        return None

    def look(self) -> None:
        """Do what is due."""

    def close(self) -> None:
        """The session ends."""


SERVICES: dict[str, Callable[[Any], Service]] = {}
"""By name: makes the part of a layer for a `Session`."""

LISTENERS: dict[str, Callable[[Any], None]] = {}
"""By service: has a `Worker` listen to it. Called when the first value comes for a worker
that does not listen yet, on the link's thread, so be quick."""


PRELOAD: list[str] = []
"""Modules that workers will want, by name; a worker process has imported them when it starts."""


# -- probes --------------------------------------------------------------------------------------


def probe(func: F) -> F:
    """Mark a function ``(worker, *args)`` as one that `look` may run beside a worker."""
    func.disco_probe = f"{func.__module__}:{func.__qualname__}"  # type: ignore[attr-defined]
    return func


def name_of(func: Callable[..., Any]) -> str:
    """What a probe is called on a line.

    Raises
    ------
    ArgumentError
        If it is not marked.
    """
    name = getattr(func, _MARK, None)
    if not isinstance(name, str):
        raise ArgumentError(f"look: {func!r} is no probe: mark it with discolab.runtime.probe")
    return name


def look_here(
    func: Callable[..., Any], args: Sequence[Any], workers: Mapping[int, Any]
) -> dict[int, Any]:
    """Run a probe on workers of this process."""
    return {rank: func(worker, *args) for rank, worker in workers.items()}


def answer(worker: Any, question: tuple[int, str, tuple[Any, ...]]) -> tuple[int, bool, Any]:
    """Run the probe that is asked for; on a link thread, so it never raises."""
    number, name, args = question
    try:
        module, _, attribute = name.partition(":")
        func = getattr(importlib.import_module(module), attribute)
        if getattr(func, _MARK, None) != name:
            raise DiscoError(f"{name} is no probe")
        return number, True, func(worker, *args)
    except Exception as exc:
        return number, False, f"{type(exc).__name__}: {exc}"


class Probes(Service):
    """Collects answers of one session's workers; the reader thread alone writes `_answers`."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[int, tuple[bool, Any]]] = {}

    def open(self) -> int:
        """The number of a new question."""
        number = next(self._numbers)
        self._answers[number] = {}
        for old in [n for n in list(self._answers) if n <= number - _MOST_KEPT]:
            self._answers.pop(old, None)  # no caller waits so long
        return number

    def receive(self, rank: int, value: Any) -> None:
        """Enter an answer."""
        number, succeeded, result = value
        answers = self._answers.get(number)
        if answers is not None:
            answers[rank] = succeeded, result

    def has(self, number: int, rank: int) -> bool:
        """Whether a worker has answered."""
        return rank in self._answers.get(number, ())

    def take(self, number: int) -> dict[int, Any]:
        """The answers so far; the question is over.

        Raises
        ------
        DiscoError
            If the probe failed on a worker.
        """
        answers = self._answers.pop(number, {})
        for rank, (succeeded, value) in answers.items():
            if not succeeded:
                raise DiscoError(f"a look at worker {rank} failed: {value}")
        return {rank: value for rank, (_, value) in answers.items()}


SERVICES[SERVICE] = lambda _session: Probes()
