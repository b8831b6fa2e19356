"""`discolab.plot` in a notebook: regions asked for and answered, options, what is saved."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import Kernel
from .front_end import Comm

MADE = """
%%disco
w = (torch.arange(4096.0).view(64, 64) + 4096 * rank)
if rank == 1:
    w[0, 0] = float("nan")
"""
SHARDED = """
import discolab, torch
from torch.distributed.tensor import Shard
w = sess["w"]
w.placements = [Shard(0)]
"""
GATE = """
import threading, time
gate = threading.Event()
def wait_at_gate():
    if discolab.current_worker().worker_id == 2:
        gate.wait(60)
passed = sess.call_packed(wait_at_gate)
while sess.status()[2].state == "idle":
    time.sleep(0.01)
"""


@pytest.fixture
def nb_w(nb: Kernel) -> Kernel:
    nb.ok(MADE.strip())
    nb.ok(SHARDED)
    return nb


@pytest.fixture
def plot(nb_w: Kernel) -> Iterator[Comm]:
    result = nb_w.ok("shown = discolab.plot(w); shown", watched=True)
    comm = Comm(nb_w, result)
    comm.say("open")
    yield comm
    nb_w.ok("shown.close()")


def said(comm: Comm, kind: str) -> dict[str, Any]:
    """Wait for the next answer of that kind."""
    comm.until(lambda: any(answer["type"] == kind for answer in comm.said))
    found = next(answer for answer in comm.said if answer["type"] == kind)
    comm.said.remove(found)
    return found


def look(comm: Comm, *window: int, number: int = 1) -> dict[str, Any]:
    comm.command("look", asker="me", number=number, window=list(window), pixels=[100, 100])
    return said(comm, "picture")


def test_a_saved_notebook_shows_all_of_it(nb_w: Kernel) -> None:
    (bundle,) = nb_w.ok("discolab.plot(w)").data
    assert bundle["text/plain"].startswith("w · float32 [256, 64] Shard(0)\nmeans of 2 x 2")
    assert bundle["text/html"].count("data:image/png") == 4
    assert len(bundle["text/html"]) <= 20 * 1024


def test_a_region_is_answered_with_its_bounds_and_who_asked(plot: Comm) -> None:
    whole = look(plot, 0, 0, 256, 64, number=7)
    assert (whole["number"], whole["asker"], whole["window"]) == (7, "me", [0, 0, 256, 64])
    assert whole["pixels"] == [86, 64]
    assert whole["nonfinite"] == 1
    part = look(plot, 62, 0, 66, 3)
    assert (part["blocks"], part["pixels"], part["origin"]) == ([1, 1], [4, 3], [62, 0])
    assert part["texts"][0] == ["3968", "3969", "3970"]
    assert part["texts"][2] == ["nan", "4097", "4098"]
    assert b64decode(part["levels"])[6] == 255
    assert part["shown"] == [[0, 0, 64, 64], [64, 0, 128, 64]]


def test_the_cursor_is_told_what_it_is_on(plot: Comm) -> None:
    look(plot, 0, 0, 256, 64)
    plot.command("point", asker="me", at=[65, 3])
    assert said(plot, "point")["words"] == (
        "[65, 3] · worker 1 · mean 4099, about 4030 to 4160, of 3 elements"
    )
    look(plot, 64, 0, 68, 4)
    plot.command("point", asker="me", at=[65, 3])
    assert said(plot, "point")["words"] == "[65, 3] · worker 1 · 4163"
    plot.command("point", asker="me", at=[64, 0])
    assert said(plot, "point")["words"] == "[64, 0] · worker 1 · nan"


def test_options_change_the_frame_and_ask_for_a_new_look(plot: Comm) -> None:
    look(plot, 0, 0, 256, 64)
    plot.command("set", stat="nonfinite")
    plot.until(lambda: bool(plot.frames) and plot.frames[-1]["stat"] == "nonfinite")
    version = plot.frames[-1]["version"]
    assert "numbers of non-finite values" in look(plot, 0, 0, 256, 64)["words"]
    plot.command("set", dims=[1, 0])
    plot.until(lambda: plot.frames[-1]["size"] == [64, 256])
    assert plot.frames[-1]["version"] > version
    assert plot.frames[-1]["axes"] == ["dim 1", "dim 0"]


def test_colours_are_held_while_zooming(plot: Comm) -> None:
    whole = look(plot, 0, 0, 256, 64)
    plot.command("set", hold=True)
    plot.until(lambda: bool(plot.frames) and plot.frames[-1]["held"])
    assert look(plot, 0, 0, 4, 4)["high"] == whole["high"]
    plot.command("set", hold=False)
    plot.until(lambda: not plot.frames[-1]["held"])
    assert look(plot, 0, 0, 4, 4)["high"] == "195"


def test_a_histogram_on_demand(plot: Comm) -> None:
    look(plot, 0, 0, 4, 4)
    plot.command("histogram", asker="me")
    found = said(plot, "histogram")
    assert (sum(found["counts"]), found["low"], found["high"]) == (16, "0", "195")


def test_a_busy_worker_does_not_hold_up_the_others(nb_w: Kernel, plot: Comm) -> None:
    nb_w.ok(GATE)
    picture = look(plot, 0, 0, 256, 64)
    assert picture["states"] == {"2": "still busy"}
    (problem,) = picture["problems"]
    assert problem.startswith("worker 2 still busy: ")
    assert len(picture["shown"]) == 3
    nb_w.ok("gate.set()")
    plot.until(lambda: bool(plot.frames) and plot.frames[-1]["version"] > 1)
    assert look(plot, 0, 0, 256, 64)["states"] == {}


def test_why_workers_are_not_seen_is_told_once_for_all(nb_w: Kernel, plot: Comm) -> None:
    nb_w.ok("%%disco --step\na = 1")
    picture = look(plot, 0, 0, 256, 64)
    assert [problem[:24] for problem in picture["problems"]] == ["workers 0-3 still busy: "]
    nb_w.ok("%disco_abort")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("discolab.plot(3)", "plot draws what a DRef names: got an int"),
        ("discolab.plot(w, dims=(0, 7))", "dims are one or two different dims of a tensor with 2"),
        ("discolab.plot(w, stat='median')", "stat is one of mean, absmax, nonfinite"),
    ],
)
def test_mistakes_are_told_in_a_line(nb_w: Kernel, line: str, words: str) -> None:
    assert words in nb_w.fails(line).outputs[-1]["evalue"]


def test_a_nonsense_command_is_answered_with_an_error(plot: Comm) -> None:
    plot.command("look", asker="me", window="all", pixels=[1, 1])
    assert "4 numbers expected" in said(plot, "error")["text"]


# -- how long it keeps a value


def live(nb: Kernel) -> str:
    """Whether the value that `held` stood for is kept."""
    return nb.ok("import gc; _ = gc.collect(); print(kept() is not None)").stdout.strip()


@pytest.fixture
def held(nb: Kernel) -> Kernel:
    nb.ok(
        "import discolab, torch, weakref\n"
        "held = sess.call_packed(torch.ones, 8, 8); kept = weakref.ref(held)\n"
        "from discolab.notebook.widgets import base; base._LEFT = 0.3"
    )
    return nb


def test_a_picture_that_was_taken_off_its_page_lets_the_value_go(held: Kernel) -> None:
    comm = Comm(held, held.ok("display(discolab.plot(held))", watched=True))
    comm.say("open")
    look(comm, 0, 0, 8, 8)
    held.ok("del held")
    assert live(held) == "True"
    assert "a plot" in held.ok("%disco_registers").text
    comm.say("close")  # another tab of the browser is looked at: it is on the page all the same
    comm.listen(0.8)
    assert live(held) == "True"
    comm.say("open")
    comm.say("close", gone=True)
    comm.listen(0.8)
    assert live(held) == "False"
    comm.say("open")  # after an undo, or in a notebook that was closed and opened
    comm.until(lambda: comm.frames and "run the cell again" in comm.frames[-1]["gone"])
    comm.command("look", asker="me", number=1, window=[0, 0, 8, 8], pixels=[9, 9])
    assert "run the cell again" in said(comm, "error")["text"]
    comm.say("close")


def test_one_that_comes_back_while_somebody_holds_the_value_goes_on(held: Kernel) -> None:
    comm = Comm(held, held.ok("display(discolab.plot(held))", watched=True))
    comm.say("open")
    comm.say("close", gone=True)
    comm.listen(0.8)
    assert "a plot" not in held.ok("%disco_registers").text
    comm.say("open")
    assert look(comm, 0, 0, 8, 8)["pixels"] == [8, 8]
    comm.say("close", gone=True)


def test_closing_lets_the_value_go(held: Kernel) -> None:
    held.ok("p = discolab.plot(held); display(p)", watched=True)
    held.ok("del held")
    assert "p.ref" in held.ok("%disco_registers").text
    held.ok("p.close()")
    assert live(held) == "False"


def test_a_plot_that_could_not_be_made_leaves_no_noise(held: Kernel) -> None:
    held.fails("discolab.plot(5)")
    held.fails("discolab.plot(sess.call_packed(torch.ones, 2, device='meta'))")
    assert not held.ok("import sys; sys.last_value = sys.last_traceback = sys.last_exc = None\n"
                       "import gc; _ = gc.collect()").stderr  # fmt: skip
