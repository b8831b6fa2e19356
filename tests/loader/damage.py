"""Ways to damage an index: as JSON, as a pickle, and as bytes. Each draws from the given `rng`."""

from __future__ import annotations

import copy
import json
import math
import pickle
import pickletools
import random
from collections.abc import Iterator
from typing import Any

NUMBERS = (
    -1, 0, 1, 2, 7, 8, 255, 256, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63,
    2**64 - 1, 2**64, 10**30, -(2**63), -(2**64),
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    *NUMBERS, 1.5, 1e308, math.nan, math.inf, True, False, None, "", "x", "raw", "float32", "F32",
    "bool", "../outside.bin", "/etc/passwd", "link.bin", "pipe", "sub", "sub/../../outside.bin",
    ".", "a\0b", "\ud800", "p0", "x" * 5000, [], {}, [[]], [0], [2**62, 2**62],
    [0, 2**62, 2**62], [-1], [1.0], [True], [1] * 100, {"name": "p0"},
)  # fmt: skip


def damage_json(data: bytes, rng: random.Random) -> bytes:
    try:
        root = json.loads(data)
        places = list(_places(root))
    except (ValueError, RecursionError):
        return damage_bytes(data, rng)
    if not places or rng.random() < 0.02:
        depth = rng.choice((50, 500, 100_000))
        return b'{"records":' + b"[" * depth + b"]" * depth * rng.randrange(2) + b"}"
    holder, key = rng.choice(places)
    how = rng.randrange(7)
    if how == 0:
        del holder[key]
    elif how == 1:
        other, place = rng.choice(places)
        holder[key] = copy.deepcopy(other[place])
    elif how == 2 and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    elif how == 3 and type(holder[key]) is int:
        holder[key] += rng.choice((-8, -1, 1, 2, 8, 2**32))
    elif how == 4 and isinstance(holder, dict):
        holder[rng.choice(("p0", "p1", "name", "", "../x", "\ud800"))] = holder.pop(key)
    else:
        holder[key] = copy.deepcopy(rng.choice(VALUES))
    text = json.dumps(root, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")
    if rng.random() < 0.05:  # a name twice, which no parsed JSON can hold
        text = text.replace(b'{"', b'{"p0": 1, "p0": 1, "', 1)
    return text


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    todo = [value]
    while todo:
        found = todo.pop()
        keys: Any = ()
        if isinstance(found, dict):
            keys = list(found)
        elif isinstance(found, list):
            keys = range(len(found))
        for key in keys:
            yield found, key
            todo.append(found[key])


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    if rng.random() < 0.3:  # near a signature of the zip, or a number in digits
        marks = [i for mark in (b"PK", b"offset", b"shape") for i in _all(data, mark)]
        at = min(len(data), rng.choice(marks or [at]) + rng.randrange(50))
    how = rng.randrange(10)
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + data[at + rng.randrange(1, 20) :]
    if how == 2:
        return data[:at] + rng.randbytes(rng.randrange(1, 20)) + data[at:]
    if how == 3:
        size = rng.choice((1, 2, 4, 8))
        number = rng.choice(NUMBERS) % 256**size
        return data[:at] + number.to_bytes(size, "little") + data[at + size :]
    if how == 4:
        begin = rng.randrange(len(data) + 1)
        return data[:at] + data[begin : begin + rng.randrange(1, 200)] + data[at:]
    if how == 5:
        digits = str(rng.choice(VALUES)).encode("utf-8", "surrogatepass")
        return data[:at] + digits + data[at + rng.randrange(4) :]
    if how == 6:
        return rng.choice(
            (b"", b"\0", b"{}", b"PK\x05\x06" + bytes(18), data + data, data * 0 + b"[]")
        )
    if how == 7 and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    return data[:at] + rng.randbytes(1) + data[at + 1 :]


def _all(data: bytes, mark: bytes) -> list[int]:
    found, at = [], data.find(mark)
    while at >= 0 and len(found) < 200:
        found.append(at)
        at = data.find(mark, at + 1)
    return found


def damage_pickle(data: bytes, rng: random.Random) -> bytes:
    """The same with one opcode of its pickle (or of one of them) changed."""
    starts = [i for mark in (b"\x80\x02", b"\x80\x04") for i in _all(data, mark)]
    begin = rng.choice(starts) if starts else 0
    try:
        ops = [(op, arg, at or 0) for op, arg, at in pickletools.genops(data[begin:])]
    except Exception:  # it was damaged before
        return damage_bytes(data, rng)
    number = rng.randrange(len(ops))
    if rng.random() < 0.5:  # what has an argument: sizes, names, offsets
        number = rng.choice([i for i, (_, arg, _) in enumerate(ops) if arg is not None])
    _, arg, at = ops[number]
    at += begin
    end = begin + ops[number + 1][2] if number + 1 < len(ops) else at + 1
    old = data[at:end]
    how = rng.randrange(6)
    if how == 0:
        new = b""
    elif how == 1:
        new = old + old
    elif how == 2:
        new = rng.choice(pickletools.opcodes).code.encode("latin1") + rng.randbytes(
            rng.randrange(6)
        )
    elif how == 3 and isinstance(arg, int):
        number = rng.choice(NUMBERS)
        new = pickle.dumps(number, 2)[2:-1]
    elif how == 4:
        new = pickle.dumps(rng.choice(VALUES), 2)[2:-1]
    else:
        other = rng.randrange(len(ops) - 1)
        new = data[begin + ops[other][2] : begin + ops[other + 1][2]]
    # a zip's record keeps its size where it can: padded with opcodes that do nothing together
    short = len(old) - len(new)
    if short > 1 and data.startswith(b"PK"):
        new += (b"(N1" if short % 2 else b"") + b"N0" * ((short - short % 2 * 3) // 2)
    return data[:at] + new + data[end:]
