"""Variables of the notebook sent to the workers, and theirs fetched or looked at.

A part of a `Lab`. Each `disco_*` method is the Python form of the magic of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..runtime.errors import ArgumentError, WorkerError
from ..runtime.failures import name_ranks
from ..runtime.ranks import parse_ranks
from ..runtime.session import Session
from ..runtime.worker import current_worker
from ..views.pictures import Shown
from .sessions import Sessions
from .whos import show_variables


class Variables:
    """Variables here and on the workers of one shell's sessions."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._shell = sessions.shell

    def disco_push(
        self,
        names: Sequence[str],
        *,
        session: str | None = None,
        targets: str | Iterable[int] | None = None,
    ) -> None:
        """Send notebook variables to the workers, each its own copy.

        Raises
        ------
        ArgumentError
            If there is no such variable, or it can't be sent.
        """
        send_variables(self._sessions.free(session), self._shell.user_ns, names, targets)

    def disco_pull(
        self,
        names: Sequence[str],
        *,
        session: str | None = None,
        targets: str | Iterable[int] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Fetch worker variables into the notebook: a list with one value a worker.

        With a single rank as `targets`, the value itself.
        """
        sess = self._sessions.free(session)
        ranks = parse_ranks(targets, sess.num_workers, sess.current_mesh)
        try:
            fetched = {name: sess.pull(name, ranks, timeout) for name in names}
        except WorkerError as exc:
            if isinstance(exc.__cause__, ArgumentError):  # no such variable
                raise ArgumentError(f"{name_ranks(exc.ranks)}: {exc.__cause__}") from None
            raise
        single = isinstance(targets, str) and len(ranks) == 1 and not set(":,=") & set(targets)
        for name, values in fetched.items():
            self._shell.user_ns[name] = values[0] if single else values

    def disco_whos(
        self, names: Sequence[str] = (), *, stats: bool = False, session: str | None = None
    ) -> Shown:
        """All variables of all workers: type, layout, bytes, and whether they are equal.

        Parameters
        ----------
        names
            Globs; (): all that cells have made.
        stats
            Read, and so compare, also tensors beyond 4 MiB.

        Returns
        -------
        Shown
            Shows itself.
        """
        sess = self._sessions.free(session)
        return show_variables(sess, sess.name or "session", names, stats)


def send_variables(
    session: Session,
    variables: Mapping[str, Any],
    names: Sequence[str],
    targets: str | Iterable[int] | None = None,
) -> None:
    """Send some of the notebook's variables to workers; see `Variables.disco_push`."""
    ranks = parse_ranks(targets, session.num_workers, session.current_mesh)
    missing = [name for name in names if name not in variables]
    if missing:
        raise ArgumentError(f"the notebook has no variable named {', '.join(missing)}")
    for name in names:
        value = variables[name]
        try:
            if len(ranks) == session.num_workers:
                session.push({name: value})
            else:
                session.call_without_result(_set_on, ranks, {name: value})
        except ArgumentError as exc:
            raise ArgumentError(f"{name} can't be sent: {exc}") from None


def _set_on(ranks: list[int], values: dict[str, Any]) -> None:
    worker = current_worker()
    if worker.worker_id in ranks:
        worker.namespace.update(values)
