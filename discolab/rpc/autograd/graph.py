"""The graph of autograd on one node: walked to its leaves, and differentiated.

A `Walk` belongs to the thread that made it. `_importing` guards `_imported`, see `import_autograd`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from ...isolation import default_dtype
from ...runtime.errors import SessionError
from ...runtime.interrupts import plain_lock, shield
from ...runtime.worker import bind_thread, current_worker_or_none
from ..node import Node as RpcNode
from ..node import Place as RpcPlace
from ..node import bind_place, bound_place, rank_on
from ..outcome import Outcome
from .contexts import Context, Gradients, Recv
from .gates import make_room
from .tensor_crossings import Crossing

Tensor = torch.Tensor
Place = tuple[Node | None, int]  # a node of the graph and which of its inputs; None: a root itself

_ONE = torch.ones((), requires_grad=True)
_LEAF: type = type(torch.autograd.graph.get_gradient_edge(_ONE).node)
_CROSSING: Any = getattr(Crossing, "_backward_cls")  # noqa: B009 - not in the stubs


class Walk:
    """What of a graph lies behind some roots.

    Attributes
    ----------
    nodes
        Its nodes but the leaves, each with the rank to which it belongs.
    leaves
        By ``id``: the leaf, and by rank where its gradient comes from.
    recvs
        By ``id(leaf)``: those of the leaves that came from another node.
    """

    __slots__ = ("leaves", "nodes", "recvs")

    def __init__(self) -> None:
        self.nodes: dict[Node, int] = {}
        self.leaves: dict[int, tuple[Tensor, dict[int, list[Place]]]] = {}
        self.recvs: dict[int, Recv] = {}

    def _reach(self, leaf: Any, rank: int, place: Place, recvs: Mapping[int, Recv]) -> None:
        tensor: Tensor = leaf.variable
        key = id(tensor)
        entry = self.leaves.get(key)
        if entry is None:
            entry = self.leaves[key] = tensor, {}
            recv = recvs.get(key)
            if recv is not None:
                self.recvs[key] = recv
        entry[1].setdefault(rank, []).append(place)


def walk(
    roots: Iterable[tuple[GradientEdge, int]], recvs: Mapping[int, Recv], context: int
) -> Walk:
    """Walk the graph from some edges to its leaves.

    Parameters
    ----------
    roots
        Each with the rank to which it belongs. What lies behind a `Crossing` belongs to the rank
        from which that came; what can be reached from several ranks, to the first one.
    recvs
        The context's, by ``id(leaf)``.
    context
        The context's id.

    Raises
    ------
    SessionError
        If something behind them came here in another context.
    """
    graph = Walk()
    nodes = graph.nodes
    todo: list[tuple[Node, int]] = []
    for number, (edge, rank) in enumerate(roots):
        if isinstance(edge.node, _LEAF):
            graph._reach(edge.node, rank, (None, number), recvs)
        elif edge.node not in nodes:
            nodes[edge.node] = rank
            todo.append((edge.node, rank))
    while todo:
        node, rank = todo.pop()
        make_room(node)
        if isinstance(node, _CROSSING):
            if node.context != context:
                raise _of_another(node.context, context)
            rank = node.from_rank
        for index, (behind, _) in enumerate(node.next_functions):
            if behind is None:
                continue
            if isinstance(behind, _LEAF):
                graph._reach(behind, rank, (node, index), recvs)
            elif behind not in nodes:
                nodes[behind] = rank
                todo.append((behind, rank))
    return graph


def differentiate(
    graph: Walk,
    outputs: Sequence[GradientEdge],
    grad_outputs: Sequence[Tensor],
    retain_graph: bool,
    taken: set[int],
    on: RpcNode,
    send_on: Callable[[int, Tensor | None], None] | None = None,
) -> Gradients:
    """The gradients of all leaves of a walk, by one call of `torch.autograd.grad`.

    Parameters
    ----------
    graph
        The walk from `outputs`.
    outputs, grad_outputs
        Where the gradients enter the graph, and those.
    taken
        Memory (`memory`) that no gradient may share; grows.
    on
        Where all of it is.
    send_on
        Called with the ``id`` of each leaf that came from another node once its gradient is there.

    Returns
    -------
    gradients
        Of the leaves that belong to this node, by rank. Those on which the outputs do not depend
        are not in it. Each has memory of its own.

    Raises
    ------
    SessionError
        If the graph was used up.
    """
    keys = list(graph.leaves)
    if not keys or not outputs:
        return {}
    import_autograd()
    parts, handles = _watch_parts(graph, grad_outputs)
    if send_on is not None:
        handles += _watch_recvs(graph, send_on)
    try:
        with _run_as_owners(graph, on), torch.autograd.set_multithreading_enabled(False):
            grads = torch.autograd.grad(
                outputs,
                [graph.leaves[key][0] for key in keys],
                grad_outputs,
                retain_graph=retain_graph,
                allow_unused=True,
            )
    except RuntimeError as exc:
        if "graph a second time" in str(exc):
            raise used_up() from exc
        raise
    finally:
        for handle in handles:
            handle.remove()
    gradients: Gradients = {}
    owned = taken
    owned |= {memory(grad) for grad in grad_outputs}
    for key, grad in zip(keys, grads, strict=True):
        if grad is None or key in graph.recvs:
            continue
        leaf, ranks = graph.leaves[key]
        of_ranks = parts[key] if key in parts else {next(iter(ranks)): grad}
        for rank, part in of_ranks.items():
            gradients.setdefault(rank, {})[leaf] = _own(part.detach(), owned)
    return gradients


def used_up() -> SessionError:
    """The error for a graph through which a backward went before."""
    return SessionError(
        "a backward went through this graph before, and what it needs is gone: give "
        "retain_graph=True to all but the last backward of a context"
    )


def _of_another(came: int, context: int) -> SessionError:
    return SessionError(
        f"a tensor behind the roots of this backward came in another context ({Context(came)!r}, "
        f"this is {Context(context)!r}): call backward in that one"
    )


@contextmanager
def _run_as_owners(graph: Walk, on: RpcNode) -> Iterator[None]:
    """Have each node run as the rank whose it is: it may draw random numbers, or compute again.

    Hooks of a tensor come before those of its node, so a `Crossing` runs as the rank behind it.
    """
    owners = {
        node: node.from_rank if isinstance(node, _CROSSING) else rank
        for node, rank in graph.nodes.items()
    }
    ranks = set(owners.values())
    if ranks <= {rank_on(on)}:
        yield
        return
    me, here, worker = threading.get_ident(), bound_place(), current_worker_or_none()

    def run_as(place: RpcPlace) -> Callable[[Any], None]:
        def hook(_: Any) -> None:
            # another backward may use the same graph
            if threading.get_ident() == me and bound_place() is not place:
                bind_place(place)
                bind_thread(on.workers.get(place.rank))

        return hook

    hooks = {rank: run_as(RpcPlace(on, rank)) for rank in ranks}
    handles = [node.register_prehook(hooks[rank]) for node, rank in owners.items()]
    try:
        with default_dtype.one_mode():
            try:
                yield
            finally:
                with shield():  # an interrupt must not leave the thread to another rank
                    bind_place(here)
                    bind_thread(worker)
    finally:
        for handle in handles:
            handle.remove()


def _watch_recvs(graph: Walk, send_on: Callable[[int, Tensor | None], None]) -> list[Any]:
    """Have the gradients of leaves that came from other nodes noted as soon as they are there."""
    me = threading.get_ident()

    def note(key: int) -> Callable[[Any], None]:
        def hook(grad: Any) -> None:
            if threading.get_ident() == me:  # another backward may use the same leaf
                send_on(key, None if grad is None else grad.detach())

        return hook

    return [recv.leaf.register_hook(note(key)) for key, recv in graph.recvs.items()]


def _watch_parts(
    graph: Walk, grad_outputs: Sequence[Tensor]
) -> tuple[dict[int, dict[int, Tensor]], list[Any]]:
    """For leaves that several ranks of this node use: have each one's part noted on its way.

    Returns the parts, by ``id(leaf)`` and rank, and handles to be removed.
    """
    parts: dict[int, dict[int, Tensor]] = {}
    handles: list[Any] = []
    me = threading.get_ident()

    def add(key: int, rank: int, grad: Tensor | None) -> None:
        if grad is not None:
            mine = parts[key]
            mine[rank] = mine[rank] + grad if rank in mine else grad

    def note(key: int, rank: int, index: int) -> Callable[[Any, Any], None]:
        def hook(grad_inputs: Any, _: Any) -> None:
            if threading.get_ident() == me:  # another backward may use the same graph
                add(key, rank, grad_inputs[index])

        return hook

    for key, (_, ranks) in graph.leaves.items():
        if len(ranks) == 1 or key in graph.recvs:
            continue
        parts[key] = {}
        for rank, places in ranks.items():
            for node, index in places:
                if node is None:
                    add(key, rank, grad_outputs[index])
                else:
                    handles.append(node.register_hook(note(key, rank, index)))
    return parts, handles


def memory(tensor: Tensor) -> int:
    """What two tensors have in common that share memory; 0 where that is not known."""
    if tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def _own(grad: Tensor, taken: set[int]) -> Tensor:
    """The gradient, in memory of its own: programs change gradients in place."""
    where = memory(grad)
    if where and (where in taken or _is_expanded(grad)):
        return grad.clone(memory_format=torch.contiguous_format)
    taken.add(where)
    return grad


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several elements of it are one in memory."""
    return any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


# -- what torch imports in a process's first backward --------------------------------------------

_importing = plain_lock()
_imported: Outcome | None = None


def import_autograd() -> None:
    """Have it imported where no interrupt can come; back when it is done.

    A module whose import an interrupt breaks off stays broken. So a thread of its own does it,
    once; a thread that waits for that can be interrupted.
    """
    global _imported
    with _importing:
        if _imported is None:
            _imported = Outcome()
            threading.Thread(target=_first_backward, args=(_imported,), daemon=True).start()
    if not _imported.settled:
        _imported.wait("torch's modules for autograd", 120)


def _first_backward(outcome: Outcome) -> None:
    try:
        with torch.enable_grad():
            x = torch.ones((), requires_grad=True)
            torch.autograd.grad([x * 2], [x], [torch.ones(())])
    finally:
        outcome.settle(None)
