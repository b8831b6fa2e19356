"""Who may come, one at a time; what goes wrong on a line; leaving, and the end of a session."""

import json
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest

from discolab import ArgumentError, DiscoError, ThreadedSession, dap
from discolab.dap.framing import framed
from discolab.debugger import debugger_of

from .adapter_client import AdapterClient, RefusedError
from .conftest import PROGRAM

STEP = next(n for n, line in enumerate(PROGRAM.splitlines(), 1) if "x = inner" in line)


@pytest.fixture(scope="module")
def shared_session():
    """Four workers on threads: what is tested here does not depend on where they are."""
    with ThreadedSession(4, timeout=20) as session:
        session.init_ccl("local")
        yield session


def test_without_the_token_nothing_is_answered(connect, server, dbg):
    client = connect()
    for command in ("threads", "evaluate", "setBreakpoints", "continue", "terminate"):
        with pytest.raises(RefusedError, match="attach with the token"):
            client.ask(command)
    client.ask("initialize", adapterID="discolab")
    with pytest.raises(RefusedError, match="token is not this session's"):
        client.ask("attach", token=server.token[:-1])
    assert client.has_ended(), "no second guess"
    assert server.client is None
    for wrong in ({}, {"token": 3}, {"token": "ü"}):
        with pytest.raises(RefusedError):
            connect().ask("attach", **wrong)
    with pytest.raises(RefusedError, match="attaches to a session that runs"):
        connect().ask("launch")


def test_it_listens_on_this_machine_alone(server):
    assert server._listener.getsockname()[0] == "127.0.0.1"


def test_one_client_at_a_time(connect, server):
    first, second = connect(), connect()
    first.begin(server.token)
    assert server.client == "the test"
    second.ask("initialize", adapterID="discolab")
    with pytest.raises(RefusedError, match="the test is attached to this session already"):
        second.ask("attach", token=server.token)
    assert second.has_ended()
    first.ask("disconnect")
    assert first.has_ended()
    connect().begin(server.token)


def test_the_next_client_may_come_at_once(connect, server):
    for _ in range(20):
        client = connect()
        client.begin(server.token)
        client.ask("disconnect")


def test_connections_that_do_not_attach_are_limited_and_do_not_hold_the_seat(connect, server):
    for _ in range(7):
        connect()
    client = connect()
    client.begin(server.token)
    assert connect().has_ended(), "the ninth"
    assert client.ask("threads")["threads"]


def test_what_is_malformed_has_an_answer(client):
    def refused(message):
        client.send(message)
        answer = client.answer(message.get("seq", 0) if isinstance(message, dict) else 0)
        assert not answer["success"]
        return answer["message"]

    assert "no request 'fly'" in refused({"seq": 900, "type": "request", "command": "fly"})
    assert "a request, with" in refused({"seq": 0, "type": "event", "event": "x"})
    assert "a request, with" in refused({"seq": 0, "type": "request"})
    assert "JSON object" in refused([1, 2])
    client.raw(b"Content-Length: 7\r\n\r\n{nosuch")
    assert "no JSON" in client.answer(0)["message"]
    wrong = {"seq": 901, "type": "request", "command": "threads", "arguments": [1]}
    assert "arguments are an object" in refused(wrong)
    for command, arguments, words in (
        ("stackTrace", {}, "'threadId' is missing"),
        ("stackTrace", {"threadId": "1"}, "a whole number"),
        ("stackTrace", {"threadId": 5}, "threads 1 to 4"),
        ("stackTrace", {"threadId": True}, "a whole number"),
        ("scopes", {"frameId": -1}, "no frame"),
        ("variables", {"variablesReference": 4711}, "not of this stop"),
        ("setBreakpoints", {"source": {}}, "has a path"),
        ("setBreakpoints", {"source": {"path": "a.py"}, "breakpoints": [3]}, "an object"),
        ("setBreakpoints", {"source": {"path": "a.py"}, "breakpoints": [{}]}, "'line' is missing"),
        ("setExceptionBreakpoints", {"filters": [1]}, "holds strings"),
        ("evaluate", {"expression": 3}, "a string"),
        ("next", {"threadId": 1}, "no program|has ended"),
        ("initialize", {"adapterID": "x", "linesStartAt1": False}, "not supported"),
    ):
        with pytest.raises(RefusedError, match=words):
            client.ask(command, **arguments)
    assert len(client.ask("threads")["threads"]) == 4, "and it goes on"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"Content-Length: 99999999999\r\n\r\n",
        b"Content-Length: x\r\n\r\n{}",
        b"x" * 5000,
    ],
)
def test_what_is_not_the_protocol_ends_that_connection_alone(connect, client, data):
    other = connect()
    other.raw(data)
    assert other.has_ended()
    assert client.ask("threads")["threads"]


