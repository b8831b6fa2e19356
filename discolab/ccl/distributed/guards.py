"""Parts of torch.distributed that keep one state for the process, made safe for worker threads.

Each function here changes one module of torch, as soon as that is imported. The state that it
adds is guarded by `_lock`, or is the worker's own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from ...engines import randomness
from ...runtime.errors import SessionError
from ...runtime.worker import Worker, current_worker_or_none
from .imports import on_import
from .patches import Patches
from .world import world_here

_lock = threading.Lock()
_in_loss_parallel: set[Worker | None] = set()


def _after_fork() -> None:
    """A child must not wait for a thread that only its parent has."""
    global _lock
    _lock = threading.Lock()
    _in_loss_parallel.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


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


def _collective_utils(module: ModuleType, patches: Patches) -> None:
    """DTensor warns that Gloo has no all-to-all, once a process; here it is not Gloo that works."""

    def warn_over(warn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: None if world_here() else warn(*args, **kwargs)

    patches.replace(module, "warning_once", warn_over)


def _profiler(module: ModuleType, patches: Patches) -> None:
    """There is one profiler in a process, and a second one that is started brings it down."""
    running: list[int] = []  # the thread that profiles

    def enable_over(enable: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(enable)
        def enable_alone(*args: Any, **kwargs: Any) -> Any:
            with _lock:
                if running and running[0] != threading.get_ident() and world_here() is not None:
                    raise SessionError(
                        "torch's profiler is running on another thread; a process has only one, "
                        "which sees what its own thread does. Start it on one worker: "
                        "with profile() if rank == 0 else contextlib.nullcontext()"
                    )
                running[:] = [threading.get_ident()]
            return enable(*args, **kwargs)

        return enable_alone

    def disable_over(disable: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(disable)
        def disable_and_forget(*args: Any, **kwargs: Any) -> Any:
            if running == [threading.get_ident()]:
                running.clear()
            return disable(*args, **kwargs)

        return disable_and_forget

    patches.replace(module, "_prepare_profiler", enable_over)
    patches.replace(module, "_enable_profiler", enable_over)
    patches.replace(module, "_disable_profiler", disable_over)


def _rpc(module: ModuleType, patches: Patches) -> None:
    """torch's RPC has one agent in a process."""

    def init_over(init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)
        def init_or_refuse(*args: Any, **kwargs: Any) -> Any:
            if world_here() is not None:
                raise SessionError(
                    "torch.distributed.rpc has one agent in a process, so workers that are "
                    "threads can't have one each"
                )
            return init(*args, **kwargs)

        return init_or_refuse

    patches.replace(module, "init_rpc", init_over)


def _dynamo(module: ModuleType, patches: Patches) -> None:
    """A reset frees what torch.compile has made, also what another worker runs at that moment."""

    def reset_over(reset: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(reset)
        def reset_or_refuse() -> None:
            if world_here() is not None:
                raise SessionError(
                    "torch.compiler.reset() throws away the compiled code of the process, also "
                    "what other workers run now; call it in the notebook, outside of %%disco and "
                    "after sess.sync_all()"
                )
            reset()

        return reset_or_refuse

    patches.replace(module, "reset", reset_over)


def _fsdp_state(module: ModuleType, patches: Patches) -> None:
    """A backward that was cut short leaves a sharded module that reduces no gradients any more.

    A process would have died of it. Here the module is still there when the next command comes.
    """
    not_compiled: Any = getattr(module, "_dynamo_disable", lambda function: function)

    def pre_forward_over(pre_forward: Callable[..., Any]) -> Any:
        @functools.wraps(pre_forward)
        def pre_forward_if_whole(self: Any, *args: Any, **kwargs: Any) -> Any:
            if (
                self._state_ctx.post_backward_final_callback_queued
                and torch._C._current_graph_task_id() == -1  # no backward runs now
                and world_here() is not None
            ):
                raise SessionError(
                    "an earlier backward of this fully_shard module was cut short, by an error or "
                    "an interrupt, and torch would train on without reducing gradients. Call "
                    "reset_iter_state() of the outermost module on all ranks, then zero_grad(); "
                    "with a torch that has no such method build the module again"
                )
            return pre_forward(self, *args, **kwargs)

        return not_compiled(pre_forward_if_whole)

    patches.replace(module.FSDPState, "_pre_forward", pre_forward_over)


def warn_of_default_dtype(set_default: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.set_default_dtype` that says on a worker whom it concerns."""

    @functools.wraps(set_default)
    def set_for_all(dtype: Any, /) -> None:
        if world_here() is not None and dtype is not torch.get_default_dtype():
            warnings.warn(
                "the default dtype belongs to the process: this sets it for all workers and for "
                "the notebook. dtype= and module.to(dtype) are the worker's own",
                stacklevel=2,
            )
        set_default(dtype)

    return set_for_all


on_import.update(
    {
        "torch._dynamo": _dynamo,
        "torch.autograd.profiler": _profiler,
        "torch.distributed.fsdp._fully_shard._fsdp_state": _fsdp_state,
        "torch.distributed.rpc": _rpc,
        "torch.distributed.tensor._collective_utils": _collective_utils,
        "torch.distributed.tensor._sharding_prop": _sharding_prop,
        "torch.distributed.tensor.parallel.loss": _loss_parallel,
        "torch.distributed.tensor.debug._comm_mode": _comm_mode,
        "torch.distributed._tools.mod_tracker": _module_tracker,
        "torch.distributed.tensor._random": _random,
    }
)
