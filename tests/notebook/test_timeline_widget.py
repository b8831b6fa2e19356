"""``%disco_timeline``: recording, its pictures, and what a front end may ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import Kernel
from .front_end import BesideCells, Comm

IMBALANCED = """%%disco
import time
from discolab import trace
for step in range(4):
    with trace.span("forward"):
        time.sleep(0.06 if rank == 3 else 0.01)
    ccl.all_reduce(torch.ones(4))
trace.mark("end")"""
ALL_RANKS = ["0", "1", "2", "3"]
COMMANDS, SPANS, COLLECTIVES, MARKS = "0", "1", "5", "6"


@pytest.fixture(scope="module")
def traced(lab_kernel: Kernel) -> Kernel:
    """Four workers that have recorded a program in which worker 3 is slow."""
    lab_kernel.ok("import time; from discolab import notebook as lab")
    lab_kernel.ok("%disco_session 4 --devices cpu")
    assert "tracing is on" in lab_kernel.ok("%disco_timeline --on").stdout
    lab_kernel.ok(IMBALANCED)
    return lab_kernel


@pytest.fixture
def timeline(traced: Kernel) -> Comm:
    comm = Comm(traced, traced.ok("timeline = lab.disco_timeline(); timeline", watched=True))
    comm.say("open")
    return comm


def ask(comm: Comm, **wish: Any) -> dict[str, Any]:
    """Ask for a window, and give what answers it."""
    whole = {"mode": "all", "span": 10**10, "t0": 0, "t1": 10**9, "width": 800, "number": 1} | wish
    comm.command("view", me="me", **whole)
    comm.until(lambda: bool(comm.frames) and mine(comm).get("number") == whole["number"])
    return mine(comm)


def mine(comm: Comm) -> dict[str, Any]:
    return dict(comm.frames[-1]["views"].get("me", {}))


def spans(row: str) -> list[tuple[int, ...]]:
    """Begin, end, state, name, count, seq and wait of each, as timeline.js unpacks them."""
    numbers = [int(number or 0) for number in row.split(",")]
    found, last, seq = [], 0, 0
    for at in range(0, len(numbers), 7):
        gap, wide, state, name, count, more, waited = numbers[at : at + 7]
        begin, last, seq = last + gap, last + gap + wide, seq + more
        found.append((begin, last, state, name, count or 1, seq, waited))
    return found


def test_the_static_picture_says_who_was_slow(traced: Kernel) -> None:
    result = traced.ok("%disco_timeline")
    assert [sorted(data) for data in result.data] == [["text/html", "text/plain"]]
    assert not result.stdout  # it was on already
    line = next(line for line in result.text.splitlines() if "all_reduce" in line)
    assert "Cell In[" in line
    assert "worker 3" in line


def test_the_object_gives_the_trace(traced: Kernel) -> None:
    site = "lab.disco_timeline().trace.summary().sites[0]"
    assert traced.ok(f"({site}.name, {site}.count, {site}.slowest[0][0])").text == (
        "('all_reduce', 4, 3)"
    )


def test_a_window_shows_lanes_with_what_is_waiting_apart(timeline: Comm) -> None:
    shown = ask(timeline)
    assert list(shown["lanes"]) == ALL_RANKS
    lane = shown["lanes"]["0"]
    assert {COMMANDS, SPANS, COLLECTIVES, MARKS} <= set(lane)
    begin, end, *_, waited = spans(lane[COLLECTIVES])[0]
    assert 0.5 < waited / (end - begin) <= 1.01
    late = [waited for *_, waited in spans(shown["lanes"]["3"][COLLECTIVES])]
    assert max(late) < waited / 4
    timeline.say("close")


def test_a_narrow_window_has_only_what_is_in_it(timeline: Comm) -> None:
    whole = ask(timeline, number=1)
    forward = spans(whole["lanes"]["0"][SPANS])
    assert len(forward) == 4
    scale = (whole["t1"] - whole["t0"]) / (4 * whole["width"])
    t0, t1 = (int(whole["t0"] + place * scale) for place in forward[1][:2])
    narrow = ask(timeline, number=2, mode="fixed", t0=t0, t1=t1)
    assert (narrow["t0"], narrow["t1"]) == (t0, t1)
    assert len(spans(narrow["lanes"]["0"][SPANS])) == 1
    timeline.say("close")


def test_a_click_tells_who_came_last_and_who_waited(timeline: Comm) -> None:
    shown = ask(timeline)
    seq = spans(shown["lanes"]["1"][COLLECTIVES])[0][5]
    timeline.command("details", me="me", rank=1, row=5, seq=seq, count=1, at=0)
    timeline.until(lambda: bool(timeline.said))
    details = timeline.said[-1]["details"]
    facts = dict(details["facts"])
    assert details["name"] == "all_reduce"
    assert facts["moves"] == "float32[4], sum"
    assert facts["among"] == "workers 0-3"
    assert facts["called at"].startswith("Cell In[")
    assert [one["rank"] for one in details["members"] if one["last"]] == [3]
    assert details["members"][-1]["waited"] == "0 ms"
    timeline.say("close")


def test_the_places_that_wait_most_come_first(timeline: Comm) -> None:
    ask(timeline)
    timeline.until(lambda: bool(timeline.frames[-1]["summary"]["sites"]))
    site = timeline.frames[-1]["summary"]["sites"][0]
    assert (site["name"], site["rank"], site["count"]) == ("all_reduce", 3, 4)
    workers = timeline.frames[-1]["summary"]["workers"]
    assert workers[0]["waiting"] > workers[3]["waiting"]
    timeline.say("close")


def test_frames_come_and_commands_are_heard_while_cells_run(traced: Kernel) -> None:
    shown = traced.ok("lab.disco_timeline()", watched=True)
    timeline = BesideCells(traced, shown)
    timeline.say("open")
    before = ask(timeline, mode="follow")["t1"]
    traced.client.execute("%%disco\nfor _ in range(15): time.sleep(0.1)")
    timeline.until(lambda: timeline.frames[-1]["going"], 3)
    during = ask(timeline, mode="follow", number=2)
    assert timeline.frames[-1]["going"]
    assert during["t1"] > before
    seen = len(timeline.frames)
    timeline.until(lambda: len(timeline.frames) > seen + 2, 2)
    assert timeline.frames[-1]["going"]
    timeline.until(lambda: not timeline.frames[-1]["going"], 5)
    traced.client.execute("ref = sess.call_packed(time.sleep, 0.5); time.sleep(1)")
    timeline.until(lambda: timeline.frames[-1]["going"], 3)
    timeline.until(lambda: not timeline.frames[-1]["going"], 5)
    timeline.say("close")


def test_a_frame_stays_small_however_much_there_is(traced: Kernel, timeline: Comm) -> None:
    traced.ok(
        "%%disco\nfor i in range(3000):\n    with trace.span('a'):\n"
        "        with trace.span(f'layer {i} of many'): pass"
    )
    for number in range(3, 60):  # they come in parts
        shown = ask(timeline, width=1600, number=number)
        timeline.listen(0.5)
        count = sum(flat[4] for flat in spans(shown["lanes"]["0"][SPANS]))
        if count >= 3004:
            break
    assert count >= 3004
    assert max(len(json.dumps(frame)) for frame in timeline.frames) < 30_000
    timeline.say("close")


def test_the_last_picture_is_in_the_saved_notebook(traced: Kernel, timeline: Comm) -> None:
    ask(timeline)
    traced.client.execute("%%disco\nccl.all_gather(torch.ones(2)); None")
    timeline.until(
        lambda: any("all_gather" in shown["text/plain"] for shown in timeline.displays), 5
    )
    timeline.say("close")


def test_a_cell_is_one_call_and_one_failure(traced: Kernel) -> None:
    count = "[(w.commands, w.failed) for w in lab.disco_timeline().trace.summary().workers]"
    before = eval(traced.ok(count).text)
    traced.ok("%%disco\n41 + 1")
    traced.fails("%%disco\n1 / 0")
    after = eval(traced.ok(count).text)
    assert after == [(calls + 2, failed + 1) for calls, failed in before]


def test_many_spans_leave_the_newest_command_in_sight(traced: Kernel, timeline: Comm) -> None:
    ask(timeline)
    traced.ok("%%disco\nfor i in range(30_000):\n    with trace.span('tiny'): pass")
    number = 10
    shown = ask(timeline, number=number)
    assert timeline.frames[-1]["behind"]  # there is much that was not read
    last = [span[3] for span in spans(shown["lanes"]["3"][COMMANDS])[-2:]]
    assert any(shown["names"][name].startswith("Cell In[") for name in last)
    assert not timeline.frames[-1]["going"]
    assert traced.ok("len(lab.disco_timeline().trace.events[3]) > 30_000").text == "True"
    timeline.say("close")
    traced.ok("%disco_timeline --clear")
    traced.ok(IMBALANCED)


def test_buttons_export_clear_and_switch_off(
    traced: Kernel, timeline: Comm, tmp_path: Path
) -> None:
    traced.ok(f"%cd {tmp_path}")
    ask(timeline)
    for number in range(2):  # no file is written over
        timeline.command("export")
        timeline.until(lambda number=number: len(timeline.said) > number)  # type: ignore[misc]
    names = [said["path"] for said in timeline.said]
    assert names == [str(tmp_path / f"timeline-sess{end}.json") for end in ("", "-2")]
    assert json.loads(Path(names[0]).read_text())["traceEvents"]
    timeline.command("clear")
    timeline.until(lambda: timeline.frames[-1]["count"] == 0)
    timeline.command("off")
    timeline.until(lambda: not timeline.frames[-1]["on"])
    timeline.command("details", me="me", rank=9, row=0, seq=0, count=1, at=0)
    timeline.until(lambda: timeline.said[-1]["type"] == "error")
    timeline.say("close")
    assert "tracing is on" in traced.ok("%disco_timeline --on").stdout


def test_options_of_the_magic(traced: Kernel, tmp_path: Path) -> None:
    traced.ok(IMBALANCED)
    path = tmp_path / "here it is.json"
    result = traced.ok(f"%disco_timeline --export '{path}'")
    assert result.stdout == f"written to {path}\n"
    assert not result.data
    assert "can't be written" in traced.fails(f"%disco_timeline --export {tmp_path}").stderr
    assert "not both" in traced.fails("%disco_timeline --on --off").stderr
    assert "'nobody'" in traced.fails("%disco_timeline -s nobody").stderr
    assert traced.ok("%disco_timeline --clear").stdout == ""
    off = traced.ok("%disco_timeline --off")
    assert off.stdout == "tracing is off\n"
    assert "tracing is off" in off.text


def test_a_restarted_session_is_recorded_too(traced: Kernel, timeline: Comm) -> None:
    ask(timeline)
    traced.ok("%disco_restart")
    traced.ok("%%disco\nccl.barrier()")
    timeline.until(lambda: timeline.frames[-1]["on"] and timeline.frames[-1]["count"] > 0)
    timeline.say("close")


def test_what_the_profiler_saw_is_in_the_file_that_is_written_at_once(
    traced: Kernel, tmp_path: Path
) -> None:
    traced.ok("%disco_timeline --profile")
    traced.ok("%%disco\nx = torch.ones(8)\nfor _ in range(20_000): x.mul_(1.0)")
    traced.ok(f"%disco_timeline --off --export {tmp_path / 'trace.json'}")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    seen = {event["pid"] for event in events if event["name"] == "aten::mul_"}
    assert seen == {0, 1, 2, 3}


def test_the_profiler_looks_on(traced: Kernel) -> None:
    traced.ok("%disco_timeline --profile")
    traced.ok("%%disco\ntorch.ones(64, 64) @ torch.ones(64, 64); None")
    traced.ok("%disco_timeline --off")
    assert (
        traced.ok(
            "any(e.name == 'aten::mm' for e in lab.disco_timeline(on=False).trace.events[1])"
        ).text
        == "True"
    )
