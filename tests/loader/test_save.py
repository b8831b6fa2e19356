"""`save`: what is written, what is refused, and that a save is done wholly or not at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import Replicate, Shard

from discolab import ArgumentError, DRef, Session, WorkerError, current_worker
from discolab.loader import CheckpointError, load, open_checkpoint, save
from discolab.loader.arrangement import Arranged, Record
from discolab.loader.atomic import JOURNAL, Replacement
from discolab.loader.formats.tensor_cache import arrange
from discolab.loader.presharded import logical
from tests.loader.shard_oracle import random_tensor, read_all, same_bits, write_source

ROOT = Path(__file__).parents[2]


def my_rows(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """On a worker: its part of a tensor of 0, 1, 2 …, cut along the rows."""
    worker = current_worker()
    first = worker.worker_id * rows * columns
    numbers = torch.arange(first, first + rows * columns, dtype=dtype)
    return numbers.reshape(rows, columns)


def rows(session: Session, each: int = 2, columns: int = 3) -> DRef:
    """The same as a DRef with its placements."""
    ref = session.call_packed(my_rows, each, columns)
    ref.placements = (Shard(0),)
    return ref


def files(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(os.listdir(folder))


# -- what is written -----------------------------------------------------------------------------


@pytest.mark.conformance
def test_own_tensors_by_their_placements(pair: Session, tmp_path: Path) -> None:
    norm = pair.call_packed(torch.ones, 5)
    norm.placements = (Replicate(),)
    made = save(pair, tmp_path / "out", {"w": rows(pair), "norm": norm})
    assert files(tmp_path / "out") == ["model.safetensors"]
    assert made.format == "safetensors"
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        assert torch.equal(opened.get_tensor("w"), torch.arange(12.0).reshape(4, 3))
        assert torch.equal(opened.get_tensor("norm"), torch.ones(5))
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.one_process
def test_a_plan_says_how_they_are_laid_out(pair: Session, tmp_path: Path) -> None:
    made = save(pair, tmp_path, {"w": pair.call_packed(my_rows, 2, 3)}, {"w": "shard(1)"})
    found = read_all(made)["w"]
    whole = torch.arange(12.0).reshape(4, 3)
    assert torch.equal(found, torch.cat([whole[:2], whole[2:]], 1))


@pytest.mark.one_process
def test_session_method(pair: Session, tmp_path: Path) -> None:
    assert list(pair.save(tmp_path, {"w": rows(pair)}).entries) == ["w"]


@pytest.mark.one_process
def test_many_files(pair: Session, tmp_path: Path) -> None:
    weights = {name: rows(pair) for name in "abc"}
    save(pair, tmp_path, weights, max_file_bytes=100, metadata={"by": "me", "step": 7})
    assert files(tmp_path) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 144, "by": "me", "step": "7"}
    assert index["weight_map"]["c"] == "model-00002-of-00002.safetensors"


@pytest.mark.one_process
def test_each_worker_has_its_own_file(pair: Session, tmp_path: Path) -> None:
    save(pair, tmp_path, {"w": rows(pair)}, format="tensor-cache", presharded=True)
    index = json.loads((tmp_path / "tensor-cache.json").read_text())
    names = [[record["name"] for record in file["records"]] for file in index["records"]]
    assert names == [["w_shard-1-of-2"], ["w_shard-2-of-2"]]
    assert index["metadata"]["discolab"] == {
        "version": 1,
        "workers": [2],
        "groups": 1,
        "layouts": {"w": "shard(0)"},
        "shapes": {"w": [4, 3]},
    }
    assert all(len(file["md5sum"]) == 32 for file in index["records"])
    load(pair, tmp_path, {"w": "shard(0)"}, verify=True, progress=False)


@pytest.mark.one_process
def test_bfloat16_as_float32(pair: Session, tmp_path: Path) -> None:
    ref = pair.call_packed(my_rows, 2, 3, torch.bfloat16)
    plan = {"w": "shard(0)"}
    made = save(pair, tmp_path, {"w": ref}, plan, format="tensor-cache", bf16_as="f32-to-bf16")
    entry = made.entries["w"]
    assert (entry.dtype, entry.stored) == (torch.float32, torch.bfloat16)
    assert torch.equal(read_all(made)["w"], torch.arange(12.0).reshape(4, 3))


@pytest.mark.one_process
def test_groups_stages_and_a_mesh(sess: Session, tmp_path: Path) -> None:
    """What is loaded is saved as it was, padding left out."""
    tensors = {name: random_tensor((9, 6), torch.float16, i) for i, name in enumerate("abcd")}
    path = write_source("safetensors", tmp_path / "in", tensors)
    plan = {"a": "shard(0, pad_to=8)", "b": "shard(1, stage=1)", "c": "replicate(stage=0)"}
    for presharded in (False, True):
        made = save(sess, tmp_path / "out", load(sess, path, plan), presharded=presharded)
        found = read_all(logical(made))
        assert all(same_bits(found[name], tensor) for name, tensor in tensors.items())
    sess.mesh(dp=2, tp=2)
    weights = load(sess, path, {"a": "[shard(0), shard(1)]", "b": "shard(0)"})
    found = read_all(save(sess, tmp_path / "mesh", weights))
    assert all(same_bits(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.one_process
def test_tensors_with_strides_and_gradients(pair: Session, tmp_path: Path) -> None:
    ref = pair.call_packed(lambda: torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t()))
    found = read_all(save(pair, tmp_path, {"w": ref}, {"w": "shard(1)"}))["w"]
    assert torch.equal(found, torch.arange(6.0).reshape(2, 3).t().repeat(1, 2))


@pytest.mark.one_process
def test_large_columns(pair: Session, tmp_path: Path) -> None:
    """Runs that are written one by one, as they are long."""
    ref = pair.call_packed(lambda: torch.full((3, 20_000), float(current_worker().worker_id)))
    found = read_all(save(pair, tmp_path, {"w": ref}, {"w": "shard(1)"}))["w"]
    assert torch.equal(found, torch.tensor([0.0, 1.0]).repeat_interleave(20_000).expand(3, -1))


def packed(sizes: list[int], **options: Any) -> list[list[str]]:
    """The names of tensors of so many bytes in each file, of 100 bytes at most."""
    records = [Record(str(n), (n,), torch.uint8, torch.uint8) for n in sizes]
    arranged: Arranged = arrange([records], 100, **options)
    return [[slot.record.name for slot in slots] for slots in arranged.by_file()]


def test_packing_is_that_of_tvm() -> None:
    assert packed([30, 40, 29]) == [["30", "40", "29"]]
    assert packed([30, 40, 31]) == [["30", "40"], ["31"]]  # fewer than the cap, so 100 is too many
    assert packed([30, 80, 20]) == [["80"], ["30", "20"]]  # the large one comes first
    assert packed([30, 80, 20], in_order=True) == [["30"], ["80"], ["20"]]
    assert packed([500, 1]) == [["500"], ["1"]]


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.one_process
def test_a_layout_must_be_known(pair: Session, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"how 'w' is laid out .* plan="):
        save(pair, tmp_path / "out", {"w": pair.call_packed(torch.ones, 2)})
    assert not (tmp_path / "out").exists()


@pytest.mark.one_process
@pytest.mark.parametrize(
    ("value", "plan", "match"),
    [
        (lambda: 3, {}, "'w' is a int on worker 0"),
        (lambda: None, {}, "'w' is None on every worker"),
        (lambda: torch.ones(current_worker().worker_id + 1), {}, r"worker 1 has \(2,\)"),
        (lambda: torch.ones(2), {"w": "shard(1)"}, "the shards have 1 dimensions"),
        (lambda: torch.ones(2, current_worker().worker_id), {"w": "shard(0)"}, "worker 1 has"),
        (
            lambda: torch.ones(2, dtype=(torch.int8, torch.uint8)[current_worker().worker_id]),
            {},
            "'w' has several dtypes: torch.int8 on worker 0, torch.uint8 on worker 1",
        ),
        (lambda: torch.ones(2, dtype=torch.complex128), {}, "safetensors does not have"),
        (lambda: torch.ones(2).to_sparse(), {}, "is a Tensor"),
    ],
)
def test_tensors_must_fit(
    pair: Session, tmp_path: Path, value: Any, plan: dict[str, str], match: str
) -> None:
    with pytest.raises(ArgumentError, match=match):
        save(pair, tmp_path, {"w": pair.call_packed(value)}, plan)
    assert files(tmp_path) == []


@pytest.mark.one_process
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"format": "pt"}, "'safetensors', 'tensor-cache'"),
        ({"bf16_as": "f32-to-bf16"}, "tensor-cache"),
        ({"max_file_bytes": 0}, "1 or more"),
        ({"metadata": {"x": object()}}, "JSON"),
        ({"metadata": {"discolab": "x"}}, "another name"),
    ],
)
def test_options(pair: Session, tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        save(pair, tmp_path, {"w": rows(pair)}, **options)


@pytest.mark.one_process
def test_weights_are_drefs(pair: Session, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="dict of DRefs"):
        save(pair, tmp_path, [rows(pair)])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"weights\['w'\] is to be a DRef, got a Tensor"):
        save(pair, tmp_path, {"w": torch.ones(2)})  # type: ignore[dict-item]


@pytest.mark.one_process
def test_a_poisoned_value(pair: Session, tmp_path: Path) -> None:
    save(pair, tmp_path, {"w": rows(pair)})
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        save(pair, tmp_path, {"w": pair.call_packed(lambda: 1 / 0)}, {})
    assert list(open_checkpoint(tmp_path).entries) == ["w"]


# -- wholly or not at all ------------------------------------------------------------------------


@pytest.mark.one_process
def test_the_old_one_goes_last(pair: Session, tmp_path: Path) -> None:
    """Other files stay, and files keep away from names that are taken."""
    (tmp_path / "config.json").write_text("{}")
    save(pair, tmp_path, {"w": rows(pair)}, presharded=True)
    before = set(files(tmp_path))
    made = save(pair, tmp_path, {"w": rows(pair, 3)}, presharded=True)
    assert len(made.files) == 2
    assert not {os.path.basename(file.path) for file in made.files} & before
    assert len(files(tmp_path)) == 4  # with config.json and the index
    again = save(pair, tmp_path, {"w": rows(pair)}, presharded=True)
    # nor do old names come back: somebody may still have an old index
    assert not {os.path.basename(file.path) for file in again.files} & before
    assert len(files(tmp_path)) == 4


@pytest.mark.one_process
def test_out_is_a_file_or_not_writable(pair: Session, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(CheckpointError, match=r"is a file|can't be written") as caught:
            save(pair, path, {"w": rows(pair)})
        assert caught.value.file == str(path)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(CheckpointError, match="has the name of a file"):
        save(pair, tmp_path / "model.safetensors", {"w": rows(pair)})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors.part").symlink_to(tmp_path / "file")
    save(pair, tmp_path / "out", {"w": rows(pair)})
    assert (tmp_path / "file").read_text() == "mine"
    assert files(tmp_path / "out") == ["model.safetensors"]


@pytest.mark.one_process
def test_a_file_system_that_keeps_no_room(
    pair: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then zeros are written first."""

    def not_supported(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", not_supported)
    found = read_all(save(pair, tmp_path, {"w": rows(pair, 100_000)}))
    assert torch.equal(found["w"], torch.arange(600_000.0).reshape(-1, 3))


@pytest.mark.one_process
def test_another_format_is_not_replaced(pair: Session, tmp_path: Path) -> None:
    save(pair, tmp_path, {"w": rows(pair)})
    with pytest.raises(ArgumentError, match=r"another format \(safetensors: model.safetensors\)"):
        save(pair, tmp_path, {"w": rows(pair)}, format="tensor-cache")
    assert files(tmp_path) == ["model.safetensors"]


@pytest.mark.one_process
def test_one_at_a_time(pair: Session, tmp_path: Path) -> None:
    with Replacement(tmp_path, "safetensors"):
        with pytest.raises(CheckpointError, match="another save is writing here"):
            save(pair, tmp_path, {"w": rows(pair)})
        assert files(tmp_path) == [JOURNAL]
    save(pair, tmp_path, {"w": rows(pair)})
    assert files(tmp_path) == ["model.safetensors"]


@pytest.mark.conformance
def test_what_fails_on_a_worker(
    pair: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error that names the file; the old checkpoint is whole, and nothing else is there."""
    save(pair, tmp_path, {"w": rows(pair)}, presharded=True)
    before = files(tmp_path)
    create = Replacement.create

    def and_lose(place: Replacement, arranged: Arranged) -> list[str]:
        paths = create(place, arranged)
        os.unlink(paths[1])
        return paths

    with monkeypatch.context() as patched:
        patched.setattr(Replacement, "create", and_lose)
        with pytest.raises(CheckpointError, match=r"is not there to be written to.*worker 1"):
            save(pair, tmp_path, {"w": rows(pair, 3)}, presharded=True)
    assert files(tmp_path) == before
    assert read_all(logical(open_checkpoint(tmp_path)))["w"].shape == (4, 3)


@pytest.mark.parametrize(
    "journal",
    [
        '{"index": "model.safetensors.index.json", "new": ["../x.bin", "config.json"], "old": []}',
        '{"index": "../x", "new": ["a/b.bin", 3, null], "old": ["..", "config.json"]}',
        '{"index": null, "new": "config.json", "old": ["config.json"]}',
        '{"index": nu',
        "[" * 100_000,
        "[]",
    ],
)
def test_a_journal_of_strangers(tmp_path: Path, journal: str) -> None:
    """It makes nobody remove what is no checkpoint."""
    folder = tmp_path / "out"
    folder.mkdir()
    for name in (tmp_path / "x.bin", folder / "config.json"):
        name.write_text("mine")
    (folder / JOURNAL).write_text(journal)
    with Replacement(folder, "safetensors"):
        pass
    assert files(tmp_path) == ["out", "x.bin"]
    assert files(folder) == ["config.json"]


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """One of both versions is there, whole; the next save clears what is left. See the program."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.loader.killed_writer", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for run in found["steps"]:
        versions = run.get("versions", [run.get("bad")])
        switch = versions.index(2)
        assert switch > 10, run
        assert versions == [1] * switch + [2] * (len(versions) - switch), run
    assert len(found["random"]) == 20  # and nothing was left
    assert set(found["random"]) <= {1, 2}
    code, error, version, left = found["full"]
    assert (code, version, left) == (0, 1, [])
    assert error.startswith(str(tmp_path / "out" / "model-0000"))
    assert "can't be written: File too large" in error


@pytest.mark.one_process
def test_what_could_not_be_read_again_is_not_written(pair: Session, tmp_path: Path) -> None:
    save(pair, tmp_path, {"w": rows(pair)})
    good = load(pair, tmp_path)["w"].debug_get_from_remote(0)
    deep: Any = "bottom"
    for _ in range(70):
        deep = [deep]
    many = pair.call_packed(torch.zeros, [1] * 70)
    many.placements = [Replicate()]
    for weights, options in (
        ({"w_shard-1-of-2": rows(pair)}, {}),
        ({"\ud800": rows(pair)}, {}),
        ({"w": many}, {}),
        ({"w": rows(pair)}, {"metadata": {"a": deep}}),
    ):
        with pytest.raises(ArgumentError, match=r"shards of another|no text|70|dimensions|nested"):
            save(pair, tmp_path, weights, **options)
    assert torch.equal(load(pair, tmp_path)["w"].debug_get_from_remote(0), good)


def test_a_replaced_parameter_is_not_taken_for_the_loaded_one(
    pair: Session, tmp_path: Path
) -> None:
    save(pair, tmp_path, {"w": rows(pair)}, presharded=True)
    weights = load(pair, tmp_path)
    weights["w"] = pair.call_packed(torch.cat, [weights["w"], weights["w"]])
    with pytest.raises(ArgumentError, match=r"the shards of 'w' are not .* as they were loaded"):
        save(pair, tmp_path / "new", weights)
    assert not (tmp_path / "new").exists()
