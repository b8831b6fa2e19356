"""Operators that workers define (`torch.library`): one name, and each worker's own functions.

A process has one operator of a name. So the first worker that defines it registers it with torch,
with kernels that call the function of the worker that calls; the others, which define it with the
same schema, add theirs. It is there until the last of them has taken it back. What a module defines
while it is imported is the process's, as the module is.

A worker may also give a kernel to an operator of the process that has none for a dispatch key, as
one that a module only defines (`Library("its_name", "IMPL")`). What torch gets for it then calls
the function of the worker that calls; for all others it goes on as without a kernel.

What a script has defined is there for cells until the worker runs another one, which may define it
anew, as in a new process.

`_lock` guards `_operators`, `_overrides` and what is in them. A library that is taken back goes
into `_dropped`; who takes `_lock` clears it away: at once, unless another thread has the lock or
this one has, which is in a finalizer.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import torch

from ..runtime.errors import SessionError
from ..runtime.interrupts import shield
from ..runtime.user_code import is_library_file
from ..runtime.worker import Worker, current_worker_or_none
from . import table
from .barriers import Barrier, obstacle
from .imports import worker_unless_importing
from .patches import Patches, refused, shares_process
from .table import Row, Treatment

_OWN = "torch.library: "  # in `Worker.process_state`
_OF_SCRIPTS = "libraries of torch.library that scripts have made"  # the same; weak references
# modules that make libraries for who calls them, and through which they are called
_DECORATORS = ("torch.library", "torch._library", "functools")
_lock = threading.Lock()
_operators: dict[str, _Operator] = {}
_overrides: dict[tuple[str, str], _Override] = {}  # by operator and dispatch key
_dropped: deque[_LibraryOfWorker] = deque()


class _Operator:
    """One operator of workers.

    Attributes
    ----------
    definition
        Its schema, and what else `define` was given.
    library
        torch's, which keeps it.
    owners
        The library of each worker that has defined it.
    kernels
        The workers' functions, by dispatch key.
    left
        Workers that have taken it back, to define it anew.
    """

    def __init__(self, name: str, definition: tuple[Any, ...], library: Any) -> None:
        self.name, self.definition, self.library = name, definition, library
        self.owners: dict[Worker, _LibraryOfWorker] = {}
        self.kernels: dict[str, dict[Worker, Callable[..., Any]]] = {}
        self.falls_back = False
        self.left: set[Worker] = set()

    def kernel(self, key: str) -> Callable[..., Any]:
        """What torch calls for a dispatch key."""
        functions = self.kernels[key]

        def call_own(*args: Any, **kwargs: Any) -> Any:
            worker = current_worker_or_none()
            function = None if worker is None else functions.get(worker)
            if function is None:
                whose = "the notebook" if worker is None else f"worker {worker.worker_id}"
                raise NotImplementedError(
                    f"{self.name} is an operator of workers, and {whose} has no function for "
                    f"{key}: define it there too"
                )
            return function(*args, **kwargs)

        return call_own

    def forget(self, worker: Worker) -> None:
        """A worker has taken it back; under the lock."""
        if self.owners.pop(worker, None) is not None:
            self.left.add(worker)
        for functions in self.kernels.values():
            functions.pop(worker, None)
        worker.process_state.get(f"{_OWN}entries", {}).pop(self.name, None)
        if not self.owners and _operators.get(self.name) is self:
            del _operators[self.name]
            self.library.reset()
            _clear(self.name)


class _Override:
    """What workers give an operator of the process for one dispatch key, for which it has nothing.

    torch calls it until no worker thread lives: it frees a kernel that is taken back, also while
    other threads are within it.

    Attributes
    ----------
    library
        torch's, which keeps the kernel that looks who calls.
    functions
        Of each worker: its library, its function, and whether that takes the keys of the dispatch.
    """

    def __init__(self, name: str, key: str, library: Any) -> None:
        self.name, self.key, self.library = name, key, library
        self.functions: dict[Worker, tuple[_LibraryOfWorker, Callable[..., Any], bool]] = {}
        self._below = _without_kernel(name, key)

    def call(self, keys: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What torch calls."""
        worker = current_worker_or_none()
        own = None if worker is None else self.functions.get(worker)
        if own is not None:
            _, function, with_keys = own
            return function(keys, *args, **kwargs) if with_keys else function(*args, **kwargs)
        if self._below is None:
            whose = "the notebook" if worker is None else f"worker {worker.worker_id}"
            raise NotImplementedError(f"{self.name} has no kernel for {self.key} in {whose}")
        return self._below(keys, *args, **kwargs)

    def forget(self, worker: Worker) -> None:
        """A worker has taken its function back; under the lock."""
        self.functions.pop(worker, None)


