"""Routes between nodes: what is sent arrives, in order; who may not speak; who has died."""

import ast
import contextlib
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import DiscoError, ProcessSession, Session, current_worker, make_session
from discolab.rpc.directory import ROUTE, SERVICE
from discolab.rpc.router import open_router
from discolab.runtime.serialize import Message
from discolab.runtime.services import LISTENERS
from discolab.runtime.worker import Worker
from discolab.transport import unix_sockets
from discolab.transport.handshake import say_hello, token_for
from discolab.transport.loop import PORTABLE
from discolab.transport.unix_sockets import LocalSocket, local_socket
from tests.rpc.functions import eventually
from tests.selection import slow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

KINDS = ["processes", "processes-tcp", "sockets"]
_opening = threading.RLock()


class Post:
    """A node of these tests: keeps what comes, and echoes what asks for it."""

    def __init__(self, worker: Worker) -> None:
        self.got: list[tuple[int, bytes, list[Any]]] = []
        self.lost: list[tuple[int, str, int]] = []  # with how much had come by then
        self.opened = threading.Event()
        self.router = open_router(worker, self.deliver, self.hear_of_loss)
        self.opened.set()

    def deliver(self, sender: int, body: Any, frames: list[Any]) -> None:
        self.opened.wait(10)
        body = bytes(body)
        if body.startswith(b"echo"):
            self.router.send(sender, Message(b"back" + body[4:], frames))
        elif body == b"report":
            text = repr((self.lost, [body for _, body, _ in self.got]))
            self.router.send(sender, Message(text.encode(), []))
        elif body == b"bad":
            raise RuntimeError("a fault in a handler")
        else:
            self.got.append((sender, body, frames))

    def hear_of_loss(self, node: int, obituary: str) -> None:
        self.lost.append((node, obituary, len(self.got)))

    def send(self, to: int, body: bytes, *frames: Any, later: Any = None) -> None:
        self.router.send(to, Message(body, list(frames)), later)


POSTS: list[Post] = []  # this process's


def open_here(worker: Worker) -> None:
    with _opening:
        if not POSTS:
            POSTS.append(Post(worker))


def be_ready() -> None:
    POSTS.clear()
    LISTENERS[SERVICE] = open_here


def post() -> Post:
    open_here(current_worker())
    return POSTS[0]


@contextlib.contextmanager
def session_of(kind: str, num_workers: int = 3) -> Iterator[Session]:
    """A session whose nodes are ours; none is open yet."""
    engine, _, route = kind.partition("-")
    options = {"nodes": "local:1"} if engine == "sockets" else {}
    before, hook = os.environ.pop(ROUTE, None), LISTENERS[SERVICE]
    if route:
        os.environ[ROUTE] = route
    session = make_session(num_workers, engine, devices="cpu", timeout=30, **options)
    try:
        session.call_packed(be_ready)
        session.sync_all()
        yield session
    finally:
        session.shutdown(cancel=True)
        LISTENERS[SERVICE] = hook
        POSTS.clear()
        os.environ.pop(ROUTE, None)
        if before is not None:
            os.environ[ROUTE] = before


@pytest.fixture(params=KINDS)
def three(request: pytest.FixtureRequest) -> Iterator[Session]:
    with session_of(request.param) as session:
        yield session


@pytest.fixture
def pair() -> Iterator[Session]:
    with session_of("processes", 2) as session:
        yield session


def on(session: Session, rank: int, func: Callable[..., Any], *args: Any) -> Any:
    """The result of a function that one worker runs."""

    def run() -> Any:
        return func(*args) if current_worker().rank == rank else None

    return session.call_packed(run).debug_get_from_remote(rank)


def here(session: Session) -> Post:
    """The node of this process, opened."""
    open_here(session.workers_here()[0])
    return POSTS[0]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())


def send_numbers(to: int, count: int) -> None:
    node = post()
    for number in range(count):
        node.send(to, b"%d" % number)


def got_numbers(sender: int, count: int) -> bool:
    """Waits until so many have come; whether they are in order."""
    found = post().got
    eventually(lambda: sum(who == sender for who, *_ in list(found)) >= count)
    return [int(body) for who, body, _ in found if who == sender] == list(range(count))


def stopped(pid: int) -> Callable[[], bool]:
    stat = Path(f"/proc/{pid}/stat")
    return lambda: stat.read_text().rpartition(")")[2].split()[0] == "T"


# -- what is sent arrives ------------------------------------------------------------------


