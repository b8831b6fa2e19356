"""Merging what several workers printed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from discolab.notebook.output import label, merge


def lines(**texts: str) -> list[str]:
    items = {int(name[1:]): text.split() for name, text in texts.items()}
    return [f"{label(ranks)}{item}" for ranks, item in merge(items)]


def test_nothing() -> None:
    assert merge({}) == []
    assert merge({0: [], 1: []}) == []


def test_equal_text_is_given_once() -> None:
    assert lines(r0="a b", r1="a b", r2="a b") == ["[0-2]a", "[0-2]b"]


def test_an_extra_line_of_one_worker_does_not_break_the_rest() -> None:
    assert lines(r0="extra a b", r1="a b", r2="a b") == ["[0]extra", "[0-2]a", "[0-2]b"]


def test_blocks_between_common_lines_are_in_rank_order() -> None:
    assert lines(r0="s x0 y0 e", r1="s x1 y1 e") == [
        "[0-1]s", "[0]x0", "[0]y0", "[1]x1", "[1]y1", "[0-1]e",
    ]  # fmt: skip


def test_equal_blocks_are_given_once_with_their_ranks() -> None:
    assert lines(r0="p", r1="q", r2="p", r3="q") == ["[0,2]p", "[1,3]q"]


def test_a_silent_worker_does_not_count() -> None:
    assert merge({0: ["a"], 1: [], 2: ["a"]}) == [((0, 2), "a")]


texts = st.lists(st.sampled_from("abc"), max_size=8)


@given(st.dictionaries(st.integers(0, 4), texts, max_size=5))
def test_every_workers_lines_keep_their_order(items: dict[int, list[str]]) -> None:
    merged = merge(items)
    for rank, own in items.items():
        assert [item for ranks, item in merged if rank in ranks] == own
