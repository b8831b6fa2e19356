"""Checkpoints of every format are found out, and each tensor is found where it is."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from discolab.loader.formats import open_checkpoint, verify
from discolab.loader.formats.tensor_cache import read_text

from .checkpoints import (
    COMMON_DTYPES,
    SAFETENSORS_NAMES,
    TENSOR_CACHE_NAMES,
    filled,
    raw,
    same_bits,
    write_dcp,
    write_dcp_chunks,
    write_safetensors,
    write_safetensors_index,
    write_tensor_cache,
    write_torch,
)
from .opened import assert_holds, read_all

Tensors = dict[str, torch.Tensor]
Writer = Callable[[Path, Tensors], Path]


def _index_of_two(folder: Path, tensors: Tensors) -> Path:
    names = list(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    return write_safetensors_index(folder, [{n: tensors[n] for n in half} for half in halves])


WRITERS: dict[str, tuple[str, Writer]] = {
    "tensor-cache": ("tensor-cache", write_tensor_cache),
    "odd offsets": ("tensor-cache", lambda f, t: write_tensor_cache(f, t, gap=1)),
    "safetensors": ("safetensors", lambda f, t: write_safetensors(f / "m.safetensors", t)),
    "safetensors index": ("safetensors", _index_of_two),
    "torch": ("torch", lambda f, t: write_torch(f / "m.pt", t)),
    "dcp": ("dcp", write_dcp),
    "dcp chunks": ("dcp", lambda f, t: write_dcp_chunks(f, t, 3)),
    "dcp columns": ("dcp", lambda f, t: write_dcp_chunks(f, t, 2, dim=-1)),
}
every_format = pytest.mark.parametrize("how", WRITERS)


@every_format
def test_every_dtype_comes_back_bit_by_bit(tmp_path: Path, how: str) -> None:
    format_, write = WRITERS[how]
    tensors = {str(dtype)[6:]: filled((5, 3), dtype, 1) for dtype in COMMON_DTYPES}
    write(tmp_path, tensors)
    catalog = open_checkpoint(tmp_path)
    assert catalog.format == format_
    assert_holds(catalog, tensors)


@every_format
def test_shapes_of_all_kinds(tmp_path: Path, how: str) -> None:
    _, write = WRITERS[how]
    shapes = [(), (1,), (7,), (2, 3), (1, 1, 1), (2, 1, 5), (3, 2, 2, 2)]
    tensors = {
        f"layer.{i}.weight": filled(shape, torch.float32, i) for i, shape in enumerate(shapes)
    }
    write(tmp_path, tensors)
    assert_holds(open_checkpoint(tmp_path), tensors)


@pytest.mark.parametrize("how", [how for how in WRITERS if how != "dcp columns"])
def test_tensors_without_elements(tmp_path: Path, how: str) -> None:
    _, write = WRITERS[how]
    tensors = {
        "a": torch.zeros(0),
        "b": torch.ones(2),
        "c": torch.zeros(3, 0),
        "d": torch.zeros(0, 4),
    }
    write(tmp_path, tensors)
    assert_holds(open_checkpoint(tmp_path), tensors)


@every_format
def test_a_catalog_goes_to_workers(tmp_path: Path, how: str) -> None:
    _, write = WRITERS[how]
    write(tmp_path, {"w": torch.ones(2, 2), "v": torch.ones(3, 2)})
    catalog = open_checkpoint(tmp_path)
    assert pickle.loads(pickle.dumps(catalog)) == catalog
    assert catalog.path == str(tmp_path)
    for file in catalog.files:
        assert os.path.isabs(file.path)
        assert os.path.getsize(file.path) == file.size


@settings(max_examples=15, deadline=None)
@given(
    how=st.sampled_from(list(WRITERS)),
    shapes=st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=3),
    dtype=st.sampled_from(COMMON_DTYPES),
)
def test_any_shapes(
    tmp_path_factory: pytest.TempPathFactory,
    how: str,
    shapes: list[list[int]],
    dtype: torch.dtype,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    tensors = {f"p{i}": filled(shape, dtype, i) for i, shape in enumerate(shapes)}
    WRITERS[how][1](folder, tensors)
    assert_holds(open_checkpoint(folder), tensors)


@pytest.mark.parametrize("dtype", SAFETENSORS_NAMES)
def test_safetensors_written_by_its_own_package(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"b": filled((3, 4), dtype, 1), "a": filled((2,), dtype, 2)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    catalog = open_checkpoint(tmp_path / "x.safetensors")
    assert catalog.metadata == {"format": "pt"}
    found = read_all(catalog)
    assert all(same_bits(found[name], tensors[name]) for name in tensors)


def test_what_is_written_by_hand_here_the_package_reads(tmp_path: Path) -> None:
    tensors = {str(dtype): filled((2, 3), dtype) for dtype in SAFETENSORS_NAMES}
    loaded = load_file(write_safetensors(tmp_path / "x.safetensors", tensors))
    assert all(same_bits(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", TENSOR_CACHE_NAMES)
def test_dtypes_of_a_tensor_cache(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"w": filled((3, 4), dtype)}
    write_tensor_cache(tmp_path, tensors)
    assert_holds(open_checkpoint(tmp_path), tensors)


@pytest.mark.parametrize(
    ("name", "dtype"), [("e4m3_float8", torch.float8_e4m3fn), ("uint1", torch.bool)]
)
def test_names_of_dtypes_that_older_tvms_wrote(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    tensors = {"w": filled((4,), dtype)}
    index = write_tensor_cache(tmp_path, tensors)
    index.write_text(index.read_text().replace(TENSOR_CACHE_NAMES[dtype], name))
    assert_holds(open_checkpoint(tmp_path), tensors)


def test_a_float32_that_is_stored_as_bfloat16(tmp_path: Path) -> None:
    tensors = {
        "w": filled((3, 5), torch.float32).bfloat16().float(),
        "half": filled((3,), torch.float16),  # marked so, but only a float32 is encoded
    }
    write_tensor_cache(tmp_path, tensors, formats=dict.fromkeys(tensors, "f32-to-bf16"), gap=3)
    catalog = open_checkpoint(tmp_path)
    assert catalog.entries["w"].stored == torch.bfloat16
    assert catalog.entries["w"].dtype == torch.float32
    assert catalog.entries["w"].stored_bytes == 30
    assert_holds(catalog, tensors)


def test_the_metadata_of_each_format(tmp_path: Path) -> None:
    one = {"w": torch.ones(2)}
    write_tensor_cache(tmp_path / "a", one, metadata={"ParamSize": 1, "deep": {"x": [1]}})
    write_safetensors_index(tmp_path / "b", [one], metadata={"about": {"n": 2}})
    assert open_checkpoint(tmp_path / "a").metadata == {"ParamSize": 1, "deep": {"x": [1]}}
    found = open_checkpoint(tmp_path / "b").metadata
    assert found == {"format": "pt", "total_size": 8, "about": {"n": 2}}


def test_index_order_is_kept(tmp_path: Path) -> None:
    names = ["z", "param_10", "param_2", "a"]
    tensors = {name: torch.ones(2) for name in names}
    for how, (_, write) in WRITERS.items():
        write(tmp_path / how, tensors)
        assert list(open_checkpoint(tmp_path / how).entries) == names, how


# What is opened


@pytest.mark.parametrize(
    ("how", "inner"),
    [
        ("tensor-cache", "tensor-cache.json"),
        ("safetensors", "m.safetensors"),
        ("safetensors index", "model.safetensors.index.json"),
        ("torch", "m.pt"),
        ("dcp", ".metadata"),
    ],
)
def test_the_index_itself_can_be_named(tmp_path: Path, how: str, inner: str) -> None:
    tensors = {"w": torch.arange(6.0), "v": torch.ones(1)}
    WRITERS[how][1](tmp_path, tensors)
    assert_holds(open_checkpoint(tmp_path / inner), tensors)
    assert_holds(open_checkpoint(str(tmp_path)), tensors)


def test_a_relative_path_holds_after_the_folder_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"w": torch.arange(6.0)}
    write_tensor_cache(tmp_path / "here" / "ck", tensors)
    monkeypatch.chdir(tmp_path / "here")
    catalog = open_checkpoint("ck")
    monkeypatch.chdir("/")
    assert_holds(catalog, tensors)


def test_the_old_name_of_a_tensor_cache(tmp_path: Path) -> None:
    write_tensor_cache(tmp_path, {"w": torch.ones(2)}, index="ndarray-cache.json")
    assert open_checkpoint(tmp_path).format == "tensor-cache"


def test_which_comes_first(tmp_path: Path) -> None:
    one = {"w": torch.ones(2)}
    expected = []
    for how in ("torch", "dcp", "safetensors index", "tensor-cache"):
        format_, write = WRITERS[how]
        write(tmp_path, one)
        expected.append(open_checkpoint(tmp_path).format == format_)
    assert all(expected), expected


def test_the_usual_name_among_others(tmp_path: Path) -> None:
    one, other = {"w": torch.ones(2)}, {"v": torch.ones(1)}
    write_torch(tmp_path / "training_args.bin", other)
    write_torch(tmp_path / "pytorch_model.bin", one)
    assert list(open_checkpoint(tmp_path).entries) == ["w"]
    write_safetensors(tmp_path / "adapter.safetensors", one)
    write_safetensors(tmp_path / "model.safetensors", other)
    assert list(open_checkpoint(tmp_path).entries) == ["v"]
    write_tensor_cache(tmp_path, other, index="ndarray-cache.json")
    write_tensor_cache(tmp_path, one)
    write_tensor_cache(tmp_path, one, index="tensor-cache-b16.json")
    assert list(open_checkpoint(tmp_path).entries) == ["w"]


def test_a_file_is_told_by_its_content(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(6.0)}
    write_safetensors(tmp_path / "weights", tensors)
    write_torch(tmp_path / "saved", tensors)
    assert open_checkpoint(tmp_path / "weights").format == "safetensors"
    assert open_checkpoint(tmp_path / "saved").format == "torch"


def test_a_snapshot_of_the_hugging_face_cache(tmp_path: Path) -> None:
    """There, every file is a link out of the folder, to the blobs of the same repository."""
    tensors = {"w": torch.arange(6.0), "v": torch.ones(1)}
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    _index_of_two(tmp_path / "plain", tensors)
    for number, file in enumerate(sorted((tmp_path / "plain").iterdir())):
        (blobs / f"{number:040}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040}")
    assert_holds(open_checkpoint(snapshot), tensors)
    assert_holds(open_checkpoint(snapshot / "model.safetensors.index.json"), tensors)


def test_a_shard_has_more_than_its_index_says(tmp_path: Path) -> None:
    """It is loaded all the same, as others do it: it is nowhere else."""
    index = write_safetensors_index(tmp_path, [{"a": torch.ones(1), "b": torch.zeros(2)}])
    text = json.loads(index.read_text())
    del text["weight_map"]["b"]
    index.write_text(json.dumps(text))
    assert list(open_checkpoint(tmp_path).entries) == ["a", "b"]


# Checksums and texts


def test_checksums_are_looked_at_on_request(tmp_path: Path) -> None:
    write_tensor_cache(tmp_path, {"w": torch.ones(4), "v": torch.ones(2)}, per_file=1)
    catalog = open_checkpoint(tmp_path)
    verify(catalog)
    verify(catalog, [1])
    told: list[int] = []
    verify(catalog, meter=told.append)
    assert told == [16, 8]
    write_safetensors(tmp_path / "s" / "m.safetensors", {"w": torch.ones(2)})
    verify(open_checkpoint(tmp_path / "s"))  # has none


def test_an_index_as_text_while_its_files_are_elsewhere(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(4), "v": torch.ones(2)}
    index = write_tensor_cache(tmp_path / "there", tensors, per_file=1)
    here = tmp_path / "here" / "tensor-cache.json"
    (tmp_path / "here").mkdir()
    catalog = read_text(here, index.read_text(), missing_ok=True)
    assert [file.size for file in catalog.files] == [16, 8]
    assert catalog.files[0].path == str(tmp_path / "here" / "params_shard_0.bin")
    assert_holds(read_text(index, index.read_text()), tensors)


def test_raw_is_in_c_order() -> None:
    assert raw(torch.arange(4, dtype=torch.uint8).reshape(2, 2).t()) == b"\0\2\1\3"
