"""What goes from one node to others and comes from them: calls, answers, items, counting.

Messages are made and read in messages.py; the router carries them (routes/). `deliver` is called on
the router's receiving thread, everything else on any thread. Of `serving` single operations are
used, which need no lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..runtime import serialize
from ..runtime.actions import site_text
from ..runtime.errors import SessionError
from ..runtime.failures import Failure
from . import messages
from .autograd import crossing
from .calls import STREAM, Call
from .errors import error_of
from .far_calls import CallIn, CallOut
from .outcome import whole
from .overlap import overlapping
from .streams import FeedOut

if TYPE_CHECKING:
    from .node import Node
    from .reference_records import Brought

_OPEN = 10.0  # seconds that making a router may take


class Mail:
    """See the module.

    Attributes
    ----------
    router
        None where there is one node only.
    opened
        Set once there is a router.
    serving
        The calls of other nodes that are under way here, by the node and its number.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.router: Any = None
        self.opened = threading.Event()
        self.serving: dict[tuple[int, int], CallIn] = {}

    # -- out ---------------------------------------------------------------------------------

    def call_out(self, call: Call, tracked: Any, target_fork: Any, lend: bool) -> None:
        """Send a call."""
        to = self._node.node_of(call.callee)
        context = None if call.context is None else call.context.id
        message = (
            messages.CALL,
            call.number,
            call.caller,
            call.callee,
            call.kind | (messages.FETCHES if call.fetches else 0),
            call.words(),
            site_text(call.site),
            call.func,
            call.args,
            call.kwargs,
            context,
            tracked,
            target_fork,
            None if call.feed is None else call.feed.buffer,
            call.depth,
        )
        self._node.check_lost(to)
        wait = overlapping(call, (call.args, call.kwargs)) if lend else None
        self._send(to, message, wait)
        if to in self._node.lost:  # it has died meanwhile: perhaps before the call was in the table
            call.settle(None, self._node.lost_error(to))

    def cancel(self, call: Call, why: str) -> None:
        """Have another node end a call."""
        self.say(self._node.node_of(call.callee), (messages.CANCEL, call.number, why))

    def answer(self, call: CallIn, value: Any, tracked: tuple[int, ...]) -> None:
        """Send what a call has given; raises if that can't be sent."""
        self._show_output()
        self._send(call.sender, (messages.RESULT, call.from_number, value, tracked))
        self.serving.pop((call.sender, call.from_number), None)

    def answer_failure(self, call: CallIn, failure: Failure, kind: Any, state: Any) -> None:
        """Send what went wrong in a call."""
        self.serving.pop((call.sender, call.from_number), None)
        if self._node.closed or call.sender in self._node.lost:
            return
        self._show_output()
        whole = (messages.ERROR, call.from_number, failure, kind, state)
        for message in (whole, (*whole[:4], None), (*whole[:3], None, None)):
            try:
                self._send(call.sender, message)
                return
            except Exception:  # its class, or what it holds, can't travel
                continue

    def _show_output(self) -> None:
        """What a call has printed is on its way before its answer."""
        for worker in self._node.workers.values():
            if worker.link is not None:
                worker.link.flush_waiting()

    def say(self, to: int, message: tuple[Any, ...]) -> None:
        """Send a message that nobody waits for; not to the dead, nor after the end."""
        if not self._node.closed and to not in self._node.lost:
            self._send(to, message)

    def _send(self, to: int, message: tuple[Any, ...], later: Any = None) -> None:
        """Send a message to another node; raises if something in it can't be sent."""
        if self.router is None:
            self._node.check_open()
            raise SessionError("this node has no way to others")
        forks: list[Any] = [] if later is None else later.forks
        with whole():  # the message is sent whole, or nothing of it
            try:
                near = self.router.same_gpus(to)
                packed = messages.pack(self._node, to, message, forks, near)
            except BaseException:
                self._node.holdings.undo(forks)
                raise
            self.router.send(to, packed, later)

    # -- in ----------------------------------------------------------------------------------

    def deliver(self, sender: int, body: Any, frames: Sequence[Any]) -> None:
        """Take in what has come from another node; on the receiving thread."""
        if self.router is None:
            self.opened.wait(_OPEN)  # it is just being made, and a message was faster
        message, brought = messages.unpack(self._node, sender, body, frames)
        kind = message[0]
        if kind == messages.RESULT:
            found = self._node.calls.get(message[1])
            if isinstance(found, CallOut):
                found.came(message[2], message[3], brought)
        elif kind == messages.CALL:
            self._take_call(sender, message, brought)
        elif kind == messages.REFERENCES:
            self._node.holdings.heard(sender, message[1])
        elif kind == messages.ITEM:
            found = self._node.calls.get(message[1])
            if found is not None:
                found.feed.came(message[2], message[3], brought)
        elif kind == messages.CREDIT:
            served = self.serving.get((sender, message[1]))
            if served is not None:
                served.feed.wanted(message[2])
        elif kind == messages.ERROR:
            self._node.on_pool(self._take_error, message)
        elif kind == messages.CANCEL:
            call = self.serving.get((sender, message[1]))
            if call is not None:
                Call.end(call, message[2])
        elif kind == messages.POST:
            self.handle(sender, message[1], messages.opened_here(self._node, message[2]))

    def _take_call(self, sender: int, message: tuple[Any, ...], brought: Brought | None) -> None:
        _, number, caller, callee, kind, words, site, func, args, kwargs, context, *rest = message
        tracked, fork, feed, call_depth = rest
        call = CallIn(
            self._node, kind & messages.KIND, caller, callee, func, args, kwargs, None, site
        )
        call.sender, call.from_number, call.called = sender, number, words
        call.depth = call_depth
        call.tracked, call.brought = tracked, brought
        call.fetches = bool(kind & messages.FETCHES)
        self.serving[sender, number] = call
        if context is not None:
            call.context = crossing.context_of(self._node, context)
        try:
            if call.fetches:
                self._take_fetch(call, func)
                return
            if fork is not None:
                call.target = self._node.holdings.adopted(fork, sender, callee)
            if kind & messages.KIND == STREAM:
                call.feed = FeedOut(call, feed)
        except BaseException as exc:
            call._failed(exc)
            return
        self._node.pool(callee).submit(call)

    def _take_fetch(self, call: CallIn, ref: Any) -> None:
        """Another node asks for a value: as soon as it is there."""
        value = self._node.holdings.value_of(tuple(ref))
        call.func, call.opened = value, True
        pool = self._node.pool(call.callee)
        value.follow(lambda _: pool.submit(call))

    def _take_error(self, message: tuple[Any, ...]) -> None:
        _, number, failure, kind, state = message
        call = self._node.calls.get(number)
        if call is None:
            return
        failure = serialize.open_all(failure)
        try:
            kind, state = serialize.open_all(kind), serialize.open_all(state)
        except Exception:  # of a class that is not known here
            kind = state = None
        call.settle(None, error_of(failure, kind, state))
        call._let_go()

    def handle(self, sender: int, kind: str, content: tuple[Any, ...]) -> None:
        """Give the contents of a post to who handles its kind."""
        handler = self._node.handlers.get(kind)
        if handler is not None:
            handler(sender, content)
