"""A clock that can be stopped: deadlines of a program that a person looks at do not run out."""

from __future__ import annotations

import time


class Clock:
    """Seconds as `time.monotonic` counts them, but for those in which it was stopped.

    Any thread may read it; `stop` and `go` are called by one thread at a time, and again and again
    does no harm.
    """

    def __init__(self) -> None:
        # seconds lost, and since when it stands; in one, so that who reads sees both at one moment
        self._state: tuple[float, float | None] = 0.0, None

    def now(self) -> float:
        """The time."""
        lost, since = self._state
        return (time.monotonic() if since is None else since) - lost

    def stop(self) -> None:
        """Stand still."""
        lost, since = self._state
        if since is None:
            self._state = lost, time.monotonic()

    def go(self) -> None:
        """Go on."""
        lost, since = self._state
        if since is not None:
            self._state = lost + time.monotonic() - since, None
