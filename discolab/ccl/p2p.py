"""Sending a tensor from one worker to another. No state.

Messages between two workers arrive in the order in which they were sent, in the same call of the
session or a later one; what a script sends is received in that script alone. `send` copies and
returns at once, whatever the size: what is sent and not received takes memory on the sender's
device. An interrupt drops it, and so does the failure of the call in which it was sent, on the
sender or the receiver; a `recv` that then can't complete says so. Only the sender counts if the
session called `send` itself.

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
from .call import of_script
from .choose import backend_of
from .groups import resolve
from .work import Work


def send(tensor: torch.Tensor, dst: int, *, tag: int = 0) -> None:
    """Send a copy of a tensor to the worker of rank `dst`; does not wait.

    Parameters
    ----------
    tag
        Only a `recv` with the same tag receives it.

    Raises
    ------
    ArgumentError
        If it is no tensor that can be moved, or `dst` no other worker.
    """
    send_as("send", tensor, dst, tag=tag).wait()


def recv(
    out: torch.Tensor, src: int | None = None, *, tag: int = 0, timeout: float | None = None
) -> torch.Tensor:
    """Wait for the next tensor from the worker of rank `src`; None: from any worker.

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
    recv_as("recv", out, src, timeout, tag=tag).wait()
    return out


def isend(tensor: torch.Tensor, dst: int, *, tag: int = 0) -> Work:
    """`send` that gives a `Work`."""
    return send_as("send", tensor, dst, tag=tag)


def irecv(
    out: torch.Tensor, src: int | None = None, *, tag: int = 0, timeout: float | None = None
) -> Work:
    """`recv` that gives a `Work`; its ``wait()`` returns `out`, which is filled only then."""
    return recv_as("recv", out, src, timeout, tag=tag, async_op=True)


def send_to_worker(tensor: torch.Tensor, worker_id: int) -> None:
    """`send`, under Disco's name."""
    send_as("send_to_worker", tensor, worker_id).wait()


def recv_from_worker(
    out: torch.Tensor, worker_id: int, *, timeout: float | None = None
) -> torch.Tensor:
    """`recv`, under Disco's name."""
    recv_as("recv_from_worker", out, worker_id, timeout).wait()
    return out


def send_to_next_group(tensor: torch.Tensor) -> None:
    """Send to the worker at this place in the next group.

    Raises
    ------
    ArgumentError
        In the last group.
    """
    name = "send_to_next_group"
    send_as(name, tensor, next_peer(name, checks.calling_worker(name))).wait()


def recv_from_prev_group(out: torch.Tensor, *, timeout: float | None = None) -> torch.Tensor:
    """Receive from the worker at this place in the group before.

    Raises
    ------
    ArgumentError
        In the first group.
    """
    name = "recv_from_prev_group"
    recv_as(name, out, prev_peer(name, checks.calling_worker(name)), timeout).wait()
    return out


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


def send_as(name: str, tensor: Any, peer: Any, *, tag: int = 0) -> Work:
    """`send` for a function called `name`."""
    worker = checks.calling_worker(name)
    src = checks.as_source(name, tensor)
    dst = checks.as_peer(name, peer, worker, "dst")
    everybody = resolve(worker, "world", name)
    call = checks.make_call(name, worker, everybody, [src], op="send", root=dst)
    return backend_of(worker).send(call, src, dst, of_script(worker, _tag(name, tag)))


def recv_as(
    name: str, out: Any, peer: Any, timeout: Any = None, *, tag: int = 0, async_op: bool = False
) -> Work:
    """`recv` for a function called `name`."""
    worker = checks.calling_worker(name)
    like = checks.as_source(name, out, "out")
    checks.check_output(name, out)
    src = None if peer is None and name == "recv" else checks.as_peer(name, peer, worker, "src")
    everybody = resolve(worker, "world", name)
    call = checks.make_call(
        name, worker, everybody, [like], op="recv", root=src, timeout=timeout, async_op=async_op
    )
    work = backend_of(worker).recv(call, like, src, of_script(worker, _tag(name, tag)))
    work.result = out
    return work


def _tag(name: str, tag: Any) -> str:
    """A tag in words; 0 is none."""
    if isinstance(tag, bool) or not isinstance(tag, int) or tag < 0:
        raise ArgumentError(f"{name}: tag must be an integer from 0, got {tag!r}")
    return str(tag) if tag else ""
