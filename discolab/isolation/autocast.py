"""Autocast's cache of cast weights, of which a process has one: each worker has its own.

torch keeps the casts of weights in C++, by the weight, and whoever leaves the outermost autocast of
a thread empties it for all. A weight that is used twice within another thread's autocast is then
cast twice, so that its gradients are added in float32 instead of in the lower precision, or not, as
it happens. Nobody may keep casts for longer than torch does: the next step would find old weights.

So while a worker's thread is within autocast, torch's cache is off there, and each cast passes
`_cast`, which looks in the worker's own. The dispatcher calls it through a key that torch has for a
device that it knows no more, `_KEY`: in force on that thread meanwhile, for ``aten::to.dtype`` has
a kernel there, and all else falls through. That is how autocast casts, wherever it is done.

Without Python's lock (`_cast` takes it) nothing waits here: no lock of torch's is held, as it is
while torch looks in a cache of its own. `_thread` is each thread's. A worker's casts are dropped by
whichever of its threads leaves autocast, as in a process; each look is one step of a dict.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel

from ..runtime import accelerators
from ..runtime.worker import Worker, current_worker_or_none
from . import table
from .patches import Patches
from .table import Row, Treatment
from .worker_local import PerWorker

_KEY: Any = getattr(torch._C.DispatchKey, "AutocastIPU", None)

_Casts = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by the weight's id: it, and its cast

_casts: PerWorker[_Casts] = PerWorker({}, dict)
_libraries: list[Library] = []  # what holds the kernel, for as long as the process lives
_own_key: Any = None  # `_KEY` as a set of dispatch keys
_below: Any = None  # those that come after it
_set_caching: Callable[[bool], None] = torch._C.set_autocast_cache_enabled
_is_caching: Callable[[], bool] = torch._C.is_autocast_cache_enabled
_is_on: Callable[[str], bool] = torch._C.is_autocast_enabled


class _Thread(threading.local):
    """A thread's autocast, if it is a worker's."""

    devices: tuple[str, ...] = ()  # the types of device for which it is on
    caches = True  # whether it wants the cache, while it is on for some
    casts: _Casts = {}  # noqa: RUF012  # its worker's, while it is on for some


_thread = _Thread()


def _cast(keys: Any, tensor: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """``tensor.to(dtype)`` on a worker's thread that is within autocast."""
    if not isinstance(tensor, torch.Tensor):  # what torch makes of the number in ``tensor + 1``
        with torch._C._ExcludeDispatchKeyGuard(_own_key):
            return torch.ops.aten.to.dtype(tensor, dtype, *args, **kwargs)
    if tensor.requires_grad and tensor.is_leaf and _is_cached(tensor, dtype):
        found = _thread.casts.get(id(tensor))
        if found is None:
            with torch.enable_grad():  # as torch: it is used after a `no_grad` that began it
                cast = torch.ops.aten.to.dtype.redispatch(
                    keys & _below, tensor, dtype, *args, **kwargs
                )
            found = _thread.casts.setdefault(id(tensor), (tensor, cast))
        return found[1]
    return torch.ops.aten.to.dtype.redispatch(keys & _below, tensor, dtype, *args, **kwargs)


def _is_cached(leaf: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast itself casts it, and would have looked in torch's cache."""
    device = leaf.device.type
    return (
        leaf.dtype is torch.float32
        and device in _thread.devices
        and _thread.caches
        and not _is_on(device)  # as within its kernels
        and dtype is torch.get_autocast_dtype(device)
        and not leaf._is_view()
        and not torch.is_inference_mode_enabled()
        and not torch._C._is_cached_tensor(leaf)  # type: ignore[attr-defined]
    )


def _follow(devices: tuple[str, ...]) -> None:
    """The calling thread's autocast is on for these now."""
    before, _thread.devices = _thread.devices, devices
    if bool(before) == bool(devices):
        return
    if devices:
        _thread.caches, _thread.casts = _is_caching(), _casts.here()
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, not devices)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, bool(devices))
    _set_caching(_thread.caches and not devices)


def _set_over(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_autocast(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if current_worker_or_none() is not None:
            kinds = ("cpu", accelerators.kind() or "cuda")
            _follow(tuple(kind for kind in kinds if _is_on(kind)))

    return set_autocast


def _set_caching_over(original: Callable[[bool], None]) -> Callable[[bool], None]:
    @functools.wraps(original)
    def set_caching(enabled: bool) -> None:
        if _thread.devices:
            _thread.caches = enabled
        else:
            original(enabled)

    return set_caching


def _is_caching_over(original: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(original)
    def is_caching() -> bool:
        return _thread.caches if _thread.devices else original()

    return is_caching


def _clear_over(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def clear() -> None:
        if current_worker_or_none() is None:
            original()
        else:
            _casts.here().clear()

    return clear


def _install(patches: Patches) -> None:
    global _own_key, _below
    if _KEY is None:
        raise AttributeError("torch has no dispatch key AutocastIPU")
    if not _libraries:
        _own_key = torch._C.DispatchKeySet(_KEY)
        _below = torch._C._dispatch_keyset_full_after(_KEY)
        _libraries.append(Library("_", "IMPL", _KEY.name))
        _libraries[0].fallback(fallthrough_kernel)
        _libraries.append(Library("aten", "IMPL", _KEY.name))
        _libraries[1].impl("to.dtype", _cast, with_keyset=True)
    for name in ("set_autocast_enabled", "set_autocast_cpu_enabled"):
        patches.replace(torch._C, name, _set_over, everywhere=True)
    patches.replace(torch._C, "set_autocast_cache_enabled", _set_caching_over, everywhere=True)
    patches.replace(torch._C, "is_autocast_cache_enabled", _is_caching_over, everywhere=True)
    patches.replace(torch._C, "clear_autocast_cache", _clear_over, everywhere=True)


def _in_child(worker: Worker) -> None:
    """torch's own cache serves the process from now on."""
    _follow(())


table.add(
    Row(
        state="autocast's cache of cast weights",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker and the notebook have their own, and leaving `torch.autocast` empties "
        "only that: a weight that is used several times in one `with` is cast once, and its "
        "gradient is, bit for bit, that of a process. In return each cast within `torch.autocast` "
        "passes Python on a worker, some microseconds.",
        test="tests/isolation/test_autocast.py::test_a_weight_used_twice_is_cast_once",
        install=_install,
        in_child=_in_child,
    )
)
