"""Collectives of torch.distributed in torch's dispatcher, where somebody looks there.

torch's own process groups hand each collective to the dispatcher as an operator ``c10d::…``, whose
kernel hands it to the backend. That is how `CommDebugMode`, any `TorchDispatchMode`,
`FakeTensorMode` and the profiler get to know of it. A `WorkerGroup` does the work without that
detour. Only if one of them is active on the thread does it go there; the operators have kernels
for worker groups then, and for all other groups torch's own.

Schemas of the operators: torch/csrc/distributed/c10d/Ops.cpp. The library of kernels is made and
put away with the row below, under the lock of engines/hooks.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...isolation import table
from ...isolation.patches import Patches
from ...isolation.profiler import shared as profiling
from ...isolation.table import Row, Treatment
from ...runtime.errors import ArgumentError

_METHODS = {
    "_allgather_base_": "all_gather_single",
    "_reduce_scatter_base_": "reduce_scatter_single",
    "allgather_": "allgather",
    "allgather_coalesced_": "allgather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_single_coalesced",
    "allreduce_": "allreduce",
    "allreduce_coalesced_": "allreduce_coalesced",
    "alltoall_": "alltoall",
    "alltoall_base_": "all_to_all_single",
    "barrier": "barrier",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "monitored_barrier_": "monitored_barrier",
    "recv_": "recv",
    "recv_any_source_": "recv_anysource",
    "reduce_": "reduce",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_single_coalesced",
    "scatter_": "scatter",
    "send": "send",
}
_BEFORE_2_13 = {  # what torch called a method then
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
_OPTIONS = {"reduce_op": "reduceOp", "root_rank": "rootRank", "timeout": "timeout",
            "async_op": "asyncOp"}  # fmt: skip
_PASSED_ON = ("output_split_sizes", "input_split_sizes", "src", "dst", "tag")
_WITHOUT_OPTIONS = ("monitored_barrier_", "recv_", "recv_any_source_", "send")

_ProcessGroup: Any = dist.ProcessGroup
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled

Kind = TypeVar("Kind", bound=type)


def seen_by_torch(kind: Kind) -> Kind:
    """Give a class of process groups methods that take torch's own way while somebody looks."""
    for name in set(_METHODS.values()):
        setattr(kind, _as_torch_has_it(name), _seen(_as_torch_has_it(name), vars(kind)[name]))
    return kind


def _as_torch_has_it(name: str) -> str:
    return name if hasattr(_ProcessGroup, name) else _BEFORE_2_13.get(name, name)


def _seen(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    to_dispatcher = getattr(_ProcessGroup, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (_modes() or _profiled() or profiling):
            return method(self, *args, **kwargs)
        try:
            return to_dispatcher(self, *args, **kwargs)
        finally:
            self.begun = None

    # pybind11 calls this override from within `to_dispatcher`, but for the frame that has its name
    call.__code__ = call.__code__.replace(co_name=name)
    return functools.wraps(method)(call)


def _install(patches: Patches) -> None:
    library: Any = torch._C._dispatch_library("IMPL", "c10d", "", __file__, 0)
    for operator, method in _METHODS.items():
        # the key at which no operator here has a kernel, the last one before the device's
        library.impl(operator, "BackendSelect", _kernel(operator, _as_torch_has_it(method)), True)
    patches.at_undo(library.reset)


@functools.cache
def _kernel(operator: str, method: str) -> Callable[..., Any]:
    """What an operator does: the method of a worker group; for another group, what torch does."""
    schema = torch._C._get_schema(f"c10d::{operator}", "")
    names = [argument.name for argument in schema.arguments]
    place = names.index("process_group")
    tensors = slice(0, 0 if "barrier" in operator else place)
    results = len(schema.returns)
    find: Any = torch._C._dispatch_find_schema_or_throw
    torchs = find(f"c10d::{operator}", "").redispatch_boxed
    own_key = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)

    def run(keys: Any, *args: Any) -> Any:
        group: Any = _ProcessGroup.unbox(args[place])
        work_of = getattr(getattr(type(group), method, None), "__wrapped__", None)
        if work_of is None or keys.has(torch._C.DispatchKey.Meta):
            return torchs(keys - own_key, *args)
        given = dict(zip(names, args, strict=False))  # those with their default may be left out
        passed = [given[name] for name in _PASSED_ON if name in given]
        if operator == "monitored_barrier_":
            passed = [_limit(given["timeout"]), given["wait_all_ranks"]]
        elif operator not in _WITHOUT_OPTIONS:
            passed.append(_options(method, given))
        work = group.begun = work_of(group, *args[tensors], *passed)
        if not results:
            return None
        return work.boxed() if results == 1 else (args[0], work.boxed())

    return run


def _options(name: str, given: dict[str, Any]) -> SimpleNamespace:
    """Options as torch's Python functions give them, as far as a worker group asks for them."""
    options = SimpleNamespace(asyncOp=True, timeout=None)
    for argument, option in _OPTIONS.items():
        if argument in given:
            setattr(options, option, given[argument])
    if "reduce_op" in given:
        kind: Any = dist.ReduceOp.RedOpType(given["reduce_op"]._get_method("op")())
        if kind.name == "PREMUL_SUM":
            raise ArgumentError(
                f"{name}: PREMUL_SUM while a TorchDispatchMode or the profiler is active: its "
                "factor does not come through torch's dispatcher; multiply before the reduction"
            )
        options.reduceOp = kind
    options.timeout = _limit(options.timeout)
    return options


def _limit(milliseconds: int | None) -> timedelta | None:
    """torch's -1 is for the group's limit."""
    return timedelta(milliseconds=milliseconds) if milliseconds and milliseconds > 0 else None


table.add(
    Row(
        state="operators `c10d::…`",
        treatment=Treatment.SHARED,
        meaning="Collectives of `torch.distributed` pass through torch's dispatcher while a "
        "`TorchDispatchMode` (`CommDebugMode`, `FakeTensorMode`) or the profiler is active on the "
        "thread. The operators do the work of a worker's groups then, and what torch does for all "
        "others.",
        test="tests/ccl/test_dispatch.py::test_modes_see_the_operators_that_gloo_has",
        install=_install,
        in_own_process=True,
    )
)
