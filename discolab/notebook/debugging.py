"""The debugger in a notebook: stepping, looking around, break points.

A part of a `Lab`. Each `disco_*` method is the Python form of the magic of the same name; what they
do is done by `debugger.Debugger`. For what is over see looking_back.py.
"""

from __future__ import annotations

from typing import Any

from ..debugger.breaks import Break
from ..debugger.debugger import Debugger, debugger_of
from ..debugger.evaluated import Evaluated
from ..debugger.looking import DebuggerError, Ranks
from ..debugger.stops import Stop
from ..runtime.controller import check_timeout
from ..runtime.dref import DRef
from .looking_back import LookingBack


class Debugging(LookingBack):
    """Sessions whose programs can be stepped."""

    # -- going on ------------------------------------------------------------------------------

    def disco_step(
        self, ranks: Ranks = None, *, timeout: float | None = None, session: str | None = None
    ) -> DRef | Stop | None:
        """Have the workers go to the next line, in functions that it calls too.

        Parameters
        ----------
        ranks
            A rank set: these workers go on, the others stay. None: all; of workers that have
            parted, those furthest behind, so that they meet again.
        timeout
            Seconds to wait for the stop; the program goes on after it.
        session
            Its name; None: the one used last.

        Returns
        -------
        Stop, DRef or None
            Where they stand; or, at the end of the program, what ``%%disco`` would have returned.

        Raises
        ------
        DebuggerError
            If no program is being stepped.
        WorkerError
            If the program has ended, and failed.
        """
        return self._move(session, lambda debugger: debugger.step(ranks, timeout))

    def disco_next(
        self, ranks: Ranks = None, *, timeout: float | None = None, session: str | None = None
    ) -> DRef | Stop | None:
        """To the next line of this function, or of its caller when it returns; as `disco_step`."""
        return self._move(session, lambda debugger: debugger.next(ranks, timeout))

    def disco_out(
        self, ranks: Ranks = None, *, timeout: float | None = None, session: str | None = None
    ) -> DRef | Stop | None:
        """Until this function has returned; as `disco_step`."""
        return self._move(session, lambda debugger: debugger.out(ranks, timeout))

    def disco_until(
        self,
        line: int | None = None,
        ranks: Ranks = None,
        *,
        timeout: float | None = None,
        session: str | None = None,
    ) -> DRef | Stop | None:
        """To a later line of this function, as out of a loop, or to `line`; as `disco_step`."""
        return self._move(session, lambda debugger: debugger.until(line, ranks, timeout))

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

    def disco_pause(
        self, *, timeout: float | None = None, session: str | None = None
    ) -> DRef | Stop | None:
        """Have workers that run stop at the next line that they come to."""
        limit = _limit(timeout)
        return self._move(session, lambda debugger: debugger.pause(**limit))

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

    # -- looking around ------------------------------------------------------------------------

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

    def disco_eval(
        self,
        expression: str,
        ranks: Ranks = None,
        *,
        frame: int = 0,
        timeout: float | None = None,
        session: str | None = None,
    ) -> Evaluated:
        """The value of an expression on each worker that stands, equal ones once.

        It is worked out by the worker, in the frame in which it stands. A collective in it is an
        error, as the others would have to come too.

        Raises
        ------
        DebuggerError
            If no program stands.
        """
        limit = _limit(timeout)
        sess = self.session(session)
        with self._watching(sess):
            return debugger_of(sess).eval(expression, ranks, frame, **limit)

    def disco_set(
        self,
        name: str,
        expression: str,
        ranks: Ranks = None,
        *,
        frame: int = 0,
        timeout: float | None = None,
        session: str | None = None,
    ) -> Evaluated:
        """Give a variable a new value on each worker that stands; that value, as `disco_eval`."""
        limit = _limit(timeout)
        sess = self.session(session)
        with self._watching(sess):
            return debugger_of(sess).set(name, expression, ranks, frame, **limit)

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


def _limit(timeout: float | None) -> dict[str, Any]:
    """The argument of what has a limit of its own, if one was given."""
    return {} if check_timeout(timeout) is None else {"timeout": timeout}
