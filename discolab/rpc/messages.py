"""What nodes say to each other: tuples, by runtime/serialize.py.

The last item of each message that carries values is a list of the *forks* of the references in
them: it is filled while the values are written, and written after them. So the receiving thread
can enter all forks before anything of the values is opened, which may run code of the user.

`_travel` is a thread-local: on its way out, where a reference goes; on its way in, where it has
come to.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..runtime import serialize
from ..runtime.errors import ArgumentError
from ..runtime.worker import current_worker_or_none
from . import channels
from .rref import RRef
from .within import within

if TYPE_CHECKING:
    from .node import Node
    from .reference_records import Brought

# (kind, number of the call at its caller, …)
CALL = 0  # as `Mail.call_out` has it
RESULT = 1  # value, tracked
ERROR = 2  # failure, its class, its attributes
CANCEL = 3  # why
ITEM = 4  # value, tracked: of a stream
CREDIT = 5  # how many more items of a stream are wanted
REFERENCES = 6  # a message of the counting of references
POST = 7  # kind, contents: for another part of rpc

FETCHES = 8  # with the kind of a call: it asks for a value, by its reference
KIND = 7

_WITH_VALUES = (CALL, RESULT, ITEM, POST)
_travel = threading.local()


def pack(
    node: Node, to: int, message: tuple[Any, ...], forks: list[Any], same_gpus: bool
) -> serialize.Message:
    """A message for another node; `forks` is filled with those of the references in it.

    Raises
    ------
    ArgumentError
        If something in it can't be sent.
    """
    if message[0] not in _WITH_VALUES:
        return serialize.encode(message)
    message = channels.outgoing(message, same_gpus)
    with within(_travel, "out", (node, to, forks)):
        return serialize.encode((*message, forks))


def unpack(
    node: Node, sender: int, body: Any, frames: Sequence[Any]
) -> tuple[tuple[Any, ...], Brought | None]:
    """A message, and who holds the references in it till they are opened; on the receiving thread.

    The references of what needs no opening are in the message already, as handles of their own.
    """
    claims: list[RRef] = []
    with within(_travel, "come", (node, claims)):
        # what was on a GPU stays on the host until it is opened
        message = serialize.decode(body, frames, place=channels.placed)
    if message[0] not in _WITH_VALUES:
        return message, None
    brought = node.holdings.brought(message[-1], sender)
    for rref in claims:
        rref._claim()
    return message[:-1], brought


def opened_here(node: Node, value: Any) -> Any:
    """A value with its pickles opened; the references in it are this node's."""
    with within(_travel, "come", (node, None)):
        return channels.incoming(serialize.open_all(value), _own_device())


def _own_device() -> torch.device:
    worker = current_worker_or_none()
    return torch.device("cpu") if worker is None else worker.device


# -- references on the wire ---------------------------------------------------------------------


def _out(rref: RRef) -> tuple[Any, ...]:
    """The rank of the owner, and the fork."""
    travel = getattr(_travel, "out", None)
    if travel is None:
        _refuse_travel()
    node, to, forks = travel
    if rref.node is not node:
        raise ArgumentError("this RRef belongs to another session")
    fork = node.holdings.fork(rref.ref, to)
    forks.append(fork)
    return rref.owner_rank, *fork


def _in(owner: int, *fork: Any) -> RRef:
    travel = getattr(_travel, "come", None)
    if travel is None:
        _refuse_travel()
    node, claims = travel
    rref = RRef(node, tuple(fork[:3]), owner)
    if claims is None:
        rref._claim()
    else:
        claims.append(rref)
    return rref


def _refuse_travel() -> NoReturn:
    """A reference is counted, so it travels in calls of rpc only."""
    raise ArgumentError(
        "an RRef travels only in arguments and results of discolab.rpc, where it is counted: give "
        "it to rpc_sync, rpc_async or remote, or make a DRef of it with sess.rpc.dref([…])"
    )


serialize.register_plain(RRef, _out, _in)
RRef.on_reduce = staticmethod(lambda rref: (_in, _out(rref)))
