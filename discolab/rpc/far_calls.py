"""Calls between nodes: `CallOut` is the caller's end, `CallIn` the callee's; see calls.py.

`_opening` of a `CallOut` guards the opening of what came, which its taker does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..runtime.errors import ArgumentError, DiscoError
from ..runtime.failures import Failure
from . import messages
from .autograd import crossing
from .calls import Call

if TYPE_CHECKING:
    from .reference_records import Brought


class CallOut(Call):
    """A call to another node, at its caller; what comes back is opened by who takes it.

    `_opening` guards that.
    """

    __slots__ = ("_opened", "_opening", "brought", "tracked")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tracked: tuple[int, ...] = ()
        self.brought: Brought | None = None
        self._opened = False
        self._opening = threading.Lock()

    def wait(self, what: Any, timeout: float | None) -> None:
        """See `Outcome`. It does not look first: the receiving thread needs Python's lock."""
        if not self.settled:
            self.sleep_until(self.is_settled, what, timeout)

    def end(self, why: str) -> None:
        """See `Call`."""
        if not self.settled:
            self.given_up = why
            self.node.mail.cancel(self, why)

    def came(self, value: Any, tracked: tuple[int, ...], brought: Brought | None) -> None:
        """The answer is there, as it came; on the receiving thread."""
        if not self.settled:
            self.tracked, self.brought = tracked, brought
            self.settle(value)
            self._let_go()

    def result(self) -> Any:
        """See `Outcome`."""
        self.open()
        return super().result()

    def open(self) -> None:
        """See `Call`."""
        if self.error is None and not self._opened:
            with self._opening:
                if not self._opened:
                    self._open()

    def _open(self) -> None:
        try:
            value = messages.opened_here(self.node, self.value)
            if self.tracked or self.context is not None:
                value = crossing.arrive(
                    self.node, self.context, value, self.callee, False, self.tracked
                )
            self.value = value
        except Exception as exc:
            words = f"what came as the answer to the {self.words()} can't be opened here: {exc}"
            self.value, self.error = None, DiscoError(words)
            self.error.__cause__ = exc
        self._opened = True  # not if an interrupt has come: who waits again opens it then
        self.brought = None


class CallIn(Call):
    """A call from another node, at its callee."""

    __slots__ = ("brought", "called", "from_number", "opened", "sender", "tracked")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sender = 0
        self.from_number = 0
        self.called = ""
        self.tracked: tuple[int, ...] = ()
        self.brought: Brought | None = None
        self.opened = False

    def words(self) -> str:
        """See `Call`."""
        return self.called

    def site_words(self) -> str:
        """See `Call`."""
        return str(self.site)

    def _open_call(self) -> None:
        """What came is opened on the callee's thread: that may run the user's code."""
        if self.opened:
            return
        self.opened = True
        brought, self.brought = self.brought, None
        func, args, kwargs = messages.opened_here(self.node, (self.func, self.args, self.kwargs))
        del brought
        if self.tracked or self.context is not None:
            args, kwargs = crossing.arrive(
                self.node, self.context, (args, kwargs), self.caller, False, self.tracked
            )
        self.func, self.args, self.kwargs = func, args, kwargs

    def _answer(self, value: Any) -> None:
        if self.target is not None:
            self.target.settle(value)
            value = None
        tracked: tuple[int, ...] = ()
        if isinstance(value, Iterator):
            raise ArgumentError(
                f"a {type(value).__name__} can't be sent to another process: call the function "
                "with rpc.stream, which takes what it yields item by item, or have it return a list"
            )
        if value is not None:
            value, tracked = crossing.leave(self.node, self.context, value, self.caller, False)
        try:
            self.node.mail.answer(self, value, tracked)
        except ArgumentError as exc:
            raise ArgumentError(
                f"what it returned can't be sent: {exc}. Or leave it there: rpc.remote gives an "
                "RRef to it"
            ) from None
        self.settle(None)
        self._let_go()

    def refuse(self, error: DiscoError) -> None:
        """See `Task`."""
        if self.target is not None:
            self.target.settle(None, error)
        if not self.node.closed:
            failure = Failure.from_exception(self.callee, self.words(), self.site_words(), error)
            self._tell(failure, type(error), {})

    def _tell(self, failure: Failure, kind: Any, state: Any) -> None:
        failure.exception = None
        self.brought = None
        self.node.mail.answer_failure(self, failure, kind, state)
        self.settle(None)
        self._let_go()
