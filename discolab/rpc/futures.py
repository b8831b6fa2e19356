"""Futures of calls: torch's own, with waits that can be interrupted.

The callee's thread completes a future, which runs its callbacks; if the callee is on another node,
a thread of the caller's rank does. `wait` waits for the call itself, never for callbacks.
`_completing` guards `_completed`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..runtime.actions import function_text
from ..runtime.controller import check_timeout
from ..runtime.errors import ArgumentError, DiscoError
from ..runtime.interrupts import Count, plain_lock
from ..runtime.worker import bind_thread, current_worker_or_none
from .calls import Call, start
from .node import Node, Place, bind_place, bound_place
from .outcome import Outcome, copy_of
from .pool import Chore


class _Own(Outcome):
    """Of a future that somebody completes by hand."""

    __slots__ = ()

    def __str__(self) -> str:
        return "a future that nobody has completed yet"


class Future(torch.futures.Future):  # type: ignore[type-arg]
    """What a call will give: a `torch.futures.Future`.

    `then`, `add_done_callback`, `done` and `value` are torch's. A callback runs as the rank that
    has made the call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._completing = plain_lock()
        self._completed = False
        self._outcome: Outcome = _Own()
        self._node: Node | None = None

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the result; can be interrupted.

        Parameters
        ----------
        timeout
            Seconds for this wait, None for none of its own: the call's deadline ends it too. The
            call goes on after it, and may be waited for again.

        Raises
        ------
        WaitTimeoutError
            At the deadline; and whatever the call has raised.
        """
        seconds = check_timeout(timeout)
        outcome = self._outcome
        if not outcome.settled:
            outcome.wait(outcome, seconds)
        return outcome.result()

    def value(self) -> Any:
        """What came, of a call that is done."""
        outcome = self._outcome
        if not outcome.settled:
            raise RuntimeError("this future is not done yet: wait() for it")
        return outcome.result()

    def done(self) -> bool:
        """Whether the call is over."""
        return self._outcome.settled

    def cancel(self) -> bool:
        """End the call at the callee; whether it was still under way."""
        call = self._outcome
        if not isinstance(call, Call) or call.settled:
            return False
        call.heard = True
        call.abort(DiscoError(f"the {call.describe()} was cancelled"))
        return True

    def __repr__(self) -> str:
        outcome = self._outcome
        state = "waiting" if not outcome.settled else "failed" if outcome.error else "done"
        what = f" of {outcome}" if isinstance(outcome, Call) else ""
        return f"<Future{what}: {state}>"

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call ``callback(this future)`` once this is done."""
        self._outcome.heard = True
        super().add_done_callback(callback)

    def then(self, callback: Callable[[Any], Any]) -> Future:
        """A future of what ``callback(this future)`` returns, which is called when this is done."""
        after = Future()
        after._node = self._node

        def go_on(_: Any) -> None:
            try:
                after.set_result(callback(self))
            except BaseException as exc:  # raised where it is waited for
                after.set_exception(copy_of(exc))  # its frames hold `after`
                after._note_failure()

        self.add_done_callback(go_on)
        return after

    def set_result(self, result: Any) -> None:
        """Complete a future of one's own; raises a `RuntimeError` if it is done."""
        self._check_own()
        self._outcome.settle(result)
        super().set_result(result)

    def set_exception(self, result: BaseException) -> None:
        """Complete a future of one's own with an error; raises a `RuntimeError` if it is done."""
        if not isinstance(result, BaseException):
            raise ArgumentError(f"set_exception takes an exception, got {result!r:.80}")
        self._check_own()
        self._outcome.settle(None, result)
        self._fail_in_torch(copy_of(result))

    def _fail_in_torch(self, error: BaseException) -> None:
        """Complete torch's future with an error, as its own `set_exception` does."""

        def raise_it(result: BaseException) -> None:
            raise result

        super()._set_unwrap_func(raise_it)
        super().set_result(error)

    def _check_own(self) -> None:
        if isinstance(self._outcome, Call):
            raise RuntimeError("this is the future of a call, which completes it: make a Future()")
        if self._outcome.settled:
            raise RuntimeError("this future is done already")

    def _note_failure(self) -> None:
        """It has failed: the node logs that if nobody asks for it."""
        if self._node is not None and not self._outcome.heard:
            self._node.failed.append((weakref.ref(self), self._outcome))

    def _follow(self, call: Call) -> None:
        self._outcome, self._node = call, call.node
        call.follow(self._settled)

    def _settled(self, call: Call) -> None:
        node = call.node
        if call.error is not None:
            self._note_failure()
        if call.at == node.id or node.closed:
            self._complete()
        else:  # the receiving thread neither opens values nor runs callbacks
            node.pool(call.caller).submit(Chore(self._complete))

    def _complete(self) -> None:
        """Complete torch's future, which runs the callbacks."""
        call = self._outcome
        assert isinstance(call, Call)
        with self._completing:
            if self._completed:
                return
            self._completed = True
        place, worker = bound_place(), current_worker_or_none()
        bind_place(Place(call.node, call.caller))
        bind_thread(call.node.workers.get(call.caller))
        try:
            call.open()
            if call.error is not None:
                self._fail_in_torch(copy_of(call.error))
            else:
                super().set_result(call.value)
        finally:
            bind_place(place)
            bind_thread(worker)


