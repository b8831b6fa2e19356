"""Streams: what a generator on one rank yields, iterated on another.

The generator runs on a server thread of the callee, at most `buffer` items ahead of the consumer.
Within a node the two ends share memory; between nodes items and credits are messages. `_lock` of a
`Producer` guards `_room`. `_items` of a `Consumer` is a deque with one taker; whoever appends to it
wakes the taker afterwards. A `Stream` is the taker's handle: nothing that is under way holds it, so
a stream ends when its handle is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from ..runtime.errors import ArgumentError, DiscoError
from ..runtime.failures import safe_str
from ..runtime.interrupts import plain_lock, shield
from . import node_protocol
from .calls import Call, IncomingCall, receive_call, start
from .names import format_rank
from .node import HANDLERS, Node
from .outcome import spin, waiter
from .refs.records import Keepalive

MOST_BUFFERED = 1 << 16


class Producer:
    """The callee's end; at most `buffer` items may be under way at once."""

    def __init__(self, call: Call, buffer: int) -> None:
        self._call = call
        self._room = buffer
        self._lock = plain_lock()
        self._sleeper: Any = None

    def pump(self, iterable: Iterable[Any]) -> None:
        """Send all items; on a server thread, which is interrupted when nobody wants more."""
        call = self._call
        if not isinstance(iterable, Iterable):
            raise TypeError(
                f"the function of a stream returns a generator or another iterable, "
                f"{call.describe()} returned a {type(iterable).__name__}"
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
            thread = call.running_on
            if close is not None:
                if thread is not None:
                    thread.clear_interrupt()  # or each wait in its `finally` would be interrupted
                close()

    def _await_room(self) -> None:
        def ready() -> bool:
            return self._room > 0

        if not spin(ready):
            me = self._sleeper = waiter()
            me.wait_for(ready, _Taker())

    def _put(self, item: Any) -> None:
        call = self._call
        to = call.sender if isinstance(call, IncomingCall) else call.at
        item, tracked = call.node.autograd.leave(call.way_back, item, call.caller, to)
        if isinstance(call, IncomingCall):
            call.node.notify(to, node_protocol.ITEM, call.sent_number, item, tracked)
        else:
            call.feed.put(item)

    def add_credit(self, more: int) -> None:
        """The consumer has taken some items."""
        with self._lock:
            self._room += more
        sleeper = self._sleeper
        if sleeper is not None:
            sleeper.wake()


class _Taker:
    """What a producer waits for whose buffer is full."""

    parks = True  # see pool.py

    def __str__(self) -> str:
        return "the taker of a stream"


class Consumer:
    """The caller's end: it keeps items until they are taken.

    Attributes
    ----------
    call
        Set before the call is sent.
    closed
        Nobody will take anything any more.
    """

    def __init__(self, buffer: int) -> None:
        self.buffer = buffer
        self.call: Call
        self.closed = False
        # between nodes as they came, with their tracked tensors and what keeps references alive
        self._items: deque[tuple[Any, tuple[int, ...] | None, Keepalive | None]] = deque()
        self._producer: Producer | None = None  # the other end, within a node

    def pump(self, iterable: Iterable[Any]) -> None:
        """Of a call within the node, on a server thread: see `Producer`."""
        self._producer = Producer(self.call, self.buffer)
        self._producer.pump(iterable)

    def put(self, item: Any) -> None:
        """An item has come, within the node."""
        self._items.append((item, None, None))
        self.call.wake_sleepers()

    def received(self, item: Any, tracked: tuple[int, ...], keepalive: Keepalive | None) -> None:
        """An item has come from another node; on the receiving thread."""
        if not self.closed:
            self._items.append((item, tracked, keepalive))
            self.call.wake_sleepers()

    def ready(self) -> bool:
        """Whether there is an item, or the stream is over."""
        return bool(self._items) or self.call.settled or self.closed

    def take(self) -> Any:
        """The next item; raises `IndexError` if there is none."""
        item, tracked, keepalive = self._items.popleft()  # here alone
        call = self.call
        node = call.node
        if not call.settled:
            if self._producer is not None:
                self._producer.add_credit(1)
            elif call.at != node.id:
                node.notify(call.at, node_protocol.CREDIT, call.number, 1)
        if tracked is None:
            return item
        try:
            item = node_protocol.open_values(node, item)
            del keepalive
            return node.autograd.arrive(call.context, item, call.callee, call.at, tracked)
        except Exception as exc:
            self.close("an item can't be opened")
            raise DiscoError(
                f"an item of the stream of {call.describe()} can't be opened here: {safe_str(exc)}"
            ) from exc

    def dropped(self) -> None:
        """Nobody holds the `Stream` any more."""
        if not self.closed:
            self.close("nobody holds the stream")

    def close(self, why: str) -> None:
        """End it."""
        with shield():
            self.closed = True
            self.call.wake_sleepers()
            self.call.end(why)
            self.call.forget()
            self._items.clear()


class Stream(Iterator[Any]):
    """What comes of a call of `stream`, item by item; `close` ends it at the callee too."""

    def __init__(self, consumer: Consumer, timeout: float | None) -> None:
        self._consumer = consumer
        self._timeout = timeout
        self._over = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        consumer, call = self._consumer, self._consumer.call
        if not consumer.ready() and not spin(consumer.ready):
            try:
                call.sleep_until(
                    consumer.ready, f"an item of the stream of {call.describe()}", self._timeout
                )
            except BaseException as exc:
                self._end(str(exc) or "its taker has left")
                raise
        try:
            with shield():
                return consumer.take()
        except IndexError:
            pass
        except DiscoError:
            self._over = True
            raise
        except BaseException:  # what it has taken is lost: without that it would go on unnoticed
            self._end("its taker has left")
            raise
        self._over = True
        if consumer.closed:  # on another thread
            raise StopIteration
        consumer.closed = True
        call.result()
        raise StopIteration

    def close(self) -> None:
        """Take no more: the generator at the callee is closed."""
        if not self._over:
            self._end("its taker has closed the stream")

    def _end(self, why: str) -> None:
        self._over = True
        self._consumer.close(why)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        call = self._consumer.call
        over = ", over" if self._over else ""
        return f"<stream from {format_rank(call.callee)}, {call.describe()}{over}>"


def stream(
    node: Node,
    rank: int,
    to: Any,
    func: Any,
    args: Any,
    kwargs: Any,
    timeout: Any,
    buffer: Any,
    at: int | None = None,
) -> Stream:
    """Begin a stream."""
    if not isinstance(buffer, int) or isinstance(buffer, bool) or not 1 <= buffer <= MOST_BUFFERED:
        raise ArgumentError(f"buffer is a number of items, 1 to {MOST_BUFFERED}, got {buffer!r}")
    consumer = Consumer(buffer)
    seconds = node.seconds(timeout, rank)
    with shield():  # or nobody would hold the stream, and it would go on
        kind = node_protocol.STREAM
        start(node, rank, to, func, args, kwargs, timeout, kind=kind, feed=consumer, at=at)
        made = Stream(consumer, seconds)
        node.references.when_dropped(made, consumer.dropped)
        return made


# -- what comes from other nodes, on the receiving thread ----------------------------------------


def _receive_item(
    node: Node, _: int, message: tuple[Any, ...], keepalive: Keepalive | None
) -> None:
    call = node.calls.get(message[1])
    if isinstance(call, Call) and isinstance(call.feed, Consumer):
        call.feed.received(message[2], message[3], keepalive)


def _receive_credit(node: Node, sender: int, message: tuple[Any, ...], _: Keepalive | None) -> None:
    call = node.serving.get((sender, message[1]))
    if isinstance(call, IncomingCall) and isinstance(call.feed, Producer):
        call.feed.add_credit(message[2])


HANDLERS[node_protocol.STREAM] = partial(receive_call, feed=Producer)
HANDLERS[node_protocol.ITEM] = _receive_item
HANDLERS[node_protocol.CREDIT] = _receive_credit
