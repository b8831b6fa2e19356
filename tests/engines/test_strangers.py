"""Strangers at the port of a session: whatever they do, nothing changes for it."""

import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from discolab.engines import SocketSession
from discolab.engines.connections.tcp import REPLIES
from discolab.engines.keys import load_keys
from discolab.transport.frame import pack
from discolab.transport.handshake import Keys, say_hello
from discolab.transport.tcp import MOST_UNAUTHENTICATED, set_options
from tests.bombs import Bombs

# how zmq begins: a signature, version 3.1, the mechanism, and that we are no server
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketSession]:
    """One for all tests: each must leave it as it was."""
    before = os.environ.get("DISCOLAB_HOME")
    os.environ["DISCOLAB_HOME"] = str(tmp_path_factory.mktemp("keys"))
    made = SocketSession(2, 1, devices="cpu", timeout=20, spawn_nodes=True)
    yield made
    made.shutdown()
    del os.environ["DISCOLAB_HOME"]
    if before is not None:
        os.environ["DISCOLAB_HOME"] = before


@pytest.fixture(autouse=True)
def nothing_changes(session: SocketSession) -> Iterator[None]:
    """It works before, meanwhile and after, with the same workers, no slower, in as much memory."""
    pids, errors = session.processes(), []
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            began = time.monotonic()
            try:
                session.call_packed(os.getpid)
                session.sync_all()
            except BaseException as exc:
                errors.append(exc)
                return
            if time.monotonic() - began > 2:
                errors.append(f"a call took {time.monotonic() - began:.1f} s")
            time.sleep(0.005)

    memory = memory_in_use()
    thread = threading.Thread(target=work)
    thread.start()
    yield
    done.set()
    thread.join(30)
    assert not errors
    assert session.call_packed(os.getpid).debug_get_from_all() == [os.getpid(), pids[1]]
    assert memory_in_use() - memory < 200 << 20


def memory_in_use() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def knock(session: SocketSession, *messages: bytes, wait: float = 0.2) -> bytes:
    """Connect, say something, and hear what is answered until it hangs up, or for a moment."""
    heard = b""
    with socket.create_connection(session.address, 5) as sock:
        sock.settimeout(wait)
        try:
            for message in messages:
                sock.sendall(message)
            while more := sock.recv(65536):
                heard += more
        except OSError:
            pass
    return heard


def test_random_bytes(session: SocketSession) -> None:
    chance = random.Random(1)
    for _ in range(60):
        noise = chance.randbytes(chance.choice([1, 10, 64, 100, 5000]))
        knock(session, noise, wait=0.01)
        knock(session, GREETING, noise, wait=0.01)


def test_a_peer_without_keys_hears_nothing_of_ours(session: SocketSession) -> None:
    heard = knock(session, GREETING)
    assert len(heard) == len(GREETING)  # that it is zmq, and wants keys
    for word in (
        b"disco",
        b"torch",
        b"2.",
        socket.gethostname().encode(),
        session._transport.token,
    ):
        assert word not in heard


@pytest.mark.parametrize("size", [1 << 21, 1 << 32, 1 << 46, (1 << 63) - 1, (1 << 64) - 1])
def test_a_claim_of_a_size_gets_no_memory(session: SocketSession, size: int) -> None:
    for flags in (2, 6):  # a long message, a long command
        frame = bytes([flags]) + struct.pack(">Q", size)
        heard = knock(session, GREETING, frame, bytes(1000), wait=1)
        assert len(heard) <= len(GREETING)


@pytest.mark.parametrize("whose", ["both", "ours", "session"])
def test_the_right_handshake_with_a_wrong_key(session: SocketSession, whose: str) -> None:
    ours, other = load_keys().as_dict(), Keys.fresh().as_dict()
    names = {"both": ours, "ours": ("node_public", "node_secret"), "session": ("session_public",)}
    keys = Keys(**{name: (other if name in names[whose] else ours)[name] for name in ours})
    endpoint = session._transport.endpoint
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        set_options(sock, endpoint, keys, server=False)
        monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        sock.connect(endpoint)
        sock.send(say_hello(session._transport.token, 1, REPLIES))
        sock.send(b'{"hello": {}}')
        assert monitor.poll(5000)
        assert monitor.recv_multipart()[0][:2] == struct.pack("=H", zmq.EVENT_DISCONNECTED)
        assert not sock.poll(50)
        monitor.close(0)


def test_the_right_key_without_the_token_is_no_worker(
    session: SocketSession, tmp_path: Path
) -> None:
    bombs = Bombs(tmp_path / "unpickled")
    packed = [pack(*parts).data for bomb in bombs for parts in ((bomb,), (b"", [bomb]))]
    endpoint = session._transport.endpoint
    with zmq.Context() as context:
        for join in (
            say_hello(bytes(32), 1, REPLIES),
            say_hello(session._transport.token, 1, REPLIES),  # is there already
            say_hello(session._transport.token, 1, 9),
        ):
            with context.socket(zmq.DEALER) as sock:
                set_options(sock, endpoint, load_keys(), server=False)
                sock.connect(endpoint)
                sock.send(join)
                for said in (b"\0" * 50, *bombs, *packed):
                    sock.send(said)
                assert not sock.poll(100)
        with context.socket(zmq.DEALER) as sock:
            set_options(sock, endpoint, load_keys(), server=False)
            sock.connect(endpoint)
            for said in (*bombs, *packed):
                sock.send(said)
            assert not sock.poll(100)
    bombs.check()


def test_a_replayed_connection(session: SocketSession) -> None:
    """All that a node with the right keys has said, said once more."""
    said, server = [], socket.create_server(("127.0.0.1", 0))

    def pass_on() -> None:
        one, _ = server.accept()
        other = socket.create_connection(session.address)

        def back() -> None:
            try:
                while data := other.recv(65536):
                    one.sendall(data)
            except OSError:
                pass

        answers = threading.Thread(target=back, daemon=True)
        answers.start()
        with one, other:
            while data := one.recv(65536):
                said.append(data)
                other.sendall(data)
            other.shutdown(socket.SHUT_RDWR)
            answers.join(5)

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        set_options(sock, endpoint, load_keys(), server=False)
        sock.connect(endpoint)
        sock.send(b'{"hello": {"name": "once"}}')
        assert b"refused" in sock.recv()
    thread.join(5)
    server.close()
    refused = len(session._nodes.refused())
    assert len(b"".join(said)) > 300
    heard = knock(session, *said, wait=0.5)
    assert b"refused" not in heard
    assert len(session._nodes.refused()) == refused


def test_a_thousand_silent_connections(session: SocketSession) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4000:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4000, hard), hard))
    strangers = []
    try:
        before = len(os.listdir("/proc/self/fd"))
        for number in range(1000):
            sock = socket.create_connection(session.address, 5)
            strangers.append(sock)
            if number % 2:
                sock.sendall(GREETING)
        deadline = time.monotonic() + 5
        while True:
            held = len(os.listdir("/proc/self/fd")) - before - len(strangers)
            if held <= MOST_UNAUTHENTICATED + 20 or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        assert held <= MOST_UNAUTHENTICATED + 20
        # and who has the keys still comes in
        endpoint = session._transport.endpoint
        with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
            set_options(sock, endpoint, load_keys(), server=False)
            sock.connect(endpoint)
            sock.send(b'{"hello": {"name": "x"}}')
            assert sock.poll(5000)
    finally:
        for sock in strangers:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
