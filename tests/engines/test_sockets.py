"""Sessions on two nodes of this machine: starting, large messages, what is refused, the end."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from discolab import ArgumentError, DiscoError, Session, current_worker, make_session
from discolab.engines import ENGINES, SocketSession
from discolab.engines.connections.tcp import TcpTransport
from discolab.engines.keys import load_keys
from discolab.engines.membership import versions
from discolab.transport.addresses import address_towards, endpoint_of, machine_id, split_endpoint
from discolab.transport.tcp import PIECE, set_options

Make = Callable[..., Session]


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of our own."""
    monkeypatch.setenv("DISCOLAB_HOME", str(tmp_path_factory.getbasetemp() / "keys"))


@pytest.fixture
def start() -> Iterator[Make]:
    """Start sessions on this machine; they are shut down after the test."""
    made: list[Session] = []

    def start_one(num_workers: int = 4, nodes: Any = "local:2", **options: Any) -> Session:
        options = {"devices": "cpu", "timeout": 20, "start_timeout": 30, **options}
        made.append(make_session(num_workers, "sockets", nodes=nodes, **options))
        return made[-1]

    yield start_one
    for session in made:
        session.shutdown(cancel=True)


def test_a_session_on_two_nodes(start: Make) -> None:
    def tell() -> Any:
        worker = current_worker()
        assert worker.link is not None
        return worker.rank, worker.local_worker_id, os.getpid(), worker.link.host

    session = start(num_groups=2)
    told = session.call_packed(tell).debug_get_from_all()
    assert [(rank, local) for rank, local, _, _ in told] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert len({pid for _, _, pid, _ in told}) == 4
    assert told[0][2] == os.getpid()
    assert {host for *_, host in told} == {"127.0.0.1"}
    assert isinstance(session, SocketSession)
    assert session.hosts == [machine_id()] * 4
    assert [str(device) for device in session.devices] == ["cpu"] * 4


@pytest.mark.parametrize("size", [PIECE - 200, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 7])
def test_messages_of_many_sizes_both_ways(start: Make, size: int) -> None:
    session = start(2)
    data = torch.arange(size, dtype=torch.uint8)
    sent = session.call_packed(lambda x: x, data)
    assert all(torch.equal(x, data) for x in session.fetch(sent))


