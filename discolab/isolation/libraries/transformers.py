"""transformers replaces functions of torch and of its own while it makes and loads a model.

It does so for the process: a model that another thread makes meanwhile would get no initial values
or no tied weights, and what two threads replace at once they put back in the wrong order. Here each
function looks whether its own thread is within such a context.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import table
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import DictOfWorkers

Function = Callable[..., Any]


class _Within(threading.local):
    """In how many of transformers' contexts this thread is."""

    def __init__(self) -> None:
        self.inits: list[
            str
        ] = []  # "guarded" or "none", what torch.nn.init does; the innermost last
        self.untied = 0


_within = _Within()


@contextmanager
def _guard_torch_init_functions() -> Iterator[None]:
    _within.inits.append("guarded")
    try:
        yield
    finally:
        _within.inits.pop()


@contextmanager
def _no_init_weights() -> Iterator[None]:
    _within.inits.append("none")
    try:
        yield
    finally:
        _within.inits.pop()


@contextmanager
def _no_tie_weights() -> Iterator[None]:
    _within.untied += 1
    try:
        yield
    finally:
        _within.untied -= 1


class _LinspaceOnCpu(TorchFunctionMode):
    """`torch.linspace` makes real values though the model is on the meta device."""

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.linspace:
            kwargs.setdefault("device", "cpu")
        return func(*args, **kwargs)


def _second(new: Any, before: Any) -> Any:
    return new


def _initialization(module: ModuleType, patches: Patches) -> None:
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "guard_torch_init_functions": _guard_torch_init_functions,
        "no_init_weights": _no_init_weights,
        "no_tie_weights": _no_tie_weights,
        "meta_device_safe_creation_ops": _LinspaceOnCpu,
    }
    for name, context in contexts.items():
        patches.replace(module, name, functools.partial(_second, context))

    def init_over(init: Function, name: str) -> Function:
        guarded = getattr(module, name)

        @functools.wraps(init)
        def init_as_told(*args: Any, **kwargs: Any) -> Any:
            inits = _within.inits
            if not inits:
                return init(*args, **kwargs)
            return guarded(*args, **kwargs) if inits[-1] == "guarded" else None

        return init_as_told

    for owner in [sys.modules[n] for n in module.TORCH_MODULES_TO_PATCH if n in sys.modules]:
        for name in module.TORCH_INIT_FUNCTIONS:
            if name in vars(owner):
                patches.replace(owner, name, functools.partial(init_over, name=name))


def _models(module: ModuleType, patches: Patches) -> None:
    def init_over(init: Function) -> Function:
        @functools.wraps(init)
        def init_weights(*args: Any, **kwargs: Any) -> Any:
            return None if "none" in _within.inits else init(*args, **kwargs)

        return init_weights

    def tie_over(tie: Function) -> Function:
        @functools.wraps(tie)
        def tie_weights(*args: Any, **kwargs: Any) -> Any:
            return None if _within.untied else tie(*args, **kwargs)

        return tie_weights

    model = module.PreTrainedModel
    patches.replace(model, "init_weights", init_over)
    patches.replace(model, "tie_weights", tie_over)
    for cell in model.initialize_weights.__closure__ or ():  # decorated before we came
        if isinstance(cell.cell_contents, _GeneratorContextManager):
            guard = vars(_guard_torch_init_functions)["__wrapped__"]
            patches.replace(cell.cell_contents, "func", functools.partial(_second, guard))


_EXTRA = "_extra_content"


def _own_entries(mapping: str) -> Callable[[ModuleType, Patches], None]:
    """Have what is registered with the mappings of a class be the worker's that registers it."""

    def entries(self: Any) -> DictOfWorkers:
        return DictOfWorkers(f"transformers {id(self)}", vars(self)[_EXTRA])

    def set_entries(self: Any, entries: Any) -> None:
        vars(self)[_EXTRA] = entries

    def change(module: ModuleType, patches: Patches) -> None:
        patches.add(getattr(module, mapping), _EXTRA, property(entries, set_entries))

    return change


def _own_functions(interface: str) -> Callable[[ModuleType, Patches], None]:
    own = functools.partial(DictOfWorkers, f"transformers {interface}")

    def change(module: ModuleType, patches: Patches) -> None:
        patches.replace(getattr(module, interface), "_global_mapping", own)

    return change


table.add(
    Row(
        state="what is registered with transformers (`AutoConfig.register` and its like, "
        "`AttentionInterface.register`)",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker gets the classes and functions that it has registered. What a module "
        "registers when it is imported, and the notebook, is there on all.",
        test="tests/isolation/test_libraries.py::test_each_worker_registers_its_own_model",
        on_import={
            "transformers.models.auto.configuration_auto": _own_entries("_LazyConfigMapping"),
            "transformers.models.auto.auto_factory": _own_entries("_LazyAutoMapping"),
            "transformers.masking_utils": _own_functions("AttentionMaskInterface"),
            "transformers.modeling_utils": _own_functions("AttentionInterface"),
        },
        library="transformers",
    )
)
table.add(
    Row(
        state="what transformers replaces while it makes and loads models",
        treatment=Treatment.PER_WORKER,
        meaning="`torch.nn.init`, `torch.linspace`, `init_weights` and `tie_weights` are switched "
        "for the thread that loads, not for models that others make meanwhile.",
        test="tests/isolation/test_libraries.py::test_a_model_is_whole_though_others_load_theirs",
        on_import={
            "transformers.initialization": _initialization,
            "transformers.modeling_utils": _models,
        },
        library="transformers",
    )
)
