"""The processes of a session reach each other: the interface of `LocalPort` and `TcpPort`.

Processes are numbered from 0. Each has ports of its own, and the address of another one's gives a
`Connection` to it. A connection carries frames one way; it never loses, repeats or reorders them,
and never blocks the sender. Only the event loop's thread may call what does not say otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from .frame import Frame, pack

Arrived = Callable[[int, Any, int | None, Any], object]
"""``arrived(sender, data, fd, dropped)``, a frame to be unpacked (see `frame.unpack`)."""


class Connection(ABC):
    """A way to a peer, opened when there is something to say."""

    same_machine = False

    def pack(self, body: bytes, parts: Sequence[Any]) -> Frame:
        """Copy a message into a frame for this way; any thread.

        Raises
        ------
        OSError
            If there is no memory for it.
        """
        return pack(body, parts)

    @abstractmethod
    def discard(self, frame: Frame) -> None:
        """Give a frame back that will not be sent; any thread."""

    @abstractmethod
    def send(self, frame: Frame) -> None:
        """Send or queue a frame; never blocks. Any thread, one at a time."""

    @abstractmethod
    def close(self) -> None:
        """Send no more, and close it, while no other thread sends."""


class Port(ABC):
    """Where the other processes reach this one. Only those that know the session's token do.

    Attributes
    ----------
    address
        For `connect` in another process.
    """

    address: str

    @abstractmethod
    def connect(self, address: str, node: int) -> Connection:
        """The way to another process, of that number; no other one takes it."""

    @abstractmethod
    def drain(self, sender: int, since: float) -> bool:
        """Deliver what a process that died at `since` has sent; gives whether that is all."""

    @abstractmethod
    def close(self) -> None:
        """Close all but the connections that `connect` gave."""
