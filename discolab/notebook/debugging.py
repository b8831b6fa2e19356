"""The debugger in a notebook: stepping, looking around, break points.

A part of a `Lab`. Most `disco_*` methods are those of `debugger.Debugger` under another name, with
the session's name as one more argument. For what is over see looking_back.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..debugger.breaks import Break
from ..debugger.debugger import Debugger, debugger_of
from ..debugger.looking import DebuggerError, Ranks
from ..debugger.stops import Stop
from ..runtime.controller import check_timeout
from ..runtime.dref import DRef
from .looking_back import LookingBack

_GOING_ON = """

Shows what is printed meanwhile. Returns a `Stop` with variables; or, at the end of the program,
what ``%%disco`` would have returned. Raises a `DebuggerError` if no program is being stepped, a
`WorkerError` if the program has ended and failed.
"""
_ASKING = """

Raises a `DebuggerError` if no program stands.
"""


def _with_session(method: Callable[..., Any], use: str, more: str) -> Callable[..., Any]:
    """A method of `Debugging` that gives `method` of a session's debugger to its method `use`.

    It takes what that takes, and ``session``: a name; None: the session used last.
    """
    signature = inspect.signature(method)
    session = inspect.Parameter("session", inspect.Parameter.KEYWORD_ONLY, default=None)

    @functools.wraps(method)
    def command(lab: Any, *args: Any, session: str | None = None, **options: Any) -> Any:
        if check_timeout(options.get("timeout")) is None:
            options.pop("timeout", None)  # the method may have a limit of its own
        return getattr(lab, use)(session, lambda debugger: method(debugger, *args, **options))

    command.__name__ = f"disco_{method.__name__}"
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), session]
    )
    command.__doc__ = inspect.cleandoc(method.__doc__ or "") + more
    return command


def _moves(method: Callable[..., Any]) -> Callable[..., DRef | Stop | None]:
    return _with_session(method, "_move", _GOING_ON)


def _asks(method: Callable[..., Any]) -> Callable[..., Any]:
    return _with_session(method, "_look", _ASKING)


class Debugging(LookingBack):
    """Sessions whose programs can be stepped."""

    disco_step = _moves(Debugger.step)
    disco_next = _moves(Debugger.next)
    disco_out = _moves(Debugger.out)
    disco_until = _moves(Debugger.until)
    disco_pause = _moves(Debugger.pause)
    disco_eval = _asks(Debugger.eval)
    disco_set = _asks(Debugger.set)

    def disco_continue(
        self,
        n: int = 1,
        ranks: Ranks = None,
        *,
        timeout: float | None = None,
        session: str | None = None,
    ) -> DRef | Stop | None:
        """To the next break point, the `n`-th one, or the end; as `disco_step`.

        While the workers run, after a wait that was given up, this waits again.
        """

        def move(debugger: Debugger) -> Stop:
            if debugger.is_active and not debugger.is_settled:
                return debugger.wait(timeout)
            return debugger.continue_(n, ranks, timeout)

        return self._move(session, move)

    def disco_abort(self, *, session: str | None = None) -> list[int]:
        """End the program on all workers; the session goes on.

        Returns
        -------
        list of int
            The workers that did not stop: they are inside a call that Python can't interrupt.

        Raises
        ------
        DebuggerError
            If no program is being stepped.
        """
        sess = self.session(session)
        debugger = debugger_of(sess)
        if not debugger.is_active:
            raise DebuggerError("there is nothing to end: no program is being stepped")
        with self._watching(sess):
            stuck = debugger.abort()
        started = self._stopped.get(sess)
        if started is not None:
            self._forget(started.run)
        return stuck

    def disco_where(
        self, ranks: Ranks = None, *, frame: int = 0, session: str | None = None
    ) -> Stop:
        """Where each worker is, its stack, and its variables there.

        Parameters
        ----------
        ranks
            Of which workers the variables; None: all.
        frame
            Whose variables: 0 of the function in which they stand, 1 of its caller, and so on.

        Raises
        ------
        DebuggerError
            If nothing was stepped yet.
        """
        return debugger_of(self.session(session)).where(frame, ranks)

    def _look(self, session: str | None, look: Callable[[Debugger], Any]) -> Any:
        """Have workers that stand answer, and show what that prints."""
        sess = self.session(session)
        with self._watching(sess):
            return look(debugger_of(sess))

    # -- break points --------------------------------------------------------------------------

    def disco_break(
        self,
        where: str = "",
        ranks: Ranks = None,
        *,
        remove: int | str | None = None,
        session: str | None = None,
    ) -> list[Break]:
        """Set a break point, remove some, or list those that there are.

        Parameters
        ----------
        where
            ``model.py:12``, ``model.py:12 if rank == 2 and loss.isnan().any()``, or a line alone of
            the cell in which the workers stand. It holds for the programs to come, too.
        ranks
            On which workers its condition counts; None: all.
        remove
            The number of one, or ``"all"``.

        Returns
        -------
        list of Break
            The one that was set; those that were removed; or all.

        Raises
        ------
        ArgumentError
            If there is no such line, or the condition can't be compiled.
        """
        debugger = debugger_of(self.session(session))
        if remove is not None:
            return debugger.clear(None if remove == "all" else int(remove))
        if where:
            return [debugger.break_at(where, ranks=ranks)]
        return debugger.all_breaks()

    # -- status --------------------------------------------------------------------------------

    def disco_status(self, name: str | None = None) -> str:
        """As `Sessions.disco_status`, and where a program stands that is stepped."""
        text = super().disco_status(name)
        sess = self.sessions.get(name or self.current or "")
        if sess is None or sess.closed:
            return text
        debugger = debugger_of(sess)
        stop = debugger.stop if debugger.is_paused else None
        if stop is None:
            return text
        return (
            f"{text}\n{stop.name} is paused: {stop.reason} (%disco_where shows it; %disco_step, "
            "%disco_continue go on, %disco_abort ends it)"
        )
