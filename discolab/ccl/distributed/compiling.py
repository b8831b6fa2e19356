"""torch.compile in worker threads: what is compiled for one worker is not run by another.

torch keeps compiled code with the function's code object, which workers share, and finds it again
by the backend, and by what it guards: among that is neither the rank, which it takes for a
constant, nor whose global variables they are. So backends of different workers count as different.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

from .imports import import_turn, on_import
from .patches import Patches
from .world import WorkerWorld, world_here

# compiled versions of one function, and how often it is compiled: torch's own, for each worker
_LIMITS = {"recompile_limit": 8, "accumulated_recompile_limit": 256}
_SESSIONS = 8  # so many of this size, whose versions are still kept


def _backends(torch: ModuleType, patches: Patches) -> None:
    def init_over(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def init_for_worker(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            world = world_here()
            if world is not None:
                self.discolab_world = world.number
                _raise_limits(world)

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


def _raise_limits(world: WorkerWorld) -> None:
    """So many workers are no sign of a function that is compiled again and again.

    The settings of torch._dynamo belong to the thread.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    workers = min(world.number, _SESSIONS * world.worker.num_workers)
    for name, each in _LIMITS.items():
        if getattr(config, name, math.inf) < each * workers:
            setattr(config, name, each * workers)


def _lock(module: ModuleType, patches: Patches) -> None:
    """Who compiles also imports, under torch's lock; who imports may compile: both in one turn."""
    patches.replace(module, "compile_lock", _LockInTurn)


class _LockInTurn:
    """A lock that a worker takes with its turn to import, for which it waits as for all else."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
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
        with import_turn.taken("what torch.compile needs"), self._lock:
            yield


on_import["torch"] = _backends
on_import["torch._dynamo.convert_frame"] = _lock
