"""Post-mortem: what the variables were on each worker when a cell or script failed there.

The worker keeps the frames; nothing is traced for it. `keep` is called on the worker's own thread
while the exception passes by, before the register is poisoned, which lets frames go. The thread
holds them, so that they end with it; others only find them by a weak reference, to ask who has any.
They are kept until the next cell begins there, or until `forget`. When memory ran out nothing is
held but what the variables looked like: the frames would keep the very memory that is missing.

The controller asks by an ordinary call, so that an expression is evaluated on the worker's own
thread; one that computes or hangs is not waited for.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..runtime.channel import Ticket
from ..runtime.errors import ArgumentError, WaitTimeoutError, WorkerError
from ..runtime.failures import Failure, name_ranks, safe_str
from ..runtime.functions import worker_function
from ..runtime.services import probe
from ..runtime.session import Session
from ..runtime.sources import display_name, place
from ..runtime.user_code import is_user
from ..runtime.worker import Worker, current_worker
from ..views import describe
from ..views.formats import cut
from .agent import ALONE
from .controller import DebuggerError
from .frames import evaluate, stack_of_frames, variables
from .records import Spot
from .stops import Evaluated, Stop, WorkerAt, sources_of

_SHARED = "discolab.debugger.raised"  # in `Worker.shared`: rank -> Raised, weakly
_MOST_FRAMES = 60  # kept of an endless recursion: these innermost ones
_MOST_TOLD = 8  # frames whose variables are told when memory ran out
_LONGEST = 300  # characters of a headline

_held = threading.local()


@dataclass(eq=False)
class Raised:
    """How a cell has failed on this worker.

    Attributes
    ----------
    file
        Of the cell or script.
    headline
        ``ValueError: text``.
    spots
        The user's frames at the raise, the outermost first.
    frames
        The same as they are; empty if memory ran out.
    told
        Their variables then, of the innermost first; empty otherwise.
    victim
        Whether it failed only because another worker did.
    """

    file: str
    headline: str
    spots: tuple[Spot, ...]
    frames: tuple[FrameType, ...] = ()
    told: tuple[Mapping[str, Any], ...] = ()
    victim: bool = False


# -- on the worker, its own thread ---------------------------------------------------------------


def keep(file: str, exc: BaseException) -> None:
    """Keep the frames of a cell that fails; never raises, so that the failure itself is told.

    Of one that was stopped nothing is kept: whoever stops it wants its memory back.
    """
    worker = current_worker()
    if worker.interrupts or isinstance(exc, KeyboardInterrupt):
        return
    try:
        raised = _raised(file, exc)
    except Exception:  # one that does not let itself be looked at
        raised = Raised(file, type(exc).__name__, ())
    _held.raised = raised
    worker.shared.setdefault(_SHARED, WeakValueDictionary())[worker.worker_id] = raised


def forget() -> None:
    """Let go of what was kept."""
    _held.raised = None


def _raised(file: str, exc: BaseException) -> Raised:
    walked = [
        (frame, line)
        for frame, line in traceback.walk_tb(exc.__traceback__)
        if is_user(frame.f_code)
    ][-_MOST_FRAMES:]
    spots = stack_of_frames([frame for frame, _ in walked], [line for _, line in walked])
    headline = _headline(exc)
    frames = tuple(frame for frame, _ in walked)
    victim = bool(getattr(exc, "victim", False))
    if out_of_memory(exc):
        told = tuple(variables(frame, stats=False) for frame in frames[::-1][:_MOST_TOLD])
        return Raised(file, headline, spots, (), told, victim)
    return Raised(file, headline, spots, frames, (), victim)


def _headline(exc: BaseException) -> str:
    """``ValueError: text``, of that the first line."""
    first = next(iter(safe_str(exc).strip().splitlines()), "")
    return cut(f"{type(exc).__name__}: {first}" if first else type(exc).__name__, _LONGEST)


def out_of_memory(exc: BaseException) -> bool:
    """Whether an exception, or one that led to it, says that memory ran out."""
    one: BaseException | None = exc
    for _ in range(8):
        if one is None:
            return False
        if isinstance(one, MemoryError | torch.OutOfMemoryError):
            return True
        if type(one) is RuntimeError and "can't allocate memory" in safe_str(one):  # torch on CPU
            return True
        one = one.__cause__ or one.__context__
    return False


@worker_function("a look at what has failed")
def look_back(ranks: Sequence[int], frame: int) -> Any:
    """The stack and the variables of one frame (a worker function); None: nothing was kept."""
    raised: Raised | None = getattr(_held, "raised", None)
    if raised is None or current_worker().worker_id not in ranks:
        return None
    shown = _at(raised.frames, frame)
    if shown is not None:
        told: Mapping[str, Any] = variables(shown)
    else:
        told = raised.told[frame] if frame < len(raised.told) else {}
    return [tuple(spot) for spot in raised.spots], dict(told)


@worker_function("a look at what has failed")
def evaluate_there(ranks: Sequence[int], expression: str, frame: int) -> Any:
    """A record of an expression's value in a frame that was kept (a worker function)."""
    worker = current_worker()
    raised: Raised | None = getattr(_held, "raised", None)
    if raised is None or worker.worker_id not in ranks:
        return None
    shown = _at(raised.frames, frame)
    if shown is None:
        return False, "memory ran out here: only what the variables looked like was kept"
    worker.alone = ALONE
    try:
        return True, describe(evaluate(shown, expression))
    except Exception as exc:
        return False, _headline(exc)
    finally:
        worker.alone = ""


