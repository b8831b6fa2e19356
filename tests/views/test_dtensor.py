"""A DRef to DTensors is drawn as the logical tensor that they say they make up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from discolab import plot
from discolab.engines import ThreadedSession
from discolab.views import view


@pytest.fixture(scope="module")
def sess() -> Iterator[ThreadedSession]:
    with ThreadedSession(4) as session:
        yield session


def distributed(kinds: str) -> Any:
    from torch.distributed.tensor import (
        Replicate,
        Shard,
        distribute_tensor,
        init_device_mesh,
    )

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor = torch.arange(40.0).view(10, 4)
    if kinds == "grid":
        return distribute_tensor(tensor, grid, [Shard(0), Shard(1)])
    if kinds == "axis":
        return distribute_tensor(tensor, grid["tp"], [Shard(1)])
    if kinds == "partial":
        whole = distribute_tensor(tensor, init_device_mesh("cpu", (4,)), [Shard(0)])
        return whole.T @ whole
    return distribute_tensor(tensor, init_device_mesh("cpu", (4,)), [Replicate()])


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ("grid", ["DTensor float32[10, 4] Shard(0), Shard(1) on 4", "[5:10, 2:4]  worker 3"]),
        (
            "axis",
            ["float32[10, 4] Shard(1) on 4 workers, in each of 2 groups", "[:, 2:4]  worker 3"],
        ),
        ("partial", ["float32[4, 4] Partial(sum)", "the value is their sum: workers 0-3"]),
        ("replicated", ["float32[10, 4] Replicate()", "equal on all workers"]),
    ],
)
def test_drawn_as_the_logical_tensor(sess: ThreadedSession, kinds: str, words: list[str]) -> None:
    ref = sess.call_packed(distributed, kinds)
    sess.sync_all()
    text = ref._repr_mimebundle_()["text/plain"]
    for word in words:
        assert word in text, text
    assert "could not be drawn" not in text


def unlike(kinds: str) -> Any:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    rank = mesh.get_rank()
    if kinds == "placements":
        return DTensor.from_local(torch.ones(2, 2), mesh, [Shard(rank % 2)], run_check=False)
    if kinds == "shapes":
        return DTensor.from_local(torch.ones(2 + rank, 3), mesh, [Shard(0)], run_check=False)
    return torch.ones(2, 2) if rank else DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ("placements", "DTensors disagree: Shard(0) of a mesh [4] on 0,2; Shard(1) of"),
        ("shapes", "they state [8, 3] on 0, [12, 3] on 1"),
        ("plain", "a plain tensor on 1-3"),
    ],
)
def test_dtensors_that_disagree_are_not_joined(
    sess: ThreadedSession, kinds: str, words: str
) -> None:
    ref = sess.call_packed(unlike, kinds)
    sess.sync_all()
    text = repr(view(ref))
    assert "≠ DTensors disagree" in text.split("\n")[0]
    assert words in text, text
    assert "inferred" not in text
    drawn = repr(plot(ref))
    assert "not joined" in drawn
    assert words in drawn


def test_dtensors_know_better_than_placements(sess: ThreadedSession) -> None:
    from torch.distributed.tensor import Shard

    ref = sess.call_packed(distributed, "partial")
    ref.placements = [Shard(1)]
    text = repr(view(ref))
    assert "DTensor float32[4, 4] Partial(sum)" in text
    assert ".placements say otherwise: Shard(1)" in text
    assert "Partial(sum)" in repr(plot(ref))
    assert "say otherwise" in repr(plot(ref))
