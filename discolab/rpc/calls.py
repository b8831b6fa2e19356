"""A call from one rank to another: what is to be run, where it stands, and what came of it.

`Call` is one within a node: caller and callee have the same object, by reference. One between nodes
has an `OutgoingCall` at the caller and an `IncomingCall` at the callee, with messages in between.
Each is settled once (outcome.py).

The server thread alone runs a call. `given_up` is set by whoever wants it ended, before he looks
which thread has it; the thread takes it up first and looks at `given_up` then. `_opening` of an
`OutgoingCall` guards the opening of what came, which its taker does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ..runtime import serialize
from ..runtime.actions import function_text, site_text
from ..runtime.controller import call_site
from ..runtime.errors import (
    ArgumentError,
    DiscoError,
    WaitTimeoutError,
    WorkerError,
    WorkerInterrupted,
)
from ..runtime.failures import Failure, safe_str
from ..runtime.functions import find_func
from ..runtime.interrupts import plain_lock, shield
from ..runtime.worker import Worker
from . import lending, node_protocol
from .errors import error_of, original_type, session_over, state_of
from .names import format_rank
from .node import HANDLERS, Node
from .node_protocol import CALL, FETCH, STREAM
from .outcome import Outcome, Value
from .pool import ServerThread, depth_here
from .refs.records import Fork, Keepalive

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_LEFT = "its caller has left"  # why a call ends that was interrupted: no failure to be logged


def start(
    node: Node,
    caller: int,
    to: Any,
    func: Any,
    args: Any = (),
    kwargs: Any = None,
    timeout: Any = None,
    *,
    kind: int = CALL,
    later: bool = False,
    lend: bool = False,
    target: Value | None = None,
    target_fork: Fork | None = None,
    feed: Any = None,
    prepare: Callable[[Call], None] | None = None,
    at: int | None = None,
) -> Call:
    """Begin a call. `Call.wait_and_take` waits for it and returns its value.

    Parameters
    ----------
    kind
        CALL, STREAM, or FETCH: `func` is a reference then, whose value is wanted.
    later
        No thread of the caller waits for it: the housekeeping thread checks its deadline.
    lend
        Large tensors are sent while the caller goes on; see lending.py.
    target, target_fork
        Of a remote call: where its value goes on this node; what another one knows it by.
    feed
        Of a stream: where its items go.
    prepare
        Called with the call before it begins.
    at
        The node to be called, if that is not the one on which `to` lives now: it may be lost.
    """
    node.check_open()
    if node.references.dropped:
        node.references.drain()
    callee = node.rank_of(to)
    args = () if args is None else args
    kwargs = {} if kwargs is None else kwargs
    seconds = node.seconds(timeout, caller)
    if type(args) is not tuple or type(kwargs) is not dict:
        args, kwargs = _arguments(args, kwargs)
    if kind != FETCH and not callable(func) and not isinstance(func, str):
        raise ArgumentError(
            f"what to call is a function, or the name of a registered one, got {func!r:.80}"
        )
    if at is None:
        at = node.node_of(callee)
    here = at == node.id
    site = call_site(3)
    made = Call if here else OutgoingCall
    call = made(node, kind, caller, callee, func, args, kwargs, seconds, site)
    call.at = at
    call.number = next(node.numbers)
    call.target, call.feed = target, feed
    call.depth = depth_here()
    call.context = node.autograd.current()
    if call.context is not None:
        call.follows = torch.is_grad_enabled()
    if feed is not None:
        feed.call = call
    simple = here and call.context is None
    try:
        if prepare is not None:
            prepare(call)
        if later and seconds is not None:
            call.due = node.now() + seconds
        with nullcontext() if simple else shield():  # half of another would leave something
            call.begin(target_fork, lend)
    except BaseException as exc:
        call.unfollow()
        if isinstance(exc, Exception):
            call.forget()
        else:  # an interrupt: it may have begun
            call.give_up(late=False)
        raise
    return call


def call_sync(node: Node, caller: int, to: Any, func: Any, *args: Any, **options: Any) -> Any:
    """As `start`, and wait for the value."""
    return start(node, caller, to, func, *args, **options).wait_and_take()


def _arguments(args: Any, kwargs: Any) -> tuple[Args, Kwargs]:
    if not isinstance(args, list | tuple):
        raise ArgumentError(
            f"args is a tuple of arguments, got {type(args).__name__}: write args=(value,)"
        )
    if not isinstance(kwargs, Mapping):
        raise ArgumentError(f"kwargs is a dict of arguments, got {type(kwargs).__name__}")
    return tuple(args), dict(kwargs)


class Deferred(NamedTuple):
    """What a method that is marked with `async_execution` has returned."""

    value: Any


class _Described(NamedTuple):
    """In the place of the function of a call that is over: what it was."""

    text: str


class Call(Outcome):
    """See the module. It is a `pool.Task`.

    Attributes
    ----------
    kind
        CALL, FETCH or STREAM; of a FETCH `func` is the reference, at the callee its `Value`.
    caller, callee
        Their ranks.
    at
        On which node the callee is.
    timeout, due
        Seconds that it may take, None for no limit; when that is over, by `node.now`.
    site
        Where it was called.
    number
        Of this call among those of its node.
    depth
        How many calls wait for it; see queues.py.
    target
        Of a remote call, where its value goes.
    feed
        Of a stream, to where its items go.
    context
        The autograd context it is made in.
    follows
        Whether autograd follows what comes back: its caller had gradients enabled.
    given_up
        Why it was ended, "" if it was not.
    """

    number = 0
    at = 0
    depth = 0
    due: float | None = None
    target: Value | None = None
    feed: Any = None
    context: Any = None
    follows = True
    given_up = ""
    running_on: ServerThread | None = None
    _served_by: Worker | None = None

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
        self.node, self.kind = node, kind
        self.caller, self.callee = caller, callee
        self.func, self.args, self.kwargs = func, args, kwargs
        self.timeout, self.site = timeout, site

    @property
    def parks(self) -> bool:
        """Whether a thread that waits for it holds no place among calls; see pool.py."""
        return self.kind == FETCH

    @property
    def way_back(self) -> Any:
        """The context in which its results go to the caller, None: in none."""
        return self.context if self.follows else None

    # -- as text -----------------------------------------------------------------------------

    def describe(self) -> str:
        """What is called: ``rpc of 'train'``."""
        if self.kind == FETCH:
            return "fetching the value of a reference"
        func = self.func
        if type(func) is _Described:
            return func.text
        describe = getattr(func, "rpc_description", None)
        args = self.args
        if describe is not None and args:
            return str(describe(*args))
        return f"rpc of '{func if isinstance(func, str) else function_text(func)}'"

    def describe_site(self) -> str:
        """Where it was called."""
        return site_text(self.site)

    def __str__(self) -> str:
        if self.kind == FETCH:
            return f"the value of a reference from {format_rank(self.callee)}"
        return f"the answer of {format_rank(self.callee)} to the {self.describe()}"

    # -- the caller's side -------------------------------------------------------------------

    def begin(self, target_fork: Fork | None, lend: bool) -> None:
        """Hand it to its callee; raises if an argument can't go there."""
        tracked: tuple[int, ...] = ()
        context = self.context
        if self.caller != self.callee and (self.args or self.kwargs or context is not None):
            try:
                (self.args, self.kwargs), tracked = self.node.autograd.leave(
                    context, (self.args, self.kwargs), self.callee, self.at
                )
            except RecursionError:
                raise ArgumentError(
                    f"an argument of the {self.describe()} is nested too deep"
                ) from None
        self.node.calls[self.number] = self
        self._hand_over(tracked, target_fork, lend)

    def _hand_over(self, _tracked: tuple[int, ...], _fork: Fork | None, _lend: bool) -> None:
        self.node.pool(self.callee).submit(self)

    def forget(self) -> None:
        """It is over for its caller."""
        self.node.calls.pop(self.number, None)

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        self.forget()
        super().settle(value, error)

    def wait_and_take(self) -> Any:
        """Wait for the answer and take it; whoever gives up ends the call at the callee too."""
        self.heard = True
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
        """End it, as its time is over or its caller has left."""
        self.forget()
        self.end(f"its caller gave up after {self.timeout:g} s" if late else _LEFT)

    def end(self, why: str) -> None:
        """Have the callee end it."""
        self.given_up = why
        if self.target is not None:  # what waits for that does not wait for what may never return
            if why == _LEFT:
                self.target.heard = True
            self.target.settle(None, WaitTimeoutError(f"the {self.describe()} was ended: {why}"))
        thread = self.running_on
        if thread is not None:
            thread.interrupt_task(self)

    def time_out(self) -> None:
        """End it: its deadline is over, and no thread of the caller waits for it."""
        assert self.timeout is not None
        error = WaitTimeoutError(f"gave up after {self.timeout:g} s waiting for {self}")
        self.abort(error, late=True)
        if self.target is not None:
            self.target.settle(None, error)

    def abort(self, error: DiscoError, *, late: bool = False) -> None:
        """Give it up, with an error for whoever waits for it."""
        try:
            self.give_up(late=late)
        finally:  # the table has forgotten it, so nothing else would settle it
            self.settle(None, error)

    def fail(self, error: BaseException) -> None:
        """Settle it with an error, and keep nothing alive for it."""
        self.settle(None, error)
        self._release()

    # -- the callee's side: a `pool.Task` ----------------------------------------------------

    def run(self, thread: ServerThread) -> None:
        """See `Task`."""
        self.running_on = thread
        if self.given_up:
            self.refuse(DiscoError(f"the {self.describe()} was not begun: {self.given_up}"))
            return
        try:
            self._begin_service(thread.pool.worker)
            self._open_call()  # first: an interrupt in the middle of an import leaves that locked
            thread.running = True
            if thread.interrupts:
                raise WorkerInterrupted(self.given_up or "interrupted")
            value = self._do()
            thread.running = False
            if thread._async_sent:
                thread._absorb()
        except BaseException as exc:
            thread._absorb(exc)
            self._failed(exc)
            return
        try:
            self._end_service()
            self._done(value)
        except BaseException as exc:  # it can't be sent, or what follows it raised
            self._failed(exc)

    def _begin_service(self, worker: Worker | None) -> None:
        """Say that the worker is at work; not on the controller, and not to wait for a value."""
        if worker is None or self.kind == FETCH:
            return
        self._served_by = worker
        worker.serves.add(self)
        if worker.before_serving is not None:
            worker.before_serving()

    def _end_service(self) -> None:
        """Before the answer: what the caller does then is no part of the call."""
        worker, self._served_by = self._served_by, None
        if worker is not None:
            worker.serves.discard(self)
            if worker.after_serving is not None:
                worker.after_serving()

    def _open_call(self) -> None:
        """Make what came in a message what it was; nothing within a node."""

    def _do(self) -> Any:
        context = self.context
        if context is None:
            return self._apply()
        with self.node.autograd.running_in(context):
            return self._apply()

    def _apply(self) -> Any:
        if self.kind == FETCH:
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
            if not isinstance(value, torch._C.Future):  # what its `then` gives is that alone
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
        """Give the value to its target or its caller."""
        if self.target is not None:
            self.target.settle(value)
            self.settle(None)
        else:
            if self.caller != self.callee:
                value, _ = self.node.autograd.leave(self.way_back, value, self.caller, self.at)
            self.settle(value)
        self._release()

    def _failed(self, exc: BaseException) -> None:
        """Report an exception to the caller."""
        self._end_service()
        if issubclass(type(exc), WorkerInterrupted) and self.node.is_over(self.callee):
            self.refuse(session_over())
            return
        failure, kind, state = self._failure(exc)
        if self.target is not None:
            self.target.settle(None, error_of(failure, kind, state))
        self._answer_failure(failure, kind, state)

    def _answer_failure(self, failure: Failure, kind: Any, state: Any) -> None:
        self.fail(error_of(failure, kind, state))

    def _failure(self, exc: BaseException) -> tuple[Failure, Any, Any]:
        """What the caller gets of an exception: a failure, the class, the attributes."""
        if self.given_up and issubclass(type(exc), WorkerInterrupted):
            exc = WorkerInterrupted(self.given_up)
        if self.kind == FETCH and issubclass(type(exc), WorkerError):
            assert isinstance(exc, WorkerError)  # of the call that should have made the value
            return exc.failures[0], original_type(exc), {}
        kind, state = original_type(exc), state_of(exc)
        text, site = self.describe(), self.describe_site()
        try:
            failure = Failure.from_exception(self.callee, text, site, exc)
        except Exception:
            message = "<an exception that can't be described>"
            failure = Failure(self.callee, text, site, type(exc).__name__, message)
        return failure, kind, state

    def _release(self) -> None:
        """Keep nothing alive that only the function needed."""
        self._forget_args()
        self.running_on = None

    def _forget_args(self) -> None:
        func = self.func
        if type(func) is not _Described and hasattr(func, "rpc_description"):
            self.func = _Described(self.describe())
        self.args, self.kwargs = (), {}

    def torn(self, thread: ServerThread) -> None:
        """See `Task`."""
        self._failed(WorkerInterrupted(self.given_up or "interrupted"))

    def refuse(self, error: DiscoError) -> None:
        """See `Task`."""
        if self.target is not None:
            self.target.settle(None, error)
        self.fail(error)


