"""A node: one process of a session, in which some ranks live, and what is under way there.

On threads there is one node with everybody. Else node 0 has the controller and worker 0, node r has
worker r. Within a node calls pass by reference; to other nodes they go by `mail` (mail.py).

`lock` guards the pools, the fates of nodes, and what `holdings` has. Of `calls` single operations
are used, which need no lock. `peer_lost` is called on the router's receiving thread.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from ..runtime.controller import call_site, check_timeout
from ..runtime.errors import ArgumentError, SessionError, session_closed
from ..runtime.worker import Worker
from . import messages
from .autograd import contexts, crossing
from .calls import PLAIN, Call
from .errors import WorkerLostError, session_over
from .far_calls import CallOut
from .here import Place, bind_place
from .holdings import Holdings
from .keeper import Keeper
from .mail import Mail
from .names import CONTROLLER, rank_of
from .outcome import whole
from .pool import Pool, depth_here
from .queues import DEEPEST
from .values import Value

DEFAULT_TIMEOUT = 60.0  # seconds, as in PyTorch RPC


class Node:
    """See the module.

    Parameters
    ----------
    id
        0 for the controller's process, else the rank of the worker.
    workers
        Those of this process, by rank.
    num_workers
        The world size.

    Attributes
    ----------
    controller_timeout
        Seconds for calls of the controller that say nothing; workers' have `DEFAULT_TIMEOUT`.
    calls
        Those that were made here and are under way, by their numbers.
    lost
        What became of nodes that have died.
    on_lost
        Called with a node that has died, after all that it sent was taken in.
    handlers
        By kind, what is called with the sender and the contents of a `post`; on the receiving
        thread, so it must be quick.
    """

    def __init__(self, id: int, workers: Mapping[int, Worker], num_workers: int) -> None:
        self.id = id
        self.num_workers = num_workers
        self.workers = dict(workers)
        self.alone = len(workers) == num_workers
        self.lock = threading.RLock()
        self.closed = False
        self.controller_timeout = DEFAULT_TIMEOUT
        self.lost: dict[int, str] = {}
        self.on_lost: list[Callable[[int], None]] = []
        self.handlers: dict[str, Callable[[int, tuple[Any, ...]], None]] = {}
        self.mail = Mail(self)
        self.keeper = Keeper(self)
        self.holdings = Holdings(self)
        self._pools: dict[int, Pool] = {}
        self._left: set[int] = set()
        self.calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._clock = next(iter(self.workers.values())).clock  # stands while a program is paused
        self._pid = os.getpid()
        self.autograd: Any = None
        contexts.attach(self)

    # -- facts -------------------------------------------------------------------------------

    def node_of(self, rank: int) -> int:
        """On which node a rank lives."""
        return 0 if self.alone else max(rank, 0)

    def is_here(self, rank: int) -> bool:
        """Whether a rank lives on this node."""
        return self.alone or max(rank, 0) == self.id

    def ranks(self) -> list[int]:
        """Who lives here."""
        return ([CONTROLLER] if self.id == 0 else []) + sorted(self.workers)

    def now(self) -> float:
        """The time by which calls run out, in seconds."""
        return self._clock.now()

    def debug_info(self, rank: int) -> dict[str, int]:
        """Counts of what is under way as seen from a rank that lives here."""
        pool = self._pools.get(rank)
        owned = [value for value in list(self.holdings.values.values()) if value.owner == rank]
        return {
            "calls_waiting": sum(call.caller == rank for call in list(self.calls.values())),
            "calls_running": len(pool.running()) if pool is not None else 0,
            "threads": pool.threads if pool is not None else 0,
            "values_owned": len(owned),
            "references_held": self.holdings.count_held(),
        }

    # -- calls -------------------------------------------------------------------------------

    def start(
        self,
        kind: int,
        caller: int,
        to: Any,
        func: Any,
        args: Any = (),
        kwargs: Any = None,
        timeout: Any = None,
        *,
        later: bool = False,
        lend: bool = False,
        target: Value | None = None,
        target_fork: Any = None,
        feed: Any = None,
        fetches: bool = False,
        prepare: Callable[[Call], None] | None = None,
    ) -> Call:
        """Begin a call; who waits for it takes it with `Call.wait_and_take`.

        Parameters
        ----------
        later
            Nobody waits for it on a thread of his own: the keeper looks at its deadline.
        lend
            Large tensors are sent while the caller goes on; see overlap.py.
        target, target_fork
            Of a remote call: where its value goes on this node; what another one knows it by.
        prepare
            Called with the call before it begins.
        """
        self.check_open()
        if self.holdings.dropped:
            self.holdings.drain()
        callee = rank_of(to, self.num_workers)
        if kwargs is None:
            kwargs = {}
        seconds = self.seconds(timeout, caller)
        if type(args) is not tuple or type(kwargs) is not dict:
            args, kwargs = _arguments(args, kwargs)
        if not fetches and not callable(func) and not isinstance(func, str):
            raise ArgumentError(
                f"what to call is a function, or the name of a registered one, got {func!r:.80}"
            )
        here = self.is_here(callee)
        site = call_site(3)
        made = Call if here else CallOut
        call = made(self, kind, caller, callee, func, args, kwargs, seconds, site)
        call.number = number = next(self._numbers)
        call.target, call.feed, call.fetches = target, feed, fetches
        call.depth = depth_here()
        call.context = crossing.current(self)
        if feed is not None:
            feed.call = call
        if prepare is not None:
            prepare(call)
        if later and seconds is not None:
            call.due = self.now() + seconds
        simple = here and call.context is None
        try:
            with nullcontext() if simple else whole():  # half of another would leave something
                self._begin(call, here, target_fork, lend)
        except BaseException as exc:
            call.unfollow()
            if isinstance(exc, Exception):
                self.forget_call(number)
            else:  # an interrupt: it has begun
                call.give_up(late=False)
            raise
        return call

    def _begin(self, call: Call, here: bool, target_fork: Any, lend: bool) -> None:
        """Hand a call to a thread of its callee, or have it sent."""
        caller, callee, context = call.caller, call.callee, call.context
        tracked: tuple[int, ...] = ()
        if caller != callee and (call.args or call.kwargs or context is not None):
            try:
                (call.args, call.kwargs), tracked = crossing.leave(
                    self, context, (call.args, call.kwargs), callee, here
                )
            except RecursionError:
                raise ArgumentError(
                    f"an argument of the {call.words()} is nested too deep"
                ) from None
        self.calls[call.number] = call
        if here:
            self.pool(callee).submit(call)
        else:
            self.mail.call_out(call, tracked, target_fork, lend)

    def seconds(self, timeout: Any, rank: int) -> float | None:
        """The time limit that the caller of a rank means, None for no limit.

        Raises
        ------
        ArgumentError
            If it is no number of seconds.
        """
        if timeout is None:
            return self.controller_timeout if rank == CONTROLLER else DEFAULT_TIMEOUT
        found = check_timeout(timeout)
        return None if not found or math.isinf(found) else found

    def forget_call(self, number: int) -> None:
        """It is over for its caller."""
        self.calls.pop(number, None)

    def pool(self, rank: int) -> Pool:
        """The callees of a rank that lives here."""
        found = self._pools.get(rank)
        if found is None:
            with whole(), self.lock:
                found = self._pools.get(rank)
                if found is None:
                    worker = self.workers.get(rank)
                    threads = max(1, torch.get_num_threads())
                    place = Place(self, rank)
                    name = f"{self.id}-{rank}" if rank >= 0 else "controller"
                    found = Pool(
                        worker,
                        name,
                        threads,
                        lambda: bind_place(place),
                        self.keeper.hurry,
                        self.alone,
                    )
                    found.closed = self.closed or rank in self._left
                    self._pools[rank] = found
                    self.keeper.begin()
        return found

    # -- for the parts of rpc ----------------------------------------------------------------

    def post(self, to: int, kind: str, *content: Any) -> None:
        """Say something to the handler of that kind on another node, or on this one."""
        if to == self.id:
            self.mail.handle(to, kind, content)
        else:
            self.mail.say(to, (messages.POST, kind, content))

    def on_pool(self, func: Callable[..., Any], *args: Any) -> None:
        """Run a function on a callee's thread of this node; what it raises is shown as a fault."""
        rank = self.ranks()[-1]
        call = Call(self, PLAIN, rank, rank, _shown, (func, args), {}, None, None)
        call.depth = DEEPEST
        self.pool(rank).submit(call)

    def ask_node(self, to: int, func: Any, *args: Any, timeout: float | None = None) -> Any:
        """Run a function on a callee's thread of any node; a `Future`.

        Where the function returns a future, it is answered when that is done.
        """
        from .futures import call_later, run_asked

        return call_later(self, self.ranks()[-1], to, run_asked, (func, args), None, timeout)

    def relieve(self) -> bool:
        """Start threads for calls that have waited for long; whether any wait still."""
        waiting = [pool.relieve() for pool in tuple(self._pools.values())]
        return any(waiting)

    def remind(self) -> None:
        """Interrupt calls once more that were ended and go on."""
        for pool in tuple(self._pools.values()):
            pool.remind()

    def look_at_deadlines(self) -> None:
        """End the calls whose time is over, and for which nobody waits on a thread of his own."""
        now = self.now()
        for call in list(self.calls.values()):
            if call.due is not None and now > call.due and not call.settled:
                call.time_out()

    # -- deaths and the end ------------------------------------------------------------------

    def peer_lost(self, node: int, obituary: str) -> None:
        """Another node has died, and all that it sent was delivered."""
        if self.closed or node in self.lost:
            return
        self.lost[node] = obituary
        error = self.lost_error(node)
        for call in list(self.calls.values()):
            if self.node_of(call.callee) == node:
                call.settle(None, error)
                call._let_go()
        for (sender, _), served in list(self.mail.serving.items()):
            if sender == node:
                Call.end(served, f"worker {node}, which called it, has died")
        self.holdings.lost(node)
        for func in tuple(self.on_lost):
            try:
                func(node)
            except Exception:
                traceback.print_exc()  # a fault of ours

    def lost_error(self, node: int) -> WorkerLostError:
        """What is raised for a node that has died."""
        return WorkerLostError(f"{self.lost[node]}\nCalls to it, and what it owned, are gone")

    def check_lost(self, node: int) -> None:
        """Raise if a node has died."""
        if node in self.lost:
            raise self.lost_error(node)

    def check_open(self) -> None:
        """Raise if nothing can be called any more."""
        if self.closed:
            raise session_closed()
        if self._pid != os.getpid():
            raise SessionError(
                f"this process was forked from process {self._pid}, whose session it is: it can't "
                "call its workers"
            )

    def worker_left(self, rank: int) -> None:
        """A worker of this node has ended."""
        with self.lock:
            self._left.add(rank)
            last = self._left >= set(self.workers)
            pool = self._pools.get(rank)
        error = session_over()
        for call in list(self.calls.values()):
            if call.callee == rank or call.caller == rank:
                call.settle(None, error)
        if pool is not None:
            pool.close()
        if last:
            self.close()

    def is_over(self, rank: int) -> bool:
        """Whether a worker of this node has ended, or the session."""
        return self.closed or rank in self._left

    def close(self) -> None:
        """The session ends: so does all that is under way."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            pools = list(self._pools.values())
        self.keeper.end()
        error = session_over()
        for call in list(self.calls.values()):
            call.settle(None, error)
        self.calls.clear()
        for pool in pools:
            pool.close()
        if self.mail.router is not None:
            self.mail.router.close()
        self.autograd.close()
        self.holdings.clear(error)
        self.handlers.clear()
        self.on_lost.clear()


def _shown(func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        func(*args)
    except Exception:
        traceback.print_exc()


def _arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(args, list | tuple):
        raise ArgumentError(
            f"args is a tuple of arguments, got {type(args).__name__}: write args=(value,)"
        )
    if not isinstance(kwargs, Mapping):
        raise ArgumentError(f"kwargs is a dict of arguments, got {type(kwargs).__name__}")
    return tuple(args), dict(kwargs)
