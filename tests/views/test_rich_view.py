"""What a terminal shows through rich: the same facts as the text, and colours."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

pytest.importorskip("rich")

from rich.console import Console

import discolab
from discolab.engines import ThreadedSession
from discolab.views import (
    before_after,
    describe,
    dref_parts,
    rank_colour,
    render_rich,
    render_text,
    view,
)
from discolab.views.parts import (
    Badge,
    Bars,
    Box,
    Column,
    Heat,
    Interval,
    Lane,
    Lanes,
    Legend,
    Mark,
    Row,
    Source,
    SourceLine,
    Table,
    Text,
    Track,
    Tracks,
)
from discolab.views.plot.plotting import Reader, parts_of


@pytest.fixture(scope="module")
def four() -> Iterator[ThreadedSession]:
    with ThreadedSession(4) as session:
        yield session


def console(width: int = 120) -> Console:
    return Console(
        record=True, width=width, color_system="truecolor", force_terminal=True, file=Sink()
    )


class Sink:
    """A file that forgets."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Nothing is kept."""


def shown(value: Any, width: int = 120) -> str:
    drawn = console(width)
    drawn.print(value)
    return drawn.export_text()


def coloured(value: Any) -> str:
    drawn = console()
    drawn.print(value)
    return drawn.export_text(styles=True)


def part(values: Any, **options: Any) -> Any:
    records: dict[int, Any] = {rank: describe(value) for rank, value in enumerate(values)}
    return dref_parts(records, name="w", num_workers=len(records), **options)


def bare(colour: str) -> str:
    """A colour as it stands in an escape sequence."""
    return ";".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))


@pytest.mark.parametrize(
    "picture",
    [
        part(torch.randn(64, 8).chunk(4), placements=[Shard(0)]),
        part(torch.randn(8, 64).chunk(4, 1), placements=[Shard(1)]),
        part([torch.randn(5, 5) for _ in range(4)], placements=[Partial()]),
        part([torch.arange(6.0)] * 2 + [torch.arange(6.0) + 1], placements=[Replicate()]),
        part([torch.arange(3), None, "s", 4.5]),
        part([{"a": torch.ones(2)}] * 4),
        part([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]),
        part([torch.ones(2, 3, 4)] * 8),
    ],
)
def test_the_same_numbers_as_in_the_text(picture: Any) -> None:
    pattern = r"(?<!\d)-?\d+\.?\d*(?:e[-+]\d+)?|inf|nan"
    drawn = shown(render_rich(picture), 160)
    in_text = re.sub(r"^  \[[\d,-]+\]", "", render_text(picture), flags=re.M)
    assert set(re.findall(pattern, in_text)) <= set(re.findall(pattern, drawn))
    assert max(map(len, shown(render_rich(picture), 40).split("\n"))) <= 40


def test_golden() -> None:
    records = {0: describe(1), 1: {"kind": "failure", "message": "E: x"}, 2: describe(2)}
    drawn = shown(render_rich(dref_parts(records, name="n", num_workers=3)), 60)
    assert [line.rstrip() for line in drawn.split("\n")] == [
        "DRef n · int on 3 workers · all distinct · worker 1 failed",
        "  rank  digest  state   value",
        "  ▌ 0   A               1",
        "  ▌ 1           failed",
        "  ▌ 2   B               2",
        "[1] E: x",
        "",
    ]


def test_ranks_have_their_colours() -> None:
    drawn = coloured(render_rich(part(range(4))))
    for rank in range(4):
        assert f"38;2;{bare(rank_colour(rank))}m▌" in drawn
    grid = coloured(
        render_rich(part(torch.empty(8, 8, device="meta").chunk(2), placements=[Shard(0)]))
    )
    assert f"48;2;{bare(rank_colour(1))}m" in grid


def test_warnings_and_errors_stand_out() -> None:
    drawn = coloured(
        render_rich(
            Table((Column("a"),), (Row((Text("x", "warning"),)), Row((Text("y", "error"),))))
        )
    )
    assert "\x1b[1;33mx" in drawn
    assert "\x1b[1;31my" in drawn


