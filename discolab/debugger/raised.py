"""The worker's side of post-mortem: the frames of a cell or script that has failed here.

Nothing is traced for it. `keep` is called on the worker's own thread while the exception passes by,
before the register is poisoned, which lets frames go. The thread holds them, so that they end with
it; others only find them by a weak reference, to ask who has any. They are kept until the next cell
begins there, or until `forget`. When memory ran out nothing is held but what the variables looked
like: the frames would keep the very memory that is missing.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..runtime.failures import safe_str
from ..runtime.services import probe
from ..runtime.user_code import is_user
from ..runtime.worker import Worker, current_worker
from ..views import describe
from ..views.formats import cut
from .frames import evaluate, stack_of_frames, variables
from .port import ALONE
from .records import Spot

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


look_back.disco_command = "a look at what has failed"  # type: ignore[attr-defined]


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


evaluate_there.disco_command = "a look at what has failed"  # type: ignore[attr-defined]


def frame_kept() -> FrameType | None:
    """The frame in which the last cell failed on this thread's worker; None if none is kept."""
    raised: Raised | None = getattr(_held, "raised", None)
    return None if raised is None else _at(raised.frames, 0)


def forget_there() -> None:
    """A worker function."""
    forget()


forget_there.disco_command = "letting frames go"  # type: ignore[attr-defined]


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
