"""Operations of the MPI backend that have begun. Each belongs to its worker's thread alone."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

from ...runtime.errors import CollectiveAborted, WaitTimeoutError
from ..call import DONE, FAILED, Call
from ..meeting.meetings import check_thread
from ..work import Work

FIRST_PAUSE, LONGEST_PAUSE = 1e-5, 1e-3  # seconds between two looks at MPI

Requests = Generator[Any, None, None]  # yields a request, or None to be asked again


class Owner(Protocol):
    """What a work needs of its backend."""

    def progress(self) -> None:
        """Look after all that was begun; never waits."""

    def leave(self, work: MpiWork) -> None:
        """Nobody waits for it any more."""


class MpiWork(Work):
    """An operation that has begun; it goes on whenever this worker waits for any."""

    def __init__(self, owner: Owner, call: Call, requests: Requests) -> None:
        self._owner, self.call, self._requests = owner, call, requests
        self._pending: Any = None
        self._error: Exception | None = None
        self.over = False

    def wait(self, timeout: float | None = None) -> Any:
        """See `Work`."""
        if not self.over:
            check_thread(self.call)
            self._await(timeout if timeout is not None else self.call.timeout)
        if self._error is not None:
            raise self._error
        return self.result

    def done(self) -> bool:
        """See `Work`."""
        if not self.over:
            check_thread(self.call)
            self._owner.progress()
        return self.over

    def advance(self) -> None:
        """Go as far as is possible without waiting."""
        try:
            while self._pending is None or self._pending.Test():
                self._pending = next(self._requests)
                if self._pending is None:
                    return
        except StopIteration:
            self.end(None)
        except Exception as exc:
            self.end(exc)

    def end(self, error: Exception | None) -> None:
        """It is over."""
        self._error, self.over = error, True
        self.call.close(DONE if error is None else FAILED)

    def _await(self, timeout: float | None) -> None:
        worker, pause, left = self.call.worker, FIRST_PAUSE, timeout
        try:
            while left is None or left > 0:
                step = pause if left is None else min(pause, left)
                try:
                    worker.wait_for(self.done, self.call, step)
                    return
                except WaitTimeoutError:
                    left = None if left is None else left - step
                pause = min(1.3 * pause, LONGEST_PAUSE)
        except BaseException as exc:
            self._leave(f"{self.call} was left: {type(exc).__name__}")
            raise
        text = f"gave up after {timeout:g} s waiting for {self.call}"
        self._leave(text)
        raise WaitTimeoutError(text)

    def _leave(self, text: str) -> None:
        if not self.over:
            self.end(CollectiveAborted(text))
            self._owner.leave(self)
