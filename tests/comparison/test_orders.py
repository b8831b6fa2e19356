"""The orders in which rows are dealt to workers."""

from __future__ import annotations

import torch

from discolab import Session, compare, current_worker
from discolab.comparison.orders import fitting_orders, marks_of, ordered, usual_orders
from discolab.layouts.layout import Layout, ShardLayout, Workers


def test_strides_blocks_and_zigzag() -> None:
    orders = dict(usual_orders(16, 2))
    assert orders["dealt in turn"][:8] == tuple(range(0, 16, 2))
    assert orders["blocks of 2 dealt in turn"][:8] == (0, 1, 4, 5, 8, 9, 12, 13)
    assert orders["in zigzag"][:8] == (0, 1, 2, 3, 12, 13, 14, 15)


def test_rows_that_cannot_be_dealt_evenly_have_no_order() -> None:
    assert not list(usual_orders(10, 4))


def test_a_part_of_an_order_is_what_a_worker_takes() -> None:
    whole = torch.randn(3, 16)
    layout = ShardLayout(Layout((1,)), Workers((4,)))
    strided = ordered(layout, 1, ("dealt in turn", dict(usual_orders(16, 4))["dealt in turn"]))
    assert torch.equal(strided.part_of(whole, 2), whole[:, 2::4])
    again = ShardLayout.of_plain(strided.plain)
    assert torch.equal(again.part_of(whole, 2), whole[:, 2::4])
    assert strided.words == "Shard(1), dealt in turn"


def test_any_order_of_distinct_rows_is_found_where_it_counts() -> None:
    whole = torch.randn(12, 5)
    rows = torch.randperm(12)
    marks = marks_of(whole, 0), marks_of(whole[rows], 0)
    assert not list(fitting_orders(*marks, 4, others=False))
    assert list(fitting_orders(*marks, 4, others=True)) == [
        ("in another order", tuple(rows.tolist()))
    ]


def test_a_result_in_an_order_of_its_own_differs(four: Session) -> None:
    def whole(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def strided(x: torch.Tensor) -> torch.Tensor:
        return (2 * x)[current_worker().rank :: current_worker().world_size]

    assert not compare(whole, strided, torch.randn(16, 3), session=four, backward=False)
