"""The notebook's sessions and what can be done with them: what the magics call.

Each `disco_*` method here and in sessions.py is the Python form of the magic of the same name. One
`Lab` an IPython shell; it is used from the shell's thread, or from any thread that runs a cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..debugger.stops import Stop
from ..runtime import sources
from ..runtime.controller import check_timeout
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError, SessionError, WorkerError
from ..runtime.failures import name_ranks
from ..runtime.ranks import parse_ranks
from ..runtime.services import PRELOAD
from ..runtime.sources import display_name
from ..runtime.worker import current_worker
from ..views import doctor_view as _doctor_view  # noqa: F401 - draws a Diagnosis
from ..views.pictures import Shown
from . import bars, errors_shown, prompts, terminal
from .cell import CellRun, check_syntax, run_cell
from .comparing import Comparing
from .live import PROGRESS_AFTER
from .programs import Program, Stepping
from .running import doctor_hint, ending_on_stop
from .script import read_script, run_script
from .whos import show_variables
from .worker_shell import set_up

_CELL_FILE = re.compile(r"(Cell In\[\d+\])(\.\d+)?")


class Lab(Comparing):
    """One shell's sessions, and the cells that run on them."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)

    # -- in place and out ----------------------------------------------------------------------

    def install(self) -> None:
        """Hook into the shell."""
        self.config.install(self.shell)
        self.output.install()
        prompts.install(getattr(self.shell, "kernel", None))
        bars.install()
        errors_shown.install()
        terminal.install(self.shell)
        self._notebook_cells.install()
        self.watch_for_the_end()
        PRELOAD.append(set_up.__module__)
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
        PRELOAD.remove(set_up.__module__)
        self._notebook_cells.uninstall()
        self.watch_no_more()
        terminal.uninstall(self.shell)
        errors_shown.uninstall()
        bars.uninstall()
        prompts.uninstall()
        self.output.uninstall()
        self.config.uninstall(self.shell)

    def _after_cell(self, *_: Any) -> None:
        self.output.install()  # a library may have replaced the streams
        # asked before the output is shown: what a cell has printed is there once it has ended
        ends = self._background_ends()
        self.output.flush()
        self.cell_ends()
        self.flush_panels()
        self._tell_ends(ends)

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
            Have the workers stop at the first line; at break points (``12 if rank == 2``); record
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
        sess = self.free_session(session)
        check_timeout(timeout)
        ranks = parse_ranks(targets, sess.num_workers, sess.current_mesh)
        filename = self._next_file()
        # one line in front, so that line numbers are those of the cell with its magic
        source = "\n" + self.shell.transform_cell(cell)
        check_syntax(source, filename)
        if push:
            self.disco_push(push, session=session)
        program = Program(
            run_cell,
            lambda func: CellRun.of_source(sess, source, filename, ranks, func),
            display_name(filename),
            filename,
            ranks,
            "the cell",
            out,
        )
        with ending_on_stop(sess, interrupt):
            started = self._begin(sess, program, Stepping(step, breaks, trace, pm, nan))
            if not block:
                self._in_background(started.run)
                self.shell.user_ns.update({name: sess[name] for name in out})
                return started.run
            with self._watching(sess, stream, progress_after, group_outputs):
                return self._end_or_stop(started, timeout, interrupt)

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
        sess = self.free_session(session)
        check_timeout(timeout)
        full, source = read_script(path)
        check_syntax(source, full)
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
        with ending_on_stop(sess):
            started = self._begin(sess, program, Stepping(step, breaks, trace, pm, nan))
            with self._watching(sess, stream, group_outputs=group_outputs):
                return self._end_or_stop(started, timeout)

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
        sess = self.free_session(session)
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
        sess = self.free_session(session)
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

    def disco_whos(
        self, names: Sequence[str] = (), *, stats: bool = False, session: str | None = None
    ) -> Shown:
        """All variables of all workers: type, layout, bytes, and whether they are equal.

        Parameters
        ----------
        names
            Globs; (): all that cells have made.
        stats
            Read, and so compare, also tensors beyond 4 MiB.

        Returns
        -------
        Shown
            Shows itself.
        """
        sess = self.free_session(session)
        return show_variables(sess, sess.name or "session", names, stats)


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
