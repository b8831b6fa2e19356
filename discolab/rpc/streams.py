"""Streams: what a generator on one rank yields, iterated on another.

The generator runs on a callee's thread, at most `buffer` items ahead of who takes them. Within a
node the two ends share memory; between nodes items and credits are messages. `_lock` of a
`FeedOut` guards `_room`. `_items` of an `Inbox` is a deque with one taker; who puts something in it
wakes the taker after. A `Stream` is the taker's handle: what is under way does not hold it,
so that a stream that nobody holds ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..runtime.errors import ArgumentError, DiscoError
from . import messages
from .autograd import crossing
from .calls import STREAM, Call
from .far_calls import CallIn
from .names import in_words
from .outcome import look_for, waiter, whole

if TYPE_CHECKING:
    from .node import Node
    from .reference_records import Brought

MOST_BUFFERED = 1 << 16


class FeedOut:
    """The callee's end.

    Attributes
    ----------
    buffer
        How many items may be under way at once.
    """

    def __init__(self, call: Call, buffer: int) -> None:
        self._call = call
        self.buffer = buffer
        self._room = buffer
        self._lock = threading.Lock()
        self._sleeper: Any = None

    def pump(self, iterable: Iterable[Any]) -> None:
        """Send all items; on the callee's thread, which is interrupted when nobody wants more."""
        call = self._call
        if not isinstance(iterable, Iterable):
            raise TypeError(
                f"the function of a stream returns a generator or another iterable, "
                f"{call.words()} returned a {type(iterable).__name__}"
            )
        iterator = iter(iterable)
        try:
            while True:
                if self._room <= 0:
                    self._await_room()
                try:
                    item = next(iterator)
                except StopIteration:
                    return
                with self._lock:
                    self._room -= 1
                self._put(item)
        finally:
            close = getattr(iterator, "close", None)
            on = call.running_on
            if close is not None:
                if on is not None:
                    on.forgive()  # or each wait in its `finally` would be interrupted
                close()

    def _await_room(self) -> None:
        def ready() -> bool:
            return self._room > 0

        if not look_for(ready):
            me = self._sleeper = waiter()
            me.wait_for(ready, _Taker())

    def _put(self, item: Any) -> None:
        call = self._call
        here = not isinstance(call, CallIn)
        item, tracked = crossing.leave(call.node, call.context, item, call.caller, here)
        if isinstance(call, CallIn):
            call.node.mail.say(call.sender, (messages.ITEM, call.from_number, item, tracked))
        else:
            call.feed.put(item)

    def wanted(self, more: int) -> None:
        """The taker has taken so many."""
        with self._lock:
            self._room += more
        sleeper = self._sleeper
        if sleeper is not None:
            sleeper.wake()


class _Taker:
    """What a callee waits for whose stream is full."""

    parks = True  # see pool.py

    def __str__(self) -> str:
        return "the taker of a stream"


class Inbox:
    """The caller's end: where items lie until they are taken.

    Attributes
    ----------
    call
        Set before the call is sent.
    closed
        Nobody will take anything any more.
    """

    def __init__(self, node: Node, buffer: int) -> None:
        self.buffer = buffer
        self.call: Call
        self.closed = False
        self._node = node
        # as they came, or, within the node, with nothing
        self._items: deque[tuple[Any, tuple[int, ...] | None, Brought | None]] = deque()
        self._out: FeedOut | None = None  # the other end, within a node

    def pump(self, iterable: Iterable[Any]) -> None:
        """Of a call within the node, on the callee's thread: see `FeedOut`."""
        self._out = FeedOut(self.call, self.buffer)
        self._out.pump(iterable)

    def put(self, item: Any) -> None:
        """An item has come, within the node."""
        self._items.append((item, None, None))
        self.call.wake_sleepers()

    def came(self, item: Any, tracked: tuple[int, ...], brought: Brought | None) -> None:
        """An item has come from another node; on the receiving thread."""
        if not self.closed:
            self._items.append((item, tracked, brought))
            self.call.wake_sleepers()

    def ready(self) -> bool:
        """Whether there is an item, or the stream is over."""
        return bool(self._items) or self.call.settled or self.closed

    def take(self) -> Any:
        """The next item; raises `IndexError` if there is none."""
        item, tracked, brought = self._items.popleft()  # here alone
        call, node = self.call, self._node
        if not call.settled:
            if self._out is not None:
                self._out.wanted(1)
            elif not node.is_here(call.callee):
                node.mail.say(node.node_of(call.callee), (messages.CREDIT, call.number, 1))
        if tracked is None:
            return item
        try:
            item = messages.opened_here(node, item)
            del brought
            return crossing.arrive(node, call.context, item, call.callee, False, tracked)
        except Exception as exc:
            self.close("an item can't be opened")
            raise DiscoError(
                f"an item of the stream of {call.words()} can't be opened here: {exc}"
            ) from exc

    def dropped(self) -> None:
        """Nobody holds the `Stream` any more."""
        if not self.closed:
            self.close("nobody holds the stream")

    def close(self, why: str) -> None:
        """End it."""
        with whole():
            self.closed = True
            self.call.wake_sleepers()
            self.call.end(why)
            self._node.forget_call(self.call.number)
            self._items.clear()


class Stream(Iterator[Any]):
    """What comes of a call of `stream`, item by item; `close` ends it at the callee too."""

    def __init__(self, inbox: Inbox, timeout: float | None) -> None:
        self._inbox = inbox
        self._timeout = timeout
        self._over = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        inbox, call = self._inbox, self._inbox.call
        if not inbox.ready() and not look_for(inbox.ready):
            try:
                call.sleep_until(
                    inbox.ready, f"an item of the stream of {call.words()}", self._timeout
                )
            except BaseException as exc:
                self._end(str(exc) or "its taker has left")
                raise
        try:
            with whole():
                return inbox.take()
        except IndexError:
            pass
        except DiscoError:
            self._over = True
            raise
        except BaseException:  # what it has taken is lost: without that it would go on unnoticed
            self._end("its taker has left")
            raise
        self._over = True
        if inbox.closed:  # on another thread
            raise StopIteration
        inbox.closed = True
        call.result()
        raise StopIteration

    def close(self) -> None:
        """Take no more: the generator at the callee is closed."""
        if not self._over:
            self._end("its taker has closed the stream")

    def _end(self, why: str) -> None:
        self._over = True
        self._inbox.close(why)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        call = self._inbox.call
        over = ", over" if self._over else ""
        return f"<stream from {in_words(call.callee)}, {call.words()}{over}>"


def stream(
    node: Node, rank: int, to: Any, func: Any, args: Any, kwargs: Any, timeout: Any, buffer: Any
) -> Stream:
    """Begin a stream."""
    if not isinstance(buffer, int) or isinstance(buffer, bool) or not 1 <= buffer <= MOST_BUFFERED:
        raise ArgumentError(f"buffer is a number of items, 1 to {MOST_BUFFERED}, got {buffer!r}")
    inbox = Inbox(node, buffer)
    seconds = node.seconds(timeout, rank)
    with whole():  # or nobody would hold the stream, and it would go on
        node.start(STREAM, rank, to, func, args, kwargs, timeout, feed=inbox)
        made = Stream(inbox, seconds)
        node.holdings.when_dropped(made, inbox.dropped)
        return made
