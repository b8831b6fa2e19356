"""Each collective against a plain computation, over dtypes, groups, strides and world sizes.

The workers check themselves: every worker can make the inputs of all the others.
"""

import functools
import itertools
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from discolab import ccl
from discolab.runtime import current_worker
from tests.selection import slow

LAYOUTS = [slow(1, 1), (2, 1), slow(2, 2), (3, 1), slow(4, 1), (4, 2), slow(8, 2)]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
MOVED = [*FLOATS, *SIGNED, *UNSIGNED, *COMPLEX, *FLOAT8, torch.bool]
SHAPES: list[tuple[int, ...]] = [(), (0,), (5,), (3, 4), (2, 0, 3), (2, 1, 3)]
# without shrinking: it would take minutes where a failing call waits for its peers
PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
OPS = ["sum", "prod", "min", "max", "avg"]


def make(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The input of one worker: small numbers, and the largest of the unsigned ones."""
    generator = torch.Generator().manual_seed(1000 * rank + len(shape))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    low = 0 if dtype in UNSIGNED else -4
    numbers = torch.randint(low, 5, shape, generator=generator)
    if dtype is torch.uint64:
        return (numbers - 2).view(dtype)
    if dtype.is_complex:
        return torch.complex(
            numbers.double(), numbers.flip(-1).double() if shape else -numbers.double()
        ).to(dtype)
    return numbers.double().to(dtype) if dtype.is_floating_point else numbers.to(dtype)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory that is not contiguous."""
    if tensor.dim() == 0:
        return tensor
    wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
    view = wide[..., ::2]
    view.copy_(tensor)
    return view


def reference(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """What the documentation promises, by other means: Python numbers, or float64."""
    dtype = inputs[0].dtype
    if dtype is torch.bool:
        stack = torch.stack(inputs)
        return stack.any(0) if op in ("sum", "max") else stack.all(0)
    if not (dtype.is_floating_point or dtype.is_complex):
        return _reference_of_integers(inputs, op)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stack = torch.stack([tensor.to(wide) for tensor in inputs])
    if op in ("min", "max"):
        return (stack.amin(0) if op == "min" else stack.amax(0)).to(dtype)
    total = stack.prod(0) if op == "prod" else stack.sum(0)
    return (total / len(inputs) if op == "avg" else total).to(dtype)


def _reference_of_integers(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    dtype = inputs[0].dtype
    bits = 8 * dtype.itemsize
    results = []
    for values in zip(*(tensor.flatten().tolist() for tensor in inputs), strict=True):
        fold = {"sum": sum, "avg": sum, "min": min, "max": max}.get(op)
        total = fold(values) if fold else functools.reduce(lambda a, b: a * b, values)
        if op == "avg":
            total = _wrap(total, 64, dtype is torch.uint64)
            total = abs(total) // len(inputs) * (1 if total >= 0 else -1)
        results.append(_wrap(total, bits, dtype in UNSIGNED))
    return torch.tensor(results, dtype=dtype).reshape(inputs[0].shape)


def _wrap(number: int, bits: int, unsigned: bool) -> int:
    number %= 1 << bits
    return number if unsigned or number < 1 << (bits - 1) else number - (1 << bits)


def same(got: torch.Tensor, want: torch.Tensor, note: Any) -> None:
    """Equal in dtype, shape and value; float32 and wider may differ in the last bits."""
    assert got.dtype == want.dtype, note
    assert got.shape == want.shape, note
    if got.dtype in FLOAT8:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    if got.dtype in UNSIGNED:
        got, want = got.to(torch.int64), want.to(torch.int64)
    assert torch.allclose(got, want), (note, got, want)


def defined(op: str, dtype: torch.dtype) -> bool:
    return not (
        (dtype.is_complex and op in ("min", "max")) or (dtype is torch.bool and op == "avg")
    )


def peers_of(group: Any) -> tuple[list[int], int]:
    """The ranks of a group and this worker's place in it."""
    ranks = list((ccl.world() if group == "world" else ccl.group()).ranks)
    return ranks, ranks.index(current_worker().rank)


def check_reductions(dtypes: list[torch.dtype], group: Any) -> int:
    ranks, me = peers_of(group)
    count = 0
    for dtype, op, shape, sparse in itertools.product(dtypes, OPS, SHAPES, (False, True)):
        if not defined(op, dtype):
            continue
        note = (dtype, op, shape, sparse)
        inputs = [make(rank, shape, dtype) for rank in ranks]
        want = reference(inputs, op)
        mine = strided(inputs[me]) if sparse else inputs[me]
        before = mine.clone()
        same(ccl.all_reduce(mine, op, group=group), want, note)
        same(mine, before, note)
        out = strided(torch.zeros(shape, dtype=dtype)) if sparse else torch.zeros_like(mine)
        assert ccl.all_reduce(mine, op, group=group, out=out) is out
        same(out, want, note)
        assert ccl.all_reduce_(mine, op, group=group) is mine
        same(mine, want, note)
        root = ccl.reduce(before, len(ranks) - 1, op, group=group)
        assert (root is None) == (me != len(ranks) - 1), note
        if root is not None:
            same(root, want, note)
        count += 1
    return count


def check_reduce_scatter(dtypes: list[torch.dtype], group: Any) -> None:
    ranks, me = peers_of(group)
    n = len(ranks)
    for dtype, op, rest in itertools.product(dtypes, OPS, ((), (3,), (0,))):
        if not defined(op, dtype):
            continue
        inputs = [make(rank, (2 * n, *rest), dtype) for rank in ranks]
        want = reference(inputs, op)[2 * me : 2 * me + 2]
        same(ccl.reduce_scatter(inputs[me], op, group=group), want, (dtype, op))
        out = strided(torch.zeros((2, *rest), dtype=dtype))
        ccl.reduce_scatter(strided(inputs[me]), op, group=group, out=out)
        same(out, want, (dtype, op))
        place = inputs[me][2 * me : 2 * me + 2]
        ccl.reduce_scatter(inputs[me], op, group=group, out=place)
        same(place, want, (dtype, op, "in place"))


def check_moves(dtypes: list[torch.dtype], group: Any) -> None:
    ranks, me = peers_of(group)
    n = len(ranks)
    root = n - 1
    for dtype, shape, sparse in itertools.product(dtypes, SHAPES, (False, True)):
        note = (dtype, shape, sparse)
        inputs = [make(rank, shape, dtype) for rank in ranks]
        mine = strided(inputs[me]) if sparse else inputs[me]
        whole = torch.cat([i.reshape(1) if not shape else i for i in inputs])

        def target(like: torch.Tensor, sparse: bool = sparse) -> torch.Tensor:
            return strided(torch.zeros_like(like)) if sparse else torch.zeros_like(like)

        same(ccl.all_gather(mine, group=group), whole, note)
        out = target(whole)
        assert ccl.all_gather(mine, group=group, out=out) is out
        same(out, whole, note)
        for got, want in zip(ccl.all_gather_list(mine, group=group), inputs, strict=True):
            same(got, want, note)
        at_root = ccl.gather(mine, root, group=group, out=target(whole) if me == root else None)
        assert (at_root is None) == (me != root), note
        if at_root is not None:
            same(at_root, whole, note)
        same(ccl.broadcast(mine, root, group=group), inputs[root], note)
        out = target(inputs[0])
        ccl.broadcast(mine if me == root else None, root, group=group, out=out)
        same(out, inputs[root], note)
        ccl.broadcast_(mine, 0, group=group)
        same(mine, inputs[0], note)
        check_scatter(dtype, shape, group, target(inputs[0]))


def check_scatter(dtype: torch.dtype, rest: tuple[int, ...], group: Any, out: torch.Tensor) -> None:
    ranks, me = peers_of(group)
    source = make(7, (len(ranks), *rest), dtype)
    row = out.reshape(1, *rest) if out.dim() == 0 else out.unsqueeze(0)
    result = ccl.scatter(source if me == 0 else None, group=group, out=row)
    assert result is row
    same(row, source[me : me + 1], (dtype, rest))


@pytest.mark.parametrize(("workers", "groups"), LAYOUTS)
def test_reductions(start: Any, workers: int, groups: int) -> None:
    dtypes = [*FLOATS, *SIGNED, *UNSIGNED, *COMPLEX, torch.bool]
    if workers not in (3, 4):
        dtypes = [torch.float32, torch.bfloat16, torch.uint64, torch.int32]
    with start(workers, groups) as sess:
        counts = sess.call_packed(check_reductions, dtypes, None).debug_get_from_all()
        assert min(counts) > 100
        sess.call_packed(check_reductions, dtypes[:2], "world").debug_get_from_all()
        sess.call_packed(check_reduce_scatter, dtypes, None).debug_get_from_all()


@pytest.mark.parametrize(("workers", "groups"), LAYOUTS)
def test_moves(start: Any, workers: int, groups: int) -> None:
    dtypes = MOVED if workers in (3, 4) else [torch.float32, torch.bool, torch.float8_e5m2]
    with start(workers, groups) as sess:
        sess.call_packed(check_moves, dtypes, None).debug_get_from_all()
        sess.call_packed(check_moves, dtypes[:2], "world").debug_get_from_all()


def check_shape(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [make(rank, shape, dtype).permute(order) for rank in range(3)]
    mine = inputs[current_worker().rank]
    same(ccl.all_reduce(mine), reference(inputs, "sum"), shape)
    same(ccl.all_gather(mine), torch.cat(inputs), shape)
    out = torch.zeros(shape, dtype=dtype).permute(order)
    same(ccl.broadcast(mine, 1, out=out), inputs[1], shape)


def test_any_shape_and_order_of_dimensions(start: Any) -> None:
    with start(3) as sess:

        @hypothesis.settings(max_examples=60, deadline=None, phases=PHASES)
        @hypothesis.given(
            shape=st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
            dtype=st.sampled_from([torch.float32, torch.int64, torch.bfloat16]),
            data=st.data(),
        )
        def check(shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject) -> None:
            order = tuple(data.draw(st.permutations(range(len(shape)))))
            sess.call_packed(check_shape, shape, order, dtype).debug_get_from_all()

        check()
