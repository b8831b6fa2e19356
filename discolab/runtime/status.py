"""What a session says of itself and of each worker at one moment: frozen records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerStatus:
    """What one worker does at this moment.

    `state` is ``idle``, ``running``, ``waiting`` (in a collective, say), ``ended`` or
    ``dead``; `detail` says in what; `seconds` is how long it has been seen so; `queued`
    counts commands not begun.
    """

    rank: int
    device: str
    state: str
    detail: str
    seconds: float
    queued: int

    def __str__(self) -> str:
        busy = f" {self.detail}" if self.detail else ""
        behind = f", {self.queued} queued" if self.queued else ""
        return f"worker {self.rank}: {self.state}{busy}{behind}"


@dataclass(frozen=True)
class SessionStatistics:
    """Counts of a session: registers held by DRefs, commands sent, and each worker."""

    live_registers: int
    commands_sent: int
    workers: tuple[WorkerStatus, ...]
