"""How a process that connects proves that it may: with keys, and with its session's token.

Between machines, keys encrypt and authenticate each connection (CURVE); within one, the system
keeps other users out. The first message on a connection is a `Hello` of fixed size, with a token
that only the session's processes know. Until it is accepted nothing else of the connection is
read, and nothing at all is unpickled.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from .frame import HEADER, HELLO, MAGIC, VERSION

WITHIN = 10.0  # seconds that a connection may take for it
_HELLO = struct.Struct("<8s32sIB")
_HEAD = HEADER.pack(MAGIC, VERSION, HELLO, 1, 0)
SIZE = _HELLO.size

T = TypeVar("T", bound=Hashable)


class Hello(NamedTuple):
    """What a peer says first: its rank, and which of its connections this is."""

    rank: int
    role: int = 0


def new_token() -> bytes:
    """A token for one session."""
    return secrets.token_bytes(32)


def token_for(token: bytes, node: int) -> bytes:
    """What one process of a session is told as the token; of another one it takes no connection.

    An address may be another process's by now, as the one that had it has died: that one must not
    take for its what was meant for the dead, nor may what was said to one be said to another again.
    """
    return hmac.digest(token, node.to_bytes(8, "big"), "sha256")


def say_hello(token: bytes, rank: int, role: int = 0) -> bytes:
    """The first message on a connection."""
    return _HELLO.pack(_HEAD, token, rank, role)


def is_hello(data: bytes) -> bool:
    """Whether a message is meant as a `Hello`."""
    return data[: len(_HEAD)] == _HEAD


def hear_hello(data: bytes, token: bytes) -> Hello | None:
    """Read a first message; None if its sender does not know the token, or says something else."""
    if len(data) != SIZE or not is_hello(data):
        return None
    _, given, rank, role = _HELLO.unpack(data)
    return Hello(rank, role) if hmac.compare_digest(given, token) else None


@dataclass(frozen=True)
class Keys:
    """Two key pairs, of a server and of its clients; each key 40 characters (Z85)."""

    session_public: str
    session_secret: str = field(repr=False)
    node_public: str
    node_secret: str = field(repr=False)

    @classmethod
    def fresh(cls) -> Keys:
        """New ones."""
        import zmq

        pairs = [zmq.curve_keypair(), zmq.curve_keypair()]
        return cls(*(key.decode() for pair in pairs for key in pair))

    @classmethod
    def of(cls, values: Any) -> Keys:
        """Keys from what was read.

        Raises
        ------
        ValueError
            If they are none, or do not belong together.
        """
        import zmq

        names = ("session_public", "session_secret", "node_public", "node_secret")
        if not isinstance(values, dict) or not all(isinstance(values.get(n), str) for n in names):
            raise ValueError("it does not hold the four keys")
        keys = cls(*(values[name] for name in names))
        pairs = ((keys.session_public, keys.session_secret), (keys.node_public, keys.node_secret))
        for public, secret in pairs:
            try:
                belongs = zmq.curve_public(secret.encode("ascii")).decode() == public
            except (zmq.ZMQError, ValueError):
                belongs = False
            if not belongs:
                raise ValueError("its keys are damaged")
        return keys

    def as_dict(self) -> dict[str, str]:
        """To be sent to a process of ours."""
        return asdict(self)


class Unauthenticated(Generic[T]):
    """Connections that have not proved which peer they are from; there is room for `most`.

    So they can't use up the file descriptors of this process. One thread uses it.
    """

    def __init__(self, most: int, hang_up: Callable[[T], object]) -> None:
        self._most, self._hang_up = most, hang_up
        self._all: dict[T, None] = {}  # the oldest first

    def add(self, connection: T) -> None:
        """Take in a new connection; the oldest may be hung up on for that."""
        self._all[connection] = None
        while len(self._all) > self._most:
            oldest = next(iter(self._all))
            del self._all[oldest]
            self._hang_up(oldest)

    def remove(self, connection: T) -> bool:
        """A peer is known now, or gone; gives whether it was here."""
        return self._all.pop(connection, self) is None

    def all(self) -> tuple[T, ...]:
        """The oldest first."""
        return tuple(self._all)

    def __contains__(self, connection: T) -> bool:
        return connection in self._all

    def __len__(self) -> int:
        return len(self._all)
