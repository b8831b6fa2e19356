"""The debugger in a notebook: stepping, looking around, breakpoints, what is over.

A part of a `Lab`. Most `disco_*` methods are those of `debugger.Debugger` under another name, with
the session's name as one more argument.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from .. import dap
from ..debugger import post_mortem
from ..debugger.breaks import Break
from ..debugger.controller import DebuggerError, Ranks
from ..debugger.debugger import Debugger, debugger_of
from ..debugger.explaining import Explanation, explain
from ..debugger.stops import Evaluated, Stop
from ..runtime.controller import check_timeout
from ..runtime.dref import DRef
from ..runtime.ranks import parse_ranks
from ..runtime.session import Session
from . import errors_shown
from .jupyter_debugger import JupyterDebugger
from .programs import Programs
from .running import Running
from .sessions import Sessions

_GOING_ON = """

Shows what is printed meanwhile. Returns a `Stop` with variables; or, at the end of the program,
what ``%%disco`` would have returned. Raises a `DebuggerError` if no program is being stepped, a
`WorkerError` if the program has ended and failed.
"""
_ASKING = """

Raises a `DebuggerError` if no program stands.
"""


_RECALLING = """

Raises a `DebuggerError` if nothing was recorded.
"""


def _with_session(method: Callable[..., Any], use: str, more: str) -> Callable[..., Any]:
    """A method of `Debugging` that gives `method` of a session's debugger to its method `use`.

    It takes what that takes, and ``session``: a name; None: the session used last.
    """
    signature = inspect.signature(method)
    session = inspect.Parameter("session", inspect.Parameter.KEYWORD_ONLY, default=None)

    @functools.wraps(method)
    def command(self: Any, *args: Any, session: str | None = None, **options: Any) -> Any:
        if check_timeout(options.get("timeout")) is None:
            options.pop("timeout", None)  # the method may have a limit of its own
        return getattr(self, use)(session, lambda debugger: method(debugger, *args, **options))

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


def _recalls(method: Callable[..., Any]) -> Callable[..., Any]:
    return _with_session(method, "_look", _RECALLING)


class Debugging:
    """Steps through programs on the sessions of one shell, and looks at them."""

    def __init__(self, sessions: Sessions, running: Running, programs: Programs) -> None:
        self._sessions = sessions
        self._running = running
        self._programs = programs
        self._servers: WeakKeyDictionary[Session, dap.Server] = WeakKeyDictionary()
        self._jupyterlab: JupyterDebugger | None = None
        sessions.status_notes.append(_where_it_is_paused)
        sessions.at_stop.append(lambda _, session: self._show_no_more(session))
        programs.at_begin.append(self._program_begins)

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
        """To the next breakpoint, the `n`-th one, or the end; as `disco_step`.

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
        sess = self._sessions.get(session)
        debugger = debugger_of(sess)
        if not debugger.is_active:
            raise DebuggerError("there is nothing to end: no program is being stepped")
        with self._running.watching(sess):
            stuck = debugger.abort()
        self._programs.forget(sess)
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
        return debugger_of(self._sessions.get(session)).where(frame, ranks)

    def _move(self, session: str | None, move: Callable[[Debugger], Stop]) -> DRef | Stop | None:
        return self._programs.move(session, move)

    def _look(self, session: str | None, look: Callable[[Debugger], Any]) -> Any:
        """Have workers that stand answer, and show what that prints."""
        sess = self._sessions.get(session)
        with self._running.watching(sess):
            return look(debugger_of(sess))

    # -- breakpoints --------------------------------------------------------------------------

    def disco_break(
        self,
        where: str = "",
        ranks: Ranks = None,
        *,
        hits: str = "",
        log: str = "",
        remove: int | str | None = None,
        session: str | None = None,
    ) -> list[Break]:
        """Set a breakpoint, remove some, or list those that there are.

        Parameters
        ----------
        where
            ``model.py:12``, ``model.py:12 if rank == 2 and loss.isnan().any()``, or a line alone of
            the cell in which the workers stand. It holds for the programs to come, too.
        ranks
            On which workers its condition counts; None: all.
        hits, log
            At which times it stops, and what it prints instead: see `Debugger.break_at`.
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
        debugger = debugger_of(self._sessions.get(session))
        if remove is not None:
            return debugger.clear(None if remove == "all" else int(remove))
        if where:
            return [debugger.break_at(where, ranks=ranks, hits=hits, log=log)]
        return debugger.all_breaks()

    # -- other front ends ---------------------------------------------------------------------

    def disco_dap(
        self,
        port: int = 0,
        *,
        token: str | None = None,
        jupyterlab: bool = False,
        close: bool = False,
        session: str | None = None,
    ) -> dap.Server | None:
        """Serve the debugger to VS Code and other editors: see `dap.serve`.

        Parameters
        ----------
        port, token
            Where, and what the editor must show; 0 and None: chosen here.
        jupyterlab
            Have JupyterLab's own debugger show the workers instead of the kernel, too.
        close
            Serve it no more.

        Raises
        ------
        DebuggerError
            With `close`, if it was not served; with `jupyterlab`, outside of a kernel and while its
            debugger is on, for the kernel.
        DiscoError
            If the port is taken, or the session is served at another.
        """
        sess = self._sessions.get(session)
        if close:
            self._show_no_more(sess)
        known = self._servers.pop(sess, None)
        if close:
            if known is None or known.closed:
                raise DebuggerError("this session is not served to editors")
            known.close()
            return None
        server = dap.serve(sess, port, token)
        self._servers[sess] = server
        if known is not server:
            self._sessions.output.listeners.append(_passing_output_on(sess, server, self._sessions))
        if jupyterlab and not (self._jupyterlab and self._jupyterlab.shows(server)):
            if self._jupyterlab is not None:
                self._jupyterlab.uninstall()
            shown = JupyterDebugger(self._sessions.shell, server)
            shown.install()
            self._jupyterlab = shown
        return server

    def _program_begins(self, session: Session, file: str) -> None:
        server = self._servers.get(session)
        if server is not None and self._jupyterlab and self._jupyterlab.shows(server):
            self._jupyterlab.program_begins(file)

    def _show_no_more(self, session: Session) -> None:
        """Leave JupyterLab's debugger to the kernel if it shows this session."""
        server = self._servers.get(session)
        if server is not None and self._jupyterlab and self._jupyterlab.shows(server):
            self._jupyterlab.end()

    def uninstall(self) -> None:
        """Take the hook in the kernel away."""
        if self._jupyterlab is not None:
            self._jupyterlab.uninstall()

    # -- what is over --------------------------------------------------------------------------

    def disco_pm(
        self,
        ranks: Ranks = None,
        *,
        frame: int = 0,
        expression: str | None = None,
        forget: bool = False,
        timeout: float | None = None,
        session: str | None = None,
    ) -> Stop | Evaluated | None:
        """Where each worker was when the last cell failed there, with its variables.

        The frames are kept until the next cell begins, but for those of a cell that ran out of
        memory: of these it is only kept what the variables looked like.

        Parameters
        ----------
        ranks
            The workers; None: all on which it failed.
        frame
            0: where it was raised; 1: the function that called that one, and so on.
        expression
            Show its value in that frame instead.
        forget
            Let the frames go, and what they hold.

        Raises
        ------
        DebuggerError
            If nothing has failed, or what was kept has been let go.
        """
        sess = self._sessions.free(session)
        if forget:
            post_mortem.forget_all(sess)
            return None
        given = None if ranks is None else parse_ranks(ranks, sess.num_workers, sess.current_mesh)
        with self._running.watching(sess):
            if expression is None:
                return post_mortem.post_mortem(sess, given, frame=frame, timeout=timeout)
            return post_mortem.evaluate_at_raise(
                sess, expression, given, frame=frame, timeout=timeout
            )

    def disco_explain(self, *, session: str | None = None) -> Explanation:
        """What went wrong last: what failed, on whom, and since when the workers differ."""
        return explain(self._sessions.get(session))

    def disco_traceback(self, ranks: Ranks = None, *, session: str | None = None) -> str:
        """The last error of workers that was shown here, with all frames of its tracebacks.

        Raises
        ------
        ArgumentError
            If there was none, or none on these workers.
        """
        sess = self._sessions.get(session)
        chosen = None if ranks is None else parse_ranks(ranks, sess.num_workers, sess.current_mesh)
        return errors_shown.whole(chosen)

    def disco_history(
        self,
        name: str | None = None,
        ranks: Ranks = None,
        *,
        last: int = 50,
        session: str | None = None,
    ) -> Any:
        """How a variable was over time on each worker, from what ``%%disco --trace`` recorded.

        Parameters
        ----------
        name
            The variable; None: the names of all that were recorded.
        ranks
            The workers; None: all.
        last
            How many of the last lines at which it changed.

        Returns
        -------
        History or list of str
            Shows itself.

        Raises
        ------
        DebuggerError
            If nothing was recorded.
        ArgumentError
            If that variable was not: says which were.
        """
        debugger = debugger_of(self._sessions.get(session))
        return debugger.recorded() if name is None else debugger.history(name, ranks, last)

    disco_back = _recalls(Debugger.back)
    disco_forward = _recalls(Debugger.forward)
    disco_forth = disco_forward


def _passing_output_on(
    session: Session, server: dap.Server, sessions: Sessions
) -> Callable[[int, int, Any], None]:
    """What has an editor show what the workers of a session print, until it is served no more."""
    own = id(session.workers_here()[0].shared)

    def heard(key: int, rank: int, item: Any) -> None:
        if key == own and item[0] in ("stdout", "stderr"):
            server.put_out(rank, item[0], item[1])
        if server.closed and heard in sessions.output.listeners:
            sessions.output.listeners.remove(heard)

    return heard


def _where_it_is_paused(session: Session) -> str:
    """Where a program stands that is stepped; "" if none does."""
    debugger = debugger_of(session)
    stop = debugger.stop if debugger.is_paused else None
    if stop is None:
        return ""
    return (
        f"{stop.name} is paused: {stop.reason} (%disco_where shows it; %disco_step, "
        "%disco_continue go on, %disco_abort ends it)"
    )
