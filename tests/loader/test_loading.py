"""`sess.load`: shards on every engine, casts, targets, errors, and what is left after one."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

import discolab
from discolab import ArgumentError, Session, WaitTimeoutError, current_worker
from discolab.loader import CheckpointError, loading, progress
from tests.loader.checkpoints import filled, same_bits, write_safetensors, write_tensor_cache

TENSORS = {
    "embed": filled((10, 4), torch.bfloat16, 1),
    "layers.0.up": filled((8, 4), torch.float32, 2),
    "layers.0.down": filled((4, 8), torch.float32, 3),
    "norm": filled((4,), torch.float32, 4),
    "steps": torch.tensor(7),
}
PLAN = {"embed": "shard(0)", "*.up": "shard(0)", "*.down": "shard(1)"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    write_safetensors(file, TENSORS)
    return file


def part(name: str, rank: int, workers: int) -> torch.Tensor:
    dim = {"embed": 0, "layers.0.up": 0, "layers.0.down": 1}.get(name)
    tensor = TENSORS[name]
    return tensor if dim is None else tensor.chunk(workers, dim)[rank].contiguous()


@pytest.mark.conformance
def test_each_worker_gets_its_shards(make: Callable[..., Session], path: Path) -> None:
    session = make(2)
    weights = session.load(path, PLAN)
    assert list(weights) == list(TENSORS)
    for name, ref in weights.items():
        for rank, found in enumerate(ref.debug_get_from_all()):
            assert same_bits(found, part(name, rank, 2)), (name, rank)
    assert weights["layers.0.down"].placements == (Shard(1),)
    assert weights["norm"].placements == (Replicate(),)
    product = (weights["layers.0.up"] @ weights["layers.0.down"][:, :1]).debug_get_from_all()
    assert product[0].shape == (4, 1)


def test_groups_hold_copies_and_stages_hold_their_own(sess: Session, path: Path) -> None:
    weights = sess.load(path, {**PLAN, "norm": "replicate(stage=1)"})
    embed = weights["embed"].debug_get_from_all()
    assert [tuple(found.shape) for found in embed] == [(5, 4)] * 4
    assert same_bits(embed[3], part("embed", 1, 2))
    norm = weights["norm"].debug_get_from_all()
    assert norm[:2] == [None, None]
    assert same_bits(norm[2], TENSORS["norm"])


@pytest.mark.one_process
def test_a_mesh_is_cut_along_its_axes(make: Callable[..., Session], path: Path) -> None:
    session = make(4)
    session.mesh(dp=2, tp=2)
    weights = session.load(path, {"*.up": [Shard(1), Shard(0)], "embed": "shard(0)"})
    ups = weights["layers.0.up"].debug_get_from_all()
    assert same_bits(ups[1], TENSORS["layers.0.up"][4:, :2].contiguous())
    assert same_bits(ups[2], TENSORS["layers.0.up"][:4, 2:].contiguous())
    assert weights["layers.0.up"].placements == (Shard(1), Shard(0))
    assert "Shard(1), Shard(0)" in str(weights["layers.0.up"]._repr_mimebundle_()["text/plain"])


def test_floating_point_parameters_are_cast(pair: Session, path: Path) -> None:
    weights = pair.load(path, PLAN, dtype="float16")
    for name in TENSORS:
        found = weights[name].debug_get_from_remote(1)
        wanted = part(name, 1, 2)
        wanted = wanted.to(torch.float16) if wanted.dtype.is_floating_point else wanted
        assert same_bits(found, wanted)


def test_tensors_that_are_there_are_loaded_into(pair: Session, path: Path) -> None:
    first = pair.load(path, PLAN)
    for ref in first.values():
        pair.call_without_result(torch.Tensor.zero_, ref)
    again = pair.load(path, PLAN, into=first)
    assert again["embed"] is first["embed"]
    assert same_bits(first["embed"].debug_get_from_remote(1), part("embed", 1, 2))
    with pytest.raises(
        ArgumentError, match=r"into\['embed'\] is \(5, 4\) .* shard is \(10, 4\) .*\(worker 0\)"
    ):
        pair.load(path, None, into=first)
    with pytest.raises(ArgumentError, match=r"no tensor for 'norm', 'steps'"):
        pair.load(path, PLAN, into={n: first[n] for n in list(TENSORS)[:3]})


def replicated(shape: tuple[int, int]) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (current_worker().num_workers,))
    return DTensor.from_local(torch.zeros(shape), mesh, [Replicate()])


def faked(shape: tuple[int, int]) -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(shape)


@pytest.mark.one_process
@pytest.mark.parametrize("name", ["layers.0.up", "layers.0.down"])  # rows, columns
@pytest.mark.parametrize(
    ("target", "why"),
    [
        (replicated, r"is a DTensor; into= takes each worker's own part: .*to_local\(\)"),
        (lambda shape: torch.empty(shape, device="meta"), r"meta device, without .*to_empty\("),
        (faked, "is a FakeTensor, whose elements are not its memory"),
        (lambda shape: torch.zeros(shape).to_sparse(), "is a tensor of layout torch.sparse_coo"),
        (lambda shape: torch.zeros(1, 1).expand(shape), r"was expanded: .*clone\(\)"),
        (lambda shape: torch._neg_view(torch.zeros(shape)), r"neg view: .*resolve_neg\(\)"),
    ],
)
def test_what_has_no_memory_for_it_is_not_loaded_into(
    pair: Session, path: Path, name: str, target: Any, why: str
) -> None:
    ref = pair.call_packed(target, tuple(part(name, 0, 2).shape))
    with pytest.raises(ArgumentError, match=rf"into\['{name}'\] .*{why}"):
        pair.load(path, PLAN, names=name, into={name: ref})


def test_a_part_of_a_checkpoint(pair: Session, path: Path) -> None:
    assert list(pair.load(path, PLAN, names="layers.*")) == ["layers.0.up", "layers.0.down"]
    weights = pair.load(path, PLAN, names=["norm", "embed"])
    with pytest.raises(ArgumentError, match="did you mean 'norm'"):
        weights["nrom"]


def test_a_float32_that_is_stored_as_bfloat16(pair: Session, tmp_path: Path) -> None:
    tensor = filled((6, 6), torch.bfloat16).float()
    write_tensor_cache(tmp_path, {"w": tensor}, formats={"w": "f32-to-bf16"})
    found = pair.load(tmp_path, {"w": "shard(1)"})["w"].debug_get_from_remote(0)
    assert same_bits(found, tensor[:, :3].contiguous())


def test_nan_is_refused_on_request(pair: Session, tmp_path: Path) -> None:
    tensor = filled((4, 4), torch.float32)
    tensor[3, 1] = math.nan
    turns = torch.tensor([[1 + 1j], [complex(0, math.inf)]], dtype=torch.complex64)
    held = {"a": filled((2,), torch.float32), "turns": turns, "w": tensor}
    write_safetensors(tmp_path / "m.safetensors", held)
    pair.load(tmp_path, {"w": "shard(0)"})
    for name, of in (("w", 8), ("turns", 1)):
        with pytest.raises(
            CheckpointError,
            match=rf"'{name}': 1 of the {of} values .* NaN or infinite \(worker 1\)",
        ):
            pair.load(tmp_path, {name: "shard(0)"}, names=["a", name], check_nan=True)
    pair.sync_all()  # it was told, once


def test_a_wrong_checksum_is_found_on_request(pair: Session, tmp_path: Path) -> None:
    write_tensor_cache(tmp_path, {"w": filled((4, 4), torch.float32)})
    (file,) = tmp_path.glob("*.bin")
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    pair.load(tmp_path)
    with pytest.raises(CheckpointError, match="md5") as caught:
        pair.load(tmp_path, verify=True)
    assert caught.value.file == str(file)


def _registers() -> int:
    return len(current_worker().registers)


def test_nothing_of_a_failed_load_stays(pair: Session, path: Path) -> None:
    before = pair.call_packed(_registers).debug_get_from_all()
    catalog = discolab.loader.open_checkpoint(path)
    os.truncate(path, path.stat().st_size - 3)
    with pytest.raises(CheckpointError, match=r"bytes here, and had .* \(worker \d\)"):
        pair.load(catalog, PLAN)
    with pytest.raises(CheckpointError):
        pair.load(path, PLAN)
    pair.sync_all()
    assert pair.call_packed(_registers).debug_get_from_all() == before


def test_what_is_typed_wrong_is_said_before_anything_is_sent(pair: Session, path: Path) -> None:
    with pytest.raises(ArgumentError, match="dimension 2"):
        pair.load(path, {"embed": "shard(2)"})
    with pytest.raises(ArgumentError, match="float"):
        pair.load(path, dtype="int8")
    with pytest.raises(CheckpointError):
        pair.load(path.parent / "nothing")


@pytest.mark.conformance
def test_worker_0_reads_for_all(sess: Session, path: Path) -> None:
    plan = {**PLAN, "norm": "replicate(stage=1)", "*.up": "shard(0, stage=1)"}
    catalog = discolab.loader.open_checkpoint(path)
    one = sess.load(catalog, plan, dtype="bfloat16")
    other = sess.load(catalog, plan, dtype="bfloat16", read_by="first", check_nan=True)
    for name, ref in one.items():
        for mine, theirs in zip(
            ref.debug_get_from_all(), other[name].debug_get_from_all(), strict=True
        ):
            assert (mine is None and theirs is None) or same_bits(mine, theirs)
    os.truncate(path, path.stat().st_size - 3)
    with pytest.raises(CheckpointError, match=r"bytes here, and had .* \(worker 0\)"):
        sess.load(catalog, plan, read_by="first")
    sess.sync_all()


def _slow(*_: Any) -> None:
    while True:
        current_worker().wait_for(lambda: False, 0.05)


@pytest.mark.one_process
def test_a_load_that_stands_still_is_given_up(
    make: Callable[..., Session], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make(2)
    monkeypatch.setattr(loading, "fill", _slow)
    with pytest.raises(WaitTimeoutError, match=r"nothing has landed for 0.3 s .*worker 1: 0 B"):
        session.load(path, timeout=0.3)
    monkeypatch.undo()
    assert session.load(path)["steps"].debug_get_from_all() == [torch.tensor(7)] * 2


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
@pytest.mark.one_process
def test_files_are_closed_also_where_others_failed(
    make: Callable[..., Session], tmp_path: Path
) -> None:
    session = make(2)
    tensor = filled((4, 4), torch.float32)
    tensor[0, 0] = math.nan
    write_safetensors(tmp_path / "m.safetensors", {"w": tensor})
    before = _open_files()
    for _ in range(20):
        with pytest.raises(CheckpointError):
            session.load(tmp_path, {"w": "shard(0)"}, check_nan=True)
    session.sync_all()
    assert _open_files() <= before + 1


def test_a_file_that_was_written_again_is_not_taken_for_the_old_one(
    pair: Session, tmp_path: Path
) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, {"w": filled((4, 4), torch.float32, 1)})
    catalog = discolab.loader.open_checkpoint(path)
    other = write_safetensors(tmp_path / "o.safetensors", {"w": filled((4, 4), torch.float32, 2)})
    data = path.read_bytes()
    os.replace(other, path)
    with pytest.raises(CheckpointError, match="was replaced by another file after its index"):
        pair.load(catalog)
    catalog = discolab.loader.open_checkpoint(path)
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="was written to after its index"):
        pair.load(catalog, read_by="first")
    pair.load(path)


def _count(board: int) -> None:
    progress.Meter(board, current_worker())(100 + current_worker().worker_id)


def test_workers_tell_how_far_they_are(pair: Session) -> None:
    with progress.Board("loading", [200, 200], False) as board:
        pair.call_packed(_count, board.number)
        pair.sync_all()
        assert board.landed == [100, 101]


def test_progress_is_a_service_of_each_session_from_its_start() -> None:
    code = (
        "import discolab; from discolab.runtime import services; "
        "print('loader' in services.SERVICES)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "True\n"


def test_what_no_memory_can_hold_is_told_with_its_file_and_name(
    pair: Session, tmp_path: Path
) -> None:
    overcommit = Path("/proc/sys/vm/overcommit_memory")
    if overcommit.exists() and overcommit.read_text().strip() == "1":
        pytest.skip("this machine promises any memory")
    size, file = 8 * 10**12, tmp_path / "sparse.safetensors"
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"w": entry}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    try:
        os.truncate(file, 8 + len(header) + size)
    except OSError:
        pytest.skip("no such file system")
    words = r"sparse\.safetensors: 'w': there is no memory for the 8,000,000,000,000 bytes"
    with pytest.raises(CheckpointError, match=words):
        pair.load(file)
    pair.sync_all()
