"""Snapshots in a notebook: names stand for folders in one folder, and what was loaded is known.

A part of a `Lab`; used from the shell's thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..loader.weights import Weights
from ..runtime.errors import ArgumentError
from ..runtime.session import Session
from .cell import CellInterrupted
from .loading import Loading
from .sessions import Sessions

if TYPE_CHECKING:
    from ..snapshots import Restored, Snapshot


class Snapshotting:
    """Saves the variables of one shell's sessions, and brings them back."""

    def __init__(self, sessions: Sessions, loading: Loading) -> None:
        self._sessions = sessions
        self._loading = loading

    def disco_snapshot(
        self,
        name: str | None = None,
        *,
        names: Sequence[str] = (),
        plan: Any = None,
        session: str | None = None,
        timeout: float | None = None,
    ) -> Snapshot | list[Snapshot | str]:
        """Save the variables of the workers' cells; without a name, list the snapshots there are.

        Parameters
        ----------
        name
            A folder in that of ``%config Disco.snapshots``, or a path.
        names
            Variables to save; (): all.
        plan
            How tensors are laid out, as for `disco_load`; of weights that it loaded it is known.
        session
            Its name; None: the one used last.
        timeout
            Seconds in which nothing is written after which to give up.

        Raises
        ------
        CheckpointError
            If it can't be written; an older snapshot of that name stays then.
        """
        from ..snapshots.listing import list_snapshots

        if name is None:
            return list_snapshots(os.path.expanduser(self._sessions.config.snapshots))
        sess = self._sessions.free(session)
        try:
            made: Snapshot = sess.snapshot(
                self._folder_of(name),
                names=names or None,
                plan=self._loading.plan_of(plan),
                weights=self._loaded_by(sess),
                timeout=timeout,
            )
            return made
        except KeyboardInterrupt:
            sess.interrupt()
            raise CellInterrupted([]) from None

    def saved(self, name: str) -> Snapshot:
        """What stands in the snapshot of that name.

        Raises
        ------
        ArgumentError
            If there is none; says which there are.
        """
        from ..snapshots.listing import open_snapshot

        folder = self._folder_of(name)
        if not os.path.exists(folder):
            there = ", ".join(self.snapshot_names()) or "none"
            raise ArgumentError(f"there is no snapshot {name!r} in {folder} (there are: {there})")
        return open_snapshot(folder)

    def snapshot_names(self) -> list[str]:
        """The snapshots that may be meant by a name."""
        from ..snapshots.listing import snapshot_names

        return snapshot_names(os.path.expanduser(self._sessions.config.snapshots))

    def restore_into(self, session: Session, name: str) -> Restored:
        """Give the workers of a session the variables of a snapshot.

        Raises
        ------
        CheckpointError
            If it is not whole; no variable has changed then.
        """
        try:
            return session.restore(self._folder_of(name))  # type: ignore[return-value]
        except KeyboardInterrupt:
            session.interrupt()
            raise CellInterrupted([]) from None

    def _folder_of(self, name: str) -> str:
        path = os.path.expanduser(name)
        if os.sep in path or path in (os.curdir, os.pardir):
            return path
        return os.path.join(os.path.expanduser(self._sessions.config.snapshots), path)

    def _loaded_by(self, session: Session) -> dict[str, Weights]:
        """What the notebook has of this session's checkpoints, by the names that workers have."""
        return {
            name: value
            for name, value in self._sessions.shell.user_ns.items()
            if isinstance(value, Weights)
            and not name.startswith("_")
            and any(ref.session is session for ref in value.values())
        }
