"""What nodes tell each other of how they are reached."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from ...engines.nodes.machines import machine

_NETWORK = "/proc/self/ns/net"


class Address(NamedTuple):
    """Where a node is reached.

    Attributes
    ----------
    place
        Equal for nodes that can reach each other by unix sockets.
    name
        The address of its unix socket there; "" if it has none.
    endpoint
        Its TCP port; "" if it has none.
    gpus
        Equal for nodes of a place that can open each other's GPU memory; "": it can't.
    """

    place: str
    name: str = ""
    endpoint: str = ""
    gpus: str = ""


def address_of(told: Any) -> Address:
    """An address from what came.

    Raises
    ------
    ValueError
        If it is none.
    """
    fields = tuple(told)
    if len(fields) != 4 or not all(isinstance(field, str) for field in fields):
        raise ValueError(f"{told!r} is no address of a node")
    return Address(*fields)


def place_here() -> str:
    """The place of this process: machine, network namespace, user."""
    try:
        network = os.stat(_NETWORK).st_ino
    except OSError:
        network = 0
    return f"{machine()}/{network}/{os.geteuid()}"
