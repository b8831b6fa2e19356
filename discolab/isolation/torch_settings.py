"""Settings that torch keeps in Python, once for the process: each worker has its own.

A worker's own value is in its `process_state`, under a name that begins with `OF_SCRIPT`; threads
of the worker share it. Who has set nothing has the notebook's.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import _tensor_str, _weights_only_unpickler, hub
from torch.backends import mha, opt_einsum
from torch.distributions import Distribution, constraint_registry, kl
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrize
from torch.optim import optimizer
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data._utils import collate

from ..runtime.worker import Worker, current_worker_or_none
from . import import_effects, table
from .imports import worker_unless_importing
from .patches import Patches, refused
from .table import Row, Treatment
from .worker_local import OF_SCRIPT, DictOfWorkers, OwnSetting


@contextmanager
def fresh_settings(worker: Worker) -> Iterator[None]:
    """Within it a worker has set nothing yet; at its end its own values are what they were."""
    state = worker.process_state
    before = {name: state.pop(name) for name in tuple(state) if name.startswith(OF_SCRIPT)}
    try:
        yield
    finally:
        for name in [name for name in state if name.startswith(OF_SCRIPT)]:
            del state[name]
        state.update(before)


# -- one value with a getter and a setter ----------------------------------------------------------


def _own_value(
    patches: Patches,
    getter: tuple[Any, str],
    setter: tuple[Any, str],
    given: Callable[[Any], Any] = lambda value: value,
) -> None:
    """Have a getter and a setter mean the worker's value."""
    own = OwnSetting[Any](f"{setter[1]} of {getattr(setter[0], '__name__', id(setter[0]))}")

    def get_over(get: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(get)
        def get_own() -> Any:
            return own.get(get)

        return get_own

    def set_over(set_: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(set_)
        def set_own(value: Any, /) -> None:
            if current_worker_or_none() is None:
                set_(value)
            else:
                own.set(given(value))

        return set_own

    patches.replace(*getter, get_over, everywhere=True)
    patches.replace(*setter, set_over, everywhere=True)


def _threads_over(set_threads: Callable[[int], None]) -> Callable[[int], None]:
    @functools.wraps(set_threads)
    def set_own(num_threads: int, /) -> None:
        torch.get_num_threads()  # or the thread would take what another one sets afterwards
        set_threads(num_threads)

    return set_own


def _install_values(patches: Patches) -> None:
    patches.replace(torch, "set_num_threads", _threads_over, everywhere=True)
    _own_value(patches, (hub, "get_dir"), (hub, "set_dir"), os.path.expanduser)
    _own_value(patches, (mha, "get_fastpath_enabled"), (mha, "set_fastpath_enabled"))
    for name in ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion"):
        future: Any = torch.__future__
        _own_value(patches, (future, f"get_{name}"), (future, f"set_{name}"))
    _install_validation(patches)
    for name in ("enabled", "strategy"):
        _install_of_einsum(name, patches)


def _install_of_einsum(name: str, patches: Patches) -> None:
    """A variable of ``torch.backends.opt_einsum``, as which torch has put an object.

    What is assigned there shadows the module's own variable, which `flags` changes.
    """
    module: Any = vars(opt_einsum)["m"]
    own = OwnSetting[Any](f"torch.backends.opt_einsum.{name}")

    def get(shown: Any) -> Any:
        return own.get(lambda: vars(shown).get(name, vars(module)[name]))

    def put(shown: Any, value: Any) -> None:
        if not own.set(value):
            vars(shown)[name] = value

    def set_over(set_: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(set_)
        def set_own(value: Any) -> None:
            if not own.set(value):
                set_(value)

        return set_own

    patches.add(type(opt_einsum), name, property(get, put))
    patches.replace(module, f"_set_{name}", set_over)


class _Validates:
    """``Distribution._validate_args``, which instances shadow: that of who asks."""

    def __init__(self, notebooks: bool) -> None:
        self.notebooks = notebooks

    def __get__(self, instance: Any, owner: Any = None) -> bool:
        return bool(_VALIDATES.get(lambda: self.notebooks))


_VALIDATES = OwnSetting[bool]("Distribution.set_default_validate_args")


def _install_validation(patches: Patches) -> None:
    validates = _Validates(Distribution._validate_args)
    setter, name = vars(Distribution)["set_default_validate_args"], "set_default_validate_args"

    def set_own(value: bool) -> None:
        if value not in [True, False]:
            raise ValueError
        if not _VALIDATES.set(value):
            validates.notebooks = value

    def put_back() -> None:
        setattr(Distribution, name, setter)
        Distribution._validate_args = validates.notebooks

    Distribution._validate_args = validates  # type: ignore[assignment]
    setattr(Distribution, name, staticmethod(set_own))
    patches.at_undo(put_back)


# -- classes that torch.load may make --------------------------------------------------------------

_SAFE = f"{OF_SCRIPT}torch.serialization.add_safe_globals"


def _own_safe() -> set[Any] | None:
    """What the calling worker has marked as safe; None for who is no worker."""
    worker = worker_unless_importing()
    if worker is None:
        return None
    own: set[Any] = worker.process_state.setdefault(_SAFE, set())
    return own


def _install_safe(patches: Patches) -> None:
    """`torch.load` finds classes by name: each worker those of its own cells or script."""

    def add_over(add: Callable[[Any], None]) -> Callable[[Any], None]:
        def add_own(safe_globals: list[Any]) -> None:
            own = _own_safe()
            add(safe_globals) if own is None else own.update(safe_globals)

        return add_own

    def remove_over(remove: Callable[[Any], None]) -> Callable[[Any], None]:
        def remove_own(globals_to_remove: list[Any]) -> None:
            own = _own_safe()
            if own is None:
                remove(globals_to_remove)
            else:
                own.difference_update(globals_to_remove)

        return remove_own

    def clear_over(clear: Callable[[], None]) -> Callable[[], None]:
        def clear_own() -> None:
            own = _own_safe()
            clear() if own is None else own.clear()

        return clear_own

    def get_over(get: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        return lambda: [*get(), *(_own_safe() or ())]

    def allowed_over(allowed: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        def allowed_here() -> dict[str, Any]:
            pairs = [
                item
                if isinstance(item, tuple)
                else (item, f"{item.__module__}.{item.__qualname__}")
                for item in _own_safe() or ()
            ]
            return {**allowed(), **{name: item for item, name in pairs}}

        return allowed_here

    for name, over in (
        ("_add_safe_globals", add_over),
        ("_remove_safe_globals", remove_over),
        ("_clear_safe_globals", clear_over),
        ("_get_safe_globals", get_over),
        ("_get_user_allowed_globals", allowed_over),
    ):
        patches.replace(_weights_only_unpickler, name, over)


# -- where torch.save and torch.load put storages --------------------------------------------------

_PACKAGES = f"{OF_SCRIPT}torch.serialization.register_package"


class _PackagesOfCaller:
    """``serialization._package_registry``: the process's entries and those of who asks, sorted.

    Among equal priorities a worker's own come after the process's, in the order of registration.
    """

    def __init__(self, of_process: list[Any]) -> None:
        self._of_process = of_process

    def _own(self) -> list[Any]:
        worker = worker_unless_importing()
        if worker is None:
            return self._of_process
        own: list[Any] = worker.process_state.setdefault(_PACKAGES, [])
        return own

    def append(self, entry: Any) -> None:
        """Add an entry of who calls."""
        self._own().append(entry)

    def sort(self) -> None:
        """Sort those of who calls, as torch does after each `append`."""
        self._own().sort(key=lambda entry: entry[0])

    def __iter__(self) -> Iterator[Any]:
        own = self._own()
        if own is self._of_process:
            return iter(own)
        return iter(sorted([*self._of_process, *own], key=lambda entry: entry[0]))

    def __len__(self) -> int:
        return len(list(iter(self)))


# -- functions that are found by types -------------------------------------------------------------

_REGISTRIES = (  # what holds it, its name there, whether other modules have it by that name too
    (kl, "_KL_REGISTRY", True),
    (collate, "default_collate_fn_map", True),
    (constraint_registry.biject_to, "_registry", False),
    (constraint_registry.transform_to, "_registry", False),
    (IterDataPipe, "functions", False),
    (MapDataPipe, "functions", False),
)


class _NoMemo(dict[Any, Any]):
    """A memo that keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def _install_registries(patches: Patches) -> None:
    for number, (owner, name, everywhere) in enumerate(_REGISTRIES):
        over = functools.partial(DictOfWorkers, f"{name} {number}")
        patches.replace(owner, name, over, everywhere=everywhere)
    patches.replace(kl, "_KL_MEMOIZE", lambda _: _NoMemo())  # what is found depends on who asks


# -- parametrizations that are computed once -------------------------------------------------------

_CACHE = f"{OF_SCRIPT}parametrize.cached"


class _CacheOfCaller:
    """``parametrize._cache``, and whether who asks caches: ``parametrize._cache_enabled``."""

    def __init__(self) -> None:
        self._threads = threading.local()

    def _here(self) -> list[Any]:
        """The depth of contexts, and what is kept."""
        worker = current_worker_or_none()
        state = vars(self._threads) if worker is None else worker.process_state
        found: list[Any] = state.setdefault(_CACHE, [0, {}])
        return found

    def __bool__(self) -> bool:
        return bool(self._here()[0])

    def get(self, key: Any) -> Any:
        """What is kept."""
        return self._here()[1].get(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._here()[1][key] = value

    @contextmanager
    def cached(self) -> Iterator[None]:
        """Compute each parametrization of the calling worker once within it."""
        here = self._here()
        here[0] += 1
        try:
            yield
        finally:
            here[0] -= 1
            if not here[0]:
                here[1].clear()


def _install_cache(patches: Patches) -> None:
    cache = _CacheOfCaller()
    patches.replace(parametrize, "_cache", lambda _: cache)
    patches.replace(parametrize, "_cache_enabled", lambda _: cache)
    patches.replace(parametrize, "cached", lambda _: cache.cached, everywhere=True)


# -- activation checkpointing ----------------------------------------------------------------------


class _InContext:
    """A value that a context manager sets and takes back: that of who asks, else the notebook's."""

    def __init__(self, name: str, notebooks: Any) -> None:
        self._key = f"{OF_SCRIPT}{name}"
        self.notebooks = notebooks

    def get(self) -> Any:
        """The worker's own value, the notebook's if it has none."""
        worker = current_worker_or_none()
        own = None if worker is None else worker.process_state.get(self._key)
        return self.notebooks if own is None else own[0]

    def _set(self, value: Any) -> Callable[[], None]:
        """Set it for the caller; gives what puts back the value before."""
        worker = current_worker_or_none()
        if worker is None:
            before, self.notebooks = self.notebooks, value
            return lambda: setattr(self, "notebooks", before)
        state = worker.process_state
        own, state[self._key] = state.get(self._key), (value,)
        if own is None:
            return lambda: state.pop(self._key, None)
        return lambda: state.update({self._key: own})

    @contextmanager
    def within(self, value: Any) -> Iterator[None]:
        """Set it for the caller until the end of the context."""
        put_back = self._set(value)
        try:
            yield
        finally:
            put_back()


def _within(value: _InContext, setter: Callable[..., Any]) -> Callable[..., Any]:
    """The context manager in the place of torch's."""

    signature = inspect.signature(setter)

    @functools.wraps(setter)
    def set_own(*args: Any, **kwargs: Any) -> Any:
        return value.within(*signature.bind(*args, **kwargs).arguments.values())

    return set_own


def _checkpointing(module: ModuleType, patches: Patches) -> None:
    """Hand the caller's values to each checkpoint: torch's own names for them stay None."""
    values: dict[str, _InContext] = {}
    for setter, name in (
        ("set_checkpoint_debug_enabled", "_checkpoint_debug_enabled"),
        ("set_checkpoint_early_stop", "_enable_checkpoint_early_stop"),
    ):
        value = values[name] = _InContext(setter, getattr(module, name))
        setattr(module, name, None)
        own = functools.partial(_within, value)
        patches.replace(module, setter, own, everywhere=True)
    debug_of_caller = values["_checkpoint_debug_enabled"].get
    early_stop_of_caller = values["_enable_checkpoint_early_stop"].get

    def put_back() -> None:
        for name, value in values.items():
            setattr(module, name, value.notebooks)

    def generator_over(make: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(inspect.signature(make).parameters)

        @functools.wraps(make)
        def make_for_caller(*args: Any, **kwargs: Any) -> Any:
            own = {"debug": debug_of_caller(), "early_stop": early_stop_of_caller()}
            given = list(args)
            for name, value in own.items():
                if value is None:
                    continue
                place = parameters.index(name)
                if place < len(given):
                    given[place] = value
                else:
                    kwargs[name] = value
            return make(*given, **kwargs)

        return make_for_caller

    patches.at_undo(put_back)
    patches.replace(
        module, "_checkpoint_without_reentrant_generator", generator_over, everywhere=True
    )


# -- the group of a ShardedTensor that is loaded ---------------------------------------------------


def _loading(module: ModuleType, patches: Patches) -> None:
    group = OwnSetting[Any]("load_with_process_group")

    @contextmanager
    def load_with_process_group(process_group: Any) -> Iterator[Any]:
        if group.get(lambda: None) is not None:
            raise RuntimeError(
                'ProcessGroup already set by previous "load_with_process_group" context manager'
            )
        group.set(process_group)
        try:
            yield process_group
        finally:
            group.set(None)

    def current_over(current: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: group.get(lambda: None) or current()

    def load_over(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(load)
        def load_own(process_group: Any) -> Any:
            is_worker = current_worker_or_none() is not None
            return (load_with_process_group if is_worker else load)(process_group)

        return load_own

    patches.replace(module, "load_with_process_group", load_over, everywhere=True)
    patches.replace(module, "_get_current_process_group", current_over, everywhere=True)


# -- how tensors are printed -----------------------------------------------------------------------

_PRINT = f"{OF_SCRIPT}printoptions"


def _own_options(original: Any) -> Any:
    def options_here(*, to_set: bool) -> Any:
        worker = current_worker_or_none()
        if worker is None:
            return original
        if to_set and _PRINT not in worker.process_state:
            worker.process_state[_PRINT] = copy.copy(original)
        return worker.process_state.get(_PRINT, original)

    class PrinterOptions(type(original)):  # type: ignore[misc]
        """The options of who asks."""

        def __getattribute__(self, name: str) -> Any:
            if name.startswith("__"):
                return super().__getattribute__(name)
            return getattr(options_here(to_set=False), name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(options_here(to_set=True), name, value)

    return object.__new__(PrinterOptions)


# -- hooks for all modules -------------------------------------------------------------------------

_DICTS = [name for name, value in vars(nn_module).items()
          if name.startswith("_global_") and isinstance(value, OrderedDict)]  # fmt: skip
_REGISTER = [name for name in vars(nn_module) if name.startswith("register_module_")]
_KIND = "_global_is_full_backward_hook"


class _HooksOfCaller(OrderedDict[int, Any]):
    """The hooks of who asks; handles of hooks keep to it, so there is one for each of torch's."""

    def __init__(self, name: str, notebooks: OrderedDict[int, Any]) -> None:
        self.key = f"{OF_SCRIPT}{name}"
        self.notebooks = notebooks

    def _here(self) -> OrderedDict[int, Any]:
        worker = current_worker_or_none()
        if worker is None:
            return self.notebooks
        found: OrderedDict[int, Any] | None = worker.process_state.get(self.key)
        if found is None:
            found = worker.process_state.setdefault(self.key, OrderedDict())
        return found

    def __len__(self) -> int:
        return len(self._here())

    def __bool__(self) -> bool:
        return bool(self._here())

    def __iter__(self) -> Iterator[int]:
        return iter(self._here())

    def __contains__(self, key: object) -> bool:
        return key in self._here()

    def __getitem__(self, key: int) -> Any:
        return self._here()[key]

    def __setitem__(self, key: int, value: Any) -> None:
        self._here()[key] = value

    def __delitem__(self, key: int) -> None:
        del self._here()[key]

    def keys(self) -> Any:
        """Of the hooks of who asks."""
        return self._here().keys()

    def values(self) -> Any:
        """Of the hooks of who asks."""
        return self._here().values()

    def items(self) -> Any:
        """Of the hooks of who asks."""
        return self._here().items()


_hooks: dict[str, _HooksOfCaller] = {}


_look_who_asks: Callable[[], None] | None = None  # while the row is installed


def _hooks_here() -> dict[str, dict[int, Any]]:
    return {name: dict(hooks.items()) for name, hooks in _hooks.items()}


def _add_hooks(before: dict[str, dict[int, Any]], after: dict[str, dict[int, Any]]) -> None:
    assert _look_who_asks is not None
    _look_who_asks()
    for name, hooks in after.items():
        for number in hooks.keys() - before.get(name, {}).keys():
            _hooks[name][number] = hooks[number]


import_effects.also("hooks", _hooks_here, _add_hooks)


def _own_hooks(original: OrderedDict[int, Any], name: str) -> _HooksOfCaller:
    if name not in _hooks:
        _hooks[name] = _HooksOfCaller(name, original)
    return _hooks[name]


def _install_optimizer_hooks(patches: Patches) -> None:
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        patches.replace(optimizer, name, functools.partial(_own_hooks, name=name))


def _install_hooks(patches: Patches) -> None:
    """Look who asks as soon as there are any: without hooks a module is called as fast as ever."""
    global _look_who_asks

    def look_who_asks() -> None:
        for name in _DICTS:
            if not isinstance(getattr(nn_module, name), _HooksOfCaller):
                patches.replace(nn_module, name, functools.partial(_own_hooks, name=name))

    def register_over(register: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(register)
        def register_for_caller(*args: Any, **kwargs: Any) -> Any:
            look_who_asks()
            return register(*args, **kwargs)

        return register_for_caller

    _look_who_asks = look_who_asks
    if any(getattr(nn_module, name) for name in _DICTS):
        look_who_asks()
    for name in _REGISTER:
        patches.replace(nn_module, name, register_over, everywhere=True)
    kind = getattr(nn_module, _KIND)

    def put_back() -> None:
        backward = _hooks.get("_global_backward_hooks")
        if backward is None or not backward.notebooks:
            setattr(nn_module, _KIND, kind)

    patches.at_undo(put_back)


table.add(
    Row(
        state="hooks for all modules (`register_module_forward_hook` and its like)",
        treatment=Treatment.PER_WORKER,
        meaning="They are called for the modules that the worker runs that registered them, in the "
        "notebook for those of the notebook; a script's end removes its own.",
        test="tests/isolation/test_torch_settings.py::test_each_worker_hooks_its_own_modules",
        install=_install_hooks,
    )
)
table.add(
    Row(
        state="hooks for all optimizers (`register_optimizer_step_pre_hook`, `…_post_hook`)",
        treatment=Treatment.PER_WORKER,
        meaning="They are called for the optimizers of the worker that registered them.",
        test="tests/isolation/test_torch_settings.py::test_each_worker_hooks_its_own_optimizers",
        install=_install_optimizer_hooks,
    )
)
table.add(
    Row(
        state="`torch.serialization.add_safe_globals`",
        treatment=Treatment.PER_WORKER,
        meaning="`torch.load` makes objects of the classes that the worker has marked, beside "
        "those of the notebook and of modules.",
        test="tests/isolation/test_torch_settings.py::test_each_worker_loads_its_own_classes",
        install=_install_safe,
    )
)
table.add(
    Row(
        state="`torch.serialization.register_package`",
        treatment=Treatment.PER_WORKER,
        meaning="`torch.save` and `torch.load` ask the functions that the worker has registered, "
        "beside those of the notebook and of modules.",
        test="tests/isolation/test_torch_settings.py::test_each_worker_registers_packages",
        install=lambda patches: patches.replace(
            torch.serialization, "_package_registry", _PackagesOfCaller
        ),
    )
)
table.add(
    Row(
        state="`torch.distributions.register_kl`, `biject_to.register`, `transform_to.register`, "
        "`functional_datapipe`, `default_collate_fn_map`",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker gets the functions that it has registered. What a module registers "
        "when it is imported, and the notebook, is there on all.",
        test="tests/isolation/test_torch_settings.py::test_each_worker_registers_functions",
        install=_install_registries,
    )
)
table.add(
    Row(
        state="`torch.nn.utils.parametrize.cached`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker keeps its own parametrizations, until its own context ends.",
        test="tests/isolation/test_torch_settings.py::test_each_worker_keeps_parametrizations",
        install=_install_cache,
    )
)


table.add(
    Row(
        state="`torch.autograd.graph.allow_mutation_on_saved_tensors`",
        treatment=Treatment.REFUSED,
        meaning="torch says whether it is on in one place for the process. Use "
        "`--engine processes`.",
        test="tests/isolation/test_torch_settings.py::test_mutation_of_saved_tensors_is_refused",
        install=lambda patches: patches.replace(
            torch.autograd.graph,
            "allow_mutation_on_saved_tensors",
            refused(
                "torch.autograd.graph.allow_mutation_on_saved_tensors",
                "is on once for the process",
            ),
            everywhere=True,
        ),
    )
)
table.add(
    Row(
        state="`torch.utils.checkpoint.set_checkpoint_early_stop`, `set_checkpoint_debug_enabled`",
        treatment=Treatment.PER_WORKER,
        meaning="They hold for the checkpoints of the worker that is within them; a worker that is "
        "in none has the notebook's.",
        test="tests/isolation/test_torch_settings.py::test_each_worker_checkpoints_as_it_likes",
        on_import={"torch.utils.checkpoint": _checkpointing},
    )
)
table.add(
    Row(
        state="`load_with_process_group` of `torch.distributed`'s `ShardedTensor`",
        treatment=Treatment.PER_WORKER,
        meaning="It holds for what the worker loads that is within it.",
        test="tests/isolation/test_torch_settings.py::test_each_worker_loads_with_its_group",
        on_import={"torch.distributed._shard.api": _loading},
    )
)
table.add(
    Row(
        state="`torch.ops.load_library`, `torch.classes.load_library`",
        treatment=Treatment.SHARED,
        meaning="A library's operators and classes are there for all workers, as soon as one of "
        "them has loaded it; to load it on each does no harm.",
    )
)
table.add(
    Row(
        state="`torch.set_printoptions`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker that sets none has the notebook's.",
        test="tests/isolation/test_torch_settings.py::test_each_worker_prints_as_it_likes",
        install=lambda patches: patches.replace(_tensor_str, "PRINT_OPTS", _own_options),
    )
)
table.add(
    Row(
        state="`torch.hub.set_dir`, `torch.backends.mha`, `torch.backends.opt_einsum`, "
        "`torch.__future__`, `Distribution.set_default_validate_args`, `torch.set_num_threads`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker that sets none has the notebook's.",
        test="tests/isolation/test_torch_settings.py::test_each_worker_has_settings",
        install=_install_values,
    )
)
table.add(
    Row(
        state="`torch.set_warn_always`, `torch.distributed.set_debug_level`, "
        "`torch.utils._pytree.register_pytree_node`",
        treatment=Treatment.SHARED,
        meaning="One for all. The first two change no number, only what is told. A class that a "
        "module defines is registered once, by the first worker; one of a cell or script is each "
        "worker's own.",
    )
)
