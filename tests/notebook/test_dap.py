"""An editor attached to a notebook: cells are its sources, and both doors lead to one debugger."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.dap.adapter_client import AdapterClient

CELL = "total = 0\nfor i in range(3):\n    total += i * rank\n    print('at', i)\ntotal"


@pytest.fixture
def editor(nb: Any, tmp_path: Any) -> Iterator[AdapterClient]:
    """A client that is attached to the notebook's session."""
    nb.ok(f"import os\nos.environ['DISCOLAB_HOME'] = {str(tmp_path)!r}\nfrom discolab import dap")
    told = nb.ok("%disco_dap").stdout
    assert "editors can attach to this session at 127.0.0.1:" in told
    assert "`discolab dap` in a terminal" in told
    assert nb.ok("%disco_debug dap").stdout == told, "there is one, and it stays"
    # the file is for its owner; a notebook that is stored must not hold the token
    token = nb.ok(
        "import json, pathlib\n"
        f"json.loads(next(pathlib.Path({str(tmp_path)!r}, 'dap').iterdir()).read_text())['token']"
    ).text.strip("'")
    client = AdapterClient(int(told.split("127.0.0.1:")[1].split()[0]))
    client.begin(token)
    yield client
    if not client.ended:
        client.ask("disconnect", terminateDebuggee=True)
    client.close()
    nb.run("%disco_abort")
    nb.run("%disco_dap --close")
    nb.run("%disco_break -d all")


def test_a_cell_is_stepped_from_both_doors(nb: Any, editor: AdapterClient) -> None:
    nb.ok(f"%%disco -b 4\n{CELL}")
    body = editor.event("stopped")
    assert (body["reason"], body["description"]) == ("breakpoint", "breakpoint 1")
    (frame,) = editor.stack(2)
    name = frame["source"]["name"]
    assert name.startswith("Cell In[")
    assert frame["line"] == 4
    text = editor.ask("source", sourceReference=frame["source"]["sourceReference"])["content"]
    assert text.splitlines()[frame["line"] - 1] == "    total += i * rank"
    assert name in [one["name"] for one in editor.ask("loadedSources")["sources"]]
    found = editor.locals(3)
    assert list(found)[:2] == ["total", "i"]
    placed = editor.ask("setBreakpoints", source=frame["source"], breakpoints=[{"line": 5}])
    number = placed["breakpoints"][0]["id"]
    assert "line 5" in nb.ok("%disco_break").text
    editor.ask("continue", threadId=1)
    assert editor.event("stopped")["hitBreakpointIds"] == [number]
    assert f"{name} · stop 2" in nb.ok("%disco_where").text
    nb.ok("%disco_next")
    assert editor.event("stopped")["reason"] == "step"
    until = time.monotonic() + 10
    while not _seen(editor) and time.monotonic() < until:
        time.sleep(0.01)
    assert _seen(editor)
    nb.ok("%disco_set total = 100 -r 1")
    assert editor.event("invalidated")["areas"] == ["variables"]
    assert editor.locals(1)["total"]["value"] == "100"
    editor.ask("setBreakpoints", source=frame["source"], breakpoints=[])
    editor.ask("continue", threadId=1)
    while "has ended" not in editor.event("output")["output"]:
        pass
    assert nb.ok("%disco_continue\n").text.startswith("DRef total")
    assert nb.ok("_.debug_get_from_all()").text == "[0, 103, 6, 9]"


def _seen(editor: AdapterClient) -> bool:
    """Whether what the four workers have printed was told."""
    told = [one["body"] for one in editor.messages if one.get("event") == "output"]
    lines = "".join(one["output"] for one in told if one["category"] == "stdout").splitlines()
    return sorted(lines) == [f"worker {rank}: at 0" for rank in range(4)]


def test_every_cell_can_be_paused_while_an_editor_is_there(nb: Any, editor: AdapterClient) -> None:
    nb.ok("%%disco -a\nn = 0\nwhile True:\n    n += 1\n    n += 1")
    editor.ask("pause", threadId=1)
    assert editor.event("stopped")["reason"] == "pause"
    assert int(editor.locals(0)["n"]["value"]) > 0
    editor.ask("disconnect", terminateDebuggee=True)
    assert editor.has_ended()
    assert nb.ok("%%disco\n1 + 1").text.startswith("DRef")


def test_closing_ends_the_debugging(nb: Any, editor: AdapterClient) -> None:
    assert nb.ok("%disco_dap --close").stdout == "editors can no longer attach\n"
    editor.event("terminated")
    assert editor.has_ended()
    assert "is not served" in nb.fails("%disco_dap --close").stderr
