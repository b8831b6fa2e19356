"""What a program of a worker finds of its process: a command line, no prompt, an end of its own.

The attributes of `sys` that tell a program how it was started are properties while these rows are
installed, which answer a worker with its own; all others cost what they did. `_argv` is written by
the workers' threads, each its own entry; `_paths` too.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from ..runtime.errors import SessionError
from ..runtime.worker import Worker, current_worker_or_none, has_own_process
from . import import_effects, table
from .patches import ModuleWithProperties, Patches, shares_process
from .table import OF_SCRIPT, Row, Treatment

_argv: weakref.WeakKeyDictionary[Worker, list[str]] = weakref.WeakKeyDictionary()
_paths: weakref.WeakKeyDictionary[Worker, list[str]] = weakref.WeakKeyDictionary()
# of workers in cells: the process's `sys.path` that their own has followed; a script's follows none
_followed: weakref.WeakKeyDictionary[Worker, list[str]] = weakref.WeakKeyDictionary()
_at_end: weakref.WeakKeyDictionary[Worker, list[Callable[[], Any]]] = weakref.WeakKeyDictionary()


# -- sys -------------------------------------------------------------------------------------------


def _of_process(name: str) -> Any:
    try:
        return vars(sys)[name]
    except KeyError:
        raise AttributeError(f"module 'sys' has no attribute {name!r}") from None


class _SysOfWorkers(ModuleWithProperties):
    """`sys`, with a command line and a path for each worker, and no prompt on workers."""

    @property
    def argv(self) -> list[str]:
        """The worker's command line; the process's while it has none."""
        worker = current_worker_or_none()
        own = None if worker is None else _argv.get(worker)
        found: list[str] = _of_process("argv") if own is None else own
        return found

    @argv.setter
    def argv(self, value: list[str]) -> None:
        worker = current_worker_or_none()
        if worker is None:
            vars(sys)["argv"] = value
        else:
            _argv[worker] = value

    @property
    def path(self) -> list[str]:
        """Where the worker's cells or script find modules."""
        worker = current_worker_or_none()
        found: list[str] = _of_process("path") if worker is None else _own_path(worker)
        return found

    @path.setter
    def path(self, value: list[str]) -> None:
        worker = current_worker_or_none()
        if worker is None:
            vars(sys)["path"] = value
        else:
            _own_path(worker)  # what the process's has become until now is followed
            _paths[worker] = value

    @property
    def ps1(self) -> Any:
        """The prompt, by which libraries know that a person types; not there on a worker."""
        if current_worker_or_none() is not None:
            raise AttributeError("module 'sys' has no attribute 'ps1'")
        return _of_process("ps1")

    @ps1.setter
    def ps1(self, value: Any) -> None:
        vars(sys)["ps1"] = value

    @ps1.deleter
    def ps1(self) -> None:
        del vars(sys)["ps1"]


def _install_sys(patches: Patches) -> None:
    patches.change_class(sys, type("SysOfWorkers", (_SysOfWorkers, type(sys)), {}))


def _own_path(worker: Worker) -> list[str]:
    """A worker's `sys.path`; in cells it follows what the notebook adds to its own, and removes."""
    own, process = _paths.get(worker), vars(sys)["path"]
    if own is None:
        _followed[worker] = list(process)
        own = _paths[worker] = list(process)
    elif _followed.get(worker, process) != process:
        before, _followed[worker] = _followed[worker], list(process)
        follow(own, before, _followed[worker])
    return own


def follow(own: list[str], before: Sequence[str], now: Sequence[str]) -> None:
    """Change a path as another one has changed: what came to its front, to the front."""
    gone = [place for place in before if place not in now]
    new = [place for place in now if place not in before and place not in own]
    front = [p for p in itertools.takewhile(lambda p: p not in before, now) if p in new]
    kept = [place for place in own if place not in gone]
    own[:] = [*front, *kept, *(place for place in new if place not in front)]


