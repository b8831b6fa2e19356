"""Every format, dtype and layout, from N to M workers: the same bits come back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from discolab import Session, make_session
from discolab.loader import load, save
from discolab.loader.convert import shard
from discolab.loader.presharded import logical
from tests.loader.shard_oracle import (
    DTYPES,
    SOURCES,
    TARGETS,
    check_shards,
    chunks,
    fused,
    padded,
    random_tensor,
    read_all,
    replicated,
    same_bits,
    write_source,
)

Shards = Callable[[torch.Tensor, int], list[torch.Tensor]]

CHECK = hypothesis.settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
# name, shape, layout, and what the layout makes of a tensor for some workers
CASES: list[tuple[str, tuple[int, ...], str, Shards]] = [
    ("replicate", (5, 3), "replicate", replicated),
    ("rows", (8, 3), "shard(0)", lambda t, n: chunks(t, n, 0)),
    ("columns", (3, 8), "shard(1)", lambda t, n: chunks(t, n, 1)),
    ("uneven", (7, 5), "shard(-1)", lambda t, n: chunks(t, n, 1)),
    ("few", (2, 3), "shard(0)", lambda t, n: chunks(t, n, 0)),
    ("middle", (2, 9, 3), "shard(1)", lambda t, n: chunks(t, n, 1)),
    ("padded", (13, 3), "shard(0, pad_to=16)", lambda t, n: padded(t, n, 0, 16)),
    (
        "segments",
        (16, 3),
        "shard(0, segments=[8, 4, 4])",
        lambda t, n: fused(t, n, 0, [8, 4, 4]),
    ),
    (
        "heads",
        (3, 16),
        "shard(1, segments=[8, 4, 4], heads=[8, 2, 2])",
        lambda t, n: fused(t, n, 1, [8, 4, 4], [8, 2, 2]),
    ),
    ("scalar", (), "replicate", replicated),
    ("empty", (0, 4), "shard(1)", lambda t, n: chunks(t, n, 1)),
]
PLAN = {name: layout for name, _, layout, _ in CASES}


def everything(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A tensor for each layout."""
    return {name: random_tensor(shape, dtype, i) for i, (name, shape, _, _) in enumerate(CASES)}


