"""What fake tensors have worked out, which torch keeps for the process: not from another device.

`FakeTensorMode`, by which DTensor and `torch.compile` work out shapes, remembers what an operator
gave. A tensor that is made on "cuda" is on the device that is current, and of that the key of
`FakeTensorMode.cache` has nothing: a worker got another worker's device, beside its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..runtime import accelerators
from . import table
from .patches import Patches
from .table import Row, Treatment


def _by_device(module: ModuleType, patches: Patches) -> None:
    def with_device(cache_key: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(cache_key)
        def key_of(*args: Any) -> Any:
            key = cache_key(*args)
            if accelerators.any_in_use():
                key.key = (*key.key, torch.accelerator.current_device_index())
                key.hashvalue = hash(key.key)
            return key

        return key_of

    patches.replace(module.FakeTensorMode, "_cache_key", with_device)


table.add(
    Row(
        state="what `FakeTensorMode` has worked out",
        treatment=Treatment.SHARED,
        meaning="By workers on one device; those on others have their own, as a tensor on "
        '`"cuda"` is on the worker\'s.',
        test="tests/accelerator/test_device_library.py::test_fake_tensors_are_on_the_workers_device",
        on_import={"torch._subclasses.fake_tensor": _by_device},
    )
)