import_effects.also(
    "sys.path",
    lambda: tuple(sys.path),
    lambda before, after: follow(sys.path, before, after),
)


def added_folders() -> list[str]:
    """Where the calling worker looks for modules and the notebook does not."""
    process = vars(sys)["path"]
    if sys.path is process:
        return []
    return [place for place in sys.path if place not in process]


@contextmanager
def script_path(worker: Worker, folder: str) -> Iterator[None]:
    """Within it a worker has the `sys.path` of a script in a folder.

    A worker that has its process for itself has the process's anyway.
    """
    if has_own_process(worker):
        yield
        return
    cells, followed = list(_own_path(worker)), _followed.pop(worker, None)
    _paths[worker] = [folder, *cells]
    try:
        yield
    finally:
        _paths[worker] = cells
        if followed is not None:
            _followed[worker] = followed


def use_command_line(worker: Worker, argv: list[str] | None) -> None:
    """Give a worker a command line of its own; None: the process's again.

    For a worker that has its process for itself that is ``sys.argv``; `_argv` has what was there.
    """
    if has_own_process(worker):
        if argv is not None:
            _argv.setdefault(worker, sys.argv)
            sys.argv = argv
        elif worker in _argv:
            sys.argv = _argv.pop(worker)
    elif argv is None:
        _argv.pop(worker, None)
    else:
        _argv[worker] = argv


def _in_child(worker: Worker) -> None:
    sys.argv, sys.path = _argv.get(worker, sys.argv), _paths.get(worker, sys.path)


table.add(
    Row(
        state="`sys.argv`, `sys.path` and `sys.ps1`",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker has the command line of its script, and a `sys.path` of its own: "
        "what a script adds there goes at its end, what a cell adds stays on that worker. In cells "
        "it follows what the notebook adds and removes. There is no prompt on a worker, so that "
        "libraries don't take it for an interactive session.",
        test="tests/isolation/test_programs.py::test_each_worker_has_its_own_command_line",
        install=_install_sys,
        in_child=_in_child,
        library="Python",
    )
)


# -- where it runs ---------------------------------------------------------------------------------