class OutgoingCall(Call):
    """A call to another node, at its caller; the thread that takes what comes back opens it."""

    tracked: tuple[int, ...] = ()
    keepalive: Keepalive | None = None
    _opened = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._opening = plain_lock()

    def _hand_over(self, tracked: tuple[int, ...], fork: Fork | None, lend: bool) -> None:
        node, to = self.node, self.at
        message = (
            self.kind,
            self.number,
            self.caller,
            self.callee,
            self.describe(),
            site_text(self.site),
            self.func,
            self.args,
            self.kwargs,
            self._context_sent(),
            tracked,
            fork,
            None if self.feed is None else self.feed.buffer,
            self.depth,
        )
        node.check_answers(to)
        lent = None
        if lend:
            lent = lending.lend(self, node.references, (self.args, self.kwargs))
        node.send(to, message, lent)
        if to in node.lost:  # it has died meanwhile: perhaps before the call was in the table
            self.settle(None, node.lost_error(to))

    def _context_sent(self) -> int | None:
        """The context's id; negative if autograd does not follow what comes back."""
        if self.context is None:
            return None
        id: int = self.context.id
        return id if self.follows else -id

    def wait(self, what: Any, timeout: float | None) -> None:
        """See `Outcome`. It does not look first: the receiving thread needs Python's lock."""
        if not self.settled:
            self.sleep_until(self.is_settled, what, timeout)

    def end(self, why: str) -> None:
        if not self.settled:
            self.given_up = why
            self.node.notify(self.at, node_protocol.CANCEL, self.number, why)

    def answered(self, value: Any, tracked: tuple[int, ...], keepalive: Keepalive | None) -> None:
        """The answer is there, as it came; on the receiving thread."""
        if not self.settled:
            self.tracked, self.keepalive = tracked, keepalive
            self.settle(value)
            self._release()

    def failure_answered(self, failure: Any, kind: Any, state: Any) -> None:
        """It has failed at the callee; on a server thread, as what came is opened here."""
        failure = serialize.open_all(failure)
        try:
            kind, state = serialize.open_all(kind), serialize.open_all(state)
        except Exception:  # of a class that is not known here
            kind = state = None
        self.fail(error_of(failure, kind, state))

    def result(self) -> Any:
        self.open()
        return super().result()

    def open(self) -> None:
        if self.error is None and not self._opened:
            with self._opening:
                if not self._opened:
                    self._open()

    def _open(self) -> None:
        try:
            value = node_protocol.open_values(self.node, self.value)
            if self.tracked or self.context is not None:
                value = self.node.autograd.arrive(
                    self.context, value, self.callee, self.at, self.tracked
                )
            self.value = value
        except Exception as exc:
            text = f"what came as the answer to the {self.describe()} can't be opened here"
            self.value, self.error = None, DiscoError(f"{text}: {safe_str(exc)}")
            self.error.__cause__ = exc
        self._opened = True  # not if an interrupt has come: the next wait opens it then
        self.keepalive = None


