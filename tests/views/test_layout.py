"""Shards of a logical tensor: where each lies, who must agree, and what cannot be drawn."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from discolab.layouts.join import join_shards
from discolab.layouts.text import layout_of, read_placements
from discolab.views import describe, dref_parts, render_html, render_text
from discolab.views.dref.layout import draw_plan
from discolab.views.parts import Grid


def grid(shapes: list[tuple[int, ...]], placements: Any, mesh: tuple[int, ...]) -> Grid:
    read = layout_of(read_placements(placements), len(shapes[0]))
    plan = join_shards(dict(enumerate(shapes)), range(len(shapes)), read, mesh)
    found = draw_plan(plan, "c")
    assert found is not None
    return found


def labels(found: Grid) -> list[tuple[str, tuple[int, ...]]]:
    return [(tile.label, tile.owners) for row in found.tiles for tile in row]


def test_uneven_and_empty_shards() -> None:
    found = grid([(2, 4), (2, 4), (1, 4), (0, 4)], [Shard(0)], (4,))
    assert found.heights == (2, 2, 1)
    assert found.widths == (4,)
    assert labels(found) == [("[0:2, :]", (0,)), ("[2:4, :]", (1,)), ("[4:5, :]", (2,))]


def test_two_mesh_axes() -> None:
    found = grid([(2, 3)] * 4, [Shard(0), Shard(-1)], (2, 2))
    assert labels(found)[1] == ("[0:2, 3:6]", (1,))
    assert labels(found)[2] == ("[2:4, 0:3]", (2,))
    found = grid([(2, 3)] * 4, [Replicate(), Shard(1)], (2, 2))
    assert labels(found) == [("[:, 0:3]", (0, 2)), ("[:, 3:6]", (1, 3))]
    found = grid([(1, 3)] * 4, [Shard(0), Shard(0)], (2, 2))
    assert [owners for _, owners in labels(found)] == [(0,), (1,), (2,), (3,)]


def test_partial_and_replicas() -> None:
    read = layout_of(read_placements([Replicate(), Partial("max")]), 1)
    plan = join_shards(dict.fromkeys(range(4), (3,)), range(4), read, (2, 2))
    assert plan.replicas == ((0, 2), (1, 3))
    assert plan.words == "Replicate(), Partial(max)"
    found = draw_plan(plan, "c")
    assert found is not None
    assert found.partial
    assert found.heights == (0,)


def test_many_dims_and_nothing_to_draw() -> None:
    found = grid([(2, 3, 4, 5)] * 2, [Shard(1)], (2,))
    assert found.caption == "c; dims 1 and 3 drawn"
    assert labels(found)[1] == ("[:, 3:6, :, :]", (1,))
    for shape in ((), (0, 3)):
        plan = join_shards(
            {0: shape}, [0], layout_of(read_placements(Replicate()), len(shape)), (1,)
        )
        assert draw_plan(plan, "c") is None


@pytest.mark.parametrize(
    ("shapes", "placements", "mesh"),
    [
        ([(2, 3), (2, 4)], [Shard(0)], (2,)),
        ([(2,), (2, 4)], [Shard(0)], (2,)),
        ([(2, 3), (2, 3)], [Shard(0)], (3,)),
        ([(2, 3), (2, 3)], [Shard(0), Shard(1)], (2,)),
        ([(2, 3), (2, 3)], [Shard(5)], (2,)),
        ([(2, 3), (2, 3)], ["Shard(0)"], (2,)),
    ],
)
def test_what_does_not_fit(shapes: Any, placements: Any, mesh: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        grid(shapes, placements, mesh)
    held = {rank: describe(torch.ones(shape)) for rank, shape in enumerate(shapes)}
    part = dref_parts(held, name="w", num_workers=2, placements=placements, mesh_shape=mesh)
    assert "layout not drawn" in render_text(part)


def test_drawing_is_to_scale_or_says_so() -> None:
    def html(found: Grid) -> str:
        return render_html(found)

    fair = html(grid([(100, 300)] * 2, [Shard(0)], (2,)))
    assert fair.count("--w:240;--h:80;") == 2
    assert "not to scale" not in fair
    assert "not to scale" in html(grid([(10**9, 1)] * 2, [Shard(0)], (2,)))
    assert "dashed" in html(grid([(2, 3)] * 2, [Partial()], (2,)))
    assert "linear-gradient" in html(grid([(2, 3)] * 2, [Replicate()], (2,)))


def test_groups_are_drawn_apart() -> None:
    held = {rank: describe(torch.ones(2) * rank) for rank in range(4)}
    part = dref_parts(held, name="w", num_workers=4, placements=[Shard(0)], num_groups=2)
    drawn = render_text(part)
    assert "float32[4] Shard(0) on 4 workers, in each of 2 groups · shards distinct" in drawn
    assert "group 1: Shard(0) of [4]" in drawn
    both = dref_parts(
        held, name="w", num_workers=4, placements=[Replicate(), Shard(0)], num_groups=2
    )
    assert "replicas differ: A B C D (workers 2,3)" in render_text(both)
