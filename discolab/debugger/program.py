"""Running a call under the tracer, on the worker."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from ..runtime.errors import WorkerInterrupted
from ..runtime.failures import safe_str
from ..runtime.interrupts import plain_lock
from ..runtime.user_code import is_user
from ..runtime.worker import Worker, current_worker
from . import nan_hunt, post_mortem, recording
from .agent import DebugAgent, agent_of
from .frames import stack_of_frames
from .lockstep import ABORTED, DONE, ERROR
from .records import Arrival, Options
from .tracer import Tracer

_STANCE = "discolab.debugger.stance"
_switching = plain_lock()  # guards the stance of torch.compile, which is the process's


class Stepped:
    """A function that is run under the tracer: what a session calls in its place."""

    def __init__(self, func: Callable[..., Any], options: Options, words: str = "") -> None:
        self._func, self._options = func, options
        name = getattr(func, "__name__", type(func).__name__)
        self.disco_command = words or getattr(func, "disco_command", None) or f"call of '{name}'"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it on this worker."""
        return run_program(self._options, lambda: self._func(*args, **kwargs))


def run_program(options: Options, thunk: Callable[[], Any]) -> Any:
    """Run a program on this worker so that it can be stopped and looked at; its value."""
    worker = current_worker()
    agent = agent_of(worker)
    mode = "step" if options.step else "continue"
    how, words = DONE, ""
    with ExitStack() as stack:
        stack.callback(lambda: agent.end(how, words))
        agent.breaks.replace(options.breaks)
        agent.begin()  # and hear of those that were set since
        tracer = agent.tracer = Tracer(worker, agent)
        stack.callback(setattr, agent, "tracer", None)
        if options.trace is not None:
            recorder = recording.begin(worker, names=options.trace, capacity=options.capacity)
            stack.callback(recorder.end)
            tracer.on_line, tracer.on_return = recorder.on_line, recorder.on_return
        stack.enter_context(_eager(worker))
        try:
            return tracer.run(_hunted(worker, thunk) if options.nan else thunk, mode)
        except BaseException as exc:
            how, words = _how_ended(worker, exc), _headline(exc)
            if options.pm and how == ERROR and not getattr(exc, "victim", False):
                _stand_where_it_failed(agent, exc, words)
            raise


def _hunted(worker: Worker, thunk: Callable[[], Any]) -> Callable[[], Any]:
    def hunted() -> Any:
        with nan_hunt.hunting(worker):
            return thunk()

    return hunted


def _how_ended(worker: Worker, exc: BaseException) -> str:
    return ABORTED if worker.interrupts or isinstance(exc, WorkerInterrupted) else ERROR


def _headline(exc: BaseException) -> str:
    text = next(iter(safe_str(exc).strip().splitlines()), "")
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def _stand_where_it_failed(agent: DebugAgent, exc: BaseException, words: str) -> None:
    """Stand in the frames of a traceback until the debugger lets the error go on."""
    frames: list[FrameType] = []
    lines: list[int] = []
    trace = exc.__traceback__
    while trace is not None:
        if is_user(trace.tb_frame.f_code):
            frames.append(trace.tb_frame)
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    if not frames:
        return
    stack = stack_of_frames(frames, lines)
    agent.frames = frames
    try:
        agent.arrive(
            frames[-1],
            Arrival(stack, "raised", words, ordinal=agent.worker.executed, raising=words),
        )
    except BaseException:  # it is ended: nothing may keep its frames
        post_mortem.forget()
        raise
    finally:
        agent.frames = None
        frames.clear()


@contextmanager
def _eager(worker: Worker) -> Iterator[None]:
    """Within it compiled functions run as they are written, or nobody could step through them.

    That is so for the whole process; the last program to end puts it back.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        yield
        return
    import torch

    with _switching:
        users, stance = worker.shared.setdefault(_STANCE, [0, None])
        if not users:
            stance = torch.compiler.set_stance("force_eager")
        worker.shared[_STANCE] = [users + 1, stance]
    try:
        yield
    finally:
        with _switching:
            users, stance = worker.shared[_STANCE]
            worker.shared[_STANCE] = [users - 1, stance]
            if users == 1:
                stance.__exit__(None, None, None)