def _has_kernel(name: str, key: str) -> bool:
    """Whether an operator of the process computes something for a key, by that or another one."""
    has: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    return name.startswith("aten::") or any(
        has(name, other)
        for other in (key, "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    )


def _without_kernel(name: str, key: str) -> Callable[..., Any] | None:
    """What an operator without a kernel for a dispatch key does there: go on below, or nothing."""
    table = torch._C._dispatch_dump_table(name)
    if re.search(rf"^{key}: .*(fallthrough|backend fallback)", table, re.MULTILINE) is None:
        return None  # or a key that stands for several
    own_key = getattr(torch._C.DispatchKey, key)
    base, _, overload = name.partition(".")
    find: Any = torch._C._dispatch_find_schema_or_throw
    below, keys_here = find(base, overload).redispatch_boxed, torch._C.DispatchKeySet(own_key)
    return lambda keys, *args, **kwargs: below(keys - keys_here, *args, **kwargs)


class _LibraryOfWorker:
    """What `torch.library.Library` has as ``m`` on a worker."""

    def __init__(self, make: Callable[..., Any], worker: Worker, args: tuple[Any, ...]) -> None:
        self._make, self.worker, self._args = make, worker, args
        self._torchs: Any = None

    def _name(self, name: str) -> str:
        return name if "::" in name else f"{self._args[1]}::{name}"

    def define(self, schema: str, *how: Any) -> str:
        """Define an operator, or join those who have."""
        short = schema.split("(")[0]
        name, definition = self._name(short), (schema, *how)
        while not self._joins(name, definition):
            operator = _operators.get(name)
            if operator is not None:  # the others define it anew too
                wait = _Redefinition(operator)
                self.worker.wait_for(
                    wait.settled,
                    wait,
                    check=lambda old=operator: self._check(old, schema),  # type: ignore[misc]
                )
        for peer in list(self.worker.peers.values()):
            peer.wake()
        return short

    def _joins(self, name: str, definition: tuple[Any, ...]) -> bool:
        """Define an operator; False while others have one of another schema, which was there."""
        with shield(), _lock:
            _clear_away()
            operator = _operators.get(name)
            if operator is not None and operator.definition != definition:
                if self.worker not in operator.left:
                    raise SessionError(_refusal(operator, definition[0], self.worker))
                return False
            if operator is None or self.worker in operator.owners:
                _, space, _, *place = self._args
                library = self._make("FRAGMENT", space, "", *place)
                library.define(*definition)  # torch's error if it is there already
                operator = _operators[name] = _Operator(name, definition, library)
            operator.owners[self.worker] = self
        return True

    def _check(self, operator: _Operator, schema: str) -> None:
        """Raise if another worker keeps the operator as it was."""
        if any(obstacle(self.worker, owner) for owner in tuple(operator.owners)):
            raise SessionError(_refusal(operator, schema, self.worker))

    def impl(self, name: str, key: str, function: Any, *how: Any) -> None:
        """Give an operator a kernel: this worker's, if it is one of the workers'."""
        with shield(), _lock:
            operator = _operators.get(self._name(name))
            if operator is None or self.worker not in operator.owners:
                self._override(self._name(name), key, function, *how)
            elif function is torch.library.fallthrough_kernel:
                if key not in operator.kernels:
                    operator.kernels[key] = {}
                    operator.library.impl(name, key, function, *how)
            else:
                first = key not in operator.kernels
                operator.kernels.setdefault(key, {})[self.worker] = function
                if first:
                    operator.library.impl(name, key, operator.kernel(key), *how)

    def _override(self, name: str, key: str, function: Any, with_keys: bool = False) -> None:
        """Give an operator of the process a kernel that is this worker's alone; under the lock."""
        _clear_away()
        if not shares_process(self.worker):
            self._real().impl(name, key, function, with_keys)
            return
        override = _overrides.get((name, key))
        if override is None and (
            function is torch.library.fallthrough_kernel or _has_kernel(name, key)
        ):
            raise SessionError(
                f"worker {self.worker.worker_id} replaces what {name} does for {key}; the process "
                "has one kernel for it, and workers are threads of it: start the session with "
                "engine='processes' (%disco_session --engine processes)"
            )
        if override is None:
            _, space, _, *place = self._args
            library = self._make("IMPL", space, "", *place)
            override = _Override(name, key, library)
            library.impl(name, key, override.call, True)
            _overrides[name, key] = override
        override.functions[self.worker] = (self, function, with_keys)

    def register_ad_inplace_or_view_fallback(self, name: str) -> None:
        """As torch's, once for an operator."""
        with shield(), _lock:
            operator = _operators[self._name(name)]
            if not operator.falls_back:
                operator.falls_back = True
                operator.library.register_ad_inplace_or_view_fallback(name)

    def reset(self) -> None:
        """Take all back; from a finalizer while this thread has the lock: with the next use."""
        _dropped.append(self)
        if _lock.acquire(blocking=False):
            try:
                _clear_away()
            finally:
                _lock.release()

    def clear_away(self) -> None:
        """Take all back now; under the lock."""
        for operator in list(_operators.values()):
            if operator.owners.get(self.worker) is self:
                operator.forget(self.worker)
        for override in list(_overrides.values()):
            if override.functions.get(self.worker, (None,))[0] is self:
                override.forget(self.worker)
        if self._torchs is not None:
            self._torchs.reset()
            self._torchs = None

    def _real(self) -> Any:
        if self._torchs is None:
            self._torchs = self._make(*self._args)
        return self._torchs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real(), name)


@dataclass(frozen=True)
class _Redefinition(Barrier):
    """What a worker waits for that defines an operator anew, with another schema."""

    before: _Operator

    def __str__(self) -> str:
        return f"the other workers to define {self.before.name} anew"

    def settled(self) -> bool:
        """Whether none has the operator that was there before."""
        return _operators.get(self.before.name) is not self.before


def _refusal(operator: _Operator, schema: str, worker: Worker) -> str:
    other = next(iter(operator.owners), worker)
    return (
        f"worker {worker.worker_id} defines {operator.name} as {schema!r}, and worker "
        f"{other.worker_id} as {operator.definition[0]!r}; a process has one operator of a name, "
        "and workers are threads of it: give them different names, or start the session with "
        "engine='processes' (%disco_session --engine processes)"
    )


def _clear_away() -> None:
    while _dropped:
        _dropped.popleft().clear_away()


def _install(patches: Patches) -> None:
    patches.replace(torch._C, "_dispatch_library", _library_over)
    patches.at_undo(_end_overrides)


def _end_overrides() -> None:
    with shield(), _lock:
        while _overrides:
            _, override = _overrides.popitem()
            override.library.reset()


# Modules of torch that give its operators kernels when they are first needed, for all.
_OF_TORCH = ("torch._functorch.predispatch", "torch._functorch.vmap")


def _makes_for_all(frame: FrameType) -> bool:
    """Whether torch makes a library for itself; the frame is that of `Library.__init__`."""
    return frame.f_back is not None and frame.f_back.f_globals.get("__name__") in _OF_TORCH


def _library_over(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def make_for_caller(*args: Any) -> Any:
        worker = worker_unless_importing()
        if worker is None or _makes_for_all(sys._getframe(1)):
            return make(*args)
        _note(worker, sys._getframe(1))
        return _LibraryOfWorker(make, worker, args)

    return make_for_caller


# -- those of an earlier script --------------------------------------------------------------------


def _note(worker: Worker | None, frame: FrameType) -> None:
    """Note the library that a worker's script makes; the frame: `Library.__init__`.

    What functions of installed modules make when they are first called stays, as the modules do.
    """
    library = frame.f_locals.get("self")
    if worker is None or worker.program is None or not isinstance(library, torch.library.Library):
        return
    maker = frame.f_back
    while maker is not None and maker.f_globals.get("__name__", "").startswith(_DECORATORS):
        maker = maker.f_back
    if maker is not None and not is_library_file(maker.f_code.co_filename):
        worker.process_state.setdefault(_OF_SCRIPTS, []).append(weakref.ref(library))


def take_back_those_of_scripts(worker: Worker) -> None:
    """Take back the operators and kernels of the scripts that the worker has run."""
    for known in worker.process_state.pop(_OF_SCRIPTS, ()):
        library = known()
        if library is not None:
            library._destroy()


def _noting(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def make_and_note(*args: Any) -> Any:
        _note(worker_unless_importing(), sys._getframe(1))
        return make(*args)

    return make_and_note


# -- what Python keeps of them ---------------------------------------------------------------------


class _OfCaller(MutableMapping[str, Any]):
    """A dictionary of torch's: each worker has one of its own, and reads torch's too if it may."""

    def __init__(self, torchs: Any, key: str, *, reads: bool) -> None:
        self._torchs, self._key, self._reads = torchs, f"{_OWN}{key}", reads

    def _own(self) -> Any:
        worker = worker_unless_importing()
        if worker is None:
            return self._torchs
        return worker.process_state.setdefault(self._key, type(self._torchs)())

    def __getitem__(self, name: str) -> Any:
        own = self._own()
        return own[name] if name in own or not self._reads else self._torchs[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own() or (self._reads and name in self._torchs)

    def __setitem__(self, name: str, value: Any) -> None:
        self._own()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._own()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())


def _definitions(module: ModuleType, patches: Patches) -> None:
    for name, reads in (("OPDEF_TO_LIB", False), ("OPDEFS", True)):
        patches.replace(module, name, functools.partial(_OfCaller, key=name, reads=reads))
    refuse = refused("CustomOpDef.set_kernel_enabled", "is for the whole process")

    def enable_over(enable: Callable[..., Any]) -> Callable[..., Any]:
        of_all = refuse(enable)

        @functools.wraps(enable)
        def enable_own(self: Any, *args: Any, **kwargs: Any) -> Any:
            operator = _operators.get(self._qualname)
            own = operator is not None and current_worker_or_none() in operator.owners
            return (enable if own else of_all)(self, *args, **kwargs)

        return enable_own

    patches.replace(module.CustomOpDef, "set_kernel_enabled", enable_over)


def _registry(module: ModuleType, patches: Patches) -> None:
    """The entry of an operator of workers, which has its fake function: each worker's."""

    def entry_over(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def entry_of_caller(self: Any, name: str) -> Any:
            worker = worker_unless_importing()
            if worker is None or name not in _operators:
                return method(self, name)
            own = worker.process_state.setdefault(f"{_OWN}entries", {})
            if name not in own:
                own[name] = module.SimpleOperatorEntry(name)
            return own[name]

        return entry_of_caller

    for name in ("find", "get"):
        if hasattr(module.SimpleLibraryRegistry, name):  # `get` came with torch 2.12 or 2.13
            patches.replace(module.SimpleLibraryRegistry, name, entry_over)


def _clear(name: str) -> None:
    """Forget ``torch.ops.space.name``, which torch has looked up and kept."""
    clear = getattr(torch.library, "_clear_torch_ops_cache", None)
    if clear is not None:
        clear({name})
        return
    space, _, short = name.partition(".")[0].partition("::")  # torch 2.12
    vars(vars(torch.ops).get(space, torch.ops)).pop(short, None)
    _clear_listed(name)


def _clear_listed(name: str) -> None:
    """Take an operator off the list of its namespace, where `torch.export` would look for it.

    torch lists it once a thread that first asks for it, so twice if two workers ask at once, and
    takes it off once.
    """
    space, _, short = name.partition(".")[0].partition("::")
    namespace = vars(torch.ops).get(space)
    if namespace is not None and short not in vars(namespace):
        with suppress(ValueError):
            while True:
                namespace._dir.remove(short)


def _cache(module: ModuleType, patches: Patches) -> None:
    def clear_over(clear: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(clear)
        def clear_with_others(names: Any) -> None:
            for name in tuple(names):
                try:
                    clear({name})
                except (AttributeError, ValueError):
                    pass  # another worker has cleared it at the same time
                _clear_listed(name)

        return clear_with_others

    def destroy_over(destroy: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(destroy)
        def destroy_with_others(self: Any) -> None:
            names, self._op_defs = self._op_defs, set()
            destroy(self)
            for name in names:
                _clear(name)

        return destroy_with_others

    if hasattr(module, "_clear_torch_ops_cache"):
        patches.replace(module, "_clear_torch_ops_cache", clear_over)
    else:  # torch 2.12 does it there
        patches.replace(module.Library, "_destroy", destroy_over)


def _fake_contexts(module: ModuleType, patches: Patches) -> None:
    """`torch.library.get_ctx` in a function of `register_fake`: that of the thread's fake mode."""
    local = threading.local()

    def get_over(of_process: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: getattr(local, "getter", of_process)()

    def set_over(_: Any) -> Callable[..., Any]:
        @contextmanager
        def set_ctx_getter(ctx_getter: Callable[[], Any]) -> Iterator[None]:
            before = getattr(local, "getter", None)
            local.getter = ctx_getter
            try:
                yield
            finally:
                if before is None:
                    del local.getter
                else:
                    local.getter = before

        return set_ctx_getter

    patches.replace(module, "global_ctx_getter", get_over)
    patches.replace(module, "set_ctx_getter", set_over, everywhere=True)


def _leave(worker: Worker) -> None:
    with shield(), _lock:
        _clear_away()
        for operator in list(_operators.values()):
            operator.forget(worker)
        for override in list(_overrides.values()):
            override.forget(worker)
    for name in [name for name in worker.process_state if name.startswith(_OWN)]:
        del worker.process_state[name]


@contextmanager
def overrides_as_before(worker: Worker) -> Iterator[None]:
    """At its end the worker's kernels for operators of the process are those that it had."""
    before = _overrides_of(worker)
    try:
        yield
    finally:
        with shield(), _lock:
            _clear_away()
            for override in _overrides_of(worker):
                if override in before:
                    override.functions[worker] = before[override]
                else:
                    override.forget(worker)


def _overrides_of(worker: Worker) -> dict[_Override, Any]:
    overrides = list(_overrides.values())
    return {found: found.functions[worker] for found in overrides if worker in found.functions}


def _after_fork() -> None:
    """A child must not wait for a thread that only its parent has."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


table.add(  # before the next one, which makes workers' libraries without asking what it replaces
    Row(
        state="operators of `torch.library` that an earlier script has defined",
        treatment=Treatment.PER_WORKER,
        meaning="They are there for cells until the worker runs another script, which may define "
        "them anew, also with other schemas.",
        test="",  # tests/isolation/test_custom_ops.py; a row can't be left out of other processes
        install=lambda patches: patches.replace(torch._C, "_dispatch_library", _noting),
        in_own_process=True,  # a worker's process runs one script after the other
    )
)
table.add(
    Row(
        state="operators of `torch.library` (`custom_op`, `Library.define`)",
        treatment=Treatment.PER_WORKER,
        meaning="Workers that define an operator of one name and schema each call their own "
        "functions; of another schema it is an error. What a module defines while it is imported "
        "is for all. A kernel that a worker gives to a module's operator that has none "
        "(`Library.impl`) is called for that worker alone, until its script ends; to replace one, "
        "as those of torch, or to switch one of a module's off, is refused on several workers.",
        test="tests/isolation/test_custom_ops.py::test_each_worker_defines_an_operator",
        install=_install,
        on_import={
            "torch._library.custom_ops": _definitions,
            "torch._library.simple_registry": _registry,
            "torch.library": _cache,
        },
        leave=_leave,
    )
)
table.add(
    Row(
        state="`torch.library.get_ctx`",
        treatment=Treatment.PER_WORKER,
        meaning="A function of `register_fake` gets the context of the fake mode that its own "
        "worker is in.",
        test="tests/isolation/test_custom_ops.py::test_each_worker_has_the_context_of_its_mode",
        on_import={"torch._library.fake_impl": _fake_contexts},
    )
)
