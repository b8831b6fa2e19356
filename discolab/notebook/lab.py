"""The notebook's sessions and what can be done with them: what the magics call.

Each `disco_*` method here and in sessions.py is the Python form of the magic of the same name. One
`Lab` an IPython shell; it is used from the shell's thread, or from any thread that runs a cell.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..ccl.rounds import failed_in_collective
from ..engines.remote import zygote
from ..runtime import sources
from ..runtime.controller import check_timeout
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError, DiscoError, SessionError, WorkerError
from ..runtime.failures import Failure, name_ranks, summarize
from ..runtime.ranks import parse_ranks
from ..runtime.session import Session
from ..runtime.worker import current_worker
from ..views import doctor_view as _doctor_view  # noqa: F401 - draws a Diagnosis
from . import bars, errors_shown, prompts, terminal
from .cell import CellInterrupted, CellRun, check_syntax, has_value
from .live import PROGRESS_AFTER, LiveView
from .panels import Panels
from .script import read_script, run_script
from .worker_shell import set_up

_CELL_FILE = re.compile(r"(Cell In\[\d+\])(\.\d+)?")


class Lab(Panels):
    """One shell's sessions, and the cells that run on them."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._cells: dict[str, int] = {}
        self._background: list[CellRun] = []  # not yet known to have ended

    # -- in place and out ----------------------------------------------------------------------

    def install(self) -> None:
        """Hook into the shell."""
        self.output.install()
        prompts.install(getattr(self.shell, "kernel", None))
        bars.install()
        errors_shown.install()
        terminal.install(self.shell)
        self._notebook_cells.install()
        self.watch_for_the_end()
        zygote.PRELOAD.append(set_up.__module__)
        sources.namers.append(self.cell_name)
        WorkerError.hint = staticmethod(doctor_hint)
        self.shell.events.register("pre_run_cell", self.cell_begins)
        self.shell.events.register("post_run_cell", self._after_cell)

    def uninstall(self) -> None:
        """Shut all sessions down and take every hook away."""
        for name in [name for name, session in self.sessions.items() if not session.closed]:
            self._stop(name)
            print(f"{name}: shut down with the extension")
        self.shell.events.unregister("pre_run_cell", self.cell_begins)
        self.shell.events.unregister("post_run_cell", self._after_cell)
        sources.namers.remove(self.cell_name)
        WorkerError.hint = None
        zygote.PRELOAD.remove(set_up.__module__)
        self._notebook_cells.uninstall()
        self.watch_no_more()
        terminal.uninstall(self.shell)
        errors_shown.uninstall()
        bars.uninstall()
        prompts.uninstall()
        self.output.uninstall()

    def _after_cell(self, *_: Any) -> None:
        self.output.install()  # a library may have replaced the streams
        # asked before the output is shown: what a cell has printed is there once it has ended
        ends = [(run, _end_of(run)) for run in self._background]
        self.output.flush()
        self.cell_ends()
        self.flush_panels()
        for run, words in ends:
            if words is not None:
                self._background.remove(run)
                if words:
                    print(words, file=sys.stderr)

    def cell_name(self, filename: str) -> str | None:
        """``Cell In[3]`` for the file name of a ``%%disco`` or an ordinary cell."""
        match = _CELL_FILE.fullmatch(filename)
        return match[1] if match else self._notebook_cells.name(filename)

    # -- cells ---------------------------------------------------------------------------------

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
    ) -> DRef | CellRun | None:
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

        Returns
        -------
        DRef, CellRun or None
            The value of the last expression, where it has one on any worker.

        Raises
        ------
        WorkerError
            If it failed on one or more workers.
        """
        sess = self.session(session)
        check_timeout(timeout)
        ranks = parse_ranks(targets, sess.num_workers, sess.current_mesh)
        filename = self._next_file()
        # one line in front, so that line numbers are those of the cell with its magic
        source = "\n" + self.shell.transform_cell(cell)
        check_syntax(source, filename)
        if push:
            self.disco_push(push, session=session)
        try:
            run = CellRun.of_source(sess, source, filename, ranks)
            if not block:
                self._background.append(run)
                self.shell.user_ns.update({name: sess[name] for name in out})
                return run
            result = self._wait(run, timeout, interrupt, stream, progress_after, group_outputs)
        except CellInterrupted:
            raise
        except KeyboardInterrupt:  # stop was pressed before or after the wait
            if interrupt:
                sess.interrupt()
            raise CellInterrupted([]) from None
        self.shell.user_ns.update(self._bound(sess, out))
        return result

    def _wait(
        self,
        run: CellRun,
        timeout: float | None = None,
        interrupt: bool = True,
        stream: bool | None = None,
        progress_after: float = PROGRESS_AFTER,
        group_outputs: str = "order",
    ) -> DRef | None:
        """Wait for a cell and show its output."""
        watch = self._watches.get(run.session)
        view = LiveView(self.shell, self.output, run.session, stream, progress_after, watch)
        with self.output.during_cell(group_outputs), self._showing(run.session, view):
            return run.get(timeout, interrupt)

    def disco_run(
        self,
        path: str,
        args: Sequence[str] = (),
        *,
        session: str | None = None,
        timeout: float | None = None,
        stream: bool | None = None,
        group_outputs: str = "order",
    ) -> None:
        """Run a script for torchrun on all workers; its names are in the cells afterwards.

        Parameters
        ----------
        path
            The script.
        args
            Its command line.

        Raises
        ------
        ArgumentError
            If it can't be read or compiled.
        WorkerError
            If it failed, or exited with a status other than 0, on one or more workers.
        """
        sess = self.session(session)
        check_timeout(timeout)
        full, source = read_script(path)
        check_syntax(source, full)
        ranks = list(range(sess.num_workers))
        try:
            run = CellRun(sess, ranks, run_script, full, source, list(args), what="the script")
            self._wait(run, timeout, stream=stream, group_outputs=group_outputs)
        except CellInterrupted:
            raise
        except KeyboardInterrupt:
            sess.interrupt()
            raise CellInterrupted([]) from None

    def _bound(self, session: Session, names: Sequence[str]) -> dict[str, DRef]:
        """DRefs of worker variables, which must be there on one worker at least."""
        refs = {name: session[name] for name in names}
        for name, ref in refs.items():
            there = session.peek(session.call_packed(has_value, ref), tell=True)
            if all(isinstance(answer, Failure) for answer in there.values()):
                raise ArgumentError(f"-o: no worker has a variable named {name!r}")
        return refs

    def _next_file(self) -> str:
        """A file name for a cell, made for people: ``Cell In[3]``, its second ``Cell In[3].2``."""
        # the number in front of the cell; newer IPythons count on before they run it
        name = f"Cell In[{self.shell.displayhook.prompt_count}]"
        self._cells[name] = self._cells.get(name, 0) + 1
        return name if self._cells[name] == 1 else f"{name}.{self._cells[name]}"

    @contextmanager
    def _showing(self, session: Session, view: LiveView) -> Iterator[None]:
        """Have a session's waits on this thread show `view`."""
        before = session.tick
        session.tick = view.tick  # type: ignore[method-assign]
        try:
            yield
        finally:
            session.tick = before  # type: ignore[method-assign]
            view.end()

    def disco_push(
        self,
        names: Sequence[str],
        *,
        session: str | None = None,
        targets: str | Iterable[int] | None = None,
    ) -> None:
        """Send notebook variables to the workers, each its own copy.

        Raises
        ------
        ArgumentError
            If there is no such variable, or it can't be sent.
        """
        sess = self.session(session)
        ranks = parse_ranks(targets, sess.num_workers, sess.current_mesh)
        missing = [name for name in names if name not in self.shell.user_ns]
        if missing:
            raise ArgumentError(f"the notebook has no variable named {', '.join(missing)}")
        for name in names:
            value = self.shell.user_ns[name]
            try:
                if len(ranks) == sess.num_workers:
                    sess.push({name: value})
                else:
                    sess.call_without_result(_set_on, ranks, {name: value})
            except ArgumentError as exc:
                raise ArgumentError(f"{name} can't be sent: {exc}") from None

    def disco_pull(
        self,
        names: Sequence[str],
        *,
        session: str | None = None,
        targets: str | Iterable[int] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Fetch worker variables into the notebook: a list with one value a worker.

        With a single rank as `targets`, the value itself.
        """
        sess = self.session(session)
        ranks = parse_ranks(targets, sess.num_workers, sess.current_mesh)
        try:
            fetched = {name: sess.pull(name, ranks, timeout) for name in names}
        except WorkerError as exc:
            if isinstance(exc.__cause__, ArgumentError):  # no such variable
                raise ArgumentError(f"{name_ranks(exc.ranks)}: {exc.__cause__}") from None
            raise
        single = isinstance(targets, str) and len(ranks) == 1 and not set(":,=") & set(targets)
        for name, values in fetched.items():
            self.shell.user_ns[name] = values[0] if single else values


def _end_of(run: CellRun) -> str | None:
    """How a cell in the background has ended, "" if it did well; None while it runs."""
    if not run.ready():
        if run.session.closed:
            return ""
        try:
            run.session._check_alive()
        except DiscoError as exc:
            return f"in the background: {exc}"
        return None
    failures = [failure for failure in run.failures if not failure.interrupted]
    if not failures:
        return ""
    words = f"in the background: {summarize(failures)}"
    return "\n".join(filter(None, [words, doctor_hint(failures)]))


def doctor_hint(failures: Sequence[Failure]) -> str:
    """What to look at next, if a collective is what went wrong first."""
    told = any(failed_in_collective(failure) and not failure.victim for failure in failures)
    return "%disco_doctor shows the last collectives of each worker" if told else ""


def _set_on(ranks: list[int], values: dict[str, Any]) -> None:
    worker = current_worker()
    if worker.worker_id in ranks:
        worker.namespace.update(values)


_lab: Lab | None = None


def the_lab() -> Lab:
    """The lab of this kernel.

    Raises
    ------
    SessionError
        Before ``%load_ext discolab``.
    """
    if _lab is None:
        raise SessionError("discolab is not loaded: run %load_ext discolab first")
    return _lab


def open_lab(shell: Any) -> Lab:
    """Make the lab of this kernel, once."""
    global _lab
    if _lab is None:
        _lab = Lab(shell)
        _lab.install()
    return _lab


def close_lab() -> None:
    """Undo `open_lab`."""
    global _lab
    if _lab is not None:
        _lab.uninstall()
        _lab = None
