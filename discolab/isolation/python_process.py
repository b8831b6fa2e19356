"""Signals that a worker raises, timers, how multiprocessing starts processes; what is shared."""

from __future__ import annotations

import functools
import multiprocessing.context
import os
import signal
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..runtime.errors import SessionError
from ..runtime.interrupts import shield, wait_in_shield
from ..runtime.worker import Worker, current_worker_or_none
from . import table
from .own_objects import own_object
from .patches import Patches
from .programs import call_at_end
from .table import OF_SCRIPT, Row, Treatment

Function = Callable[..., Any]

_CONTEXT = "multiprocessing"  # in `Worker.process_state`


# -- signals -------------------------------------------------------------------------------


def _raise_over(original: Function) -> Function:
    @functools.wraps(original)
    def raise_signal(signalnum: Any) -> None:
        worker = current_worker_or_none()
        if worker is None:
            original(signalnum)
            return
        handler = signal.getsignal(signalnum)
        if callable(handler):
            handler(signalnum, None)
        elif handler == signal.SIG_DFL and signalnum not in _HARMLESS:
            raise SystemExit(128 + int(signalnum))

    return raise_signal


_HARMLESS = {getattr(signal, n) for n in ("SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH")
             if hasattr(signal, n)}  # fmt: skip


def _refused_over(original: Function) -> Function:
    @functools.wraps(original)
    def timer(*args: Any) -> Any:
        if current_worker_or_none() is None or not any(args[-1:]):
            return original(*args)
        raise SessionError(
            f"signal.{original.__name__} on a worker thread: Python handles signals on the "
            "notebook's main thread only, and SIGALRM would end the notebook. Use threading.Timer, "
            "or start the session with engine='processes' (%disco_session --engine processes)"
        )

    return timer


def _install_timers(patches: Patches) -> None:
    for name in ("alarm", "setitimer"):
        if hasattr(signal, name):
            patches.replace(signal, name, _refused_over)


# -- multiprocessing -----------------------------------------------------------------------


def _context(name: str, cached: Any = None) -> property:
    """An attribute of the default context; a worker's first `set_start_method` is the first.

    `cached` is what 3.14 has by that name in the class, which finds the platform's default.
    """

    def of_process(context: Any) -> Any:
        if name not in vars(context) and cached is not None:
            return cached.__get__(context, type(context))
        return vars(context).get(name)

    def get(context: Any) -> Any:
        worker = current_worker_or_none()
        if worker is None:
            return of_process(context)
        own = worker.process_state.get(_CONTEXT)
        if name == "_actual_context":
            return own
        return own or vars(context).get("_actual_context") or of_process(context)

    def set_(context: Any, value: Any) -> None:
        worker = current_worker_or_none()
        if worker is None:
            vars(context)[name] = value
        elif name == "_actual_context":
            worker.process_state[_CONTEXT] = value

    return property(get, set_)


def _install_context(patches: Patches) -> None:
    kind: Any = multiprocessing.context.DefaultContext
    for name in ("_actual_context", "_default_context"):
        if name in vars(kind):
            patches.replace(kind, name, functools.partial(_context, name))
        else:
            patches.add(kind, name, _context(name))


_SERVER = "multiprocessing.forkserver"  # an own object's name
_END_WITHIN = 1.0  # seconds that a fork server without processes may take


def _own_fork_server(module: ModuleType, patches: Patches) -> None:
    """What a fork server starts has the variables of who has started the server."""
    of_process = module._forkserver
    kind, names = type(of_process), vars(of_process)

    def make() -> Any:
        server = kind()
        server.set_forkserver_preload(names["_preload_modules"])
        worker = current_worker_or_none()
        if worker is not None:
            call_at_end(worker, functools.partial(_end_fork_server, server))
        return server

    own_object(of_process, _SERVER, make, patches)


def _end_fork_server(server: Any) -> None:
    """It ends when its processes have, for which nobody waits here."""
    with server._lock:
        alive, pid = server._forkserver_alive_fd, server._forkserver_pid
        server._forkserver_alive_fd = server._forkserver_pid = None
    if alive is None:
        return

    def has_ended() -> bool:
        try:
            return os.waitpid(pid, os.WNOHANG) != (0, 0)
        except ChildProcessError:  # somebody else has waited for it
            return True

    os.close(alive)
    wait_in_shield(has_ended, _END_WITHIN)


def _leave(worker: Worker) -> None:
    server = worker.process_state.pop(f"{OF_SCRIPT}{_SERVER}", None)
    if server is not None:
        with shield():
            _end_fork_server(server)


