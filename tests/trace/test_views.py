"""What is made of a trace: its sums, its drawing, and the file for Perfetto."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from discolab.trace import Event, Trace
from discolab.views import render_html, render_text
from discolab.views.parts import Interval, Track, Tracks

MS = 1_000_000


def a_trace() -> Trace:
    """Worker 1 is late by 6 of 10 ms; then it fails."""
    group = {"group": (0, 1), "number": 0, "ordinal": 0, "detail": "float32[2], sum", "size": 8}
    events = {
        0: (
            Event(0, "collective", "all_reduce", 2 * MS, 9 * MS, "done", "a.py:3", **group),
            Event(1, "span", "forward", MS, 2 * MS, "done", "a.py:2", 0),
            Event(2, "mark", "<here>", 9 * MS, 9 * MS, "done", "a.py:4", 0),
            Event(3, "command", "step", 0, 10 * MS, "done", "a.py:9", 0),
        ),
        1: (
            Event(0, "collective", "all_reduce", 8 * MS, 9 * MS, "done", "a.py:3", **group),
            Event(1, "command", "step", 0, 10 * MS, "done", "a.py:9", 0),
            Event(2, "command", "<b>boom</b>", 11 * MS, 20 * MS, "failed", "a.py:10", 1),
        ),
    }
    return Trace("2 workers", events, devices={0: "cpu", 1: "cpu"})


def test_where_the_time_went() -> None:
    found = a_trace().summary()
    one, two = found.workers
    assert (one.busy, one.waiting, one.idle) == (4 * MS, 6 * MS, 10 * MS)
    assert (two.busy, two.waiting, two.idle, two.failed) == (19 * MS, 0, MS, 1)
    (site,) = found.sites
    assert (site.name, site.site, site.count, site.waited) == ("all_reduce", "a.py:3", 1, 6 * MS)
    assert site.slowest == ((1, 1),)
    assert site.size == 16


def test_what_goes_on_is_waiting_and_not_failed() -> None:
    group = {"group": (0, 1), "number": 0, "ordinal": 0}
    events = {
        0: (
            Event(0, "collective", "all_reduce", 2 * MS, 0, "waiting", "a.py:3", **group),
            Event(-1, "command", "step", 0, 0, "running"),
        )
    }
    found = Trace("x", events, taken=10 * MS).summary()
    assert (found.workers[0].busy, found.workers[0].waiting) == (2 * MS, 8 * MS)
    (site,) = found.sites
    assert (site.waited, site.failed, site.going) == (8 * MS, 0, 1)
    old = Trace("x", events, taken=0)  # taken before anything of it began
    assert old.extent() == (0, 2 * MS)
    for one in old.summary().workers:
        assert min(one.busy, one.waiting, one.idle) >= 0


def test_what_discolab_sends_for_itself_is_no_call() -> None:
    own = {"detail": "discolab's own", "ordinal": 1}
    events = {
        0: (
            Event(0, "command", "Cell In[1]", 0, 4, "failed", ordinal=0),
            Event(1, "command", "drawing a value", 5, 9, "failed", **own),
        )
    }
    (worker,) = Trace("x", events).summary().workers
    assert (worker.commands, worker.failed, worker.busy) == (1, 1, 8)


def test_a_trace_as_text() -> None:
    text = a_trace()._repr_mimebundle_()["text/plain"]
    assert text.splitlines()[:6] == [
        "trace · 2 workers",
        "20 ms on the clock; 21 % of the workers' time in calls is waiting; 1 failed call",
        "  0 ██████░░░░░░░░░░░░░░░░░░▒▒▒███······························",
        "  1 ████████████████████████▒▒▒███···!!!!!!!!!!!!!!!!!!!!!!!!!!!",
        "    0                                                      20 ms",
        "  █ busy  ░ waiting for others  ▒ in a collective  · idle  ! failed",
    ]
    assert "worker 1, 1 of 1 times" in text


def test_a_trace_as_html() -> None:
    html = a_trace()._repr_mimebundle_()["text/html"]
    assert "<b>" not in html
    assert "&lt;b&gt;boom" in html
    assert "worker 1, 1 of 1 times" in html
    assert Trace("x")._repr_mimebundle_()["text/plain"].splitlines()[1].startswith("nothing was")


def test_a_large_trace_stays_a_small_drawing() -> None:
    events = {
        rank: tuple(
            Event(n, "command", f"step {n}", n * 7 * MS, n * 7 * MS + (n % 7) * MS, "done", "", n)
            for n in range(1000)
        )
        for rank in range(64)
    }
    html = Trace("64 workers", events)._repr_mimebundle_()["text/html"]
    drawing, _, _ = html.partition("busy</th>")
    assert len(drawing) < 20_000
    few = Trace("16 workers", {rank: events[rank] for rank in range(16)})
    assert len(few._repr_mimebundle_()["text/html"]) < 22_000


def test_tracks_carry_the_same_in_text_and_html() -> None:
    row = (Interval(0.0, 0.5, "busy", "f"), Interval(0.5, 0.5, "failed", "g"))
    part = Tracks((Track(3, (row,)),), ((0.0, "0"), (1.0, "1 s")))
    assert render_text(part).splitlines()[0] == "  3 " + "█" * 30 + "!" + "·" * 29
    html = render_html(part)
    for words in (">3<", "1 s", "failed", "busy"):
        assert words in html


def test_a_file_for_perfetto(tmp_path: Path) -> None:
    path = a_trace().to_chrome(tmp_path / "trace.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    check_format(found)
    events = found["traceEvents"]
    (step,) = [e for e in events if e["name"] == "step" and e["pid"] == 1]
    assert (step["ph"], step["ts"], step["dur"]) == ("X", 0.0, 10_000.0)
    start, finish = [e for e in events if e["ph"] in "sf"]
    assert (start["pid"], finish["pid"], start["ts"], finish["ts"]) == (1, 0, 8000.0, 8000.0)
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(0, "worker 0 (cpu)"), (1, "worker 1 (cpu)")}
    packed = a_trace().to_chrome(tmp_path / "trace.json.gz")
    assert json.loads(gzip.decompress(packed.read_bytes())) == found


def test_what_overlaps_has_a_thread_of_its_own(tmp_path: Path) -> None:
    later = {"asynchronous": True, "group": (0,), "number": 0}
    events = (
        Event(0, "collective", "all_reduce", 1, 9, "done", ordinal=0, **later),
        Event(1, "collective", "all_reduce", 3, 0, "waiting", ordinal=0, **later),
        Event(2, "command", "f", 0, 5, "done", ordinal=0),
        Event(3, "span", "beside", 2, 7, "done", ordinal=0, detail="helper"),
        Event(0, "gpu", "gemm", 2, 8, "done", detail="cuda:0 stream 7"),
        Event(0, "cpu", "aten::mm", 2, 8, "done"),
    )
    path = Trace("1 worker", {0: events}, taken=20).to_chrome(tmp_path / "t.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    check_format(found)
    threads = {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert threads == {
        "worker", "asynchronous collectives", "torch.profiler", "helper", "cuda:0 stream 7",
    }  # fmt: skip


def check_format(document: dict[str, Any]) -> None:
    """What the Trace Event Format asks for, and what Perfetto drops otherwise."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    open_spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    begun: set[str] = set()
    flows: dict[str, float] = {}
    events = document["traceEvents"]
    for event in sorted(events, key=lambda e: (e["ts"], -e.get("dur", 0))):
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        match event["ph"]:
            case "X":
                end = event["ts"] + event["dur"]
                stack = open_spans.setdefault((event["pid"], event["tid"]), [])
                while stack and stack[-1][1] <= event["ts"] + 1e-9:
                    stack.pop()
                assert not stack or end <= stack[-1][1] + 1e-6, "they lie within each other"
                stack.append((event["ts"], end))
            case "b":
                begun.add(event["id2"]["local"])
            case "e":
                assert event["id2"]["local"] in begun
            case "s":
                flows[event["id"]] = event["ts"]
            case "f":
                assert event["bp"] == "e"
                assert flows[event["id"]] <= event["ts"]
            case "i":
                assert event["s"] in "gpt"
            case "M":
                assert event["args"]
            case other:
                raise AssertionError(other)
    for event in events:
        if event["ph"] in "sf":
            assert any(
                e["ph"] == "X"
                and (e["pid"], e["tid"]) == (event["pid"], event["tid"])
                and e["ts"] <= event["ts"] < e["ts"] + e["dur"]
                for e in events
            )
