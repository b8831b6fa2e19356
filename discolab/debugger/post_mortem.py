"""Post-mortem: what the variables were on each worker when a cell or script failed there.

The controller's side; the frames stay on the workers, see raised.py. Workers are asked by an
ordinary call, so that an expression is evaluated on the worker's own thread; one that computes or
hangs is not waited for.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..runtime.channel import Ticket
from ..runtime.errors import ArgumentError, WaitTimeoutError, WorkerError
from ..runtime.failures import Failure, name_ranks
from ..runtime.session import Session
from ..runtime.sources import display_name, place
from . import raised
from .evaluated import Evaluated
from .looking import DebuggerError
from .records import Spot
from .stops import Stop, WorkerAt

_PATIENCE = 5.0  # seconds
_MOST_LINES = 50_000  # of a file that is shown from


def who_raised(session: Session) -> dict[int, Any]:
    """What `raised_on` tells of those workers on which a cell has failed."""
    found = session.look(raised.raised_on)
    return {rank: told for rank, told in sorted(found.items()) if told is not None}


def post_mortem(
    session: Session,
    ranks: Iterable[int] | None = None,
    *,
    frame: int = 0,
    timeout: float | None = None,
) -> Stop:
    """Where each worker was when the last cell failed there, with its variables.

    Parameters
    ----------
    session
    ranks
        The workers to look at; None: all on which it failed.
    frame
        0: where it was raised; 1: the caller of that, and so on.
    timeout
        Seconds to wait for workers that do something else by now; None: 5.

    Returns
    -------
    Stop
        Shows itself. Workers that have not failed are in it with what they do.

    Raises
    ------
    DebuggerError
        If no cell has failed on these workers, or what was kept has been let go.
    """
    failed = who_raised(session)
    chosen = _chosen(failed, ranks)
    found = _ask(session, timeout, raised.look_back, sorted(chosen), frame)
    workers = tuple(
        _worker_at(rank, failed.get(rank), found.get(rank), state)
        for rank, state in enumerate(_states(session))
    )
    files = {spot.file for worker in workers for spot in worker.stack}
    return Stop(
        name=display_name(next(iter(chosen.values()))[0]),
        number=0,
        reason=_reason(chosen, workers),
        workers=workers,
        groups=_groups(workers),
        frame=frame,
        sources={file: _lines(file) for file in sorted(files)},
    )


def evaluate_at_raise(
    session: Session,
    expression: str,
    ranks: Iterable[int] | None = None,
    *,
    frame: int = 0,
    timeout: float | None = None,
) -> Evaluated:
    """The value of an expression in the frames that raised, on each worker on its own thread.

    Raises
    ------
    ArgumentError
        If it is no expression.
    DebuggerError
        If no cell has failed on these workers, or what was kept has been let go.
    """
    try:
        compile(expression.strip(), "<expression>", "eval")
    except SyntaxError as exc:
        raise ArgumentError(f"{expression.strip()!r} is no expression: {exc.msg}") from None
    chosen = _chosen(who_raised(session), ranks)
    found = _ask(session, timeout, raised.evaluate_there, sorted(chosen), expression.strip(), frame)
    values = {}
    for rank in chosen:
        well, value = found.get(rank) or (False, "no answer: it does something else by now")
        values[rank] = ("value" if well else "error", value)
    return Evaluated(expression.strip(), values)


def forget_all(session: Session) -> None:
    """Have all workers let go of what they kept, in turn with other commands."""
    session.call_without_result(raised.forget_there)


def _chosen(failed: dict[int, Any], ranks: Iterable[int] | None) -> dict[int, Any]:
    """Of the workers that have failed those that are asked for."""
    if not failed:
        raise DebuggerError(
            "no cell has failed since the last one began, or what was kept has been let go: use "
            "%disco_pm after a %%disco cell that failed, before the next one"
        )
    if ranks is None:
        return failed
    wanted = list(ranks)
    chosen = {rank: failed[rank] for rank in wanted if rank in failed}
    if not chosen:
        raise DebuggerError(
            f"nothing has failed on {name_ranks(wanted)}: it failed on {name_ranks(failed)}"
        )
    return chosen


def _ask(session: Session, timeout: float | None, func: Any, *args: Any) -> dict[int, Any]:
    """What a worker function gives on the ranks that are its first argument; nothing of others."""
    ranks = args[0]
    ref = session.call_packed(func, *args)
    ticket: Ticket = session.request(ref, ranks, what="a look at what has failed")
    try:
        found = session.wait(ticket, _PATIENCE if timeout is None else timeout, interrupt=False)
    except WaitTimeoutError as exc:
        found = exc.partial
    for value in found.values():
        if isinstance(value, Failure) and not value.interrupted:
            raise WorkerError([value])
    return {rank: value for rank, value in found.items() if not isinstance(value, Failure)}


def _states(session: Session) -> list[tuple[str, str]]:
    """State and words of each worker now, for those that have not failed."""
    return [
        ("done", "") if status.state == "idle" else ("running", f"{status.state} {status.detail}")
        for status in session.status()
    ]


def _worker_at(rank: int, failed: Any, found: Any, state: tuple[str, str]) -> WorkerAt:
    if failed is None:
        return WorkerAt(rank, state[0], words=state[1].strip())
    headline = failed[1]
    if found is None:  # not asked for, or it does something else by now
        return WorkerAt(rank, "error", note=headline, error=headline, words=state[1].strip())
    stack, variables = found
    spots = tuple(Spot(*spot) for spot in stack)
    return WorkerAt(rank, "error", spots, note=headline, error=headline, variables=variables)


def _reason(failed: Mapping[int, Any], workers: Sequence[WorkerAt]) -> str:
    """``worker 2 raised ValueError: x at Cell In[3], line 5``, of those that were the cause."""
    causes = {rank: told for rank, told in failed.items() if not told[2]} or failed
    first = next(iter(causes.values()))[1]
    alike = [rank for rank, told in causes.items() if told[1] == first]
    here = _here(workers[alike[0]])
    same = [rank for rank in alike if _here(workers[rank]) == here]
    elsewhere = [rank for rank in alike if rank not in same]
    where = f" at {here}" if here else ""
    more = f"; {name_ranks(elsewhere)} the same elsewhere" if elsewhere else ""
    others = len(causes) - len(alike)
    more += f"; {others} more raised something else" if others else ""
    return f"{name_ranks(same)} raised {first}{where}{more}"


def _here(worker: WorkerAt) -> str:
    return place(worker.stack[-1].file, worker.stack[-1].line) if worker.stack else ""


def _lines(file: str) -> tuple[str, ...]:
    return tuple(line.rstrip("\n") for line in linecache.getlines(file)[:_MOST_LINES])


def _groups(workers: Sequence[WorkerAt]) -> tuple[tuple[int, ...], ...]:
    """The workers whose stacks are the same, together."""
    found: dict[Any, list[int]] = {}
    for worker in workers:
        if worker.stack:
            key = tuple((spot.file, spot.line, spot.function) for spot in worker.stack)
            found.setdefault(key, []).append(worker.rank)
    return tuple(tuple(ranks) for ranks in found.values())
