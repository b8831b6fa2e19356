"""The collectives under Disco's names and with its meaning, as worker functions. No state.

``in_group`` true means within the worker's own group, false among all. Roots are the first
worker of each group, or worker 0. As in Disco only the numbers of elements must fit: a
receiving tensor may have another shape than what it receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime import accelerators
from ..runtime.arguments import Register
from ..runtime.errors import ArgumentError
from ..runtime.functions import register_func
from ..runtime.session import REDUCE_OPS
from ..runtime.worker import current_worker
from . import checks, choose, ops, p2p
from .call import kind
from .groups import Group, resolve

Tensor = torch.Tensor


@register_func("runtime.disco.init_ccl")
def init_ccl(name: str = "auto", *device_ids: int) -> str:
    """Choose the backend and each worker's GPU; what was chosen. A collective of all workers."""
    return choose.init(name, device_ids)


@register_func("runtime.disco.sync_worker")
def sync_worker() -> None:
    """Wait until this worker's device has done what it was given."""
    worker = checks.calling_worker("sync_worker")
    accelerators.synchronize(worker.device)


@register_func("runtime.disco.allreduce")
def allreduce(send: Tensor, kind: int | Sequence[int], in_group: bool, recv: Tensor) -> None:
    """Reduce everybody's `send` into everybody's `recv`.

    `kind` is 0-4 for sum, prod, min, max, avg, or that number as a shape, as Disco sends it.
    """
    name = "allreduce"
    members = _members(name, in_group)
    number: Any = kind[0] if isinstance(kind, list | tuple) and len(kind) == 1 else kind
    if number not in range(len(REDUCE_OPS)):
        raise ArgumentError(f"{name}: kind {kind!r}; it is 0-4 for {', '.join(REDUCE_OPS)}")
    source = _source(name, send, "send")
    with _Flat(name, recv, source, source.numel(), "as many elements as send") as out:
        ops.all_reduce(source, REDUCE_OPS[number], group=members, out=out)
    _watch(recv)


@register_func("runtime.disco.allgather")
def allgather(send: Tensor, in_group: bool, recv: Tensor) -> None:
    """Put everybody's `send` one after the other into everybody's `recv`."""
    name = "allgather"
    members = _members(name, in_group)
    source = _source(name, send, "send")
    size = source.numel() * len(members)
    with _Flat(name, recv, source, size, f"{len(members)} x the elements of send") as out:
        ops.all_gather(source, group=members, out=out)
    _watch(recv)


@register_func("runtime.disco.broadcast_from_worker0")
def broadcast_from_worker0(send: Tensor | None, in_group: bool, recv: Tensor) -> None:
    """Copy the root's `send` into everybody's `recv`; `send` of the others is ignored."""
    name = "broadcast_from_worker0"
    members = _members(name, in_group)
    if not _is_root(name, members):
        send = recv
    source = _source(name, send, "send")
    with _Flat(name, recv, source, source.numel(), "as many elements as send") as out:
        ops.broadcast(source, group=members, out=out)
    _watch(recv)


