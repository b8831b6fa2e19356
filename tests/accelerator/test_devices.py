"""What else a worker has of its device: random numbers, figures, states that are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from discolab import ccl, current_worker, make_session
from discolab.trace import metrics
from tests.accelerator import sim

pytestmark = pytest.mark.accelerator


def drawn(seed: int) -> list[float]:
    """Numbers of the worker's device; the others seed theirs in between."""
    torch.manual_seed(seed)
    ccl.barrier()
    return torch.rand(4, device=current_worker().device).tolist()


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_each_worker_seeds_its_own_device(where: str) -> None:
    """As a process with one device would: no other's generator is touched."""
    with make_session(4, where, timeout=60) as sess:
        mine = sess.call_packed(lambda: drawn(current_worker().rank + 5)).debug_get_from_all()
    for rank, numbers in enumerate(mine):
        torch.manual_seed(rank + 5)
        assert torch.rand(4, device=f"sim:{rank}").tolist() == numbers


def test_a_shared_device_is_a_warning() -> None:
    """Workers that share a device share its generator."""
    with (
        make_session(2, "threads", devices="sim:1", timeout=30) as sess,
        pytest.raises(Exception, match="share sim:1 and with it the generator"),
    ):
        sess.call_packed(torch.manual_seed, 3).debug_get_from_all()


def test_a_snapshot_has_tensors_and_random_states(tmp_path: Path) -> None:
    """Of each device; they go on as if nothing had been."""

    def begin() -> None:
        worker = current_worker()
        torch.manual_seed(worker.rank)
        sim.sleep(0.01)
        worker.namespace["x"] = torch.full((8,), float(worker.rank), device=worker.device)

    def go_on() -> tuple[list[float], list[float], str]:
        worker = current_worker()
        x = worker.namespace["x"]
        return torch.rand(3, device=worker.device).tolist(), x.tolist(), str(x.device)

    with make_session(4, "threads", timeout=30) as sess:
        sess.call_packed(begin)
        sess.snapshot(tmp_path / "kept")
        first = sess.call_packed(go_on).debug_get_from_all()
        sess.call_packed(begin)
        sess.restore(tmp_path / "kept")
        assert sess.call_packed(go_on).debug_get_from_all() == first
        assert [one[1:] for one in first] == [([float(r)] * 8, f"sim:{r}") for r in range(4)]


def test_figures_of_devices() -> None:
    """Name and memory, of each worker's own."""
    with make_session(2, "threads", devices=["sim:1", "sim:2"], timeout=30) as sess:
        before = [sim.memory_allocated(i) for i in (1, 2)]
        held = sess.call_packed(
            lambda: torch.zeros(current_worker().device.index, 250, device=current_worker().device)
        )
        sess.sync_all()
        rows = sess.call_packed(lambda: metrics.sample(current_worker())).debug_get_from_all()
        assert [row["device_name"] for row in rows] == ["simulated device"] * 2
        for index, row in zip((1, 2), rows, strict=True):
            assert row["memory"]["used"] == before[index - 1] + 1000 * index
            assert (
                row["memory"]["free"] + row["memory"]["used"] == row["memory"]["total"] == 1 << 30
            )
            assert row["gpu"] is None
        del held
