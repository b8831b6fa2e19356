"""Messages of very many frames: the frames as one, with their sizes behind the body.

A parcel has room for so many parts only. Stateless.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from ...runtime.protocol import Message

MOST = 1000  # frames in a parcel
_MARK = b"MANY"  # no message of runtime/protocol.py begins so
_HEAD = struct.Struct("<4sQ")
_ALIGN = 64


def gather(message: Message) -> Message:
    """The message itself, or one of a single frame that says the same."""
    if len(message.frames) <= MOST:
        return message
    sizes = [memoryview(frame).nbytes for frame in message.frames]
    parts: list[Any] = []
    for frame, size in zip(message.frames, sizes, strict=True):
        parts += (frame, bytes(-size % _ALIGN))
    tail = struct.pack(f"<{len(sizes)}Q", *sizes)
    return Message(_HEAD.pack(_MARK, len(sizes)) + tail + message.body, [b"".join(parts)])


def scatter(body: Any, frames: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Body and frames as they were before `gather`."""
    if len(frames) != 1 or bytes(body[:4]) != _MARK:
        return body, list(frames)
    count = _HEAD.unpack_from(body)[1]
    sizes = struct.unpack_from(f"<{count}Q", body, _HEAD.size)
    whole, at, found = memoryview(frames[0]), 0, []
    for size in sizes:
        found.append(whole[at : at + size])
        at += size + -size % _ALIGN
    return body[_HEAD.size + 8 * count :], found