def test_messages_arrive_in_order_between_all_nodes(three: Session) -> None:
    count = 3000

    def all_send_to_all() -> None:
        me = current_worker().rank
        for to in range(3):
            if to != me:
                send_numbers(to, count)

    three.call_packed(all_send_to_all)
    for rank in range(3):
        for sender in {0, 1, 2} - {rank}:
            assert on(three, rank, got_numbers, sender, count)
    near = "tcp" not in three.services["rpc"]._how()
    connection = here(three).router._peers[1].connection
    assert connection is not None
    assert connection.same_machine is near


@pytest.mark.parametrize("kind", KINDS)
def test_large_frames_arrive_as_they_were(kind: str) -> None:
    mib = 4 if "tcp" in kind else 64
    with session_of(kind, 2) as session:
        node = here(session)
        data = torch.randint(0, 255, (mib << 20,), dtype=torch.uint8)
        for turn in range(3):
            node.send(1, b"echo%d" % turn, bytes_of(data), b"small", bytes_of(data[:20_000]))
            copy = data.clone()
            data.add_(1)  # what was sent is a copy
            eventually(lambda: node.got)
            _, body, frames = node.got.pop()
            assert body == b"back%d" % turn
            assert torch.equal(torch.frombuffer(frames[0], dtype=torch.uint8), copy)
            assert bytes(frames[1]) == b"small"
            assert torch.equal(torch.frombuffer(frames[2], dtype=torch.uint8), copy[:20_000])
            del frames


@pytest.mark.parametrize("kind", ["processes", "processes-tcp"])
def test_a_message_may_have_thousands_of_frames(kind: str) -> None:
    with session_of(kind, 2) as session:
        node = here(session)
        frames = [bytes_of(torch.full((number % 7 + 1,), number)) for number in range(6000)]
        node.send(1, b"echo", *frames)
        eventually(lambda: node.got)
        assert [bytes(frame) for frame in node.got[0][2]] == [bytes(frame) for frame in frames]


def compute_until_told() -> None:
    if current_worker().rank:
        until = time.monotonic() + 20
        while not (POSTS and POSTS[0].got):
            assert time.monotonic() < until
            sum(range(1000))


def test_a_node_that_computes_and_has_never_used_rpc_opens_and_answers(three: Session) -> None:
    three.call_packed(compute_until_told)
    node = here(three)
    node.send(1, b"echo")
    node.send(2, b"echo")
    eventually(lambda: len(node.got) == 2)
    node.send(1, b"end")
    node.send(2, b"end")
    three.sync_all()


def test_memory_that_came_can_be_used_again_once_nobody_holds_it(pair: Session) -> None:
    node = here(pair)
    data = torch.ones(1 << 20)
    for _ in range(20):
        node.send(1, b"echo", bytes_of(data))
        eventually(lambda: node.got)
        node.got.clear()
    pool = node.router._peers[1].connection.pool
    eventually(lambda: pool.lent == 0)
    assert len(pool._free) < 10
    assert on(pair, 1, lambda: len(post().router._peers[0].connection.pool._lent)) < 10


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_thousands_of_large_frames_can_be_held_with_few_descriptors(pair: Session) -> None:
    node = here(pair)
    before = count_descriptors()
    for number in range(3000):
        node.send(1, b"echo", bytes_of(torch.full((5000,), number)))
    eventually(lambda: len(node.got) == 3000)
    assert count_descriptors() < before + 400
    assert on(pair, 1, count_descriptors) < before + 400
    for number, (_, _, (frame,)) in enumerate(node.got):
        assert torch.frombuffer(frame, dtype=torch.int64).eq(number).all()


def test_a_handler_that_raises_stops_nothing(
    pair: Session, capfd: pytest.CaptureFixture[str]
) -> None:
    node = here(pair)

    def send_bad() -> None:
        post().send(0, b"bad")
        post().send(0, b"good")

    on(pair, 1, send_bad)
    eventually(lambda: [body for _, body, _ in node.got] == [b"good"])
    assert "a fault in a handler" in capfd.readouterr().err


class Note:
    """What became of a message that was to be sent later."""

    def __init__(self, why: str = "") -> None:
        self.why, self.texts, self.threads = why, [], []  # type: ignore[var-annotated]

    def check(self) -> str:
        self.threads.append(threading.current_thread().name)
        return self.why

    def failed(self, text: str) -> None:
        self.texts.append(text)


@pytest.mark.parametrize("kind", ["processes", "processes-tcp"])
def test_large_messages_can_be_packed_later_and_taken_back(kind: str) -> None:
    with session_of(kind, 2) as session:
        node = here(session)
        data = torch.arange(1 << 19)
        good, bad, small = Note(), Note("it was changed"), Note("it was changed")
        node.send(1, b"echo1", bytes_of(data), later=good)
        node.send(1, b"echo2", bytes_of(data), later=bad)
        node.send(1, b"echo3", later=small)
        eventually(lambda: len(node.got) == 2 and bad.texts)
        found = {body: frames for _, body, frames in node.got}
        assert set(found) == {b"back1", b"back3"}
        assert bytes(found[b"back1"][0]) == bytes(bytes_of(data))
        assert (good.texts, bad.texts, small.threads) == ([], ["it was changed"], [])
        assert good.threads == bad.threads == ["discolab-rpc-sender-0"]