def frame_kept() -> FrameType | None:
    """The frame in which the last cell failed on this thread's worker; None if none is kept."""
    raised: Raised | None = getattr(_held, "raised", None)
    return None if raised is None else _at(raised.frames, 0)


@worker_function("releasing frames")
def forget_there() -> None:
    """A worker function."""
    forget()


def _at(frames: Sequence[FrameType], number: int) -> FrameType | None:
    """The frame of that number, 0 the innermost; beyond the last the outermost."""
    return frames[-1 - min(number, len(frames) - 1)] if frames else None


# -- on the worker, from beside it ---------------------------------------------------------------


@probe
def raised_on(worker: Worker) -> Any:
    """``(file, headline, victim, whether frames are there)``; None if nothing is kept."""
    found: Raised | None = worker.shared.get(_SHARED, {}).get(worker.worker_id)
    if found is None:
        return None
    return found.file, found.headline, found.victim, bool(found.frames)


# -- on the controller -----------------------------------------------------------------------------


_PATIENCE = 5.0  # seconds


def who_raised(session: Session) -> dict[int, Any]:
    """What `raised_on` tells of those workers on which a cell has failed."""
    found = session.look(raised_on)
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
    found = _ask(session, timeout, look_back, sorted(chosen), frame)
    workers = tuple(
        _worker_at(rank, failed.get(rank), found.get(rank), state)
        for rank, state in enumerate(_states(session))
    )
    return Stop(
        name=display_name(next(iter(chosen.values()))[0]),
        number=0,
        reason=_reason(chosen, workers),
        workers=workers,
        groups=_groups(workers),
        frame=frame,
        sources=sources_of(workers),
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
    found = _ask(session, timeout, evaluate_there, sorted(chosen), expression.strip(), frame)
    values = {}
    for rank in chosen:
        well, value = found.get(rank) or (False, "no answer: it does something else by now")
        values[rank] = ("value" if well else "error", value)
    return Evaluated(expression.strip(), values)


def forget_all(session: Session) -> None:
    """Have all workers let go of what they kept, in turn with other commands."""
    session.call_without_result(forget_there)


def _chosen(failed: dict[int, Any], ranks: Iterable[int] | None) -> dict[int, Any]:
    """Of the workers that have failed those that are asked for."""
    if not failed:
        raise DebuggerError(
            "no cell has failed since the last one began, or what was kept was released: use "
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


def _groups(workers: Sequence[WorkerAt]) -> tuple[tuple[int, ...], ...]:
    """The workers whose stacks are the same, together."""
    found: dict[Any, list[int]] = {}
    for worker in workers:
        if worker.stack:
            key = tuple((spot.file, spot.line, spot.function) for spot in worker.stack)
            found.setdefault(key, []).append(worker.rank)
    return tuple(tuple(ranks) for ranks in found.values())
