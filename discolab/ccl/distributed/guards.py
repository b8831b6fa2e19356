"""Parts of torch.distributed that keep one state for the process, made safe for worker threads.

Each function here changes one module of torch, as soon as that is imported. The state that it
adds is guarded by `_lock`, or is the worker's own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from ...engines import randomness
from ...runtime.worker import Worker, current_worker_or_none
from .imports import on_import
from .patches import Patches
from .world import world_here

_lock = threading.Lock()
_in_loss_parallel: set[Worker | None] = set()


def _sharding_prop(module: ModuleType, patches: Patches) -> None:
    """DTensor works out shapes in a fake mode that only one thread at a time may be in."""
    patches.replace(module.ShardingPropagator, "_fake_mode_lock", lambda _: threading.RLock())


def _loss_parallel(module: ModuleType, patches: Patches) -> None:
    """`loss_parallel` puts handlers into a table: they go when the last worker has left it."""

    def enable_over(enable: Callable[[], None]) -> Callable[[], None]:
        def enable_first() -> None:
            with _lock:
                if not _in_loss_parallel:
                    enable()
                _in_loss_parallel.add(current_worker_or_none())

        return enable_first

    def disable_over(disable: Callable[[], None]) -> Callable[[], None]:
        def disable_last() -> None:
            with _lock:
                _in_loss_parallel.discard(current_worker_or_none())
                gone = [worker for worker in _in_loss_parallel if worker and worker.ended]
                _in_loss_parallel.difference_update(gone)
                if not _in_loss_parallel:
                    disable()

        return disable_last

    patches.replace(module, "_enable_custom_loss_ops", enable_over)
    patches.replace(module, "_disable_custom_loss_ops", disable_over)


def _module_tracker(module: ModuleType, patches: Patches, name: str = "ModTracker") -> None:
    """Hooks on all modules of the process: they count for the thread that has set them."""
    tracker = getattr(module, name)

    def enter_over(enter: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(enter)
        def enter_here(self: Any) -> Any:
            self.discolab_thread = threading.get_ident()
            return enter(self)

        return enter_here

    def hook_over(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def hook_here(self: Any, *args: Any) -> Any:
            if getattr(self, "discolab_thread", 0) == threading.get_ident():
                return hook(self, *args)
            return None

        return hook_here

    patches.replace(tracker, "__enter__", enter_over)
    for hook in ("_fw_pre_hook", "_fw_post_hook", "_bw_hook"):
        if hook in vars(tracker):
            patches.replace(tracker, hook, hook_over)


def _comm_mode(module: ModuleType, patches: Patches) -> None:
    _module_tracker(module, patches, "_CommModeModuleTracker")


class _RandomOfWorkers(ModuleType):
    """``torch.distributed.tensor._random`` with a tracker for each worker."""

    @property
    def _rng_tracker(self) -> Any:
        world = world_here()
        if world is None:
            return vars(self).get("_rng_tracker")
        if world.rng_tracker is None and world.worker.device.type == "cpu":
            world.rng_tracker = _CpuTracker(world.worker)
        return world.rng_tracker

    @_rng_tracker.setter
    def _rng_tracker(self, tracker: Any) -> None:
        world = world_here()
        if world is None:
            vars(self)["_rng_tracker"] = tracker
        else:
            world.rng_tracker = tracker


class _CpuTracker:
    """Has DTensor's random functions draw from the worker's own state, as in a process."""

    distribute_region_enabled = True

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @contextlib.contextmanager
    def _distribute_region(
        self, spec: Any, generator: torch.Generator | None = None
    ) -> Iterator[None]:
        with randomness.drawing(generator or self._worker.generator):
            yield


def _random(module: ModuleType, patches: Patches) -> None:
    """DTensor's state of random numbers belongs to the worker."""
    module.__class__ = _RandomOfWorkers
    patches.at_undo(lambda: setattr(module, "__class__", ModuleType))


on_import.update(
    {
        "torch.distributed.tensor._sharding_prop": _sharding_prop,
        "torch.distributed.tensor.parallel.loss": _loss_parallel,
        "torch.distributed.tensor.debug._comm_mode": _comm_mode,
        "torch.distributed._tools.mod_tracker": _module_tracker,
        "torch.distributed.tensor._random": _random,
    }
)