class IncomingCall(Call):
    """A call from another node, at its callee.

    Attributes
    ----------
    sender, sent_number
        The node that has sent it, and its number there.
    """

    sender = sent_number = 0
    description = ""
    tracked: tuple[int, ...] = ()
    keepalive: Keepalive | None = None
    opened = False

    def describe(self) -> str:
        return self.description

    def describe_site(self) -> str:
        return str(self.site)

    def _open_call(self) -> None:
        """What came is opened on the server thread: that may run the user's code."""
        if self.opened:
            return
        self.opened = True
        keepalive, self.keepalive = self.keepalive, None
        given = node_protocol.open_values(self.node, (self.func, self.args, self.kwargs))
        self.func, args, kwargs = given
        del keepalive
        if self.tracked or self.context is not None:
            args, kwargs = self.node.autograd.arrive(
                self.context, (args, kwargs), self.caller, self.sender, self.tracked
            )
        self.args, self.kwargs = args, kwargs

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
            back, to = self.way_back, self.sender
            value, tracked = self.node.autograd.leave(back, value, self.caller, to)
        self.node.flush_output()
        try:
            self.node.send(self.sender, (node_protocol.RESULT, self.sent_number, value, tracked))
        except ArgumentError as exc:
            raise ArgumentError(
                f"what it returned can't be sent: {exc}. Or leave it there: rpc.remote gives an "
                "RRef to it"
            ) from None
        self._served()

    def refuse(self, error: DiscoError) -> None:
        if self.target is not None:
            self.target.settle(None, error)
        if not self.node.closed:
            failure = Failure.from_exception(
                self.callee, self.describe(), self.describe_site(), error
            )
            self._answer_failure(failure, type(error), {})

    def _answer_failure(self, failure: Failure, kind: Any, state: Any) -> None:
        failure.exception = None
        self.keepalive = None
        node = self.node
        if not node.closed and self.sender not in node.lost:
            node.flush_output()
            for sent in ((kind, state), (kind, None), (None, None)):
                try:
                    node.send(self.sender, (node_protocol.ERROR, self.sent_number, failure, *sent))
                    break
                except Exception:  # its class, or what it holds, can't travel
                    continue
        self._served()

    def _served(self) -> None:
        self.node.serving.pop((self.sender, self.sent_number), None)
        self.settle(None)
        self._release()


