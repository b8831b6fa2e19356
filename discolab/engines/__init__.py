"""Engines: where the workers of a session live.

An engine makes the channels, starts the workers, notices when one dies, and stops them;
everything else is the session's.
"""

from __future__ import annotations

from typing import Any

from ..runtime.errors import ArgumentError
from ..runtime.session import Session
from .threads import ThreadedSession

ENGINES: dict[str, type[ThreadedSession]] = {"threads": ThreadedSession}


def make_session(num_workers: int, engine: str = "threads", **options: Any) -> Session:
    """Start a session on the engine of that name, one of `ENGINES`.

    Raises
    ------
    ArgumentError
        If there is no such engine, or its options do not fit.
    """
    kind = ENGINES.get(engine)
    if kind is None:
        raise ArgumentError(
            f"there is no engine {engine!r} in this version; there is: {', '.join(ENGINES)}"
        )
    return kind(num_workers, **options)


__all__ = ["ENGINES", "ThreadedSession", "make_session"]
