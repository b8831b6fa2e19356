"""What a router and its routes know of each other: a way to one peer, and what serves it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from ...runtime.protocol import Message
from ...transport.frame import Frame
from ...transport.loop import EventLoop
from .addresses import Address


class Way(ABC):
    """How one peer is reached."""

    same_machine = False

    @abstractmethod
    def pack(self, message: Message) -> Frame:
        """Copy a message into a frame for this way; any thread.

        Raises
        ------
        OSError
            If there is no memory for it.
        """

    @abstractmethod
    def discard(self, frame: Frame) -> None:
        """A frame will not be sent; any thread."""

    @abstractmethod
    def send(self, frame: Frame) -> None:
        """Send or queue it, and never block; under the peer's lock."""

    @abstractmethod
    def close(self) -> None:
        """Send no more, and let go of all; on the receiving thread, under the peer's lock."""


class End(ABC):
    """A node's end of one kind of route; all of it but `way`'s is the receiving thread's own."""

    @abstractmethod
    def addressed(self, address: Address) -> Address:
        """A node's address, with what it is reached by here."""

    @abstractmethod
    def way_to(self, node: int, address: Address) -> Way:
        """The way to a peer."""

    @abstractmethod
    def drain(self, node: int, since: float) -> bool:
        """Deliver what a dead node has sent; whether that is all. It died at `since`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all but the ways."""


class Station(Protocol):
    """What an `End` has of its router."""

    loop: EventLoop

    def arrived(self, node: int, data: Any, fd: int | None, dropped: Any) -> None:
        """A message has come; the receiving thread."""

    def ended(self, node: int, why: str) -> None:
        """A node says what is no message of ours: it is lost."""

    def has(self, node: int) -> bool:
        """Whether there is such a node beside this one."""
