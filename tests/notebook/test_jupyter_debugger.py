"""JupyterLab's own debugger, spoken by hand: debug requests of the kernel's control channel."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

CELL = """%%disco
def double(value):
    twice = value * 2
    return twice

x = torch.ones(2) * rank
y = double(x)
z = y + 1
z.sum().item()"""


class Lab:
    """What JupyterLab's debugger asks and hears."""

    def __init__(self, kernel: Any) -> None:
        self._client = kernel.manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=30)
        self._numbers = itertools.count()
        self.events: list[dict[str, Any]] = []

    def answer(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The whole answer."""
        content = {"type": "request", "seq": next(self._numbers), "command": command,
                   "arguments": arguments}  # fmt: skip
        message = self._client.session.msg("debug_request", content)
        self._client.control_channel.send(message)
        while True:
            found = self._client.get_control_msg(timeout=20)
            if found["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                content = found["content"]
                assert content["command"] == command
                return content

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The body of an answer that is no refusal."""
        found = self.answer(command, **arguments)
        assert found["success"], found
        return found["body"]

    def event(self, name: str) -> dict[str, Any]:
        """The body of the next event of that name."""
        until = time.monotonic() + 20
        while time.monotonic() < until:
            for number, event in enumerate(self.events):
                if event["event"] == name:
                    del self.events[: number + 1]
                    return event["body"]
            if self._client.iopub_channel.msg_ready():
                message = self._client.get_iopub_msg(timeout=1)
                if message["msg_type"] == "debug_event":
                    self.events.append(message["content"])
            else:
                time.sleep(0.01)
        raise AssertionError(f"no event {name}: {self.events}")

    def switch_on(self) -> None:
        body = self.ask("initialize", clientID="jupyterlab", clientName="JupyterLab",
                        pathFormat="path", linesStartAt1=True, columnsStartAt1=True)  # fmt: skip
        assert [one["filter"] for one in body["exceptionBreakpointFilters"]]
        self.ask("attach")
        assert self.ask("debugInfo")["isStarted"]

    def stack(self) -> list[dict[str, Any]]:
        (thread,) = self.ask("debugInfo")["stoppedThreads"]
        return self.ask("stackTrace", threadId=thread)["stackFrames"]

    def variables(self, frame: dict[str, Any], scope: str = "Locals") -> dict[str, str]:
        scopes = self.ask("scopes", frameId=frame["id"])["scopes"]
        (number,) = [one["variablesReference"] for one in scopes if one["name"] == scope]
        found = self.ask("variables", variablesReference=number)["variables"]
        return {one["name"]: one["value"] for one in found}

    def close(self) -> None:
        self._client.stop_channels()


@pytest.fixture
def front(nb: Any) -> Iterator[Lab]:
    """JupyterLab's debugger, that shows the workers of `sess`."""
    nb.ok("%disco_break -d all")
    assert "shows the workers of this session" in nb.ok("%disco_dap --jupyterlab").stdout
    lab = Lab(nb)
    yield lab
    if lab.ask("debugInfo")["isStarted"]:
        lab.ask("disconnect")
    lab.close()
    nb.run("%disco_abort")
    nb.run("%disco_dap --close")


def test_a_cell_is_stepped_in_jupyterlabs_debugger(nb: Any, front: Lab) -> None:
    front.switch_on()
    path = front.ask("dumpCell", code=CELL)["sourcePath"]
    info = front.ask("debugInfo")
    assert path.startswith(info["tmpFilePrefix"])
    assert path.endswith(info["tmpFileSuffix"])
    placed = front.ask("setBreakpoints", source={"path": path},
                       breakpoints=[{"line": 5}, {"line": 3}])["breakpoints"]  # fmt: skip
    assert [one["line"] for one in placed] == [3, 6], "the next lines with code"
    nb.ok(CELL)
    front.event("stopped")
    frames = front.stack()
    assert [frame["name"] for frame in frames] == [f"worker {rank} · <module>" for rank in range(4)]
    assert {(frame["source"]["path"], frame["line"]) for frame in frames} == {(path, 6)}
    assert front.ask("source", source={"path": path})["content"] == CELL
    front.ask("continue", threadId=1)
    assert front.event("stopped")["reason"] == "breakpoint"
    inner = front.stack()
    assert [frame["name"] for frame in inner[:2]] == ["worker 0 · double", "worker 0 · <module>"]
    assert [frame["line"] for frame in inner] == [3, 7] * 4
    assert not {frame["id"] for frame in inner} & {frame["id"] for frame in frames}
    assert front.variables(inner[6])["value"] == "float32[2] mean 3, 3 to 3"
    assert front.variables(inner[6], "All workers")["value"] == "≠ 4 different values"
    found = front.ask("evaluate", expression="value.sum().item() + rank", frameId=inner[4]["id"])
    assert found["result"] == "6.0"
    rich = front.ask("richInspectVariables", variableName="value", frameId=inner[2]["id"])
    assert "float32[2]" in rich["data"]["text/plain"]
    refused = front.answer("evaluate", expression="nosuch", frameId=inner[0]["id"])
    assert not refused["success"]
    assert "NameError" in refused["message"]
    front.ask("next", threadId=1)
    front.event("stopped")
    assert front.stack()[0]["line"] == 4
    front.ask("stepOut", threadId=1)
    front.event("stopped")
    assert len(front.stack()) == 4
    front.ask("continue", threadId=1)
    front.event("continued")
    assert nb.ok("%disco_continue").text.startswith("DRef")
    assert front.ask("debugInfo")["stoppedThreads"] == []
    # the breakpoints are of the cell's text: a second run stops, one with another text does not
    nb.ok(CELL)
    front.event("stopped")
    assert front.stack()[0]["source"]["path"] == path
    front.ask("setBreakpoints", source={"path": path}, breakpoints=[])
    front.ask("continue", threadId=1)
    assert nb.ok("%disco_continue").text.startswith("DRef")
    assert nb.ok(CELL).text.startswith("DRef")


def test_a_cell_that_never_stops_is_paused(nb: Any, front: Lab) -> None:
    front.switch_on()
    nb.ok("%%disco -a\nn = 0\nwhile True:\n    n += 1\n    n += 1")
    front.ask("pause", threadId=1)
    assert front.event("stopped")["reason"] == "pause"
    assert int(front.variables(front.stack()[2])["n"]) > 0


def test_empty_lines_above_the_magic_are_counted(nb: Any, front: Lab) -> None:
    front.switch_on()
    code = "\n\n%%disco\na = 1\nb = 2"
    path = front.ask("dumpCell", code=code)["sourcePath"]
    front.ask("setBreakpoints", source={"path": path}, breakpoints=[{"line": 5}])
    nb.ok(code)
    front.event("stopped")
    frame = front.stack()[0]
    assert (frame["source"]["path"], frame["line"]) == (path, 5)
    assert front.variables(frame)["a"] == "1"


def test_cells_of_the_notebook_have_no_breakpoints_there(nb: Any, front: Lab) -> None:
    front.switch_on()
    path = front.ask("dumpCell", code="a = 1\nb = 2")["sourcePath"]
    assert front.ask("setBreakpoints", source={"path": path}, breakpoints=[{"line": 2}]) == {
        "breakpoints": []
    }
    assert nb.ok("a = 1\nb = 2\nb").text == "2"
    names = [one["name"] for one in front.ask("inspectVariables")["variables"]]
    assert "b" in names


def test_the_kernels_own_debugger_comes_back(nb: Any, front: Lab) -> None:
    front.switch_on()
    nb.ok("%%disco -a\nimport time\nwhile True:\n    time.sleep(0.01)")
    nb.ok("%disco_shutdown")
    until = time.monotonic() + 10
    while front.ask("debugInfo")["isStarted"] and time.monotonic() < until:
        time.sleep(0.01)
    assert not front.ask("debugInfo")["isStarted"]
    assert "is off" in front.answer("stackTrace", threadId=1)["message"]
    front.ask("disconnect")  # the bug is pressed
    assert front.ask("debugInfo")["copyToGlobals"]
    assert nb.ok("get_ipython().kernel.do_debug_request.__func__.__qualname__").text == (
        "'IPythonKernel.do_debug_request'"
    )


def test_workers_of_other_processes_and_one_that_waits(nb: Any) -> None:
    nb.ok("%disco_session 2 --engine processes --devices cpu\n%disco_dap --jupyterlab")
    lab = Lab(nb)
    lab.switch_on()
    code = "%%disco\nx = torch.ones(2)\nif rank == 1:\n    y = x + 1\nccl.all_reduce(x)\nz = 1"
    path = lab.ask("dumpCell", code=code)["sourcePath"]
    lab.ask("setBreakpoints", source={"path": path}, breakpoints=[{"line": 4}])
    nb.ok(code)
    lab.event("stopped")
    names = {frame["name"]: frame["line"] for frame in lab.stack()}
    assert names == {"worker 1 · <module>": 4, "worker 0 · waits · <module>": 5}
    assert lab.variables(lab.stack()[0])["x"].startswith("float32[2]")
    lab.ask("disconnect")  # and it goes on
    assert "has ended" in nb.ok("%disco_continue").stdout
    lab.close()
    nb.run("%disco_dap --close")


def test_it_is_refused_while_another_is_attached_and_while_it_shows_the_kernel(nb: Any) -> None:
    lab = Lab(nb)
    try:
        nb.ok("get_ipython().kernel.debugger.is_started = True")
        assert "switch it off" in nb.fails("%disco_dap --jupyterlab").stderr
    finally:
        nb.ok("get_ipython().kernel.debugger.is_started = False\n%disco_dap --jupyterlab")
    nb.ok(
        "from discolab import dap\nfrom discolab.dap.connection import Connection\n"
        "server = dap.serve(sess)\n"
        "line = Connection(server.host, server.port, lambda event: None, lambda: None)\n"
        "line.ask('initialize', {'clientName': 'Another'}).result(10)\n"
        "line.ask('attach', {'token': server.token}).result(10)"
    )
    refused = lab.answer("initialize", clientName="JupyterLab")
    assert not refused["success"]
    assert "Another is attached" in refused["message"]
    assert not lab.ask("debugInfo")["isStarted"]
    nb.ok("line.close()\n%disco_dap --close")
    lab.close()
