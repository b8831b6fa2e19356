"""Bad safetensors files and indexes: each gives one error that names file and parameter."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
import torch

from discolab.loader.errors import CheckpointError
from discolab.loader.formats import open_checkpoint

from .checkpoints import (
    write_safetensors,
    write_safetensors_index,
    write_safetensors_parts,
)
from .opened import NOT_WHOLE, TENSORS, Change, drop, edit, put, refused

# safetensors


def _safetensors(path: Path, change: Change) -> Path:
    header = {
        name: {
            "dtype": "F32",
            "shape": list(t.shape),
            "data_offsets": [begin, begin + 4 * t.numel()],
        }
        for (name, t), begin in zip(TENSORS.items(), (0, 24, 40), strict=True)
    }
    change(header)
    return write_safetensors_parts(path, json.dumps(header), bytes(48))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *((put([0, v], "a", "data_offsets"), "data_offsets") for v in NOT_WHOLE),
        *((put([v, 24], "a", "data_offsets"), "data_offsets") for v in NOT_WHOLE),
        *((put([2, v], "a", "shape"), "a size in shape") for v in NOT_WHOLE),
        (put(24, "a", "data_offsets"), "expected a list"),
        (put([0], "a", "data_offsets"), "expected its begin and its end"),
        (put([24, 0], "a", "data_offsets"), r"hold -24 bytes; shape \[2, 3\] of float32 has 24"),
        (put([0, 20], "a", "data_offsets"), "hold 20 bytes"),
        (put([2**62, 2**62 + 24], "a", "data_offsets"), "leave a gap"),
        (put([8, 32], "a", "data_offsets"), "they overlap|leave a gap"),
        (put([2**40, 2**40], "a", "shape"), "more than 2"),
        (put("F31", "a", "dtype"), "'F31' is not known; expected one of BOOL"),
        (put("F4", "a", "dtype"), "not known"),
        (put(3, "a", "dtype"), "expected a string"),
        (put(3, "a"), "found 3; expected an object"),
        (drop("a", "shape"), "has no 'shape'"),
    ],
)
def test_headers_of_safetensors(tmp_path: Path, change: Change, says: str) -> None:
    path = _safetensors(tmp_path / "w.safetensors", change)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert re.search(says, caught.value.text)
    assert caught.value.file == str(path)
    assert caught.value.parameter in ("a", "b")  # of two that overlap, the second


def test_other_faults_of_a_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    good = write_safetensors(path, TENSORS).read_bytes()
    length = int.from_bytes(good[:8], "little")
    for content, says, parameter in [
        (good[:7], "has 7 bytes; a safetensors file has at least 8", None),
        (good[:-1], f"has {len(good) - 1} bytes; expected {len(good)}", "c"),
        (good + b"x", f"has {len(good) + 1} bytes; expected {len(good)}", None),
        (good[: length - 5], "header has .* truncated", None),
        (b"\xff" * 8 + good[8:], "header has 18446744073709551615 bytes", None),
        (struct.pack("<Q", 0) + good[8:], "not JSON", None),
        (good[:8] + b"\xff" + good[9:], "not JSON in UTF-8", None),
        (good[:8] + b"[" + good[9:], "not JSON", None),
    ]:
        path.write_bytes(content)
        refused(path, says, parameter=parameter)
    write_safetensors_parts(path, '{"__metadata__": {"a": 1}}', b"")
    refused(path, "__metadata__ .* expected an object of strings")
    write_safetensors_parts(path, '{"a": {}, "a": {}}', b"")
    refused(path, "'a' is there twice")
    _safetensors(path, lambda h: h.update(d=h["c"]))
    refused(path, "overlap", parameter="d")


def test_the_index_of_several_safetensors(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    index = write_safetensors_index(folder, [TENSORS, {"d": torch.ones(1)}])
    (tmp_path / "outside.safetensors").write_bytes(
        (folder / "model-00002-of-00002.safetensors").read_bytes()
    )
    (folder / "link").symlink_to("../outside.safetensors")
    good = index.read_text()
    second = "model-00002-of-00002.safetensors"
    for value, says, file in [
        ("../outside.safetensors", "leaves the checkpoint's folder", index.name),
        (str(tmp_path / "outside.safetensors"), "is absolute", index.name),
        ("link", "leaves the checkpoint's folder", index.name),
        (3, "data path 3 is not the name of a file", index.name),
        (None, "is not the name of a file", index.name),
        ("", "is not the name of a file", index.name),
        (".", "is a folder", "ck"),
        ("gone.safetensors", "no such file", "gone.safetensors"),
        (
            "model-00001-of-00002.safetensors",
            "does not have it",
            "model-00001-of-00002.safetensors",
        ),
    ]:
        edit(index, put(value, "weight_map", "d"))
        refused(folder, says, file, "d")
        index.write_text(good)
    edit(index, put([], "weight_map"))
    refused(folder, r"weight_map is \[\]; expected a JSON object", index.name)
    edit(index, drop("weight_map"))
    refused(folder, "'records' .* or 'weight_map'", index.name)
    index.write_text(good)
    edit(index, put(second, "weight_map", "a"))
    refused(folder, "does not have it; expected it here", second, "a")
    index.write_text(good)
    (folder / second).unlink()
    refused(folder, "no such file", second, "d")


def test_a_name_in_two_shards_that_the_index_leaves_out(tmp_path: Path) -> None:
    index = write_safetensors_index(tmp_path, [TENSORS, {"a": torch.ones(1), "d": torch.ones(1)}])
    assert open_checkpoint(tmp_path).entries["a"].shape == (1,)  # where the index says
    edit(index, drop("weight_map", "a"))
    refused(tmp_path, "is in model-0000.* too", "model-00002-of-00002.safetensors", "a")
