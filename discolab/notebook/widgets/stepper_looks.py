"""What is known of the program that a session's debugger steps: the facts of the debugger's panel.

Where everybody is is known at once; variables, and where those are that run, are asked of the
workers on a thread of its own, one look at a time, and follow a moment later. `_lock` guards all
of this; nothing waits under it. The debugger calls `_on_change` under a lock of its own, so that
takes none here.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...debugger import Debugger, Stop, debugger_of
from ...runtime.errors import ArgumentError, DiscoError
from ...runtime.session import Session
from . import stepper_frame as made
from .stepper_view import View, places_now, state_of

_AT_ONCE = 0.03  # seconds that a picture waits for variables before it is shown without
_QUIETLY = 0.06  # seconds for which nothing is told of workers that run again
_RUNS = 0.25  # seconds after which it is told where they are


class StepperLooks:
    """Looks at the program of a session's debugger again and again.

    Parameters
    ----------
    find
        Gives the session that there is now.
    turn
        Changes with each cell, which may have changed variables.
    nudge
        Called, on any thread, when there is something new to see.

    Attributes
    ----------
    frame
        Which frame of the stack is shown: 0 is the innermost.
    quiet
        Whether the last view is what there was before workers went on, a moment ago.
    """

    def __init__(
        self, find: Callable[[], Session], turn: Callable[[], Any], nudge: Callable[[], None]
    ) -> None:
        self._find, self._turn, self._nudge = find, turn, nudge
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._debugger: Debugger | None = None  # that this listens to
        self._listener = _weakly(self)
        self._forget()

    def _forget(self) -> None:
        """Listen to nobody, and know nothing."""
        if self._debugger is not None and self._listener in self._debugger.listeners:
            self._debugger.listeners.remove(self._listener)
        self._debugger = None
        self.quiet = False
        self.frame = self._focus = 0
        self._followed: tuple[int, ...] | None = None  # whom the last command was for
        self._pausing = False
        self._pokes = 0
        self._at: Any = None  # the program and the number of its stop that were shown last
        self._ran_at: float | None = None  # since when it is known that it runs
        self._looked: Stop | None = None  # with variables, or with the places of those that run
        self._looked_for: Any = None
        self._looking: Any = None  # what the look that is under way is for
        self._done = threading.Event()
        self._next_look = 0.0
        self._source: Any = None
        self._tables: tuple[Any, ...] = ()
        self._view: View | None = None
        self._seen: Any = None  # what the view was made of

    @property
    def debugger(self) -> Debugger:
        """That of the session that there is now."""
        session = self._find()
        with self._lock:
            if self._debugger is None or self._debugger.session is not session:
                self._forget()
                self._debugger = debugger_of(session)
                self._debugger.listeners.append(self._listener)
            return self._debugger

    def let_go(self) -> None:
        """Have the debugger tell nothing any more, until somebody looks again."""
        with self._lock:
            self._forget()

    def _on_change(self) -> None:
        """Something has happened; on any thread, under the debugger's lock."""
        debugger = self._debugger
        if debugger is None or debugger.is_settled:
            self._settled.set()
            self._nudge()
        else:  # those who look ten times a second see that soon enough
            self._settled.clear()

    # -- what somebody does ------------------------------------------------------------------

    def goes(self, ranks: tuple[int, ...] | None) -> None:
        """Workers are told to go on: those, or all."""
        with self._lock:
            self._followed = ranks
            self._pausing = False
        self._settled.clear()

    def pauses(self) -> None:
        """Those that run are told to stop."""
        with self._lock:
            self._pausing = True

    def poke(self) -> None:
        """Variables may have changed."""
        with self._lock:
            self._pokes += 1

    def choose(self, frame: int | None = None, focus: int | None = None) -> None:
        """Show another frame of the stack, or another worker's."""
        with self._lock:
            if frame is not None:
                self.frame = max(0, frame)
            if focus is not None:
                self._focus = max(0, focus)

    def wait_settled(self, seconds: float) -> None:
        """Wait until nobody runs, but no longer."""
        self._settled.wait(seconds)

    # -- what there is to see ----------------------------------------------------------------

    def view(self) -> View:
        """What there is now; the same object as before if that is the same."""
        debugger = self.debugger
        with self._lock:
            chosen = (self.frame, self._focus, self._pokes, self._pausing, self._looked_for)
            seen_now = (debugger.version, debugger.session.closed, self._turn(), chosen)
            known = self._view
        same = seen_now == self._seen and not self.quiet
        if known is not None and same and known.state != "running":
            return known
        self._seen, self.quiet = seen_now, False
        session, stop = debugger.session, debugger.stop
        breaks = tuple(debugger.all_breaks())
        state = state_of(stop)
        if session.closed and stop is not None:
            state = "ended"
        view = View(state, session.num_workers, session.engine, session.closed, stop, breaks=breaks)
        if state == "paused":
            return self._paused(view)
        return self._runs(view) if state == "running" else self._rests(view)

    def settle(self, seconds: float) -> Stop | None:
        """The program as it stands, with its variables if they come in time; None: none yet."""
        view = self.view()
        if view.state == "paused" and view.stale:
            self._done.wait(seconds)
            view = self.view()
        return view.stop

    def _keep(self, view: View) -> View:
        if view != self._view:
            self._view = view
        assert self._view is not None
        return self._view

    def _rests(self, view: View) -> View:
        """Nothing was stepped yet, or it has ended."""
        with self._lock:
            self._ran_at, self._pausing, self._tables = None, False, ()
            source = self._source
            if view.stop is None or source is None:
                return self._keep(view)
            found = made.breaks_in(source["file"], view.breaks)
            return self._keep(
                replace(view, source=source | {"marks": {}, "line": None, "breaks": found})
            )

    def _paused(self, view: View) -> View:
        stop = view.stop
        assert stop is not None and self._debugger is not None
        with self._lock:
            self._ran_at, self._pausing = None, False
            at = (self._debugger.lockstep, stop.number, stop.groups)
            if at != self._at:
                self._at, self.frame, self._focus = at, 0, self._first(stop)
            wanted = (at, self.frame, self._pokes, self._turn())
        if wanted != self._looked_for and self._look(wanted, self._variables):
            self._done.wait(_AT_ONCE)
        with self._lock:
            known = self._looked_for if self._looked is not None else None
            if known is not None and known[0] == at and self._looked is not None:
                stop = self._looked  # which knows the stacks of those that wait in collectives too
            stop = replace(stop, frame=self.frame)
            if not 0 <= self._focus < view.count or not stop.workers[self._focus].stack:
                self._focus = self._first(stop)
            self._source = made.source_of(stop, self._focus, view.breaks)
            chosen = {"frame": self.frame, "focus": self._focus, "source": self._source}
            stale = known is None or known[:2] != wanted[:2]
            return self._keep(replace(view, stop=stop, tables=self._tables, stale=stale, **chosen))

    def _first(self, stop: Stop) -> int:
        """Whose source is shown at a new stop: of those that were told to go on, or go on next."""
        paused = [rank for group in stop.groups for rank in group]
        return next((rank for rank in paused if rank in (self._followed or ())), paused[0])

    def _runs(self, view: View) -> View:
        now, stop = time.monotonic(), view.stop
        assert stop is not None and self._debugger is not None
        with self._lock:
            if self._ran_at is None:
                self._ran_at = now
            began, before = self._ran_at, self._view
            same = self._at is not None and self._at[0] is self._debugger.lockstep
            if same and before is not None and before.stop is not None and now - began < _RUNS:
                if before.state == "paused" and now - began < _QUIETLY:
                    self.quiet = True
                    return before
                return self._keep(
                    replace(before, state="running", pausing=self._pausing, stale=True)
                )
            late = now - began > _RUNS and now >= self._next_look
        if late:
            self._look(("runs", now), lambda one, _: places_now(one))
        with self._lock:
            source, known = self._source, self._looked_for
            if source is not None:
                source = source | {"marks": {}, "line": None}
            if self._looked is not None and known and known[0] == "runs" and known[1] >= began:
                stop = replace(self._looked, number=stop.number, reason=stop.reason)
                source = made.source_of(stop, self._focus, view.breaks) or source
            chosen = {"focus": self._focus, "source": source, "pausing": self._pausing}
            return self._keep(replace(view, stop=stop, tables=self._tables, stale=True, **chosen))

    # -- looks -------------------------------------------------------------------------------

    def _look(self, wanted: Any, how: Callable[[Debugger, Any], Stop | None]) -> bool:
        """Begin a look, unless one is under way."""
        debugger = self._debugger
        with self._lock:
            if self._looking is not None or debugger is None:
                return False
            self._looking = wanted
            self._done.clear()

        def look() -> None:
            found = None
            try:
                found = how(debugger, wanted)
            finally:
                tables = tuple(made.tables_of(found)) if found and how == self._variables else None
                with self._lock:
                    self._looking = None
                    if debugger is self._debugger:
                        self._looked_for = wanted
                        self._looked = found
                        if tables is not None:
                            self._tables = tables
                self._next_look = time.monotonic() + 0.2
                self._done.set()
                self._nudge()

        threading.Thread(target=look, name="discolab-look", daemon=True).start()
        return True

    def _variables(self, debugger: Debugger, wanted: Any) -> Stop | None:
        try:
            found = debugger.where(wanted[1])
            if (found.number, found.groups) == wanted[0][1:]:
                return found
        except ArgumentError:  # there is no such frame
            with self._lock:
                self.frame = 0
        except DiscoError:  # it goes on already
            pass
        return None


def _weakly(looks: StepperLooks) -> Callable[[], None]:
    """A listener that keeps nothing alive."""
    held = weakref.ref(looks)

    def listener() -> None:
        found = held()
        if found is not None:
            found._on_change()

    return listener
