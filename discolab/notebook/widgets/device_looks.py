"""What is known of the workers of one session, and of the last minute: the facts of `devices`.

Nothing here waits for a worker to be done: states are asked for a few times a second, memory and
processor once a second, by a probe. One thread at a time uses it (see devices.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from ... import trace
from ...ccl.doctor import Edge, waits
from ...runtime.session import Session
from ...runtime.status import WorkerStatus

HISTORY = 60  # seconds
_STATES_EVERY = 0.18  # seconds: every second turn of the pump
_SAMPLES_EVERY = 0.95
_SHORTEST = 0.06  # seconds between two samples, for times on the processor to mean something
_PATIENCE = 0.05  # seconds that workers in other processes are given to answer
_WORKING = ("running", "waiting")

Row = dict[str, Any]


class DeviceLooks:
    """Looks at the workers of a session again and again.

    Attributes
    ----------
    rows
        One record a worker; see views/devices_view.py.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.rows: list[Row] = []
        self._samples: dict[int, dict[str, Any]] = {}
        self._cores: dict[int, float] = {}
        self._past: dict[int, deque[tuple[int, float, int]]] = {}  # second, cores, bytes
        self._since: dict[int, tuple[str, float]] = {}  # of each the state, and since when
        self._states_at = self._samples_at = float("-inf")

    def look(self, at_once: bool = False) -> None:
        """Look, as far as it is time to."""
        now = time.monotonic()
        if self.session.closed:
            self._samples_at = now
        if now - self._samples_at >= (_SHORTEST if at_once else _SAMPLES_EVERY):
            self._samples_at = now
            self._sample(int(now))
        if at_once or now - self._states_at >= _STATES_EVERY or self.session.closed:
            self._states_at = now
            self._rows(now)

    def history(self) -> dict[int, list[tuple[float, int] | None]]:
        """Of each worker cores used and bytes held, a second each; None where nobody looked."""
        last = int(time.monotonic())
        found = {}
        for rank, past in self._past.items():
            seen = {second: (cores, held) for second, cores, held in past}
            found[rank] = [seen.get(second) for second in range(last - HISTORY + 1, last + 1)]
        return found

    def _sample(self, second: int) -> None:
        """Ask what each worker uses."""
        for rank, sample in self.session.look(trace.sample, timeout=_PATIENCE).items():
            before, self._samples[rank] = self._samples.get(rank), sample
            cores = trace.utilisation(before, sample) if before is not None else None
            if cores is not None:
                self._cores[rank] = cores
                past = self._past.setdefault(rank, deque(maxlen=HISTORY))
                past.append((second, cores, _held(sample)))

    def _rows(self, now: float) -> None:
        edges = {edge.rank: edge for edge in waits(self.session)}
        held_up: dict[int, list[int]] = {}
        for edge in edges.values():
            for other in () if edge.any_of else edge.whom:
                held_up.setdefault(other, []).append(edge.rank)
        self.rows = [
            self._row(status, edges.get(status.rank), held_up, now)
            for status in self.session.status()
        ]

    def _row(
        self,
        status: WorkerStatus,
        edge: Edge | None,
        held_up: Mapping[int, list[int]],
        now: float,
    ) -> Row:
        state, doing = status.state, status.detail
        whom: tuple[int, ...] = ()
        seconds: float | None = status.seconds
        if edge is not None and state in _WORKING:
            state, whom, seconds = "waiting", edge.whom, edge.seconds
            doing = f"{edge.what}: {edge.doing}" if edge.doing else f"in {edge.what}"
            doing += f" at {edge.site}" if edge.site else ""
        known = self._since.get(status.rank)
        if known is None or known[0] != state:  # what it was before the first look is not known
            known = self._since[status.rank] = (state, float("-inf") if known is None else now)
        if state not in _WORKING:
            seconds = now - known[1] if known[1] > 0 else None
        gone = state in ("ended", "dead")
        sample = {} if gone else self._samples.get(status.rank, {})
        rss = sample.get("rss", -1)
        return {
            "rank": status.rank,
            "device": status.device,
            "device_name": sample.get("device_name", ""),
            "host": sample.get("host", ""),
            "pid": sample.get("pid"),
            "state": state,
            "seconds": seconds,
            "doing": doing,
            "queued": status.queued,
            "waits_for": tuple(whom),
            "any_of": edge is not None and edge.any_of,
            "held_up": tuple(held_up.get(status.rank, ())),
            "cpu": None if gone else self._cores.get(status.rank),
            "rss": rss if rss >= 0 else None,
            "memory": sample.get("memory"),
            "gpu": sample.get("gpu"),
        }


def _held(sample: Mapping[str, Any]) -> int:
    """Bytes that a worker has: of its GPU, or of its process."""
    memory = sample["memory"]
    return int(memory["used"] if memory is not None else max(0, sample["rss"]))
