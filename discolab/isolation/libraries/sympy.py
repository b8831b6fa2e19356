"""sympy remembers what it has computed, and what is assumed, once for the process.

What ``evaluate(False)`` and its like ask for is each thread's; but what a thread computes so goes
to a memory of all, from which another would get ``x + x`` where it has asked for ``2*x``.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import table
from ..host_random import own_random_of
from ..own_objects import own_object
from ..patches import Patches
from ..table import Row, Treatment

_otherwise: set[int] = set()  # threads that compute otherwise than sympy does by default


def _remember_none(module: ModuleType, patches: Patches) -> None:
    """Have threads that compute otherwise neither read nor write what is remembered."""

    def over(lru_cache: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(lru_cache)
        def cache_of_default(*args: Any, **kwargs: Any) -> Any:
            def decorate(function: Callable[..., Any]) -> Any:
                return _of_default(lru_cache(*args, **kwargs)(function))

            return decorate

        return cache_of_default

    patches.replace(module, "lru_cache", over)
    for wrapper in tuple(module.CACHE):
        for cell in wrapper.__closure__ or ():
            cached = cell.cell_contents
            if isinstance(cached, functools._lru_cache_wrapper):  # else one of ours already
                cell.cell_contents = _of_default(cached)
                patches.at_undo(functools.partial(setattr, cell, "cell_contents", cached))


def _of_default(cached: Any) -> Any:
    plain = cached.__wrapped__

    @functools.wraps(cached)
    def computed(*args: Any, **kwargs: Any) -> Any:
        if _otherwise and threading.get_ident() in _otherwise:
            return plain(*args, **kwargs)
        return cached(*args, **kwargs)

    wrapped: Any = computed
    wrapped.cache_info, wrapped.cache_clear = cached.cache_info, cached.cache_clear
    return wrapped


def _note_who(module: ModuleType, patches: Patches) -> None:
    parameters = module.global_parameters
    default = dict(vars(parameters))  # who imports it has set nothing

    def over(set_: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(set_)
        def set_and_note(self: Any, name: str, value: Any) -> None:
            set_(self, name, value)
            if self is parameters:
                note = _otherwise.discard if vars(self) == default else _otherwise.add
                note(threading.get_ident())

        return set_and_note

    patches.replace(type(parameters), "__setattr__", over)
    patches.at_undo(_otherwise.clear)


def _assumptions(module: ModuleType, patches: Patches) -> None:
    assumed = module.global_assumptions
    own_object(assumed, "sympy assumptions", type(assumed), patches)


def _constants(module: ModuleType, patches: Patches) -> None:
    """``sympy.S`` installs a constant when it is first asked for, and fails if two ask at once."""

    def over(install: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        @functools.wraps(install)
        def install_or_get(self: Any, name: str) -> Any:
            try:
                return install(self, name)
            except (AttributeError, KeyError):
                if name not in vars(type(self)):  # nor has another thread installed it meanwhile
                    raise
                return vars(type(self))[name]

        return install_or_get

    patches.replace(module.SingletonRegistry, "__getattr__", over)


def _set_state(shared: random.Random, own: random.Random) -> None:
    shared.setstate(own.getstate())


def _numbers(module: ModuleType, patches: Patches) -> None:
    for name in ("rng", "_assumptions_rng"):
        shared = getattr(module, name)
        own_random_of(module, shared, f"sympy {name}", patches)
        inherit = functools.partial(_set_state, shared)
        own_object(shared, f"sympy {name}", random.Random, patches, inherit)


table.add(
    Row(
        state="what sympy has computed under `evaluate(False)`, `distribute` and their like",
        treatment=Treatment.PER_WORKER,
        meaning="A worker that computes so reads and writes nothing of what sympy remembers for "
        "all. `init_printing` is shared.",
        test="tests/isolation/test_libraries.py::test_each_worker_of_sympy_evaluates_for_itself",
        on_import={"sympy.core.cache": _remember_none, "sympy.core.parameters": _note_who},
        library="sympy",
    )
)
table.add(
    Row(
        state="sympy's `assuming`, `global_assumptions` and `sympy.core.random`",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker assumes, seeds and draws for itself.",
        test="tests/isolation/test_libraries.py::test_each_worker_of_sympy_assumes_for_itself",
        on_import={"sympy.assumptions.assume": _assumptions, "sympy.core.random": _numbers},
        library="sympy",
    )
)
table.add(
    Row(
        state="constants of `sympy.S` at their first use",
        treatment=Treatment.SHARED,
        meaning="Workers may be the first to ask for one at the same moment, as they do when they "
        "trace or compile with shapes that vary.",
        test="tests/isolation/test_libraries.py::test_two_workers_ask_for_a_constant_of_sympy",
        on_import={"sympy.core.singleton": _constants},
        library="sympy",
    )
)
