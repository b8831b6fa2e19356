"""Anomaly mode of autograd, of which a process has one: it is on while anybody has it on.

It changes no number. While it is on for one, all record where their forward calls were, and a
backward pass of anybody that makes NaNs is told, if one of those wants that.

`_lock` guards `_wishes` and the setting of torch's mode.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable

import torch

from ..runtime.interrupts import plain_lock
from ..runtime.worker import Worker, current_worker_or_none
from . import table
from .patches import Patches
from .table import Row, Treatment

_lock = plain_lock()
_wishes: weakref.WeakKeyDictionary[Worker, tuple[bool, bool]] = weakref.WeakKeyDictionary()
_notebooks: tuple[bool, bool] = False, True
_set_process: Callable[[bool, bool], None] = torch._C.set_anomaly_enabled
_OFF = False, True  # torch's: it is off, and would look for NaNs


def _own() -> tuple[bool, bool]:
    """Whether it is on for who calls, and whether that looks for NaNs."""
    worker = current_worker_or_none()
    return _notebooks if worker is None else _wishes.get(worker, _OFF)


def _apply() -> None:
    """Set torch's mode; under the lock."""
    on = [look for enabled, look in (_notebooks, *_wishes.values()) if enabled]
    _set_process(bool(on), any(on) if on else True)


def _set_over(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_own(enabled: bool, check_nan: bool = True) -> None:
        global _notebooks
        worker = current_worker_or_none()
        with _lock:
            if worker is None:
                _notebooks = enabled, check_nan
            else:
                _wishes[worker] = enabled, check_nan
            _apply()

    return set_own


def _read_over(index: int, original: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(original)
    def read_own() -> bool:
        return _own()[index]

    return read_own


def _leave(worker: Worker) -> None:
    with _lock:
        if _wishes.pop(worker, _OFF)[0]:
            _apply()


def _install(patches: Patches) -> None:
    global _notebooks
    _notebooks = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    for index, name in enumerate(("is_anomaly_enabled", "is_anomaly_check_nan_enabled")):
        patches.replace(torch._C, name, functools.partial(_read_over, index), everywhere=True)
    patches.replace(torch._C, "set_anomaly_enabled", _set_over, everywhere=True)
    patches.at_undo(_put_back)


def _put_back() -> None:
    with _lock:
        _wishes.clear()
        _set_process(*_notebooks)


def _after_fork() -> None:
    """A child must not wait for a thread that only its parent has."""
    global _lock
    _lock = plain_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


table.add(
    Row(
        state="anomaly mode (`torch.autograd.detect_anomaly`)",
        treatment=Treatment.SHARED,
        meaning="Each worker and the notebook switch it on and off for themselves, and find it as "
        "they have set it; while it is on for one, autograd looks for anomalies in all. It changes "
        "no number, only the time and what is told.",
        test="tests/isolation/test_torch_settings.py::test_each_worker_detects_anomalies",
        install=_install,
        leave=_leave,
    )
)