def wanted(tensors: dict[str, torch.Tensor], workers: int) -> dict[str, list[torch.Tensor]]:
    """What each worker has of each."""
    return {name: shards(tensors[name], workers) for name, _, _, shards in CASES}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_any_format_and_layout(
    tmp_path: Path, source: str, target: str, dtype: torch.dtype
) -> None:
    """Cut for four, cut anew for two, put together: each step has the bits that torch makes."""
    tensors = everything(dtype)
    path = write_source(source, tmp_path / "in", tensors)
    four = shard(path, tmp_path / "four", PLAN, 4, format=target, progress=False)
    check_shards(four, wanted(tensors, 4))
    two = shard(tmp_path / "four", tmp_path / "two", PLAN, 2, format=target, progress=False)
    check_shards(two, wanted(tensors, 2))
    whole = shard(tmp_path / "two", tmp_path / "whole", presharded=False, format=target)
    found = read_all(whole)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert same_bits(found[name], tensor), name


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """A shape, two layouts for it, and two numbers of workers."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    found: dict[str, Any] = {"shape": shape, "dtype": draw(st.sampled_from(DTYPES))}
    for which in ("first", "second"):
        found[which] = draw(layouts(shape)), draw(st.integers(1, 5))
    found["source"] = draw(st.sampled_from(["torch", "safetensors"]))
    found["targets"] = draw(st.lists(st.sampled_from(TARGETS), min_size=2, max_size=2))
    found["cap"] = draw(st.sampled_from([None, 1, 50]))
    return found


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[str, Shards]:
    """A layout that fits, and its oracle."""
    dim = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["replicate", "shard", "pad", "segments"]))
    if kind == "replicate":
        return "replicate", replicated
    if kind == "shard":
        return f"shard({dim})", lambda t, n: chunks(t, n, dim)
    if kind == "pad":
        multiple = draw(st.integers(1, 7))
        return f"shard({dim}, pad_to={multiple})", lambda t, n: padded(t, n, dim, multiple)
    first = draw(st.integers(0, shape[dim]))
    parts = [part for part in (first, shape[dim] - first) if part]
    if len(parts) < 2:
        return f"shard({dim})", lambda t, n: chunks(t, n, dim)
    return f"shard({dim}, segments={parts})", lambda t, n: fused(t, n, dim, parts)


@CHECK
@hypothesis.given(problems())
def test_any_shape(problem: dict[str, Any]) -> None:
    """Dimensions that don't divide, are smaller than the workers are many, or zero."""
    tensor = random_tensor(problem["shape"], problem["dtype"])
    tensors = {"a.x": tensor, "b": random_tensor((3,), torch.uint8)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write_source(problem["source"], folder / "in", tensors)
        for which, target in zip(("first", "second"), problem["targets"], strict=True):
            (layout, shards), workers = problem[which]
            made = shard(
                path, folder / which, {"a.*": layout}, workers,
                format=target, max_file_bytes=problem["cap"], progress=False,
            )  # fmt: skip
            one = {"a.x": shards(tensor, workers), "b": [tensors["b"]] * workers}
            check_shards(made, one)
            path = folder / which
        found = read_all(logical(made))
        assert all(same_bits(found[name], t) for name, t in tensors.items())


@pytest.mark.parametrize("target", TARGETS)
def test_for_a_mesh_and_for_stages(tmp_path: Path, target: str) -> None:
    """Two axes that cut, and parameters that one stage holds alone."""
    from discolab.layouts.layout import Workers

    tensors = {name: random_tensor((9, 7), torch.int8, i) for i, name in enumerate("abcd")}
    plan = {
        "a": "[shard(0), shard(1)]",
        "b": "[shard(0), shard(0)]",
        "c": "shard(0, stage=1)",
        "d": "replicate(stage=0)",
    }
    path = write_source("safetensors", tmp_path / "in", tensors)
    made = shard(path, tmp_path / "out", plan, Workers((2, 3), 2), format=target, progress=False)
    names = set(made.entries)
    assert {name for name in names if name[0] == "c"} == {f"c_shard-{i}-of-6" for i in (4, 5, 6)}
    assert {name for name in names if name[0] == "d"} == {f"d_shard-{i}-of-6" for i in (1, 2, 3)}
    again = shard(tmp_path / "out", tmp_path / "two", {"*": "shard(1)"}, 2, format=target)
    check_shards(again, {name: chunks(t, 2, 1) for name, t in tensors.items()})


# -- with sessions -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["threads", "processes"])
def sessions(request: pytest.FixtureRequest) -> Iterator[dict[int, Session]]:
    """Of four and of two workers."""
    made = {n: make_session(n, request.param, devices="cpu", timeout=20) for n in (4, 2)}
    yield made
    for session in made.values():
        session.shutdown(cancel=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("target", TARGETS)
def test_load_and_save(
    tmp_path: Path, sessions: dict[int, Session], target: str, dtype: torch.dtype
) -> None:
    """Loaded on four, saved as shards, loaded on two, saved whole: the same bits."""
    tensors = everything(dtype)
    path = write_source("torch", tmp_path / "in", tensors)
    four, two = sessions[4], sessions[2]
    weights = load(four, path, PLAN, progress=False)
    made = save(four, tmp_path / "shards", weights, format=target, presharded=True)
    check_shards(made, wanted(tensors, 4))
    fewer = load(two, tmp_path / "shards", PLAN, progress=False)
    for name, shards in wanted(tensors, 2).items():
        for there, one in zip(fewer[name].debug_get_from_all(), shards, strict=True):
            assert same_bits(there, one), name
    whole = save(two, tmp_path / "whole", fewer, format=target)
    found = read_all(whole)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert same_bits(found[name], tensor), name
