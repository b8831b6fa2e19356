"""Sending a tensor from one worker to another. No state.

Messages between two workers arrive in the order in which they were sent, in the same call of
the session or a later one. `send` copies and returns at once, whatever the size: what is
sent and not received takes memory on the sender's device. An interrupt drops it, and so does the
failure of the call in which it was sent, on the sender or the receiver; a `recv` that then can't
complete says so. Only the sender counts if the session called `send` itself.

`recv` fails with a `CollectiveError` once the sender has failed in the same call, or has done all
its work without sending; with ``timeout=`` it waits that long instead of failing for the latter,
for a later call may yet send.
"""

from __future__ import annotations

from typing import Any

import torch

from ..runtime.errors import ArgumentError
from ..runtime.worker import Worker
from . import checks
from .choose import backend_of
from .groups import resolve


def send(tensor: torch.Tensor, dst: int) -> None:
    """Send a copy of a tensor to the worker of rank `dst`; does not wait.

    Raises
    ------
    ArgumentError
        If it is no tensor that can be moved, or `dst` no other worker.
    """
    send_as("send", tensor, dst)


def recv(out: torch.Tensor, src: int, *, timeout: float | None = None) -> torch.Tensor:
    """Wait for the next tensor from the worker of rank `src`.

    Parameters
    ----------
    out
        Where to put it: shape and dtype must be those of what was sent.

    Returns
    -------
    torch.Tensor
        `out`.

    Raises
    ------
    CollectiveError
        If another shape or dtype was sent (that message is used up), or none can come.
    ArgumentError, WaitTimeoutError
        See `ops`.
    """
    return recv_as("recv", out, src, timeout)


def send_to_worker(tensor: torch.Tensor, worker_id: int) -> None:
    """`send`, under Disco's name."""
    send_as("send_to_worker", tensor, worker_id)


def recv_from_worker(
    out: torch.Tensor, worker_id: int, *, timeout: float | None = None
) -> torch.Tensor:
    """`recv`, under Disco's name."""
    return recv_as("recv_from_worker", out, worker_id, timeout)


def send_to_next_group(tensor: torch.Tensor) -> None:
    """Send to the worker at this place in the next group.

    Raises
    ------
    ArgumentError
        In the last group.
    """
    name = "send_to_next_group"
    send_as(name, tensor, next_peer(name, checks.calling_worker(name)))


def recv_from_prev_group(out: torch.Tensor, *, timeout: float | None = None) -> torch.Tensor:
    """Receive from the worker at this place in the group before.

    Raises
    ------
    ArgumentError
        In the first group.
    """
    name = "recv_from_prev_group"
    return recv_as(name, out, prev_peer(name, checks.calling_worker(name)), timeout)


def next_peer(name: str, worker: Worker) -> int:
    """The rank at the same place in the next group."""
    peer = worker.worker_id + worker.group_size
    if peer >= worker.num_workers:
        raise ArgumentError(
            f"{name}: worker {worker.worker_id} is in the last group, {worker.group_id} of "
            f"{worker.num_groups} (counted from 0); there is no next one"
        )
    return peer


def prev_peer(name: str, worker: Worker) -> int:
    """The rank at the same place in the group before."""
    peer = worker.worker_id - worker.group_size
    if peer < 0:
        raise ArgumentError(
            f"{name}: worker {worker.worker_id} is in the first group; there is none before it"
        )
    return peer


def send_as(name: str, tensor: Any, peer: Any) -> None:
    """`send` for a function called `name`."""
    worker = checks.calling_worker(name)
    src = checks.as_source(name, tensor)
    dst = checks.as_peer(name, peer, worker, "dst")
    call = checks.make_call(name, worker, resolve(worker, "world", name), None)
    backend_of(worker).send(call, src, dst)


def recv_as(name: str, out: Any, peer: Any, timeout: Any = None) -> torch.Tensor:
    """`recv` for a function called `name`."""
    worker = checks.calling_worker(name)
    like = checks.as_source(name, out, "out")
    src = checks.as_peer(name, peer, worker, "src")
    result, dst = checks.as_output(name, out, tuple(like.shape), like)
    call = checks.make_call(name, worker, resolve(worker, "world", name), timeout)
    backend_of(worker).recv(call, dst, src)
    return result
