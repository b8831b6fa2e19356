"""The wire protocol: values to messages and back, for workers in other processes.

A message is a body of typed, versioned bytes, and *frames*: the bytes of tensors and arrays, as
they lie in memory. Each value in the body is a type index, then its content. No pickle is in it,
but for values of one type, `Sealed`, which `decode` never opens. docs/protocol.md has the layout
byte by byte. Stateless; any thread may encode and decode.

>>> body, frames = encode((3, 17, "add", [1.5, None]))
>>> decode(body, frames)
(3, 17, 'add', [1.5, None])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from .errors import ArgumentError
from .sealed import Sealed
from .wire_read import Reading, read_items
from .wire_tensors import Place, as_bytes
from .wire_types import HEADER, MAGIC, NO_FRAME, VERSION, ProtocolError, add_user_type
from .wire_write import OWN_TYPES, Writing, write_items

__all__ = [
    "Message",
    "ProtocolError",
    "Sealed",
    "VERSION",
    "decode",
    "encode",
    "open_all",
    "register_type",
]

_BARE = HEADER.pack(MAGIC, VERSION, 0)  # the header of a message without frames
_HEAD = HEADER.size


class Message(NamedTuple):
    """What goes over the wire.

    Attributes
    ----------
    body
        Header and values.
    frames
        The bytes of tensors, arrays and buffers: flat views of bytes. What they show is the
        sender's own memory, which must not change until it is sent.
    """

    body: bytes
    frames: list[Any]


def encode(value: Any, pickled: bool = True) -> Message:
    """Make a message of a value.

    Parameters
    ----------
    value
        Anything. What has no type of its own on the wire (a function, a class, a module, a
        `Pickled`, an object of any other class) is pickled, its tensors and arrays apart.
    pickled
        Whether that is allowed.

    Raises
    ------
    ArgumentError
        If something in it can't be pickled, or must not be here, or is nested too deep.
    """
    parts: list[Any] = [_BARE]
    out = Writing(parts, pickled)
    write_items((value,), parts.append, out, 0)
    if out.later:
        out.finish()
    frames = out.frames
    if frames:
        if len(frames) >= NO_FRAME:
            raise ArgumentError(f"{len(frames)} tensors are more than a message can carry")
        parts[0] = HEADER.pack(MAGIC, VERSION, len(frames))
    return Message(b"".join(parts), frames)


def decode(
    body: Any, frames: Sequence[Any] = (), trusted: bool = True, place: Place | None = None
) -> Any:
    """The value of a message. Nothing is unpickled: a `Sealed` stands for each pickle.

    Parameters
    ----------
    body, frames
        As they came: buffers of any kind. A tensor lives in its frame where that may be written
        and is aligned, so the frame is not to be used for anything else; otherwise in a copy.
    trusted
        False refuses pickles.
    place
        ``place(tensor, device)`` gives the tensor to use for one that was on another device
        than the CPU; without it such a tensor is on the CPU.

    Raises
    ------
    ProtocolError
        If this is no message of this version of the protocol, or torn, or too long.
    """
    if type(body) is not bytes:
        body = bytes(as_bytes(body, "the body of a message"))
    if frames or not body.startswith(_BARE):
        _check_header(body, len(frames))
        frames = [as_bytes(frame, f"frame {i}") for i, frame in enumerate(frames)]
    msg = Reading(body, frames, trusted, place)
    (value,), end = read_items(msg, _HEAD, 1, 0)
    if end != len(body):
        raise ProtocolError(
            f"malformed message: {len(body) - end} bytes behind its end, at offset {end}"
        )
    if msg.frames.next != len(frames):
        raise ProtocolError(
            f"malformed message: {len(frames)} frames, of which it uses {msg.frames.next}"
        )
    return value


def _check_header(body: bytes, frames: int) -> None:
    if len(body) < _HEAD:
        raise ProtocolError(f"malformed message: {len(body)} bytes, less than a header has")
    magic, version, count = HEADER.unpack_from(body)
    if magic != MAGIC:
        raise ProtocolError(f"malformed message: it begins with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise ProtocolError(
            f"the peer speaks version {version} of discolab's protocol, this process version "
            f"{VERSION} (discolab {_own_release()}): install the same discolab on both sides"
        )
    if count != frames:
        raise ProtocolError(f"malformed message: {count} frames by its header, {frames} came")


def _own_release() -> str:
    try:
        return metadata.version("discolab")
    except metadata.PackageNotFoundError:
        return "of unknown release"


def open_all(value: Any, place: Place | None = None) -> Any:
    """A decoded value with every `Sealed` in its containers opened.

    Raises what unpickling raises.
    """
    kind = type(value)
    if kind is Sealed:
        return value.open(place)
    if kind is tuple or kind is list or kind is set or kind is frozenset:
        return kind([open_all(item, place) for item in value])
    if kind is dict:
        return {open_all(k, place): open_all(v, place) for k, v in value.items()}
    if kind is slice:
        return slice(*(open_all(v, place) for v in (value.start, value.stop, value.step)))
    return value


def register_type(
    cls: type,
    name: str,
    size: Callable[[Any], int],
    write: Callable[[Any, memoryview], object],
    read: Callable[[memoryview], Any],
) -> None:
    """Give objects of a class a type of their own on the wire, without pickle.

    Must be done in the controller's process and in each worker's.

    Parameters
    ----------
    cls
        The class; objects of a subclass are not meant.
    name
        What it is called on the wire, 1 to 200 bytes.
    size
        ``size(value)``: how many bytes the content has.
    write
        ``write(value, buffer)`` fills a buffer of that size.
    read
        ``read(buffer)`` makes the value of such a buffer; whatever it raises becomes a
        `ProtocolError`.

    Raises
    ------
    ArgumentError
        If the class has a type on the wire already, or the name belongs to another class.

    Examples
    --------
    >>> import struct
    >>> class Point:
    ...     def __init__(self, x, y):
    ...         self.x, self.y = x, y
    >>> pack = struct.Struct("<dd")
    >>> register_type(
    ...     Point,
    ...     "demo.Point",
    ...     lambda p: pack.size,
    ...     lambda p, buffer: pack.pack_into(buffer, 0, p.x, p.y),
    ...     lambda buffer: Point(*pack.unpack(buffer)),
    ... )
    >>> decode(*encode(Point(1, 2))).y
    2.0
    """
    if isinstance(cls, type) and cls in OWN_TYPES:
        raise ArgumentError(f"register_type: {cls.__qualname__} has a type on the wire already")
    add_user_type(cls, name, size, write, read)
