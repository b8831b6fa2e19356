"""deepspeed keeps its backend, groups and stacks of modules in variables of its modules.

Its own sums in shared memory know one rank of a process, so worker threads go without them.
`zero.Init` and `OnDevice` replace constructors of torch for all threads while one is within, and
so does the profiler of flops with functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...runtime.worker import current_worker_or_none
from .. import table
from ..own_globals import own_class_attributes, own_globals, owning_globals
from ..patches import Patches, refused
from ..table import Row, Treatment

_GROUPS = ("_EXPERT_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP_RANKS", "_EXPERT_DATA_PARALLEL_GROUP",
           "_EXPERT_DATA_PARALLEL_GROUP_RANKS", "_ALL_TO_ALL_GROUP")  # fmt: skip
_CHECKPOINTS = ("contiguous_data_buffers", "data_offsets", "contiguous_size_buffers",
                "size_offsets", "_CUDA_RNG_STATE_TRACKER")  # fmt: skip
_COUNTS = ("comms_logger", "timers", "timer_summary")


def _is_plain(value: object, name: str) -> bool:
    return not name.startswith("_") and (value is None or isinstance(value, int | str))


def _partition(module: ModuleType, patches: Patches) -> None:
    own_globals(module, patches)
    names = [name for name, value in vars(module.Init).items() if _is_plain(value, name)]
    own_class_attributes(module, "Init", patches, *names)


def _no_shared_memory(module: ModuleType, patches: Patches) -> None:
    def over(build: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(build)
        def build_shm_op() -> Any:
            return build() if current_worker_or_none() is None else None

        return build_shm_op

    patches.replace(module, "build_shm_op", over)


def _refuse_init(module: ModuleType, patches: Patches) -> None:
    why = "replaces constructors and functions of torch for the whole process"
    what = "deepspeed.zero.Init as a context"
    owner = module.InsertPostInitMethodToModuleSubClasses
    patches.replace(owner, "__enter__", refused(what, why))


def _refuse_on_device(module: ModuleType, patches: Patches) -> None:
    why = "replaces constructors of torch for the whole process"
    patches.replace(module.OnDevice, "__enter__", refused("deepspeed.OnDevice", why))


def _refuse_flops(module: ModuleType, patches: Patches) -> None:
    why = "replaces functions of torch for the whole process"
    patches.replace(
        module.FlopsProfiler, "start_profile", refused("deepspeed's FlopsProfiler", why)
    )


table.add(
    Row(
        state="deepspeed's backend (`deepspeed.comm`) and what it logs, groups, activation "
        "checkpointing with its random states, and stacks of ZeRO's modules",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker initializes deepspeed for itself, and trains with engines of its own.",
        test="tests/isolation/test_libraries.py::test_each_worker_of_deepspeed_trains_for_itself",
        on_import={
            "deepspeed.comm.comm": owning_globals(*_COUNTS),
            "deepspeed.comm.torch": _no_shared_memory,
            "deepspeed.utils.groups": owning_globals(*_GROUPS),
            "deepspeed.runtime.activation_checkpointing.checkpointing": owning_globals(
                *_CHECKPOINTS
            ),
            "deepspeed.runtime.pipe.p2p": owning_globals("_async"),
            "deepspeed.runtime.sequence_parallel.parallel_state_sp": owning_globals(),
            "deepspeed.runtime.tensor_parallel.init_utils": owning_globals(),
            "deepspeed.runtime.torch_autocast": owning_globals(),
            "deepspeed.runtime.zero.parameter_offload": owning_globals("FWD_MODULE_STACK"),
            "deepspeed.runtime.zero.partition_parameters": _partition,
        },
        library="deepspeed",
    )
)
table.add(
    Row(
        state="`deepspeed.zero.Init` and `deepspeed.OnDevice` as contexts",
        treatment=Treatment.REFUSED,
        meaning="They replace constructors of torch for all threads. Give `deepspeed.initialize` "
        "the whole model, or use `--engine processes`.",
        test="tests/isolation/test_libraries.py::test_a_worker_may_not_enter_zero_init",
        on_import={
            "deepspeed.runtime.zero.partition_parameters": _refuse_init,
            "deepspeed.utils.init_on_device": _refuse_on_device,
        },
        library="deepspeed",
    )
)
table.add(
    Row(
        state="deepspeed's `FlopsProfiler`",
        treatment=Treatment.REFUSED,
        meaning="It replaces functions of torch for all threads, and would count what all workers "
        "do. Leave `flops_profiler` out, or use `--engine processes`.",
        test="tests/isolation/test_libraries.py::test_a_worker_may_not_profile_flops",
        on_import={"deepspeed.profiling.flops_profiler.profiler": _refuse_flops},
        library="deepspeed",
    )
)
