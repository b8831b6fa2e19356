"""Loading onto devices: blocks go through pinned buffers, and nobody sees a tensor half filled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from discolab import current_worker, make_session
from discolab.loader import load, read
from tests.accelerator import sim

pytestmark = pytest.mark.accelerator

PLAN = {
    "rows": "shard(0)",
    "columns": "shard(1)",
    "padded": "shard(0, pad_to=8)",
    "wide": "shard(0)",
}
TENSORS = {
    "rows": torch.arange(120 * 90.0).reshape(120, 90),
    "columns": torch.arange(90 * 120.0).reshape(90, 120) - 7,
    "padded": torch.arange(77.0).reshape(11, 7),
    "wide": torch.arange(6 * 700.0).reshape(6, 700),  # of which a row is larger than a block
    "steps": torch.arange(5),
}


def shard(name: str, rank: int) -> torch.Tensor:
    """What worker `rank` of two holds."""
    whole = TENSORS[name]
    if name == "padded":
        whole = torch.cat([whole, torch.zeros(5, 7)])
    return whole if name == "steps" else whole.chunk(2, int(name == "columns"))[rank]


def own_stream() -> None:
    """Have the worker work on a stream of its own from now on."""
    sim.set_stream(torch.Stream(current_worker().device))


def stream_now() -> tuple[int, int]:
    """The worker's device, and its stream there."""
    stream = sim.current_stream(current_worker().device)
    return sim.current_device(), stream.stream_id


def used(tensor: torch.Tensor) -> torch.Tensor:
    """Of what a worker's own stream makes of a tensor, a copy on the host."""
    assert tensor.device == current_worker().device
    return (tensor + 0).cpu()


def erased(tensor: torch.Tensor) -> None:
    """Write over a tensor, late."""
    sim.sleep(0.01)
    tensor.fill_(-1)


@pytest.mark.parametrize("dtype", [None, "float64"])
@pytest.mark.parametrize("devices", [["sim:1", "sim:2"], ["sim:3", "sim:3"]])
@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
def test_shards_are_those_of_the_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: list[str],
    dtype: str | None,
    own: bool,
    delays: int,
) -> None:
    """Once into new tensors, and again into those, while the last use of them is under way."""
    monkeypatch.setattr(read, "BLOCK", 1 << 11)  # so that there are many
    save_file(TENSORS, tmp_path / "model.safetensors")
    with make_session(2, "threads", devices=devices, timeout=30) as sess:
        if own:
            sess.call_packed(own_stream)
        stream = sess.call_packed(stream_now).debug_get_from_all()
        weights = load(sess, tmp_path, PLAN, dtype=dtype)
        for again in (False, True):
            if again:
                for ref in weights.values():
                    sess.call_packed(erased, ref)
                weights = load(sess, tmp_path, PLAN, dtype=dtype, into=weights)
            for name, ref in weights.items():
                for rank, got in enumerate(sess.call_packed(used, ref).debug_get_from_all()):
                    assert torch.equal(got, shard(name, rank).to(got.dtype)), (name, rank, again)
        assert sess.call_packed(stream_now).debug_get_from_all() == stream


def test_blocks_are_sent_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are made for a row that is larger: from others a copy holds the host up."""
    monkeypatch.setattr(read, "BLOCK", 1 << 8)
    staging = read._Staging(torch.device("sim:1"))
    for elements in (8, 8, 100, 100, 200, 8):
        with staging.buffer((elements,), torch.float32) as buffer:
            assert buffer.is_pinned()
    staging.finish()


def test_a_file_that_ends_too_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delays: int
) -> None:
    """The tensors are let go while blocks are still on their way to them."""
    monkeypatch.setattr(read, "BLOCK", 1 << 11)
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    seen = 0
    original = read.Files._pread

    def pread(self: read.Files, *args: object) -> None:
        nonlocal seen
        seen += 1
        if seen > 6:
            raise OSError("the disk is gone")
        original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(read.Files, "_pread", pread)
    with make_session(2, "threads", devices=["sim:1", "sim:2"], timeout=30) as sess:
        with pytest.raises(Exception, match="the disk is gone"):
            load(sess, tmp_path, PLAN)
        sess.call_packed(torch.zeros, 1000)
