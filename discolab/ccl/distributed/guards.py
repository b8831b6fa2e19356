"""Parts of torch.distributed that keep one state for the process, made safe for worker threads.

Each function here changes one module of torch, as soon as that is imported. The state that it
adds is the worker's own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from ...isolation import table
from ...isolation.own_globals import owning_globals
from ...isolation.patches import ModuleWithProperties, Patches, refused
from ...isolation.table import Row, Treatment
from ...isolation.worker_local import DictOfWorkers, OwnSetting
from ...runtime.errors import SessionError
from ...runtime.interrupts import reentrant_lock
from . import registry
from .world import world_here


def _sharding_prop(module: ModuleType, patches: Patches) -> None:
    """DTensor works out shapes in a fake mode that only one thread at a time may be in."""
    patches.replace(module.ShardingPropagator, "_fake_mode_lock", lambda _: reentrant_lock())


_handlers: OwnSetting[dict[Any, Any] | None] = OwnSetting("loss_parallel")


def _loss_parallel(module: ModuleType, patches: Patches) -> None:
    """`loss_parallel` puts handlers into DTensor's table: a worker within has its own table."""
    dispatcher = module.DTensor._op_dispatcher
    name = "_custom_op_handlers"

    def table_here(self: Any) -> Any:
        return _handlers.get(lambda: None) or vars(self)[name]

    def replace_table(self: Any, handlers: Any) -> None:
        vars(self)[name] = handlers

    patches.add(type(dispatcher), name, property(table_here, replace_table))

    def enable_over(enable: Callable[[], None]) -> Callable[[], None]:
        def enable_here() -> None:
            own = {**vars(dispatcher)[name], **module.customized_loss_ops}
            if not _handlers.set(own):
                enable()

        return enable_here

    def disable_over(disable: Callable[[], None]) -> Callable[[], None]:
        def disable_here() -> None:
            if not _handlers.set(None):
                disable()

        return disable_here

    patches.replace(module, "_enable_custom_loss_ops", enable_over)
    patches.replace(module, "_disable_custom_loss_ops", disable_over)


class _RandomOfWorkers(ModuleWithProperties):
    """``torch.distributed.tensor._random`` with a tracker for each worker."""

    @property
    def _rng_tracker(self) -> Any:
        world = world_here()
        if world is None:
            return vars(self).get("_rng_tracker")
        if world.rng_tracker is None and world.worker.device.type == "cpu":
            world.rng_tracker = _CpuTracker()
        return world.rng_tracker

    @_rng_tracker.setter
    def _rng_tracker(self, tracker: Any) -> None:
        world = world_here()
        if world is None:
            vars(self)["_rng_tracker"] = tracker
        else:
            world.rng_tracker = tracker


class _CpuTracker:
    """Leaves DTensor's random functions the worker's own state, as a process on the CPU does."""

    distribute_region_enabled = True

    @contextlib.contextmanager
    def _distribute_region(
        self, spec: Any, generator: torch.Generator | None = None
    ) -> Iterator[None]:
        yield


def _random(module: ModuleType, patches: Patches) -> None:
    """DTensor's state of random numbers belongs to the worker."""
    patches.change_class(module, _RandomOfWorkers)


def _random_factories(module: ModuleType, patches: Patches) -> None:
    """`rand` and `randn` draw the whole tensor, of which a worker keeps its parts.

    Where torch has no tracker for a device, as on the CPU, they are an assertion that fails. Parts
    drawn one by one would be equal, since workers have the same seed.
    """

    def init_over(init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)
        def init_whole(
            init_op: Any, size: Any, device_mesh: Any = None, placements: Any = None, **kwargs: Any
        ) -> Any:
            world = world_here()
            if (
                world is None
                or world.worker.device.type != "cpu"
                or init_op not in (torch.rand, torch.randn)
                or not any(placement.is_shard() for placement in placements or ())
                or any(placement.is_partial() for placement in placements)
            ):
                return init(init_op, size, device_mesh, placements, **kwargs)
            requires_grad = kwargs.pop("requires_grad", False)
            whole = init(init_op, size, device_mesh, None, requires_grad=False, **kwargs)
            parts = whole.redistribute(placements=placements)
            return parts.clone(memory_format=torch.contiguous_format).requires_grad_(requires_grad)

        return init_whole

    patches.replace(module, "_dtensor_init_helper", init_over)


