"""``%disco_debugger``: the program that is stepped, with buttons and keys; live.

What is known of the program is in stepper_looks.py, what is sent in stepper_frame.py. Buttons never
wait for the program: what one of them has begun, another can stop. `_lock` guards what they change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ...debugger.picture import breaks_parts
from ...runtime.errors import ArgumentError, DiscoError
from ...runtime.failures import name_ranks
from ...runtime.session import Session
from ...views import Part, Text, VStack
from . import stepper_frame as made
from .base import LiveWidget, source
from .pump import pump
from .stepper_looks import StepperLooks
from .stepper_view import View

_SOON = 0.03  # seconds in which most steps are done: nothing else need be shown before
_PATIENCE = 0.5  # seconds that a saved picture waits for variables
_MOST_RESULTS = 4
_MOST_VIEWS = 8
_MOST_ERROR = 400  # characters
_GO = ("step", "next", "out", "continue")
_IDLE = "no program is being stepped: begin one with %%disco --step, or -b LINE"


class Stepper(LiveWidget):
    """The debugger of a session of the notebook, by name; after a restart that of the new one.

    Parameters
    ----------
    name
        What the session is called in the notebook.
    find
        Gives the session that has the name now.
    turn
        Changes with each cell, which may have changed variables.
    """

    _esm = source("stepper_source.js", "stepper_values.js", "stepper.js")
    _css = source("stepper.css")
    _dear = True  # the debugger tells it of changes, until nobody looks

    def __init__(
        self, name: str, find: Callable[[], Session], turn: Callable[[], Any] = lambda: None
    ) -> None:
        super().__init__()
        self._name = name
        self._looks = StepperLooks(find, turn, pump.soon)
        self._lock = threading.Lock()
        self._error = ""
        self._heard_of: dict[str, int] = {}  # view -> the last of its commands that was obeyed
        self._results: tuple[dict[str, Any], ...] = ()
        self._asked: Any = None
        self._last: dict[str, Any] = {}

    # -- what there is -----------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """See `LiveWidget`; the same object as before if nothing has changed."""
        view = self._looks.view()
        if self._looks.quiet and self._last:
            return self._last
        with self._lock:
            asked = (view, self._error, tuple(self._heard_of.items()), self._results)
        if asked != self._asked:
            self._asked = asked
            self._last = self._made(view)
        return self._last

    def _made(self, view: View) -> dict[str, Any]:
        stop, state = view.stop, view.state
        paused = state == "paused"
        active = state in ("paused", "running")
        return {
            "title": f"{self._name}: {_count(view.count)} ({view.engine})",
            "state": state,
            "program": stop.name if stop is not None else "",
            "number": stop.number if stop is not None else 0,
            "reason": self._reason(view),
            "error": self._error,
            "heard": dict(self._heard_of),
            "can": {
                **dict.fromkeys((*_GO, "eval"), paused),
                "pause": state == "running" and not view.pausing,
                "abort": active,
            },
            "workers": made.workers_of(stop, view.count),
            "places": made.places_of(stop) if stop is not None else [],
            "stack": made.stack_of(stop, view.focus) if stop is not None and paused else [],
            "frame": view.frame,
            "focus": view.focus,
            "source": view.source,
            "tables": list(view.tables),
            "stale": view.stale,
            "breaks": made.breaks_of(view.breaks),
            "results": [
                {**one, "past": stop is None or one["number"] != stop.number or not paused}
                for one in self._results
            ],
        }

    def _reason(self, view: View) -> str:
        if view.closed:
            return "shut down: %disco_restart starts it again"
        if view.stop is None:
            return "no program is being stepped"
        if view.state != "running":
            return view.stop.reason
        if not view.pausing:
            return ""
        return "waits until the workers come to a line of their program"

    def essence(self) -> Any:
        """See `LiveWidget`: neither what is chosen nor where those are that run."""
        seen = ("title", "state", "program", "number", "reason", "breaks")
        frame = self.frame
        more = [frame.get(key) for key in ("frame", "tables")]
        return [frame.get(key) for key in seen], more if frame.get("state") == "paused" else None

    def static(self) -> Part:
        stop = self._looks.settle(_PATIENCE)
        if stop is not None:
            return stop.part
        breaks = self._looks.debugger.all_breaks()
        parts: tuple[Part, ...] = (Text(f"debugger of {self._name}: {_IDLE}", "muted"),)
        return VStack((*parts, breaks_parts(breaks))) if breaks else parts[0]

    def let_go(self) -> None:
        self._looks.let_go()

    # -- buttons -----------------------------------------------------------------------------

    def command(self, name: str, content: dict[str, Any]) -> None:
        """See `LiveWidget`: step, next, out, continue, pause, abort, toggle, clear, frame, focus,
        eval. What goes wrong is told until the next command.
        """
        self._say("")
        try:
            self._obey(name, content)
        except DiscoError as exc:
            self._say(str(exc))
        finally:
            with self._lock:
                view, number = str(content.get("view"))[:40], content.get("number")
                if type(number) is int:
                    self._heard_of.pop(view, None)
                    self._heard_of[view] = number
                    while len(self._heard_of) > _MOST_VIEWS:
                        del self._heard_of[next(iter(self._heard_of))]

    def _obey(self, name: str, content: dict[str, Any]) -> None:
        debugger, looks = self._looks.debugger, self._looks
        if name in _GO:
            ranks = _ranks(content.get("ranks"))
            looks.goes(ranks)
            debugger.go(name, 0 if name == "continue" else None, ranks)
            looks.wait_settled(_SOON)
        elif name == "pause":
            debugger.pause_soon()
            looks.pauses()
        elif name == "abort":
            stuck = debugger.abort()
            if stuck:
                raise DiscoError(f"{name_ranks(stuck)} can't be interrupted now")
        elif name == "toggle":
            self._toggle(str(content.get("file")), _number(content.get("line")))
        elif name == "clear":
            debugger.clear(_number(content.get("number")))
        elif name == "frame":
            looks.choose(frame=_number(content.get("frame")))
        elif name == "focus":
            looks.choose(focus=_number(content.get("rank")))
        elif name == "eval":
            self._evaluate(str(content.get("text")), _ranks(content.get("ranks")))
        else:
            super().command(name, content)

    def _toggle(self, file: str, line: int) -> None:
        """Set a breakpoint at a line, or remove those that are there."""
        debugger = self._looks.debugger
        there = [one for one in debugger.all_breaks() if one.line == line and one.is_in(file)]
        for one in there:
            debugger.clear(one.number)
        if not there:
            debugger.break_at(str(line), file=file)

    def _evaluate(self, text: str, ranks: tuple[int, ...] | None) -> None:
        """Ask the workers on a thread of its own: they may take their time."""
        debugger, looks = self._looks.debugger, self._looks
        stop = debugger.stop
        if stop is None or not debugger.is_paused:
            raise DiscoError("an expression is evaluated where a program is paused; none is")
        frame, number = looks.frame, stop.number

        def ask() -> None:
            try:
                found = debugger.eval(text, ranks, frame)
                result = made.result_of(found.expression, found.values, number)
                with self._lock:
                    self._results = (result, *self._results)[:_MOST_RESULTS]
            except DiscoError as exc:
                self._say(str(exc))
            looks.poke()  # an expression may have changed something
            pump.soon()

        threading.Thread(target=ask, name="discolab-eval", daemon=True).start()

    def _say(self, words: str) -> None:
        with self._lock:
            self._error = " ".join(words.split())[:_MOST_ERROR]


def _count(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _ranks(value: Any) -> tuple[int, ...] | None:
    """Which workers a command is for; None: all."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(rank) is int for rank in value):
        raise ArgumentError(f"the workers of a command are a list of numbers; got {value!r:.60}")
    return tuple(value) or None


def _number(value: Any) -> int:
    return value if type(value) is int else -1
