"""Errors of calls between workers; what a callee's exception becomes at its caller. No state.

At the caller nothing runs of what the exception's class defines: its text was made where it was
raised. A `__str__` of the user's could do anything there, such as to end the process.
"""

from __future__ import annotations

import functools
from typing import Any

from ..runtime.errors import ArgumentError, DiscoError, SessionClosedError, WorkerError
from ..runtime.failures import Failure

_NOT_RAISED_ELSEWHERE = (StopIteration, StopAsyncIteration, GeneratorExit)


class WorkerLostError(DiscoError, ConnectionError, RuntimeError):
    """The callee, or the owner of a value, has died; the message says what became of it."""


class UnknownWorkerError(ArgumentError, RuntimeError):
    """There is no worker of that rank or name."""


def session_over() -> SessionClosedError:
    """What calls end with when the session does."""
    return SessionClosedError("the session was shut down while the call was under way")


def restarted(rank: int) -> WorkerLostError:
    """What ends that a new worker thread, which has the place of a lost one, can't go on with."""
    return WorkerLostError(
        f"worker {rank} was restarted meanwhile: what was under way with it is gone. "
        "It can be called again"
    )


def original_type(exc: BaseException) -> type[BaseException]:
    """The class of an exception; if it came from another worker, of the one raised there."""
    kind: type[BaseException] = getattr(type(exc), "disco_original", type(exc))
    return kind


def state_of(exc: BaseException) -> dict[str, Any]:
    """The attributes of an exception, whatever its class does to attribute access."""
    try:
        state = dict(object.__getattribute__(exc, "__dict__"))
    except Exception:
        return {}
    state.pop("__notes__", None)
    return state


def error_of(
    failure: Failure, kind: Any = None, state: dict[str, Any] | None = None
) -> WorkerError:
    """The exception to raise at the caller for what failed at the callee.

    Parameters
    ----------
    kind
        The class of the callee's exception: what is raised is of that class too, where that can be.
    state
        The attributes of the callee's exception.
    """
    made = _both(kind) if isinstance(kind, type) else WorkerError
    try:
        error = made([failure])
        if state and made is not WorkerError:
            for name, value in state.items():
                if name not in error.__dict__ and not name.startswith("__"):
                    error.__dict__[name] = value
        return error
    except (Exception, SystemExit, GeneratorExit):  # its class has ideas of its own
        return WorkerError([failure])


@functools.lru_cache(maxsize=256)
def _both(kind: type[BaseException]) -> type[WorkerError]:
    """A class that is `WorkerError` and `kind`."""
    if (
        not issubclass(kind, Exception)
        or issubclass(kind, (WorkerError, *_NOT_RAISED_ELSEWHERE))
        or kind is Exception
    ):
        return WorkerError
    try:
        return type(
            "WorkerError",
            (WorkerError, kind),
            {
                "__module__": WorkerError.__module__,
                "__doc__": f"A `WorkerError` that is a `{kind.__name__}` too.",
                "__str__": Exception.__str__,  # a KeyError would quote it
                "__repr__": Exception.__repr__,
                "__format__": Exception.__format__,
                "__reduce__": _reduce,
                "__reduce_ex__": lambda error, _: _reduce(error),
                "__copy__": None,  # by the two above
                "disco_original": kind,
            },
        )
    except TypeError:  # two layouts that do not go together
        return WorkerError


def _reduce(error: Any) -> tuple[Any, ...]:
    return error_of, (error.failures[0], type(error).disco_original)
