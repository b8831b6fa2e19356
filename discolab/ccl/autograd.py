"""Collectives that autograd can differentiate, for programs where every member runs backward.

    from discolab.ccl import autograd as dist_fn
    h = dist_fn.copy_to_region(x, group="tp")           # column-parallel layer
    y = dist_fn.reduce_from_region(h @ w, group="tp")   # row-parallel layer

Each worker has a graph of its own, and the backward of a collective is a collective again, on
the worker's own thread. No state; the nodes of the graph are in adjoints.py.

**Exact adjoints.** The gradient is that of the *sum of the members' losses*. So these fit losses
that differ: one of each member's own data.

==================  =============================  ===============================================
function            forward                        backward
==================  =============================  ===============================================
all_reduce          sum (avg) on all               all-reduce sum (avg)
all_gather          pieces along `dim`, on all     reduce-scatter along `dim`
reduce_scatter      sum (avg), a piece each        all-gather along `dim`
all_to_all          cut one dim, join another      all-to-all the other way
broadcast           from one to all                reduce to that one
reduce              sum (avg) on one               broadcast from that one
scatter             cut on one, a piece each       gather to that one
gather              pieces joined on one           scatter from that one
send, recv          from one to another            recv, send: the gradient comes back
==================  =============================  ===============================================

**Pairs for tensor and sequence parallelism.** These fit *one* loss that all members of the group
compute alike, as behind the layers of a sharded model. What is replicated has the same gradient
on all, so only one direction of a pair communicates, or both move pieces only.

=================================  ==============  ==============  ===============================
function                           forward         backward        where
=================================  ==============  ==============  ===============================
copy_to_region                     nothing         all-reduce      into column-parallel layers
reduce_from_region                 all-reduce      nothing         out of row-parallel layers
scatter_to_region                  own piece       all-gather      replicated to sharded
gather_from_region                 all-gather      own piece       sharded to replicated
gather_from_sequence_region        all-gather      reduce-scatter  as copy_to_region, from shards
reduce_scatter_to_sequence_region  reduce-scatter  all-gather      as reduce_from_region, to shards
=================================  ==============  ==============  ===============================

*The common mistake*: all-reduce in both directions. With n members and a loss that all compute
alike, `all_reduce` behind a row-parallel layer counts that loss n times: gradients are n times
too large. `reduce_from_region` is right there. The other way round, with a loss of its own on
each member, `reduce_from_region` forgets the other members' losses.

**All members must run backward.** One whose graph does not lead to the node skips its collective:
its loss does not depend on the result, its input needs no gradient, or `torch.autograd.grad` was
asked for other inputs. The others are then told that it did not come (`CollectiveError`), which
names it; nothing hangs. Where one member alone has the input (broadcast, reduce, scatter, gather,
send, recv) the result belongs to the graph on all of them, as long as gradients are enabled.
Collectives must also come in the same order on all: autograd takes the reverse of the forward's
order, so the same program on all members has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.errors import ArgumentError
from . import adjoints, checks
from .groups import Group, resolve

Tensor = torch.Tensor
GroupLike = Any

# -- exact adjoints ----------------------------------------------------------------------------


def all_reduce(x: Tensor, op: str = "sum", *, group: GroupLike = None) -> Tensor:
    """`ccl.all_reduce`, ``"sum"`` or ``"avg"``, for losses that differ; see this module."""
    name = "all_reduce"
    return adjoints.apply(adjoints.AllReduce, x, _linear(name, op), _members(name, group))


def all_gather(x: Tensor, dim: int = 0, *, group: GroupLike = None) -> Tensor:
    """The members' tensors one after the other along `dim`; a scalar counts as one element.

    Parameters
    ----------
    x
        Of one shape and dtype on all n members; n times the size along `dim` in the result.
    """
    name = "all_gather"
    members = _members(name, group)
    if isinstance(x, Tensor) and x.dim() == 0:
        x = x.reshape(1)
    return adjoints.apply(adjoints.AllGather, x, _dim(name, x, dim), members)


def reduce_scatter(x: Tensor, op: str = "sum", dim: int = 0, *, group: GroupLike = None) -> Tensor:
    """Sum (or average) the members' tensors; the i-th of n equal pieces along `dim` to the i-th."""
    name = "reduce_scatter"
    members = _members(name, group)
    dim = _divided(name, x, dim, members)
    return adjoints.apply(adjoints.ReduceScatter, x, _linear(name, op), dim, members)


