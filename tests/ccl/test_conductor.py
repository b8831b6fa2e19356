"""What conductors leave behind when they let go of the ends of process groups."""

from __future__ import annotations

import threading
import time
from typing import Any

from discolab.ccl.rendezvous import conductor


class SlowEnd:
    """As of NCCL, whose end waits for the device."""

    def __init__(self) -> None:
        self.may_end, self.ended = threading.Event(), False

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.may_end.wait(20)
        self.ended = True


def test_the_process_waits_for_the_end_of_a_group_that_was_let_go() -> None:
    """Else the driver is gone before it, and torch aborts the process."""
    end: Any = SlowEnd()
    ends = conductor._Ends()
    ends._held[(0,)] = 1, {lambda *_: end: end}
    ends.drop_all()
    assert not conductor.idle()
    end.may_end.set()
    deadline = time.monotonic() + 20
    while not conductor.idle() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert end.ended
    assert conductor.idle()
