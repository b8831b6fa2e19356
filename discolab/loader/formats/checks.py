"""What an index says is not believed: what all formats check, of what they read and of files.

Sizes are Python integers, and are checked before anything of that size is read or made. Only
regular files within the checkpoint's folder are opened, so nothing here waits for a pipe, and no
more is read than an index can have. A `Builder` collects what an index says of names, files and
ranges, and makes the catalog once all is well.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
import reprlib
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ...runtime.arguments import parse_dtype
from ...runtime.errors import ArgumentError
from ...runtime.interrupts import shield
from ..catalog import Catalog, Entry, File, Piece
from ..errors import CheckpointError
from ..progress import Preparation

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


# -- names of dtypes -------------------------------------------------------------------------------


TENSOR_CACHE: Final[Mapping[str, torch.dtype]] = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    # as older TVMs wrote them
    "e4m3_float8": torch.float8_e4m3fn,
    "e5m2_float8": torch.float8_e5m2,
    "uint1": torch.bool,
}

SAFETENSORS: Final[Mapping[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}


def _names(table: Mapping[str, torch.dtype]) -> dict[torch.dtype, str]:
    found: dict[torch.dtype, str] = {}
    for name, dtype in table.items():
        found.setdefault(dtype, name)
    return found


# What writers call each dtype: the first of its names.
TENSOR_CACHE_NAMES: Final[Mapping[torch.dtype, str]] = _names(TENSOR_CACHE)
SAFETENSORS_NAMES: Final[Mapping[torch.dtype, str]] = _names(SAFETENSORS)

# What a tensor of torch itself may be to be read as plain bytes: no quantised or packed ones.
PLAIN: Final = frozenset(
    [*TENSOR_CACHE.values(), *SAFETENSORS.values(), torch.complex32, torch.complex128]
)


def dtype_of(
    names: Mapping[str, torch.dtype], value: Any, file: Path, parameter: str
) -> torch.dtype:
    """The dtype that a format calls so.

    Raises
    ------
    CheckpointError
        If it has no such name; the message lists the known ones.
    """
    found = names.get(value) if isinstance(value, str) else None
    if found is None:
        known = ", ".join(names)
        raise CheckpointError(
            file, f"dtype {short(value)} is not known; expected one of {known}", parameter
        )
    return found


def cast_dtype(dtype: Any) -> torch.dtype | None:
    """What floating-point parameters are to be cast to, from a dtype or its name; None stays None.

    Raises
    ------
    ArgumentError
        If it is none, or not a floating-point one.
    """
    found = None if dtype is None else parse_dtype(dtype)
    if found is not None and not found.is_floating_point:
        raise ArgumentError(
            f"dtype= is what floating-point parameters are cast to, such as bfloat16; got {found}"
        )
    return found


# -- files -----------------------------------------------------------------------------------------


MAX_INDEX_BYTES: Final = 100 * 2**20

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def file_size(path: Path, parameter: str | None = None) -> int:
    """Bytes of a regular file.

    Raises
    ------
    CheckpointError
        If it is not there, or something else than a file.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise CheckpointError(path, "there is no such file", parameter) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"can't be looked at: {said(error)}", parameter) from None
    _regular(found, path, parameter)
    return found.st_size


def open_file(path: Path, parameter: str | None = None) -> io.FileIO:
    """A regular file, opened for reading; it never waits.

    Raises
    ------
    CheckpointError
        If it can't be opened, or is something else than a file.
    """
    file_size(path, parameter)  # so that no device is opened
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        with shield():  # an interrupt in between would leave it open
            file = io.FileIO(os.open(path, flags), "rb", closefd=True)
    except OSError as error:
        raise CheckpointError(path, f"can't be opened: {said(error)}", parameter) from None
    try:
        _regular(os.fstat(file.fileno()), path, parameter)
    except CheckpointError:
        file.close()
        raise
    return file


