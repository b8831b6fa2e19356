"""The nodes of the graph behind `autograd`: collectives with their adjoints. No state.

The public functions, which check their arguments, are in autograd.py. A backward applies other
nodes, so that it can be differentiated itself (send and recv can't be). Dimensions here are
counted from the front, roots are indices into the group, and `members` is a `Group`.

Rooted nodes take a `token` first, a tensor that needs a gradient: so they are in the graph of all
members, also of those that have nothing to differentiate.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..isolation import shared_leaves
from . import checks, ops, p2p
from .choose import backend_name
from .groups import Group

Tensor = torch.Tensor

# Tags apart from those of a program; the counts of messages are added to the latter.
_NUMBERS, _GRADIENTS = 1 << 29, 1 << 30


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """A node's result."""
    return _tensor(shared_leaves.apply(function, *args))


def token() -> Tensor:
    """An input that needs a gradient: the node is there even if no other input does."""
    return torch.empty(0, requires_grad=True)


class AllReduce(torch.autograd.Function):
    """The same backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, members: Group) -> Tensor:
        ctx.how = op, members
        return _tensor(ops.all_reduce(x, op, group=members))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        op, members = ctx.how
        return apply(AllReduce, grad, op, members), None, None


class AllGather(torch.autograd.Function):
    """Backward a sum of which each keeps its piece."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, members: Group) -> Tensor:
        ctx.how = dim, members
        return _gathered(x, dim, members)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dim, members = ctx.how
        return apply(ReduceScatter, grad, "sum", dim, members), None, None


class ReduceScatter(torch.autograd.Function):
    """Backward the pieces joined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, dim: int, members: Group) -> Tensor:
        ctx.how = op, dim, members
        out = _resized(x, dim, x.shape[dim] // len(members))
        ops.reduce_scatter(x.movedim(dim, 0), op, group=members, out=out.movedim(dim, 0))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        op, dim, members = ctx.how
        whole = apply(AllGather, _share(grad, op, members), dim, members)
        return whole, None, None, None


class AllToAll(torch.autograd.Function):
    """Backward the same the other way; `cut` and `join` are a dimension and its sizes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cut: tuple[int, list[int]],
        join: tuple[int, list[int]],
        members: Group,
    ) -> Tensor:
        ctx.how = cut, join, members
        (cut_dim, give), (join_dim, take) = cut, join
        piece = x if cut_dim == join_dim else x.narrow(cut_dim, 0, give[0])
        out = _resized(piece, join_dim, sum(take))
        pieces = list(out.split(take, join_dim))
        ops.all_to_all(list(x.split(give, cut_dim)), group=members, out=pieces)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cut, join, members = ctx.how
        return apply(AllToAll, grad, join, cut, members), None, None, None


class Broadcast(torch.autograd.Function):
    """Backward a sum on the one that had it."""

    @staticmethod
    def forward(ctx: Any, _token: Tensor, x: Tensor, src: int, members: Group) -> Tensor:
        ctx.how = src, members
        return _tensor(ops.broadcast(x, src, group=members))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        src, members = ctx.how
        return None, apply(Reduce, token(), grad, src, "sum", members), None, None