def test_a_message_may_come_in_pieces_and_with_other_headers(connect):
    client = connect()
    content = json.dumps({"seq": 1, "type": "request", "command": "initialize",
                          "arguments": {"adapterID": "x", "clientID": "ü"}}).encode()  # fmt: skip
    data = b"content-type: x\r\nCONTENT-LENGTH:%d\r\n\r\n%b" % (len(content), content)
    for at in range(0, len(data), 7):
        client.raw(data[at : at + 7])
        time.sleep(0.001)
    assert client.answer(1)["success"]


def _stop_by_client(client, dbg, module):
    file, program = module
    client.ask("setBreakpoints", source={"path": file}, breakpoints=[{"line": STEP}])
    dbg.start(program)
    client.event("stopped")


def test_a_client_that_disconnects_has_the_program_go_on(client, dbg, module, server):
    _stop_by_client(client, dbg, module)
    client.ask("disconnect", restart=False)
    assert client.has_ended()
    dbg.wait(20)
    assert not dbg.is_active
    assert not dbg.breaks
    assert not dbg.is_wanted


def test_a_client_may_leave_the_program_suspended_or_end_it(connect, dbg, module, server):
    client = connect()
    client.begin(server.token)
    _stop_by_client(client, dbg, module)
    client.ask("disconnect", suspendDebuggee=True)
    assert client.has_ended()
    assert dbg.is_paused
    again = connect()
    again.begin(server.token)
    assert again.event("stopped")["description"], "who comes is told where it stands"
    again.ask("disconnect", terminateDebuggee=True)
    assert again.has_ended()
    assert not dbg.is_active


def test_a_client_that_is_lost_leaves_the_program_standing(connect, dbg, module, server):
    client = connect()
    client.begin(server.token)
    _stop_by_client(client, dbg, module)
    client.close()
    until = time.monotonic() + 5
    while server.client is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert server.client is None
    assert dbg.is_paused
    assert not dbg.breaks, "those that it had set are gone"
    assert dbg.continue_().finished


def test_what_another_door_does_is_told(client, dbg, module):
    file, program = module
    point = dbg.break_at(f"{file}:{STEP}")
    body = client.event("breakpoint")
    assert (body["reason"], body["breakpoint"]["id"]) == ("new", point.number)
    same = client.ask("setBreakpoints", source={"path": file}, breakpoints=[{"line": STEP}])
    assert same["breakpoints"][0]["id"] == point.number
    dbg.start(program)
    assert client.event("stopped")["hitBreakpointIds"] == [point.number]
    dbg.next()
    assert client.event("stopped")["reason"] == "step"
    dbg.set("i", "7", ranks=[0])
    assert client.event("invalidated")["areas"] == ["variables"]
    dbg.clear(point.number)
    body = client.event("breakpoint")
    assert (body["reason"], body["breakpoint"]["id"]) == ("removed", point.number)
    dbg.continue_()
    assert client.event("continued")["allThreadsContinued"]
    assert "has ended" in client.event("output")["output"]


def test_a_client_removes_of_a_file_only_what_it_was_told_of(connect, dbg, module, server):
    file, _ = module
    point = dbg.break_at(f"{file}:{STEP}")
    client = connect()
    client.attach(server.token)
    client.ask("setBreakpoints", source={"path": file}, breakpoints=[])
    assert point.number in dbg.breaks, "it could not know of it yet"
    client.ask("configurationDone")
    client.event("breakpoint")
    client.ask("setBreakpoints", source={"path": file}, breakpoints=[])
    assert not dbg.breaks


def test_values_of_an_earlier_stop_are_refused(client, dbg, module):
    dbg.start(module[1], step=True)
    client.event("stopped")
    scope = client.scopes(0)["Locals"]
    client.ask("next", threadId=1)
    client.event("stopped")
    with pytest.raises(RefusedError, match="not of this stop"):
        client.ask("variables", variablesReference=scope)
    with pytest.raises(RefusedError, match="no frame"):
        client.ask("evaluate", expression="1", frameId=4000)