@register_func("runtime.disco.scatter_from_worker0")
def scatter_from_worker0(send: Tensor | None, in_group: bool, recv: Tensor) -> None:
    """Cut the root's `send` in equal parts for everybody's `recv`; others' `send` is ignored."""
    name = "scatter_from_worker0"
    members = _members(name, in_group)
    n = len(members)
    if not _is_root(name, members):
        target = _source(name, recv, "recv")
        with _Flat(name, recv, target, target.numel(), "") as out:
            ops.scatter(None, group=members, out=out)
        _watch(recv)
        return
    source = _source(name, send, "send")
    if source.numel() % n:
        raise ArgumentError(
            f"{name}: send is {_kind(send)}; its {source.numel()} elements can't be split into {n} "
            "equal parts"
        )
    with _Flat(name, recv, source, source.numel() // n, f"1/{n} of the elements of send") as out:
        ops.scatter(source, group=members, out=out)
    _watch(recv, send)


@register_func("runtime.disco.gather_to_worker0")
def gather_to_worker0(send: Tensor, in_group: bool, recv: Tensor | None) -> None:
    """Collect everybody's `send` in the root's `recv`; `recv` of the others is ignored."""
    name = "gather_to_worker0"
    members = _members(name, in_group)
    source = _source(name, send, "send")
    if not _is_root(name, members):
        ops.gather(source, group=members)
        return
    size = source.numel() * len(members)
    with _Flat(name, recv, source, size, f"{len(members)} x the elements of send") as out:
        ops.gather(source, group=members, out=out)


@register_func("runtime.disco.send_to_next_group")
def send_to_next_group(buffer: Tensor) -> None:
    """Send to the worker at the same place in the next group; an error in the last one."""
    name = "send_to_next_group"
    _send(name, buffer, p2p.next_peer(name, checks.calling_worker(name)))


@register_func("runtime.disco.recv_from_prev_group")
def recv_from_prev_group(buffer: Tensor) -> None:
    """Receive from the same place in the group before; an error in the first one."""
    name = "recv_from_prev_group"
    _recv(name, buffer, p2p.prev_peer(name, checks.calling_worker(name)))


@register_func("runtime.disco.send_to_worker")
def send_to_worker(buffer: Tensor, receiver_id: int) -> None:
    """Send to a worker by rank; to oneself is an error."""
    _send("send_to_worker", buffer, receiver_id)


@register_func("runtime.disco.recv_from_worker")
def recv_from_worker(buffer: Tensor, sender_id: int) -> None:
    """Receive from a worker by rank; from oneself is an error."""
    _recv("recv_from_worker", buffer, sender_id)


@register_func("runtime.disco.recv_from_worker0")
def recv_from_worker0(buffer: Tensor) -> None:
    """Receive what worker 0 sent with `send_to_worker`; on worker 0 an error."""
    _recv("recv_from_worker0", buffer, 0)


class _Flat:
    """`recv` as a contiguous 1-d tensor to write to; leaving the block fills a strided `recv`."""

    def __init__(self, name: str, recv: Any, source: Tensor, size: int, rule: str) -> None:
        target = checks.as_source(name, recv, "recv")
        if target.dtype != source.dtype or target.numel() != size:
            raise ArgumentError(
                f"{name}: recv is {_kind(recv)}; it must be {kind(source.dtype, (size,))} or that "
                f"many elements in another shape, {rule}"
            )
        if target.device != source.device:
            raise ArgumentError(f"{name}: recv is on {target.device}, send on {source.device}")
        checks.check_output(name, recv)
        self._target = target
        if target.is_contiguous():
            self._flat = target.view(-1)
        else:
            self._flat = torch.empty(size, dtype=target.dtype, device=target.device)

    def __enter__(self) -> Tensor:
        return self._flat

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is None and not self._target.is_contiguous():
            with torch.no_grad():
                self._target.copy_(self._flat.view(self._target.shape))


def _watch(recv: Tensor, send: Tensor | None = None) -> None:
    """Watch what the session's collective has filled, and what that was cut from; see restart.py.

    So it is known whether another worker that is restarted can be given the same again.
    """
    worker = current_worker()
    given: Any = worker.current[3] if worker.current is not None else ()
    if len(given) > 2 and type(given[-1]) is Register:
        worker.watched.watch(given[-1], recv)
        if send is not None and type(given[-3]) is Register:
            worker.watched.watch(given[-3], send, key=-given[-1])


def _members(name: str, in_group: Any) -> Group:
    worker = checks.calling_worker(name)
    return resolve(worker, None if in_group else "world", name)


def _is_root(name: str, members: Group) -> bool:
    return checks.calling_worker(name).worker_id == members.ranks[0]


def _source(name: str, value: Any, what: str) -> Tensor:
    """A tensor as one dimension; a view where the memory allows it."""
    return checks.as_source(name, value, what).reshape(-1)


def _send(name: str, buffer: Any, peer: int) -> None:
    p2p.send_as(name, _source(name, buffer, "buffer"), peer).wait()


def _recv(name: str, buffer: Any, peer: int) -> None:
    target = _source(name, buffer, "buffer")
    with _Flat(name, buffer, target, target.numel(), "") as out:
        p2p.recv_as(name, out, peer).wait()


def _kind(value: Any) -> str:
    return kind(value.dtype, value.shape) if isinstance(value, Tensor) else repr(value)
