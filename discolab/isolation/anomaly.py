"""Anomaly mode of autograd, of which a process has one: it is on while anybody has it on.

It changes no number. While it is on for one, all record where their forward calls were. But torch
is not left to look for NaNs, as it would in the backward passes of all: to those that have not
asked for it, NaNs may be no error, and gradients without values, as in a trace, can't be asked.
`_Engine` looks, for those that have.

`_lock` guards `_wishes` and the setting of torch's mode.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

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
    _set_process(any(enabled for enabled, _ in (_notebooks, *_wishes.values())), False)


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


class _Engine(torch._C._ImperativeEngine):
    """torch's engine, which all backward passes come to; it keeps nothing in Python."""

    def run_backward(self, roots: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass, and look for NaNs if who calls wants that."""
        if _own() != (True, True):
            return super().run_backward(roots, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            looks = [node.register_hook(_look_at(node.name())) for node in _nodes(roots)]
        try:
            return super().run_backward(roots, *args, **kwargs)
        finally:
            for look in looks:
                look.remove()


def _nodes(roots: Iterable[torch.Tensor | GradientEdge]) -> set[Node]:
    """The nodes below `roots` that compute gradients of others."""
    found: set[Node] = set()
    new = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    while new:
        node = new.pop()
        if node is not None and node not in found and node.next_functions:
            found.add(node)
            new += [below for below, _ in node.next_functions]
    return found


def _look_at(name: str) -> Callable[..., None]:
    def look(gradients: tuple[torch.Tensor | None, ...], _: Any) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for place, gradient in enumerate(gradients):
                if gradient is not None and torch.isnan(gradient)._is_any_true().item():
                    raise RuntimeError(  # in torch's words
                        f"Function '{name}' returned nan values in its {place}th output."
                    )

    return look


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
    patches.replace(torch.autograd.Variable, "_execution_engine", lambda _: _Engine())
    patches.at_undo(_put_back)
    with _lock:
        _apply()


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
        "they have set it; NaNs are looked for in the backward passes of those that have it on. "
        "While it is on for one, all record where their forward calls were, for errors of a "
        "backward pass: it changes no number, only the time and what is told.",
        test="tests/isolation/test_torch_settings.py::test_each_worker_detects_anomalies",
        install=_install,
        leave=_leave,
    )
)
