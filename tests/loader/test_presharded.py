"""Shards as whole parameters: names of TVM and of MLC, what is missing, what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from discolab import ArgumentError
from discolab.loader import CheckpointError, Plan, open_checkpoint
from discolab.loader.catalog import Catalog
from discolab.loader.convert import shard
from discolab.loader.presharded import is_presharded, logical, sharding_of
from tests.loader.shard_oracle import chunks, fused, padded, random_tensor, read_all, same_bits

WHOLE = random_tensor((9, 6), torch.bfloat16)


def stored(folder: Path, tensors: dict[str, torch.Tensor]) -> Catalog:
    """A checkpoint of somebody else."""
    save_file({name: t.clone() for name, t in tensors.items()}, folder / "m.safetensors")
    return open_checkpoint(folder / "m.safetensors")


def mlc(name: str, shards: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """With MLC's names, from 0."""
    return {f"{name}_shard-{rank}": one for rank, one in enumerate(shards)}


def tvm(name: str, shards: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """With TVM's names, from 1."""
    count = len(shards)
    return {f"{name}_shard-{rank + 1}-of-{count}": one for rank, one in enumerate(shards)}


def ours(tmp_path: Path) -> Catalog:
    """Cut by discolab for two workers."""
    save_file({"w": WHOLE, "b": WHOLE[0].clone()}, tmp_path / "in.safetensors")
    return shard(tmp_path / "in.safetensors", tmp_path / "out", {"w": "shard(0)"}, 2)


def with_sharding(catalog: Catalog, **changes: Any) -> Catalog:
    """With other words in the metadata."""
    said = {**json.loads(catalog.metadata["discolab"]), **changes}
    return replace(catalog, metadata={"discolab": said})


def without(catalog: Catalog, *names: str) -> Catalog:
    """With some tensors left out."""
    entries = {name: entry for name, entry in catalog.entries.items() if name not in names}
    return replace(catalog, entries=entries)


def test_a_plain_checkpoint_is_left_alone(tmp_path: Path) -> None:
    catalog = stored(tmp_path, {"w": WHOLE})
    assert not is_presharded(catalog)
    assert logical(catalog) is catalog
    assert sharding_of(catalog) is None


def test_ours_says_how_it_was_cut(tmp_path: Path) -> None:
    catalog = ours(tmp_path)
    assert is_presharded(catalog)
    whole = logical(catalog)
    assert set(whole.entries) == {"w", "b"}
    assert len(whole.entries["w"].pieces) == 2
    assert len(whole.entries["b"].pieces) == 1  # both hold all of it; one is read
    assert "discolab" not in whole.metadata
    found = read_all(whole)
    assert same_bits(found["w"], WHOLE)
    assert same_bits(found["b"], WHOLE[0])


@pytest.mark.parametrize("names", [mlc, tvm])
@pytest.mark.parametrize(
    ("layout", "shards"),
    [
        ("shard(0)", chunks(WHOLE, 3, 0)),
        ("shard(1)", chunks(WHOLE, 4, 1)),
        ("shard(0)", chunks(WHOLE, 4, 0)),
        ("shard(0, segments=[5, 4])", fused(WHOLE, 2, 0, [5, 4])),
        ("shard(1, segments=[4, 2], heads=[4, 2])", fused(WHOLE, 4, 1, [4, 2], [4, 2])),
        ("shard(0, heads=[3])", fused(WHOLE, 6, 0, [9], [3])),
        ("replicate", [WHOLE, WHOLE]),
    ],
)
def test_others_by_a_plan(
    tmp_path: Path, names: Any, layout: str, shards: list[torch.Tensor]
) -> None:
    catalog = stored(tmp_path, {**names("w", shards), "norm": WHOLE[0]})
    whole = logical(catalog, Plan.of({"w": layout}))
    assert set(whole.entries) == {"w", "norm"}
    assert same_bits(read_all(whole)["w"], WHOLE)


def test_padding_is_part_of_what_others_have(tmp_path: Path) -> None:
    catalog = stored(tmp_path, tvm("w", padded(WHOLE, 2, 0, 4)))
    whole = logical(catalog, Plan.of({"w": "shard(0, pad_to=4)"}))
    assert whole.entries["w"].shape == (12, 6)
    assert same_bits(read_all(whole)["w"][:9], WHOLE)


def test_others_need_a_plan(tmp_path: Path) -> None:
    catalog = stored(tmp_path, mlc("w", chunks(WHOLE, 2, 0)))
    with pytest.raises(ArgumentError, match=r"'w_shard-0'.* does not say how 'w' was cut.* plan="):
        logical(catalog)


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"w_shard-1-of-3": (2,), "w_shard-3-of-3": (2,)}, r"'w_shard-2-of-3' is missing: 2 of"),
        ({"w_shard-0": (2,), "w_shard-2": (2,)}, r"'w_shard-1' is missing: 2 of its 3 shards"),
        ({"w_shard-1-of-999999999": (2,)}, r"missing: 1 of its 999999999 shards"),
        ({"w_shard-1-of-2": (2,), "w_shard-2-of-3": (2,)}, r"another number of shards"),
        ({"w_shard-3-of-2": (2,)}, r"numbered from 1 to 2"),
        ({"w_shard-0-of-2": (2,)}, r"numbered from 1 to 2"),
        ({"w_shard-1-of-1": (2,), "w": (2,)}, r"whole and as shards"),
        ({"w_shard-0": (2, 3), "w_shard-1": (2, 4)}, r"\(2, 3\), \(2, 4\), .* shard\(0\)"),
        ({"w_shard-0": (2, 3), "w_shard-1": (2,)}, r"has 1 dimensions"),
        ({"w_shard-0": (2,), "w_shard-1": (3,)}, r"worker 0 has \(2,\)"),
        ({"w_shard-0": (2,), "w_shard-1": (2,), "v_shard-0": (2,)}, r"'v': has 1 shards, and"),
        ({"w_shard-0": (), "w_shard-1": ()}, r"0 dimensions"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, tensors: dict[str, tuple[int, ...]], match: str) -> None:
    catalog = stored(tmp_path, {name: torch.ones(shape) for name, shape in tensors.items()})
    with pytest.raises(CheckpointError, match=match) as caught:
        logical(catalog, Plan.of({"*": "shard(0)"}))
    assert caught.value.parameter in ("w", "v")
    assert caught.value.file == catalog.path