def _chdir_over(chdir: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(chdir)
    def chdir_alone(path: Any) -> None:
        worker = current_worker_or_none()
        if worker is not None and shares_process(worker) and not _is_here(path):
            raise SessionError(
                f"os.{chdir.__name__}({path!r}) on worker {worker.worker_id}: the working folder "
                "belongs to the process, and the other workers are threads of it: their files "
                "would be looked for there too. Use whole paths, os.chdir in the notebook, or "
                "engine='processes' (--engine processes)"
            )
        chdir(path)

    return chdir_alone


def _install_chdir(patches: Patches) -> None:
    for name in ("chdir", "fchdir"):
        if hasattr(os, name):
            patches.replace(os, name, _chdir_over)


def _is_here(path: Any) -> bool:
    try:
        return os.path.samefile(path, os.getcwd())
    except (OSError, TypeError, ValueError):
        return False  # Python's own error says why


table.add(
    Row(
        state="the working folder",
        treatment=Treatment.REFUSED,
        meaning="`os.chdir` on a worker would move all, so it is an error, unless that is where "
        "the process is. Use whole paths, or `os.chdir` in the notebook; a script starts in the "
        "notebook's folder, on every engine.",
        test="tests/isolation/test_programs.py::test_the_working_folder_is_not_changed_under_others",
        install=_install_chdir,
        library="Python",
    )
)


# -- the end of a program --------------------------------------------------------------------------


def _register_over(register: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(register)
    def register_for_program(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        worker = current_worker_or_none()
        if worker is None or worker.program is None or _caller() is not worker.program:
            return register(func, *args, **kwargs)  # a library's: it stays imported
        _at_end.setdefault(worker, []).append(functools.partial(func, *args, **kwargs))
        return func

    return register_for_program


def _caller() -> dict[str, Any]:
    """The global variables of the function that calls our caller."""
    return sys._getframe(2).f_globals


def _unregister_over(unregister: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(unregister)
    def unregister_for_program(func: Callable[..., Any], /) -> None:
        worker = current_worker_or_none()
        mine: Any = [] if worker is None else _at_end.get(worker, [])
        mine[:] = [partial for partial in mine if partial.func != func]
        unregister(func)

    return unregister_for_program


def call_at_end(worker: Worker, function: Callable[[], Any]) -> None:
    """Call a function when the worker's script ends, as if the script had registered it."""
    if worker.program is not None:
        _at_end.setdefault(worker, []).append(function)


def run_at_end(worker: Worker) -> None:
    """Call what the worker's script has registered with `atexit`, the last first.

    As at the end of a process an error in one does not keep the others from being called; the last
    error is raised.
    """
    last: BaseException | None = None
    while functions := _at_end.get(worker):
        try:
            functions.pop()()
        except Exception as exc:
            last = exc
    _at_end.pop(worker, None)
    if last is not None:
        raise last


def _exit_over(exit_now: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    @functools.wraps(exit_now)
    def end_program(status: int) -> NoReturn:
        if current_worker_or_none() is None:
            exit_now(status)
        raise SystemExit(status)

    return end_program


def _install_ends(patches: Patches) -> None:
    patches.replace(atexit, "register", _register_over)
    patches.replace(atexit, "unregister", _unregister_over)


table.add(
    Row(
        state="`atexit`",
        treatment=Treatment.PER_WORKER,
        meaning="What a script registers is called when the script ends on that worker; what "
        "libraries register, when the process ends.",
        test="tests/isolation/test_programs.py::test_a_scripts_own_end_is_its_own",
        install=_install_ends,
        in_own_process=True,  # a script ends before the process does
        library="Python",
    )
)
table.add(
    Row(
        state="`os._exit`",
        treatment=Treatment.PER_WORKER,
        meaning="It ends the worker's program as `sys.exit` does; the notebook's process lives on.",
        test="tests/isolation/test_programs.py::test_a_scripts_own_end_is_its_own",
        install=lambda patches: patches.replace(os, "_exit", _exit_over),
        library="Python",
    )
)


# -- signals ---------------------------------------------------------------------------------------

_HANDLERS = f"{OF_SCRIPT}handlers of signals"  # in `Worker.process_state`
_ENDING = frozenset(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)


def _signal_over(set_handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_handler)
    def set_own(signalnum: int, handler: Any) -> Any:
        worker = current_worker_or_none()
        if worker is None or signalnum not in _ENDING:
            return set_handler(signalnum, handler)
        own = worker.process_state.setdefault(_HANDLERS, {})
        before = own.get(signalnum, signal.SIG_DFL)
        own[signalnum] = handler
        return before

    return set_own


def _getsignal_over(get_handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_handler)
    def get_own(signalnum: int) -> Any:
        worker = current_worker_or_none()
        if worker is None or signalnum not in _ENDING:
            return get_handler(signalnum)
        return worker.process_state.get(_HANDLERS, {}).get(signalnum, signal.SIG_DFL)

    return get_own


def _install_signals(patches: Patches) -> None:
    patches.replace(signal, "signal", _signal_over)
    patches.replace(signal, "getsignal", _getsignal_over)


table.add(
    Row(
        state="handlers of signals",
        treatment=Treatment.PER_WORKER,
        meaning="A handler that a worker sets for `SIGINT`, `SIGTERM`, `SIGHUP`, `SIGQUIT`, "
        "`SIGUSR1` or `SIGUSR2` is kept and given back, and not called: signals go to the "
        "notebook, whose Stop ends the program. A script's end forgets it. For any other "
        "signal it is Python's error: "
        "signals work in the main thread only.",
        test="tests/isolation/test_programs.py::test_a_scripts_own_end_is_its_own",
        install=_install_signals,
        library="Python",
    )
)
