"""What Python and torch keep for a thread: at the end of a script it is as it was before.

A worker's thread runs one script after the other, and each would begin in a new process: a script
that leaves gradients switched off must not have the next one train nothing.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ..runtime import accelerators
from ..runtime.interrupts import shield
from .inference import inference_as_before
from .table import is_half_made

T = TypeVar("T")

_PATIENCE = 10.0  # seconds for a new thread to look what a library keeps for it
_OURS = f"{__package__.partition('.')[0]}."

of_libraries: dict[str, Callable[[Any], tuple[Callable[[], Any], Callable[[Any], Any]]]] = {}
"""By the name of a library's module: what gets, and sets, what it keeps for the calling thread."""


def in_new_context(function: Callable[..., T], *args: Any) -> T:
    """Call it with the context variables of a new thread, among them numpy's and decimal's."""
    return contextvars.Context().run(function, *args)


@contextmanager
def thread_as_before() -> Iterator[None]:
    """At its end torch's and Python's settings of the calling thread are what they were."""
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    device, threads = torch.get_default_device(), torch.get_num_threads()
    devices = ("cpu", accelerators.kind() or "cuda")  # for which there is autocast
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    cached, warns = torch.is_autocast_cache_enabled(), torch.is_warn_always_enabled()
    modes, hooks = len(_get_current_function_mode_stack()), _saved_tensors_hooks()
    dispatch_modes = torch._C._len_torch_dispatch_stack()
    observers = sys.gettrace(), sys.getprofile()
    flushes, replays = _flushes_denormals(), torch._C._is_view_replay_enabled()
    try:
        with inference_as_before(), _libraries_as_new():
            yield
    finally:
        torch.set_flush_denormal(flushes)
        torch._C._set_view_replay_enabled(replays)
        _end_observers(*observers)
        while torch._C._len_torch_dispatch_stack() > dispatch_modes:
            left: Any = _get_current_dispatch_mode()
            TorchDispatchMode.__exit__(left, None, None, None)
        torch.set_grad_enabled(grad)
        if torch.get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        while len(_get_current_function_mode_stack()) > modes:
            _pop_mode()
        while _saved_tensors_hooks() not in (hooks, None):
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for name, (enabled, kind) in zip(devices, autocast, strict=True):
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, kind)
        torch.set_autocast_cache_enabled(cached)
        torch.clear_autocast_cache()
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.is_warn_always_enabled() != warns:
            torch.set_warn_always(warns)


def _flushes_denormals() -> bool:
    return not torch.full((), 1e-40, dtype=torch.float32, device="cpu").mul(1.0).item()


@contextmanager
def _libraries_as_new() -> Iterator[None]:
    """Within it libraries keep for the thread what they keep for a new one; at its end what was."""
    before: dict[str, Any] = {}
    try:
        for name, get, set_ in _libraries():
            with shield():
                before[name] = get()
                set_(_on_new_thread(get))
        yield
    finally:
        for name, get, set_ in _libraries():  # also those that the script has imported
            set_(before[name] if name in before else _on_new_thread(get))


def _libraries() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    for name, find in of_libraries.items():
        module = sys.modules.get(name)
        if module is not None and not is_half_made(module):  # else another worker imports it
            yield name, *find(module)


def _on_new_thread(get: Callable[[], T]) -> T:
    values: list[T] = []
    thread = threading.Thread(target=lambda: values.append(get()), daemon=True)
    with shield():  # until it runs it would get this thread's interrupt
        thread.start()
    thread.join(_PATIENCE)
    if not values:
        raise RuntimeError(f"{get} gives no value on a new thread")
    return values[0]


def settings_in(name: str) -> Callable[[Any], tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """For `of_libraries`: what stands in a `threading.local` that is the module's `name`."""

    def find(module: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        local = getattr(module, name)

        def set_(values: dict[str, Any]) -> None:
            vars(local).clear()
            vars(local).update(values)

        return lambda: dict(vars(local)), set_

    return find


def _saved_tensors_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _end_observers(trace: Any, profile: Any) -> None:
    """Put back what observes the thread, if the script has set another; a debugger's may go on."""
    now = sys.gettrace()
    ours = (getattr(now, "__module__", None) or "").startswith(_OURS)
    if now not in (None, trace) and not ours:
        sys.settrace(trace)
    if sys.getprofile() not in (None, profile):
        sys.setprofile(profile)