# -- calendar ------------------------------------------------------------------------------


def _own_calendar(module: ModuleType, patches: Patches) -> None:
    of_process = vars(module.c)
    kind = type(module.c)
    own_object(module.c, "calendar", lambda: kind(of_process["_firstweekday"]), patches)


table.add(
    Row(
        state="`signal.raise_signal`",
        treatment=Treatment.PER_WORKER,
        meaning="It calls the worker's own handler; without one it ends the worker's program, not "
        "the notebook.",
        test="tests/isolation/test_process_state.py::test_signals_of_a_worker",
        install=lambda patches: patches.replace(signal, "raise_signal", _raise_over),
        library="Python",
    )
)
table.add(
    Row(
        state="`signal.alarm`, `signal.setitimer`",
        treatment=Treatment.REFUSED,
        meaning="`SIGALRM` would end the notebook, where Python calls no handler of a worker's. "
        "Use `threading.Timer`.",
        test="tests/isolation/test_process_state.py::test_a_worker_sets_no_alarm",
        install=_install_timers,
        library="Python",
    )
)
table.add(
    Row(
        state="start method of `multiprocessing`",
        treatment=Treatment.PER_WORKER,
        meaning="`set_start_method` is the calling worker's; a worker begins with the notebook's, "
        "and may set it once.",
        test="tests/isolation/test_process_state.py::test_each_worker_sets_the_start_method",
        install=_install_context,
        library="Python",
    )
)
table.add(
    Row(
        state="the fork server of `multiprocessing`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker starts one of its own, so its processes have the worker's `os.environ`, "
        "as it was when the server began; the server ends with the worker or its script.",
        test="tests/isolation/test_process_state.py::"
        "test_a_fork_servers_processes_have_the_workers_variables",
        on_import={"multiprocessing.forkserver": _own_fork_server},
        leave=_leave,
        library="Python",
    )
)

table.add(
    Row(
        state="`calendar.setfirstweekday`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker begins with the notebook's; a script's end forgets what it has set.",
        test="tests/isolation/test_process_state.py::test_each_workers_week_begins_as_it_likes",
        on_import={"calendar": _own_calendar},
        library="Python",
    )
)

_SHARED = {
    "`locale.setlocale`, `sys.setrecursionlimit`, `gc`'s settings": "They are of the interpreter; "
    "numbers do not depend on them. A script's end puts them back.",
    "`socket.setdefaulttimeout`, `tempfile.tempdir`, "
    "`torch.multiprocessing.set_sharing_strategy`": "One for all; give the timeout, folder or "
    "context to the call where workers differ. A script's end puts the first two back.",
    "`os.umask`, `time.tzset`, `logging.raiseExceptions`, `logging.lastResort`": "One for all; "
    "give `os.open` the mode, `datetime` the zone, and a logger a handler, where workers differ.",
    "modules, their variables and caches (`functools.lru_cache`)": "A module is one object for "
    "all workers, but for those beside a script, in folders that a worker adds to `sys.path`, and "
    "in the notebook's folder, where workers import them first. A worker imports for all; scripts "
    "of two folders do not run at once. Functions and classes that "
    "a script puts there, also into classes, go when the scripts of all workers have ended.",
    "`os.getpid`, locks of `fcntl.lockf`": "Workers are one process, to which such a lock belongs; "
    "name files by the rank, and lock them with `fcntl.flock`, as `filelock` does.",
    "styles and scales of matplotlib, `threadpoolctl`, `rich`'s console, places of `tqdm`'s "
    "bars": "One for all, also within their context managers; where ranks differ, register other "
    "names, or make a `Console()` for each rank.",
    "`csv.field_size_limit`, `mimetypes`, `asyncio`'s policy, limits of PIL": "One for all; give "
    "the call or an object of your own what differs.",
    "`os.sched_setaffinity` and `os.nice`, `sys.stdin`": "The kernel keeps the first two for each "
    "thread, and a worker's threads to come inherit them; also the next script does. Nobody can "
    "type to a worker.",
    "attributes of `builtins` that are no functions": "One for all; `get_ipython` is there on a "
    "worker thread too.",
    "`sys.excepthook`, `threading.excepthook`, `faulthandler`": "One for all; what they print in "
    "a worker's thread bears its rank.",
}
for _state, _meaning in _SHARED.items():
    table.add(Row(_state, Treatment.SHARED, _meaning, library="Python"))
