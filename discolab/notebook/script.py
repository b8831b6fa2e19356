"""Run a script on every worker, as torchrun would in processes: a worker function.

The script runs as ``__main__`` with its own globals, command line, path and end on each worker
(isolation/main_module.py, programs.py), and so do the modules beside it (worker_modules.py). The
working folder, settings of the interpreter and functions of modules belong to the process: the
last worker that ends puts back what was there, and has modules of the script's folder forgotten, so
that the next run reads them afresh. `_lock` guards `_running` and `_before`.
"""

from __future__ import annotations

import builtins
import decimal
import gc
import importlib
import locale
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from ..ccl.distributed import environ
from ..debugger import post_mortem
from ..debugger.fingerprints import note_cell
from ..isolation import left_patches, logs_and_warnings, main_module, worker_modules
from ..isolation.custom_ops import overrides_as_before, take_back_those_of_scripts
from ..isolation.fresh_random import fresh_random_state
from ..isolation.programs import run_at_end, use_command_line
from ..isolation.switches import as_before
from ..isolation.thread_state import in_new_context, thread_as_before
from ..isolation.torch_settings import fresh_settings
from ..runtime.errors import ArgumentError, SessionError
from ..runtime.functions import worker_function
from ..runtime.interrupts import plain_lock
from ..runtime.worker import Worker, current_worker, has_own_process
from .cells import keep_source

_lock = plain_lock()
_running: list[str] = []  # the folder of each script that a worker runs
_before: dict[str, Any] = {}

_DECIMALS = vars(decimal)["DefaultContext"]  # a worker thread has one of its own beside it

# Of the interpreter, which workers share; a script's end leaves none of them to the notebook.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.getswitchinterval, sys.setswitchinterval),
    (sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    (gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds)),
    (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    (socket.getdefaulttimeout, socket.setdefaulttimeout),
    (lambda: locale.setlocale(locale.LC_ALL), lambda name: locale.setlocale(locale.LC_ALL, name)),
    (lambda: _DECIMALS.prec, lambda digits: setattr(_DECIMALS, "prec", digits)),
    (lambda: _DECIMALS.rounding, lambda rounding: setattr(_DECIMALS, "rounding", rounding)),
    (lambda: tempfile.tempdir, lambda folder: setattr(tempfile, "tempdir", folder)),
)


def read_script(path: str) -> tuple[str, str]:
    """The whole path of a script and its text.

    Raises
    ------
    ArgumentError
        If there is no such file, or it can't be read or compiled.
    """
    full = Path(path).expanduser()
    try:
        source = full.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as exc:
        near = sorted(p.name for p in full.parent.glob("*.py"))[:8] if full.parent.is_dir() else []
        hint = f"; Python files there: {', '.join(near)}" if near else ""
        why = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise ArgumentError(f"can't read the script {str(full)!r}: {why}{hint}") from None
    return str(full.resolve()), source


@worker_function("the script")
def run_script(path: str, source: str, args: list[str], name: str = "") -> None:
    """Run a script on this worker; its public names are in the worker's cells afterwards.

    Parameters
    ----------
    path, source
        The whole path of the script, and its text.
    args
        Its command line without its name.
    name
        Its name there, as the user wrote it; "": the path.

    Raises
    ------
    SystemExit
        Never: an exit with a status other than 0 is a `RuntimeError`.
    """
    module = ModuleType("__main__")
    names = vars(module)
    names.update(__file__=path, __builtins__=builtins, __cached__=None)
    keep_source(path, source)  # the file need not be on this worker's machine
    code = compile(source, path, "exec", dont_inherit=True)
    worker = current_worker()
    post_mortem.forget()
    fresh_random_state()
    environ.publish(worker)
    take_back_those_of_scripts(worker)
    try:
        with (
            _imports_beside(path),
            worker_modules.fresh_imports(worker),
            _as_new(worker),
            main_module.running(worker, module),
        ):
            use_command_line(worker, [name or path, *args])
            in_new_context(_execute, worker, code, names)
    except SystemExit as exc:
        if exc.code not in (None, 0):
            post_mortem.keep(path, exc)
            raise RuntimeError(_how_it_ended(exc, path)) from None
    except BaseException as exc:
        post_mortem.keep(path, exc)
        raise
    finally:
        use_command_line(worker, None)
        worker.namespace.update({n: value for n, value in names.items() if not n.startswith("_")})
        note_cell(worker, path)