class Reduce(torch.autograd.Function):
    """Backward a copy from the one that got it; zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, _token: Tensor, x: Tensor, dst: int, op: str, members: Group) -> Tensor:
        ctx.how = dst, op, members
        found = ops.reduce(x, dst, op, group=members)
        return x.new_zeros(x.shape) if found is None else _tensor(found)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dst, op, members = ctx.how
        shared = _share(grad, op, members)
        return None, apply(Broadcast, token(), shared, dst, members), None, None, None


class Scatter(torch.autograd.Function):
    """Backward the pieces joined on the one that cut: `like` is None there, a piece elsewhere."""

    @staticmethod
    def forward(
        ctx: Any,
        _token: Tensor,
        x: Tensor | None,
        like: Tensor | None,
        src: int,
        dim: int,
        members: Group,
    ) -> Tensor:
        ctx.how = src, dim, members
        ctx.shape = None if x is None else x.shape
        if like is None:
            assert x is not None
            whole, out = x.movedim(dim, 0), _resized(x, dim, x.shape[dim] // len(members))
        else:
            whole, out = None, like.new_empty(like.shape)
        ops.scatter(whole, src, group=members, out=out.movedim(dim, 0))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        src, dim, members = ctx.how
        whole = apply(Gather, token(), grad, src, dim, members)
        if ctx.shape is not None and not _is_root(src, members):
            whole = whole.sum().expand(ctx.shape)  # of nothing: zeros, and still in the graph
        return None, whole if ctx.needs_input_grad[1] else None, None, None, None, None


class Gather(torch.autograd.Function):
    """Backward cut again; empty along `dim` where nothing is gathered."""

    @staticmethod
    def forward(ctx: Any, _token: Tensor, x: Tensor, dst: int, dim: int, members: Group) -> Tensor:
        ctx.how = dst, dim, members
        ctx.like = x.new_empty(()).expand(x.shape)  # its shape, without its memory
        here = _is_root(dst, members)
        out = _resized(x, dim, x.shape[dim] * len(members) if here else 0)
        ops.gather(x.movedim(dim, 0), dst, group=members, out=out.movedim(dim, 0) if here else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dst, dim, members = ctx.how
        like = None if _is_root(dst, members) else ctx.like
        piece = apply(Scatter, token(), grad, like, dst, dim, members)
        return None, piece, None, None, None


class Send(torch.autograd.Function):
    """Backward receives the gradient of the message with its number."""

    @staticmethod
    def forward(ctx: Any, _token: Tensor, x: Tensor, dst: int, tag: int) -> Tensor:
        worker = checks.calling_worker("send")
        checks.as_source("send", x)
        numbers = worker.shared.setdefault(f"autograd.send of {worker.worker_id}", count())
        ctx.how = dst, next(numbers)
        ctx.like = x.new_empty(()).expand(x.shape)
        p2p.send(torch.tensor(ctx.how[1], device=_number_device(x)), dst, tag=_NUMBERS + tag)
        p2p.send(x, dst, tag=tag)
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _grad: Tensor) -> Any:
        dst, number = ctx.how
        out = ctx.like.new_empty(ctx.like.shape)
        return None, p2p.recv(out, dst, tag=_GRADIENTS + number), None, None


class Recv(torch.autograd.Function):
    """Backward sends the gradient back."""

    @staticmethod
    def forward(ctx: Any, _token: Tensor, like: Tensor, src: int, tag: int) -> Tensor:
        checks.as_source("recv", like, "like")
        number = torch.tensor(0, device=_number_device(like))
        ctx.how = src, int(p2p.recv(number, src, tag=_NUMBERS + tag))
        out = like.new_empty(like.shape)
        return p2p.recv(out, src, tag=tag)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        src, number = ctx.how
        p2p.send(grad, src, tag=_GRADIENTS + number)
        return None, None, None, None


class Copy(torch.autograd.Function):
    """Nothing; backward `Sum`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, members: Group) -> Tensor:
        ctx.members = members
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(Sum, grad, ctx.members), None


class Sum(torch.autograd.Function):
    """An all-reduce; backward `Copy`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, members: Group) -> Tensor:
        ctx.members = members
        return _tensor(ops.all_reduce(x, group=members))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(Copy, grad, ctx.members), None


class Cut(torch.autograd.Function):
    """My piece; backward `Join`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, members: Group) -> Tensor:
        ctx.how = dim, members
        size = x.shape[dim] // len(members)
        me = members.index(checks.calling_worker("scatter_to_region").worker_id)
        return x.narrow(dim, me * size, size).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dim, members = ctx.how
        return apply(Join, grad, dim, members), None, None


class Join(torch.autograd.Function):
    """An all-gather; backward `Cut`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, members: Group) -> Tensor:
        ctx.how = dim, members
        return _gathered(x, dim, members)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dim, members = ctx.how
        return apply(Cut, grad, dim, members), None, None


def _is_root(root: int, members: Group) -> bool:
    return members.ranks[root] == checks.calling_worker("gather").worker_id


def _number_device(x: Tensor) -> torch.device:
    """Where to put the number of a message: here if it can be, for the receiver reads it."""
    return torch.device("cpu") if backend_name() == "local" else x.device


def _tensor(found: Any) -> Tensor:
    assert isinstance(found, Tensor)
    return found


def _share(grad: Tensor, op: str, members: Group) -> Tensor:
    return grad / len(members) if op == "avg" else grad


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    """A new contiguous tensor like `x` but for its size along `dim`."""
    return x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :]))


def _gathered(x: Tensor, dim: int, members: Group) -> Tensor:
    out = _resized(x, dim, x.shape[dim] * len(members))
    ops.all_gather(x.movedim(dim, 0), group=members, out=out.movedim(dim, 0))
    return out
