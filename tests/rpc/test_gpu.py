"""Remote calls with tensors on a GPU, within a process and between processes."""

from __future__ import annotations

import pytest
import torch

from discolab import current_worker, make_session, rpc
from tests.gpus import GPU, late, needs_gpu

pytestmark = needs_gpu

SIZES = (10, 1 << 20)


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def next_rank() -> int:
    return (current_worker().rank + 1) % 4


def calls() -> list[float]:
    found = []
    for elements in SIZES:
        back = rpc.rpc_sync(next_rank(), double, (late(1.0, elements),))
        assert back.device == GPU
        found.append(float(back.sum()) / elements)
    return found


def futures() -> list[float]:
    mine = [late(float(i), SIZES[1]) for i in range(3)]
    pending = [rpc.rpc_async(next_rank(), double, (one,)) for one in mine]
    return [float(one.mean()) for one in rpc.wait_all(pending)]


def references() -> list[float]:
    ref = rpc.remote(next_rank(), late, (3.0, SIZES[1]))
    other = rpc.remote(next_rank(), double, (ref.to_here(),))
    return [float(ref.to_here().mean()), float(other.to_here().mean())]


def streams() -> list[float]:
    def several():  # type: ignore[no-untyped-def]
        for i in range(4):
            yield late(float(i), SIZES[1])

    return [float(one.mean()) for one in rpc.stream(next_rank(), several)]


def gradients() -> list[float]:
    from discolab.rpc import autograd

    x = torch.full((8,), 3.0, device=GPU, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync(next_rank(), double, (x,)).square().sum()
        autograd.backward(context, [loss])
        return autograd.get_gradients(context)[x].tolist()[:2]


WANTED = {
    calls: [2.0, 2.0],
    futures: [0.0, 2.0, 4.0],
    references: [3.0, 6.0],
    streams: [0.0, 1.0, 2.0, 3.0],
    gradients: [24.0, 24.0],
}


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_values_arrive_as_they_were(where: str) -> None:
    with make_session(4, where, devices=str(GPU), timeout=60) as sess:
        for program, wanted in WANTED.items():
            for _ in range(2):
                found = sess.call_packed(program).debug_get_from_all()
                assert found == [wanted] * 4, program
        for elements in SIZES:
            back = sess.rpc.rpc_sync(1, double, (late(1.0, elements),))
            assert back.device == GPU
            assert float(back.mean()) == 2
