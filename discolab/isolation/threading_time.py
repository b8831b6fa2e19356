"""What a worker's code does on other threads belongs to it, and its sleeps can be interrupted."""

from __future__ import annotations

import asyncio
import collections.abc
import concurrent.futures
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from ..runtime.errors import WaitTimeoutError
from ..runtime.interrupts import shield, waiter_here
from ..runtime.worker import Worker, bind_thread, current_worker_or_none
from . import table
from .patches import Patches
from .table import Row, Treatment
from .worker_local import OF_SCRIPT

# New functions each time: who wrapped ours, and left the wrapper there when we went, ends up
# below the next ones and still calls what was there before ours.


def _start_over(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @functools.wraps(start)
    def start_for_worker(self: threading.Thread) -> None:
        worker = current_worker_or_none()
        if worker is not None:
            run = self.run

            def run_for_worker() -> None:
                bind_thread(worker)
                _observe(worker)
                run()

            self.run = run_for_worker  # type: ignore[method-assign]
        start(self)

    return start_for_worker


_OBSERVERS = {"trace": sys.settrace, "profile": sys.setprofile}


def _observer(kind: str) -> str:
    return f"{OF_SCRIPT}threading.set{kind}"


def _observe(worker: Worker) -> None:
    """On a new thread of a worker: begin what `threading.settrace` was given there."""
    for kind, begin in _OBSERVERS.items():
        key = _observer(kind)
        if key in worker.process_state:
            begin(worker.process_state[key])


def _set_observer_over(kind: str, set_: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(set_)
    def set_own(func: Any) -> None:
        worker = current_worker_or_none()
        if worker is None:
            set_(func)
        else:
            worker.process_state[_observer(kind)] = func

    return set_own


def _get_observer_over(kind: str, get: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(get)
    def get_own() -> Any:
        worker = current_worker_or_none()
        key = _observer(kind)
        if worker is not None and key in worker.process_state:
            return worker.process_state[key]
        return get()

    return get_own


def _install_observers(patches: Patches) -> None:
    for kind in _OBSERVERS:
        patches.replace(threading, f"set{kind}", functools.partial(_set_observer_over, kind))
        patches.replace(threading, f"get{kind}", functools.partial(_get_observer_over, kind))


def _shield_over(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @functools.wraps(start)
    def start_in_shield(self: threading.Thread) -> None:
        with shield():
            start(self)

    return start_in_shield


def _submit_over(submit: Callable[..., Any]) -> Callable[..., Any]:
    """A task belongs to the worker that submits it, whoever has started the pool's threads."""

    @functools.wraps(submit)
    def submit_for_worker(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        worker = current_worker_or_none()

        @functools.wraps(fn)
        def run_for_worker(*args: Any, **kwargs: Any) -> Any:
            before = current_worker_or_none()
            bind_thread(worker)
            try:
                return fn(*args, **kwargs)
            finally:
                bind_thread(before)

        return submit(self, run_for_worker, *args, **kwargs)

    return submit_for_worker


_steps = threading.local()  # .of_submitter: whether a loop's thread does a step for another one


class _StepsOfWorker(collections.abc.Coroutine[Any, Any, Any]):
    """A coroutine whose steps belong to a worker, whoever has started the loop's thread.

    It holds the other one, where an `async def` would only begin it at its first step: what is
    cancelled before that is told so itself, and not taken for one that was never awaited.
    """

    __slots__ = ("_coroutine", "_worker")

    def __init__(self, coroutine: Any, worker: Worker | None) -> None:
        self._coroutine = coroutine
        self._worker = worker

    def _step(self, step: Callable[..., Any], *given: Any) -> Any:
        before, _steps.of_submitter = current_worker_or_none(), True
        bind_thread(self._worker)
        try:
            return step(*given)
        finally:
            bind_thread(before)
            _steps.of_submitter = False

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *exc: Any) -> Any:
        return self._step(self._coroutine.throw, *exc)

    def close(self) -> None:
        self._step(self._coroutine.close)

    def __next__(self) -> Any:
        return self.send(None)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self

    def __getattr__(self, name: str) -> Any:
        """Its name, code and frame: asyncio shows a task by them."""
        return getattr(self._coroutine, name)


def _run_over(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_for_worker(coro: Any, loop: Any) -> Any:
        if asyncio.iscoroutine(coro):
            coro = _StepsOfWorker(coro, current_worker_or_none())
        return run(coro, loop)

    return run_for_worker


def _create_task_over(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_for_worker(self: Any, coro: Any, **kwargs: Any) -> Any:
        if getattr(_steps, "of_submitter", False) and asyncio.iscoroutine(coro):
            coro = _StepsOfWorker(coro, current_worker_or_none())
        return create(self, coro, **kwargs)

    return create_for_worker


def _sleep_over(sleep: Callable[[float], None]) -> Callable[[float], None]:
    @functools.wraps(sleep)
    def sleep_or_end(seconds: float, /) -> None:
        waiter = waiter_here()
        if waiter is None or not seconds > 0:
            sleep(seconds)
            return
        until = time.monotonic() + seconds  # the worker's own clock may stand
        try:
            waiter.wait_for(lambda: time.monotonic() >= until, _why_asleep(seconds), seconds)
        except WaitTimeoutError:
            pass

    return sleep_or_end


def _why_asleep(seconds: float) -> str:
    """What a sleep is told as: `subprocess` sleeps between looks at a program (`waits.py`)."""
    caller = sys._getframe(2)
    if caller.f_globals.get("__name__") != "subprocess":
        return f"time.sleep({seconds:g})"
    program = getattr(caller.f_locals.get("self"), "args", "")
    if isinstance(program, list | tuple):
        program = program[0] if program else ""
    words = str(program).split()  # of a shell's command; arguments may be secret
    return f"a program ({os.path.basename(words[0])})" if words else "a program"


def _install_interrupts(patches: Patches) -> None:
    patches.replace(threading.Thread, "start", _shield_over)
    patches.replace(time, "sleep", _sleep_over)


def _install(patches: Patches) -> None:
    patches.replace(threading.Thread, "start", _start_over)
    patches.replace(concurrent.futures.ThreadPoolExecutor, "submit", _submit_over)
    patches.replace(asyncio, "run_coroutine_threadsafe", _run_over, everywhere=True)
    patches.replace(asyncio.BaseEventLoop, "create_task", _create_task_over)


table.add(
    Row(
        state="interrupts of sleeps and of starts of threads",
        treatment=Treatment.PER_WORKER,
        meaning="`time.sleep` on a worker ends at an interrupt of that worker, and an interrupt "
        "does not go to the thread that it starts.",
        test="tests/engines/test_hooks.py::"
        "test_hooks_last_from_the_first_session_to_the_end_of_the_last",
        install=_install_interrupts,
        in_own_process=True,  # an interrupt comes from another thread there too
        library="Python",
    )
)
table.add(
    Row(
        state="whose a thread is",
        treatment=Treatment.PER_WORKER,
        meaning="A thread that a worker's code starts with `threading` is that worker's, and so is "
        "what it submits to a `ThreadPoolExecutor`, or to an event loop on another thread, whoever "
        "has made that.",
        test="tests/engines/test_hooks.py::test_a_thread_started_by_a_worker_belongs_to_it",
        install=_install,
        library="Python",
    )
)
table.add(
    Row(
        state="`threading.settrace`, `threading.setprofile`",
        treatment=Treatment.PER_WORKER,
        meaning="They hold for the threads that the worker starts; a worker that sets none has the "
        "notebook's. What `settrace_all_threads` begins, it begins on the threads of all.",
        test="tests/isolation/test_process_state.py::test_each_worker_observes_its_own_threads",
        install=_install_observers,
        library="Python",
    )
)
