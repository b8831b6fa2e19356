"""Files of a checkpoint: looked at and opened without trust in what an index says of them.

Only regular files within the checkpoint's folder are opened, so nothing here waits for a pipe, and
no more is read than an index can have. Stateless.
"""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import Any, Final

from ...runtime.interrupts import shield
from ..errors import CheckpointError
from .checks import said, short

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
        path = (folder / name).resolve()
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
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(path, f"can't be followed: {said(error)}") from None


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
