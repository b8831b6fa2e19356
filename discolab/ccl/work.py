"""A collective that was started: what ``async_op=True`` gives, and what a backend gives to ops.

A `Work` belongs to the worker that started it and is used on its thread alone.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ..runtime.errors import SessionError
from .call import DONE, FAILED, Call


class Work(ABC):
    """Something that was started and must be waited for.

    Until it is over its tensors belong to the operation: neither read nor write them.

    Examples
    --------
    >>> work = ccl.all_reduce(x, async_op=True)  # doctest: +SKIP
    >>> y = compute()                            # doctest: +SKIP
    >>> total = work.wait()                      # doctest: +SKIP
    """

    result: Any = None

    @abstractmethod
    def wait(self, timeout: float | None = None) -> Any:
        """Wait until it is over; what the call returns without ``async_op``.

        Parameters
        ----------
        timeout
            Seconds; None: what was given when it was started.

        Raises
        ------
        CollectiveError, WaitTimeoutError
            See `discolab.ccl.ops`. Each further call raises the same again.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether it is over, well or badly; never waits."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {'over' if self.done() else 'not over; .wait() for it'}>"


class Finished(Work):
    """A work that was over when it began."""

    def wait(self, timeout: float | None = None) -> Any:
        """The result."""
        return self.result

    def done(self) -> bool:
        """True."""
        return True


class Together(Work):
    """Several works as one: over when all are."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for each; the result of this one."""
        for work in self._works:
            work.wait(timeout)
        return self.result

    def done(self) -> bool:
        """Whether all are over."""
        return all(work.done() for work in self._works)


class CallWork(Work):
    """One call whose worker completes it when it waits, and that ends once.

    Attributes
    ----------
    over
        Whether it has ended, well or badly.
    adopt
        Called once, on the worker's own thread, when it has waited for what ended well.
    """

    over = False
    adopt: Callable[[], None] | None = None
    _error: Exception | None = None

    def __init__(self, call: Call) -> None:
        self.call = call

    @abstractmethod
    def complete(self, timeout: float | None) -> None:
        """Wait until it is over, on the worker's own thread."""

    def wait(self, timeout: float | None = None) -> Any:
        if not self.over:
            call = self.call
            if call.worker.thread_id != threading.get_ident():
                raise wrong_thread(call)
            if timeout is None:
                timeout = call.timeout
            else:
                call.patient = True
            self.complete(timeout)
        if self._error is not None:
            raise self._error
        if self.adopt is not None:
            adopt, self.adopt = self.adopt, None
            adopt()
        return self.result

    def end(self, error: Exception | None) -> None:
        """It is over."""
        self._error, self.over = error, True
        self.call.close(DONE if error is None else FAILED)


def wrong_thread(call: Call) -> SessionError:
    """To be raised where another thread than the worker's waits."""
    return SessionError(
        f"{call.name} was started by worker {call.rank}; only that worker's own thread can "
        "wait for it"
    )
