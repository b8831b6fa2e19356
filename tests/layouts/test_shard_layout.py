"""Layouts on a mesh: in words, as plain values, cut, inferred from shapes, joined again."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from discolab import ArgumentError
from discolab.layouts.infer import copies_on, fused_layouts, infer_layouts, partial_layouts
from discolab.layouts.join import join_shards
from discolab.layouts.layout import Layout, ShardLayout, Workers
from discolab.layouts.text import (
    UnknownPlacementError,
    layout_of,
    parse_layout,
    parse_value_layout,
    read_placements,
)

FOUR, GRID = Workers((4,)), Workers((2, 2))


@pytest.mark.parametrize(
    ("layout", "mesh", "words"),
    [
        (Layout(), FOUR, "Replicate()"),
        (Layout((1,)), GRID, "Replicate(), Shard(1)"),
        (Layout((0,), segments=(3,)), FOUR, "Shard(0, segments=3)"),
        (Layout((0,), (8, 2, 2), (8, 2, 2)), FOUR, "Shard(0, segments=[8, 2, 2], heads=[8, 2, 2])"),
        (Layout((0,), pad_to=8), FOUR, "Shard(0, pad_to=8)"),
        (Layout((0, None), partial=("", "sum")), GRID, "Shard(0), Partial(sum)"),
        (Layout((None,), partial=("avg",)), GRID, "Replicate(), Partial(avg)"),
    ],
)
def test_words_and_plain_values(layout: Layout, mesh: Workers, words: str) -> None:
    placed = ShardLayout(layout, mesh)
    assert placed.words == words
    assert ShardLayout.of_plain(placed.plain) == placed
    assert placed.is_partial == ("Partial" in words)


def test_a_part_is_a_view_where_it_lies_in_one_piece() -> None:
    whole = torch.arange(24.0).reshape(12, 2)
    part = ShardLayout(Layout((0,)), FOUR).part_of(whole, 1)
    assert torch.equal(part, whole[3:6])
    assert part.data_ptr() == whole[3:].data_ptr()
    fused = ShardLayout(Layout((0,), segments=(3,)), FOUR).part_of(whole, 2)
    assert torch.equal(fused, whole[[2, 6, 10]])
    assert ShardLayout(Layout(), FOUR).part_of(whole, 3) is whole


def test_padding_is_where_nothing_of_the_whole_is() -> None:
    placed = ShardLayout(Layout((0,), pad_to=4), FOUR)
    assert placed.padding((6,), 0) is None
    mask = placed.padding((6,), 3)
    assert mask is not None
    assert mask.tolist() == [True, True]
    assert placed.part_of(torch.ones(6), 3).tolist() == [0, 0]


def test_terms_that_make_one_value() -> None:
    sums = ShardLayout(Layout((0, None), partial=("", "sum")), GRID)
    assert sums.teams(range(4)) == [(0, 1), (2, 3)]
    assert sums.teams((1, 2, 3)) == [(1,), (2, 3)]


def test_shapes_allow_layouts() -> None:
    thirds = dict.fromkeys(range(4), (3, 4))
    assert [each.words for each in infer_layouts((12, 4), thirds, [FOUR])] == ["Shard(0)"]
    grid = infer_layouts((6, 4), thirds, [FOUR, GRID])
    assert [each.words for each in grid] == ["Replicate(), Shard(0)", "Shard(0), Replicate()"]
    padded = infer_layouts((6,), dict.fromkeys(range(4), (2,)), [FOUR])
    assert [each.words for each in padded] == ["Shard(0, pad_to=4)"]
    assert infer_layouts((12, 4), {0: (3,)}, [FOUR]) == []
    (plain,) = infer_layouts((12, 4), thirds, [FOUR])
    fused = fused_layouts(plain, (12, 4), thirds)
    assert [each.words for each in fused] == ["Shard(0, segments=3)"]  # halves are not even


def test_copies_may_be_terms() -> None:
    copies = infer_layouts((2,), dict.fromkeys(range(4), (2,)), [FOUR, GRID])
    assert [each.words for each in copies] == ["Replicate()"]
    words = [s.words for each in copies_on(copies, [FOUR, GRID]) for s in partial_layouts(each)]
    assert words == [
        "Partial(sum)",
        "Replicate(), Partial(sum)",
        "Partial(sum), Replicate()",
        "Partial(sum), Partial(sum)",
    ]


def test_a_parameter_is_never_partial() -> None:
    assert parse_value_layout([Shard(0), Partial()]) == Layout((0, None), partial=("", "sum"))
    assert parse_value_layout("partial") == Layout((None,), partial=("sum",))
    assert parse_value_layout("shard(0)") == parse_layout("shard(0)")
    for given in (Partial(), Layout((None,), partial=("sum",))):
        with pytest.raises(ArgumentError, match="no way to hold a parameter"):
            parse_layout(given)
    assert str(Layout((None, 0), partial=("sum", ""))) == "[partial(sum), shard(0)]"
    assert Layout((None,), partial=("sum",)).placements(1) is None


def test_placements_of_torch() -> None:
    read = read_placements([Shard(-1), Replicate(), Partial("max")])
    assert read == [("Shard", -1), ("Replicate", ""), ("Partial", "max")]
    assert layout_of(read, 2) == Layout((1, None, None), partial=("", "", "max"))
    assert layout_of(read).dims[0] == -1
    with pytest.raises(UnknownPlacementError, match="no drawing for Ragged"):
        layout_of([("Ragged", 0)])
    with pytest.raises(ValueError, match=r"Shard\(2\) of a tensor with 2 dims"):
        layout_of([("Shard", 2)], 2)


def test_a_map_joins_what_a_layout_cuts() -> None:
    placed = ShardLayout(Layout((0, 1)), GRID)
    shapes = {rank: placed.part_of(torch.empty(5, 4), rank).shape for rank in range(4)}
    joined = join_shards(shapes, range(4), placed.layout, GRID.sizes)
    assert joined.logical == (5, 4)
    assert joined.layout.words == "Shard(0), Shard(1)"
    assert joined.spans[0] == {(0,): (0, 3), (1,): (3, 2)}
    assert joined.replicas == ((0,), (1,), (2,), (3,))
