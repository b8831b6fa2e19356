"""How the debugger draws a stop, breakpoints, an evaluation and a history: what a user reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from discolab.debugger.breaks import Break
from discolab.debugger.picture import (
    breaks_parts,
    evaluated_parts,
    evaluated_table,
    history_parts,
    stop_parts,
    variable_tables,
)
from discolab.debugger.records import Spot
from discolab.debugger.stops import Stop, WorkerAt
from discolab.runtime import sources
from discolab.views import describe, render_html, render_text

CELL, FILE = "/tmp/cells/3.py", "/home/ann/shop/net.py"
LINES = tuple(f"cell_{number} = {number}" for number in range(1, 41))
NET = tuple(f"    net_{number} = {number}" for number in range(1, 41))


@pytest.fixture(autouse=True)
def cell_name() -> Iterator[None]:
    def named(file: str) -> str | None:
        return "Cell In[3]" if file == CELL else None

    sources.namers.append(named)
    yield
    sources.namers.remove(named)


def at(line: int, function: str = "train", file: str = CELL) -> tuple[Spot, ...]:
    return Spot(CELL, 30, "<module>", {}), Spot(file, line, function, {})


def paused(rank: int, line: int = 7, values: Any = None, **options: Any) -> WorkerAt:
    held = None if values is None else {name: describe(value) for name, value in values.items()}
    stack = options.pop("stack", at(line))
    return WorkerAt(rank, "paused", stack, variables=held, **options)


def stop(*workers: WorkerAt, groups: Any = None, reason: str = "stepped", **options: Any) -> Stop:
    standing = tuple(worker.rank for worker in workers if worker.state == "paused")
    return Stop(
        "Cell In[3]",
        options.pop("number", 2),
        reason,
        workers,
        (standing,) if groups is None else groups,
        sources={CELL: LINES, FILE: NET},
        **options,
    )


def held(*values: dict[str, Any], changed: str = "") -> Stop:
    names = frozenset(changed.split())
    return stop(*(paused(rank, 7, each, changed=names) for rank, each in enumerate(values)))


def row(text: str, name: str) -> str:
    """The line of the text that begins with a name, its marks in front."""
    found = [line for line in text.split("\n") if re.match(rf"[ ≠•]*{name}\b", line)]
    assert len(found) == 1, text
    return found[0].strip()


def plain(html: str) -> str:
    """What is left of HTML without styles, tags and pictures."""
    html = re.sub(r"<style>.*?</style>", "", html)
    html = re.sub(r"</t[dh]>|</tr>|</div>", "\n", html)
    return re.sub(r"<[^>]*>", "", html)


# -- the head, the places, who waits for whom -------------------------------------------------


def test_the_whole_of_a_small_stop() -> None:
    shown = held({"x": torch.eye(2), "rank": 0}, {"x": torch.eye(2), "rank": 1}, changed="x")
    assert repr(shown) == (
        "Cell In[3] · stop 2 · stepped\n"
        "Cell In[3] in train\n"
        "         2  cell_2 = 2\n"
        "         3  cell_3 = 3\n"
        "         4  cell_4 = 4\n"
        "         5  cell_5 = 5\n"
        "         6  cell_6 = 6\n"
        "  0,1 →  7  cell_7 = 7\n"
        "         8  cell_8 = 8\n"
        "         9  cell_9 = 9\n"
        "        10  cell_10 = 10\n"
        "        11  cell_11 = 11\n"
        "        12  cell_12 = 12\n"
        "        13  cell_13 = 13\n"
        "stack: Cell In[3]:30 › train:7\n"
        "variables\n"
        "     name                 worker 0  worker 1\n"
        "   • x     float32[2, 2]  all: [1, 0, 0, 1]\n"
        "  ≠  rank                 0         1\n"
        "≠ differs between workers · • changed since the last stop"
    )


def test_text_and_html_say_the_same() -> None:
    shown = held({"x": torch.randn(8, 8), "name": "a<b"}, {"x": torch.randn(8, 8), "name": "a<b"})
    html = plain(render_html(stop_parts(shown)))
    for words in re.split(r"\s{2,}|\n", repr(shown)):
        words = words.strip(" →≠•").removeprefix("0,1").strip(" →")
        assert words.replace("<", "&lt;").replace("'", "&#x27;") in html, words


def test_workers_in_a_collective_are_told_by_whom_they_wait_for() -> None:
    words = "waits in all_reduce #1 of float32[4] for workers 2,3 (paused)"
    waiting = [WorkerAt(rank, "collective", at(12), words, (2, 3)) for rank in (0, 1)]
    text = repr(stop(*waiting, paused(2, 9), paused(3, 9)))
    assert "workers 0,1 wait in all_reduce #1 of float32[4] for workers 2,3 (paused)" in text
    assert re.search(r"^ +0,1 … 12  cell_12", text, re.M)
    assert re.search(r"^ +2,3 →  9  cell_9", text, re.M)
    assert "deadlock" not in text


def test_workers_that_have_ended_are_told_once_for_those_alike() -> None:
    text = repr(
        stop(
            WorkerAt(0, "done"),
            WorkerAt(1, "done"),
            WorkerAt(2, "error", error="ValueError: bad shape"),
            paused(3),
            WorkerAt(4, "out"),
            WorkerAt(5, "aborted"),
            WorkerAt(6, "running"),
        )
    )
    for words in (
        "workers 0,1 have ended",
        "worker 2 ended with ValueError: bad shape",
        "worker 4 does not take part",
        "worker 5 was aborted",
        "worker 6 runs",
    ):
        assert words in text.split("\n")


def test_the_end_says_how_each_worker_ended_and_nothing_else() -> None:
    ends = [WorkerAt(0, "done"), WorkerAt(1, "done"), WorkerAt(2, "error", error="KeyError: 'w'")]
    shown = Stop("Cell In[3]", 9, "the program has ended", tuple(ends), finished=True)
    assert repr(shown) == (
        "Cell In[3] · the program has ended\n"
        "workers 0,1 have ended\n"
        "worker 2 ended with KeyError: 'w'"
    )


def test_the_group_that_is_behind_is_named() -> None:
    text = repr(stop(paused(0, 5), paused(1, 9), paused(2, 5), groups=((0, 2), (1,))))
    assert "workers 0,2 at Cell In[3], line 5 in train · behind: advance next" in text
    assert "worker 1 at Cell In[3], line 9 in train\n" in text


def test_close_places_are_in_one_excerpt_far_ones_and_other_files_apart() -> None:
    near = repr(stop(paused(0, 5), paused(1, 12), groups=((0,), (1,))))
    assert near.count("Cell In[3] in train") == 1
    assert near.count("cell_8 = 8") == 1  # between them
    far = stop(paused(0, 5), paused(1, 33), paused(2, stack=at(20, "forward", FILE)))
    text = repr(far)
    assert text.count("Cell In[3] in train") == 2
    assert "shop/net.py in forward" in text
    assert re.search(r"^ +2 → 20  +net_20", text, re.M)
    assert "cell_15" not in text
    assert render_html(stop_parts(far)).count('<pre class="q"') == 3


def test_many_places_are_told_briefly() -> None:
    files = {f"/m/f{rank}.py": LINES for rank in range(10)}
    standing = [paused(rank, stack=at(20, "f", file)) for rank, file in enumerate(files)]
    shown = replace(stop(*standing), sources={CELL: LINES, **files})
    text = repr(shown)
    assert "and 2 more places" in text
    assert "cell_18" in text
    assert "cell_17" not in text


def test_a_file_without_source_still_tells_the_line() -> None:
    text = repr(replace(stop(paused(0, 7)), sources={}))
    assert re.search(r"^ +0 → 7  \?$", text, re.M)


def test_why_single_workers_stopped_is_told_if_the_head_does_not() -> None:
    text = repr(
        stop(
            paused(0, note="breakpoint 1"),
            paused(1, note="raising ValueError: x"),
            paused(2, error="NameError: name 'y' is not defined"),
            reason="breakpoint 1 (workers 0,2) at Cell In[3], line 7",
        )
    )
    assert "worker 1: raising ValueError: x" in text
    assert "worker 2: NameError: name 'y' is not defined" in text
    assert "worker 0:" not in text


def test_the_first_stop_says_how_to_go_on_and_later_ones_do_not() -> None:
    assert "%disco_next" in repr(stop(paused(0), number=1))
    assert "%disco_next" not in repr(stop(paused(0), number=2))


# -- stacks -----------------------------------------------------------------------------------


def test_stacks_are_told_once_for_workers_that_came_the_same_way() -> None:
    inner = (*at(8), Spot(FILE, 3, "forward", {}))
    text = repr(stop(paused(0, stack=inner), paused(1, stack=inner), paused(2, 8)))
    assert "stack of workers 0,1: Cell In[3]:30 › train:8 › shop/net.py forward:3" in text
    assert "stack of worker 2: Cell In[3]:30 › train:8" in text


def test_the_chosen_frame_is_shown_and_marked() -> None:
    inner = (*at(8), Spot(FILE, 3, "forward", {}))
    shown = stop(paused(0, stack=inner, values={"x": 1}), frame=1)
    text = repr(shown)
    assert re.search(r"^ +0 →  8  cell_8", text, re.M)
    assert "(frame 1 is shown)" in text
    assert '<span class="t">train:8</span>' in render_html(stop_parts(shown))


def test_deep_stacks_leave_out_the_middle_but_not_the_chosen_frame() -> None:
    deep = tuple(Spot(FILE, number, f"f{number}", {}) for number in range(1, 21))
    line = next(x for x in repr(stop(paused(0, stack=deep), frame=12)).split("\n") if "stack" in x)
    for frame in ("f1:1 ", "f8:8 ", "f20:20"):
        assert frame in line
    assert "f12:12" not in line
    assert line.count("…") == 2


# -- variables --------------------------------------------------------------------------------


def test_equal_values_are_one_and_those_that_differ_are_marked() -> None:
    same, mine = torch.randn(8, 8), [torch.randn(8, 8) for _ in range(3)]
    text = repr(
        held(*({"same": same.clone(), "mine": mine[rank], "rank": rank} for rank in range(3)))
    )
    assert row(text, "same").startswith("same  float32[8, 8]        all: mean ")
    assert row(text, "mine").startswith("≠  mine  float32[8, 8] means  ")
    assert row(text, "rank").split() == ["≠", "rank", "0", "1", "2"]
    assert "•" not in text


def test_one_worker_that_stands_out_is_loud_and_shards_are_not() -> None:
    values = [{"bias": torch.full((8,), float(rank == 2)), "part": rank} for rank in range(4)]
    html = render_html(stop_parts(held(*values)))
    assert html.count('<span class="w">≠</span>') == 1
    assert html.count('<span class="m">≠</span>') == 1
    assert '<span class="w">constant 1</span>' in html
    assert row(repr(held(*values)), "bias") == (
        "≠  bias  float32[8]  0,1: constant 0     constant 1  constant 0"
    )


def test_what_is_not_finite_is_counted_and_loud() -> None:
    bad = torch.ones(8, 8)
    bad[1, 2] = bad[3, 4] = float("nan")
    shown = held({"x": torch.ones(8, 8)}, {"x": bad})
    assert "2 nan" in row(repr(shown), "x")
    assert re.search(r'class="w">[^<]*2 nan', render_html(stop_parts(shown)))


def test_a_name_that_only_some_have_is_a_dash_for_the_others_in_its_place() -> None:
    text = repr(held({"a": 1, "z": 2}, {"a": 1, "b": 5, "z": 2}))
    assert row(text, "b").split() == ["≠", "b", "–", "5"]
    names = [line.split()[0 if "≠" not in line else 1] for line in text.split("\n")[-5:-1]]
    assert names == ["name", "a", "b", "z"]


def test_large_tensors_are_not_said_to_be_equal() -> None:
    text = repr(held({"w": torch.ones(1200, 1200)}, {"w": torch.ones(1200, 1200)}))
    assert row(text, "w") == "w     float32[1200, 1200]  all: [1, 1, 1, …] · not compared"
    assert "≠" not in text
    other = repr(held({"w": torch.ones(1200, 1200)}, {"w": torch.zeros(1200, 1200)}))
    assert row(other, "w").startswith("≠  w")


def test_what_one_worker_alone_has_is_not_told_of_all() -> None:
    """As the name of a thread, of which nothing is compared."""
    records = {
        rank: {"kind": "object", "type": "Thread", "repr": f"<Thread({name})>", "cut": True}
        for rank, name in enumerate("ab")
    }
    named = [replace(paused(rank), variables={"t": record}) for rank, record in records.items()]
    assert row(repr(stop(*named)), "t") == "t     all: <Thread object> · not compared"
    alike = [replace(paused(rank), variables={"t": records[0]}) for rank in records]
    assert "<Thread(a)> · not compared" in row(repr(stop(*alike)), "t")


def test_tensors_that_differ_but_read_alike_are_told_apart() -> None:
    first, second = torch.zeros(4, 4), torch.zeros(4, 4)
    first[0, 0] = second[0, 1] = 1
    text = row(repr(held({"w": first}, {"w": second})), "w")
    assert "0.0625 · digest A" in text
    assert "0.0625 · digest B" in text


def test_modules_are_told_by_type_and_size() -> None:
    layer = torch.nn.Linear(4, 4)
    text = repr(held({"f": layer, "g": torch.nn.Linear(2, 2)}, {"f": layer, "g": layer}))
    assert row(text, "f") == "f     all: Linear (20 parameters, 80 B)"
    assert "Linear (6 parameters, 24 B)" in row(text, "g")
    two = repr(held({"f": layer}, {"f": torch.nn.Linear(4, 4)}))
    assert row(two, "f").split("  ")[-2:] == ["digest A", "digest B"]


def test_workers_in_other_functions_have_a_table_of_their_own() -> None:
    shown = stop(
        paused(0, 7, {"x": 1}),
        paused(1, stack=at(3, "forward", FILE), values={"y": 2}),
        groups=((0,), (1,)),
    )
    text = repr(shown)
    assert "variables of train on worker 0" in text
    assert "variables of forward on worker 1" in text
    assert [one.table.ranks for one in variable_tables(shown)] == [(0,), (1,)]


def test_the_table_of_those_that_advance_next_comes_first() -> None:
    waiting = WorkerAt(0, "collective", at(12), "waits", variables={"a": describe(1)})
    inner = paused(1, stack=at(3, "forward", FILE), values={"b": 2})
    tables = variable_tables(stop(waiting, inner))
    assert [(one.title, one.whose) for one in tables] == [
        ("variables of forward", " on worker 1"),
        ("variables of train", " on worker 0"),
    ]


def test_beyond_thirty_names_those_that_differ_stay_in_sight() -> None:
    many = {f"v{number}": number for number in range(40)}
    shown = held({**many, "odd": 1}, {**many, "odd": 2})
    text = repr(shown)
    assert row(text, "odd").split() == ["≠", "odd", "1", "2"]
    assert "and 11 more: v29, v30" in text
    (tables,) = variable_tables(shown)
    assert (len(tables.table.rows), len(tables.rest.rows)) == (30, 11)
    assert "<summary>show them</summary>" in render_html(stop_parts(shown))


def test_many_workers_are_told_by_groups_of_equal_values() -> None:
    values = [{"x": 5 if rank == 6 else 1, "rank": rank} for rank in range(12)]
    shown = held(*values)
    assert row(repr(shown), "x") == "≠  x     0-5,7-11: 1 │ 6: 5"
    assert row(repr(shown), "rank").endswith("│ 7: 7 │ and 4 more values")
    html = render_html(stop_parts(shown))
    assert "12 workers" in html
    assert '<span class="w">5</span>' in html


def test_who_stands_out_is_not_among_those_left_out() -> None:
    values = [{"x": torch.full((8,), float(rank))} for rank in range(12)]
    values[11]["x"][3] = float("nan")
    assert "11: mean 11 · 1 nan" in repr(held(*values))


def test_text_stays_within_a_hundred_columns() -> None:
    words = {"x": torch.randn(64, 64), "text": "long " * 60, "list": list(range(60))}
    for count in (1, 2, 4, 8, 12):
        values = [{**words, "own": torch.randn(8, 8), "s": f"{rank}" * 50} for rank in range(count)]
        assert max(map(len, repr(held(*values)).split("\n"))) <= 100


def test_html_of_eight_workers_is_small() -> None:
    values = [
        {f"t{number}": torch.randn(64, 64) for number in range(12)}
        | {f"s{number}": number for number in range(18)}
        for _ in range(8)
    ]
    html = render_html(stop_parts(held(*values)))
    assert len(html) < 28_000  # with each cell's label, for narrow windows
    assert html.count("<img") >= 24
    assert "<script" not in html


def test_thumbnails_of_a_row_are_on_one_scale() -> None:
    shown = held({"x": torch.zeros(4, 4) + torch.eye(4)}, {"x": 10 * torch.eye(4)})
    (tables,) = variable_tables(shown)
    levels = [max(max(line) for line in span.heat.levels) for span in tables.table.rows[0].spans]
    assert levels == [25, 254]


def test_hostile_names_and_values_are_escaped() -> None:
    class Loud:
        def __repr__(self) -> str:
            return "<img src=x onerror=alert(1)>"

    html = render_html(stop_parts(held({"<b>": Loud()}, {"<b>": Loud()})))
    assert "<img src=x" not in html
    assert "&lt;b&gt;" in html


def test_a_record_that_makes_no_sense_leaves_the_reason() -> None:
    broken = WorkerAt(0, "paused", at(3), variables={"x": 7})  # type: ignore[dict-item]
    assert "stepped" in repr(stop(broken))


# -- breakpoints, evaluations, histories -----------------------------------------------------


def test_break_points_are_listed() -> None:
    found = breaks_parts(
        [Break(2, FILE, 30, "rank == 2", (2, 3)), Break(1, CELL, 7)],
        {1: {0: 2, 1: 2}, 2: {2: 1, 3: 0}},
    )
    assert render_text(found) == (
        "breakpoints\n"
        "  #  place               condition     workers       stops\n"
        "  1  Cell In[3], line 7                all               2\n"
        "  2  shop/net.py:30      if rank == 2  2,3      2: 1, 3: 0"
    )
    assert "%disco_break" in render_text(breaks_parts([]))
    assert "stops" not in render_text(breaks_parts([Break(1, CELL, 7)]))


def test_an_evaluation_shows_values_side_by_side_and_errors_below() -> None:
    records = {rank: ("value", describe(value)) for rank, value in enumerate((5, 5, 6))}
    found = render_text(evaluated_parts("a + b", {**records, 3: ("error", "NameError: b")}))
    assert found == (
        "     expression  worker 0  worker 1  worker 2\n"
        "  ≠  a + b       0,1: 5              6\n"
        "≠ differs between workers\n"
        "worker 3: NameError: b"
    )
    failed = evaluated_parts("b", dict.fromkeys(range(2), ("error", "NameError: b")))
    assert render_text(failed) == "b\nworkers 0,1: NameError: b"
    assert evaluated_table("a", {0: describe(1)}).rows[0].name == "a"


def test_a_history_shows_when_a_variable_changed_and_when_workers_parted() -> None:
    steps = [(1, 1), (1, 1), (2, 2), (2, 3)]
    rows = [
        (number, f"Cell In[3], line {number}", {0: describe(a), 1: describe(b)})
        for number, (a, b) in enumerate(steps, 1)
    ]
    assert render_text(history_parts("loss", rows)) == (
        "loss · on workers 0,1\n"
        "     step  at                  worker 0  worker 1\n"
        "     1     Cell In[3], line 1  all: 1\n"
        "     2     Cell In[3], line 2  all: 1\n"
        "   • 3     Cell In[3], line 3  all: 2\n"
        "  ≠• 4     Cell In[3], line 4  2         3\n"
        "≠ differs between workers · • has changed"
    )
    assert "nothing was recorded" in render_text(history_parts("loss", []))


def test_a_history_of_tensors_is_on_one_scale_over_time() -> None:
    rows = [
        (number, "net.py:3", {0: describe(torch.eye(4) * number), 1: describe(torch.eye(4))})
        for number in range(1, 4)
    ]
    found = history_parts("w", rows)
    assert "w · float32[4, 4] · on workers 0,1" in render_text(found)
    across = found.children[1]  # type: ignore[union-attr]
    tops = [
        max(max(line) for line in span.heat.levels)
        for each in across.rows
        for span in each.spans
        if span.ranks[0] == 0
    ]
    assert tops == [85, 169, 254]


def test_a_long_history_leaves_out_lines_with_nothing_new() -> None:
    rows = [(n, "net.py:3", {0: describe(n // 10)}) for n in range(100)]
    text = render_text(history_parts("i", rows))
    assert "89 recorded lines are left out" in text
    assert [line.split()[1] for line in text.split("\n") if "•" in line][:3] == ["10", "20", "30"]
    assert re.search(r"^ +99 ", text, re.M)