def call_later(
    node: Node,
    rank: int,
    to: Any,
    func: Any,
    args: Any,
    kwargs: Any,
    timeout: Any,
    lend: bool = False,
    at: int | None = None,
) -> Future:
    """Begin a call; a future of what it gives."""
    future = Future()
    start(
        node,
        rank,
        to,
        func,
        args,
        kwargs,
        timeout,
        later=True,
        lend=lend,
        prepare=future._follow,
        at=at,
    )
    return future


class _All(Outcome):
    """Of several outcomes: settled once all are, or as soon as one has failed, with its error."""

    __slots__ = ("_done", "_of")

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__()
        self._of, self._done = outcomes, Count()
        for outcome in outcomes:
            outcome.follow(self._one_settled)
        if not outcomes:
            self.settle(None)

    def _one_settled(self, outcome: Outcome) -> None:
        self._done.add()
        if outcome.error is not None:
            self.settle(None, outcome.error)
        elif self._done.value == len(self._of):
            self.settle(None)

    def leave(self) -> None:
        """Follow them no more: nobody waits."""
        for outcome in self._of:
            outcome.unfollow(self._one_settled)

    def __str__(self) -> str:
        done = self._done.value
        first = next((o for o in self._of if not o.settled), "the last one")
        return f"all calls ({done} of {len(self._of)} were done), next for {first}"


def wait_all(futures: Iterable[Any], timeout: float | None = None) -> list[Any]:
    """Wait for all of some futures; their results, in order.

    Parameters
    ----------
    timeout
        Seconds for all together, None for none of its own.

    Raises
    ------
    WaitTimeoutError
        At the deadline; and, as soon as one has failed, its error.
    """
    wanted = list(futures)
    seconds = check_timeout(timeout)
    for number, future in enumerate(wanted):
        if not isinstance(future, torch._C.Future):
            raise ArgumentError(f"wait_all takes futures, number {number} is {future!r:.60}")
    outcomes = [_outcome_of(future) for future in wanted]
    everything = _All(outcomes)
    try:
        everything.wait(everything, seconds)
    finally:
        everything.leave()
    everything.result()
    return [outcome.result() for outcome in outcomes]


def _outcome_of(future: Any) -> Outcome:
    """What a future waits for; a future of torch's own settles one when it is done."""
    if isinstance(future, Future):
        future._outcome.heard = True
        return future._outcome
    outcome = _OfTorch()

    def settle(done: Any) -> None:
        try:
            value = done.value()
        except Exception as exc:
            outcome.settle(None, exc)
        else:
            outcome.settle(value)

    future.add_done_callback(settle)
    return outcome


class _OfTorch(Outcome):
    """Of a future of torch's, whose own `wait` can't be interrupted."""

    __slots__ = ()

    def __str__(self) -> str:
        return "a future of torch's"


def collect_all(futures: Iterable[Any]) -> Future:
    """`torch.futures.collect_all`: a future of a list of these, done when all are.

    As soon as one fails, it fails with that error.
    """
    wanted = list(futures)
    everything = Future()
    done = Count()

    def one_done(future: Any) -> None:
        outcome = _outcome_of(future)  # settled, as the future is done
        done.add()
        try:
            if outcome.error is not None:
                everything.set_exception(copy_of(outcome.error))
            elif done.value == len(wanted):
                everything.set_result(wanted)
        except RuntimeError:  # it has failed already
            pass

    for future in wanted:
        future.add_done_callback(one_done)
    if not wanted:
        everything.set_result(wanted)
    return everything


_collect_in_torch = torch._C._collect_all


def _collect_all(futures: Any) -> Any:
    """What `torch.futures.collect_all` and `wait_all` call.

    Torch's own looks for errors where only its C++ code can put them. For it a `Future` that has
    failed holds its error as a value.
    """
    wanted = list(futures)
    ours = any(isinstance(future, Future) for future in wanted)
    return collect_all(wanted) if ours else _collect_in_torch(wanted)


torch._C._collect_all = _collect_all


def async_execution(func: Any) -> Any:
    """Mark a function that returns a `Future`: a call of it is answered when that is done.

    Meanwhile no thread waits for it at the callee.
    """
    func.rpc_async_execution = True
    return func


def ask_node(node: Node, to: int, func: Any, *args: Any) -> Future:
    """Run a function on a server thread of any node.

    Where the function returns a future, it is answered when that is done.
    """
    rank = to % node.num_workers
    return call_later(node, node.ranks()[-1], rank, run_asked, (func, args), None, None, at=to)


@async_execution
def run_asked(func: Any, args: tuple[Any, ...]) -> Any:
    """For `ask_node`: a future that `func` returns is waited for."""
    result = func(*args)
    if not isinstance(result, torch._C.Future):
        future: Any = torch.futures.Future()
        future.set_result(result)
        return future
    return result


run_asked.rpc_description = lambda func, _: f"rpc of '{function_text(func)}'"
