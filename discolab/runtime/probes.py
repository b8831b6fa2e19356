"""Probes: looks at a worker from beside it, while it computes, without waiting for its thread.

A probe is a module-level function of the worker, run by `Controller.look`: on the caller's thread
for workers of this process, on the link thread of a worker that has a process of its own. It may
read what other threads may read (see worker.py), must be quick, and changes nothing that the
worker's own thread owns. What it returns must travel: None, bool, int, float, str, bytes, lists,
tuples and dicts.

On a line a probe is ``module:name``; only functions marked here are found by it. Its module should
be imported with discolab, as an import on the link thread may meet one on the worker's own. An
answer is ``(number of the question, whether it went well, value or words)``.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import ArgumentError, DiscoError
from .link import SERVICES, Service

if TYPE_CHECKING:
    from .worker import Worker

SERVICE = "probes"
_MARK = "disco_probe"
_MOST_KEPT = 64  # questions whose answers are kept for who asked
F = TypeVar("F", bound=Callable[..., Any])


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
    func: Callable[..., Any], args: Sequence[Any], workers: Mapping[int, Worker]
) -> dict[int, Any]:
    """Run a probe on workers of this process."""
    return {rank: func(worker, *args) for rank, worker in workers.items()}


def answer(worker: Worker, question: tuple[int, str, tuple[Any, ...]]) -> tuple[int, bool, Any]:
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
        for old in [n for n in tuple(self._answers) if n <= number - _MOST_KEPT]:
            self._answers.pop(old, None)  # nobody waits so long
        return number

    def receive(self, rank: int, value: Any) -> None:
        """See `Service`."""
        number, well, found = value
        answers = self._answers.get(number)
        if answers is not None:
            answers[rank] = well, found

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
        found = self._answers.pop(number, {})
        for rank, (well, value) in found.items():
            if not well:
                raise DiscoError(f"a look at worker {rank} failed: {value}")
        return {rank: value for rank, (_, value) in found.items()}


SERVICES[SERVICE] = lambda _session: Probes()
