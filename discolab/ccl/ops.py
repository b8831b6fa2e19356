"""The collectives that programs on workers call. No state.

All members of a group must call the same collectives in the same order within one call of
the session. Each function checks its arguments on the calling worker (`ArgumentError`), then
joins the others. These errors end a collective for all its members:

CollectiveError
    They disagree on operation, shape, dtype, reduction or root; or wait for each other.
CollectiveAborted
    A member failed by itself, or left.
WaitTimeoutError
    On the member whose ``timeout=`` seconds are over.

Members that must agree on a shape agree on the whole of it, where `dist.*` takes any shapes with as
many elements. To write in place, or to `out`, does not raise the tensor's version counter in
all_reduce, reduce, broadcast, scatter and recv, as in torch with Gloo: autograd does not learn of
it.

Collectives here are not differentiable (`discolab.ccl.autograd` has those that are): they see
detached data, and a result that they make does not require grad. Where a tensor that requires grad
is given to one while gradients are enabled, a `GradientWarning` says so, once for each line of a
program (not of `broadcast`, nor in place, as parameters are made alike). A result is contiguous;
`out` may have any strides, and may be the input. ``group=`` is None (this worker's own group),
``"world"``, the name of a mesh axis, a `Group`, or a list of ranks. ``async_op=True`` gives a
`Work` at once, whose ``wait()`` returns what the function would have returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.errors import ArgumentError
from ..runtime.worker import Worker
from . import checks
from .call import Kind
from .choose import backend_of
from .groups import Group, resolve
from .memory import rows
from .pattern import pattern_of
from .reductions import check_reduction

GroupLike = Any
Tensors = Sequence[torch.Tensor]


def all_reduce(
    tensor: torch.Tensor,
    op: str = "sum",
    *,
    group: GroupLike = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce the members' tensors to one, the same on all, bit by bit.

    Parameters
    ----------
    tensor
        Of one shape and dtype on all members.
    op
        ``"sum"``, ``"prod"``, ``"min"``, ``"max"`` or ``"avg"``; for integers and bool also
        ``"band"``, ``"bor"`` and ``"bxor"``. float16, bfloat16 and float8 are accumulated in
        float32. avg of integers rounds toward zero. bool: sum and max are "or", prod and min are
        "and", no avg. complex: no min and max.
    out
        Where to put the result, of the same shape and dtype.

    Returns
    -------
    torch.Tensor or Work
        `out`, or a new tensor like `tensor`; with `async_op` a `Work`.

    Raises
    ------
    ArgumentError, CollectiveError, WaitTimeoutError
        See this module.
    """
    name = "all_reduce"
    worker, src, members = _enter(name, tensor, group, out)
    reduction = check_reduction(name, op, src.dtype)
    result, dst = checks.as_output(name, out, tuple(src.shape), src)
    return _run(name, worker, members, [src], [src], [dst], result, timeout, async_op, reduction)


