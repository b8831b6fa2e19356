"""The messages between the coordinator and its clients, as plain values. No state.

A message is a tuple that begins with one of the words below. A client's message continues with the
ordinal of the command that its worker runs and the one at which the last interrupt ended. Then, as
in most of the coordinator's, comes the number by which the client knows the collective or message.

A client says                          the coordinator says
JOIN   calls a collective             GO      all are there, and here is what they gave
WAIT   waits now for an earlier one   RUN     all are there: do it over a process group
OVER   has done its part of it        FAIL    it can't be
BROKEN could not                      LATE    its deadline: who is missing
LEFT   has given up, or failed        MISSING who is missing so far
LATE   its deadline is over           MESSAGE here is what was sent
POLL   asks again and again           FETCH   it comes over a process group
SEND   sends a message                GIVE    send that message over a process group
RECV   will receive one               DROP    forget these messages
TAKE   waits for it                   ANSWER  to a question
PEEK, STORE, STATISTICS, HELLO        CLOSE   a process group is not used any more
       ask a question
USE    begins to use a backend
FORGET, DISMISS
       use a group, all groups, no more
LOOK   has the coordinator look at what waits
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...runtime.sources import display_name
from ..call import Call, Kind, Signature, Site

JOIN, WAIT, OVER, BROKEN, LEFT = "join", "wait", "over", "broken", "left"
LATE, POLL = "late", "poll"
SEND, RECV, TAKE, PEEK, STORE = "send", "recv", "take", "peek", "store"
STATISTICS, HELLO, USE, FORGET = "statistics", "hello", "use", "forget"
DISMISS, LOOK = "dismiss", "look"
GO, RUN, FAIL, MISSING, MESSAGE, FETCH = "go", "run", "fail", "missing", "message", "fetch"
GIVE, DROP, ANSWER, CLOSE = "give", "drop", "answer", "close"

WireKind = tuple[str, tuple[int, ...] | None]
WireSignature = tuple[str, str | None, int | None, tuple[WireKind, ...], str | None, bool]
WireSite = tuple[str, int, str] | None
WireCall = tuple[
    str, int, int, tuple[int, ...], str, WireSignature, WireSite, float | None, bool, bool
]


class Place(NamedTuple):
    """Stands for the code object of a call site in another process."""

    co_filename: str
    co_name: str


class Like(NamedTuple):
    """Of what dtype and shape a tensor in another process is."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, kind: WireKind) -> Like:
        """What `kind_out` has sent of a tensor."""
        dtype, shape = kind_in(kind)
        return cls(dtype, shape or ())


def site_out(site: Site | None) -> WireSite:
    """A call site, to be sent."""
    if site is None:
        return None
    code, line = site[0], site[1]
    file = display_name(str(getattr(code, "co_filename", code)))
    return file, line or 0, getattr(code, "co_name", "")


def site_in(site: WireSite) -> Site | None:
    """What `site_out` has sent; it is put in the same words."""
    if site is None:
        return None
    file, line, name = site
    place: Any = Place(file, name) if name else file
    return place, line


def kind_out(kind: Kind) -> WireKind:
    """A dtype and shape, to be sent."""
    return str(kind[0])[6:], kind[1]  # without "torch."


def kind_in(kind: WireKind) -> Kind:
    """What `kind_out` has sent."""
    return getattr(torch, kind[0]), kind[1]


@lru_cache(maxsize=1024)
def signature_out(signature: Signature) -> WireSignature:
    """A signature, to be sent."""
    op, reduction, root, kinds, device, any_shape = signature
    return op, reduction, root, tuple(map(kind_out, kinds)), device, any_shape


@lru_cache(maxsize=1024)
def signature_in(signature: WireSignature) -> Signature:
    """What `signature_out` has sent."""
    op, reduction, root, kinds, device, any_shape = signature
    return Signature(op, reduction, root, tuple(map(kind_in, kinds)), device, any_shape)


def call_out(call: Call) -> WireCall:
    """A call, to be sent; the coordinator makes a `RemoteCall` of it."""
    group = call.group
    return (
        call.name, call.ordinal, call.number, group.ranks, group.tag,
        signature_out(call.signature), site_out(call.site), call.timeout, call.asynchronous,
        call.patient,
    )  # fmt: skip
