"""torch.compile in worker threads: what is compiled for one worker is not run by another.

torch keeps compiled code with the function's code object, which workers share, and finds it again
by the backend, and by what it guards: among that is neither the rank, which it takes for a
constant, nor whose global variables they are. So backends of different workers count as different.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ..runtime.interrupts import plain_lock, shield, waiter_here
from ..runtime.worker import Worker, current_worker_or_none
from . import table
from .patches import Patches, refused
from .table import Row, Treatment
from .tracing import tracing
from .worker_local import OwnSetting

# compiled versions of one function, and how often it is compiled: torch's own, for each worker
_LIMITS = {"recompile_limit": 8, "accumulated_recompile_limit": 256}
_SESSIONS = 8  # so many of this size, whose versions are still kept

_LOOK = 0.002  # seconds between two looks whether another thread still compiles

_guard = plain_lock()  # of the next four
_counter = itertools.count(1)
_numbers: weakref.WeakKeyDictionary[Worker, int] = weakref.WeakKeyDictionary()
_notebooks = 0  # its number
_here: set[Worker] = set()  # those that live


def _after_fork() -> None:
    """A child must not wait for a thread that only its parent has."""
    global _guard
    _guard = plain_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _backends(torch: ModuleType, patches: Patches) -> None:
    def init_over(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def init_for_worker(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            worker = current_worker_or_none()
            self.discolab_worker = _notebooks if worker is None else _number_of(worker)
            _raise_limits(self.discolab_worker, 1 if worker is None else worker.num_workers)

        return init_for_worker

    def equal_over(equal: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(equal)
        def equal_on_worker(self: Any, other: Any) -> bool:
            mine, its = (getattr(one, "discolab_worker", 0) for one in (self, other))
            return mine == its and equal(self, other)

        return equal_on_worker

    for name in ("_TorchCompileInductorWrapper", "_TorchCompileWrapper"):
        wrapper = getattr(torch, name)
        patches.replace(wrapper, "__init__", init_over)
        patches.replace(wrapper, "__eq__", equal_over)


def _number_of(worker: Worker) -> int:
    """A number of the worker's own that no later one gets."""
    with _guard:
        if worker not in _numbers:
            _numbers[worker] = next(_counter)
        return _numbers[worker]


def _raise_limits(number: int, peers: int) -> None:
    """So many workers are no sign of a function that is compiled again and again.

    The settings of torch._dynamo belong to the thread.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    # its peers have numbers near its own, or will have
    workers = min(number + peers, _SESSIONS * peers)
    for name, each in _LIMITS.items():
        if getattr(config, name, math.inf) < each * workers:
            setattr(config, name, each * workers)


def _lock(module: ModuleType, patches: Patches) -> None:
    """Who compiles has the turn to trace: it traces, and who traces may compile.

    And a compilation puts back what a tracer has replaced, whichever thread traces.
    """
    patches.replace(module, "compile_lock", _LockInTurn)


class _LockInTurn:
    """A lock that a thread takes with its turn to trace, for which it waits as for all else."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._own = threading.local()

    def __enter__(self) -> None:
        if not hasattr(self._own, "entered"):
            self._own.entered = []
        entered = self._in_turn()
        entered.__enter__()
        self._own.entered.append(entered)

    def __exit__(self, *exc: Any) -> bool | None:
        entered: AbstractContextManager[None] = self._own.entered.pop()
        return entered.__exit__(*exc)

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        while True:
            with tracing.taken("a program for torch.compile"), ExitStack() as held:
                with shield():
                    taken = self._lock.acquire(blocking=False)
                    if taken:
                        held.callback(self._lock.release)
                if taken:
                    yield
                    return
            _pause()  # without the turn, which who has the lock may need


def _pause() -> None:
    me, until = waiter_here(), time.monotonic() + _LOOK
    if me is None:
        time.sleep(_LOOK)
    else:
        me.wait_for(lambda: time.monotonic() >= until, "its turn to compile", check=lambda: None)