# -- what comes from other nodes, on the receiving thread ----------------------------------------


def receive_call(
    node: Node,
    sender: int,
    message: tuple[Any, ...],
    keepalive: Keepalive | None,
    feed: Callable[[IncomingCall, int], Any] | None = None,
) -> None:
    """Serve a call of another node; `feed` makes the callee's end of a stream."""
    kind, number, caller, callee, description, site, func, args, kwargs, *rest = message
    context, tracked, fork, buffer, depth = rest
    call = IncomingCall(node, kind, caller, callee, func, args, kwargs, None, site)
    call.sender, call.sent_number, call.description = sender, number, description
    call.at = node.id
    call.depth, call.tracked, call.keepalive = depth, tracked, keepalive
    node.serving[sender, number] = call
    if context is not None:
        call.context, call.follows = node.autograd.context_of(abs(context)), context > 0
    try:
        if kind == FETCH:  # it is served as soon as the value is there
            call.func, call.opened = node.references.value_of(tuple(func)), True
            pool = node.pool(callee)
            call.func.follow(lambda _: pool.submit(call))
            return
        if fork is not None:
            call.target = node.references.adopted(fork, sender, callee)
        if feed is not None:
            call.feed = feed(call, buffer)
    except BaseException as exc:
        call._failed(exc)
        return
    node.pool(callee).submit(call)


def _receive_result(
    node: Node, _: int, message: tuple[Any, ...], keepalive: Keepalive | None
) -> None:
    call = node.calls.get(message[1])
    if isinstance(call, OutgoingCall):
        call.answered(message[2], message[3], keepalive)


def _receive_error(node: Node, _: int, message: tuple[Any, ...], __: Keepalive | None) -> None:
    call = node.calls.get(message[1])
    if isinstance(call, OutgoingCall):
        node.on_pool(call.failure_answered, *message[2:])


def _receive_cancel(node: Node, sender: int, message: tuple[Any, ...], _: Keepalive | None) -> None:
    call = node.serving.get((sender, message[1]))
    if call is not None:
        call.end(message[2])


HANDLERS[CALL] = HANDLERS[FETCH] = receive_call
HANDLERS[node_protocol.RESULT] = _receive_result
HANDLERS[node_protocol.ERROR] = _receive_error
HANDLERS[node_protocol.CANCEL] = _receive_cancel
