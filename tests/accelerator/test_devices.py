"""What else a worker has of its device: random numbers, figures, states that are kept."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from discolab import ArgumentError, ccl, current_worker, make_session
from discolab.comparison.sides import seeded
from discolab.engines import node_agent
from discolab.trace import metrics
from discolab.trace.events import GPU
from discolab.trace.profiler import profile
from discolab.views.devices_view import format_gpu
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
        sess.call_packed(lambda: torch.manual_seed(50 + current_worker().rank))
        sess.restore(tmp_path / "kept")
        assert sess.call_packed(go_on).debug_get_from_all() == first
        assert [one[1:] for one in first] == [([float(r)] * 8, f"sim:{r}") for r in range(4)]


def test_figures_of_devices() -> None:
    """Name and memory, of each worker's own."""
    with make_session(2, "threads", devices=["sim:1", "sim:2"], timeout=30) as sess:
        sess.sync_all()
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
            assert row["gpu"]["uuid"] == f"sim-{index}"
            assert row["gpu"]["temperature"] is None  # it has none
        del held


def test_utilisation_of_each_workers_device() -> None:
    """Of the time since the look before."""

    def work() -> None:
        sim.sleep(0.2 if current_worker().rank else 0)

    with make_session(2, "threads", devices=["sim:1", "sim:2"], timeout=30) as sess:
        sess.call_packed(lambda: metrics.sample(current_worker())).debug_get_from_all()
        sess.call_packed(work)
        sess.sync_all()
        rows = sess.call_packed(lambda: metrics.sample(current_worker())).debug_get_from_all()
    idle, busy = (row["gpu"]["utilisation"] for row in rows)
    assert idle <= 20 < 50 <= busy <= 100
    assert format_gpu(rows[1]) == f"{busy} %"


def test_random_states_of_a_comparison_are_put_back() -> None:
    """On the device that it was for."""
    for index in range(4):  # no two are alike
        sim._random(index, 20 + index)
    expected = [torch.rand(2, device=f"sim:{i}").tolist() for i in range(4)]
    for index in range(4):
        sim._random(index, 20 + index)
    with seeded(7, torch.device("sim:2")):
        inside = torch.rand(2, device="sim:2").tolist()
    assert torch.rand(2, device="sim:2").tolist() == expected[2] != inside


@pytest.mark.parametrize("where", ["threads", "processes"])
@pytest.mark.parametrize("shared", [False, True], ids=["a device each", "one device"])
def test_kernels_are_in_the_lanes_of_their_workers(where: str, shared: bool) -> None:
    """On a device that workers share those who have given them, on whichever stream."""

    def work() -> None:
        worker = current_worker()
        x = torch.ones(8, device=worker.device)
        stream = torch.Stream(worker.device)
        stream.wait_stream(sim.current_stream(worker.device))
        with stream:
            for _ in range(worker.rank + 1):
                torch.sin(x)
        stream.synchronize()

    devices = ["sim:1"] * 3 if shared else ["sim:1", "sim:3", "sim:0"]
    with make_session(3, where, devices=devices, timeout=60) as sess, profile(sess) as trace:
        sess.call_packed(work).debug_get_from_all()
    for rank, device in enumerate(devices):
        kernels = [event for event in trace.events[rank] if event.kind == GPU]
        sines = [event for event in kernels if event.name == "aten::sin"]
        assert len(sines) == rank + 1
        assert all(event.detail.startswith(f"{device} stream ") for event in kernels)
        assert all(first.end <= then.begin for first, then in pairwise(sines))
        assert {event.detail for event in kernels} - {f"{device} stream 0"}


def test_a_look_waits_for_no_device() -> None:
    """Of workers whose devices have much to do."""
    with make_session(2, "threads", devices=["sim:1", "sim:2"], timeout=30) as sess:
        sess.call_packed(lambda: sim.sleep(1)).debug_get_from_all()
        began = time.monotonic()
        assert len(sess.look(metrics.sample, timeout=5)) == 2
        assert time.monotonic() - began < 0.5
        assert not sim.current_stream(1).query()


def test_a_node_offers_its_accelerators() -> None:
    """Of whichever type; asked in a child, and only those that there are."""
    assert node_agent._count_gpus() == sim.device_count()
    assert node_agent._checked("sim:3,cpu", "sim", 4) == ["sim:3", "cpu"]
    with pytest.raises(ArgumentError, match="there is no sim:4: torch sees 4 GPUs here"):
        node_agent._checked(["sim:4"], "sim", 4)
