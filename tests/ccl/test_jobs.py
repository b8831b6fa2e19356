"""Large operations go block by block, on several threads, with the same bits as in one piece."""

from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.ccl.backends import jobs
from discolab.ccl.reductions import combine
from discolab.runtime import current_worker

N = 3
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint64, torch.bool)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Blocks of 48 bytes; whether each reduction was done in blocks."""
    used: list[bool] = []
    original = jobs.perform

    def counted(*args: Any) -> Any:
        chunks = original(*args)
        used.append(chunks is not None)
        return chunks

    monkeypatch.setattr(jobs, "BLOCK", 48)
    monkeypatch.setattr("discolab.ccl.backends.local.perform", counted)
    return used


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(33, 5, generator=generator) * 20).abs().to(dtype) for _ in range(N)]


def reduces(dtype: torch.dtype, reduction: str) -> None:
    me, given = current_worker().rank, inputs(dtype)
    want = combine(given, reduction)
    part = want.chunk(N)[me]
    mine = given[me]
    assert torch.equal(ccl.all_reduce(mine, reduction), want)
    assert torch.equal(mine, inputs(dtype)[me])
    assert torch.equal(ccl.reduce_scatter(mine, reduction), part)
    at_root = ccl.reduce(mine, 1, reduction)
    assert at_root is None if me != 1 else torch.equal(at_root, want)
    inside = mine.clone()
    ccl.reduce_scatter(inside, reduction, out=inside.chunk(N)[me])
    assert torch.equal(inside.chunk(N)[me], part)
    ccl.all_reduce_(mine, reduction)
    assert torch.equal(mine, want)


@pytest.mark.parametrize("reduction", ["sum", "avg", "max"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits(start: Any, small_blocks: list[bool], dtype: Any, reduction: str) -> None:
    if dtype is torch.bool and reduction == "avg":
        reduction = "prod"
    with start(N) as sess:
        sess.call_packed(reduces, dtype, reduction).debug_get_from_all()
    assert small_blocks == [True] * 5


def shifted(memory: list[torch.Tensor]) -> None:
    """Outputs that cover other elements of the inputs, of this worker and of the next."""
    me = current_worker().rank
    line = torch.arange(100.0) + me
    want = torch.arange(90.0) * N + 3
    ccl.all_reduce(line[:90], out=line[10:])
    assert torch.equal(line[10:], want)
    before = memory[0].clone()
    ccl.barrier()
    mine = memory[0].narrow(0, 90 * me, 90)
    spare = torch.empty(90)
    out = memory[0].narrow(0, 30, 90) if me == 0 else spare
    ccl.all_reduce(mine, out=out)
    assert torch.equal(out, before.view(N, 90).sum(0))
    ccl.barrier()
    transposed = torch.arange(90.0).view(9, 10).t()
    assert torch.equal(ccl.all_reduce(transposed), transposed * N)


def test_shared_memory_goes_in_one_piece(start: Any, small_blocks: list[bool]) -> None:
    memory = [torch.arange(90.0 * N)]
    with start(N) as sess:
        sess.call_packed(lambda: shifted(memory)).debug_get_from_all()
    assert small_blocks == [False] * 3
