"""A collective that was started: what ``async_op=True`` gives, and what a backend gives to ops.

A `Work` belongs to the worker that started it and is used on its thread alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


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

    def give(self, result: Any, async_op: bool) -> Any:
        """Itself, to be waited for later, or `result` after waiting now."""
        self.result = result
        return self if async_op else self.wait()

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
