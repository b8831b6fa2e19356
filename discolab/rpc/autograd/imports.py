"""What torch imports in a process's first backward is imported where no interrupt can come.

A module whose import an interrupt breaks off stays broken. So a thread of its own does it, once;
who waits for that can be interrupted. `_lock` guards `_outcome`.
"""

from __future__ import annotations

import threading

import torch

from ..outcome import Outcome

_lock = threading.Lock()
_outcome: Outcome | None = None


def imported() -> None:
    """Back when it is done."""
    global _outcome
    with _lock:
        if _outcome is None:
            _outcome = Outcome()
            threading.Thread(target=_run, args=(_outcome,), daemon=True).start()
    if not _outcome.settled:
        _outcome.wait("torch's modules for autograd", 120)


def _run(outcome: Outcome) -> None:
    try:
        with torch.enable_grad():
            x = torch.ones((), requires_grad=True)
            torch.autograd.grad([x * 2], [x], [torch.ones(())])
    finally:
        outcome.settle(None)
