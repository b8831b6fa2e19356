"""The worker's end of the debugger: here a worker stands until it is told to go on.

One `DebugAgent` a worker, in its `shared`. The worker's own thread alone calls `arrive`, `begin`
and `end`; `heard` is called on the thread of whoever tells it something (the controller's, or that
of the worker's link). `_order` and `_asks` are each written by one side and taken by the other in a
single operation. `_guard` guards that an exception that ends an evaluation hits nothing else.

While a worker stands it waits as for everything else (`Worker.wait_for`): an interrupt, the end of
the session or of the process free it. Questions are answered on the worker's own thread, in the
frame in which it stands, so that what is thread-local (autograd's mode, the device, the rank) is
what the program sees.
"""

from __future__ import annotations

import importlib
import operator
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..runtime.errors import DiscoError, WorkerInterrupted
from ..runtime.failures import safe_str
from ..runtime.interrupts import run_steps, shield, take_back_exception
from ..runtime.landings import raise_in_thread
from ..runtime.sources import place
from ..runtime.worker import Worker, current_worker
from .breaks import BreakTable
from .frames import EvaluationEnded
from .records import Arrival, Order

if TYPE_CHECKING:
    from .tracer import Tracer

SERVICE = "debugger"
CONTROLLER = "discolab.debugger.controller"  # in `shared`, where the controller is in this process
_AGENT = "debugger's agent"
_DEBUGGER = "the debugger at"
STANDS = f"for {_DEBUGGER}"  # with which the status of a worker that stands begins
ALONE = "a value is worked out for the debugger"


_agents: weakref.WeakSet[DebugAgent] = weakref.WeakSet()  # of this process


class Standing:
    """What a worker that stands waits for, in words."""

    def __init__(self, arrival: Arrival) -> None:
        self._at = arrival.here

    def __str__(self) -> str:
        return f"{_DEBUGGER} {place(self._at.file, self._at.line)}"


