"""C++ code that inductor has made draws from the process's random state: it gets the worker's.

AOTInductor makes such code of a model, and torch.compile with ``cpp_wrapper`` of a graph. While a
worker runs it the process's state is the worker's, so one worker runs such code after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..runtime.worker import current_worker_or_none
from . import table
from .patches import Patches
from .table import Row, Treatment
from .torch_random import process_draws_for


def _drawing(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_with_own_state(*args: Any, **kwargs: Any) -> Any:
        worker = current_worker_or_none()
        if worker is None:
            return run(*args, **kwargs)
        with process_draws_for(worker):
            return run(*args, **kwargs)

    return run_with_own_state


def _models(patches: Patches) -> None:
    for kind, names in (
        ("AOTIModelPackageLoader", ("run", "boxed_run")),
        ("AOTIModelContainerRunnerCpu", ("run",)),
    ):
        owner: Any = getattr(torch._C._aoti, kind)
        for name in names:
            plain = vars(owner)[name]  # as a method, which `getattr` does not give
            setattr(owner, name, _drawing(getattr(owner, name)))
            patches.at_undo(functools.partial(setattr, owner, name, plain))


def _graphs(module: ModuleType, patches: Patches) -> None:
    load = module.CppPythonBindingsCodeCache.load_pybinding.__func__

    def load_drawing(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return _drawing(load(cls, *args, **kwargs))

    patches.add(module.CppWrapperCodeCache, "load_pybinding", classmethod(load_drawing))


table.add(
    Row(
        state="random numbers in C++ code of inductor (AOTInductor, `cpp_wrapper`)",
        treatment=Treatment.IN_TURNS,
        meaning="Models of AOTInductor, and graphs that torch.compile has made with `cpp_wrapper`, "
        "run on one worker at a time, and draw from that worker's state.",
        test="tests/isolation/test_compiler.py::test_each_worker_draws_in_code_of_aotinductor",
        install=_models,
        on_import={"torch._inductor.codecache": _graphs},
    )
)