def _frees(name: str, module: ModuleType, patches: Patches) -> None:
    """Compiled code is freed also where another worker runs it, and with that the process ends.

    So a worker passes by its own instead, as does the notebook while a worker runs something.
    """

    def free_over(free: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(free)
        def free_or_pass_by(*args: Any) -> None:
            if not _passes_by():
                free(*args)

        return free_or_pass_by

    patches.replace(module, name, free_over)


def _passes_by() -> bool:
    """Have the caller pass by what it has compiled, if others may run it; whether it does.

    With a new number, what it gives to torch.compile from now on is compiled anew.
    """
    global _notebooks
    worker = current_worker_or_none()
    with _guard:
        if worker is not None:
            _numbers[worker] = next(_counter)
        elif any(one.current is not None or one.serves or one.channel.pending() for one in _here):
            _notebooks = next(_counter)
        else:
            return False
    return True


def _enter(worker: Worker) -> None:
    with _guard:
        _here.add(worker)


def _leave(worker: Worker) -> None:
    with _guard:
        _here.discard(worker)


_PACKAGE = f"{Path(__file__).parents[1].as_posix()}/"


def _not_compiled(module: ModuleType, patches: Patches) -> None:
    """Have torch.compile look into discolab's functions where a graph calls them, and only there.

    After a graph break, and in the backward of compiled autograd, it tries to compile each function
    that is called. Were that one of those with which a worker takes its turn to compile, it would
    wait for itself.
    """
    patches.replace(module, "BUILTIN_INLINE_WHEN_CALLED", lambda folders: {*folders, _PACKAGE})
    patches.replace(
        module,
        "SKIP_DIRS_RE",
        lambda folders: re.compile(f"{folders.pattern}|^{re.escape(_PACKAGE)}"),
    )


_STANCE = OwnSetting[Any]("torch.compiler.set_stance", imports_share=True)


class _StanceOfCaller:
    """``eval_frame._stance``, of which torch reads attributes: that of who asks."""

    def __init__(self, notebooks: Any) -> None:
        self.notebooks = notebooks

    def here(self) -> Any:
        return _STANCE.get(lambda: self.notebooks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.here(), name)

    def __str__(self) -> str:
        return str(self.here())


def _stance(module: Any, patches: Patches) -> None:
    if isinstance(module._stance, _StanceOfCaller):  # a session before, whose workers are gone
        module._stance = module._stance.notebooks
    caller = patches.replace(module, "_stance", _StanceOfCaller)
    refuse = refused("skip_guard_eval_unsafe=True", "has guards skipped in the whole process")
    check = refuse(lambda: None)

    def set_over(set_stance: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(set_stance)
        def set_own(stance: Any) -> Any:
            prior = caller.here()
            if stance.skip_guard_eval_unsafe:
                check()
            set_stance(stance)  # an error where torch allows none
            module._stance = caller
            if not _STANCE.set(stance):
                caller.notebooks = stance
            return prior

        return set_own

    patches.replace(module, "_set_stance", set_over, everywhere=True)
    patches.at_undo(lambda: setattr(module, "_stance", caller.notebooks))


table.add(
    Row(
        state="`torch.compiler.set_stance`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker that sets none has the notebook's. `skip_guard_eval_unsafe=True`, which "
        "has guards skipped in the whole process while a compiled function runs, is an error.",
        test="tests/isolation/test_compiler.py::test_each_worker_has_a_stance",
        on_import={"torch._dynamo.eval_frame": _stance},
    )
)
table.add(
    Row(
        state="compiled autograd (`torch._dynamo.config.compiled_autograd`)",
        treatment=Treatment.REFUSED,
        meaning="torch's engine has one compiler for the process, which would take up other "
        "workers' backward passes too. Use `--engine processes`.",
        test="tests/isolation/test_compiler.py::"
        "test_compiled_autograd_is_refused_on_several_workers",
        on_import={
            "torch._dynamo.compiled_autograd": lambda module, patches: patches.replace(
                module, "_enable", refused("compiled autograd", "is on once for the process")
            )
        },
    )
)
table.add(
    Row(
        state="functions that `torch.compile` compiles",
        treatment=Treatment.SHARED,
        meaning="discolab's own are part of a graph that calls them, and never compiled alone.",
        test="tests/isolation/test_compiler.py::test_compiled_autograd",
        on_import={"torch._dynamo.trace_rules": _not_compiled},
        in_own_process=True,
    )
)
table.add(
    Row(
        state="compiled code of `torch.compile`",
        treatment=Treatment.PER_WORKER,
        meaning="What is compiled for one worker is not run by another; they compile in turns. "
        "The recompile limits are raised by the number of workers, who share a function's code.",
        test="tests/ccl/test_dist_limits.py::test_compiled_code_is_each_workers_own",
        on_import={"torch": _backends, "torch._dynamo.convert_frame": _lock},
    )
)
table.add(
    Row(
        state="`torch._dynamo.reset`",
        treatment=Treatment.PER_WORKER,
        meaning="On a worker, what it gives to `torch.compile` from then on is compiled anew, and "
        "so it is in the notebook while a worker computes. What was compiled before other workers "
        "may run: a reset in the notebook, after `sess.sync_all()`, frees it.",
        test="tests/ccl/test_dist_process.py::test_a_worker_resets_its_own_compiler",
        on_import={
            "torch._dynamo": functools.partial(_frees, "reset"),
            # by which torch._dynamo.export frees what is compiled of the function it is given
            "torch._dynamo.eval_frame": functools.partial(_frees, "remove_from_cache"),
        },
        enter=_enter,
        leave=_leave,
    )
)
