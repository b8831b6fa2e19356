"""Connections between machines: that an address which is another process's by now is noticed."""

import ctypes
import operator
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import zmq

from discolab.runtime.interrupts import run_steps
from discolab.transport.connection import Connection
from discolab.transport.frame import Frame
from discolab.transport.handshake import Keys, new_token
from discolab.transport.loop import EventLoop
from discolab.transport.tcp import PIECE, Joiner, TcpPort, Writer


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.close()


def turn_until(loop: EventLoop, ready: Callable[[], Any], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        loop.turn(0.01)


def turn_for(loop: EventLoop, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        loop.turn(0.01)


@pytest.mark.parametrize("first", ["to the dead", "to the new one"])
def test_what_is_for_the_dead_is_not_for_who_has_its_port(loop: EventLoop, first: str) -> None:
    token, keys = new_token(), Keys.fresh()
    came: list[tuple[int, int, bytes]] = []

    def port_of(node: int, endpoint: str = "tcp://127.0.0.1:*") -> TcpPort:
        def arrived(sender: int, data: Any, *_: Any) -> None:
            came.append((node, sender, bytes(data)))

        return TcpPort(loop, endpoint, node, token, keys, arrived)

    sender, dead = port_of(0), port_of(1)
    late = sender.connect(dead.address, 1)  # nothing was said on it so far
    dead.close()
    new = port_of(4, dead.address)
    assert new.address == dead.address
    right = sender.connect(new.address, 4)
    said: list[tuple[Connection, bytes]] = [(late, b"for node 1"), (right, b"for node 4")]
    for connection, text in said if first == "to the dead" else reversed(said):
        connection.send(Frame(text))
        turn_for(loop, 0.2)
    turn_until(loop, lambda: came)
    turn_for(loop, 0.2)
    assert came == [(4, 0, b"for node 4")]
    late.close()
    right.close()
    for port in (sender, new):
        port.close()


@pytest.mark.parametrize("size", [100, PIECE // 2, 3 * PIECE])
def test_ctrl_c_is_not_lost_where_a_message_is_dropped(size: int) -> None:
    press = partial(getattr(ctypes.CDLL(None), "raise"), signal.SIGINT)  # Python does not look yet
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            zmq.Context() as context,
            context.socket(zmq.PAIR) as end,
            context.socket(zmq.PAIR) as other,
        ):
            end.bind("inproc://here")
            other.connect("inproc://here")
            Writer(other).send(bytes(size))
            joiner, held = Joiner(), list[Any]()
            while not held:
                message = joiner.take(end, end.recv(copy=False))
                held += [message] if message is not None else []
            assert len(held[0]) == size
            del message
            with pytest.raises(KeyboardInterrupt):
                run_steps(map(operator.call, [press, held.clear]))
    finally:
        signal.signal(signal.SIGINT, before)