# -- peers that are slow, stopped, dead ----------------------------------------------------


@pytest.mark.parametrize("kind", ["processes", "processes-tcp"])
def test_a_stopped_peer_blocks_nobody_and_loses_nothing(kind: str) -> None:
    count, large = 50_000, 100
    with session_of(kind, 2) as session:
        node = here(session)
        node.send(1, b"echo")
        eventually(lambda: node.got)
        pid = session.processes()[1]  # type: ignore[attr-defined]
        data = torch.arange(20_000)
        os.kill(pid, signal.SIGSTOP)
        try:
            eventually(stopped(pid))
            began = time.monotonic()
            for number in range(count):
                node.send(1, b"%d" % number)
                if number < large:
                    node.send(1, b"echo%d" % number, bytes_of(data))
            assert time.monotonic() - began < 10
        finally:
            os.kill(pid, signal.SIGCONT)
        assert on(session, 1, got_numbers, 0, count)
        eventually(lambda: len(node.got) == large + 1)
        assert [body for _, body, _ in node.got[1:]] == [b"back%d" % n for n in range(large)]
        assert all(bytes(frames[0]) == bytes(bytes_of(data)) for *_, frames in node.got[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_is_told_once_to_all_and_the_others_go_on(kind: str) -> None:
    with session_of(kind) as session:
        node = here(session)
        on(session, 2, send_numbers, 0, 5)
        eventually(lambda: len(node.got) == 5)
        pid: int = on(session, 2, os.getpid)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: node.lost)
        losses, _ = report_of(node, 1, lambda losses, _: losses)
        for loss in (losses, node.lost):
            assert [rank for rank, *_ in loss] == [2]
            assert "was killed by SIGKILL" in loss[0][1]
        assert node.lost[0][2] == 5
        node.send(2, b"nobody hears this")
        assert report_of(node, 1, lambda *_: True)
        assert len(node.lost) == 1


@pytest.mark.parametrize("kind", ["processes", "processes-tcp"])
def test_what_a_dead_peer_had_sent_comes_before_its_loss(kind: str) -> None:
    count = 100  # that fit in the kernel
    with session_of(kind) as session:
        assert isinstance(session, ProcessSession)
        node, (one, two) = here(session), (session.processes()[1], session.processes()[2])
        on(session, 2, send_numbers, 1, 1)
        on(session, 1, got_numbers, 2, 1)
        os.kill(one, signal.SIGSTOP)
        try:
            eventually(stopped(one))
            session.call_packed(run_on, 2, send_numbers, 1, count)
            session.call_packed(run_on, 2, send_numbers, 0, 1)
            eventually(lambda: node.got)  # so all that was sent before is on its way
            os.kill(two, signal.SIGKILL)
            eventually(lambda: node.lost)
        finally:
            os.kill(one, signal.SIGCONT)
        losses, bodies = report_of(node, 1, lambda losses, _: losses)
        assert bodies == [b"0", *(b"%d" % number for number in range(count))]
        assert [(rank, come) for rank, _, come in losses] == [(2, count + 1)]


def run_on(rank: int, func: Callable[..., Any], *args: Any) -> None:
    if current_worker().rank == rank:
        func(*args)


def report_of(node: Post, rank: int, wanted: Callable[..., Any]) -> Any:
    """What another node has heard, once it is what is wanted; the session takes no calls then."""

    def asked() -> bool:
        node.got.clear()
        node.send(rank, b"report")
        eventually(lambda: node.got)
        return bool(wanted(*ast.literal_eval(node.got[0][1].decode())))

    eventually(asked)
    return ast.literal_eval(node.got[0][1].decode())


# -- who may not speak ---------------------------------------------------------------------
def knock(address: str, *said: bytes) -> LocalSocket:
    kind = socket.SOCK_STREAM if PORTABLE else socket.SOCK_SEQPACKET
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.settimeout(10)
    sock.connect(address)
    knocking = local_socket(sock)
    for one in said:
        knocking.send(one)
    return knocking


def is_hung_up(knocking: LocalSocket) -> bool:
    try:
        return knocking.recv() is None
    except ConnectionResetError:
        return True


def test_strangers_are_hung_up_on_and_hurt_nothing(pair: Session) -> None:
    node = here(pair)
    node.send(1, b"echo")
    eventually(lambda: node.got)
    end = node.router._local
    address, token = end.address, token_for(end._token, 0)
    hello = say_hello(token, 1)
    for said in (
        b"x",
        b"x" * 50_000,
        say_hello(bytes(32), 1),
        hello[:-1],
        hello + b"x",
        hello.replace(b"DL", b"--"),
        pickle.dumps(hello),
    ):
        with contextlib.closing(knock(address, said)) as sock:
            assert is_hung_up(sock)
    on(pair, 1, send_numbers, 0, 1)
    eventually(lambda: len(node.got) == 2)
    with contextlib.closing(knock(address, hello)) as sock:  # who knew it could be no other node
        assert is_hung_up(sock)
    crowd = [knock(address) for _ in range(200)]  # who say nothing
    assert is_hung_up(crowd[0])
    eventually(lambda: len(end.unauthenticated) <= unix_sockets.MOST_UNAUTHENTICATED)
    for sock in crowd:
        sock.close()
    eventually(lambda: not len(end.unauthenticated))
    node.send(1, b"echo")
    eventually(lambda: len(node.got) == 3)
    assert not node.lost


def test_nobody_gets_in_by_tcp_without_the_keys_and_the_token(tmp_path: Path) -> None:
    import zmq

    from discolab.transport.handshake import Keys
    from discolab.transport.tcp import set_options

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "unpickled",)

    with session_of("processes-tcp", 2) as session:
        node = here(session)
        node.send(1, b"echo")
        eventually(lambda: node.got)
        end = node.router._tcp
        endpoint, bomb = end.server.endpoint, pickle.dumps(Bomb())
        token = token_for(end.token, 0)
        ours, other = end.keys.as_dict(), Keys.fresh().as_dict()
        mixed = Keys(**{**other, "session_public": ours["session_public"]})
        on(session, 1, send_numbers, 0, 1)  # so that node 1 is connected
        eventually(lambda: len(node.got) == 2)
        firsts = (say_hello(bytes(32), 1), say_hello(token, 1), bomb)
        context = zmq.Context()
        try:
            strangers = []
            for keys in (end.keys, mixed, None):
                for first in firsts if keys is end.keys else (say_hello(token, 1),):
                    strangers.append(context.socket(zmq.DEALER))
                    if keys is not None:
                        set_options(strangers[-1], endpoint, keys, server=False)
                    strangers[-1].connect(endpoint)
                    for said in (first, b"echo: let me in", bomb):
                        strangers[-1].send(said)
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            with socket.create_connection((host, int(port)), 10) as plain:
                plain.sendall(b"\xff" * 100_000)
            node.send(1, b"echo")
            eventually(lambda: len(node.got) == 3)
            assert not any(sock.poll(50) for sock in strangers)
        finally:
            context.destroy(0)
        assert len(node.got) == 3
        assert not node.lost
        assert not (tmp_path / "unpickled").exists()


