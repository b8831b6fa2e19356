"""What an index says is not believed: checks that all formats share.

Sizes are Python integers, and are checked before anything of that size is read or made. Pure.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ..errors import CheckpointError

MAX_NUMBER: Final = 2**63
MAX_DIMS: Final = 64
MAX_DEPTH: Final = 64


def short(value: Any) -> str:
    """`value` for a message: one line of at most some 80 characters, whatever it is."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of {value.bit_length()} bits"
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer too long for Python to print
        return f"a {type(value).__name__}"


def said(error: Exception) -> str:
    """What a library's error says, for a message: not too long, and possible to print."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return text[:200].encode("utf-8", "backslashreplace").decode()


def parse_json(data: bytes, file: Path) -> dict[str, Any]:
    """The JSON object that `data` is.

    Raises
    ------
    CheckpointError
        If it is none, or an object in it has a name twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(file, f"the name {short(again)} is there twice in one object")
        return made

    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise CheckpointError(
            file, f"is not JSON in UTF-8: byte {error.start} of it is {data[error.start]:#04x}"
        ) from None
    except RecursionError:
        raise CheckpointError(file, "is JSON nested too deeply to be an index") from None
    except ValueError as error:
        raise CheckpointError(file, f"is not JSON: {said(error)}") from None
    if not isinstance(found, dict):
        raise CheckpointError(file, f"holds {short(found)}; expected a JSON object")
    return found


def member(record: Any, key: str, kind: type, file: Path, parameter: str | None = None) -> Any:
    """What an object of JSON has under `key`.

    Raises
    ------
    CheckpointError
        If `record` is no object, or has no such member of this kind.
    """
    if not isinstance(record, dict):
        raise CheckpointError(file, f"found {short(record)}; expected an object", parameter)
    if key not in record:
        raise CheckpointError(file, f"has no {key!r} for {short(record)}", parameter)
    if not isinstance(record[key], kind):
        raise CheckpointError(
            file, f"{key} is {short(record[key])}; expected a {_JSON_WORDS[kind]}", parameter
        )
    return record[key]


_JSON_WORDS: Final[dict[Any, str]] = {str: "string", list: "list", dict: "JSON object"}


def whole(value: Any, what: str, file: Path, parameter: str | None = None) -> int:
    """`value` if it is an integer from 0 to 2**63 - 1.

    Raises
    ------
    CheckpointError
        If not; a bool or a float is none.
    """
    if type(value) is not int or not 0 <= value < MAX_NUMBER:
        raise CheckpointError(
            file,
            f"{what} is {short(value)}; expected a whole number from 0 to 2**63 - 1",
            parameter,
        )
    return value


def shape_of(
    value: Any, dtype: torch.dtype, file: Path, parameter: str, what: str = "shape"
) -> tuple[int, ...]:
    """`value` as a shape of which a tensor of `dtype` can exist.

    Raises
    ------
    CheckpointError
        If it is no list of sizes, or its bytes can't be counted in 63 bits.
    """
    if not isinstance(value, list | tuple):
        raise CheckpointError(
            file, f"{what} is {short(value)}; expected a list of sizes", parameter
        )
    if len(value) > MAX_DIMS:
        raise CheckpointError(
            file, f"{what} has {len(value)} dimensions; at most {MAX_DIMS} are possible", parameter
        )
    for size in value:
        if type(size) is not int or not 0 <= size < MAX_NUMBER:
            whole(size, f"a size in {what} {short(value)}", file, parameter)
    shape: tuple[int, ...] = tuple(value)
    if math.prod(size or 1 for size in shape) * dtype.itemsize >= MAX_NUMBER:
        raise CheckpointError(
            file, f"{what} {short(list(shape))} has more than 2**63 - 1 bytes", parameter
        )
    return shape


def name_ok(name: Any, file: Path) -> str:
    """`name` if it can be a parameter's.

    Raises
    ------
    CheckpointError
        If it is no string, or none that can be written as UTF-8.
    """
    if not isinstance(name, str):
        raise CheckpointError(file, f"a parameter's name is {short(name)}; expected a string")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            file, f"a parameter's name is {short(name)}; it can't be written as UTF-8"
        ) from None
    return name


def shallow(value: Any, file: Path) -> None:
    """Metadata that can be pickled and printed without a recursion that is too deep.

    Raises
    ------
    CheckpointError
        If it is nested deeper than anybody writes it.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for found in level
            if isinstance(found, dict | list)
            for item in (found.values() if isinstance(found, dict) else found)
        ]
        if not level:
            return
    raise CheckpointError(file, f"its metadata are nested deeper than {MAX_DEPTH} levels")


def tiles(
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]
) -> str | None:
    """What is wrong with `boxes` (start, shape) that should tile a tensor; None if they do."""
    if len(boxes) == 1 and boxes[0] == ((0,) * len(shape), shape):
        return None
    for start, size in boxes:
        if len(start) != len(shape) or len(size) != len(shape):
            return f"a part has start {short(start)} and shape {short(size)}"
        if any(s + n > whole for s, n, whole in zip(start, size, shape, strict=True)):
            return f"the part of shape {size} that starts at {start} reaches out of it"
    real = [box for box in boxes if math.prod(box[1])]
    held = sum(math.prod(size) for _, size in real)
    if held != math.prod(shape):
        return f"the parts have {held} elements together; expected {math.prod(shape)}"
    if len(real) < 2:
        return None
    # sweep along the dimension that is cut most: parts that end before the next begins are done
    axis = max(range(len(shape)), key=lambda dim: len({start[dim] for start, _ in real}))
    open_: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for start, size in sorted(real, key=lambda box: box[0][axis]):
        open_ = [box for box in open_ if box[0][axis] + box[1][axis] > start[axis]]
        for other, extent in open_:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(start, size, other, extent, strict=True)
            ):
                return f"the parts that start at {other} and {start} overlap"
        open_.append((start, size))
    return None