def test_no_key_file_no_session(start: Make, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("{}")
    file.chmod(0o644)
    with pytest.raises(DiscoError, match="chmod 600"):
        start(2, key_file=file)


def test_a_port_in_use_is_told(start: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DiscoError, match=rf"127\.0\.0\.1:{port} is in use .*port=0"):
            start(2, port=port)


def test_an_address_of_another_machine_is_told(start: Make) -> None:
    with pytest.raises(DiscoError, match=r"this machine has no address 192\.0\.2\.1"):
        start(2, host="192.0.2.1")
    with pytest.raises(DiscoError, match=r"there is no host 'nowhere\.invalid'"):
        start(2, host="nowhere.invalid")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"nodes": None}, "on how many nodes"),
        ({"nodes": 0}, "on how many nodes, .* got 0"),
        ({"nodes": "far:2"}, "on how many nodes"),
        ({"nodes": "local:"}, "on how many nodes"),
        ({"nodes": "local:3"}, "4 workers can't be divided equally over 3 nodes"),
        ({"num_groups": 3}, "3 equal groups"),
        ({"port": -1}, "port is a number"),
        ({"port": "ssh"}, "port is a number"),
        ({"host": ""}, "host is a name"),
        ({"devices": ["cpu"]}, "devices lists 1 devices for 4 workers"),
        ({"devices": "tpu"}, "tpu"),
        ({"heartbeat": 0}, "heartbeat is a number of seconds above 0"),
        ({"start_timeout": -1}, "seconds"),
    ],
)
def test_bad_arguments(start: Make, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        start(**options)


def test_disco_s_arguments() -> None:
    with SocketSession(1, 1, 1, "127.0.0.1", 0, devices="cpu") as session:
        assert (session.num_workers, session.num_nodes) == (1, 1)
        assert session.command.startswith("discolab node --connect tcp://127.0.0.1:")
    with pytest.raises(ArgumentError, match="num_nodes must be a positive integer"):
        SocketSession(0, 1)
    with pytest.raises(ArgumentError, match="num_workers_per_node"):
        SocketSession(1, True)


def test_who_is_missing_is_said_while_it_waits(
    start: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    with pytest.raises(DiscoError, match=r"2 of 4 workers did not come within 0\.5 s") as told:
        start(nodes=2, start_timeout=0.5, progress=said.append)
    assert "waiting for 2 of 4 workers; joined: nobody yet" in said
    out = capsys.readouterr().out
    assert "discolab node --connect tcp://127.0.0.1:" in out
    assert "--workers 2" in out
    assert "--key-file" in str(told.value)


def test_waiting_for_nodes_can_be_interrupted(run_python: Any) -> None:
    done = run_python(
        """
        import os, signal, threading, time
        from discolab import make_session
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            make_session(2, "sockets", nodes=2, devices="cpu", progress=lambda _: None)
        except KeyboardInterrupt:
            time.sleep(0.1)
            print([t.name for t in threading.enumerate() if t.name.startswith("discolab")])
        """
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def knock(session: SocketSession, message: dict[str, Any]) -> dict[str, Any]:
    """Say something to a session as a node; the first thing that it answers."""
    host, port = session.address
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        endpoint = f"tcp://{host}:{port}"
        set_options(sock, endpoint, load_keys(), server=False)
        sock.connect(endpoint)
        sock.send(json.dumps(message).encode())
        assert sock.poll(5000), "no answer"
        return dict(json.loads(sock.recv()))


def test_other_versions_and_late_nodes_are_refused_in_words(
    start: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    session = start(2)
    assert isinstance(session, SocketSession)
    old = {"versions": {**versions(), "torch": "1.13.0"}, "name": "oldie"}
    full = {"rank": None, "workers": 1, "launcher": "", "machine": "", "address": "", "reached": ""}
    full |= {
        "size": 0,
        "pid": 3,
        "cores": 1,
        "gpus": 0,
        "accelerator": "cuda",
        "local_rank": 0,
        "devices": None,
        **old,
    }
    assert "it has torch 1.13.0" in knock(session, {"hello": full})["refused"]
    full["versions"] = versions()
    assert "have come: " in knock(session, {"hello": full})["refused"]
    assert "is not understood" in knock(session, {"hello": old})["refused"]
    told = capsys.readouterr().err
    assert "a node was refused: node on oldie (pid 3): it has torch 1.13.0" in told
    session.sync_all()


def test_what_is_not_ours_is_passed_over(start: Make) -> None:
    session = start(2)
    assert isinstance(session, SocketSession)
    host, port = session.address
    endpoint = f"tcp://{host}:{port}"
    with zmq.Context() as context:
        for parts in ([b"x" * 100], [b"{"], [b"[]"], [b""], [b"a", b"b", b""], [b"DLJ\x01" * 9]):
            with context.socket(zmq.DEALER) as sock:
                set_options(sock, endpoint, load_keys(), server=False)
                sock.connect(endpoint)
                sock.send_multipart(parts)
                assert not sock.poll(100)
    session.sync_all()


def test_a_torn_message_takes_nothing_with_it() -> None:
    """Ctrl-C between two frames: what comes after arrives whole, at whom it is for."""
    transport = TcpTransport("tcp://127.0.0.1:*", load_keys())
    context = zmq.Context()
    try:
        nodes = []
        for name in ("a", "b"):
            sock = context.socket(zmq.DEALER)
            set_options(sock, transport.endpoint, load_keys(), server=False)
            sock.connect(transport.endpoint)
            sock.send(json.dumps({"name": name}).encode())
            deadline = time.monotonic() + 5
            said: list[Any] = []
            transport.node_said = lambda *args, said=said: said.append(args)
            while not said and time.monotonic() < deadline:
                transport.loop.turn(0.05)
            nodes.append((sock, said[0][0]))
        (a, who_a), (b, who_b) = nodes
        writer, calls = transport._server._writer, 0
        send = writer._send

        def torn(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            send(*args, **options)
            if calls == 1:
                raise KeyboardInterrupt

        writer._send = torn
        with pytest.raises(KeyboardInterrupt):
            transport.tell_node(who_a, {"lost": 1})
        transport.tell_node(who_b, {"for": "b"})
        transport.tell_node(who_a, {"for": "a"})
        assert json.loads(b.recv()) == {"for": "b"}
        assert a.recv() == b""
        assert json.loads(a.recv()) == {"for": "a"}
        assert not b.poll(50)
    finally:
        context.destroy(0)
        transport.close()


def test_a_finalizer_may_send_in_the_middle_of_a_send() -> None:
    transport = TcpTransport(f"ipc://@discolab-test-{os.getpid()}", load_keys())
    try:
        server = transport._server
        server._holder = threading.get_ident()
        server.send(b"nobody", b"")  # would wait for itself
        assert len(server._later) == 1
        server._holder = 0
        server.send(b"nobody", b"")
        assert not server._later
    finally:
        transport.close()


def test_a_dropped_session_ends_its_nodes(start: Make) -> None:
    session = make_session(2, "sockets", nodes="local:2", devices="cpu", timeout=20)
    pids = [*session.processes().values(), *session._nodes.children.pids.values()]  # type: ignore[attr-defined]
    session.call_without_result(lambda: None)
    del session
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and no zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_starting_and_stopping_leaves_nothing(start: Make) -> None:
    def facts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    start(2).shutdown()
    time.sleep(0.2)
    before, pids = facts(), []
    for _ in range(4):
        session = start(2)
        pids += [*session.processes().values(), *session._nodes.children.pids.values()]  # type: ignore[attr-defined]
        session.sync_all()
        session.shutdown()
    deadline = time.monotonic() + 5
    while (facts() > before or any(map(is_alive, pids))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert facts() <= before
    assert not any(map(is_alive, pids))


def test_what_the_machine_says_of_itself() -> None:
    assert address_towards("127.0.0.1", 5) == "127.0.0.1"
    assert endpoint_of("127.0.0.1", 0) == "tcp://127.0.0.1:*"
    assert split_endpoint("tcp://[::1]:80") == ("::1", 80)
    assert split_endpoint("a.b:1") == ("a.b", 1)
    for bad in ("tcp://a", "a:b", ":5", "tcp://a:99999"):
        with pytest.raises(ValueError, match="tcp://HOST:PORT"):
            split_endpoint(bad)


def test_the_engine_says_what_it_takes() -> None:
    import inspect

    taken = inspect.signature(ENGINES["sockets"]).parameters
    assert {"num_workers", "num_groups", "devices", "nodes", "host", "port", "key_file"} <= {*taken}
