"""Nodes as processes of their own: the command line, launchers, and every way to lose one."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from discolab import DiscoError, WaitTimeoutError
from discolab.__main__ import main
from discolab.engines import SocketSession
from discolab.engines.child_processes import Children
from discolab.engines.forkserver import the_fork_server
from discolab.engines.keys import Keys, default_file, load_keys
from discolab.transport.addresses import NO_SESSION, look_for_session

SOON = 2.0  # seconds within which a fault is to be known


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of our own."""
    monkeypatch.setenv("DISCOLAB_HOME", str(tmp_path_factory.getbasetemp() / "keys"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pair() -> Iterator[SocketSession]:
    """Two nodes on this machine with two workers each."""
    session = SocketSession(2, 2, devices="cpu", timeout=20, heartbeat=3, spawn_nodes=True)
    yield session
    session.shutdown(cancel=True)


class Command:
    """``discolab node`` as a process; its lines as they come."""

    def __init__(self, *options: str, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "discolab", "node", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environ},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def ends(self, timeout: float = 20) -> int:
        """Its exit status."""
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    def close(self) -> None:
        """End it, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def node() -> Iterator[Callable[..., Command]]:
    """Start nodes; they are ended after the test."""
    made: list[Command] = []

    def start(*options: str, **environ: str) -> Command:
        made.append(Command(*options, **environ))
        return made[-1]

    yield start
    for command in made:
        command.close()


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def eventually(holds: Callable[[], bool], seconds: float = 10) -> bool:
    """Wait for something."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and no zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """The processes that it has started, and those that they have."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                text = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            if int(text.rpartition(")")[2].split()[1]) == pid:
                found += [int(name), *children_of(int(name))]
    return found


# -- the command line ----------------------------------------------------------------------------


def test_a_launcher_s_processes_are_nodes(
    node: Callable[..., Command],
) -> None:
    load_keys()
    port = free_port()
    where = ("--connect", f"tcp://127.0.0.1:{port}")
    place = {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    first = node(*where, RANK="1", LOCAL_RANK="1", **place)
    second = node(*where, RANK="0", LOCAL_RANK="0", **place)
    session = SocketSession(3, 1, port=port, devices="cpu", timeout=20, start_timeout=60)
    try:
        pids = session.processes()
        assert pids[1] in children_of(second.process.pid)
        assert pids[2] in children_of(first.process.pid)
        session.sync_all()
    finally:
        session.shutdown()
    assert (first.ends(), second.ends()) == (0, 0)
    for command in (first, second):
        said = [line for line in command.lines if "waiting for a session" not in line]
        assert [line.partition("): ")[2] for line in said] == [
            f"joined the session at tcp://127.0.0.1:{port}",
            "the session has ended",
        ]
    assert not any(map(is_alive, pids.values()))


@pytest.mark.slow
def test_a_node_ends_with_the_controller_however_that_ends(
    node: Callable[..., Command], tmp_path: Path
) -> None:
    load_keys()
    port, ready = free_port(), tmp_path / "ready"
    command = node("--connect", f"tcp://127.0.0.1:{port}", "--workers", "2", "--devices", "cpu")
    program = f"""
import pathlib, time
from discolab.engines import SocketSession
session = SocketSession(2, 2, port={port}, devices=None, start_timeout=60)
pids = session.processes()
pathlib.Path({str(ready)!r}).write_text(" ".join(map(str, pids.values())))
session.call_packed(time.sleep, 60)
session.sync_all()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL) as controller:
        assert eventually(lambda: ready.exists() and bool(ready.read_text()), 60)
        pids = [int(pid) for pid in ready.read_text().split()]
        assert len(pids) == 3
        controller.kill()
    assert command.ends() == 1
    assert "is gone: it was ended, or the connection was cut" in command.lines[-1]
    assert eventually(lambda: not any(map(is_alive, pids)), SOON)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--wait", "0.1"], "no session at tcp://127.0.0.1:"),
        (["--connect", "nonsense"], "an address is tcp://HOST:PORT"),
        (["--devices", "cuda:0"], "there is no cuda:0"),
        (["--devices", "tpu"], "tpu"),
        (["--key-file", "/nowhere/keys"], "there is no key file /nowhere/keys"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    options: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load_keys()
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["node", "--connect", f"tcp://127.0.0.1:{free_port()}", *options]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert why in lines[0]


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", NO_SESSION),
        (b"SSH-2.0-x\r\n", NO_SESSION),
        (b"", "it closes the connection at once"),
        (None, "somebody listens there, and says nothing"),
    ],
)
def test_what_listens_may_be_something_else(says: bytes | None, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            found, _ = server.accept()
            with found:
                if says is None:
                    found.recv(1)  # until it hangs up
                found.sendall(says or b"")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert look_for_session("127.0.0.1", server.getsockname()[1], 0.3) == why
        thread.join(5)


def test_who_comes_late_or_with_other_keys_is_refused_on_both_sides(
    pair: SocketSession, capfd: pytest.CaptureFixture[str]
) -> None:
    assert why_it_ended(pair, load_keys()) == (
        f"discolab node: refused by the session at {pair._transport.endpoint}: all 2 workers that "
        f"the session wants from its nodes have come: {socket.gethostname()} (2)"
    )
    assert "have come" in capfd.readouterr().err
    ours, other = load_keys(), Keys.fresh()
    mixed = replace(ours, node_public=other.node_public, node_secret=other.node_secret)
    for keys in (other, mixed):
        assert "does not know this key file" in why_it_ended(pair, keys)
    assert "refused" not in capfd.readouterr().err
    pair.sync_all()


def why_it_ended(session: SocketSession, keys: Keys) -> str:
    """What a further node says that tries to join a session."""
    children, (text, theirs) = Children(), os.pipe()
    os.close(
        children.start(
            the_fork_server(), 1, node_settings(session._transport.endpoint, keys), theirs
        )
    )
    os.close(theirs)
    with os.fdopen(text) as stream:
        said = stream.read()
    assert eventually(lambda: bool(children.look() or children.codes))
    assert children.codes == {1: 1}
    return said.strip()


def node_settings(endpoint: str, keys: Keys, rank: int | None = None) -> dict[str, Any]:
    """For a node that the fork server is to fork."""
    return {
        "run": "discolab.engines.node_agent:run_forked",
        "node": {"connect": endpoint, "keys": keys.as_dict(), "rank": rank, "workers": 2},
        "environ": dict(os.environ),
        "path": sys.path,
        "argv": [],
        "folder": os.getcwd(),
    }


def test_a_node_may_stay_for_the_next_session() -> None:
    children, port = Children(), free_port()
    settings = node_settings(f"tcp://127.0.0.1:{port}", load_keys())
    settings["node"]["stay"] = True
    assert the_fork_server().ready(60)
    os.close(children.start(the_fork_server(), 1, settings))
    try:
        for _ in range(3):
            with SocketSession(2, 2, port=port, devices="cpu", timeout=20) as session:
                assert len(session.call_packed(os.getpid).debug_get_from_all()) == 4
        assert children.look() == {}
    finally:
        children.end()


# -- losing some of it -----------------------------------------------------------------------------


def lost(session: SocketSession, act: Callable[[], Any]) -> str:
    """What a wait says after `act`, within two seconds."""
    session.call_packed(print, "the last words")
    session.sync_all()
    session.call_packed(time.sleep, 60)
    time.sleep(0.1)
    began = time.monotonic()
    act()
    with pytest.raises(DiscoError) as told:
        session.sync_all()
    assert not isinstance(told.value, WaitTimeoutError)
    assert time.monotonic() - began < SOON
    assert "call of 'sleep'" in str(told.value)
    assert "the last words" in str(told.value)
    assert "%disco_restart" in str(told.value)
    began = time.monotonic()
    session.shutdown(cancel=True)
    assert time.monotonic() - began < 2 * SOON
    return str(told.value)


# a node that gets the processor late: it sees the connection's end, and not yet the last word
_LOOKS_LATE = """
import sys
import zmq
from discolab.__main__ import main

class Late(zmq.Poller):
    def poll(self, timeout=None):
        ready = super().poll(timeout)
        monitors = [one for one, _ in self.sockets if getattr(one, "type", None) == zmq.PAIR]
        return (monitors and zmq.zmq_poll([(monitors[0], zmq.POLLIN)], 400)) or ready

zmq.Poller = Late
sys.exit(main(["node", "--connect", sys.argv[1]]))
"""


def test_the_end_of_a_session_is_no_loss_to_a_node_that_looks_late() -> None:
    load_keys()
    port = free_port()
    program = [sys.executable, "-c", _LOOKS_LATE, f"tcp://127.0.0.1:{port}"]
    node = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        with SocketSession(2, 1, port=port, devices="cpu", timeout=20, start_timeout=60) as session:
            session.sync_all()
        said, _ = node.communicate(timeout=20)
    finally:
        node.kill()
        node.wait()
    assert node.returncode == 0, said
    assert said.endswith("the session has ended\n")


@pytest.mark.parametrize("rank", [1, 3])
def test_what_a_crashing_worker_has_printed_is_not_lost(pair: SocketSession, rank: int) -> None:
    def crash() -> None:
        if os.getpid() == pid:
            print("so far", "so good")
            os.kill(pid, signal.SIGSEGV)

    pid = pair.processes()[rank]
    pair.call_packed(crash)
    with pytest.raises(DiscoError, match=rf"worker {rank} \(pid {pid}.* by SIGSEGV") as told:
        pair.sync_all()
    assert "so far so good" in str(told.value)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_killed_worker_is_named(pair: SocketSession, rank: int) -> None:
    pid = pair.processes()[rank]
    told = lost(pair, lambda: os.kill(pid, signal.SIGKILL))
    where = f" on {socket.gethostname()}" if rank == 3 else ""
    assert f"worker {rank} (pid {pid}{where}) was killed by SIGKILL" in told


def test_a_killed_worker_whose_children_live_is_known_all_the_same(pair: SocketSession) -> None:
    def fork() -> int:
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
            os._exit(0)
        return pid

    child = pair.call_packed(fork).debug_get_from_remote(3)
    pid = pair.processes()[3]
    told = lost(pair, lambda: os.kill(pid, signal.SIGKILL))
    assert f"worker 3 (pid {pid}" in told
    assert eventually(lambda: not is_alive(child), SOON)


def test_a_worker_that_exits_is_named(pair: SocketSession) -> None:
    def leave() -> None:
        if os.getpid() == pid:
            os._exit(7)

    pid = pair.processes()[2]
    pair.call_packed(leave)
    with pytest.raises(DiscoError, match=rf"worker 2 \(pid {pid} on .*\) exited with status 7"):
        pair.sync_all()


def test_a_killed_node_is_named_and_takes_its_workers_along(pair: SocketSession) -> None:
    node, pids = pair._nodes.children.pids[-1], pair.processes()
    told = lost(pair, lambda: os.kill(node, signal.SIGKILL))
    assert re.search(rf"worker [23] \(pid \d+\) is lost: its node 1 on .* \(pid {node}\) has", told)
    assert eventually(lambda: not any(is_alive(pids[rank]) for rank in (2, 3)), SOON)


def test_a_killed_node_is_told_to_who_uses_worker_0_alone(pair: SocketSession) -> None:
    ref = pair.call_packed(int, 7)
    pair.sync_all()
    os.kill(pair._nodes.children.pids[-1], signal.SIGKILL)
    began = time.monotonic()

    def go_on() -> None:
        while time.monotonic() < began + SOON:
            ref.debug_get_from_remote(0)
            pair.call_packed(int, 1)

    with pytest.raises(DiscoError, match=r"worker [23] .*is lost: its node 1"):
        go_on()
    assert ref.debug_get_from_remote(0) == 7


def test_a_stopped_worker_is_noticed_and_may_go_on(pair: SocketSession) -> None:
    pid = pair.processes()[3]
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(DiscoError, match=rf"worker 3 \(pid {pid} .*stopped \(SIGSTOP\)"):
            pair.sync_all()
        assert time.monotonic() - began < pair.heartbeat + SOON
    finally:
        os.kill(pid, signal.SIGCONT)
    pair.sync_all()
    assert pair.call_packed(os.getpid).debug_get_from_remote(3) == pid


# -- a connection that breaks ----------------------------------------------------------------------


class Proxy:
    """A port that leads to another one, until it is cut, or lets nothing through for a while."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.target = 0
        self.sockets: list[socket.socket] = []
        self.open = threading.Event()
        self.open.set()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            while True:
                one, _ = self._server.accept()
                try:
                    other = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    one.close()
                    continue
                self.sockets += [one, other]
                for ends in ((one, other), (other, one)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()
        except OSError:
            pass

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.open.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def cut(self) -> None:
        """End all connections, as if a cable was drawn that the kernel knows of."""
        for sock in self.sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        """No more."""
        self.open.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        for sock in self.sockets:
            sock.close()


@contextmanager
def through_a_proxy(**options: Any) -> Iterator[tuple[SocketSession, Proxy]]:
    """A session one of whose two nodes is reached through a proxy."""
    proxy, children = Proxy(), Children()
    proxy.target = free_port()
    settings = node_settings(f"tcp://127.0.0.1:{proxy.port}", load_keys(), 1)
    server = the_fork_server()
    assert server.ready(60)
    os.close(children.start(server, 1, settings))
    session = None
    try:
        session = SocketSession(
            2, 2, port=proxy.target, devices="cpu", timeout=20, heartbeat=3, start_timeout=20
        )
        yield session, proxy
    finally:
        proxy.open.set()
        if session is not None:
            session.shutdown(cancel=True)
        children.end()
        proxy.close()


def test_a_cut_connection_is_known_on_both_sides() -> None:
    with through_a_proxy() as (session, proxy):
        pids = session.processes()
        told = lost(session, proxy.cut)
        assert re.search(r"worker [23] \(pid \d+.*\) is lost: its (node 1 on|connection)", told)
        assert eventually(lambda: not any(is_alive(pids[rank]) for rank in (2, 3)), SOON)


def test_a_silent_way_is_told_apart_and_may_come_back() -> None:
    with through_a_proxy() as (session, proxy):
        proxy.open.clear()
        began = time.monotonic()
        with pytest.raises(DiscoError, match=r"nor has its node 1 on .* the way to it is down"):
            session.sync_all()
        assert time.monotonic() - began < session.heartbeat + SOON
        proxy.open.set()
        session.sync_all()


def test_keys_of_a_session_are_its_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    with SocketSession(2, 1, devices="cpu", key_file=file, spawn_nodes=True) as session:
        session.sync_all()
        assert str(file) in session.command
    assert isinstance(load_keys(file, make=False), Keys)
    assert not default_file().exists() or load_keys() != load_keys(file)
