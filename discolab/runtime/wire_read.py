"""Bytes to values. Whatever the bytes are, the outcome is a value or a `ProtocolError`.

A `Reading` belongs to one call. Nothing is allocated before it is certain that the message
holds the bytes for it; each length is held against what is left, so reading takes time and
memory in proportion to the length of the message.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import wire_types as wire
from .arguments import Register
from .sealed import Sealed, read_table
from .wire_alias import read_again, read_alias
from .wire_tensors import Frames, Place, read_array, read_device, read_scalar, read_tensor
from .wire_types import (
    C128,
    DEEPEST,
    F64,
    INT,
    SMALL,
    STR,
    TUPLE,
    USER_BY_NAME,
    ProtocolError,
    bad,
    dtype_of,
    first_line,
    format_of,
    layout_of,
    read_length,
    struct_error,
)

_unpack_int = struct.Struct("<q").unpack_from
_MOST_ALIKE = 256  # keys of one dict or set that may have the same hash


class Reading:
    """One message while it is read."""

    __slots__ = ("body", "frames", "trusted")

    def __init__(
        self, body: bytes, frames: Sequence[memoryview], trusted: bool, place: Place | None
    ) -> None:
        self.body = body
        self.frames = Frames(frames, place)
        self.trusted = trusted


Reader = Callable[[Reading, int, int], tuple[Any, int]]


def read_items(msg: Reading, pos: int, count: int, depth: int) -> tuple[list[Any], int]:
    """`count` values from offset `pos` on, and the offset behind them.

    `depth` containers are around them.
    """
    body = msg.body
    items: list[Any] = []
    put = items.append
    try:
        for _ in range(count):
            kind = body[pos]
            if kind == SMALL:
                put(body[pos + 1])
                pos += 2
            elif kind == STR:
                n = body[pos + 1]
                start = pos + 2
                if n == 255:
                    n, start = read_length(body, pos + 1)
                end = start + n
                data = body[start:end]
                if len(data) != n:
                    bad(f"a string of {n} bytes with {len(data)} left", pos)
                try:
                    put(data.decode())
                except UnicodeDecodeError:
                    put(_odd_string(data, pos))
                pos = end
            elif kind == TUPLE:
                n = body[pos + 1]
                start = pos + 2
                if n == 0:
                    put(())
                    pos = start
                else:
                    if n == 255:
                        n, start = read_length(body, pos + 1)
                    if depth >= DEEPEST:
                        _too_deep(pos)
                    inner, pos = read_items(msg, start, n, depth + 1)
                    put(tuple(inner))
            elif kind == INT:
                put(_unpack_int(body, pos + 1)[0])
                pos += 9
            else:
                value, pos = _READERS[kind](msg, pos + 1, depth)
                put(value)
    except (IndexError, struct_error):
        _torn(body, pos)
    return items, pos


def _torn(body: bytes, pos: int) -> None:
    what = f"type index {body[pos]} begins" if pos < len(body) else "a value is due"
    raise ProtocolError(
        f"malformed message: it ends after {len(body)} bytes, within what begins at offset {pos} "
        f"({what} there)"
    ) from None


def _too_deep(pos: int) -> None:
    bad(f"values nested more than {DEEPEST} deep", pos)


# -- numbers and texts --------------------------------------------------------------------------


def _constant(value: Any) -> Reader:
    return lambda msg, pos, depth: (value, pos)


def _read_big(msg: Reading, pos: int, depth: int) -> tuple[int, int]:
    n, start = read_length(msg.body, pos)
    return int.from_bytes(msg.body[start : start + n], "little", signed=True), start + n


def _read_float(msg: Reading, pos: int, depth: int) -> tuple[float, int]:
    return F64.unpack_from(msg.body, pos)[0], pos + 8


def _read_complex(msg: Reading, pos: int, depth: int) -> tuple[complex, int]:
    return complex(*C128.unpack_from(msg.body, pos)), pos + 16


def _read_bytes(msg: Reading, pos: int, depth: int) -> tuple[bytes, int]:
    n, start = read_length(msg.body, pos)
    return msg.body[start : start + n], start + n


def _odd_string(data: bytes, pos: int) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as exc:
        bad(f"a string that is not UTF-8 ({exc.reason} at its byte {exc.start})", pos)


def _read_register(msg: Reading, pos: int, depth: int) -> tuple[Register, int]:
    return Register(_unpack_int(msg.body, pos)[0]), pos + 8


# -- containers ---------------------------------------------------------------------------------


def _nested(msg: Reading, pos: int, each: int, depth: int) -> tuple[list[Any], int]:
    """The items of a container, `each` for one that is counted."""
    n, start = read_length(msg.body, pos, each)
    if n and depth >= DEEPEST:
        _too_deep(pos)
    return read_items(msg, start, n * each, depth + 1)


def _read_list(msg: Reading, pos: int, depth: int) -> tuple[list[Any], int]:
    return _nested(msg, pos, 1, depth)


def _read_dict(msg: Reading, pos: int, depth: int) -> tuple[dict[Any, Any], int]:
    if msg.body[pos] == 0:
        return {}, pos + 1
    items, end = _nested(msg, pos, 2, depth)
    keys = items[::2]
    return _keyed(lambda: dict(zip(keys, items[1::2], strict=True)), keys, pos), end


def _set_of(kind: type) -> Reader:
    def read(msg: Reading, pos: int, depth: int) -> tuple[Any, int]:
        items, end = _nested(msg, pos, 1, depth)
        return _keyed(lambda: kind(items), items, pos), end

    return read


def _keyed(make: Callable[[], Any], keys: list[Any], pos: int) -> Any:
    """What `make` makes of keys, if each has a hash and comes once.

    Many keys of one hash are refused: n of them take n * n steps to store.
    """
    try:
        if len(keys) > _MOST_ALIKE:
            alike = max(Counter(map(hash, keys)).values())
            if alike > _MOST_ALIKE:
                bad(f"{alike} keys with the same hash, {_MOST_ALIKE} are possible", pos)
        found = make()
    except ProtocolError:
        raise
    except Exception as exc:  # hash and == of a user's class may raise anything
        bad(f"what can't be a key: {first_line(exc)}", pos)
    if len(found) != len(keys):
        bad(f"{len(keys)} keys, of which {len(found)} are different", pos)
    return found


def _read_slice(msg: Reading, pos: int, depth: int) -> tuple[slice, int]:
    if depth >= DEEPEST:
        _too_deep(pos)
    items, end = read_items(msg, pos, 3, depth + 1)
    return slice(*items), end


def _read_range(msg: Reading, pos: int, depth: int) -> tuple[range, int]:
    numbers = []
    end = pos
    for _ in range(3):
        if msg.body[end] not in (SMALL, INT, wire.BIG):
            bad("a range of something else than integers", end)
        (number,), end = read_items(msg, end, 1, depth)
        numbers.append(number)
    if numbers[2] == 0:
        bad("a range with step 0", pos)
    return range(*numbers), end


# -- torch and numpy ----------------------------------------------------------------------------


def _read_size(msg: Reading, pos: int, depth: int) -> tuple[torch.Size, int]:
    n, start = read_length(msg.body, pos, 8)
    return torch.Size(struct.unpack_from(f"<{n}q", msg.body, start)), start + 8 * n


def _coded(find: Callable[[int, int], Any]) -> Reader:
    return lambda msg, pos, depth: (find(msg.body[pos], pos), pos + 1)


def _read_device(msg: Reading, pos: int, depth: int) -> tuple[torch.device, int]:
    return read_device(msg.body, pos)


def _read_tensor(msg: Reading, pos: int, depth: int) -> tuple[Any, int]:
    return read_tensor(msg.body, pos, msg.frames)


def _read_alias(msg: Reading, pos: int, depth: int) -> tuple[Any, int]:
    return read_alias(msg.body, pos, msg.frames)


def _read_again(msg: Reading, pos: int, depth: int) -> tuple[Any, int]:
    return read_again(msg.body, pos, msg.frames)


def _read_array(msg: Reading, pos: int, depth: int) -> tuple[Any, int]:
    return read_array(msg.body, pos, msg.frames)


def _read_scalar(msg: Reading, pos: int, depth: int) -> tuple[Any, int]:
    return read_scalar(msg.body, pos)


# -- everything else ----------------------------------------------------------------------------


def _text(body: bytes, pos: int) -> tuple[str, int]:
    n, start = read_length(body, pos)
    end = start + n
    try:
        return body[start:end].decode(), end
    except UnicodeDecodeError as exc:
        bad(f"a name that is not UTF-8 ({exc.reason} at its byte {exc.start})", pos)


def _read_user(msg: Reading, pos: int, depth: int) -> tuple[Any, int]:
    name, at = _text(msg.body, pos)
    size, start = read_length(msg.body, at)
    user = USER_BY_NAME.get(name)
    if user is None:
        raise ProtocolError(
            f"a value of the user type {name[:80]!r}, at offset {pos} of a message, which is not "
            "registered in this process: call discolab.runtime.protocol.register_type here too"
        )
    end = start + size
    try:
        return user.read(memoryview(msg.body)[start:end]), end
    except Exception as exc:
        raise ProtocolError(
            f"malformed message: the function that reads the user type {name!r} raised "
            f"{type(exc).__name__}: {first_line(exc)}, at offset {start}"
        ) from exc


def _read_pickled(msg: Reading, pos: int, depth: int) -> tuple[Sealed, int]:
    body = msg.body
    if not msg.trusted:
        bad("a pickle, which is not accepted from this peer", pos)
    what, at = _text(body, pos)
    taken = msg.frames
    count, at = read_length(body, at, 0)
    first = taken.next
    if count > len(taken.all) - first:
        bad(f"a pickle with {count} frames where {len(taken.all) - first} are left", at)
    taken.next = first + count
    size, start = read_length(body, at)
    table = body[start : start + size]
    frames = tuple(taken.all[first : first + count])
    try:
        read_table(table, Frames(frames, dry=True))
    except ProtocolError as exc:
        raise ProtocolError(f"{exc} of a pickle's table, which is at offset {start}") from None
    size, start = read_length(body, start + size)
    return Sealed(what, body[start : start + size], table, frames), start + size


def _unknown(msg: Reading, pos: int, depth: int) -> Any:
    bad(f"{msg.body[pos - 1]} is no type index", pos - 1)


_READERS: list[Reader] = [_unknown] * 256
for _kind, _reader in {
    wire.NONE: _constant(None),
    wire.FALSE: _constant(False),
    wire.TRUE: _constant(True),
    wire.BIG: _read_big,
    wire.FLOAT: _read_float,
    wire.COMPLEX: _read_complex,
    wire.BYTES: _read_bytes,
    wire.LIST: _read_list,
    wire.DICT: _read_dict,
    wire.SET: _set_of(set),
    wire.FROZENSET: _set_of(frozenset),
    wire.SLICE: _read_slice,
    wire.RANGE: _read_range,
    wire.ELLIPSIS: _constant(...),
    wire.REGISTER: _read_register,
    wire.SIZE: _read_size,
    wire.DTYPE: _coded(dtype_of),
    wire.DEVICE: _read_device,
    wire.LAYOUT: _coded(layout_of),
    wire.MEMORY_FORMAT: _coded(format_of),
    wire.TENSOR: _read_tensor,
    wire.ALIAS: _read_alias,
    wire.AGAIN: _read_again,
    wire.ARRAY: _read_array,
    wire.SCALAR: _read_scalar,
    wire.USER: _read_user,
    wire.PICKLED: _read_pickled,
}.items():
    _READERS[_kind] = _reader
