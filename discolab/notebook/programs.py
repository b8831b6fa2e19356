"""Cells and scripts that may stop for the debugger, until they have ended.

A part of a `Lab`. Each `disco_*` method is the Python form of the magic of the same name. What may
stop is kept in `_stopped`: whoever takes its last step gets its value
or its error, as ``%%disco`` would have. How stepping is done is `debugger.Debugger`'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from IPython.display import display

from ..debugger.debugger import Debugger, debugger_of
from ..debugger.stops import Stop
from ..runtime.controller import check_timeout
from ..runtime.dref import DRef
from ..runtime.errors import DiscoAssertionError, DiscoError, SessionError, WaitTimeoutError
from ..runtime.ranks import parse_ranks
from ..runtime.session import Session
from ..runtime.sources import display_name
from .cell import CellRun, check_syntax, run_cell
from .inspecting import WorkerInspector, take_help
from .live import PROGRESS_AFTER
from .running import Running, ending_on_stop
from .script import read_script, run_script
from .sessions import Sessions
from .variables import send_variables

_STANDS = (
    "the workers stand there: %disco_eval EXPR asks, %disco_continue has it raise on them, "
    "%disco_abort ends them"
)


@dataclass(frozen=True)
class Stepping:
    """How a program is to be stepped: as the options of ``%%disco`` say, see `Debugger.prepare`."""

    step: bool = False
    breaks: Sequence[str] = ()
    trace: Sequence[str] | None = None
    pm: bool = False
    nan: bool = False

    @property
    def asked(self) -> bool:
        """Whether any of it was given."""
        return bool(self.step or self.breaks or self.pm or self.nan or self.trace is not None)


@dataclass(frozen=True)
class Program:
    """A cell or a script, ready to be sent.

    Attributes
    ----------
    func
        The worker function that runs it.
    send
        Has the workers call a function, `func` or what stands for it.
    name
        What people are told that runs: ``Cell In[3]``.
    file
        In which breakpoints are that name no file.
    ranks
        The workers that run it.
    words
        For the status of workers.
    out
        Worker variables to bind when it has ended.
    """

    func: Callable[..., Any]
    send: Callable[[Callable[..., Any]], CellRun]
    name: str
    file: str
    ranks: Sequence[int]
    words: str
    out: Sequence[str] = ()


@dataclass(frozen=True)
class Started:
    """A program that was sent; `stepped` if the debugger knows of it."""

    program: Program
    run: CellRun
    stepped: bool


class Programs:
    """Runs cells and scripts on the sessions of one shell.

    Attributes
    ----------
    at_begin
        Called with the session and the file of a program that is about to be sent.
    """

    def __init__(self, sessions: Sessions, running: Running, inspector: WorkerInspector) -> None:
        self._sessions = sessions
        self._shell = sessions.shell
        self._running = running
        self._inspector = inspector
        self._stopped: WeakKeyDictionary[Session, Started] = WeakKeyDictionary()
        self.at_begin: list[Callable[[Session, str], object]] = []
        sessions.at_set_up.append(debugger_of)  # from then on `breakpoint()` stops
        sessions.at_stop.append(lambda _, session: self.forget(session))

    def disco(
        self,
        cell: str,
        *,
        session: str | None = None,
        targets: str | Iterable[int] | None = None,
        push: Sequence[str] = (),
        out: Sequence[str] = (),
        block: bool = True,
        stream: bool | None = None,
        timeout: float | None = None,
        group_outputs: str = "order",
        progress_after: float = PROGRESS_AFTER,
        interrupt: bool = True,
        step: bool = False,
        breaks: Sequence[str] = (),
        trace: Sequence[str] | None = None,
        pm: bool = False,
        nan: bool = False,
    ) -> DRef | CellRun | Stop | None:
        """Run a cell on the workers.

        Parameters
        ----------
        cell
            Its source, as typed below ``%%disco``.
        session
            Name of the session; None: the one used last.
        targets
            A rank set (see `runtime.ranks`); None: all workers.
        push
            Notebook variables to send first.
        out
            Worker variables to bind in the notebook afterwards, as DRefs.
        block
            False returns a `CellRun` at once.
        stream
            Show output while the cell runs; None: in a front end where somebody watches.
        timeout
            Seconds to wait for the workers.
        group_outputs
            ``order``, ``engine`` or ``type``, see `output.GROUPINGS`.
        progress_after
            Seconds before a line says what the workers do; negative: never.
        interrupt
            Whether stop ends the cell on the workers, or the waiting only.
        step, breaks, trace, pm, nan
            Have the workers stop at the first line; at breakpoints (``12 if rank == 2``); record
            values (names, () for all); stay where they fail; stop where a value is not finite:
            see `Debugger.prepare`.

        Returns
        -------
        DRef, CellRun, Stop or None
            The value of the last expression, where it has one on any worker. A `Stop` if the
            workers stand.

        Raises
        ------
        WorkerError
            If it failed on one or more workers.
        """
        # one line in front, so that line numbers are those of the cell with its magic
        source, asked = take_help("\n" + self._shell.transform_cell(cell))
        if asked and not source.strip():
            self._inspector.show(self._sessions.get(session), asked)
            return None
        sess = self._sessions.free(session)
        check_timeout(timeout)
        ranks = parse_ranks(targets, sess.num_workers, sess.current_mesh)
        filename = self._running.next_file()
        check_syntax(sess, source, filename)
        if push:
            send_variables(sess, self._shell.user_ns, push)
        program = Program(
            run_cell,
            lambda func: CellRun.of_source(sess, source, filename, ranks, func),
            display_name(filename),
            filename,
            ranks,
            "the cell",
            out,
        )
        shown = self._running.watching(sess, stream, progress_after, group_outputs)
        # from before the program is sent: workers may print at once
        self._sessions.output.take_streams()
        with ending_on_stop(sess, interrupt), shown if block else nullcontext():
            started = self._begin(sess, program, Stepping(step, breaks, trace, pm, nan))
            if not block:
                self._running.leave(started.run)
                self._shell.user_ns.update({name: sess[name] for name in out})
                return started.run
            result = self._end_or_stop(started, timeout, interrupt)
        self._inspector.show(sess, asked)
        return result

    def disco_run(
        self,
        path: str,
        args: Sequence[str] = (),
        *,
        session: str | None = None,
        timeout: float | None = None,
        stream: bool | None = None,
        group_outputs: str = "order",
        step: bool = False,
        breaks: Sequence[str] = (),
        trace: Sequence[str] | None = None,
        pm: bool = False,
        nan: bool = False,
    ) -> DRef | Stop | None:
        """Run a script for torchrun on all workers; its names are in the cells afterwards.

        Parameters
        ----------
        path
            The script.
        args
            Its command line.
        step, breaks, trace, pm, nan
            As for `disco`.

        Returns
        -------
        Stop or None
            A `Stop` if the workers stand.

        Raises
        ------
        ArgumentError
            If it can't be read or compiled.
        WorkerError
            If it failed, or exited with a status other than 0, on one or more workers.
        """
        sess = self._sessions.free(session)
        check_timeout(timeout)
        full, source = read_script(path)
        check_syntax(sess, source, full)
        ranks = list(range(sess.num_workers))
        words = "the script"
        program = Program(
            run_script,
            lambda func: CellRun(sess, ranks, func, full, source, list(args), path, what=words),
            Path(full).name,
            full,
            ranks,
            words,
        )
        shown = self._running.watching(sess, stream, group_outputs=group_outputs)
        with ending_on_stop(sess), shown:
            started = self._begin(sess, program, Stepping(step, breaks, trace, pm, nan))
            return self._end_or_stop(started, timeout)

    # -- what may stop ---------------------------------------------------------------------------

    def _begin(self, session: Session, program: Program, stepping: Stepping) -> Started:
        """Send a program, to be stepped if that was asked for or there are breakpoints."""
        debugger = debugger_of(session)
        for note in self.at_begin:
            note(session, program.file)
        if not stepping.asked and not debugger.is_wanted:
            return Started(program, program.send(program.func), False)
        stepped = debugger.prepare(
            program.func,
            name=program.name,
            file=program.file,
            ranks=program.ranks,
            words=program.words,
            **vars(stepping),
        )
        try:
            started = Started(program, program.send(stepped), True)
        except BaseException:
            debugger.cancel()
            raise
        self._keep(started)
        return started

    def _end_or_stop(
        self, started: Started, timeout: float | None = None, interrupt: bool = True
    ) -> DRef | Stop | None:
        """Wait until a program has ended or stands."""
        debugger = debugger_of(started.run.session)
        if started.stepped:
            return self._until_it_stands(started, lambda: debugger.wait(timeout))
        try:
            return self._ended(started, timeout, interrupt)
        except SessionError:
            if not debugger.is_paused:
                raise
        debugger.adopt(started.program.name)  # `breakpoint()` in what nobody began to step
        self._keep(started)
        found = self._until_it_stands(started, lambda: debugger.wait(timeout))
        if isinstance(found, Stop) and (failed := debugger.failed_assertion):
            display(found)  # type: ignore[no-untyped-call]
            raise DiscoAssertionError(f"{failed}\n{_STANDS}")  # or Run All would go on
        return found

    def _until_it_stands(self, started: Started, wait: Callable[[], Stop]) -> DRef | Stop | None:
        """The next stop, with variables, or what the program has come to."""
        try:
            stop = wait()
        except KeyboardInterrupt:  # the second one, or the workers came to no line: it was ended
            self._forget(started.run)
            raise started.run.interrupted() from None
        except (SessionError, WaitTimeoutError):
            raise
        except DiscoError:  # a worker has died, and that is told now
            self._forget(started.run)
            raise
        if stop.finished:
            return self._ended(started)
        return debugger_of(started.run.session).where()

    def _ended(
        self, started: Started, timeout: float | None = None, interrupt: bool = True
    ) -> DRef | None:
        """The value of a cell, and its variables bound; its error is raised."""
        run = started.run
        try:
            result = run.get(timeout, interrupt)
        except (SessionError, WaitTimeoutError):
            raise
        except BaseException:
            self._forget(run)
            raise
        self._forget(run)
        self._shell.user_ns.update(self._running.bound(run.session, started.program.out))
        return result

    def forget(self, session: Session) -> None:
        """What a session had begun to step was ended."""
        started = self._stopped.get(session)
        if started is not None:
            self._forget(started.run)

    def _keep(self, started: Started) -> None:
        """It may stop, and be led to its end by other cells, or elsewhere."""
        self._stopped[started.run.session] = started
        self._running.leave(started.run)

    def _forget(self, run: CellRun) -> None:
        """It has ended, and that was told."""
        if run in self._running.background:
            self._running.background.remove(run)
        known = self._stopped.get(run.session)
        if known is not None and known.run is run:
            del self._stopped[run.session]

    def move(self, session: str | None, move: Callable[[Debugger], Stop]) -> DRef | Stop | None:
        """Have a program go on, and show what it prints here."""
        sess = self._sessions.get(session)
        debugger, started = debugger_of(sess), self._stopped.get(sess)
        if started is not None and debugger.is_active and started.run.ready():
            self._forget(started.run)  # another program was begun meanwhile, not by a cell
            started = None
        with ending_on_stop(sess), self._running.watching(sess):
            if started is None:  # not begun by a cell
                stop = move(debugger)
                return stop if stop.finished else debugger.where()
            if not debugger.is_active:  # it was led to its end elsewhere
                return self._ended(started)
            return self._until_it_stands(started, lambda: move(debugger))