def _execute(worker: Worker, code: CodeType, names: dict[str, Any]) -> None:
    with warnings.catch_warnings():  # without the interpreter lock a context has filters of its own
        try:
            exec(code, names)
        finally:
            run_at_end(worker)


def _how_it_ended(exc: SystemExit, path: str) -> str:
    """What a script said when it left, or with what status, and where."""
    name = Path(path).name
    lines = [line for frame, line in traceback.walk_tb(exc.__traceback__)
             if frame.f_code.co_filename == path]  # fmt: skip
    where = f" at {name}:{lines[-1]}" if lines else ""
    if isinstance(exc.code, int):
        return f"{name} exited with status {exc.code}{where}"
    return f"{name} exited{where}: {exc.code}"


@contextmanager
def _as_new(worker: Worker) -> Iterator[None]:
    """What a new process has and each worker keeps for itself; at the end as it was."""
    variables, method = dict(os.environ), multiprocessing.get_start_method(allow_none=True)
    streams = sys.stdout, sys.stderr  # a worker thread's own are among its settings
    multiprocessing.set_start_method(None, force=True)
    try:
        with (
            logs_and_warnings.fresh_logging(worker),
            fresh_settings(worker),
            overrides_as_before(worker),
            torch.autograd.set_detect_anomaly(False),
            thread_as_before(),
            as_before(),
        ):
            yield
    finally:
        if has_own_process(worker):
            sys.stdout, sys.stderr = streams
        multiprocessing.set_start_method(method, force=True)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        for name, value in variables.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextmanager
def _imports_beside(path: str) -> Iterator[None]:
    """``sys.path`` as the script expects it.

    Raises
    ------
    SessionError
        If a script of another folder runs in this process.
    """
    folder = str(Path(path).parent)
    with _lock:
        if _running and _running[0] != folder:
            raise SessionError(
                f"a script of {_running[0]} runs in this process, and sys.path and the modules "
                "beside a script are one for all; wait until it has ended"
            )
        if not _running:
            _before.update(modules=set(sys.modules), folder=os.getcwd())
            _before.update(settings=[get() for get, _ in _SETTINGS])
            _before.update(attributes=left_patches.attributes())
            worker_modules.begin(folder)
        _running.append(folder)
    try:
        yield
    finally:
        with _lock:
            _running.pop()
            if not _running:
                worker_modules.end()
                left_patches.put_back(_before.pop("attributes"), folder)
                os.chdir(_before["folder"])
                for (get, set_), value in zip(_SETTINGS, _before["settings"], strict=True):
                    if get() != value:
                        set_(value)
                _forget_modules(folder, _before["modules"])


def _forget_modules(folder: str, before: set[str]) -> None:
    """Drop the modules that a script has imported from its own folder.

    A module may have put an object in its place that has no file: it goes with its package, or
    where Python finds it in the folder.
    """
    new = set(sys.modules) - before
    gone = set()
    for name in new:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None and "." not in name and not hasattr(sys.modules.get(name), "__path__"):
            file = os.path.join(folder, f"{name}.py")
            file = file if os.path.exists(file) else None
        inside = Path(file).parents if file else ()
        if Path(folder) in inside and Path(sys.prefix) not in inside:  # a .venv may be in it
            gone.add(name)
    for name in new:
        if name in gone or any(name.startswith(f"{package}.") for package in gone):
            sys.modules.pop(name, None)
    importlib.invalidate_caches()
