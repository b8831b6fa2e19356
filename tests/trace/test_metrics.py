"""What a look at a worker's device and process tells."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from discolab import Session, ccl, current_worker, trace
from discolab.trace.metrics import gpu_facts


def spin(path: str) -> None:
    from tests.conftest import Gate

    gate = Gate(path)
    while current_worker().worker_id == 0 and not gate.is_set():
        sum(range(1000))
    ccl.all_reduce(torch.ones(3))


def test_a_sample_while_workers_compute(pair: Session, gate: Any) -> None:
    pair.call_packed(spin, gate.path)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        before = pair.look(trace.sample, timeout=5)
        if before[1]["collective"] and before[0]["busy"]:
            break
    time.sleep(0.05)
    after = pair.look(trace.sample, timeout=5)
    assert before[0]["collective"] is None
    assert before[1]["collective"]["what"] == "all_reduce(sum) of float32[3]"
    assert before[1]["collective"]["group"] == [0, 1]
    assert after[1]["collective"]["seconds"] > before[1]["collective"]["seconds"]
    used = [trace.utilisation(before[rank], after[rank]) for rank in (0, 1)]
    assert used[0] is not None
    assert used[1] is not None
    assert used[0] > used[1]
    for found in after.values():
        assert found["rss"] > 10_000_000
        assert (found["memory"], found["gpu"], found["device"]) == (None, None, "cpu")
    gate.set()
    pair.sync_all()
    idle = pair.look(trace.sample, timeout=5)
    assert [found["busy"] for found in idle.values()] == [False, False]
    assert trace.utilisation(idle[0], {**idle[0], "pid": -1}) is None
    assert trace.utilisation(idle[0], idle[0]) is None


def test_whose_memory_it_is(make: Any, engine: str) -> None:
    found = make(2).look(trace.sample, timeout=5)
    pids = {one["pid"] for one in found.values()}
    if engine == "threads":
        assert len(pids) == 1
        assert {one["threads"] for one in found.values()} == {2}
        assert {one["cpu_of"] for one in found.values()} == {"thread"}
    else:
        assert len(pids) == 2
        assert found[1]["cpu_of"] == "process"
    assert len({one["thread"] for one in found.values()}) == 2


def test_no_gpu_is_no_error() -> None:
    assert gpu_facts(torch.device("cpu")) is None
    if not torch.cuda.is_available():
        assert gpu_facts(torch.device("cuda", 0)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_tells_of_itself() -> None:
    device = torch.device("cuda", 0)
    torch.ones(1, device=device)
    found = gpu_facts(device)
    assert found is not None
    assert found["memory"] > 0
    assert 0 <= found["utilisation"] <= 100
