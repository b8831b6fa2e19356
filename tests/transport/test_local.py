"""Connections within one machine, as this system has them and in the way that all systems have."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from discolab.transport import frame, unix_sockets
from discolab.transport import loop as loops
from discolab.transport.frame import Frame, pack, unpack
from discolab.transport.handshake import say_hello, token_for
from discolab.transport.loop import PORTABLE, EventLoop
from discolab.transport.unix_sockets import (
    LocalConnection,
    LocalPort,
    LocalSocket,
    connect,
    local_socket,
    socket_pair,
)
from tests.bombs import Bombs

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs unix sockets")


TOKEN = bytes(range(32))


@pytest.fixture(params=["native", "portable"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "portable":
        for module in (loops, frame, unix_sockets):
            monkeypatch.setattr(module, "PORTABLE", True)
        monkeypatch.setattr(unix_sockets, "_KIND", socket.SOCK_STREAM)
    elif PORTABLE:
        pytest.skip("this system has the portable way only")


@pytest.fixture
def pair() -> Iterator[tuple[LocalSocket, LocalSocket]]:
    ends = socket_pair()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.close()


def turn_until(loop: EventLoop, ready: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < deadline
        loop.turn(0.01)


def test_messages_stay_whole_and_in_order(pair: tuple[LocalSocket, LocalSocket]) -> None:
    sent = [bytes([n % 256]) * (n * 37 % 60_000 + 1) for n in range(500)]

    def send() -> None:
        for data in sent:
            pair[0].send(data)
        pair[0].close()

    thread = threading.Thread(target=send)
    thread.start()
    received = []
    while (found := pair[1].recv()) is not None:
        received.append(found[0])
    thread.join()
    assert received == sent


def test_descriptors_travel_with_their_message(pair: tuple[LocalSocket, LocalSocket]) -> None:
    for count in (0, 1, 5, 0, 2):
        pipes = [os.pipe() for _ in range(count)]
        pair[0].send(b"%d" % count, [end for _, end in pipes])
        found = pair[1].recv()
        assert found is not None
        data, fds = found
        assert (data, len(fds)) == (b"%d" % count, count)
        for (out, end), fd in zip(pipes, fds, strict=True):
            assert not os.get_inheritable(fd)
            os.write(fd, b"x")
            assert os.read(out, 9) == b"x"
            for each in (out, end, fd):
                os.close(each)


def test_an_end_that_is_not_read_blocks_nobody_and_loses_nothing(
    pair: tuple[LocalSocket, LocalSocket], loop: EventLoop
) -> None:
    connection = LocalConnection(loop, pair[0])
    before = len(os.listdir("/dev/fd"))
    sent = [(b"%d" % n, [bytes([n % 256]) * (20_000 if n % 3 else 10)]) for n in range(3000)]
    for body, parts in sent:
        connection.send(pack(body, parts, shared=True))
    assert (
        len(os.listdir("/dev/fd")) < before + 2 * unix_sockets.MOST_HELD + 600
    )  # some are on their way
    received: list[Any] = []
    reader = LocalConnection(loop, pair[1], lambda: received.append(unpack(*reader.receive())))  # type: ignore[misc]
    turn_until(loop, lambda: len(received) == len(sent))
    assert [(bytes(body), [bytes(part) for part in parts]) for body, parts in received] == sent
    reader.close()
    connection.close()
    connection.send(Frame(b"swallowed"))


def test_the_end_of_a_connection_comes_after_what_was_said(
    pair: tuple[LocalSocket, LocalSocket],
) -> None:
    pair[0].send(b"last")
    pair[0].close()
    found = pair[1].recv()
    assert found is not None
    assert found[0] == b"last"
    assert pair[1].recv() is None


def test_who_does_not_know_the_token_is_hung_up_on_and_nothing_is_unpickled(
    loop: EventLoop, tmp_path: Path
) -> None:
    came: list[Any] = []
    port = LocalPort(loop, 0, 5, TOKEN, lambda *arrived: came.append(arrived))
    token = token_for(TOKEN, 0)
    bombs = Bombs(tmp_path / "unpickled")
    hello = say_hello(token, 3, 1)
    kind = socket.SOCK_STREAM if unix_sockets.PORTABLE else socket.SOCK_SEQPACKET
    for said in (
        b"",
        b"x",
        *bombs,
        *(pack(bomb).data for bomb in bombs),
        say_hello(bytes(32), 3),
        hello[:-1],
        hello + bombs[1],
    ):
        with socket.socket(socket.AF_UNIX, kind) as raw:
            raw.connect(port.address)
            knocking = local_socket(raw)
            if said:
                knocking.send(said)
                knocking.send(bombs[1])
            else:
                raw.shutdown(socket.SHUT_WR)
            raw.settimeout(0)
            turn_until(loop, lambda k=knocking: is_hung_up(k))  # type: ignore[misc]
    assert not came
    bombs.check()
    made = connect(port.address, token, 3)
    made.send(b"well")
    turn_until(loop, lambda: came)
    assert came[0][:2] == (3, b"well")
    port.close()
    with pytest.raises((ConnectionRefusedError, FileNotFoundError)):
        connect(port.address, token, 3)
    made.close()


def test_recorded_traffic_gets_in_nowhere(loop: EventLoop) -> None:
    """All that node 3 has said to node 0, said once more: there, and to another node."""
    came: list[Any] = []
    ports = [LocalPort(loop, n, 5, TOKEN, lambda *arrived: came.append(arrived)) for n in (0, 1)]
    client = connect(ports[0].address, token_for(TOKEN, 0), 3)
    hello, traffic = say_hello(token_for(TOKEN, 0), 3), [pack(b"one").data, pack(b"two").data]
    for data in traffic:
        client.send(data)
    turn_until(loop, lambda: len(came) == 2)

    def replay(port: LocalPort) -> None:
        kind = socket.SOCK_STREAM if unix_sockets.PORTABLE else socket.SOCK_SEQPACKET
        with socket.socket(socket.AF_UNIX, kind) as raw:
            raw.connect(port.address)
            knocking = local_socket(raw)
            for data in (hello, *traffic):
                knocking.send(data)
            raw.settimeout(0)
            turn_until(loop, lambda: is_hung_up(knocking))

    replay(ports[0])
    replay(ports[1])
    client.send(pack(b"three").data)
    turn_until(loop, lambda: len(came) == 3)
    client.close()
    turn_until(loop, lambda: ports[0]._incoming[3].closed)
    replay(ports[0])
    assert len(came) == 3
    for port in ports:
        port.close()


def is_hung_up(knocking: LocalSocket) -> bool:
    try:
        return knocking.recv() is None
    except BlockingIOError:
        return False
    except OSError:
        return True


PROGRAM = """
import torch, discolab
from discolab import rpc
from discolab.transport.loop import PORTABLE

def which():
    from discolab.transport.loop import PORTABLE
    return PORTABLE

def ask():
    if discolab.current_worker().rank == 1:
        ones = torch.ones(1 << 21)
        for _ in range(5):
            found = rpc.rpc_sync(2, torch.add, (ones, ones))
        return float(found.sum())

with discolab.make_session(3, "processes", devices="cpu", timeout=60) as sess:
    assert sess.call_packed(which).debug_get_from_all() == [True] * 3
    big = sess.call_packed(torch.arange, 1 << 20)
    assert torch.equal(big.debug_get_from_remote(2), torch.arange(1 << 20))
    for n in range(200):
        assert sess.call_packed(abs, torch.full((n,), -n)).debug_get_from_remote(1).sum() == n * n
    assert sess.call_packed(ask).debug_get_from_remote(1) == 2.0 * (1 << 22) / 2
print("well")
"""


def test_a_session_and_rpc_run_on_what_all_systems_have(tmp_path: Path) -> None:
    if unix_sockets.PORTABLE and not PORTABLE:
        return  # once is enough
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "DISCOLAB_TRANSPORT": "portable", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "well\n", done.stderr
