"""Layouts that nobody has told: what records prove is drawn, and said to be inferred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from discolab.layouts.infer import infer_axes, infer_maps
from discolab.views import describe, dref_parts, render_html, render_text


def held(values: Sequence[object]) -> dict[int, Any]:
    return {rank: describe(value) for rank, value in enumerate(values)}


def both(values: Sequence[object], **options: Any) -> tuple[str, str]:
    part = dref_parts(held(values), name="w", num_workers=len(values), **options)
    return render_text(part), render_html(part)


def test_shapes_that_differ_in_one_dim_are_shards() -> None:
    text, html = both(torch.randn(10, 4).split([4, 4, 2]))
    assert text.startswith(
        "DRef w · float32[10, 4] Shard(0) (inferred) on 3 workers · shards distinct\n"
        "  Shard(0) (inferred) of [10, 4]\n    [0:4, :]   worker 0\n"
    )
    assert "(inferred)" in html
    text, _ = both([torch.ones(3, 2, 5), torch.zeros(3, 4, 5)])
    assert "float32[3, 6, 5] Shard(1) (inferred)" in text
    for values in ([torch.ones(2, 3), torch.ones(3, 2)], [torch.ones(2), torch.ones(2, 2)]):
        text, _ = both(values)
        assert "inferred" not in text


def test_groups_and_meshes_are_minded() -> None:
    uneven = [torch.randn(size, 4) for size in (3, 2, 3, 2)]
    text, _ = both(uneven, num_groups=2)
    assert "float32[5, 4] Shard(0) (inferred) on 4 workers, in each of 2 groups" in text
    text, _ = both(uneven, axes={"dp": 2, "tp": 2})
    assert "inferred" not in text  # nothing says that dp holds copies
    text, _ = both([*uneven[:2], *uneven[:2]], axes={"dp": 2, "tp": 2})
    assert "float32[5, 4] Replicate(), Shard(0) (inferred)" in text
    assert infer_maps({rank: (2 + rank // 2,) for rank in range(4)}, None, 2) == ()


def test_equal_along_one_axis_of_a_mesh() -> None:
    one, two = torch.randn(8, 8), torch.randn(8, 8)
    text, html = both([one, two, one, two], axes={"dp": 2, "tp": 2})
    assert "✓ equal along dp, distinct along tp" in text
    assert "replicated along dp (inferred)" in html
    assert "set .placements" in html
    assert "≠" not in html
    text, _ = both([one, one, two, two], axes={"dp": 2, "tp": 2})
    assert "✓ equal along tp, distinct along dp" in text
    text, _ = both([one, two, one, two], num_groups=2)
    assert "✓ equal in all groups, distinct within each" in text
    text, _ = both([one, two, one, one], axes={"dp": 2, "tp": 2})
    assert "≠ differ: A B A A (worker 1)" in text
    assert infer_axes(dict(enumerate("ABCD")), {"dp": 2, "tp": 2}) is None
    assert infer_axes(dict(enumerate("ABAB")), {"dp": 4}) is None


def test_unknown_layouts_stand_apart() -> None:
    text, html = both([torch.randn(8, 8) for _ in range(4)])
    assert "how they join is not known: set .placements to see them joined" in html
    assert html.count("<img") == 4
    assert text.count("\n") == 5  # a title, a heading, and a row for each worker
    _, html = both([torch.eye(4) + (rank == 2) for rank in range(4)])
    assert "one tile per distinct value" in html
    assert html.count("<img") == 2
    assert html.count("B ≠") == 1


def test_values_on_some_workers_only() -> None:
    text, html = both([None, None, torch.randn(4, 4), None])
    assert "only worker 2 holds a tensor; workers 0,1,3: None" in html
    assert "None on workers 0,1,3, float32[4, 4] on worker 2" in text
    assert html.count("<img") == 1
    same = torch.randn(4, 4)
    _, html = both([None, None, same, same])
    assert html.count("<img") == 1
    assert "workers 2,3" in html
    _, html = both([None, None, same, "other"])
    assert "only workers" not in html


def test_equal_replicas_of_each_group_are_not_called_equal_everywhere() -> None:
    values = [torch.full((2, 3), float(rank // 2)) for rank in range(4)]
    text, _ = both(values, placements=[Replicate()], num_groups=2)
    assert "✓ equal within each of 2 groups" in text.split("\n")[0]


def test_placements_that_do_not_fit_the_session_are_refused_in_words() -> None:
    values = [torch.full((6, 3), float(rank)) for rank in range(4)]
    for placements in ([Shard(0), Shard(1)], [Shard(0), Replicate()]):
        text, _ = both(values, placements=placements)
        assert "layout not drawn: 2 placements, but the session has neither groups nor" in text
        assert "replicas differ" not in text
    text, _ = both(values, placements=[Shard(0)], axes={"dp": 2, "tp": 2})
    assert "taken over all workers (1 placement; the mesh has axes dp, tp)" in text
    assert "[6:12, :]   worker 1" in text


def test_text_says_of_replicas_that_differ_what_html_says() -> None:
    values = [torch.full((4, 4), float(rank)) for rank in range(2)]
    text, html = both(values, placements=[Replicate()])
    for words in (text, html):
        assert words.count("Replicate() of [4, 4]; one tile per distinct value") == 1
