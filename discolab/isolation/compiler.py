"""torch.compile in worker threads: what is compiled for one worker is not run by another.

torch keeps compiled code with the function's code object, which workers share, and finds it again
by the backend, and by what it guards: among that is neither the rank, which it takes for a
constant, nor whose global variables they are. So each worker that calls a compiled function has a
backend of its own, whoever has compiled it: the notebook, or a module that is imported once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from ..runtime.interrupts import plain_lock, shield, waiter_here
from ..runtime.worker import Worker, current_worker_or_none
from . import table
from .patches import Patches, refused
from .table import Row, Treatment
from .tracing import tracing
from .worker_local import OF_SCRIPT, OwnSetting, PerWorker, own_value

_GIVEN_UP = "discolab: what is not compiled"  # in what torch keeps with a function's code

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


class _BackendOf:
    """A backend as one worker, or the notebook, calls it: equal to its own alone.

    torch looks for attributes of it while it watches each function that is called, so there is no
    `__getattr__`.
    """

    def __init__(self, calls: Callable[..., Any], backend: Any, number: int) -> None:
        functools.update_wrapper(self, backend)
        if hasattr(backend, "compiler_name"):
            self.compiler_name = backend.compiler_name
        self.calls = calls  # it may be wrapped
        self._backend = backend
        self.number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.calls(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _BackendOf):
            return False
        return self.number == other.number and bool(self._backend == other._backend)

    def __hash__(self) -> int:
        return hash(self.number)


def _callbacks(module: Any, patches: Patches) -> None:
    """With what torch compiles while a compiled function runs: for who calls it.

    The notebook keeps torch's own until it has passed by what it had compiled.
    """
    own: PerWorker[weakref.WeakKeyDictionary[Any, Any]] = PerWorker(
        weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary
    )

    def of_caller(callback: Any) -> Any:
        number = _number_here()
        if not number or not hasattr(callback, "hooks"):
            return callback
        known = own.here()
        made = known.get(callback)
        if made is None or _innermost(made).number != number:
            convert = callback._torchdynamo_orig_backend
            calls = convert._torchdynamo_orig_backend
            if isinstance(calls, _BackendOf):
                if calls.number == number:
                    return callback
                calls = calls.calls
            backend = _BackendOf(calls, _innermost(calls), number)
            made = type(callback)(convert._clone_with_backend(backend), callback.hooks)
            known[callback] = made
        return made

    def over(from_stance: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(from_stance)
        def of_caller_from_stance(callback: Any) -> Any:
            return from_stance(of_caller(callback))

        return of_caller_from_stance

    patches.replace(module, "_callback_from_stance", over)


def _innermost(backend: Any) -> Any:
    """What torch guards: a backend without what is wrapped around it."""
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def _number_here() -> int:
    """By which compiled code is told apart: 0 is what torch has compiled without us."""
    worker = current_worker_or_none()
    return _notebooks if worker is None else _number_of(worker)


def _number_of(worker: Worker) -> int:
    """A number of the worker's own that no later one gets."""
    number = _numbers.get(worker)
    if number is None:
        with _guard:
            number = _numbers.setdefault(worker, next(_counter))
    return number


