"""Every error that discolab raises on purpose, in one tree.

DiscoError
├── SessionError            the session can't do this now (also a RuntimeError)
│   ├── SessionClosedError  it was shut down
│   └── ForeignDRefError    a DRef of another session was given
├── ArgumentError           a value that a command can't carry, or a wrong shape, dtype, rank …
├── UnknownFunctionError    no function of that name on the workers
├── WaitTimeoutError        a wait reached its deadline (also a TimeoutError, a RuntimeError)
├── WorkerError             a command failed on one or more workers
├── CollectiveError         a collective can't complete: members disagree, or one can't come
└── DiscoAssertionError     a `disco_assert` does not hold (also an AssertionError)

KeyboardInterrupt
└── WorkerInterrupted       raised *inside* a worker to end what it runs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from .failures import Failure, explain, summarize


class DiscoError(Exception):
    """Base of all errors of discolab: catch this one to catch them all."""


class SessionError(DiscoError, RuntimeError):
    """The session can't do what was asked in its present state.

    It is a `RuntimeError` too, as torch raises it for what is not initialized or over.
    """


class SessionClosedError(SessionError):
    """The session was shut down; make a new one."""


def session_closed() -> SessionClosedError:
    """The error for a use of a session after its end."""
    return SessionClosedError(
        "this session was shut down: make a new one "
        "(in a notebook: %disco_session or %disco_restart)"
    )


class ForeignDRefError(SessionError):
    """A DRef was used with a session that did not make it."""


class ArgumentError(DiscoError, TypeError, ValueError):
    """A value has a type, shape, dtype or range that the call can't take.

    It is a `TypeError` and a `ValueError` too, so that code written for plain Python catches it.
    """


class UnknownFunctionError(DiscoError, LookupError):
    """No function of that name is registered; the message lists the names nearest to it."""


class WaitTimeoutError(DiscoError, TimeoutError, RuntimeError):
    """A wait reached its deadline. The work goes on; the message says what each worker does.

    It is a `RuntimeError` too, which is what torch raises then.
    `partial` holds, by rank, the answers that had come by then.
    """

    def __init__(self, message: str, partial: Mapping[int, Any] | None = None) -> None:
        super().__init__(message)
        self.partial = dict(partial or {})


class CollectiveError(DiscoError):
    """A collective can't complete. `victim` is true where another worker is the cause."""

    victim = False


class CollectiveAborted(CollectiveError):
    """A collective ended because another member failed or never came; look at that one first."""

    victim = True


class DiscoAssertionError(DiscoError, AssertionError):
    """What a `disco_assert` says does not hold; raised on all members of its group.

    The message says which workers hold what. It comes after the debugger, if one is attached, has
    stopped there.
    """


class WorkerInterrupted(KeyboardInterrupt):
    """Raised inside a worker to end the running command (Ctrl-C, stop button, `interrupt()`)."""


class WorkerError(DiscoError):
    """A command failed on one or more workers. The session goes on.

    Its text says whose command and why; the workers' own tracebacks are its notes, so that
    Python prints them below. `failures` has one `Failure` a worker, the likely cause first;
    workers that failed only because of another one come last. `__cause__` is the first
    failure's exception where it is at hand. `whole` has all frames of the tracebacks, those of
    libraries too, which else are folded. `renderer` is a notebook's: the lines that it shows.
    """

    renderer: ClassVar[Callable[[WorkerError], list[str]] | None] = None

    def __init__(self, failures: Iterable[Failure]) -> None:
        self.failures = sorted(failures, key=lambda f: (f.victim, f.interrupted, f.rank))
        assert self.failures, "a WorkerError needs a failure"
        # not `super`: of a class that is another exception too, that one's would be next
        Exception.__init__(self, summarize(self.failures))
        self.__cause__ = self.failures[0].exception
        self.__suppress_context__ = True
        self.add_note("\n".join(explain(self.failures, hint="the error's .whole has all")))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.failures,)

    @property
    def ranks(self) -> list[int]:
        """The workers that failed, in rank order."""
        return sorted(f.rank for f in self.failures)

    @property
    def whole(self) -> str:
        """The workers' tracebacks with all their frames."""
        return "\n".join(explain(self.failures, whole=True))

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the workers' side, none of our frames."""
        if WorkerError.renderer is not None:
            return WorkerError.renderer(self)
        return [*explain(self.failures), "", f"{type(self).__name__}: {self.short}"]

    @property
    def short(self) -> str:
        """Whose command failed, without the error's own words: those stand above it."""
        return summarize(self.failures, words=False).splitlines()[0]
