"""Bad checkpoints: each gives one error that names file and parameter, what is there and should be.

None of them hangs, and none makes anybody allocate what only the index says.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import ArgumentError
from discolab.loader.errors import CheckpointError
from discolab.loader.formats import open_checkpoint, verify
from discolab.loader.formats.checks import MAX_INDEX_BYTES, tiles
from discolab.loader.formats.tensor_cache import read_text

from .checkpoints import (
    raw,
    write_safetensors,
    write_tensor_cache,
    write_torch,
)
from .opened import NOT_WHOLE, TENSORS, Change, drop, edit, put, refused

# No matter what format


def test_nothing_there(tmp_path: Path) -> None:
    refused(tmp_path / "none", "no such file")
    refused(tmp_path / "none.safetensors", "no such file")
    refused(tmp_path / "none.json", "no such file")
    refused(tmp_path / "none.pt", "no such file")


@pytest.mark.parametrize("path", [3, None, b"ck", ["ck"]])
def test_a_path_that_is_none(path: Any) -> None:
    with pytest.raises(ArgumentError, match="path of a checkpoint as a string"):
        open_checkpoint(path)


def test_a_folder_without_a_checkpoint_tells_what_was_looked_for(tmp_path: Path) -> None:
    error = refused(tmp_path, "holds no checkpoint, but nothing; looked for")
    for word in ("tensor-cache.json", "safetensors", ".metadata", ".pt", ".bin"):
        assert word in error.text
    (tmp_path / "readme.md").write_text("x")
    refused(tmp_path, "but readme.md")


def test_files_of_no_format(tmp_path: Path) -> None:
    path = tmp_path / "weights.dat"
    path.write_bytes(b"hello there, and more")
    refused(path, "no checkpoint, it begins with b'hello th'")
    path.write_bytes(b"")
    refused(path, "no checkpoint")
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 3}')
    refused(path, "hidden_size.*'records'.*'weight_map'")


def test_several_loose_files_are_not_guessed(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        write_safetensors(tmp_path / name, TENSORS)
    refused(tmp_path, "2 that could be meant, x.safetensors, y.safetensors; give the path of one")
    write_torch(tmp_path / "t" / "a.pt", TENSORS)
    write_torch(tmp_path / "t" / "b.bin", TENSORS)
    refused(tmp_path / "t", "2 that could be meant")


@pytest.mark.parametrize(
    "name",
    ["tensor-cache.json", "model.safetensors", "x.safetensors.index.json", ".metadata", "m.pt"],
)
@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "loop", "empty"])
def test_no_file_where_the_index_should_be(tmp_path: Path, name: str, kind: str) -> None:
    """A named pipe above all: whoever opens it waits for ever."""
    folder = tmp_path / "ck"
    folder.mkdir()
    path, says, file = folder / name, "", name
    if kind == "folder":
        path.mkdir()
        says = "is a folder; expected a file"
    elif kind == "pipe":
        os.mkfifo(path)
        says = "is a named pipe; expected a file"
    elif kind == "link":
        (tmp_path / "outside").write_bytes(b"{}")
        path.symlink_to("../outside")
        says, file = "leaves the checkpoint's folder", "ck"
    elif kind == "loop":
        path.symlink_to(name)
        says, file = "followed", "ck"
    else:
        path.write_bytes(b"")
        says = "not JSON|at least 8|pickle|empty"
    refused(folder, says, file)


def test_a_device_is_not_read() -> None:
    refused(Path("/dev/zero"), "is a device; expected a file")
    refused(Path("/dev/null"), "is a device; expected a file")


def test_a_link_that_the_user_names_is_followed(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "real" / "w.safetensors", TENSORS)
    (tmp_path / "link.safetensors").symlink_to("real/w.safetensors")
    assert list(open_checkpoint(tmp_path / "link.safetensors").entries) == list(TENSORS)


@pytest.mark.parametrize("name", ["tensor-cache.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not JSON"),
        (b"[]", "expected a JSON object"),
        (b"\xff\xfe{}", "UTF-8: byte 0 of it is 0xff"),
        (b'{"records": "\xc3("}', "UTF-8: byte 13"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"records": [], "records": [], "weight_map": {}}', "'records' is there twice"),
        (b'{"weight_map": {}, "weight_map": {}}', "'weight_map' is there twice"),
        (b'{"records": 1' + b"0" * 6000 + b"}", "not JSON"),
    ],
)
def test_json_that_is_none(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    refused(tmp_path, says, name)


def test_metadata_nested_too_deeply_to_be_sent(tmp_path: Path) -> None:
    index = write_tensor_cache(tmp_path, TENSORS)
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    edit(index, put({"x": deep}, "metadata"))
    refused(tmp_path, "deeper than 64 levels", index.name)


def test_an_index_that_is_far_too_large(tmp_path: Path) -> None:
    for name in ("tensor-cache.json", "m.safetensors", ".metadata"):
        folder = tmp_path / name.strip(".")
        folder.mkdir()
        with open(folder / name, "wb") as file:
            file.write(struct.pack("<Q", MAX_INDEX_BYTES + 1))
            file.truncate(MAX_INDEX_BYTES + 1000)  # takes no room on the disk
        refused(folder, f"{MAX_INDEX_BYTES}", name)


# tensor-cache


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *((put(v, "byteOffset"), "byteOffset is .*; expected a whole number") for v in NOT_WHOLE),
        *((put(v, "nbytes"), "nbytes is .*; expected a whole number") for v in NOT_WHOLE),
        *((put([2, v], "shape"), r"a size in shape .* is .*; expected a whole") for v in NOT_WHOLE),
        *((put(v, "shape"), "shape is .*; expected a list") for v in (6, None, "2", {}, True)),
        (put([2**40, 2**40], "shape"), "more than 2"),
        (put([0, 2**62, 2**62], "shape"), "more than 2"),
        (put([1] * 65, "shape"), "65 dimensions"),
        (put([3, 3], "shape"), r"nbytes is 24; shape \[3, 3\] of float32 has 36"),
        (put(25, "nbytes"), r"nbytes is 25; shape \[2, 3\] of float32 has 24"),
        (put("f32-to-bf16", "format"), r"nbytes is 24; shape \[2, 3\] of bfloat16 has 12"),
        (put("float33", "dtype"), "'float33' is not known; expected one of bool, uint8"),
        (put(32, "dtype"), "dtype 32 is not known"),
        (put(["float32"], "dtype"), "is not known"),
        (drop("dtype"), "dtype None is not known"),
        (put("zip", "format"), "'zip' is not known; expected one of raw, f32-to-bf16"),
        (put([], "format"), "is not known"),
        (drop("format"), "format None is not known"),
    ],
)
def test_records_of_a_tensor_cache(tmp_path: Path, change: Change, says: str) -> None:
    index = write_tensor_cache(tmp_path, TENSORS)
    edit(index, lambda root: change(root["records"][0]["records"][0]))
    refused(tmp_path, says, index.name, "a")


@pytest.mark.parametrize("name", [3, None, True, [], "\ud800"])
def test_a_name_that_is_none(tmp_path: Path, name: Any) -> None:
    index = write_tensor_cache(tmp_path, TENSORS)
    edit(index, put(name, "records", 0, "records", 0, "name"))
    refused(tmp_path, "expected a string|UTF-8", index.name)


@pytest.mark.parametrize(
    ("change", "says", "parameter"),
    [
        (put("zip", "format"), "has format 'zip'; expected 'raw-shard'", "a"),
        (drop("format"), "has no 'format'", None),
        (put(7, "dataPath"), "dataPath is 7; expected a string", None),
        (drop("dataPath"), "has no 'dataPath'", None),
        (put({}, "records"), "records is {}; expected a list", None),
        (put([3], "records"), "found 3; expected an object", None),
        (put("xyz", "md5sum"), "md5sum .* expected 32 hexadecimal digits", None),
        (put(5, "md5sum"), "md5sum .* expected 32 hexadecimal digits", None),
        *((put(v, "nbytes"), "nbytes of .* expected a whole number", "a") for v in NOT_WHOLE),
        *(
            (put(path, "dataPath"), says, "a")
            for path, says in [
                ("../outside.bin", "'../outside.bin' leaves the checkpoint's folder"),
                ("sub/../../outside.bin", "leaves the checkpoint's folder"),
                ("/etc/passwd", "'/etc/passwd' is absolute"),
                ("link.bin", "leaves the checkpoint's folder"),
                ("there/outside.bin", "leaves the checkpoint's folder"),
                ("loop", "followed"),
                ("", "not the name of a file"),
                ("a\0b", "can't be followed"),
                ("\ud800", "can't be followed"),
            ]
        ),
    ],
)  # fmt: skip
def test_files_of_a_tensor_cache(
    tmp_path: Path, change: Change, says: str, parameter: str | None
) -> None:
    folder = tmp_path / "ck"
    index = write_tensor_cache(folder, TENSORS)
    (tmp_path / "outside.bin").write_bytes(bytes(40))
    (folder / "sub").mkdir()
    (folder / "link.bin").symlink_to("../outside.bin")
    (folder / "there").symlink_to("..")
    (folder / "loop").symlink_to("loop")
    edit(index, lambda root: change(root["records"][0]))
    refused(folder, says, index.name, parameter)


@pytest.mark.parametrize(
    ("data_path", "says"),
    [
        ("none.bin", "no such file"),
        ("sub", "is a folder; expected a file"),
        (".", "is a folder; expected a file"),
        ("pipe", "is a named pipe; expected a file"),
        ("inside", "no such file"),
        ("x" * 5000, "can't be looked at: File name too long"),
    ],
)
def test_data_files_that_are_none(tmp_path: Path, data_path: str, says: str) -> None:
    index = write_tensor_cache(tmp_path / "ck", TENSORS)
    (tmp_path / "ck" / "sub").mkdir()
    os.mkfifo(tmp_path / "ck" / "pipe")
    (tmp_path / "ck" / "inside").symlink_to("target")
    edit(index, put(data_path, "records", 0, "dataPath"))
    names = {".": "ck", "inside": "target"}
    refused(tmp_path / "ck", says, names.get(data_path, data_path), "a")


@pytest.mark.parametrize("change", [-1, 1, -40])
def test_a_data_file_of_another_size(tmp_path: Path, change: int) -> None:
    write_tensor_cache(tmp_path, TENSORS)
    file = tmp_path / "params_shard_0.bin"
    os.truncate(file, 40 + change)
    refused(tmp_path, f"has {40 + change} bytes; tensor-cache.json says 40", file.name, "a")


@pytest.mark.parametrize("offset", [1, 8, 2**40, 2**63 - 1])
def test_a_record_that_reaches_out_of_its_file(tmp_path: Path, offset: int) -> None:
    index = write_tensor_cache(tmp_path, TENSORS, per_file=1)
    edit(index, put(offset, "records", 1, "records", 0, "byteOffset"))
    says = f"has 16 bytes; expected 16 bytes at {offset}"
    refused(tmp_path, says, "params_shard_1.bin", "b")


def test_records_that_overlap(tmp_path: Path) -> None:
    index = write_tensor_cache(tmp_path, TENSORS)
    edit(index, put(20, "records", 0, "records", 1, "byteOffset"))
    says = "begins at byte 20, and 'a' ends at 24: they overlap"
    refused(tmp_path, says, "params_shard_0.bin", "b")


def test_a_name_or_a_file_that_is_there_twice(tmp_path: Path) -> None:
    index = write_tensor_cache(tmp_path / "a", TENSORS, per_file=1)
    edit(index, put("a", "records", 1, "records", 0, "name"))
    refused(tmp_path / "a", "is there twice", index.name, "a")
    index = write_tensor_cache(tmp_path / "b", TENSORS, per_file=1)
    edit(index, put("./params_shard_0.bin", "records", 1, "dataPath"))
    refused(tmp_path / "b", "'./params_shard_0.bin' is there twice", index.name, "b")


def test_a_wrong_checksum(tmp_path: Path) -> None:
    write_tensor_cache(tmp_path, TENSORS, per_file=1)
    file = tmp_path / "params_shard_1.bin"
    file.write_bytes(raw(torch.ones(4) * 2))
    catalog = open_checkpoint(tmp_path)  # costs a read of everything, so only on request
    verify(catalog, [0, 2])
    with pytest.raises(
        CheckpointError, match=r"md5 is [0-9a-f]{32}; expected [0-9a-f]{32}"
    ) as caught:
        verify(catalog)
    assert caught.value.file == str(file)
    os.truncate(file, 3)
    with pytest.raises(CheckpointError, match="has 3 bytes; expected 16"):
        verify(catalog)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="named pipe"):
        verify(catalog)


def test_files_that_may_be_missing_still_stay_in_the_folder(tmp_path: Path) -> None:
    index = write_tensor_cache(tmp_path / "ck", TENSORS)
    file = tmp_path / "ck" / "params_shard_0.bin"
    text = index.read_text()
    file.unlink()
    assert list(read_text(index, text, missing_ok=True).entries) == ["a", "b", "c"]
    with pytest.raises(CheckpointError, match="no such file"):
        read_text(index, text)
    with pytest.raises(CheckpointError, match="leaves"):
        read_text(index, text.replace("params_shard_0.bin", "../x"), missing_ok=True)
    file.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="has 5 bytes"):
        read_text(index, text, missing_ok=True)


# Parts that should tile a whole


@pytest.mark.parametrize(
    ("boxes", "says"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (2, 4))], None),
        ([((0, 0), (4, 1)), ((0, 1), (1, 3)), ((1, 1), (3, 3))], None),
        ([((0, 0), (4, 4)), ((4, 0), (0, 4))], None),
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], "overlap"),
        ([((0, 0), (4, 2)), ((0, 1), (4, 2))], "overlap"),
        ([((0, 0), (4, 4)), ((0, 0), (4, 4))], "32 elements together; expected 16"),
        ([((0, 0), (2, 4)), ((3, 0), (2, 4))], "reaches out of it"),
        ([((0, 0), (2, 4))], "8 elements together; expected 16"),
        ([((0,), (16,))], "a part has start"),
    ],
)
def test_tiles(boxes: Any, says: str | None) -> None:
    found = tiles(boxes, (4, 4))
    assert (found is None) if says is None else (says in str(found))