def _compiling(module: Any, patches: Patches) -> None:
    """Who compiles has the turn to trace; the versions of a function that count are his own.

    So who traces may compile, and a compilation puts back what a tracer has replaced, whichever
    thread traces. What torch gives up to compile it marks in the function's code; a worker's is
    noted for that worker, unless nobody may compile it.
    """

    def size_over(compute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compute)
        def size_of_own(frame: Any, entries: Any, *_: Any) -> Any:
            number = _number_here()
            linked = not isinstance(entries, list)  # before torch 2.13
            known = _linked(entries) if linked else entries
            own = [e for e in known if getattr(e.backend, "number", 0) == number]
            return compute(frame, _chain(own)) if linked else compute(frame, own, len(own))

        return size_of_own

    def id_over(get_id: Callable[[dict[Any, Any]], Any]) -> Callable[[dict[Any, Any]], Any]:
        @functools.wraps(get_id)
        def id_of_own(frame_state: dict[Any, Any]) -> Any:
            number = _number_here()
            return get_id(frame_state.setdefault(number, {}) if number else frame_state)

        return id_of_own

    def call_over(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def call_for_own(self: Any, frame: Any, entry: Any, frame_state: dict[Any, Any]) -> Any:
            number = _number_here()
            own = frame_state.setdefault(number, {}) if number else {}
            if _GIVEN_UP in own:
                return own[_GIVEN_UP]
            result = call(self, frame, entry, frame_state)
            gives_up = number and result.guarded_code is None and result.apply_to_code
            if not gives_up or module.trace_rules.check(frame.f_code, frame=frame):
                return result
            own[_GIVEN_UP] = dataclasses.replace(result, apply_to_code=False)
            return own[_GIVEN_UP]

        return call_for_own

    patches.replace(module, "compile_lock", _LockInTurn)
    patches.replace(module.CatchErrorsWrapper, "__call__", call_over)
    patches.replace(module, "compute_cache_size", size_over)
    patches.replace(module, "get_compile_id", id_over)


def _linked(entry: Any) -> Iterator[Any]:
    while entry is not None:
        yield entry
        entry = entry.next


def _chain(entries: list[Any]) -> Any:
    """What torch reads of versions of a function, one linked to the next; None for none."""
    chain = None
    for entry in reversed(entries):
        chain = SimpleNamespace(guard_manager=entry.guard_manager, next=chain)
    return chain


_SHAPES = f"{OF_SCRIPT}shapes that torch.compile has seen"


def _shapes(module: Any, patches: Patches) -> None:
    """The sizes and numbers with which a function was compiled.

    What differs from them torch compiles as variable: that of the same caller.
    """

    def over(get_state: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(get_state)
        def get_own() -> Any:
            own: Any = own_value(_SHAPES, lambda: defaultdict(module.CodeState))
            return get_state() if own is None else own

        return get_own

    patches.replace(module, "get_code_state", over, everywhere=True)


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

    With a new number, what it calls from now on is compiled anew.
    """
    global _notebooks
    worker = current_worker_or_none()
    with _guard:
        if worker is not None:
            _numbers[worker] = next(_counter)
            worker.process_state.pop(_SHAPES, None)
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


def _rules(module: Any, patches: Patches) -> None:
    """How torch.compile treats functions of torch: torch's own and those in their place alike.

    It looks for them in its tables, which have what was there when they were made: before a
    session, within it or within one before.
    """

    def over(get_rules: Callable[[], dict[Any, Any]]) -> Callable[[], dict[Any, Any]]:
        done: list[Any] = [None]

        @functools.wraps(get_rules)
        def with_own() -> dict[Any, Any]:
            rules = get_rules()
            constants = sys.modules.get("torch._dynamo.variables.torch")
            if hasattr(constants, "tracing_state_functions") and rules is not done[-1]:
                done[:] = [rules]
                _enter_both(rules, constants)
            return rules

        with_own.cache_clear = get_rules.cache_clear  # type: ignore[attr-defined]
        return with_own

    patches.replace(module, "get_torch_obj_rule_map", over)


def _enter_both(rules: dict[Any, Any], constants: Any) -> None:
    states = constants.tracing_state_functions()
    tables = (
        constants.constant_fold_functions,
        constants.constant_fold_functions_need_guards,
        states,
        constants.TorchInGraphFunctionVariable._get_handlers(),
    )
    for original, new in table.replaced():
        if not isinstance(original, BuiltinFunctionType | FunctionType):
            continue
        for known in tables:
            if original in known:
                known.setdefault(new, known[original])
            elif new in known:
                known[original] = known[new]
        # what is new is a function as any other where torch has no rule for it
        if new in rules:
            rules.setdefault(original, rules[new])
        elif new in states and original in rules:
            rules[new] = rules[original]


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
        meaning="What is compiled for one worker is not run by another, wherever the function was "
        "given to `torch.compile`: in a cell, in the notebook, in a module. They compile in turns. "
        "What counts for the recompile limits, what torch has seen of shapes, and what it gives up "
        "to compile, is a worker's own.",
        test="tests/isolation/test_compiler.py::test_workers_run_their_own_code_of_one_function",
        on_import={
            "torch._dynamo.eval_frame": _callbacks,
            "torch._dynamo.convert_frame": _compiling,
            "torch._dynamo.pgo": _shapes,
            "torch._dynamo.trace_rules": _rules,
        },
    )
)
table.add(
    Row(
        state="`torch._dynamo.reset`",
        treatment=Treatment.PER_WORKER,
        meaning="On a worker, what it calls from then on is compiled anew, and so it is in the "
        "notebook while a worker computes. What was compiled before is still there: a reset in the "
        "notebook, after `sess.sync_all()`, frees it.",
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
