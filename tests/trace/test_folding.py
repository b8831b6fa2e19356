"""Many events in few spans: pure."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from discolab.trace import Event, fold


def command(seq: int, begin: int, end: int, **more: object) -> Event:
    facts = {"state": "done", "kind": "command", "name": "f", **more}
    return Event(seq, begin=begin, end=end, **facts)  # type: ignore[arg-type]


def test_few_events_stay_themselves() -> None:
    events = [command(0, 0, 40), command(1, 50, 90, name="g", state="failed")]
    spans = fold(events, 0, 100, 100)
    assert [(s.begin, s.end, s.name, s.state, s.count, s.seq) for s in spans] == [
        (0, 40, "f", "done", 1, 0),
        (50, 90, "g", "failed", 1, 1),
    ]


def test_short_ones_are_joined_under_the_longest_name() -> None:
    events = [command(0, 10, 11), command(1, 12, 16, name="long"), command(2, 17, 18)]
    (span,) = fold(events, 0, 10_000, 100)
    assert (span.begin, span.end, span.name, span.count, span.seq) == (10, 18, "long", 3, 1)


@pytest.mark.parametrize("pixels", [1, 7, 100, 1000])
def test_a_row_has_no_more_spans_than_pixels(pixels: int) -> None:
    random.seed(3)
    time, events = 0, []
    for seq in range(20_000):
        begin = time + random.randrange(4)
        time = begin + int(random.paretovariate(0.7))
        events.append(command(seq, begin, time))
    spans = fold(events, 0, time, pixels)
    assert len(spans) <= pixels + 1
    assert sum(span.count for span in spans) == len(events)
    assert fold(events, 0, time, pixels) == spans


def test_what_overlaps_is_bounded_too() -> None:
    events = [
        command(seq, seq, 100_000 + seq, kind="collective", asynchronous=True)
        for seq in range(1000)
    ]
    assert len(fold(events, 0, 101_000, 50)) <= 51


def test_the_window_cuts_off_what_is_outside() -> None:
    events = [command(n, 100 * n, 100 * n + 50) for n in range(100)]
    spans = fold(events, 1010, 1290, 1000)
    assert [span.seq for span in spans] == [10, 11, 12]


def test_what_goes_on_ends_now() -> None:
    events = [command(0, 10, 0, state="running")]
    assert fold(events, 0, 100, 100, now=60)[0].end == 60
    assert fold(events, 0, 100, 100)[0].end == 100


def test_the_worst_state_is_shown() -> None:
    events = [command(0, 0, 5), command(1, 6, 7, state="failed"), command(2, 8, 9, state="stopped")]
    (span,) = fold(events, 0, 10_000, 10)
    assert (span.state, span.name) == ("failed", "f")


def test_spans_have_rows_by_depth_and_waits_are_summed() -> None:
    events = [
        command(0, 0, 100),
        command(1, 0, 90, kind="span", depth=0),
        command(2, 0, 80, kind="span", depth=1),
        command(3, 0, 70, kind="span", depth=9),
        command(4, 0, 4, kind="collective", name="all_reduce"),
        command(5, 5, 9, kind="collective", name="barrier"),
    ]
    spans = fold(events, 0, 100, 10, waits={4: 3, 5: 1})
    assert Counter(span.row for span in spans) == {0: 1, 1: 1, 2: 1, 3: 1, 5: 1}
    assert spans[-1].waited == 4


def test_nothing_and_no_time_at_all() -> None:
    assert fold([], 0, 100, 100) == []
    assert fold([command(0, 5, 5, kind="mark")], 5, 5, 100)[0].row == 6
