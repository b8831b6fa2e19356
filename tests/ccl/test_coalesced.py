"""Several tensors in one collective: as one by one, at once, and whole lists must agree."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from discolab import ccl
from discolab.ccl.backends import jobs
from discolab.ccl.board.ledger import ledger_of
from discolab.engines import ThreadedSession
from discolab.runtime import ArgumentError, WorkerError, current_worker

pytestmark = pytest.mark.any_engine

CHECK = hypothesis.settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
OPS = ("all_reduce_coalesced", "all_gather_coalesced", "reduce_scatter_coalesced")
DTYPES = ("float32", "bfloat16", "int64", "uint64", "uint8", "complex64")
Kinds = tuple[tuple[str, tuple[int, ...]], ...]
N = 3


@pytest.fixture(scope="module")
def three() -> Iterator[ThreadedSession]:
    sess = ThreadedSession(N, devices="cpu", timeout=20)
    yield sess
    left = sess.call_packed(ccl.statistics).debug_get_from_remote(0)
    assert (left.collectives, left.messages, left.waiting) == (0, 0, ())
    sess.shutdown(cancel=True)


def rank() -> int:
    return current_worker().rank


def tensors(kinds: Kinds, whose: int, sparse: bool) -> list[torch.Tensor]:
    """A list of small numbers, exact in all dtypes; with `sparse` transposed."""
    made = []
    for number, (dtype, shape) in enumerate(kinds):
        size = torch.Size(shape).numel()
        values = ((torch.arange(size) * 5 + number + whose) % 4 + 1).reshape(shape)
        made.append(values.to(getattr(torch, dtype)))
    return [t.t().contiguous().t() if sparse and t.dim() == 2 else t for t in made]


def wanted(op: str, word: str, kinds: Kinds, me: int) -> list[torch.Tensor]:
    """What each must come to, in float64 and tensor by tensor."""
    found = []
    for number, (name, _) in enumerate(kinds):
        inputs = [tensors(kinds, whose, False)[number] for whose in range(N)]
        if op == "all_gather_coalesced":
            found.append(torch.cat(inputs) if inputs[0].dim() else torch.stack(inputs))
            continue
        wide = torch.stack([x.real if x.is_complex() else x for x in inputs]).double()
        total = {"sum": wide.sum(0), "prod": wide.prod(0)}[word].to(getattr(torch, name))
        if op == "reduce_scatter_coalesced":
            size = len(total) // N
            total = total[me * size : (me + 1) * size]
        found.append(total)
    return found


def once(op: str, word: str, kinds: Kinds, sparse: bool, how: str) -> None:
    """One call; the worker compares it itself."""
    srcs = tensors(kinds, rank(), sparse)
    want = wanted(op, word, kinds, rank())
    arguments: list[Any] = [word] if op != "all_gather_coalesced" else []
    outs = None
    if how == "in place" and op == "all_reduce_coalesced":
        outs = srcs
    elif how != "new":
        outs = [torch.zeros_like(x) for x in want]
    before = len(ledger_of(current_worker()).story(rank()))
    got = getattr(ccl, op)(srcs, *arguments, outs=outs, async_op=how == "async")
    if how == "async":
        got = got.wait()
    assert len(ledger_of(current_worker()).story(rank())) in (before + 1, 256)
    assert isinstance(got, list)
    assert len(got) == len(want)
    for number, (mine, right) in enumerate(zip(got, want, strict=True)):
        assert outs is None or mine is outs[number]
        assert mine.dtype == right.dtype
        assert mine.shape == right.shape
        assert torch.equal(mine, right), (op, number, mine, right)


@pytest.mark.parametrize("block", [16, jobs.BLOCK], ids=["blocks", "whole"])
@pytest.mark.parametrize("op", OPS)
def test_like_one_by_one(
    three: ThreadedSession, op: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BLOCK", block)
    sizes = st.sampled_from([0, N, 2 * N])
    shapes = st.one_of(sizes.map(lambda n: (n,)), st.tuples(sizes, st.integers(0, 3)))
    if op != "reduce_scatter_coalesced":
        shapes = st.one_of(shapes, st.just(()))

    @CHECK
    @hypothesis.given(
        kinds=st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=5),
        word=st.sampled_from(["sum", "prod"]),
        sparse=st.booleans(),
        how=st.sampled_from(["new", "given", "in place", "async"]),
    )
    def run(kinds: Any, word: str, sparse: bool, how: str) -> None:
        call = partial(once, op, word, tuple(kinds), sparse, how)
        three.call_packed(call).debug_get_from_all()

    run()


def shared_memory() -> None:
    """One tensor twice in the list, and outputs that are inputs of others."""
    x, y = torch.full((4,), rank() + 1.0), torch.full((4,), 10.0 * rank())
    twice = ccl.all_reduce_coalesced([x, x], "sum")
    assert [t.tolist() for t in twice] == [[6.0] * 4] * 2
    ccl.all_reduce_coalesced([x, y], "sum", outs=[y, x])
    assert (x.tolist(), y.tolist()) == ([30.0] * 4, [6.0] * 4)
    memory = torch.arange(8.0) + rank()
    ccl.all_reduce_coalesced([memory[:4], memory[4:]], outs=[memory[2:6], torch.zeros(4)])
    assert memory[2:6].tolist() == [3.0, 6.0, 9.0, 12.0]


@pytest.mark.parametrize("block", [16, jobs.BLOCK], ids=["blocks", "whole"])
def test_memory_may_be_shared(
    three: ThreadedSession, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BLOCK", block)
    three.call_packed(shared_memory).debug_get_from_all()


def disagrees(what: str) -> None:
    odd = rank() == 1
    x, y = torch.ones(3), torch.ones(6)
    if what == "number of tensors":
        ccl.all_reduce_coalesced([x, y, y] if odd else [x, y])
    elif what == "shape":
        ccl.all_gather_coalesced([x, x] if odd else [x, y])
    elif what == "dtype":
        ccl.reduce_scatter_coalesced([x, y.long()] if odd else [x, y])
    elif what == "reduction":
        ccl.all_reduce_coalesced([x, y], "max" if odd else "sum")
    elif odd:
        ccl.all_reduce(x)
    else:
        ccl.all_reduce_coalesced([x])


@pytest.mark.parametrize("what", ["number of tensors", "shape", "dtype", "reduction", "operation"])
def test_members_disagree(three: ThreadedSession, what: str) -> None:
    ref = three.call_packed(disagrees, what)
    with pytest.raises(WorkerError, match=f"members disagree on the {what}") as caught:
        ref.debug_get_from_all()
    assert caught.value.ranks == [0, 1, 2]
    for failure in caught.value.failures:
        assert "workers 0, 2: called" in failure.message
        assert "worker 1: called" in failure.message
    three.sync_all()


def refused() -> None:
    if rank():
        return
    x = torch.ones(3)
    for call, words in (
        (lambda: ccl.all_reduce_coalesced([]), "empty"),
        (lambda: ccl.all_reduce_coalesced(x), "give a list"),
        (lambda: ccl.all_reduce_coalesced(iter([x])), "give a list"),
        (lambda: ccl.all_reduce_coalesced([x, 1]), "tensor 1 must be a tensor"),
        (lambda: ccl.all_reduce_coalesced([x, x], outs=[x]), "1 outs for 2 tensors"),
        (lambda: ccl.all_reduce_coalesced([x], outs=[x[:2]]), r"float32\[3\]"),
        (lambda: ccl.all_reduce_coalesced([x], outs=[x[:1].expand(3)]), "share memory"),
        (lambda: ccl.all_reduce_coalesced([x, x.bool()], "avg"), "avg"),
        (lambda: ccl.all_reduce_coalesced([x], "mean"), "unknown op"),
        (lambda: ccl.reduce_scatter_coalesced([x, torch.ones(4)]), "equal parts"),
        (lambda: ccl.all_gather_coalesced([x], outs=[torch.ones(3)]), r"float32\[9\]"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()


def test_arguments(three: ThreadedSession) -> None:
    three.call_packed(refused).debug_get_from_all()
