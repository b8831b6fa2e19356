"""megatron-core keeps groups, ranks, random states and schedules in variables of its modules."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from .. import table
from ..own_globals import own_class_attributes, own_globals, owning_globals
from ..patches import Patches
from ..table import Row, Treatment

_SCALE = "main_loss_backward_scale"
_MODULES = ("num_microbatches_calculator", "parallel_state", "pipeline_parallel.schedules",
            "pipeline_parallel.utils", "rerun_state_machine", "resharding.refit",
            "tensor_parallel.random", "transformer.cuda_graphs", "transformer.utils")  # fmt: skip
_FILLED = {"parallel_state": "_HYBRID_DP_CP_GROUPS", "resharding.refit": "_service_cache"}


def _owning(name: str) -> Callable[[ModuleType, Patches], None]:
    return owning_globals(*filter(None, [_FILLED.get(name)]))


def _experts(module: ModuleType, patches: Patches) -> None:
    own_globals(module, patches, "_MOE_LAYER_WISE_LOGGING_TRACKER")
    own_class_attributes(module, "MoEAuxLossAutoScaler", patches, _SCALE)


def _more_tokens(module: ModuleType, patches: Patches) -> None:
    own_class_attributes(module, "MTPLossAutoScaler", patches, _SCALE)
    own_class_attributes(module, "MTPLossLoggingHelper", patches, "tracker")


table.add(
    Row(
        state="groups and ranks of megatron-core (`parallel_state`), its random states, number of "
        "microbatches and scales of losses",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker initializes model parallelism for itself, and is its own rank there.",
        test="tests/isolation/test_libraries.py::test_each_worker_of_megatron_has_its_own_groups",
        on_import={
            **{f"megatron.core.{name}": _owning(name) for name in _MODULES},
            "megatron.core.transformer.moe.moe_utils": _experts,
            "megatron.core.transformer.multi_token_prediction": _more_tokens,
        },
        library="megatron-core",
    )
)