def test_while_workers_run_what_needs_them_is_refused_at_once(client, dbg, module):
    dbg.start(module[1], 10**6, step=False)
    for command, arguments in (
        ("stackTrace", {"threadId": 1}),
        ("continue", {"threadId": 1}),
        ("evaluate", {"expression": "1", "frameId": 1}),
    ):
        with pytest.raises(RefusedError, match=r"runs|pause"):
            client.ask(command, **arguments)
    client.ask("terminate")


def test_the_end_of_a_session_ends_the_debugging(tmp_path):
    with ThreadedSession(2, timeout=20) as session:
        server = dap.serve(session)
        client = AdapterClient(server.port)
        client.begin(server.token)
        idle = AdapterClient(server.port)
        assert server.file.exists()
    client.event("terminated")
    assert client.has_ended()
    assert idle.has_ended()
    until = time.monotonic() + 5
    while not server.closed and time.monotonic() < until:
        time.sleep(0.01)
    assert server.closed
    assert not server.file.exists()
    client.close()
    idle.close()
    with pytest.raises(DiscoError):
        dap.serve(session)


def test_a_client_that_comes_as_the_session_ends_is_turned_away():
    with ThreadedSession(2, timeout=20) as session:
        server = dap.serve(session)
    client = AdapterClient(server.port)  # while the server has not looked yet
    assert client.has_ended()
    client.close()


def test_a_session_that_stands_can_be_shut_down_while_a_client_looks(module):
    session = ThreadedSession(2, timeout=20)
    server = dap.serve(session)
    client = AdapterClient(server.port)
    client.begin(server.token)
    debugger_of(session).start(module[1], step=True)
    client.event("stopped")
    threading.Timer(0.2, session.shutdown, kwargs={"cancel": True}).start()
    loop = {"expression": "[0 for _ in iter(int, 1)]", "frameId": 1, "context": "repl"}
    client.send({"seq": 800, "type": "request", "command": "evaluate", "arguments": loop})
    client.event("terminated")
    assert client.has_ended()
    client.close()


def test_serving_again_gives_the_same_server_and_wrong_arguments_are_named(sess, server):
    assert dap.serve(sess) is server
    with pytest.raises(ArgumentError, match="served already"):
        dap.serve(sess, token="another token of some length")
    for wrong in ({"port": -1}, {"port": "5678"}, {"port": True}, {"token": "short"}):
        with pytest.raises(ArgumentError):
            dap.serve(sess, **wrong)
    with pytest.raises(ArgumentError, match="session"):
        dap.serve(3)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        ThreadedSession(1) as other,
        pytest.raises(DiscoError, match="can't listen"),
    ):
        dap.serve(other, taken.getsockname()[1])
    server.close()
    again = dap.serve(sess, token="another token of some length")
    assert again is not server
    again.close()


def test_the_command_prints_the_configuration_from_a_private_file(server):
    assert stat.S_IMODE(server.file.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.file.parent.stat().st_mode) == 0o700
    (server.file.parent / "99999999-1.json").write_text(
        json.dumps({"pid": 99999999, "port": 1, "token": "x", "workers": 1})
    )
    (server.file.parent / "3-2.json").write_text("what is this")
    command = [sys.executable, "-m", "discolab", "dap"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    comment, rest = told.split("\n", 1)
    assert comment.startswith("// 4 workers of process")
    assert json.loads(rest) == server.launch
    assert not (server.file.parent / "99999999-1.json").exists()
    found = subprocess.run([*command, "--port", "1"], capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert "no session is served at port 1" in found.stderr


def test_the_file_goes_with_a_process_that_just_ends(tmp_path):
    code = (
        "from discolab import ThreadedSession, dap\n"
        "s = ThreadedSession(1)\n"
        "print(dap.serve(s).file.exists())\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert told.stdout == "True\n", told.stderr
    assert not list((tmp_path / "home" / "dap").iterdir())


def test_the_command_is_an_adapter_on_its_standard_streams(server):
    command = [sys.executable, "-m", "discolab", "dap", "--stdio"]
    requests = [
        {"seq": 1, "type": "request", "command": "initialize", "arguments": {"adapterID": "x"}},
        {"seq": 2, "type": "request", "command": "attach", "arguments": {}},
        {"seq": 3, "type": "request", "command": "threads"},
        {"seq": 4, "type": "request", "command": "disconnect"},
    ]
    told = subprocess.run(
        command, input=b"".join(map(framed, requests)), capture_output=True, timeout=60
    )
    assert told.returncode == 0, told.stderr
    assert b'"command":"threads"' in told.stdout
    assert b'"command":"disconnect"' in told.stdout
    assert b'"success":false' not in told.stdout
