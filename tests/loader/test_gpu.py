"""Loads onto a GPU, where there is one: rows and columns, cast and padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from discolab import make_session
from discolab.loader import load

PLAN = {
    "rows": "shard(0)",
    "columns": "shard(1)",
    "padded": "shard(0, pad_to=8)",
    "fused": "shard(0, segments=[4096, 2048, 2048], heads=[8, 1, 1])",
}


def shards(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """What worker `rank` of two holds."""
    padded = torch.cat([tensors["padded"], torch.zeros(5, 7)])
    q, k, v = tensors["fused"].split([4096, 2048, 2048])
    return {
        "rows": tensors["rows"].chunk(2, 0)[rank],
        "columns": tensors["columns"].chunk(2, 1)[rank],
        "padded": padded.chunk(2, 0)[rank],
        "fused": torch.cat([q.chunk(2)[rank], k, v]),
        "steps": tensors["steps"],
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("again", [False, True])
def test_shards_on_a_gpu_are_those_of_the_file(tmp_path: Path, dtype: Any, again: bool) -> None:
    tensors = {
        "rows": torch.randn(4100, 3000),  # of several blocks
        "columns": torch.randn(3000, 4100),
        "padded": torch.randn(11, 7),
        "fused": torch.randn(8192, 16),
        "steps": torch.arange(5),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with make_session(2, "threads", devices=["cuda:0", "cuda:0"], timeout=60) as sess:
        weights = load(sess, tmp_path, PLAN, dtype=dtype)
        if again:
            weights = load(sess, tmp_path, PLAN, dtype=dtype, into=weights)
        for name, ref in weights.items():
            for rank, got in enumerate(ref.debug_get_from_all()):
                expected = shards(tensors, rank)[name]
                if dtype and expected.is_floating_point():
                    expected = expected.to(torch.bfloat16)
                assert torch.equal(got.cpu(), expected), (name, rank)
        where = sess.call_packed(lambda tensor: str(tensor.device), weights["rows"])
        assert where.debug_get_from_all() == ["cuda:0", "cuda:0"]