def test_shards_of_several_dtypes(tmp_path: Path) -> None:
    catalog = stored(tmp_path, {"w_shard-0": torch.ones(2), "w_shard-1": torch.ones(2).half()})
    with pytest.raises(CheckpointError, match=r"'w_shard-1' is of torch.float16, 'w_shard-0' of"):
        logical(catalog, Plan.of({"*": "shard(0)"}))


def test_ours_with_shards_missing(tmp_path: Path) -> None:
    catalog = ours(tmp_path)
    with pytest.raises(CheckpointError, match="'w_shard-2-of-2' is missing: 1 of its 2"):
        logical(without(catalog, "w_shard-2-of-2"))
    with pytest.raises(CheckpointError, match="'b': all of its shards are missing"):
        logical(without(catalog, "b_shard-1-of-2", "b_shard-2-of-2"))


@pytest.mark.parametrize(
    "said",
    [
        {"workers": [3]},
        {"workers": [0]},
        {"workers": []},
        {"workers": [True, 2]},
        {"workers": [2**40]},
        {"workers": "2"},
        {"workers": [2], "groups": 3},
        {"groups": 0},
        {"groups": 1.0},
        {"version": 2},
        {"layouts": {}},
        {"layouts": {"w": "shard(0)", "b": "nonsense"}},
        {"layouts": {"w": "shard(7)", "b": "replicate"}},
        {"layouts": {"w": "shard(1)", "b": "replicate"}},
        {"layouts": {"w": "shard(0, stage=1)", "b": "replicate"}},
        {"layouts": {"w": "[shard(0), shard(1)]", "b": "replicate"}},
        {"layouts": [1]},
        {"shapes": {"w": [9, 6]}},
        {"shapes": {"w": [-9, 6], "b": [6]}},
        {"shapes": {"w": [10, 6, 1], "b": [6]}},
        {"shapes": {"w": [12, 6], "b": [6]}},
        {"shapes": {"w": [2**61, 2**61], "b": [6]}},
        {"shapes": {"w": None, "b": [6]}},
    ],
)
def test_metadata_that_lies(tmp_path: Path, said: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        logical(with_sharding(ours(tmp_path), **said))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", "[" * 100_000, None, 7, []])
def test_metadata_that_is_none(tmp_path: Path, text: Any) -> None:
    catalog = replace(ours(tmp_path), metadata={"discolab": text})
    kind = ArgumentError if text is None else CheckpointError
    with pytest.raises(kind, match=r"how .* cut"):
        logical(catalog)
