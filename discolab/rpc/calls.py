"""A call from one rank to another: what is to be run, where it stands, and what came of it.

`Call` is one within a node: caller and callee have the same object, by reference. The two ends of
one between nodes are in far_calls.py. Each is settled once (outcome.py).

The callee's thread alone runs a call. `given_up` is set by whoever wants it ended, before he looks
which callee has it; the callee takes it up first and looks at `given_up` then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..runtime.actions import function_text, site_text
from ..runtime.errors import (
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

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        """See `Outcome`."""
        self.node.forget_call(self.number)
        super().settle(value, error)

    def wait_and_take(self) -> Any:
        """Wait for the answer and take it; whoever gives up ends the call at the callee too."""
        try:
            if not self.settled:
                self.wait(self, self.timeout)
            self.open()
        except BaseException as exc:
            self.give_up(late=isinstance(exc, WaitTimeoutError))
            raise
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

    def give_up(self, *, late: bool) -> None:
        """Nobody wants it any more, as its time is over or for another reason: end it."""
        self.node.forget_call(self.number)
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
        self.abort(error, late=True)
        if self.target is not None:
            self.target.settle(None, error)

    def abort(self, error: DiscoError, *, late: bool = False) -> None:
        """Give it up, and tell whoever waits for it."""
        try:
            self.give_up(late=late)
        finally:  # it is forgotten: nobody else would tell them
            self.settle(None, error)

    def not_sent(self, error: DiscoError) -> None:
        """It could not be sent after all."""
        self.settle(None, error)
        self._let_go()

    # -- the callee's side: a `pool.Task` ----------------------------------------------------

    def run(self, callee: Callee) -> None:
        """See `Task`."""
        self.running_on = callee
        if self.given_up:
            self._ended()
            return
        try:
            self._open_call()  # first: an interrupt in the middle of an import leaves that locked
            callee.running = True
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

    def _open_call(self) -> None:
        """Make what came in a message what it was; nothing within a node."""

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
        if issubclass(type(exc), WorkerInterrupted) and self.node.is_over(self.callee):
            self.refuse(session_over())
            return
        failure, kind, state = self._failure(exc)
        if self.target is not None:
            self.target.settle(None, error_of(failure, kind, state))
        self._tell(failure, kind, state)

    def _tell(self, failure: Failure, kind: Any, state: Any) -> None:
        self.settle(None, error_of(failure, kind, state))
        self._let_go()

    def _failure(self, exc: BaseException) -> tuple[Failure, Any, Any]:
        """What is told of an exception: the failure, its class, its attributes."""
        if self.given_up and issubclass(type(exc), WorkerInterrupted):
            exc = WorkerInterrupted(self.given_up)
        if self.fetches and issubclass(
            type(exc), WorkerError
        ):  # of the call that should have made it
            assert isinstance(exc, WorkerError)
            return exc.failures[0], original_type(exc), {}
        kind, state = original_type(exc), state_of(exc)
        words, site = self.words(), self.site_words()
        try:
            failure = Failure.from_exception(self.callee, words, site, exc)
        except Exception:
            message = "<an exception that can't be described>"
            failure = Failure(self.callee, words, site, type(exc).__name__, message)
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