# -- forks, and the end ---------------------------------------------------------------------


def send_in_a_child() -> Any:
    answer, end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                POSTS[0].send(0, b"from a child")
                text = "it was sent"
            except DiscoError as exc:
                text = str(exc)
        finally:
            os.write(end, repr(text).encode())
            os._exit(0)
    os.close(end)
    with os.fdopen(answer, "rb") as stream:
        told = ast.literal_eval(stream.read().decode())
    os.waitpid(child, 0)
    return told


def test_a_forked_child_neither_sends_nor_keeps_connections_open(pair: Session) -> None:
    node = here(pair)
    node.send(1, b"echo")
    eventually(lambda: node.got)

    text = on(pair, 1, send_in_a_child)
    assert "forked" in text
    node.send(1, b"echo")
    eventually(lambda: len(node.got) == 2)
    assert [body for _, body, _ in node.got] == [b"back", b"back"]


@pytest.mark.parametrize("kind", ["processes", slow("processes-tcp")])
def test_nothing_is_left_when_a_session_has_ended(kind: str) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def use() -> None:
        with session_of(kind, 2) as session:
            node = here(session)
            node.send(1, b"echo", bytes_of(torch.ones(1 << 18)), later=Note())
            eventually(lambda: node.got)
            if kind == "processes":
                strangers.append(knock(node.router._local.address))  # not known when it ends

        while strangers:
            strangers.pop().close()

    strangers: list[LocalSocket] = []
    use()
    before = descriptors()
    for _ in range(3):
        use()
    eventually(lambda: descriptors() <= before)
    eventually(lambda: not [t for t in threading.enumerate() if "discolab-rpc" in t.name])


def test_the_end_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    with session_of("processes") as session:
        node = here(session)
        for rank in (1, 2):
            node.send(rank, b"echo")
        on(session, 1, send_numbers, 2, 10)
        eventually(lambda: len(node.got) == 2)
    node.send(1, b"too late")
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