class DebugAgent:
    """See the module.

    Attributes
    ----------
    worker
    pause_wanted
        Whether it shall stop at its next line, or
    ahead
        how it shall go on from there; None: stop.
    breaks
        Its breakpoints.
    frame
        In which it stands; None while it does not.
    frames
        All of the user's frames, if they are those of a traceback, which know no callers.
    tracer
        Of the program that runs now, None if none is traced.
    attached
        Whether there is a debugger to which it can tell that it stands.
    looked
        The variables that are being looked at, as far as they are known.
    returned
        While it stands: what functions have returned that were stepped out of, by their names.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.pause_wanted = False
        self.ahead: Order | None = None
        self.breaks = BreakTable()
        self.frame: FrameType | None = None
        self.frames: list[FrameType] | None = None
        self.tracer: Tracer | None = None
        self.attached = False
        self.looked: dict[str, Any] = {}
        self.returned: dict[str, Any] = {}
        self._order: Order | None = None
        self._asks: deque[tuple[int, str, tuple[Any, ...]]] = deque()
        self._asked = 0  # the question that is answered now
        self._was_cut = False  # whether an exception was sent to end it
        self._guard = threading.Lock()
        self._pass_guard: tuple[Callable[[], Any], ...] = (self._guard.acquire, self._guard.release)
        _agents.add(self)
        if worker.link is not None:
            worker.link.listen(SERVICE, self.heard)

    # -- standing ----------------------------------------------------------------------------

    def arrive(self, frame: FrameType, arrival: Arrival) -> Order:
        """Stand in `frame` until told to go on; how.

        Raises
        ------
        WorkerInterrupted
            If the program is ended.
        """
        self._order = None
        if self.worker.interrupts:  # it has caught the exception that was to end it
            self.pause_wanted = True  # so that the tracer raises where nothing catches it
            raise WorkerInterrupted("interrupted")
        self.frame = frame
        try:
            here = self.worker.link is None  # then the record itself can be handed over
            self._tell("arrive", arrival if here else arrival.packed())
            words = Standing(arrival)
            while True:
                self.worker.wait_for(self._has_news, words)
                while self._asks:
                    self._answer(*self._asks.popleft())
                if self._order is not None:
                    return self._order
        except WorkerInterrupted:
            self.pause_wanted = True
            raise
        finally:
            self.frame = None
            self.looked = {}
            self._asks.clear()

    def _has_news(self) -> bool:
        return self._order is not None or bool(self._asks)

    def begin(self) -> None:
        """A program begins here."""
        self.pause_wanted = False
        self._tell("begin", self.worker.executed)

    def end(self, how: str, words: str = "") -> None:
        """A program has ended here: ``done``, ``error`` or ``aborted``."""
        self.pause_wanted = False
        self.breaks.replace(())
        self._tell("end", how, words)

    def _tell(self, *message: Any) -> None:
        worker = self.worker
        if worker.link is None:
            controller = worker.shared.get(CONTROLLER)
            if controller is not None:
                controller.receive(worker.worker_id, message)
        elif message[0] == "arrive":
            with shield():  # no interrupt tears it
                worker.link.tell(SERVICE, message)
        else:
            worker.link.tell(SERVICE, message)

    # -- being told --------------------------------------------------------------------------

    def heard(self, message: Any) -> None:
        """The controller says something; quick, on any thread."""
        what, *rest = message
        if what == "go":
            self.ahead, self.pause_wanted = None, False
            self._order = (rest[0], rest[1])
            self.worker.wake()
        elif what == "pause":
            self.ahead, self.pause_wanted = None, True
        elif what == "free":
            self.ahead, self.pause_wanted = ("continue", None), True
        elif what == "still":
            (self.worker.clock.stop if rest[0] else self.worker.clock.go)()
        elif what == "breaks":
            self.breaks.replace(rest[0])
        elif what == "attach":
            self.attached = bool(rest[0])
        elif what == "ask":
            self._asks.append((rest[0], rest[1], tuple(rest[2])))
            self.worker.wake()
        elif what == "cut":
            self._cut(rest[0])

    # -- answering ---------------------------------------------------------------------------

    def _answer(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        worker = self.worker
        well, value = False, ""
        worker.alone = ALONE
        try:
            try:
                self._asked = number
                value = _function(name)(worker, self.frame, *args)
                well = True
            finally:
                while True:
                    try:
                        self._asked = 0  # who has not seen that has sent it when the guard is free
                        run_steps(map(operator.call, self._pass_guard))
                        if self._was_cut:  # and it may still be on its way
                            self._was_cut = False
                            take_back_exception()
                        worker.alone = ""
                        break
                    except EvaluationEnded:
                        continue
        except EvaluationEnded:
            value = "it did not end in time, and was stopped"
        except DiscoError as exc:
            value = safe_str(exc)
        except WorkerInterrupted:
            raise
        except BaseException as exc:  # a KeyboardInterrupt is the user's own: no signal comes here
            value = f"{type(exc).__name__}: {safe_str(exc)}"
        self._tell("answer", number, well, value)

    def _cut(self, number: int) -> None:
        """Nobody waits for an answer any more."""
        with shield(), self._guard:
            if self._asked == number:
                self._was_cut = True
                raise_in_thread(self.worker.thread_id, EvaluationEnded)


def agent_of(worker: Worker) -> DebugAgent:
    """The agent of a worker; made when it is first asked for."""
    agent: DebugAgent | None = worker.process_state.get(_AGENT)
    if agent is None:
        agent = worker.process_state.setdefault(_AGENT, DebugAgent(worker))
    return agent


def attach_here() -> None:
    """On a worker that has just replaced another: a debugger leads its session."""
    agent_of(current_worker()).attached = True


def _stop_nowhere() -> None:
    """Stop no more in a process that was forked, as by a DataLoader: who stands there stands for
    ever, as nobody hears of it.
    """
    for agent in list(_agents):
        agent.attached = False
        if agent.tracer is not None and agent.worker.thread_id == threading.get_ident():
            agent.tracer.disarm()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_nowhere)


def _function(name: str) -> Callable[..., Any]:
    """The function that ``module:name`` stands for."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