def all_to_all(
    x: Tensor,
    split_dim: int = 0,
    concat_dim: int | None = None,
    *,
    input_split_sizes: Sequence[int] | None = None,
    output_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Cut along one dimension, a piece for each member; join what comes along another.

    Parameters
    ----------
    x
        Without sizes of one shape on all n members, and n divides its size along `split_dim`.
    split_dim, concat_dim
        ``(2, 1)`` takes ``[batch, sequence / n, heads, …]`` to ``[batch, sequence, heads / n, …]``.
        `concat_dim` None: the same as `split_dim`.
    input_split_sizes, output_split_sizes
        For pieces that differ, as in a mixture of experts: how much goes to each member and comes
        from each, along `split_dim` (`concat_dim` must be the same).

    Raises
    ------
    ArgumentError
        If the sizes do not fit.
    """
    name = "all_to_all"
    members = _members(name, group)
    cut = _dim(name, x, split_dim)
    join = cut if concat_dim is None else _dim(name, x, concat_dim)
    if input_split_sizes is None and output_split_sizes is None:
        cut = _divided(name, x, split_dim, members)
        give = [x.shape[cut] // len(members)] * len(members)
        take = give if join == cut else [x.shape[join]] * len(members)
    else:
        give = _sizes(name, "input_split_sizes", input_split_sizes, members)
        take = _sizes(name, "output_split_sizes", output_split_sizes, members)
        if sum(give) != x.shape[cut] or join != cut:
            raise ArgumentError(
                f"{name}: input_split_sizes {give} must sum to {x.shape[cut]}, the size of "
                f"dimension {cut}, and concat_dim be the same as split_dim"
            )
    return adjoints.apply(adjoints.AllToAll, x, (cut, give), (join, take), members)


def broadcast(x: Tensor, src: int = 0, *, group: GroupLike = None) -> Tensor:
    """The tensor of member `src` (an index into the group) on all.

    Elsewhere `x` gives shape and dtype, and its gradient is zero.
    """
    return adjoints.apply(
        adjoints.Broadcast, adjoints.token(), x, src, _members("broadcast", group)
    )


def reduce(x: Tensor, dst: int = 0, op: str = "sum", *, group: GroupLike = None) -> Tensor:
    """Sum or average on member `dst` (an index into the group); zeros elsewhere.

    All members must run backward through their result, the zeros too: ``(y * 0).sum()`` does.
    """
    name = "reduce"
    return adjoints.apply(
        adjoints.Reduce, adjoints.token(), x, dst, _linear(name, op), _members(name, group)
    )


def scatter(
    x: Tensor | None,
    src: int = 0,
    dim: int = 0,
    *,
    like: Tensor | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Cut the tensor of member `src` (an index into the group) along `dim`, a piece for each.

    Parameters
    ----------
    x
        On `src`: what to cut. Elsewhere it is ignored and may be None.
    like
        Elsewhere: a tensor of the piece's shape, dtype and device.
    """
    name = "scatter"
    members = _members(name, group)
    if checks.as_root(name, src, members, "src") == checks.calling_worker(name).worker_id:
        dim = _divided(name, x, dim, members)
        return adjoints.apply(adjoints.Scatter, adjoints.token(), x, None, src, dim, members)
    if like is None:
        raise ArgumentError(
            f"{name}: only member src knows the shape; give the others a tensor of the shape of "
            "their piece: like=torch.empty(shape)"
        )
    return adjoints.apply(
        adjoints.Scatter, adjoints.token(), x, like, src, _dim(name, like, dim, "like"), members
    )


def gather(x: Tensor, dst: int = 0, dim: int = 0, *, group: GroupLike = None) -> Tensor:
    """The members' tensors joined along `dim` on member `dst` (an index into the group).

    Elsewhere the result is empty, of size 0 along `dim`. All members must run backward through
    their result, the empty ones too: ``y.sum()`` is 0 and does.
    """
    name = "gather"
    members = _members(name, group)
    return adjoints.apply(adjoints.Gather, adjoints.token(), x, dst, _dim(name, x, dim), members)


def send(x: Tensor, dst: int, *, tag: int = 0) -> Tensor:
    """Send to the worker of rank `dst`, which must call `recv` of this module.

    Returns
    -------
    torch.Tensor
        A zero. Its ``backward()`` waits for the gradient of what was sent, and goes on into the
        graph of `x`; or add it to a loss. Where none is wanted, use `ccl.send` and `ccl.recv`.
    """
    return adjoints.apply(adjoints.Send, adjoints.token(), x, dst, tag)


def recv(like: Tensor, src: int, *, tag: int = 0) -> Tensor:
    """What the worker of rank `src` sends with `send` of this module.

    Backward sends it the gradient. Messages may be run backward in any order: each has a number,
    by which its gradient is found.

    Parameters
    ----------
    like
        A tensor of the shape, dtype and device of what comes; its values are not used.
    """
    return adjoints.apply(adjoints.Recv, adjoints.token(), like, src, tag)


# -- pairs for tensor and sequence parallelism ---------------------------------------------------


def copy_to_region(x: Tensor, *, group: GroupLike = None) -> Tensor:
    """Nothing; backward an all-reduce. Megatron's ``copy_to_tensor_model_parallel_region``.

    `x` is the same on all members, and each uses it with its own shard of the weights.
    """
    return adjoints.apply(adjoints.Copy, x, _members("copy_to_region", group))


def reduce_from_region(x: Tensor, *, group: GroupLike = None) -> Tensor:
    """All-reduce; backward nothing. Megatron's ``reduce_from_tensor_model_parallel_region``.

    `x` is a term of the sum on each member; the sum is then used alike by all.
    """
    return adjoints.apply(adjoints.Sum, x, _members("reduce_from_region", group))


def scatter_to_region(x: Tensor, dim: int = -1, *, group: GroupLike = None) -> Tensor:
    """My piece of n equal ones along `dim`; backward an all-gather.

    Megatron's ``scatter_to_tensor_model_parallel_region``, and with ``dim=0`` its
    ``scatter_to_sequence_parallel_region``. `x` is the same on all members.
    """
    name = "scatter_to_region"
    members = _members(name, group)
    return adjoints.apply(adjoints.Cut, x, _divided(name, x, dim, members), members)


def gather_from_region(x: Tensor, dim: int = -1, *, group: GroupLike = None) -> Tensor:
    """All-gather along `dim`; backward my piece of the gradient.

    Megatron's ``gather_from_tensor_model_parallel_region``. What is gathered is then used alike
    by all members; if each uses it for a part of the sum, take `gather_from_sequence_region`.
    """
    name = "gather_from_region"
    return adjoints.apply(adjoints.Join, x, _dim(name, x, dim), _members(name, group))


def gather_from_sequence_region(x: Tensor, dim: int = 0, *, group: GroupLike = None) -> Tensor:
    """All-gather along `dim`; backward a reduce-scatter.

    Megatron's ``gather_from_sequence_parallel_region``, in front of column-parallel layers: `dim`
    is that of the sequence. The same as `all_gather`.
    """
    return all_gather(x, dim, group=group)


def reduce_scatter_to_sequence_region(
    x: Tensor, dim: int = 0, *, group: GroupLike = None
) -> Tensor:
    """Reduce-scatter along `dim`; backward an all-gather.

    Megatron's ``reduce_scatter_to_sequence_parallel_region``, behind row-parallel layers: `dim`
    is that of the sequence. The same as `reduce_scatter`.
    """
    return reduce_scatter(x, "sum", dim, group=group)


# -- inside --------------------------------------------------------------------------------------


def _members(name: str, group: GroupLike) -> Group:
    return resolve(checks.calling_worker(name), group, name)


def _linear(name: str, op: str) -> str:
    if op not in ("sum", "avg"):
        raise ArgumentError(
            f"{name}: op={op!r} has no gradient here; use 'sum' or 'avg', or ccl.{name} without one"
        )
    return op


def _dim(name: str, x: Any, dim: Any, what: str = "tensor") -> int:
    """`dim` counted from the front."""
    checks.as_source(name, x, what)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ArgumentError(f"{name}: dim={dim!r}; the {what} has {x.dim()} dimensions")
    return dim % int(x.dim())


def _divided(name: str, x: Any, dim: Any, members: Group) -> int:
    """`dim` counted from the front; the members must divide its size."""
    index = _dim(name, x, dim)
    if x.shape[index] % len(members):
        raise ArgumentError(
            f"{name}: dimension {index} of {list(x.shape)} can't be split into {len(members)} "
            f"equal parts, one for each member of the group of {members}"
        )
    return index


def _sizes(name: str, what: str, sizes: Sequence[int] | None, members: Group) -> list[int]:
    found = [int(size) for size in sizes or ()]
    if len(found) != len(members) or min(found) < 0:
        raise ArgumentError(
            f"{name}: {what} needs a size for each of the {len(members)} members of the group of "
            f"{members}, got {sizes!r}"
        )
    return found
