"""Snapshots: the workers' variables in a folder, and back, so that a set-up outlives its kernel.

`snapshot` has each worker write what it has, `restore` gives it to the workers of another session.
A snapshot is a checkpoint of the loader (`manifest`): `collecting` makes pickles without the bytes
of tensors on each worker, `saving` arranges the files; `restoring` and `rebuilding` are the way
back, and `portable` says what of it can be had on another number of workers.
"""

from .listing import Snapshot, list_snapshots, open_snapshot
from .restoring import Restored, restore
from .saving import snapshot

__all__ = [
    "Restored",
    "Snapshot",
    "list_snapshots",
    "open_snapshot",
    "restore",
    "snapshot",
]
