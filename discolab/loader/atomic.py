"""A new checkpoint takes the place of an old one in its folder: at one moment, or not at all.

The new files have names that no index refers to; the index, or the only file, is put in place by
one rename; then the files of the old checkpoint go. What is under way stands in a journal, which is
also the lock, so that the next save can clear what a killed one has left. The controller alone does
this; workers only write into files that are there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterable
from typing import Any, Self

from ..runtime.errors import ArgumentError
from ..runtime.interrupts import shield
from .arrangement import Arranged, NewFile
from .errors import CheckpointError
from .files import (
    close_in_the_end,
    create_file,
    pwrite_all,
    remove,
    sync_folder,
    write_new,
    writing,
)
from .formats import safetensors
from .formats.opening import SAVING

JOURNAL = SAVING
_PART = ".part"  # of a file that takes the place of one with its name
_INDEXES = {
    "tensor-cache": re.compile(r"(tensor|ndarray)-cache(-b16)?\.json"),
    "safetensors": re.compile(r".+\.safetensors\.index\.json"),
}
_FILES = (".safetensors", ".json", ".bin", ".pt", ".pth")
_TAG = re.compile(r"(-v\d+)?$")
_DATA = re.compile(r".+\.(bin|safetensors|part)")


class Replacement:
    """A folder while a new checkpoint is written into it, beside an old one if there is one.

    Use it in ``with``: without `commit` all that is new is removed at the end.

    Attributes
    ----------
    folder
        Absolute.
    tag
        For the names of data files: with it none is there yet.
    single
        Whether the only file of a checkpoint can do without an index.

    Raises
    ------
    ArgumentError
        If `folder` is no path, or has a checkpoint of another format.
    CheckpointError
        If it can't be written to, or another save is doing that.
    """

    _lock: int | None = None  # here, as an interrupt may come before `__init__` has begun

    def __init__(self, folder: str | os.PathLike[str], format: str) -> None:
        try:
            if not os.fsencode(folder):
                raise ValueError("it is empty")
            self.folder = os.path.realpath(os.fsdecode(folder))
        except (TypeError, ValueError) as exc:
            raise ArgumentError(
                f"give the folder to write to as a string or a Path, got {folder!r}: {exc}"
            ) from None
        self._format = format
        self._made: list[str] = []  # folders
        self._new: list[str] = []
        self._gone: list[str] = []  # what the old checkpoint had, to be removed after `commit`
        self._committed = False

    def __enter__(self) -> Self:
        try:
            with writing(self.folder):
                self._make_folder()
                self._begin()
            return self
        except BaseException:  # an interrupt at the very end, too: nobody calls `__exit__` then
            self._end()
            raise

    def _begin(self) -> None:
        with shield():  # an interrupt in between would leave the folder locked
            self._lock = _locked(self.folder)
            # an interrupt may come before the first line of `__exit__`
            self._unlock = close_in_the_end(self, self._lock)
        _clear(self.folder)
        there = sorted(os.listdir(self.folder))
        _refuse_other_formats(self.folder, there, self._format)
        self._old_indexes = [n for n in there if _INDEXES[self._format].fullmatch(n)]
        self._old = {name for i in self._old_indexes for name in referred(self.folder, i)}
        loose = {name for name in there if name.endswith(".safetensors")} - self._old
        if self._format == "safetensors" and safetensors.SINGLE in loose:
            self._old.add(safetensors.SINGLE)
        self.single = not self._old_indexes and loose <= {safetensors.SINGLE}
        self.tag = _free_tag(there)

    def create(self, arranged: Arranged) -> list[str]:
        """Make the data files with all their room and their heads.

        Returns
        -------
        list of str
            Where each of `arranged.files` is to be written.
        """
        names = [self._place(file) for file in arranged.files]
        index = self.index_name(arranged)
        self._old -= {file.name for file in arranged.files}  # replaced by the rename
        self._new = [*names, *([index + _PART] if index else [])]
        self._write_journal(index)
        remove(self.folder, [name for name in self._new if name.endswith(_PART)])
        paths = [os.path.join(self.folder, name) for name in names]
        for path, file in zip(paths, arranged.files, strict=True):
            with writing(path):
                create_file(path, file)
        return paths

    def index_name(self, arranged: Arranged) -> str | None:
        """The index that the checkpoint gets; None: it is one file that needs none."""
        if self._format == "tensor-cache":
            return "tensor-cache.json"
        alone = [file.name for file in arranged.files] == [safetensors.SINGLE]
        return None if alone else safetensors.INDEX

    def commit(self, arranged: Arranged, index: bytes) -> None:
        """Put the new checkpoint in place; the end of ``with`` removes the old one.

        All of the data must be on the disk.
        """
        name = self.index_name(arranged)
        final = os.path.join(self.folder, name or safetensors.SINGLE)
        self._gone = [*(index for index in self._old_indexes if index != name), *self._old]
        with writing(final):
            if name:
                write_new(final + _PART, index)
            sync_folder(self.folder)
            with shield():  # an interrupt in between would take the new files for given up
                os.replace(final + _PART, final)
                self._committed = True
            sync_folder(self.folder)

    def __exit__(self, *_: object) -> None:
        remove(self.folder, self._gone if self._committed else self._new)
        self._end()

    def _end(self) -> None:
        with shield():
            if self._lock is not None:
                remove(self.folder, [JOURNAL])
                self._unlock()
                self._lock = None
        if not self._committed:
            for folder in self._made:
                try:
                    os.rmdir(folder)
                except OSError:
                    break

    def _make_folder(self) -> None:
        if os.path.exists(self.folder) and not os.path.isdir(self.folder):
            raise CheckpointError(
                self.folder, "is a file; a checkpoint is written into a folder: give one"
            )
        if not os.path.exists(self.folder) and self.folder.endswith(_FILES):
            raise CheckpointError(
                self.folder, "would be a folder, and has the name of a file: give a folder's"
            )
        missing = self.folder
        while not os.path.isdir(missing):
            self._made.append(missing)
            missing = os.path.dirname(missing)
        os.makedirs(self.folder, exist_ok=True)

    def _place(self, file: NewFile) -> str:
        return file.name + (_PART if file.name == safetensors.SINGLE else "")

    def _write_journal(self, index: str | None) -> None:
        assert self._lock is not None
        old = sorted({*self._old_indexes, *self._old} - {index})
        text = json.dumps({"index": index, "new": self._new, "old": old}).encode()
        with writing(os.path.join(self.folder, JOURNAL)):
            os.ftruncate(self._lock, 0)
            pwrite_all(self._lock, text, 0)
            os.fsync(self._lock)
            sync_folder(self.folder)


# -- what is there ---------------------------------------------------------------------------


def referred(folder: str, index: str) -> set[str]:
    """The data files that an index names, of those right in its folder; none if unreadable."""
    try:
        with open(os.path.join(folder, index), "rb") as file:
            found: Any = json.load(file)
        if index.endswith(".safetensors.index.json"):
            names = set(found["weight_map"].values())
        else:
            names = {record["dataPath"] for record in found["records"]}
        return {name for name in names if _is_plain(name)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return set()


def _is_plain(name: Any) -> bool:
    """Whether a name is that of a data file right in the folder."""
    return isinstance(name, str) and "/" not in name and _DATA.fullmatch(name) is not None


def _refuse_other_formats(folder: str, there: Iterable[str], format: str) -> None:
    for name in there:
        other = next((f for f, pattern in _INDEXES.items() if pattern.fullmatch(name)), None)
        if other is None and name.endswith(".safetensors"):
            other = "safetensors"
        if name == ".metadata":
            other = "torch DCP"
        if other not in (None, format):
            raise ArgumentError(
                f"{folder} holds a checkpoint of another format ({other}: {name}); write the "
                f"{format} one into a folder of its own, or remove that one first"
            )


def _free_tag(there: Iterable[str]) -> str:
    stems = (os.path.splitext(name)[0] for name in there if _DATA.fullmatch(name))
    taken = [_TAG.search(stem)[0] for stem in stems]  # type: ignore[index]  # it matches nothing too
    # not one that was there before: somebody may still have the index of that checkpoint
    number = max((int(tag[2:] or 1) for tag in taken), default=0) + 1
    return f"-v{number}" if number > 1 else ""


def _clear(folder: str) -> None:
    """Remove what a save has left that was killed."""
    try:
        with open(os.path.join(folder, JOURNAL), "rb") as file:
            journal = json.load(file)
        index, new, old = journal["index"], list(journal["new"]), list(journal["old"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return  # it was killed before it had written anything else
    needed = referred(folder, index) if isinstance(index, str) and "/" not in index else set()
    committed = not needed.isdisjoint(name for name in new if isinstance(name, str))
    if not committed:
        for pattern in _INDEXES.values():
            for name in filter(pattern.fullmatch, os.listdir(folder)):
                needed |= referred(folder, name)
    indexes = [
        name for name in old
        if isinstance(name, str) and "/" not in name
        and any(pattern.fullmatch(name) for pattern in _INDEXES.values())
    ]  # fmt: skip
    gone = [*new, *old] if committed else new
    remove(folder, [name for name in gone if _is_plain(name) and name not in needed])
    if committed:
        remove(folder, indexes)


# -- the lock ----------------------------------------------------------------------------------


def _locked(folder: str) -> int:
    """The journal, opened and locked for this save."""
    path = os.path.join(folder, JOURNAL)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise CheckpointError(
                folder, "another save is writing here: wait for it, or give another folder"
            ) from None
        except FileNotFoundError:
            pass  # the save that had it has ended between the two lines
        except OSError as exc:
            if exc.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                return fd  # a file system without locks
            os.close(fd)
            raise
        os.close(fd)
