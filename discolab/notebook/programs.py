"""Cells and scripts that may stop for the debugger, until they have ended.

A part of a `Lab`. What may stop is kept in `_stopped`: whoever takes its last step gets its value
or its error, as ``%%disco`` would have. How stepping is done is `debugger.Debugger`'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from IPython.display import display

from ..debugger.debugger import Debugger, debugger_of
from ..debugger.stops import Stop
from ..runtime.dref import DRef
from ..runtime.errors import DiscoAssertionError, DiscoError, SessionError, WaitTimeoutError
from ..runtime.session import Session
from .cell import CellRun
from .running import Running, ending_on_stop

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
        In which break points are that name no file.
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


class Programs(Running):
    """Sessions whose programs may stop."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._stopped: WeakKeyDictionary[Session, Started] = WeakKeyDictionary()

    def _set_up(self, session: Session) -> None:
        super()._set_up(session)
        debugger_of(session)  # from now on `breakpoint()` stops

    def _stop(self, name: str) -> None:
        super()._stop(name)
        started = self._stopped.get(self.sessions[name]) if name in self.sessions else None
        if started is not None:
            self._forget(started.run)

    def _begin(self, session: Session, program: Program, stepping: Stepping) -> Started:
        """Send a program, to be stepped if that was asked for or there are break points."""
        debugger = debugger_of(session)
        if not stepping.asked and not debugger.breaks:
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
        self.shell.user_ns.update(self._bound(run.session, started.program.out))
        return result

    def _keep(self, started: Started) -> None:
        """It may stop, and be led to its end by other cells, or elsewhere."""
        self._stopped[started.run.session] = started
        self._in_background(started.run)

    def _forget(self, run: CellRun) -> None:
        """It has ended, and that was told."""
        if run in self._background:
            self._background.remove(run)
        known = self._stopped.get(run.session)
        if known is not None and known.run is run:
            del self._stopped[run.session]

    def _move(self, session: str | None, move: Callable[[Debugger], Stop]) -> DRef | Stop | None:
        """Have a program go on, and show what it prints here."""
        sess = self.session(session)
        debugger, started = debugger_of(sess), self._stopped.get(sess)
        if started is not None and debugger.is_active and started.run.ready():
            self._forget(started.run)  # another program was begun meanwhile, not by a cell
            started = None
        with ending_on_stop(sess), self._watching(sess):
            if started is None:  # not begun by a cell
                stop = move(debugger)
                return stop if stop.finished else debugger.where()
            if not debugger.is_active:  # it was led to its end elsewhere
                return self._ended(started)
            return self._until_it_stands(started, lambda: move(debugger))