def all_reduce_(
    tensor: torch.Tensor,
    op: str = "sum",
    *,
    group: GroupLike = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """As `all_reduce`, in place; returns `tensor`."""
    return all_reduce(tensor, op, group=group, out=tensor, timeout=timeout, async_op=async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    op: str = "sum",
    *,
    group: GroupLike = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """As `all_reduce`, with the result on one member alone.

    Parameters
    ----------
    dst
        Index of that member in the group, 0 for the first; not its rank.
    out
        Used on that member only.

    Returns
    -------
    torch.Tensor, None or Work
        The result on `dst`, None on the others.
    """
    name = "reduce"
    worker, src, members = _enter(name, tensor, group, out)
    reduction = check_reduction(name, op, src.dtype)
    root = checks.as_root(name, dst, members, "dst")
    result: torch.Tensor | None = None
    outs: list[torch.Tensor] = []
    if root == worker.worker_id:
        result, target = checks.as_output(name, out, tuple(src.shape), src)
        outs = [target]
    return _run(
        name, worker, members, [src], [src], outs, result, timeout, async_op, reduction, root
    )


def all_gather(
    tensor: torch.Tensor,
    *,
    group: GroupLike = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Put the members' tensors one after the other along the first dimension.

    Parameters
    ----------
    tensor
        Of one shape and dtype on all n members.
    out
        ``[n * tensor.shape[0], ...]``; ``[n]`` for tensors without a dimension.

    Returns
    -------
    torch.Tensor or Work
        `out`, or a new tensor of that shape; the same on all.
    """
    name = "all_gather"
    worker, src, members = _enter(name, tensor, group, out)
    result, pieces = _gathered(name, src, members, out)
    return _run(name, worker, members, [src], [src], pieces, result, timeout, async_op)


def all_gather_list(
    tensor: torch.Tensor, *, group: GroupLike = None, timeout: float | None = None
) -> list[torch.Tensor]:
    """As `all_gather`; a list with each member's tensor, views of one result."""
    members = resolve(checks.calling_worker("all_gather"), group, "all_gather")
    whole = all_gather(tensor, group=members, timeout=timeout)
    return list(whole.view(len(members), *tensor.shape).unbind(0))


def gather(
    tensor: torch.Tensor,
    dst: int = 0,
    *,
    group: GroupLike = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """As `all_gather`, with the result on one member alone.

    Parameters
    ----------
    dst
        Index of that member in the group, 0 for the first; not its rank.
    out
        Used on that member only.

    Returns
    -------
    torch.Tensor, None or Work
        The result on `dst`, None on the others.
    """
    name = "gather"
    worker, src, members = _enter(name, tensor, group, out)
    root = checks.as_root(name, dst, members, "dst")
    result: torch.Tensor | None = None
    pieces: list[torch.Tensor] = []
    if root == worker.worker_id:
        result, pieces = _gathered(name, src, members, out)
    return _run(name, worker, members, [src], [src], pieces, result, timeout, async_op, root=root)


def reduce_scatter(
    tensor: torch.Tensor,
    op: str = "sum",
    *,
    group: GroupLike = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce, then keep the i-th of n equal parts of the result on the i-th of n members.

    Parameters
    ----------
    tensor
        Of one shape and dtype on all members; n divides its first size.
    op
        As for `all_reduce`.
    out
        ``[tensor.shape[0] // n, ...]``.

    Returns
    -------
    torch.Tensor or Work
        `out`, or a new tensor of that shape.
    """
    name = "reduce_scatter"
    worker, src, members = _enter(name, tensor, group, out)
    reduction = check_reduction(name, op, src.dtype)
    shape = checks.check_divides(name, src, members)
    result, dst = checks.as_output(name, out, shape, src, f"one of {len(members)} parts")
    parts = rows(src, len(members))
    return _run(name, worker, members, [src], parts, [dst], result, timeout, async_op, reduction)


def broadcast(
    tensor: torch.Tensor | None,
    src: int = 0,
    *,
    group: GroupLike = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Copy the tensor of one member to all.

    Parameters
    ----------
    tensor
        What to send, on member `src`. Elsewhere it gives shape and dtype and stays as it is;
        it may be None there if `out` is given.
    src
        Index of that member in the group, 0 for the first; not its rank.
    out
        Of the same shape and dtype.

    Returns
    -------
    torch.Tensor or Work
        `out`, or a new tensor.
    """
    name = "broadcast"
    worker = checks.calling_worker(name)
    members = resolve(worker, group, name)
    root = checks.as_root(name, src, members, "src")
    mine = root == worker.worker_id
    if tensor is None and not mine:
        if out is None:
            raise _no_shape(name)
        tensor = out
    source = checks.as_source(name, tensor)
    result, dst = checks.as_output(name, out, tuple(source.shape), source)
    srcs = [source] if mine else []
    return _run(name, worker, members, [dst], srcs, [dst], result, timeout, async_op, root=root)


def broadcast_(
    tensor: torch.Tensor,
    src: int = 0,
    *,
    group: GroupLike = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """As `broadcast`, into `tensor` itself; returns it."""
    return broadcast(tensor, src, group=group, out=tensor, timeout=timeout, async_op=async_op)


def scatter(
    tensor: torch.Tensor | None,
    src: int = 0,
    *,
    group: GroupLike = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Cut the tensor of one member along its first dimension, a part for each member.

    Parameters
    ----------
    tensor
        On member `src`: what to cut; the number of members divides its first size. Elsewhere
        it is ignored and may be None.
    src
        Index of that member in the group, 0 for the first; not its rank.
    out
        Where to put this member's part. Only member `src` may leave it out.

    Returns
    -------
    torch.Tensor or Work
        `out`, or on `src` a new tensor.
    """
    name = "scatter"
    worker = checks.calling_worker(name)
    members = resolve(worker, group, name)
    root = checks.as_root(name, src, members, "src")
    parts: list[torch.Tensor] = []
    if root == worker.worker_id:
        source = checks.as_source(name, tensor)
        shape = checks.check_divides(name, source, members)
        result, dst = checks.as_output(name, out, shape, source, f"one of {len(members)} parts")
        parts = rows(source, len(members))
    elif out is None:
        raise _no_shape(name)
    else:
        like = checks.as_source(name, out, "out")
        result, dst = checks.as_output(name, out, tuple(out.shape), like)
    return _run(name, worker, members, [dst], parts, [dst], result, timeout, async_op, root=root)


def all_to_all(
    tensor: torch.Tensor | Sequence[torch.Tensor],
    *,
    group: GroupLike = None,
    out: Any = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Send the j-th part to the j-th of n members, and receive one part from each.

    Parameters
    ----------
    tensor
        A tensor, whose first size n divides, cut in n equal parts; of one shape on all members.
        Or a list of n tensors of one dtype, of any shapes.
    out
        For a tensor: like it. For a list: n tensors, of which the i-th has the shape of what
        the i-th member sends here; may be left out if all parts everywhere have one shape.

    Returns
    -------
    torch.Tensor, list of torch.Tensor or Work
        The parts received, in the order of the members: one after the other along the first
        dimension, or as a list.

    Raises
    ------
    CollectiveError
        Also if a part does not fit where its receiver wants it.
    """
    name = "all_to_all"
    worker = checks.calling_worker(name)
    members = resolve(worker, group, name)
    result: Any
    if isinstance(tensor, torch.Tensor):
        source = checks.as_source(name, tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            checks.warn_of_gradient(name, worker)
        checks.check_divides(name, source, members)
        result, dst = checks.as_output(name, out, tuple(source.shape), source)
        srcs, outs = rows(source, len(members)), rows(dst, len(members))
        kinds = None
    else:
        srcs = checks.as_sources(name, tensor, len(members))
        result, outs = checks.as_parts(name, out, srcs)
        kinds = ((srcs[0].dtype, None),)
        source = srcs[0]
    return _run(name, worker, members, [source], srcs, outs, result, timeout, async_op, kinds=kinds)


def all_reduce_coalesced(
    tensors: Tensors,
    op: str = "sum",
    *,
    group: Any = None,
    outs: Tensors | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """`all_reduce` of each tensor at once; the list of results. In place with ``outs=tensors``.

    The tensors may differ in shape and dtype, but the members must give the same list.
    """
    name = "all_reduce_coalesced"
    worker = checks.calling_worker(name)
    srcs = checks.as_sources(name, tensors)
    reduction = {check_reduction(name, op, src.dtype) for src in srcs}.pop()
    members = resolve(worker, group, name)
    shapes = [tuple(src.shape) for src in srcs]
    results, dsts = checks.as_outputs(name, outs, shapes, srcs)
    return _run(name, worker, members, srcs, srcs, dsts, results, timeout, async_op, reduction)


def all_gather_coalesced(
    tensors: Tensors,
    *,
    group: Any = None,
    outs: Tensors | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """`all_gather` of each tensor, as for `all_reduce_coalesced`; the list of results."""
    name = "all_gather_coalesced"
    worker = checks.calling_worker(name)
    srcs = checks.as_sources(name, tensors)
    members = resolve(worker, group, name)
    n = len(members)
    shapes = [_gathered_shape(src, n) for src in srcs]
    results, dsts = checks.as_outputs(name, outs, shapes, srcs)
    pieces = [piece for src, dst in zip(srcs, dsts, strict=True) for piece in _pieces(src, dst, n)]
    return _run(name, worker, members, srcs, srcs, pieces, results, timeout, async_op)


def reduce_scatter_coalesced(
    tensors: Tensors,
    op: str = "sum",
    *,
    group: Any = None,
    outs: Tensors | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """`reduce_scatter` of each tensor, as for `all_reduce_coalesced`; the list of results."""
    name = "reduce_scatter_coalesced"
    worker = checks.calling_worker(name)
    srcs = checks.as_sources(name, tensors)
    reduction = {check_reduction(name, op, src.dtype) for src in srcs}.pop()
    members = resolve(worker, group, name)
    shapes = [checks.check_divides(name, src, members) for src in srcs]
    results, dsts = checks.as_outputs(name, outs, shapes, srcs)
    parts = [part for src in srcs for part in rows(src, len(members))]
    return _run(name, worker, members, srcs, parts, dsts, results, timeout, async_op, reduction)


def barrier(
    *, group: GroupLike = None, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Return once every member has called it. On CUDA no device is waited for."""
    worker = checks.calling_worker("barrier")
    members = resolve(worker, group, "barrier")
    call = checks.make_call("barrier", worker, members, timeout=timeout, async_op=async_op)
    work = backend_of(worker).barrier(call)
    return work if async_op else work.wait()


def _enter(
    name: str, tensor: Any, group: GroupLike, out: Any
) -> tuple[Worker, torch.Tensor, Group]:
    """The calling worker, the plain tensor that it gives, and the members."""
    worker = checks.calling_worker(name)
    source = checks.as_source(name, tensor)
    if tensor.requires_grad and out is not tensor and torch.is_grad_enabled():
        checks.warn_of_gradient(name, worker)
    return worker, source, resolve(worker, group, name)


def _run(
    name: str,
    worker: Worker,
    members: Group,
    agreed: Tensors,
    srcs: Tensors,
    outs: Tensors,
    result: Any,
    timeout: float | None,
    async_op: bool,
    reduction: str | None = None,
    root: int | None = None,
    kinds: tuple[Kind, ...] | None = None,
) -> Any:
    """Enter the call, have the worker's backend start it, and give what the user gets.

    `agreed` are the tensors on whose shapes and dtypes the members must agree.
    """
    call = checks.make_call(
        name, worker, members, agreed, reduction=reduction, root=root, timeout=timeout,
        async_op=async_op, kinds=kinds,
    )  # fmt: skip
    pattern = pattern_of(name, members, srcs, outs, reduction, root)
    work = backend_of(worker).start(call, pattern, srcs, outs)
    work.result = result
    return work if async_op else work.wait()


def _gathered(
    name: str, src: torch.Tensor, members: Group, out: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result of a gather, and its piece for each member."""
    n = len(members)
    rule = f"{n} times the first size of the tensor"
    result, dst = checks.as_output(name, out, _gathered_shape(src, n), src, rule)
    return result, _pieces(src, dst, n)


def _gathered_shape(src: torch.Tensor, n: int) -> tuple[int, ...]:
    return (n * src.shape[0], *src.shape[1:]) if src.dim() else (n,)


def _pieces(src: torch.Tensor, dst: torch.Tensor, n: int) -> list[torch.Tensor]:
    return rows(dst, n) if src.dim() else list(dst.unbind(0))


def _no_shape(name: str) -> ArgumentError:
    return ArgumentError(
        f"{name}: only member src knows the shape; give the others out=torch.empty(shape, dtype=…)"
    )
