"""What needs a GPU; see docs/gpu.md."""

from __future__ import annotations

import pytest
import torch

from discolab import ThreadedSession, ccl, current_worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def sum_of_ranks() -> torch.Tensor:
    worker = current_worker()
    assert torch.cuda.current_device() == worker.device.index
    assert torch.cuda.current_stream() != torch.cuda.default_stream()
    x = torch.full((1 << 20,), float(worker.rank), device=worker.device)
    for _ in range(20):
        y = ccl.all_reduce(x)
    return y


def test_workers_take_the_gpus_in_turn_and_reduce_across_them() -> None:
    with ThreadedSession(4, timeout=60) as sess:
        gpus = torch.cuda.device_count()
        assert [device.index for device in sess.devices] == [r % gpus for r in range(4)]
        for value in sess.call_packed(sum_of_ranks).debug_get_from_all():
            assert bool((value == 6).all())


def test_host_arrays_go_to_and_from_worker_0() -> None:
    with ThreadedSession(2, timeout=60) as sess:
        ref = sess.broadcast(torch.arange(5.0))
        back = torch.empty(5)
        sess.copy_from_worker_0(back, ref)
        sess.sync_worker_0()
        assert back.tolist() == [0, 1, 2, 3, 4]
