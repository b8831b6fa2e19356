"""Reload on the workers what ``%autoreload`` reloads in the notebook.

IPython looks at the files of modules when a cell begins, and reloads those that were edited, in the
notebook's process. Workers of other processes have all modules for themselves; worker threads, and
worker 0, have those in folders that their cells have added to `sys.path`. Each worker has one more
reloader of IPython's for them, which looks when the notebook's does, so that all run the same code.
`Reloading` is the controller's side.
"""

from __future__ import annotations

import functools
import sys
from contextlib import suppress
from typing import Any

from ..isolation.worker_modules import names_of_own
from ..runtime.errors import DiscoError
from ..runtime.functions import worker_function
from ..runtime.registers import OWN
from ..runtime.session import Session
from ..runtime.worker import Worker, current_worker, has_own_process
from .cell import AFTER_CELL
from .sessions import Sessions

_RELOADER = "what reloads its modules"  # in `Worker.process_state`


class Reloading:
    """Has the workers of one shell's sessions follow the shell's ``%autoreload``."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._followed: Any = None
        sessions.at_set_up.append(self._begin)

    def cell_ends(self) -> None:
        """Follow the shell's reloader from the cell on that loads IPython's extension.

        What it keeps of a module's source decides whether it executes an edited module anew or only
        its functions; all must have it since the cell that has imported the module.
        """
        magics = self._sessions.shell.magics_manager.registry.get("AutoreloadMagics")
        reloader = getattr(magics, "_reloader", None)
        if reloader is None:
            return
        _keep_sources(reloader)
        if reloader is self._followed:
            return
        self.uninstall()
        self._followed = reloader
        check = reloader.check

        @functools.wraps(check)
        def check_everywhere(check_all: bool = False, *args: Any, **kwargs: Any) -> None:
            check(check_all, *args, **kwargs)
            if check_all or reloader.enabled:
                self._tell(settings_of(reloader, check_all))

        reloader.check = check_everywhere
        self._tell(None)

    def uninstall(self) -> None:
        """Follow no reloader any more."""
        if self._followed is not None:
            del self._followed.check
            self._followed = None

    def _begin(self, session: Session) -> None:
        if self._followed is not None:
            session.call_packed(reload_edited, None).name = OWN

    def _tell(self, settings: dict[str, Any] | None) -> None:
        for session in self._sessions.by_name.values():
            with suppress(DiscoError):  # whoever uses the session next is told
                if not session.closed:
                    session.call_packed(reload_edited, settings).name = OWN


def settings_of(reloader: Any, check_all: bool) -> dict[str, Any]:
    """What a worker's reloader must know of the notebook's, for one look."""
    differ = getattr(reloader, "deduper_reloader", None)  # since IPython 9
    return {
        "names": None if check_all or reloader.check_all else list(reloader.modules),
        "skipped": list(reloader.skip_modules),
        "parts": bool(differ and differ.enabled and not reloader.autoload_obj),
        "hide_errors": getattr(reloader, "hide_errors", False),
    }


def _keep_sources(reloader: Any) -> None:
    if hasattr(reloader, "deduper_reloader"):
        reloader.deduper_reloader.update_sources()


# -- on the worker -------------------------------------------------------------------------


@worker_function("the look at edited modules")
def reload_edited(settings: dict[str, Any] | None) -> None:
    """Reload the worker's own modules whose files have changed; None: only note their times."""
    worker = current_worker()
    ends = worker.shared.setdefault(AFTER_CELL, [])
    if _note_imported not in ends:
        ends.append(_note_imported)
    own = _names_of_own(worker)
    if not own:
        return
    reloader = _reloader_of(worker)
    if settings is None:
        return
    names = own if settings["names"] is None else set(own).intersection(settings["names"])
    reloader.enabled, reloader.check_all = True, False
    reloader.modules = dict.fromkeys(names, True)
    reloader.skip_modules = dict.fromkeys(settings["skipped"], True)
    reloader.hide_errors = settings["hide_errors"]
    if hasattr(reloader, "deduper_reloader"):
        reloader.deduper_reloader.enabled = settings["parts"]
    reloader.check()


def _note_imported() -> None:
    """Note at a cell's end which modules it has imported, as they are."""
    worker = current_worker()
    own = _names_of_own(worker)
    if not own:
        return
    reloader = _reloader_of(worker)
    times = reloader.modules_mtimes
    for name in own:
        if name not in times:
            _, time = reloader.filename_and_mtime(sys.modules.get(name))
            if time is not None:
                times[name] = time
    _keep_sources(reloader)


def _reloader_of(worker: Worker) -> Any:
    """It has noted the files of all modules that were there when it was made."""
    reloader = worker.process_state.get(_RELOADER)
    if reloader is None:
        from IPython.extensions.autoreload import ModuleReloader  # here: few notebooks use it

        reloader = worker.process_state[_RELOADER] = ModuleReloader()
    return reloader


def _names_of_own(worker: Worker) -> list[str]:
    return list(sys.modules) if has_own_process(worker) else names_of_own(worker)
