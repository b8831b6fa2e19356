"""`shard`: a checkpoint cut without a session; the rest of it is in test_round_trips.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import ArgumentError
from discolab.loader import CheckpointError, open_checkpoint
from discolab.loader.catalog import Catalog
from discolab.loader.convert import shard
from discolab.loader.formats.opening import verify
from discolab.loader.presharded import logical
from tests.loader.shard_oracle import (
    check_shards,
    chunks,
    random_tensor,
    read_all,
    same_bits,
    write_source,
)

TENSORS = {
    "w": random_tensor((7, 5), torch.float32, 1),
    "h": random_tensor((6, 4), torch.float16, 2),
    "n": torch.arange(5),
}
PLAN = {"w": "shard(0)", "h": "shard(1)"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source("safetensors", tmp_path / "in", TENSORS)


def files(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(os.listdir(folder))


def test_a_file_for_each_worker(source: Path, tmp_path: Path) -> None:
    shard(source, tmp_path / "out", PLAN, 2)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    by_file: dict[str, list[str]] = {}
    for name, file in index["weight_map"].items():
        by_file.setdefault(file, []).append(name)
    assert sorted(map(sorted, by_file.values())) == [
        [f"{name}_shard-{rank}-of-2" for name in "hnw"] for rank in (1, 2)
    ]


def test_a_cache_can_be_verified(source: Path, tmp_path: Path) -> None:
    made = shard(source, tmp_path / "out", PLAN, 2, format="tensor-cache", max_file_bytes=64)
    assert len(made.files) > 2
    verify(made)
    check_shards(
        made,
        {
            "w": chunks(TENSORS["w"], 2, 0),
            "h": chunks(TENSORS["h"], 2, 1),
            "n": [TENSORS["n"]] * 2,
        },
    )


def test_cast(source: Path, tmp_path: Path) -> None:
    """Floating ones alone, and as torch rounds."""
    made = shard(source, tmp_path / "out", dtype="bfloat16", presharded=False)
    found = read_all(made)
    assert same_bits(found["h"], TENSORS["h"].bfloat16())
    assert torch.equal(found["n"], TENSORS["n"])
    with pytest.raises(ArgumentError, match="floating"):
        shard(source, tmp_path / "out", dtype="int8")


def test_f32_to_bf16(tmp_path: Path) -> None:
    """What TVM's encoding holds stays so in a tensor-cache, and is float32 elsewhere."""
    numbers = {"w": torch.linspace(-3, 3, 11)}
    path = write_source("torch", tmp_path / "in", numbers)
    options: dict[str, Any] = {"format": "tensor-cache", "presharded": False}
    one = shard(path, tmp_path / "1", dtype="bfloat16", bf16_as="f32-to-bf16", **options)
    two = shard(tmp_path / "1", tmp_path / "2", {"w": "shard(0)"}, 2, format="tensor-cache")
    three = shard(tmp_path / "2", tmp_path / "3", presharded=False)
    wanted = numbers["w"].bfloat16().float()
    for made, nbytes in ((one, 2), (two, 2), (three, 4)):
        entry = logical(made).entries["w"]
        assert (entry.dtype, entry.stored.itemsize) == (torch.float32, nbytes)
        assert torch.equal(read_all(logical(made))["w"], wanted)


@pytest.mark.parametrize("target", ["safetensors", "tensor-cache"])
def test_into_its_own_folder(tmp_path: Path, target: str) -> None:
    """The source is read to the end before it is replaced."""
    path = write_source("torch", tmp_path / "in", TENSORS)
    out = tmp_path / "out"
    made: Catalog = shard(path, out, presharded=False, format=target)
    for workers in (2, 3, 4):
        made = shard(out, out, PLAN, workers, format=target)
        assert len(made.files) == workers
        assert len(files(out)) == workers + 1
    made = shard(out, out, format=target, presharded=False)
    found = read_all(made)
    assert all(same_bits(found[name], tensor) for name, tensor in TENSORS.items())
    assert len(files(out)) == 2


def test_beside_a_file_that_is_the_source(source: Path) -> None:
    """A file that no index names, and that has another name than ours, stays."""
    shard(source / "x.safetensors", source, PLAN, 2)
    assert "x.safetensors" in files(source)
    found = read_all(logical(open_checkpoint(source)))
    assert all(same_bits(found[name], tensor) for name, tensor in TENSORS.items())


def test_a_foreign_source_cut_by_another_plan(tmp_path: Path) -> None:
    tensors = {f"w_shard-{i}": t for i, t in enumerate(chunks(TENSORS["w"], 3, 0))}
    path = write_source("safetensors", tmp_path / "in", tensors)
    made = shard(path, tmp_path / "out", {"w": "shard(1)"}, 2, source_plan={"w": "shard(0)"})
    check_shards(made, {"w": chunks(TENSORS["w"], 2, 1)})


def test_nothing_comes_of_a_bad_source(source: Path, tmp_path: Path) -> None:
    """Nor of a plan that does not fit; what was there stays."""
    out = tmp_path / "out"
    shard(source, out, PLAN, 2)
    before = files(out)
    catalog = open_checkpoint(source)
    with pytest.raises(ArgumentError, match="dimension 5"):
        shard(source, out, {"w": "shard(5)"}, 2)
    os.truncate(source / "x.safetensors", 100)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        shard(catalog, out, PLAN, 3)  # it was whole when its index was read
    assert files(out) == before
    assert not (tmp_path / "new").exists()
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        shard(catalog, tmp_path / "new" / "deeper", PLAN, 3)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("workers", "groups", "match"), [(0, 1, "from 1 on"), (True, 1, "from 1 on"), (4, 3, "equal")]
)
def test_workers(source: Path, tmp_path: Path, workers: Any, groups: int, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        shard(source, tmp_path / "out", None, workers, groups)


def test_other_formats_are_not_overwritten(tmp_path: Path) -> None:
    path = write_source("dcp", tmp_path / "in", TENSORS)
    with pytest.raises(ArgumentError, match="torch DCP"):
        shard(path, path, PLAN, 2)
