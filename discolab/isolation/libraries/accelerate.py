"""accelerate keeps what it knows of ranks and groups in one dictionary of each class.

`init_empty_weights` replaces a method of all modules, for all threads; torch's hooks for the
parameters of all modules, which each worker has for itself, do the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from .. import table
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import PerWorker


def _own(shared: dict[str, Any]) -> PerWorker[dict[str, Any]]:
    return PerWorker(shared, dict)


def _state(module: ModuleType, patches: Patches) -> None:
    for name in ("PartialState", "AcceleratorState", "GradientState"):
        patches.replace(getattr(module, name), "_shared_state", _own)


def _init_over(module: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @contextmanager
    def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Iterator[Any]:
        if include_buffers is None:
            flag = "ACCELERATE_INIT_INCLUDE_BUFFERS"
            include_buffers = module.parse_flag_from_env(flag, False)
        if include_buffers:
            with original(device, include_buffers=True):
                yield
            return

        def on_device(_module: Any, _name: str, param: torch.nn.Parameter) -> Any:
            own = dict(param.__dict__)
            flags = {key: own.pop(key) for key in ("_is_hf_initialized",) if key in own}
            own["requires_grad"] = param.requires_grad
            made = type(param)(param.to(device), **own)
            for key, value in flags.items():
                setattr(made, key, value)
            return made

        handle = nn_module.register_module_parameter_registration_hook(on_device)
        try:
            yield
        finally:
            handle.remove()

    return init_on_device


def _init(module: ModuleType, patches: Patches) -> None:
    over = functools.partial(_init_over, module)
    patches.replace(module, "init_on_device", over, everywhere=True)


table.add(
    Row(
        state="accelerate's `init_empty_weights`, `init_on_device`",
        treatment=Treatment.PER_WORKER,
        meaning="Only the modules that the worker makes within are made there.",
        test="tests/isolation/test_libraries.py::test_each_worker_makes_empty_weights_for_itself",
        on_import={"accelerate.big_modeling": _init},
        library="accelerate",
    )
)
table.add(
    Row(
        state="accelerate's `PartialState`, `AcceleratorState`, `GradientState`",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker is its own rank, also in the `Trainer` of transformers.",
        test="tests/isolation/test_libraries.py::test_each_worker_of_accelerate_is_its_own_rank",
        on_import={"accelerate.state": _state},
        library="accelerate",
    )
)
