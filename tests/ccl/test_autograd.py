"""Differentiable collectives: gradients equal those of one process that has all the data.

Every worker makes the inputs of all members and differentiates the sum of all losses by plain
torch; its own gradient through the collectives must be the same.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from discolab import ArgumentError, CollectiveError, WorkerError, ccl
from discolab.ccl import autograd as dist_fn
from discolab.runtime import current_worker

Tensor = torch.Tensor
LAYOUTS = [(1, 1), (2, 1), (4, 1), (4, 2)]


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def place() -> tuple[int, int]:
    """This worker's index in its group, and the group's size."""
    members = ccl.group()
    return members.index(current_worker().rank), len(members)


def leaf(rank: int, shape: tuple[int, ...]) -> Tensor:
    """A leaf whose memory is not contiguous."""
    return randn(rank, *reversed(shape)).permute(*reversed(range(len(shape)))).requires_grad_()


# Each op as it is called on worker `me` of `n`, and what all workers together get by plain torch.
Op = tuple[Callable[[Tensor, int], Tensor], Callable[[list[Tensor]], list[Tensor]]]


def _exchanged(xs: list[Tensor], cut: int, join: int) -> list[Tensor]:
    n = len(xs)
    return [torch.cat([x.chunk(n, cut)[me] for x in xs], join) for me in range(n)]


def _zeros_but(root: int, y: Tensor, n: int) -> list[Tensor]:
    return [y if me == root else torch.zeros_like(y) for me in range(n)]


def ops_along(dim: int) -> dict[str, Op]:
    """The ops with a dimension, of tensors whose sizes 4 divides."""
    other = 1 if dim == 0 else 0
    return {
        "all_gather": (
            lambda x, n: dist_fn.all_gather(x, dim),
            lambda xs: [torch.cat(xs, dim)] * len(xs),
        ),
        "gather_from_sequence_region": (
            lambda x, n: dist_fn.gather_from_sequence_region(x, dim),
            lambda xs: [torch.cat(xs, dim)] * len(xs),
        ),
        "reduce_scatter": (
            lambda x, n: dist_fn.reduce_scatter(x, dim=dim),
            lambda xs: list(sum(xs).chunk(len(xs), dim)),  # type: ignore[union-attr]
        ),
        "reduce_scatter_to_sequence_region": (
            lambda x, n: dist_fn.reduce_scatter_to_sequence_region(x, dim),
            lambda xs: list(sum(xs).chunk(len(xs), dim)),  # type: ignore[union-attr]
        ),
        "reduce_scatter avg": (
            lambda x, n: dist_fn.reduce_scatter(x, "avg", dim),
            lambda xs: list((sum(xs) / len(xs)).chunk(len(xs), dim)),
        ),
        "all_to_all": (
            lambda x, n: dist_fn.all_to_all(x, dim),
            lambda xs: _exchanged(xs, dim, dim),
        ),
        "all_to_all to another dimension": (
            lambda x, n: dist_fn.all_to_all(x, dim, other),
            lambda xs: _exchanged(xs, dim, other),
        ),
        "scatter": (
            lambda x, n: dist_fn.scatter(x, n - 1, dim, like=x.chunk(n, dim)[0]),
            lambda xs: list(xs[-1].chunk(len(xs), dim)),
        ),
        "gather": (
            lambda x, n: dist_fn.gather(x, n - 1, dim),
            lambda xs: [x.narrow(dim, 0, 0) for x in xs[:-1]] + [torch.cat(xs, dim)],
        ),
    }


OPS: dict[str, Op] = {
    "all_reduce": (lambda x, n: dist_fn.all_reduce(x), lambda xs: [sum(xs)] * len(xs)),
    "all_reduce avg": (
        lambda x, n: dist_fn.all_reduce(x, "avg"),
        lambda xs: [sum(xs) / len(xs)] * len(xs),
    ),
    "broadcast": (
        lambda x, n: dist_fn.broadcast(x, n - 1),
        lambda xs: [xs[-1]] * len(xs),
    ),
    "reduce": (
        lambda x, n: dist_fn.reduce(x, n - 1),
        lambda xs: _zeros_but(len(xs) - 1, sum(xs), len(xs)),
    ),
    "reduce avg": (
        lambda x, n: dist_fn.reduce(x, 0, "avg"),
        lambda xs: _zeros_but(0, sum(xs) / len(xs), len(xs)),
    ),
}


def check_op(op: Op, name: str) -> None:
    """Value, gradient, and gradient of the gradient."""
    spmd, plain = op
    me, n = place()
    mine, leaves = leaf(me, (4, 8, 4)), [leaf(rank, (4, 8, 4)) for rank in range(n)]
    y, ys = spmd(mine, n), plain(leaves)
    assert y.shape == ys[me].shape, name
    assert y.is_contiguous(), name
    weights = [randn(100 + rank, *one.shape) for rank, one in enumerate(ys)]
    # not linear, so that the second derivative is not zero
    losses = [(w * one**3).sum() for w, one in zip(weights, ys, strict=True)]
    (grad,) = torch.autograd.grad((weights[me] * y**3).sum(), mine, create_graph=True)
    grads = torch.autograd.grad(
        sum(losses), leaves, create_graph=True, allow_unused=True, materialize_grads=True
    )
    torch.testing.assert_close(y, ys[me], msg=lambda m: f"{name}: value: {m}")
    torch.testing.assert_close(grad, grads[me], msg=lambda m: f"{name}: gradient: {m}")
    grad.square().sum().backward()
    total = sum(one.square().sum() for one in grads)
    twice = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(mine.grad, twice[me], msg=lambda m: f"{name}: second: {m}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [None, 0, 1, -1])
def test_gradients_are_those_of_the_sum_of_all_losses(
    start: Any, layout: tuple[int, int], dim: int | None
) -> None:
    def check() -> int:
        ops = OPS if dim is None else ops_along(dim)
        for name, op in ops.items():
            check_op(op, name)
        return len(ops)

    with start(*layout) as sess:
        assert set(sess.call_packed(check).debug_get_from_all()) == {5 if dim is None else 9}


def test_pieces_of_different_sizes(start: Any) -> None:
    """All-to-all as between experts: worker i sends 1 + i + 2 j rows to worker j."""

    def check() -> None:
        me, n = place()
        sizes = [[1 + i + 2 * j for j in range(n)] for i in range(n)]
        leaves = [leaf(i, (sum(sizes[i]), 3)) for i in range(n)]
        mine = leaf(me, (sum(sizes[me]), 3))
        take = [sizes[i][me] for i in range(n)]
        y = dist_fn.all_to_all(mine, input_split_sizes=sizes[me], output_split_sizes=take)
        cut = [x.split(sizes[i]) for i, x in enumerate(leaves)]
        ys = [torch.cat([cut[i][j] for i in range(n)]) for j in range(n)]
        torch.testing.assert_close(y, ys[me])
        (y**2 * (1 + me)).sum().backward()
        sum((one**2 * (1 + j)).sum() for j, one in enumerate(ys)).backward()  # type: ignore[union-attr]
        torch.testing.assert_close(mine.grad, leaves[me].grad)

    with start(4, 2) as sess:
        sess.call_packed(check).debug_get_from_all()


def test_scalars_complex_numbers_and_integers(start: Any) -> None:
    def check() -> None:
        me, n = place()
        x = torch.tensor(2.0 + me, requires_grad=True)
        (dist_fn.all_gather(x) * (1 + me)).sum().backward()
        assert x.grad == sum(range(1, n + 1))
        z = torch.complex(randn(me, 3), randn(9, 3)).requires_grad_()
        (dist_fn.all_reduce(z) * (1 + me) * 1j).abs().sum().backward()
        whole = sum(torch.complex(randn(r, 3), randn(9, 3)) for r in range(n))
        torch.testing.assert_close(z.grad, whole / whole.abs() * sum(range(1, n + 1)))
        counts = torch.arange(4) * me
        for y in (dist_fn.all_reduce(counts), dist_fn.broadcast(counts), dist_fn.reduce(counts)):
            assert not y.requires_grad
        with torch.no_grad():
            assert not dist_fn.broadcast(x).requires_grad

    with start(2) as sess:
        sess.call_packed(check).debug_get_from_all()


# -- models cut in shards ------------------------------------------------------------------------


def check_tensor_parallel(sequence_parallel: bool) -> None:
    """An MLP behind a layer norm, its weights in shards, against the same in one piece."""
    me, n = place()
    dim = 1  # [batch, sequence, features]
    x, up, down = randn(1, 2, 8, 4), randn(2, 4, 16), randn(3, 16, 4)
    whole = [one.clone().requires_grad_() for one in (x, up, down)]
    want = whole[0] + F.gelu(F.layer_norm(whole[0], (4,)) @ whole[1]) @ whole[2]
    want.square().sum().backward()

    shard_up = up.chunk(n, 1)[me].clone().requires_grad_()
    shard_down = down.chunk(n, 0)[me].clone().requires_grad_()
    mine = x.clone().requires_grad_()
    if sequence_parallel:
        rows = dist_fn.scatter_to_region(mine, dim)
        h = dist_fn.gather_from_sequence_region(F.layer_norm(rows, (4,)), dim)
        part = F.gelu(h @ shard_up) @ shard_down
        got = rows + dist_fn.reduce_scatter_to_sequence_region(part, dim)
        got = dist_fn.gather_from_region(got, dim)
    else:
        h = dist_fn.copy_to_region(F.layer_norm(mine, (4,)))
        got = mine + dist_fn.reduce_from_region(F.gelu(h @ shard_up) @ shard_down)
    got.square().sum().backward()
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    x_grad, up_grad, down_grad = (one.grad for one in whole)
    assert up_grad is not None
    assert down_grad is not None
    torch.testing.assert_close(mine.grad, x_grad)
    torch.testing.assert_close(shard_up.grad, up_grad.chunk(n, 1)[me])
    torch.testing.assert_close(shard_down.grad, down_grad.chunk(n, 0)[me])


def check_gathered_columns() -> None:
    """A column-parallel layer whose output is gathered, then one that cuts it again."""
    me, n = place()
    x, w = randn(1, 3, 4), randn(2, 4, 8)
    whole = w.clone().requires_grad_()
    (x @ whole).tanh().square().sum().backward()
    shard = w.chunk(n, 1)[me].clone().requires_grad_()
    y = dist_fn.gather_from_region(x @ shard).tanh()
    dist_fn.gather_from_region(dist_fn.scatter_to_region(y)).square().sum().backward()
    assert whole.grad is not None
    torch.testing.assert_close(shard.grad, whole.grad.chunk(n, 1)[me])


def check_ulysses() -> None:
    """Attention with the sequence cut outside, and the heads inside."""
    me, n = place()
    qkv = randn(1, 2, 8, 4, 3 * 5)  # batch, sequence, heads, 3 x size of a head

    def attend(x: Tensor) -> Tensor:
        q, k, v = x.transpose(1, 2).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    whole = qkv.clone().requires_grad_()
    attend(whole).square().sum().backward()
    mine = qkv.chunk(n, 1)[me].clone().requires_grad_()
    heads = dist_fn.all_to_all(mine, 2, 1)
    # each loss is of its own part of the sequence: their sum is the whole loss
    dist_fn.all_to_all(attend(heads), 1, 2).square().sum().backward()
    assert whole.grad is not None
    torch.testing.assert_close(mine.grad, whole.grad.chunk(n, 1)[me])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_a_model_have_the_gradients_of_the_whole(
    start: Any, layout: tuple[int, int]
) -> None:
    def check() -> None:
        check_tensor_parallel(False)
        check_tensor_parallel(True)
        check_gathered_columns()
        check_ulysses()

    with start(*layout) as sess:
        sess.call_packed(check).debug_get_from_all()


def test_all_reduce_in_both_directions_counts_a_shared_loss_n_times(start: Any) -> None:
    """The mistake that the module warns of is what it says."""

    def gradients() -> tuple[float, float]:
        found = []
        for reduce in (dist_fn.reduce_from_region, dist_fn.all_reduce):
            w = torch.ones(1, requires_grad=True)
            reduce(w * 3).sum().backward()
            assert w.grad is not None
            found.append(w.grad.item())
        return found[0], found[1]

    with start(4) as sess:
        assert sess.call_packed(gradients).debug_get_from_all() == [(3.0, 12.0)] * 4


@pytest.mark.any_engine
def test_data_and_tensor_parallel_over_a_mesh(start: Any) -> None:
    def check() -> None:
        rank = current_worker().rank
        row, column = divmod(rank, 2)
        rows, columns = [rank - column, rank - column + 1], [column, column + 2]
        data, w = randn(1, 4, 6), randn(2, 6, 6)
        whole = w.clone().requires_grad_()
        (data @ whole).square().mean().backward()
        shard = w.chunk(2, 1)[column].clone().requires_grad_()
        y = dist_fn.gather_from_region(data.chunk(2)[row] @ shard, group=rows)
        dist_fn.all_reduce(y.square().mean(), "avg", group=columns).backward()
        # each of two members runs the same mean backward, so that gradients come out twice: avg
        assert whole.grad is not None
        assert shard.grad is not None
        total = dist_fn.all_reduce(shard.grad, "avg", group=columns)
        torch.testing.assert_close(total, whole.grad.chunk(2, 1)[column])

    with start(4) as sess:
        sess.call_packed(check).debug_get_from_all()


# -- from worker to worker -----------------------------------------------------------------------


@pytest.mark.any_engine
@pytest.mark.parametrize("backwards", [False, True])
def test_a_pipeline_of_two_stages(start: Any, backwards: bool) -> None:
    """Gradients find their message in whatever order the stages run backward."""

    def check() -> None:
        rank = current_worker().rank
        batches = [randn(10 + i, 2, 3) for i in range(3)]
        first, second = randn(1, 3, 5), randn(2, 5, 4)
        whole = first.clone().requires_grad_(), second.clone().requires_grad_()
        for i, batch in enumerate(batches):
            ((batch @ whole[0]).tanh() @ whole[1] * (1 + i)).square().sum().backward()
        mine = (first, second)[rank].clone().requires_grad_()
        if rank == 0:
            ends = [dist_fn.send((batch @ mine).tanh(), 1) for batch in batches]
        else:
            like = torch.empty(2, 5, dtype=torch.float64)
            ends = [
                (dist_fn.recv(like, 0) @ mine * (1 + i)).square().sum() for i in range(len(batches))
            ]
        if rank == 0 and backwards:
            ends.reverse()
        for end in ends:
            end.backward()
        torch.testing.assert_close(mine.grad, whole[rank].grad)

    with start(2) as sess:
        sess.call_packed(check).debug_get_from_all()


# -- what can go wrong ---------------------------------------------------------------------------


@pytest.mark.any_engine
def test_a_member_that_skips_backward_is_named(start: Any) -> None:
    def skip() -> None:
        x = torch.ones(2, requires_grad=current_worker().rank != 2)
        y = dist_fn.all_reduce(x)
        if y.requires_grad:
            y.sum().backward()

    def after() -> float:
        x = torch.ones(2, requires_grad=True)
        dist_fn.all_reduce(x).sum().backward()
        assert x.grad is not None
        return float(x.grad[0])

    with start(4) as sess:
        with pytest.raises(WorkerError, match="worker 2") as caught:
            sess.call_packed(skip).debug_get_from_all()
        assert caught.value.ranks == [0, 1, 3]
        assert isinstance(caught.value.__cause__, CollectiveError)
        assert sess.call_packed(after).debug_get_from_all() == [4.0] * 4


def test_an_input_that_one_member_has_needs_no_gradient_elsewhere(start: Any) -> None:
    """Also where `x` needs none at all, all members run the same backward."""

    def check(source_needs_it: bool) -> Tensor | None:
        rank = current_worker().rank
        x = torch.ones(4, requires_grad=source_needs_it and rank == 1)
        whole = x if rank == 1 else None
        (dist_fn.broadcast(x, 1) * (1 + rank)).sum().backward()
        piece = dist_fn.scatter(whole, 1, like=torch.empty(2))
        (piece * (1 + rank)).sum().backward()
        return x.grad

    with start(2) as sess:
        none, grad = sess.call_packed(check, True).debug_get_from_all()
        assert none is None
        assert torch.equal(grad, torch.tensor([4.0, 4.0, 5.0, 5.0]))
        assert sess.call_packed(check, False).debug_get_from_all() == [None, None]


def test_wrong_arguments_are_refused_before_anybody_waits(start: Any) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "'sum' or 'avg'": lambda: dist_fn.all_reduce(torch.ones(2), "max"),
        "has 1 dimensions": lambda: dist_fn.all_gather(torch.ones(2), 1),
        "can't be split into 2 equal parts": lambda: dist_fn.scatter_to_region(torch.ones(3)),
        "reduce_scatter: dimension 0": lambda: dist_fn.reduce_scatter(torch.ones(3, 2)),
        "must sum to 3": lambda: dist_fn.all_to_all(
            torch.ones(3), input_split_sizes=[1, 1], output_split_sizes=[1, 1]
        ),
        "each of the 2 members": lambda: dist_fn.all_to_all(torch.ones(3), input_split_sizes=[3]),
        "like=torch.empty": lambda: dist_fn.scatter(None, 1 - current_worker().rank),
        "must be a tensor, got None": lambda: dist_fn.gather(None),  # type: ignore[arg-type]
    }

    def check() -> None:
        for words, call in calls.items():
            with pytest.raises(ArgumentError, match=words):
                call()

    with start(2) as sess:
        sess.call_packed(check).debug_get_from_all()


@pytest.mark.any_engine
def test_backward_stays_on_the_workers_own_thread(start: Any) -> None:
    """On GPUs autograd would take threads of its own; their collectives would be refused."""
    with start(2) as sess:
        enabled = torch._C._is_multithreading_enabled
        assert sess.call_packed(lambda: enabled()).debug_get_from_all() == [False, False]
        assert enabled()
