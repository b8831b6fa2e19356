"""The messages between the coordinator and its clients, as plain values. No state.

A message is a tuple that begins with one of the words below. A client's message continues with the
ordinal of the command that its worker runs and the one at which the last interrupt ended. Then, as
in most of the coordinator's, comes the number by which the client knows the collective or message.

A client says                          the coordinator says
JOIN   calls a collective             GO      all are there, and here is what they gave
WAIT   waits now for an earlier one   RUN     all are there: do it over a process group
OVER   has done its part of it        FAIL    it can't be
BROKEN could not                      LATE    its deadline: the members missing
LEFT   has given up, or failed        MISSING the members missing so far
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

import pickle
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...runtime.sources import display_name
from ..call import Call, Kind, Signature, Site
from ..groups import Group, group_of

SERVICE = "ccl"

JOIN, WAIT, OVER, BROKEN, LEFT = "join", "wait", "over", "broken", "left"
LATE, POLL = "late", "poll"
SEND, RECV, TAKE, PEEK, STORE = "send", "recv", "take", "peek", "store"
STATISTICS, HELLO, USE, FORGET = "statistics", "hello", "use", "forget"
DISMISS, LOOK = "dismiss", "look"
GO, RUN, FAIL, MISSING, MESSAGE, FETCH = "go", "run", "fail", "missing", "message", "fetch"
GIVE, DROP, ANSWER, CLOSE = "give", "drop", "answer", "close"

WireKind = tuple[str, tuple[int, ...] | None]
WireSite = tuple[str, int, str] | None
WireCall = tuple[int, int, bytes]
"""The ordinal of a call's command, its number, and all that it has in common with others."""

Alike = tuple[str, Group, Signature, Site | None, float | None, bool, bool]
"""name, group, signature, site, timeout, asynchronous, patient: of each call at one place."""


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
    dtype, shape = kind
    return str(dtype)[6:], None if shape is None else tuple(shape)  # without "torch."


def kind_in(kind: WireKind) -> Kind:
    """What `kind_out` has sent."""
    return getattr(torch, kind[0]), kind[1]


def call_out(call: Call) -> WireCall:
    """A call, to be sent; the coordinator makes a `RemoteCall` of it."""
    alike = _alike_out(
        call.name, call.group, call.signature, site_out(call.site), call.timeout,
        call.asynchronous, call.patient,
    )  # fmt: skip
    return call.ordinal, call.number, alike


# A program makes most of its calls again and again: both ends know those that they have seen.


@lru_cache(maxsize=1024)
def _alike_out(
    name: str, group: Group, signature: Signature, site: WireSite, *rest: float | bool | None
) -> bytes:
    op, reduction, root, kinds, device, any_shape = signature
    wire = op, reduction, root, tuple(map(kind_out, kinds)), device, any_shape
    return pickle.dumps((name, group.ranks, group.tag, wire, site, *rest))


@lru_cache(maxsize=1024)
def alike_in(data: bytes) -> Alike:
    """What calls have in common, of the bytes in `call_out`."""
    name, ranks, tag, wire, site, timeout, asynchronous, patient = pickle.loads(data)
    op, reduction, root, kinds, device, any_shape = wire
    signature = Signature(op, reduction, root, tuple(map(kind_in, kinds)), device, any_shape)
    return name, group_of(ranks, tag), signature, site_in(site), timeout, asynchronous, patient
