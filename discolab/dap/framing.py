"""The base protocol: one JSON message after a ``Content-Length`` header, over any byte stream."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..runtime.errors import ArgumentError, DiscoError

_LENGTH = re.compile(rb"content-length:[ \t]*(\d{1,10})[ \t]*(?:\r\n|$)", re.IGNORECASE)
_END = b"\r\n\r\n"
_LONGEST_HEADER = 4096
_LONGEST = 16 * 2**20  # bytes of a message
_AT_ONCE = 65536


class BrokenStreamError(DiscoError):
    """What comes is not the protocol; nobody knows where the next message would begin."""


class Reader:
    """Cuts a stream into the contents of messages.

    Parameters
    ----------
    receive
        Gives up to so many bytes, at least one; b"" at the end of the stream.
    """

    def __init__(self, receive: Callable[[int], bytes]) -> None:
        self._receive = receive
        self._buffer = b""

    def read(self) -> bytes | None:
        """The content of the next message; None at the end of the stream.

        Raises
        ------
        BrokenStreamError
        """
        while (end := self._buffer.find(_END)) < 0:
            if len(self._buffer) > _LONGEST_HEADER:
                raise BrokenStreamError(f"no header in the first {_LONGEST_HEADER} bytes")
            if not self._more():
                return None
        header = self._buffer[:end]
        match = _LENGTH.search(header)
        if match is None or int(match[1]) > _LONGEST:
            raise BrokenStreamError(
                f"a header without a Content-Length of up to {_LONGEST}: {header[:80]!r}"
            )
        start, stop = end + len(_END), end + len(_END) + int(match[1])
        while len(self._buffer) < stop:
            if not self._more():
                return None
        content, self._buffer = self._buffer[start:stop], self._buffer[stop:]
        return content

    def _more(self) -> bool:
        found = self._receive(_AT_ONCE)
        self._buffer += found
        return bool(found)


def framed(message: Mapping[str, Any]) -> bytes:
    """The bytes of a message."""
    content = json.dumps(message, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return b"Content-Length: %d\r\n\r\n%b" % (len(content), content)


def message_of(content: bytes) -> dict[str, Any]:
    """The message with this content.

    Raises
    ------
    ArgumentError
        If it is no JSON object.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as exc:
        raise ArgumentError(f"a message that is no JSON: {exc}") from None
    if not isinstance(found, dict):
        raise ArgumentError(f"a message is a JSON object; got {content[:60]!r}")
    return found