def read_index(path: Path) -> bytes:
    """The whole of an index file.

    Raises
    ------
    CheckpointError
        If it is no regular file, or larger than an index can be.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_INDEX_BYTES:
            raise CheckpointError(
                path, f"has {size} bytes; an index has at most {MAX_INDEX_BYTES}: is it one?"
            )
        return _read(file, size, path)


def read_at(file: io.FileIO, offset: int, count: int, path: Path) -> bytes:
    """`count` bytes from `offset`; both are checked against the file's size before.

    Raises
    ------
    CheckpointError
        If the file ends before, or `count` is more than an index can have.
    """
    size = os.fstat(file.fileno()).st_size
    if not 0 <= offset <= offset + count <= size:
        raise CheckpointError(
            path, f"ends at {size} bytes; expected {count} bytes of its index at {offset}"
        )
    if count > MAX_INDEX_BYTES:
        raise CheckpointError(
            path, f"says that its index has {count} bytes; at most {MAX_INDEX_BYTES} are allowed"
        )
    file.seek(offset)
    return _read(file, count, path)


def inside(folder: Path, name: Any, index: Path, parameter: str | None = None) -> Path:
    """The file that an index calls `name`: absolute, without links, and within `folder`.

    A link out of the folder is followed in one case: from a snapshot in the cache of the Hugging
    Face hub to the blobs of the same repository, since that is how this cache looks.

    Parameters
    ----------
    folder
        Absolute, without links.
    index
        Where the name was found, for messages.

    Raises
    ------
    CheckpointError
        If it is absolute or leaves the folder, by its name or by a link.
    """
    if not isinstance(name, str) or not name:
        raise CheckpointError(
            index, f"data path {short(name)} is not the name of a file", parameter
        )
    if os.path.isabs(name):
        raise CheckpointError(
            index,
            f"data path {short(name)} is absolute; expected one within the checkpoint's folder",
            parameter,
        )
    try:
        path = _followed(folder / name)
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            index, f"data path {short(name)} can't be followed: {said(error)}", parameter
        ) from None
    if not path.is_relative_to(folder) and path.parent != _blobs(folder):
        raise CheckpointError(
            index,
            f"data path {short(name)} leaves the checkpoint's folder, to {short(str(path))}; "
            "copy the file into the folder",
            parameter,
        )
    return path


def resolved(path: Path) -> Path:
    """`path` absolute and without links, whether it is there or not.

    Raises
    ------
    CheckpointError
        If it can't be followed.
    """
    try:
        return _followed(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(path, f"can't be followed: {said(error)}") from None


def _followed(path: Path) -> Path:
    """`path` without links; links that loop raise, which `resolve` lets pass since Python 3.13."""
    followed = path.resolve()
    try:
        followed.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise
    return followed


def _read(file: io.FileIO, count: int, path: Path) -> bytes:
    parts: list[bytes] = []
    while count:
        try:
            part = file.read(count)
        except OSError as error:
            raise CheckpointError(path, f"can't be read: {said(error)}") from None
        if not part:
            raise CheckpointError(path, f"ended {count} bytes early while it was read")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _regular(found: os.stat_result, path: Path, parameter: str | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = next((word for test, word in _KINDS if test(found.st_mode)), "something else")
        raise CheckpointError(path, f"is {kind}; expected a file", parameter)


def _blobs(folder: Path) -> Path | None:
    return folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else None


# -- a catalog in the making -----------------------------------------------------------------------


Shape = tuple[int, ...]


class Builder:
    """Collects files, ranges and entries; `done` makes the catalog of them.

    Attributes
    ----------
    index
        The file that says all this; named in messages that are about no data file.
    """

    def __init__(self, path: Path, format: str, index: Path) -> None:
        self.path = path
        self.format = format
        self.index = index
        self.files: list[File] = []
        self.entries: dict[str, Entry] = {}
        self._numbers: dict[str, int] = {}
        self._ranges: dict[int, list[tuple[int, int, str]]] = {}

    def file(self, path: Path, size: int | None = None, md5: str | None = None) -> int:
        """The number of a data file, which is looked at unless its size is given."""
        number = self._numbers.get(str(path))
        if number is None:
            number = self._numbers[str(path)] = len(self.files)
            size = file_size(path) if size is None else size
            self.files.append(File.seen(str(path), size, md5))
        return number

    def claim(self, file: int, offset: int, nbytes: int, name: str) -> None:
        """Bytes of a file that belong to `name` and to nothing else.

        Raises
        ------
        CheckpointError
            If the file ends before.
        """
        found = self.files[file]
        if offset + nbytes > found.size:
            raise CheckpointError(
                found.path,
                f"has {found.size} bytes; expected {nbytes} bytes at {offset}, as "
                f"{self.index.name} says",
                name,
            )
        if nbytes:
            self._ranges.setdefault(file, []).append((offset, offset + nbytes, name))

    def entry(
        self,
        name: Any,
        shape: Shape,
        dtype: torch.dtype,
        pieces: Sequence[Piece],
        stored: torch.dtype | None = None,
    ) -> None:
        """A parameter whose pieces lie in their files already.

        Raises
        ------
        CheckpointError
            If the name is there, or the pieces do not tile the shape.
        """
        Preparation.count("checking the index, tensor")
        name_ok(name, self.index)
        if name in self.entries:
            raise CheckpointError(self.index, "is there twice", name)
        wrong = tiles([(piece.start, piece.shape) for piece in pieces], shape)
        if wrong:
            raise CheckpointError(self.index, f"shape {shape}: {wrong}", name)
        self.entries[name] = Entry(name, shape, dtype, stored or dtype, tuple(pieces))

    def whole(
        self,
        name: Any,
        shape: Shape,
        dtype: torch.dtype,
        file: int,
        offset: int,
        stored: torch.dtype | None = None,
    ) -> None:
        """A parameter that lies in one piece in C order."""
        name_ok(name, self.index)
        self.claim(file, offset, math.prod(shape) * (stored or dtype).itemsize, name)
        piece = Piece(file, offset, (0,) * len(shape), shape)
        self.entry(name, shape, dtype, [piece], stored)

    def done(self, metadata: Mapping[str, Any] | None = None) -> Catalog:
        """The catalog.

        Raises
        ------
        CheckpointError
            If two ranges of a file overlap.
        """
        for number, ranges in self._ranges.items():
            ranges.sort()
            for (_, end, one), (begin, _, other) in itertools.pairwise(ranges):
                if begin < end:
                    raise CheckpointError(
                        self.files[number].path,
                        f"begins at byte {begin}, and {one!r} ends at {end}: they overlap; "
                        f"expected each to have its own bytes, see {self.index.name}",
                        other,
                    )
        about = dict(metadata or {})
        shallow(about, self.index)
        return Catalog(str(self.path), self.format, tuple(self.files), self.entries, about)
