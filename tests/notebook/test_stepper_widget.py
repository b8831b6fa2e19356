"""``%disco_debugger``: the panel on the program that is stepped, with its buttons."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from discolab.debugger.records import Spot
from discolab.debugger.stops import Stop, WorkerAt
from discolab.notebook.widgets.stepper_frame import source_of

from .conftest import Kernel
from .front_end import BesideCells

PROGRAM = """%%disco --step
def double(value):
    twice = value * 2
    return twice

x = torch.ones(2) * (rank % 2)
y = double(x)
if rank == 3:
    y = y + 1
total = ccl.all_reduce(y)
total"""
LOOP = "%%disco --step\nimport time\nwhile True:\n    time.sleep(0.01)"


class Panel(BesideCells):
    """The panel in a front end, opened."""

    def __init__(self, kernel: Kernel, code: str) -> None:
        super().__init__(kernel, kernel.ok(code, watched=True))
        self.say("open")
        message = {"comm_id": self.model_id, "data": {"method": "request_state"}}
        self._client.shell_channel.send(self._client.session.msg("comm_msg", message))
        self.until(lambda: bool(self.frames))

    @property
    def frame(self) -> dict[str, Any]:
        return self.frames[-1]

    @property
    def at(self) -> tuple[str, int]:
        """Which stop of which program is shown."""
        return self.frame["program"], self.frame["number"]

    def run(self, code: str) -> None:
        """Start a cell, and see it stop."""
        before = self.at
        self._client.execute(code)
        self.until(lambda: self.frame["state"] == "paused" and self.at != before)
        self.settle()

    def settle(self) -> None:
        """Wait until the variables are there."""
        self.until(lambda: self.frame["state"] != "paused" or not self.frame["stale"])

    def press(self, name: str, **content: Any) -> None:
        """Press a button for going on, and see where it leads."""
        number = self.frame["heard"].get("here", 0) + 1
        self.command(name, view="here", number=number, **content)
        self.until(lambda: self.frame["heard"].get("here") == number)
        self.until(lambda: self.frame["state"] != "running")
        self.settle()

    def ask(self, name: str, ready: Callable[[dict[str, Any]], Any], **content: Any) -> None:
        """Press another button, and see what was to come of it."""
        self.command(name, **content)
        self.until(lambda: bool(ready(self.frame)))

    @property
    def places(self) -> list[tuple[list[int], str, str]]:
        return [(one["ranks"], one["state"], one["words"]) for one in self.frame["places"]]

    def row(self, name: str) -> dict[str, Any]:
        """A variable."""
        rows = [row for table in self.frame["tables"] for row in table["rows"]]
        return next((row for row in rows if row["name"] == name), {"cells": []})


def told(row: dict[str, Any]) -> list[tuple[list[int], str]]:
    return [(cell["ranks"], cell["words"]) for cell in row["cells"]]


def line_of(panel: Panel) -> str:
    source = panel.frame["source"]
    return str(source["lines"][source["line"] - source["first"]]).strip()


@pytest.fixture
def panel(nb: Kernel) -> Iterator[Panel]:
    shown = Panel(nb, "%disco_debugger")
    yield shown
    shown.command("abort")
    shown.say("close", gone=True)
    while nb.run("sess.sync_all()").status == "aborted":
        pass  # it came right after a cell that has failed


def test_without_a_program_it_says_how_to_begin_one(nb: Kernel) -> None:
    result = nb.ok("%disco_debugger")
    assert [sorted(data) for data in result.data] == [["text/html", "text/plain"]]
    assert result.text.startswith("debugger of sess: no program is being stepped: begin one with")


def test_without_a_front_end_it_is_a_picture_of_the_stop(nb: Kernel) -> None:
    nb.ok("%%disco --step\nnames = ['a']\nnames")
    nb.ok("%disco_next")
    text = nb.ok("%disco_debugger").text
    assert " · stop 2 · " in text
    assert "['a']" in text
    nb.ok("%disco_abort")


def test_a_program_is_stepped_by_buttons_between_cells(panel: Panel) -> None:
    assert not any(panel.frame["can"].values())
    panel.run(PROGRAM)
    assert line_of(panel).startswith("def double")
    can = panel.frame["can"]
    assert [name for name in can if can[name]] == [
        "step", "next", "out", "continue", "eval", "abort"
    ]  # fmt: skip
    panel.press("next")
    panel.press("next")
    assert line_of(panel) == "y = double(x)"
    assert told(panel.row("x")) == [
        ([0], "[0, 0]"), ([1], "[1, 1]"), ([2], "[0, 0]"), ([3], "[1, 1]")
    ]  # fmt: skip
    assert panel.row("x")["differs"]
    assert panel.row("x")["changed"]
    panel.press("step")
    assert line_of(panel) == "twice = value * 2"
    assert [one["function"] for one in panel.frame["stack"]] == ["double", "the cell"]
    panel.press("out")
    assert [one["function"] for one in panel.frame["stack"]] == ["the cell"]
    panel.press("continue")
    assert panel.frame["state"] == "ended"
    assert panel.places == [([0, 1, 2, 3], "done", "has ended")]


def test_a_click_on_a_caller_shows_its_line_and_its_variables(panel: Panel) -> None:
    panel.run(PROGRAM)
    for name in ("next", "next", "step"):
        panel.press(name)
    assert told(panel.row("value"))
    panel.ask("frame", lambda frame: frame["frame"] == 1 and not frame["stale"], frame=1)
    assert line_of(panel) == "y = double(x)"
    assert told(panel.row("x"))
    panel.ask("eval", lambda frame: frame["results"], text="x.sum().item()")
    assert told(panel.frame["results"][0]["row"])[1] == ([1], "2.0")
    panel.press("next")
    assert panel.frame["frame"] == 0


def test_workers_that_part_are_told_apart_and_go_on_alone(panel: Panel) -> None:
    panel.run(PROGRAM)
    for _ in range(4):
        panel.press("next")
    assert [(ranks, words[-7:]) for ranks, _, words in panel.places] == [
        ([3], " line 9"), ([0, 1, 2], "line 10")
    ]  # fmt: skip
    assert panel.frame["focus"] == 3
    panel.press("next", ranks=[0])
    ranks, state, words = panel.places[-1]
    assert (ranks, state) == ([0], "collective")
    assert "waits in all_reduce #1" in words
    assert "(paused)" in words
    panel.ask("focus", lambda frame: frame["focus"] == 0, rank=0)
    assert line_of(panel) == "total = ccl.all_reduce(y)"
    assert panel.frame["source"]["marks"]["10"] == [["waiting", [0]], ["paused", [1, 2]]]


def test_an_expression_is_told_for_each_worker(panel: Panel) -> None:
    panel.run(PROGRAM)
    panel.ask("eval", lambda frame: frame["results"], text="rank if rank else 1 / 0")
    result = panel.frame["results"][0]
    assert told(result["row"])[0] == ([0], "ZeroDivisionError: division by zero")
    assert told(result["row"])[1:] == [([1], "1"), ([2], "2"), ([3], "3")]
    panel.ask("eval", lambda frame: len(frame["results"]) == 2, text="rank", ranks=[2])
    assert panel.frame["results"][0]["ranks"] == [2]
    panel.press("next")
    assert all(one["past"] for one in panel.frame["results"])


def test_an_expression_that_changes_a_variable_is_seen(panel: Panel) -> None:
    panel.run("%%disco --step\nnames = ['a']\nnames")
    panel.press("next")
    panel.command("eval", text="names.append('b')")
    panel.until(lambda: told(panel.row("names")) == [([0, 1, 2, 3], "['a', 'b']")])


def test_a_line_is_clicked_for_a_break_point(panel: Panel) -> None:
    panel.run(PROGRAM)
    file = panel.frame["source"]["file"]
    panel.ask("toggle", lambda frame: frame["breaks"], file=file, line=4)
    assert panel.frame["source"]["breaks"] == {"4": ""}
    panel.press("continue")
    assert line_of(panel) == "return twice"
    assert panel.frame["reason"].startswith("breakpoint ")
    panel.ask("toggle", lambda frame: not frame["breaks"], file=file, line=4)
    panel.ask("toggle", lambda frame: frame["breaks"], file=file, line=10)
    number = panel.frame["breaks"][0]["number"]
    panel.ask("clear", lambda frame: not frame["breaks"], number=number)


def test_an_error_is_one_line_until_the_next_command(panel: Panel) -> None:
    panel.ask("eval", lambda frame: frame["error"], text="x")
    assert "none is" in panel.frame["error"]
    panel.run(PROGRAM)
    file = panel.frame["source"]["file"]
    panel.ask("toggle", lambda frame: "line" in frame["error"], file=file, line=5)
    assert "\n" not in panel.frame["error"]
    panel.press("next")
    assert panel.frame["error"] == ""
    panel.ask("dance", lambda frame: frame["error"])
    assert "unknown command 'dance'" in panel.frame["error"]


def test_pause_and_abort_work_while_a_cell_waits(nb: Kernel, panel: Panel) -> None:
    panel.run(LOOP)
    nb.client.execute("%disco_continue")
    panel.until(lambda: panel.frame["state"] == "running")
    assert [name for name, can in panel.frame["can"].items() if can] == ["pause", "abort"]
    panel.until(lambda: "line 4" in panel.places[0][2])
    assert panel.frame["source"]["marks"]
    panel.press("pause")
    assert panel.frame["state"] == "paused"
    assert panel.frame["reason"].startswith("paused at ")
    nb.client.execute("%disco_continue")
    panel.until(lambda: panel.frame["state"] == "running")
    panel.press("abort")
    assert panel.frame["state"] == "ended"
    assert panel.places == [([0, 1, 2, 3], "aborted", "was aborted")]


def test_it_shows_what_cells_do(nb: Kernel, panel: Panel) -> None:
    panel.run(PROGRAM)
    nb.client.execute("%disco_next")
    panel.until(lambda: panel.frame["number"] == 2)
    nb.client.execute("%disco_break 10 if rank == 1")
    panel.until(lambda: bool(panel.frame["breaks"]))
    assert panel.frame["breaks"][0]["condition"] == "rank == 1"
    nb.client.execute("%disco_continue")
    panel.until(lambda: panel.frame["number"] == 3)
    panel.settle()
    assert line_of(panel) == "total = ccl.all_reduce(y)"
    nb.client.execute("%disco_set y = torch.zeros(1)")
    panel.until(lambda: told(panel.row("y")) == [([0, 1, 2, 3], "[0]")])


def test_the_last_stop_is_in_the_saved_notebook(panel: Panel) -> None:
    panel.run(PROGRAM)
    panel.press("next")
    panel.until(lambda: any("stop 2" in shown["text/plain"] for shown in panel.displays))
    text = panel.displays[-1]["text/plain"]
    assert "x = torch.ones(2)" in text
    assert "text/html" in panel.displays[-1]


def test_many_values_fit_in_a_small_frame(panel: Panel) -> None:
    lines = [f"t{i} = torch.randn(30, 30) * (rank + 1)" for i in range(60)]
    panel.run("\n".join(["%%disco --step", "text = 'word ' * 10_000", *lines, "0"]))
    number = len(lines) + 2
    file = panel.frame["source"]["file"]
    panel.ask("toggle", lambda frame: frame["breaks"], file=file, line=number)
    panel.press("continue")
    table = panel.frame["tables"][0]
    assert len(table["rows"]) + len(table["rest"]) == 60
    assert len(json.dumps(panel.frame)) < 60_000


def test_it_follows_a_session_that_is_restarted(nb: Kernel, panel: Panel) -> None:
    panel.run(PROGRAM)
    nb.client.execute("%disco_restart")
    panel.until(lambda: panel.frame["state"] == "idle")
    panel.run(PROGRAM)
    panel.press("next")
    assert panel.frame["number"] == 2
    nb.client.execute("%disco_shutdown")
    panel.until(lambda: "shut down: %disco_restart" in panel.frame["reason"])
    nb.client.execute("%disco_restart")
    panel.until(lambda: panel.frame["state"] == "idle")


@pytest.mark.slow
def test_it_works_with_workers_in_other_processes(lab_kernel: Kernel) -> None:
    lab_kernel.ok("%disco_session 2 --engine processes --devices cpu --name far")
    panel = Panel(lab_kernel, "%disco_debugger -s far")
    panel.run(PROGRAM.replace("--step", "--step -s far"))
    for _ in range(3):
        panel.press("next")
    assert told(panel.row("y")) == [([0], "[0, 0]"), ([1], "[2, 2]")]
    panel.ask("eval", lambda frame: frame["results"], text="rank")
    assert told(panel.frame["results"][0]["row"]) == [([0], "0"), ([1], "1")]
    panel.press("continue")
    assert panel.frame["state"] == "ended"
    panel.say("close", gone=True)
    lab_kernel.ok("%disco_shutdown far")


def test_of_a_long_file_the_part_around_the_line_is_sent() -> None:
    lines = tuple(f"x = {number}  # \x1b[31m" for number in range(1, 2001))
    stack = (Spot("long.py", 1000, "train", ()),)
    workers = tuple(WorkerAt(rank, "paused", stack) for rank in range(2))
    stop = Stop("long", 1, "stepped", workers, ((0, 1),), sources={"long.py": lines})
    source = source_of(stop, 0, ())
    assert source is not None
    assert source["first"] < 950
    assert source["first"] + len(source["lines"]) > 1050
    assert source["lines"][1000 - source["first"]] == "x = 1000  # \\x1b[31m"
    assert len(source["lines"]) < 250
    assert source["marks"] == {"1000": [["paused", [0, 1]]]}
