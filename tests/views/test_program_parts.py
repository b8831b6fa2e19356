"""Excerpts of a program with the places of workers, and values side by side, in each medium."""

from __future__ import annotations

import re

import pytest

from discolab.views import Heat, Text, rank_colour, render_html, render_text
from discolab.views.parts import ComparisonRow, ComparisonTable, Mark, Source, SourceLine, Span

SOURCE = Source(
    (
        SourceLine(8, "def f(x):"),
        SourceLine(9, "\treturn x < 1", (Mark((0, 1, 2), "paused"), Mark((3,), "failed"))),
        SourceLine(20, "f(y)", (Mark((4,), "waiting"),)),
    )
)
PICTURE = Heat((bytes([0, 254]),), "1 x 2 values")
TABLE = ComparisonTable(
    ("name", "type"),
    (0, 1, 2),
    (
        ComparisonRow(
            "x", "float32[2]", (Span((0, 2), Text("1")), Span((1,), Text("2", "warning")))
        ),
        ComparisonRow(
            "y", "", (Span((0, 1, 2), Text("3"), PICTURE, "not compared"),), changed=True
        ),
        ComparisonRow("z", "", (Span((0, 1), Text("a")),), differs=True),
    ),
)


def test_an_excerpt_has_places_in_front_and_gaps_between() -> None:
    assert render_text(SOURCE) == (
        "             8  def f(x):\n"
        "  0-2 → 3 ✗  9      return x < 1\n"
        "             ⋮\n"
        "        4 … 20  f(y)"
    )


def test_an_excerpt_keeps_its_places_in_html_without_styles() -> None:
    html = render_html(SOURCE)
    assert f"background:{rank_colour(4)}66" in html
    bare = re.sub(r"<style>.*?</style>", "", html)
    lines = re.sub(r"<[^>]*>", "", bare).split("\n")
    text = render_text(SOURCE).replace("<", "&lt;").split("\n")
    assert [line.rstrip() for line in lines] == [line.removeprefix("  ") for line in text]


def test_values_that_neighbours_share_are_one_cell() -> None:
    assert render_text(TABLE) == (
        "     name  type        worker 0  worker 1  worker 2\n"
        "     x     float32[2]  1         2         1\n"
        "   • y                 all: 3 · not compared\n"
        "  ≠  z                 0,1: a"
    )
    html = render_html(TABLE)
    assert '<td colspan="3" class="f">' in html
    assert '<td colspan="2" class="f">' in html
    assert html.count("<img") == 1


def test_what_has_no_room_in_columns_is_listed() -> None:
    long = tuple(Span((rank,), Text(str(rank) * 40)) for rank in range(3))
    lines = render_text(
        ComparisonTable(("name", ""), (0, 1, 2), (ComparisonRow("x", "", long),))
    ).split("\n")
    assert [line.split("x", 1)[-1].strip() for line in lines[1:]] == [
        f"0: {'0' * 40} │ 1: {'1' * 40}",
        f"2: {'2' * 40}",
    ]


def test_many_workers_have_no_columns() -> None:
    spans = Span(tuple(range(11)), Text("1")), Span((11,), Text("2", "warning"))
    table = ComparisonTable(
        ("name", ""), tuple(range(12)), (ComparisonRow("x", "", spans, differs=True),)
    )
    assert "0-10: 1 │ 11: 2" in render_text(table)
    html = render_html(table)
    assert ">12 workers<" in html
    assert "colspan" not in html


def test_a_terminal_with_colours_shows_the_same() -> None:
    pytest.importorskip("rich")
    from rich.console import Console

    from discolab.views import render_rich

    console = Console(width=100, color_system="truecolor", force_terminal=True, record=True)
    with console.capture() as captured:
        console.print(render_rich(SOURCE))
        console.print(render_rich(TABLE))
    text = re.sub(r"\x1b\[[0-9;]*m", "", captured.get())
    assert re.search(r"0-2 → 3 ✗ +9 +return x < 1", text)
    assert re.search(r"≠ +z +0,1: a", text)
    assert "all: 3 · not compared" in text
    assert "▀" in text
    red, green, blue = (int(rank_colour(4)[place : place + 2], 16) for place in (1, 3, 5))
    assert f"48;2;{red};{green};{blue}" in captured.get()