def test_thumbnails_are_half_blocks() -> None:
    drawn = console()
    drawn.print(render_rich(Heat((b"\x00\xfe", b"\xfe\x00", b"\xff\xff"), "alt")))
    assert drawn.export_text(clear=False).split() == ["▀▀", "▀▀"]
    assert "38;2;255;0;200m▀▀" in drawn.export_text(styles=True)  # not finite


def test_bars_badges_and_legends() -> None:
    assert shown(render_rich(Bars((0, 0.5, 1), "alt"))).strip() == "▁▅█"
    drawn = coloured(render_rich(Table((Column("d"),), (Row((Badge("B", odd=True),)),))))
    assert "\x1b[1;7m B " in drawn
    legend = shown(render_rich(Legend("-1", "2", nonfinite=True, words="sampled")))
    assert legend.split() == ["-1", "2", "not", "finite", "sampled"]


def test_lanes_have_the_colours_of_where_values_come_from() -> None:
    lanes = Lanes(("before", "after"), (Lane(0, (((Box("1", (0,)),),), ((Box("3", (0, 1)),),))),))
    drawn = coloured(render_rich(lanes))
    assert f"48;2;{bare(rank_colour(1))}m" in drawn
    assert shown(render_rich(lanes)).split() == ["rank", "before", "after", "▌", "0", "1", "3"]


def test_nothing_of_a_value_is_taken_for_markup_or_escapes() -> None:
    evil = "[bold red]\x1b[31mx[/]"
    drawn = shown(render_rich(part([evil] * 2)))
    assert "[bold red]" in drawn
    assert "\x1b" not in drawn
    assert "could not be drawn" in shown(render_rich(object()))  # type: ignore[arg-type]


def test_parts_stand_beside_each_other_where_there_is_room() -> None:
    picture = part(torch.randn(6, 8).chunk(2), placements=[Shard(0)])
    assert len(shown(render_rich(picture), 160).split("\n")) < len(
        shown(render_rich(picture), 60).split("\n")
    )


def test_drefs_sessions_and_comparisons_show_themselves(four: ThreadedSession) -> None:
    x = four.call_packed(torch.arange, 4)
    assert "equal on all workers" in shown(x)
    assert "4 workers on cpu · idle" in shown(four)
    assert "identical" in shown(four.compare(x, x))
    assert "shows" not in shown(before_after(x, x))


def test_all_that_is_drawn_shows_itself(four: ThreadedSession) -> None:
    x = four.call_packed(torch.randn, 64, 64)
    assert "dp=2" in shown(four.mesh(dp=2, tp=2))
    assert "4 workers" in shown(view(x))
    assert "nobody waits" in shown(discolab.doctor(four))
    plot = parts_of(Reader(x).whole("value"), "x")
    picture = render_text(plot).split("\n")[3:9]
    assert all(line.strip() in shown(render_rich(plot), 200) for line in picture)


def test_excerpts_and_time_have_the_lines_of_the_text() -> None:
    marks = Mark((0, 1), "paused"), Mark((3,), "waiting")
    source = Source((SourceLine(1, "x = 1"), SourceLine(9, "y\t= 2", marks)))
    tracks = Tracks((Track(0, ((Interval(0.1, 0.9, "busy"),),)),), ((0.0, "0 s"), (1.0, "1 s")))
    for each in (source, tracks):
        lines = shown(render_rich(each), 100).rstrip("\n").split("\n")
        assert [line.rstrip() for line in lines] == render_text(each).split("\n")
    assert f"48;2;{bare(rank_colour(3))}m3" in coloured(render_rich(source))


def test_a_dref_of_a_closed_session() -> None:
    with ThreadedSession(1) as session:
        ref = session.call_packed(int)
    assert "of a closed session" in shown(ref)


def test_rich_is_imported_only_when_it_is_used() -> None:
    code = "import sys, discolab; assert 'rich' not in sys.modules; assert discolab.DRef.__rich__"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
