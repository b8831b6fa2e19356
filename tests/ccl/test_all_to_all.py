"""all_to_all of tensors and of lists whose parts differ in size."""

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
from discolab.engines import ThreadedSession
from discolab.runtime import ArgumentError, Failure, WorkerError, current_worker

pytestmark = pytest.mark.any_engine

CHECK = hypothesis.settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
DTYPES = ("float64", "float16", "int16", "uint64", "bool", "complex64", "float8_e5m2")
CONTIGUOUS = torch.contiguous_format
Matrix = list[list[tuple[int, ...]]]


@pytest.fixture(scope="module", params=[1, 2, 4])
def lab(request: pytest.FixtureRequest) -> Iterator[ThreadedSession]:
    sess = ThreadedSession(request.param, devices="cpu", timeout=20)
    yield sess
    left = sess.call_packed(ccl.statistics).debug_get_from_remote(0)
    assert (left.collectives, left.messages, left.waiting) == (0, 0, ())
    sess.shutdown(cancel=True)


@pytest.fixture(scope="module")
def three() -> Iterator[ThreadedSession]:
    sess = ThreadedSession(3, devices="cpu", timeout=20)
    yield sess
    sess.shutdown(cancel=True)


def rank() -> int:
    return current_worker().rank


def part(sender: int, receiver: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """What one worker sends to another; every pair another."""
    values = torch.arange(torch.Size(shape).numel()) * 3 + 7 * sender + 5 * receiver + 1
    return (values % 11).reshape(shape).double().to(getattr(torch, dtype))


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    new = torch.empty(tensor.shape, dtype=tensor.dtype)
    return tensor.dtype, tensor.shape, new.copy_(tensor).reshape(-1).view(torch.uint8).tolist()


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(tuple(reversed(range(tensor.dim()))))


def exchange(matrix: Matrix, dtype: str, how: str) -> None:
    """Lists of any shapes: ``matrix[i][j]`` is the shape of what the i-th sends to the j-th."""
    me, n = rank(), current_worker().num_workers
    srcs = [part(me, j, matrix[me][j], dtype) for j in range(n)]
    want = [part(i, me, matrix[i][me], dtype) for i in range(n)]
    if how == "transposed":
        srcs = [transposed(transposed(x).clone(memory_format=CONTIGUOUS)) for x in srcs]
    outs = [torch.zeros_like(x) for x in want]
    if how == "overlapping":
        memory = torch.zeros(sum(x.numel() for x in (*srcs, *want)) + 1, dtype=srcs[0].dtype)
        place = 0
        for number, x in enumerate(srcs):
            srcs[number] = memory[place : place + x.numel()].view(x.shape).copy_(x)
            place += x.numel()
        place = 1
        for number, x in enumerate(want):
            outs[number] = memory[place : place + x.numel()].view(x.shape)
            place += x.numel()
    got = ccl.all_to_all(srcs, out=outs, async_op=how == "async")
    got = got.wait() if how == "async" else got
    assert [id(x) for x in got] == [id(x) for x in outs]
    assert [bits(x) for x in got] == [bits(x) for x in want]


@pytest.mark.parametrize("block", [16, jobs.BLOCK], ids=["blocks", "whole"])
def test_lists_of_any_shapes(
    lab: ThreadedSession, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BLOCK", block)
    n = lab.num_workers
    shape = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    row = st.lists(shape, min_size=n, max_size=n)

    @CHECK
    @hypothesis.given(
        matrix=st.lists(row, min_size=n, max_size=n),
        dtype=st.sampled_from(DTYPES),
        how=st.sampled_from(["given", "transposed", "overlapping", "async"]),
    )
    def run(matrix: Matrix, dtype: str, how: str) -> None:
        lab.call_packed(partial(exchange, matrix, dtype, how)).debug_get_from_all()

    run()


def in_groups() -> None:
    """Tensors and lists in a list of ranks; in place, and without an output."""
    me = rank()
    group = [0, 2] if me != 1 else [1]
    mine = torch.arange(4.0) + 10 * me
    if me == 1:
        want = mine.clone()
    else:
        want = torch.tensor([0.0, 1.0, 20.0, 21.0] if me == 0 else [2.0, 3.0, 22.0, 23.0])
    assert torch.equal(ccl.all_to_all(mine, group=group), want)
    pieces = ccl.all_to_all(list(mine.chunk(len(group))), group=group)
    assert torch.equal(torch.cat(pieces), want)
    assert ccl.all_to_all(mine, group=group, out=mine) is mine
    assert torch.equal(mine, want)
    parts = [torch.full((2,), 10.0 * me + j) for j in range(3)]
    swapped = ccl.all_to_all(parts, out=parts)
    assert swapped[0] is parts[0]
    assert [float(x[0]) for x in parts] == [me, 10.0 + me, 20.0 + me]


def test_in_place_and_in_groups(three: ThreadedSession) -> None:
    three.call_packed(in_groups).debug_get_from_all()


def large() -> None:
    """More than a megabyte: 0 has much for all, the others little."""
    me, n = rank(), current_worker().num_workers
    sizes = [200_000 if i == 0 else 3 for i in range(n)]
    srcs = [torch.full((sizes[me],), float(10 * me + j)) for j in range(n)]
    outs = [torch.zeros(size) for size in sizes]
    ccl.all_to_all(srcs, out=outs)
    assert all(bool((out == 10 * i + me).all()) for i, out in enumerate(outs))


def test_large(lab: ThreadedSession) -> None:
    lab.call_packed(large).debug_get_from_all()


def misfit(how: str) -> None:
    """Worker 2 has no room for what worker 0 sends, or sends something else altogether."""
    me, x = rank(), torch.ones(3)
    if how == "size":
        outs = [torch.ones(3 + (me == 2 and i == 0)) for i in range(3)]
        ccl.all_to_all([x, x, x], out=outs)
    elif how == "dtype":
        ccl.all_to_all([x.double() if me == 2 else x] * 3)
    elif me == 2:
        ccl.all_to_all(x)
    else:
        ccl.all_to_all(list(x.chunk(3)))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("size", "worker 0 has float32[3] for worker 2, which has room for float32[4]"),
        ("dtype", "members disagree on the dtype"),
        ("form", "members disagree on the shape"),
    ],
)
def test_what_does_not_fit(three: ThreadedSession, how: str, words: str) -> None:
    got = three.peek(three.call_packed(misfit, how))
    for failure in got.values():
        assert isinstance(failure, Failure)
        assert failure.type_name == "CollectiveError"
        assert words in failure.message
        assert "test_all_to_all.py" in failure.message
    with pytest.raises(WorkerError):
        three.sync_all()
    three.call_packed(in_groups).debug_get_from_all()


def refused() -> None:
    if rank():
        return
    x = torch.ones(3)
    for call, words in (
        (lambda: ccl.all_to_all([x, x]), "2 tensors for a group of 3"),
        (lambda: ccl.all_to_all(torch.ones(4)), "3 equal parts"),
        (lambda: ccl.all_to_all(torch.ones(())), "equal parts"),
        (lambda: ccl.all_to_all([x, x, x.double()]), "one dtype"),
        (lambda: ccl.all_to_all([x, x, torch.ones(2)]), "give out="),
        (lambda: ccl.all_to_all([x, x, x], out=[x, x]), "2 tensors for a group of 3"),
        (lambda: ccl.all_to_all([x, x, x], out=[x, x, x.long()]), "int64"),
        (lambda: ccl.all_to_all([x, x, x], out=[x, x, x[:1].expand(3)]), "share memory"),
        (lambda: ccl.all_to_all(x, out=torch.ones(4)), r"float32\[3\]"),
        (lambda: ccl.all_to_all(3), "list of tensors"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()


def test_arguments(three: ThreadedSession) -> None:
    three.call_packed(refused).debug_get_from_all()
