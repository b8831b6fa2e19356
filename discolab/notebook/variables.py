"""Variables of the notebook sent to the workers, and theirs fetched or looked at.

A part of a `Lab`. Each `disco_*` method is the Python form of the magic of the same name. What
``%disco_whos`` asks the workers is an ordinary call, so a worker that computes is waited for, two
seconds at most.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Literal

from ..runtime.errors import ArgumentError, DiscoError, WorkerError
from ..runtime.failures import Failure, name_ranks
from ..runtime.functions import worker_function
from ..runtime.ranks import parse_ranks
from ..runtime.session import Session
from ..runtime.worker import current_worker
from ..views.dref.ask import answers_of, layout_of, state_record
from ..views.facts.describe import describe
from ..views.pictures import Shown
from ..views.registers.facts import fact_of
from ..views.whos_view import Variables as WorkerVariables
from ..views.whos_view import whos_parts
from .cell import names_made
from .sessions import Sessions

_PATIENCE = 2.0  # seconds
_PATIENCE_TO_READ = 60.0  # seconds, where all values are read
_MOST = 1000  # variables of a worker
_NO_VALUES = {
    ModuleType: "modules",
    FunctionType: "functions",
    BuiltinFunctionType: "functions",
    type: "classes",
}


@worker_function("listing the variables")
def list_variables(globs: list[str], stats: Literal["auto"] | bool) -> tuple[dict[str, Any], ...]:
    """Describe this worker's variables (a worker function).

    Returns
    -------
    tuple of three dicts
        By name: the record of `describe`; bytes; for what is no value, the kind.
    """
    records, nbytes, others = {}, {}, {}
    names = [
        name
        for name in names_made(current_worker())
        if not globs or any(fnmatchcase(name, glob) for glob in globs)
    ]
    for name in sorted(names)[:_MOST]:
        value = current_worker().namespace[name]
        kind = next((k for t, k in _NO_VALUES.items() if issubclass(type(value), t)), None)
        if kind is not None:
            others[name] = kind
            continue
        records[name] = describe(value, stats)
        nbytes[name] = fact_of(value)[1]
    return records, nbytes, others


def show_variables(session: Session, name: str, globs: Sequence[str], stats: bool) -> Shown:
    """The picture of all workers' variables."""
    ref = session.call_packed(list_variables, list(globs), stats or "auto")
    answers = answers_of(ref, _PATIENCE_TO_READ if stats else _PATIENCE)
    states = session.status() if len(answers) < session.num_workers else []
    workers, missing = {}, {}
    for rank in range(session.num_workers):
        answer = answers.get(rank)
        if isinstance(answer, Failure):
            missing[rank] = answer.headline
        elif answer is None:
            missing[rank] = state_record(states[rank])["message"] if states else "no answer"
        else:
            workers[rank] = WorkerVariables(*answer)
    return Shown(whos_parts(name, workers, layout_of(session), missing))


# -- the part of a `Lab` ---------------------------------------------------------------------------


class Variables:
    """Variables here and on the workers of one shell's sessions."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._shell = sessions.shell

    def tell_of_namesake(self, error: BaseException | None) -> None:
        """Where a cell of the notebook lacks a name that workers have: how it is seen from here."""
        name = error.name if type(error) is NameError else None
        if name is None:
            return
        try:
            there = self._sessions.get().look(names_made)
        except DiscoError:
            return
        ranks = [rank for rank, names in sorted(there.items()) if name in names]
        if ranks:
            who = "the workers have" if len(ranks) > 1 else f"worker {ranks[0]} has"
            text = f'{who} a variable {name}: {self._sessions.current}["{name}"] shows it here'
            print(text, file=sys.stderr)

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
