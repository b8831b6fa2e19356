"""Which snapshots there are, and what stands in one; reads their manifests alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..loader.catalog import Catalog
from ..loader.formats import open_checkpoint
from ..runtime.errors import DiscoError
from ..runtime.failures import name_ranks
from ..views.formats import format_bytes
from .manifest import Manifest, manifest_of

_MOST_NAMES = 12


@dataclass(frozen=True, repr=False)
class Snapshot:
    """A snapshot on the disk; its repr says what is in it.

    Attributes
    ----------
    path
        Its folder, absolute.
    manifest
        Who saved what.
    nbytes
        Of all workers.
    """

    path: str
    manifest: Manifest
    nbytes: int

    @property
    def num_workers(self) -> int:
        """How many workers it is of."""
        return len(self.manifest.workers)

    @property
    def variables(self) -> list[str]:
        """The variables that are in it."""
        return self.manifest.variables

    @property
    def left_out(self) -> dict[str, str]:
        """Why variables are not in it, by name."""
        return by_name(saved.left_out for saved in self.manifest.workers)

    @property
    def notes(self) -> dict[str, str]:
        """What of variables is not in it, by name."""
        return by_name(saved.notes for saved in self.manifest.workers)

    def __repr__(self) -> str:
        count = self.num_workers
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.manifest.date))
        head = (
            f"{os.path.basename(self.path)}: {name_list(self.variables)} of {count} "
            f"worker{'s' if count != 1 else ''}, {format_bytes(self.nbytes)}, {date}"
        )
        if self.manifest.refs:
            head += f"; DRefs {name_list(self.manifest.refs)}"
        lines = [f"  left out  {name}: {why}" for name, why in self.left_out.items()]
        lines += [f"  note      {name}: {note}" for name, note in self.notes.items()]
        return "\n".join([head, *lines])


def read_manifest(path: str | os.PathLike[str]) -> tuple[Catalog, Manifest]:
    """The index of a snapshot and its manifest, both checked; nothing is unpickled.

    Raises
    ------
    CheckpointError
        If it is no snapshot, not whole, or one of another version.
    """
    catalog = open_checkpoint(path)
    return catalog, manifest_of(catalog)


def open_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """What stands in a snapshot. Raises as `read_manifest`."""
    catalog, manifest = read_manifest(path)
    return Snapshot(os.path.realpath(path), manifest, catalog.stored_bytes)


def list_snapshots(folder: str | os.PathLike[str]) -> list[Snapshot | str]:
    """The snapshots in a folder, the newest first; for one that can't be read, why."""
    found: list[Snapshot] = []
    broken: list[str] = []
    for name in snapshot_names(folder):
        try:
            found.append(open_snapshot(os.path.join(folder, name)))
        except DiscoError as exc:
            broken.append(f"{name}: {exc}")
    return [*sorted(found, key=lambda snapshot: -snapshot.manifest.date), *broken]


def snapshot_names(folder: str | os.PathLike[str]) -> list[str]:
    """The folders in a folder that have safetensors: they are opened by `list_snapshots` only."""
    try:
        there = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return []
    return sorted(name for name in there if _may_be_one(os.path.join(folder, name)))


def _may_be_one(folder: str) -> bool:
    try:
        return any(name.endswith(".safetensors") for name in os.listdir(folder))
    except OSError:
        return False


def name_list(names: Iterable[str]) -> str:
    """Names for a line of text, not too many."""
    names = list(names)
    if not names:
        return "no variables"
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def by_name(tables: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """What workers say of each name, with the ranks where not all say the same."""
    said: dict[str, dict[str, list[int]]] = {}
    count = 0
    for rank, table in enumerate(tables):
        count += 1
        for name, text in table.items():
            said.setdefault(name, {}).setdefault(text, []).append(rank)
    return {
        name: "; ".join(
            text if len(ranks) == count else f"{text} ({name_ranks(ranks)})"
            for text, ranks in texts.items()
        )
        for name, texts in sorted(said.items())
    }
