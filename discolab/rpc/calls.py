"""A call from one rank to another: what is to be run, where it stands, and what came of it.

`Call` is one within a node: caller and callee have the same object, by reference. `CallOut` is the
caller's end of one to another node, `CallIn` the callee's. Each is settled once (outcome.py).

The callee's thread alone runs a call. `given_up` is set by whoever wants it ended, before he looks
which callee has it; the callee takes it up first and looks at `given_up` then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..runtime.actions import function_text, site_text
from ..runtime.errors import (
    ArgumentError,
    DiscoError,
    WaitTimeoutError,
    WorkerError,
    WorkerInterrupted,
)
from ..runtime.failures import Failure
from ..runtime.functions import find_func
from .autograd import crossing
from .errors import error_of, original_type, session_over, state_of
from .names import in_words
from .outcome import Outcome

if TYPE_CHECKING:
    from .node import Node
    from .pool import Callee
    from .values import Value

PLAIN, REMOTE, STREAM = range(3)  # the value goes back; stays with the callee; many go back

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Deferred(NamedTuple):
    """What a method that is marked with `async_execution` has returned."""

    value: Any


class _Said(NamedTuple):
    """What a call was, in words, when it is over."""

    words: str


class Call(Outcome):
    """See the module.

    Attributes
    ----------
    number
        Of this call among those of its node.
    caller, callee
        Their ranks.
    target
        Of a remote call, where its value goes.
    feed
        Of a stream, to where its items go.
    timeout, due
        Seconds that it may take, None for no limit; when that is over, by `node.now`.
    depth
        How many calls wait for it; see queues.py.
    context
        The autograd context it is made in.
    site
        Where it was called.
    fetches
        Whether it only asks for a value: then `func` is that `Value`.
    """

    __slots__ = (
        "args",
        "callee",
        "caller",
        "context",
        "depth",
        "due",
        "feed",
        "fetches",
        "func",
        "given_up",
        "kind",
        "kwargs",
        "node",
        "number",
        "running_on",
        "site",
        "target",
        "timeout",
    )

    def __init__(
        self,
        node: Node,
        kind: int,
        caller: int,
        callee: int,
        func: Any,
        args: Args,
        kwargs: Kwargs,
        timeout: float | None,
        site: Any,
    ) -> None:
        super().__init__()
        self.node = node
        self.kind = kind
        self.caller, self.callee = caller, callee
        self.func, self.args, self.kwargs = func, args, kwargs
        self.timeout = timeout
        self.due: float | None = None
        self.site = site
        self.number = 0
        self.depth = 0
        self.target: Value | None = None
        self.feed: Any = None
        self.context: Any = None
        self.given_up = ""
        self.fetches = False
        self.running_on: Callee | None = None

    @property
    def parks(self) -> bool:
        """Whether who waits for it holds no place among calls; see pool.py."""
        return self.fetches

    # -- in words ----------------------------------------------------------------------------

    def words(self) -> str:
        """What is called: ``rpc of 'train'``."""
        if self.fetches:
            return "fetching the value of a reference"
        func = self.func
        if type(func) is _Said:
            return func.words
        in_words = getattr(func, "rpc_words", None)
        args = self.args
        if in_words is not None and args:
            return str(in_words(*args))
        return f"rpc of '{func if isinstance(func, str) else function_text(func)}'"

    def site_words(self) -> str:
        """Where it was called."""
        return site_text(self.site)

    def __str__(self) -> str:
        if self.fetches:
            return f"the value of a reference from {in_words(self.callee)}"
        return f"the answer of {in_words(self.callee)} to the {self.words()}"

    # -- the caller's side -------------------------------------------------------------------

    def wait_and_take(self) -> Any:
        """Wait for the answer and take it; whoever gives up ends the call at the callee too."""
        try:
            if not self.settled:
                self.wait(self, self.timeout)
        except BaseException as exc:
            self.give_up(exc)
            raise
        finally:
            self.node.forget_call(self.number)
        self.open()
        error = self.error
        if error is None:
            return self.value
        self.error = None
        try:
            raise error
        finally:  # frames of ours must not hold what holds them
            del self, error

    def open(self) -> None:
        """Open what came, where that is still to be done."""

    def give_up(self, exc: BaseException | str) -> None:
        """Nobody wants it any more: end it at the callee."""
        late = isinstance(exc, WaitTimeoutError)
        self.end(f"its caller gave up after {self.timeout:g} s" if late else "its caller has left")

    def end(self, why: str) -> None:
        """Have the callee end it."""
        self.given_up = why
        if self.target is not None:  # who waits for that does not wait for what may never return
            self.target.settle(None, WaitTimeoutError(f"the {self.words()} was ended: {why}"))
        on = self.running_on
        if on is not None:
            on.interrupt_task(self)

    def time_out(self) -> None:
        """Its deadline is over, and nobody waits for it on a thread of his own."""
        assert self.timeout is not None
        error = WaitTimeoutError(f"gave up after {self.timeout:g} s waiting for {self}")
        self.give_up(error)
        self.settle(None, error)
        if self.target is not None:
            self.target.settle(None, error)

    def not_sent(self, error: DiscoError) -> None:
        """It could not be sent after all."""
        self.settle(None, error)
        self.node.forget_call(self.number)
        self._let_go()

    # -- the callee's side: a `pool.Task` ----------------------------------------------------

    def run(self, callee: Callee) -> None:
        """See `Task`."""
        self.running_on = callee
        if self.given_up:
            self._ended()
            return
        callee.running = True
        try:
            if callee.interrupts:
                raise WorkerInterrupted(self.given_up or "interrupted")
            value = self._do()
            callee.running = False
            if callee._async_sent:
                callee._absorb()
        except BaseException as exc:
            callee._absorb()
            self._failed(exc)
            return
        try:
            self._done(value)
        except BaseException as exc:  # it can't be sent, or what follows it raised
            self._failed(exc)

    def _do(self) -> Any:
        context = self.context
        if context is None:
            return self._apply()
        with crossing.running_in(context):
            return self._apply()

    def _apply(self) -> Any:
        if self.fetches:
            return self.func.result()
        func = find_func(self.func) if isinstance(self.func, str) else self.func
        if self.kind == STREAM:
            return self.feed.pump(func(*self.args, **self.kwargs))
        return func(*self.args, **self.kwargs)

    def _done(self, value: Any) -> None:
        """The function has returned."""
        later = getattr(self.func, "rpc_async_execution", False)
        if type(value) is Deferred:  # of a method that is marked so
            later, value = True, value.value
        if later:
            self._forget_args()  # the answer may never come
            if not isinstance(value, torch.futures.Future):
                raise TypeError(
                    f"{function_text(self.func)} is marked with rpc.async_execution and must "
                    f"return a Future, it returned a {type(value).__name__}"
                )
            value.add_done_callback(self._future_done)
            return
        self._answer(value)

    def _future_done(self, future: Any) -> None:
        try:
            self._answer(future.value())
        except BaseException as exc:
            self._failed(exc)

    def _answer(self, value: Any) -> None:
        """Give the value to whom it is for."""
        if self.target is not None:
            self.target.settle(value)
            self.settle(None)
        else:
            if self.caller != self.callee:
                value, _ = crossing.leave(self.node, self.context, value, self.caller, True)
            self.settle(value)
        self._let_go()

    def _failed(self, exc: BaseException) -> None:
        """Tell the caller what went wrong."""
        if isinstance(exc, WorkerInterrupted) and self.node.is_over(self.callee):
            self.refuse(session_over())
            return
        failure, kind, state = self._failure(exc)
        error = error_of(failure, kind, state)
        if self.target is not None:
            self.target.settle(None, error)
        self.settle(None, error)
        self._let_go()

    def _failure(self, exc: BaseException) -> tuple[Failure, Any, Any]:
        """What is told of an exception: the failure, its class, its attributes."""
        if self.given_up and isinstance(exc, WorkerInterrupted):
            exc = WorkerInterrupted(self.given_up)
        if self.fetches and isinstance(exc, WorkerError):  # of the call that should have made it
            return exc.failures[0], original_type(exc), {}
        kind, state = original_type(exc), state_of(exc)
        failure = Failure.from_exception(self.callee, self.words(), self.site_words(), exc)
        return failure, kind, state

    def _let_go(self) -> None:
        """Keep nothing alive that only the function needed."""
        self._forget_args()
        self.running_on = None

    def _forget_args(self) -> None:
        func = self.func
        if type(func) is not _Said and hasattr(func, "rpc_words"):
            self.func = _Said(self.words())
        self.args, self.kwargs = (), {}

    def _ended(self) -> None:
        """It was given up before it began."""
        self.refuse(DiscoError(f"the {self.words()} was not begun: {self.given_up}"))

    def torn(self, callee: Callee) -> None:
        """See `Task`."""
        self._failed(WorkerInterrupted(self.given_up or "interrupted"))

    def refuse(self, error: DiscoError) -> None:
        """See `Task`."""
        if self.target is not None:
            self.target.settle(None, error)
        self.settle(None, error)
        self._let_go()


class CallOut(Call):
    """A call to another node, at its caller; what comes back is opened by who takes it.

    `_opening` guards that.
    """

    __slots__ = ("_opened", "_opening", "forks", "tracked")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tracked: tuple[int, ...] = ()
        self.forks: list[Any] = []
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

    def came(self, value: Any, tracked: tuple[int, ...], forks: list[Any]) -> None:
        """The answer is there, as it came; on the receiving thread."""
        if self.settled:
            self.node.holdings.let_go(forks)
            return
        self.tracked, self.forks = tracked, forks
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
            value = self.node.open(self.value, self.forks)
            if self.tracked or self.context is not None:
                value = crossing.arrive(
                    self.node, self.context, value, self.callee, False, self.tracked
                )
            self.value = value
        except Exception as exc:
            words = f"what came as the answer to the {self.words()} can't be opened here: {exc}"
            self.value, self.error = None, DiscoError(words)
            self.error.__cause__ = exc
        finally:
            self._opened = True
            self.forks = []


class CallIn(Call):
    """A call from another node, at its callee."""

    __slots__ = ("called", "forks", "from_number", "opened", "sender", "tracked")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sender = 0
        self.from_number = 0
        self.called = ""
        self.tracked: tuple[int, ...] = ()
        self.forks: list[Any] = []
        self.opened = False

    def words(self) -> str:
        """See `Call`."""
        return self.called

    def site_words(self) -> str:
        """See `Call`."""
        return str(self.site)

    def _do(self) -> Any:
        self._open()
        return super()._do()

    def _open(self) -> None:
        """What came is opened on the callee's thread: that may run the user's code."""
        if self.opened:
            return
        self.opened = True
        forks, self.forks = self.forks, []
        func, args, kwargs = self.node.open((self.func, self.args, self.kwargs), forks)
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

    def _failed(self, exc: BaseException) -> None:
        if isinstance(exc, WorkerInterrupted) and self.node.is_over(self.callee):
            self.refuse(session_over())
            return
        failure, kind, state = self._failure(exc)
        if self.target is not None:
            self.target.settle(None, error_of(failure, kind, state))
        self._tell(failure, kind, state)

    def refuse(self, error: DiscoError) -> None:
        """See `Task`."""
        if self.target is not None:
            self.target.settle(None, error)
        if not self.node.closed:
            failure = Failure.from_exception(self.callee, self.words(), self.site_words(), error)
            self._tell(failure, type(error), {})

    def _tell(self, failure: Failure, kind: Any, state: Any) -> None:
        failure.exception = None
        self.node.holdings.let_go(self.forks)
        self.forks = []
        self.node.mail.answer_failure(self, failure, kind, state)
        self.settle(None)
        self._let_go()
