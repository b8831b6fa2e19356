"""What nodes say to each other: tuples, written by runtime/serialize.py.

The last item of each message that carries values is a list of the *forks* of the references in
them: it is filled while the values are written, and written after them. So the receiving thread
can enter all forks before it opens anything of the values, which may run the user's code.

`_travel` is a thread-local: where references go while a message is written, and on which node they
have arrived while one is read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from ..runtime import serialize
from ..runtime.errors import ArgumentError
from ..runtime.worker import current_worker_or_none
from . import channels
from .refs.records import Fork, Keepalive
from .refs.table import ReferenceTable
from .temporarily import temporarily

# (kind, number of the call at its caller, …)
CALL = 0  # as `OutgoingCall` writes it
FETCH = 1  # the same, but it asks for the value of a reference
STREAM = 2  # the same, but many values go back
RESULT = 3  # value, tracked
ERROR = 4  # failure, its class, its attributes
CANCEL = 5  # why
ITEM = 6  # value, tracked: of a stream
CREDIT = 7  # how many more items of a stream are wanted
# (kind, …)
REFERENCES = 8  # a message of the counting of references
CONTEXT_OVER = 9  # id: an autograd context has ended
CONTEXT_JOINED = 10  # id: the sender has a context of the receiver's, without a call in it
GRADIENT = 11  # id of the context, key of the backward, number of the send, gradient
BACKWARD_OVER = 12  # id of the context, key of the backward, why

_WITH_VALUES = (CALL, FETCH, STREAM, RESULT, ITEM, GRADIENT)
_travel = threading.local()


class HasReferences(Protocol):
    """A node, as far as it matters here."""

    references: ReferenceTable


class Outgoing(NamedTuple):
    """Where the references in a message go that is being written."""

    node: HasReferences
    to: int
    forks: list[Fork]


class Claim(Protocol):
    """A handle of a reference that has arrived."""

    def claim(self) -> None:
        """Hold the reference from now on."""


class Arrived(NamedTuple):
    """On which node references arrive; `claims`: what claims them later, None: they do at once."""

    node: HasReferences
    claims: list[Claim] | None


def pack(
    node: HasReferences, to: int, message: tuple[Any, ...], forks: list[Fork], same_gpus: bool
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
    with temporarily(_travel, "out", Outgoing(node, to, forks)):
        return serialize.encode((*message, forks))


def unpack(
    node: HasReferences, sender: int, body: Any, frames: Sequence[Any]
) -> tuple[tuple[Any, ...], Keepalive | None]:
    """A message, and what holds the references in it till they are opened; on the receiving thread.

    The references of what needs no opening are in the message already, as handles of their own.
    """
    claims: list[Claim] = []
    with temporarily(_travel, "arrived", Arrived(node, claims)):
        # what was on a GPU stays on the host until it is opened
        message = serialize.decode(body, frames, place=channels.placed)
    if message[0] not in _WITH_VALUES:
        return message, None
    keepalive = node.references.received(message[-1], sender)
    for handle in claims:
        handle.claim()
    return message[:-1], keepalive


def open_values(node: HasReferences, value: Any) -> Any:
    """A value that came in a message, with its pickles opened: that may run the user's code."""
    with temporarily(_travel, "arrived", Arrived(node, None)):
        return channels.incoming(serialize.open_all(value), _own_device())


def _own_device() -> torch.device:
    worker = current_worker_or_none()
    return torch.device("cpu") if worker is None else worker.device


def outgoing() -> Outgoing:
    """Where a reference goes that is being written; raises if it isn't for a message of rpc."""
    out: Outgoing | None = getattr(_travel, "out", None)
    return out or _refuse_travel()


def arrived() -> Arrived:
    """Where a reference has arrived that is being read; raises if not with a message of rpc."""
    arrived: Arrived | None = getattr(_travel, "arrived", None)
    return arrived or _refuse_travel()


def _refuse_travel() -> NoReturn:
    """A reference is counted, so it travels in calls of rpc only."""
    raise ArgumentError(
        "an RRef travels only in arguments and results of discolab.rpc, where it is counted: give "
        "it to rpc_sync, rpc_async or remote, or make a DRef of it with sess.rpc.dref([…])"
    )
