"""torch.compile in worker threads: what is compiled for one worker is not run by another.

torch keeps compiled code with the function's code object, which workers share, and finds it again
by the backend, and by what it guards: among that is neither the rank, which it takes for a
constant, nor whose global variables they are. So backends of different workers count as different.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .imports import on_import
from .patches import Patches
from .world import world_here

_LIMIT = 64  # compiled versions of one function, for all workers and some sessions


def _backends(torch: ModuleType, patches: Patches) -> None:
    def init_over(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def init_for_worker(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            world = world_here()
            if world is not None:
                self.discolab_world = world.number
                _raise_limit()

        return init_for_worker

    def equal_over(equal: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(equal)
        def equal_on_worker(self: Any, other: Any) -> bool:
            mine, its = (getattr(one, "discolab_world", 0) for one in (self, other))
            return mine == its and equal(self, other)

        return equal_on_worker

    for name in ("_TorchCompileInductorWrapper", "_TorchCompileWrapper"):
        wrapper = getattr(torch, name)
        patches.replace(wrapper, "__init__", init_over)
        patches.replace(wrapper, "__eq__", equal_over)


def _raise_limit() -> None:
    """So many workers are no sign of a function that is compiled again and again.

    The settings of torch._dynamo belong to the thread.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is not None and getattr(config, "recompile_limit", _LIMIT) < _LIMIT:
        config.recompile_limit = _LIMIT


on_import["torch"] = _backends
