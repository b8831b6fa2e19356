"""What torch has in force on the controller's thread goes to the workers with a call.

``with torch.no_grad(): y = torch.relu(x)`` on DRefs runs on workers, later and on other threads:
a command carries grad mode, inference mode, autocast, the default device, anomaly mode and the
kernels of attention where they are not torch's usual ones, and the worker has them in force for
that call alone. What can't be carried is
refused. Functions of discolab itself, those of ccl apart, are no part of the user's program: they
get nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import attention
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .actions import function_text
from .errors import ArgumentError

State = tuple[
    bool,
    bool,
    tuple[tuple[str, torch.dtype], ...],
    bool,
    torch.device | None,
    bool | None,  # anomaly mode: whether it looks for NaNs
    tuple[int, ...] | None,  # kernels of attention that may be used, in order
]

_PACKAGE = __name__.partition(".")[0] + "."
_DEVICE_CODE = DeviceContext.__torch_function__.__code__
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_saved_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_USUAL_PRIORITY: list[int] = torch._C._get_sdp_priority_order()
usual_kernels = False  # whether isolation knows that `all_kernels` holds for the notebook
_is_grad_enabled, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled


def nothing_in_force(
    # no global names: isolation replaces those by slower ones that look which thread asks
    anybodys_anomaly: Callable[[], bool] = torch._C.is_anomaly_enabled,
) -> bool:
    """Whether a call need carry nothing: all here is as torch has it usually."""
    return (
        _is_grad_enabled()
        and not _is_inference()
        and not _function_modes()
        and not _dispatch_modes()
        and not _any_autocast()
        and _transform() is None
        and _saved_hooks(True) is None
        and not (anybodys_anomaly() and torch.is_anomaly_enabled())
        and (usual_kernels or all_kernels())
    )


def with_context(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A call's function and arguments, and within them what is in force here.

    Raises
    ------
    ArgumentError
        If that can't be carried to a worker.
    """
    if _is_own(func):
        return func, args
    return run_within, ((*_state(), function_text(func)), func, *args)


def from_torch_function(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a call from a ``__torch_function__``: torch has put ``torch.device`` aside there."""
    frame = sys._getframe(2)
    device = None
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        if frame.f_code is _DEVICE_CODE:
            device = frame.f_locals["self"].device
        frame = frame.f_back  # type: ignore[assignment]
    if device is None:
        return call(*args, **kwargs)
    with device:
        return call(*args, **kwargs)


def _is_own(func: Any) -> bool:
    module = getattr(func, "__module__", None)
    return (
        isinstance(module, str)
        and module.startswith(_PACKAGE)
        and not module.startswith(_PACKAGE + "ccl.")
        and not hasattr(type(func), "reg_id")  # a DRef, which may hold any function
    )


def all_kernels() -> bool:
    """Whether torch chooses among all kernels of attention, as it does usually."""
    c: Any = torch._C
    return bool(
        c._get_flash_sdp_enabled()
        and c._get_math_sdp_enabled()
        and c._get_mem_efficient_sdp_enabled()
        and c._get_cudnn_sdp_enabled()
        and c._get_sdp_priority_order() == _USUAL_PRIORITY
    )


def _state() -> State:
    """What is in force here."""
    modes = _get_current_function_mode_stack()
    devices = [mode for mode in modes if type(mode) is DeviceContext]
    # discolab's own mode stands for the notebook's default dtype, which workers start with
    others = [
        mode
        for mode in modes
        if mode not in devices and not type(mode).__module__.startswith(_PACKAGE)
    ]
    if others:
        _refuse(f"the mode {type(others[-1]).__name__}")
    if _dispatch_modes():
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        _refuse(f"the mode {type(mode).__name__}")
    if _transform() is not None:
        _refuse("a transform of torch.func, such as vmap or grad")
    if _saved_hooks(True) is not None:
        _refuse("saved_tensors_hooks")
    autocasts = tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")
        if torch.is_autocast_enabled(kind)
    )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocasts,
        torch.is_autocast_cache_enabled(),
        devices[-1].device if devices else None,
        torch.is_anomaly_check_nan_enabled() if torch.is_anomaly_enabled() else None,
        None if all_kernels() else tuple(map(int, attention._cur_sdpa_kernel_backends(True))),
    )


def _refuse(what: str) -> None:
    raise ArgumentError(
        f"{what} is in force here and can't be carried to the workers, where this call runs: "
        "enter it in the function that you call there (call_packed), or in a %%disco cell"
    )


def run_within(state: Any, func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """On a worker: call a function with the controller's context in force; its name comes last."""
    if not callable(func):
        raise ArgumentError(f"the register to call holds a {type(func).__name__}, not a function")
    grad, inference, autocasts, cache, device, look_for_nan, kernels, _ = state
    with ExitStack() as stack:
        if inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype in autocasts:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
        if device is not None:
            stack.enter_context(device)
        if look_for_nan is not None:
            stack.enter_context(torch.autograd.set_detect_anomaly(True, look_for_nan))
        if kernels is not None:
            chosen = [attention.SDPBackend(kernel) for kernel in kernels]
            stack.enter_context(attention.sdpa_kernel(chosen, set_priority=True))
        return func(*args, **kwargs)
