"""As what a thread waits: the `Interruptible` that an interrupt of its work goes to, if it has one.

A thread-local, so nobody else sees it. A worker's own thread has its worker; a layer above may
give threads of its own something else.
"""

from __future__ import annotations

import threading

from .interruptible import Interruptible

_local = threading.local()


def waiter_here() -> Interruptible | None:
    """What the calling thread waits as; None on the controller and on threads of the user's."""
    return getattr(_local, "waiter", None)


def bind_waiter(waiter: Interruptible | None) -> None:
    """Say as what the calling thread waits."""
    _local.waiter = waiter