def _collective_utils(module: ModuleType, patches: Patches) -> None:
    """DTensor warns that Gloo has no all-to-all, once a process; here it is not Gloo that works.

    It takes the function that resolves groups by name, too.
    """

    def warn_over(warn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: None if world_here() else warn(*args, **kwargs)

    patches.replace(module, "warning_once", warn_over)
    patches.replace(module, "_resolve_process_group", registry.resolve_over)


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


def _class_of_thread(kind: Any, state: Callable[[], dict[str, Any]]) -> Callable[[], Any]:
    """Give the calling thread's subclass of a class that keeps its state in itself."""
    local = threading.local()

    def mine() -> Any:
        if not hasattr(local, "kind"):
            local.kind = type(kind.__name__, (kind,), state())
        return local.kind

    return mine


def _state_dict_profiler(module: ModuleType, patches: Patches) -> None:
    """The older FSDP measures its state dicts in a class: each thread has one of its own."""
    torchs = module.SimpleProfiler
    mine = _class_of_thread(torchs, lambda: {"results": defaultdict(float), "profiling": set()})

    def method_over(method: Any) -> Any:
        return staticmethod(lambda *args: method.__func__(mine(), *args))

    for name in ("reset", "profile", "dump_and_reset"):
        patches.replace(torchs, name, method_over)


def _sharded_tensor(module: ModuleType, patches: Patches) -> None:
    """It tells from the name of the backend where its tensors are: with discolab's, on a GPU."""

    def device_over(device: Callable[[Any], torch.device]) -> Callable[[Any], torch.device]:
        @functools.wraps(device)
        def device_here(self: Any) -> torch.device:
            world = world_here()
            return device(self) if world is None else world.worker.device

        return device_here

    patches.replace(module.ShardedTensor, "_get_preferred_device", device_over)


def _auto_wrap(module: ModuleType, patches: Patches) -> None:
    """`enable_wrap` keeps what to wrap with in a class: each thread has one of its own."""
    mine = _class_of_thread(
        module._ConfigAutoWrap,
        lambda: {"in_autowrap_context": False, "wrapper_cls": None, "kwargs": {}},
    )

    class ConfigOfThread:
        """In the place of the class."""

        def __call__(self, **kwargs: Any) -> Any:
            return mine()(**kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(mine(), name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(mine(), name, value)

    patches.replace(module, "_ConfigAutoWrap", lambda _: ConfigOfThread())


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
                    "reset_iter_state() of the outermost module on all ranks, then zero_grad(), "
                    "or build the module again"
                )
            return pre_forward(self, *args, **kwargs)

        return not_compiled(pre_forward_if_whole)

    patches.replace(module.FSDPState, "_pre_forward", pre_forward_over)


def _context_parallel(module: ModuleType, patches: Patches) -> None:
    """It replaces the function of attention, and DTensor's rules for it, in the process."""
    for name in ("context_parallel", "_enable_context_parallel_dispatcher"):
        over = refused(f"torch's {name}", "replaces scaled_dot_product_attention in the process")
        patches.replace(module, name, over, everywhere=True)


def _active_ddp(module: ModuleType, patches: Patches) -> None:
    """The module whose forward runs, for which torch.compile cuts graphs: of the thread that asks.

    torch keeps it in the class; there other workers would find it, and the first to leave its
    forward would put back what another one had there.
    """
    local = threading.local()
    not_compiled: Any = module.torch._disable_dynamo(recursive=False)

    def inside_over(_: Any) -> Any:
        def inside(self: Any) -> Iterator[None]:
            before, local.active = getattr(local, "active", None), self
            try:
                yield
            finally:
                local.active = before

        return contextlib.contextmanager(not_compiled(inside))

    kind = module.DistributedDataParallel
    patches.replace(kind, "_inside_ddp_forward", inside_over)
    active = staticmethod(lambda: getattr(local, "active", None))
    patches.replace(kind, "_get_active_ddp_module", lambda _: active)


table.add(
    Row(
        state="`loss_parallel`'s table of handlers",
        treatment=Treatment.PER_WORKER,
        meaning="They handle the operators of the worker within `loss_parallel`. Those that "
        "an error within has left go at a script's end.",
        test="tests/ccl/test_dist_models.py::test_loss_parallel_is_for_the_worker_within",
        on_import={"torch.distributed.tensor.parallel.loss": _loss_parallel},
    )
)
table.add(
    Row(
        state="DTensor's random state",
        treatment=Treatment.PER_WORKER,
        meaning="Random functions of DTensor draw from the worker's state, each worker its own "
        "part, as on torch's CPU; `rand` and `randn`, which torch has not there, draw the whole "
        "tensor and keep a part.",
        test="tests/ccl/test_dist_models.py::test_random_dtensors_draw_from_the_workers_own_state",
        on_import={
            "torch.distributed.tensor._random": _random,
            "torch.distributed.tensor._api": _random_factories,
        },
        in_own_process=True,
    )
)
table.add(
    Row(
        state="DTensor's `use_min_cost_redistribution_plan` and "
        "`disable_redistribute_transform_optimization`",
        treatment=Treatment.PER_WORKER,
        meaning="They hold for the DTensors of the worker that is within them; other plans call "
        "other collectives.",
        test="tests/ccl/test_dist_models.py::test_plans_of_redistribution_are_each_workers_own",
        on_import={"torch.distributed.tensor._redistribute": owning_globals()},
    )
)
table.add(
    Row(
        state="DTensor's fake mode for working out shapes",
        treatment=Treatment.IN_TURNS,
        meaning="One thread at a time is in it.",
        test="tests/ccl/test_dist_failures.py::test_dtensors_in_two_sessions_at_once",
        on_import={"torch.distributed.tensor._sharding_prop": _sharding_prop},
    )
)
table.add(
    Row(
        state="DTensor's warning about Gloo's all-to-all",
        treatment=Treatment.SHARED,
        meaning="Not given on a worker, where another backend works.",
        test="",
        on_import={"torch.distributed.tensor._collective_utils": _collective_utils},
        in_own_process=True,
    )
)
table.add(
    Row(
        state="where `ShardedTensor` gathers",
        treatment=Treatment.PER_WORKER,
        meaning="On the worker's device.",
        test="tests/ccl/test_dist_tensors.py::test_sharded_tensors_are_gathered",
        on_import={"torch.distributed._shard.sharded_tensor.api": _sharded_tensor},
        in_own_process=True,
    )
)
table.add(
    Row(
        state="the stop watch of FullyShardedDataParallel's state dicts",
        treatment=Treatment.PER_WORKER,
        meaning="The older FSDP's `state_dict` and `load_state_dict` on several workers at once.",
        test="tests/ccl/test_dist_models.py::test_state_dicts_of_the_older_fsdp",
        on_import={"torch.distributed.fsdp._debug_utils": _state_dict_profiler},
    )
)
table.add(
    Row(
        state="`enable_wrap` and `wrap` of `torch.distributed.fsdp.wrap`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker wraps with what its own `enable_wrap` was given.",
        test="tests/ccl/test_dist_models.py::test_each_worker_wraps_with_its_own",
        on_import={"torch.distributed.fsdp.wrap": _auto_wrap},
    )
)
table.add(
    Row(
        state="`fully_shard` modules after a backward that was cut short",
        treatment=Treatment.REFUSED,
        meaning="An error at the next forward, where torch would train on without reducing: "
        "`reset_iter_state()` on all ranks and `zero_grad()`, or build it again.",
        test="tests/ccl/test_dist_models.py::test_fsdp2_after_a_backward_that_was_cut_short",
        on_import={"torch.distributed.fsdp._fully_shard._fsdp_state": _fsdp_state},
        in_own_process=True,
    )
)


def _plans(module: ModuleType, patches: Patches) -> None:
    """Plans of checkpoints are kept in a class, under the planner's name: each rank has its own."""
    planner = module.SavePlanner
    for name in [name for name in vars(planner) if name.startswith("_cached_")]:
        patches.replace(planner, name, functools.partial(_own_plans, name))


def _own_plans(name: str, of_process: Any) -> DictOfWorkers:
    return DictOfWorkers(f"SavePlanner.{name}", of_process, dict)


table.add(
    Row(
        state="the plans of `torch.distributed.checkpoint` (`enable_plan_caching`)",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker saves by the plan of its own rank.",
        test="tests/ccl/test_dist_pipelines.py::test_each_worker_keeps_its_plan",
        on_import={"torch.distributed.checkpoint.planner": _plans},
    )
)
table.add(
    Row(
        state="the `DistributedDataParallel` module whose forward runs",
        treatment=Treatment.PER_WORKER,
        meaning="torch.compile cuts the graphs of that worker alone into DDP's buckets.",
        test="tests/ccl/test_dist_models.py::test_each_worker_is_in_the_forward_of_its_own_ddp",
        on_import={"torch.nn.parallel.distributed": _active_ddp},
    )
)
table.add(
    Row(
        state="`torch.distributed.tensor.experimental.context_parallel`",
        treatment=Treatment.REFUSED,
        meaning="It replaces `scaled_dot_product_attention` for the whole process: other workers, "
        "within it or not, would compute with one worker's mesh. Use `--engine processes`.",
        test="tests/ccl/test_dist_limits.py::test_context_parallel_is_refused",
        on_import={
            "torch.distributed.tensor.experimental._context_parallel._attention": _context_parallel
        },
    )
)
table.add(
    Row(
        state="`torch.distributed.rpc`",
        treatment=Treatment.REFUSED,
        meaning="It has one agent in a process; `discolab.rpc` has the same calls on every engine.",
        test="tests/ccl/test_dist_limits.py::test_rpc_is_refused",
        on_import={"torch.distributed.rpc": _rpc},
        in_own_process=True,
    )
)
