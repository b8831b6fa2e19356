"""What can be told of a process of this machine from outside: whether it runs, and how it ended."""

from __future__ import annotations

import os
import signal


def watch_process(pid: int) -> int:
    """A descriptor that is readable once a process has ended, -1 if there is none to be had."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # an old kernel; or it has ended already
        return -1


def how_it_ended(code: int | None) -> str:
    """In words: exit code, or minus a signal's number; None: it is not known."""
    if code is None:
        return "has gone"
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"exited with status {code}"


def process_state(pid: int | None) -> str:
    """One letter, as Linux has it: R runs, S sleeps, T is stopped …; "" if it is not known."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
