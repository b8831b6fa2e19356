"""The lab of a kernel: what the notebook's magics call, in parts, and its hooks in the shell.

One `Lab` an IPython shell; it is used from the shell's thread, or from any thread that runs a cell.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from ..runtime import sources
from ..runtime.errors import SessionError
from ..runtime.restart import at_restart
from ..runtime.services import PRELOAD
from ..views import doctor_view as _doctor_view  # noqa: F401 - draws a Diagnosis
from . import bars, errors_shown, prompts, terminal
from .cells import CellTeller
from .comparing import Comparing
from .config import Disco
from .debugging import Debugging
from .inspecting import WorkerInspector
from .loading import Loading
from .output import OutputCapture
from .panels import Panels
from .programs import Programs
from .reloading import Reloading
from .running import Running
from .sessions import Sessions
from .shared_variables import SharedVariables
from .snapshotting import Snapshotting
from .variables import Variables
from .worker_shell import set_up

P = TypeVar("P")

_CELL_FILE = re.compile(r"(Cell In\[\d+\])(\.\d+)?")


class Lab:
    """One shell's sessions, and all that can be done with them.

    Attributes
    ----------
    shell
    sessions, variables, loading, snapshotting, programs, debugging, comparing, panels
        The parts. What a part can do for a person is a method ``disco_*``: see `command`.
    """

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self._config = Disco(parent=shell)
        self._output = OutputCapture(shell, self._config)
        self._cells = CellTeller(shell)
        self.sessions = Sessions(shell, self._config, self._output, self._cells)
        self._running = Running(self.sessions)
        self._reloading = Reloading(self.sessions)
        self._shared_variables = SharedVariables(self.sessions)
        self.variables = Variables(self.sessions)
        self.loading = Loading(self.sessions)
        self.snapshotting = Snapshotting(self.sessions, self.loading)
        self._inspector = WorkerInspector(shell, self.sessions)
        self.programs = Programs(self.sessions, self._running, self._inspector)
        self.debugging = Debugging(self.sessions, self._running, self.programs)
        self.comparing = Comparing(self.sessions, self._running)
        self.panels = Panels(self.sessions, self._cells)
        self._parts: tuple[Any, ...] = (
            self.sessions,
            self.variables,
            self.loading,
            self.snapshotting,
            self.programs,
            self.debugging,
            self.comparing,
            self.panels,
        )

    def command(self, name: str) -> Callable[..., Any]:
        """The method of a part that has the name of a magic: ``disco_step``."""
        found: list[Callable[..., Any]] = [
            getattr(part, name) for part in self._parts if hasattr(part, name)
        ]
        (command,) = found
        return command

    def part(self, kind: type[P]) -> P:
        """The part of that class."""
        return next(part for part in self._parts if type(part) is kind)

    # -- in place and out ----------------------------------------------------------------------

    def install(self) -> None:
        """Hook into the shell."""
        self._config.install(self.shell)
        self._output.install()
        prompts.install(getattr(self.shell, "kernel", None))
        bars.install()
        errors_shown.install(self.shell)
        terminal.install(self.shell)
        self._cells.install()
        self._inspector.install()
        at_restart.append(self.sessions.for_new_worker)
        self.panels.watch_for_the_end()
        PRELOAD.append(set_up.__module__)
        sources.namers.append(self.cell_name)
        self.shell.events.register("pre_run_cell", self.panels.cell_begins)
        self.shell.events.register("post_run_cell", self._after_cell)

    def uninstall(self) -> None:
        """Shut all sessions down and take every hook away."""
        for name, session in self.sessions.by_name.items():
            if not session.closed:
                self.sessions.stop(name)
                print(f"{name}: shut down with the extension")
        self.shell.events.unregister("pre_run_cell", self.panels.cell_begins)
        self.shell.events.unregister("post_run_cell", self._after_cell)
        sources.namers.remove(self.cell_name)
        PRELOAD.remove(set_up.__module__)
        self.debugging.uninstall()
        self._inspector.uninstall()
        self._cells.uninstall()
        self._reloading.uninstall()
        at_restart.remove(self.sessions.for_new_worker)
        self.panels.watch_no_more()
        terminal.uninstall(self.shell)
        errors_shown.uninstall()
        bars.uninstall()
        prompts.uninstall()
        self._output.uninstall()
        self._config.uninstall(self.shell)

    def _after_cell(self, result: Any = None) -> None:
        self._output.install()  # a library may have replaced the streams
        self._reloading.cell_ends()
        # asked before the output is shown: what a cell has printed is there once it has ended
        ends = self._running.ends()
        self._output.flush()
        self.panels.cell_ends()
        self.panels.flush_panels()
        self._running.tell_ends(ends)
        self._shared_variables.tell()
        self.variables.tell_of_namesake(getattr(result, "error_in_exec", None))

    def cell_name(self, filename: str) -> str | None:
        """``Cell In[3]`` for the file name of a ``%%disco`` or an ordinary cell."""
        match = _CELL_FILE.fullmatch(filename)
        return match[1] if match else self._cells.name(filename)


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
