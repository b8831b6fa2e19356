"""Locks of torch that a worker may hold while another one forks.

A child has the forking thread alone: a lock that another thread held stays locked there for ever,
and `torch.manual_seed`, with which a `DataLoader` begins each of its processes, takes these. So
whoever forks takes them before, and lets go of them in both processes.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from . import table
from .patches import Patches
from .table import Row, Treatment

_LONGEST = 1.0  # seconds to wait for one: the thread that forks might have it itself
_installed = False
_thread = threading.local()  # .held: the locks that a thread which forks has taken


def _before() -> None:
    held = _thread.held = []
    if _installed:
        for module in (torch.cuda, torch.xpu, torch.mtia):
            lock: Any = getattr(module, "_initialization_lock", None)
            if lock is not None and lock.acquire(timeout=_LONGEST):
                held.append(lock)


def _after() -> None:
    for lock in _thread.held:
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)


def _install(patches: Patches) -> None:
    global _installed
    _installed = True
    patches.at_undo(_uninstall)


def _uninstall() -> None:
    global _installed
    _installed = False


table.add(
    Row(
        state="torch's locks of what is initialized late, in a process that is forked",
        treatment=Treatment.IN_TURNS,
        meaning="A worker that forks, as a `DataLoader` with `num_workers` does, waits until no "
        "other thread is within them.",
        test="tests/isolation/test_forking.py::test_loaders_of_processes_while_others_seed",
        install=_install,
    )
)
