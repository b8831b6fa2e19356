"""Precision, reproducibility, overlapping memory, autograd, and groups made by hand."""

from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.runtime import current_worker

pytestmark = pytest.mark.any_engine


def float8_sum() -> torch.Tensor:
    return ccl.all_reduce(torch.full((3,), 1.5).to(torch.float8_e4m3fn)).float()


def half_sum() -> list[float]:
    rank = current_worker().rank
    value = [2048.0, 1.0, 1.0, -2048.0][rank]  # float16 alone would lose the ones
    tensor = torch.tensor([value])
    return [float(ccl.all_reduce(tensor.to(dtype))) for dtype in (torch.float16, torch.bfloat16)]


def nan_max() -> bool:
    value = float("nan") if current_worker().rank == 1 else 1.0
    return bool(ccl.all_reduce(torch.tensor(value), "max").isnan())


def test_small_floats_accumulate_in_float32_and_nan_spreads(start: Any) -> None:
    with start(4) as sess:
        for got in sess.call_packed(float8_sum).debug_get_from_all():
            assert got.tolist() == [6.0, 6.0, 6.0]
        assert sess.call_packed(half_sum).debug_get_from_all() == [[2.0, 2.0]] * 4
        assert sess.call_packed(nan_max).debug_get_from_all() == [True] * 4


def random_sum() -> torch.Tensor:
    generator = torch.Generator().manual_seed(current_worker().rank)
    return ccl.all_reduce(torch.randn(1000, generator=generator) * 1e6)


def test_results_are_bitwise_equal_on_all_and_in_every_run(start: Any) -> None:
    with start(4) as sess:
        first = sess.call_packed(random_sum).debug_get_from_remote(0)
        for _ in range(10):
            for got in sess.call_packed(random_sum).debug_get_from_all():
                assert torch.equal(got, first)


def overlapping() -> None:
    """The input is a part of the output, in the right place and in a wrong one."""
    rank, n = current_worker().rank, current_worker().num_workers
    whole = torch.zeros(2 * n)
    whole[2 * rank : 2 * rank + 2] = rank
    ccl.all_gather(whole[2 * rank : 2 * rank + 2], out=whole)
    want = torch.arange(n).repeat_interleave(2).float()
    assert whole.tolist() == want.tolist()
    whole = torch.full((2 * n,), float(rank))
    ccl.all_gather(whole[1:3], out=whole)
    assert whole.tolist() == want.tolist()
    line = torch.arange(6.0) + 10 * rank
    ccl.broadcast(line[:4], out=line[2:])
    assert line[2:].tolist() == [0.0, 1.0, 2.0, 3.0]


def shared_tensor(one: list[torch.Tensor]) -> None:
    """Two workers give the very same tensor as input, and one of them as output too."""
    tensor = one[0]
    ccl.barrier()
    got = ccl.all_reduce(tensor, out=tensor if current_worker().rank == 0 else None)
    assert got.tolist() == [3.0, 3.0, 3.0]


def test_inputs_and_outputs_may_overlap(start: Any) -> None:
    shared = [torch.ones(3)]
    with start(3) as sess:
        sess.call_packed(overlapping).debug_get_from_all()
        sess.call_packed(lambda: shared_tensor(shared)).debug_get_from_all()


def grads() -> None:
    rank = current_worker().rank
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    total = ccl.all_reduce(parameter * 2)
    assert not total.requires_grad
    assert total.tolist() == [2.0, 2.0]
    ccl.broadcast_(parameter, 1)
    assert parameter.tolist() == [1.0, 1.0]
    assert parameter.requires_grad
    with torch.inference_mode():
        inner = torch.full((2,), float(rank))
    if rank:
        ccl.all_reduce_(inner)
    else:
        with torch.inference_mode():
            ccl.all_reduce_(inner)
    assert inner.tolist() == [1.0, 1.0]
    product = ccl.all_reduce(torch.tensor([1 + 2j]).conj())
    assert product.tolist() == [2 - 4j]


@pytest.mark.filterwarnings("ignore::discolab.ccl.GradientWarning")
def test_autograd_inference_and_conjugates(start: Any) -> None:
    with start(2) as sess:
        sess.call_packed(grads).debug_get_from_all()


def custom_groups() -> tuple[int, int]:
    rank = current_worker().rank
    odd = ccl.new_group([3, 1])
    even = [0, 2]
    mine = odd if rank % 2 else even
    first = int(ccl.all_reduce(torch.tensor(rank), group=mine))
    with_all = int(ccl.all_reduce(torch.tensor(rank), group="world"))
    assert ccl.broadcast(torch.tensor(rank), 1, group=mine).item() == (3 if rank % 2 else 2)
    assert ccl.backend_name() in ("local", "gloo")
    return first, with_all


def test_custom_groups(start: Any) -> None:
    with start(4) as sess:
        assert sess.call_packed(custom_groups).debug_get_from_all() == [
            (2, 6),
            (4, 6),
            (2, 6),
            (4, 6),
        ]
