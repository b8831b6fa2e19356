"""Heartbeat: how long a worker has said nothing, and what is known of why.

A worker says every other second that it lives (connections/worker_side.py). One that is silent for
longer is *frozen* only if there is evidence: its process is stopped, or all of its threads sleep
though a question waits for it, as where C code sleeps and keeps Python's lock. Otherwise it is
*late*: it computes in code that keeps that lock, or its machine is busy. Who waits for it goes on
waiting then, and says so once.

Time is that of the reader thread, which receives what workers say: it counts only while that thread
looks, so that workers do not seem silent where nobody has listened.

The reader thread alone calls `turn`, `heard` and `sample`; any thread may ask the rest, which reads
one entry of a dict at a time.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

STOPPED = {"T": "it is stopped (SIGSTOP)", "t": "a debugger holds it"}
ASLEEP = "S"
_LATE = {
    "R": "it computes in code that keeps Python's lock, or waits for a core",
    "D": "it waits for a disk",
}
_LONGEST_TURN = 0.5  # seconds from turn to turn; beyond that the reader thread itself was late
_FEWEST_SAMPLES = 4  # in a row in which all threads sleep, before they count as evidence
_LOOKS = (0.0, 0.002, 0.002)  # seconds before each look at the threads of a process
_SHORTEST_SLEEP = 1.0  # seconds between the first and the last of them


@dataclass(slots=True)
class _Silence:
    """Of one worker, since it was heard last."""

    since: float
    state: str = ""  # the last sample
    asleep_since: float = 0.0  # when the first of the last samples that say so was taken
    asleep: int = 0  # how many they are
    told: bool = False  # whether a thread that waits was told


class Heartbeats:
    """The silences of the workers of one session.

    Parameters
    ----------
    limit
        Seconds of silence that need no explanation.

    Attributes
    ----------
    now
        The time, see the module.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.now = 0.0
        self._last_turn: float | None = None
        self._silences: dict[int, _Silence] = {}

    # -- on the reader thread ------------------------------------------------------------------

    def turn(self, now: float) -> None:
        """Take note that the reader thread has received all that there was, at `now`."""
        if self._last_turn is not None:
            self.now += min(now - self._last_turn, _LONGEST_TURN)
        self._last_turn = now

    def heard(self, rank: int) -> None:
        """A worker has said something."""
        self._silences[rank] = _Silence(self.now)

    def forget(self, rank: int) -> None:
        """A worker is gone."""
        self._silences.pop(rank, None)

    def sample(self, rank: int, state: str) -> None:
        """Take in what a worker's process does now (`process_state`); "" if that is unknown."""
        silence = self._silences.get(rank)
        if silence is None or not state:
            return
        silence.state = state
        if state != ASLEEP:
            silence.asleep = 0
            return
        if not silence.asleep:
            silence.asleep_since = self.now
        silence.asleep += 1

    # -- on any thread -------------------------------------------------------------------------

    def ranks(self) -> list[int]:
        """The workers that were heard, those that are silent for longest first."""
        silences = list(self._silences.items())
        return [rank for rank, _ in sorted(silences, key=lambda item: item[1].since)]

    def silent_for(self, rank: int) -> float:
        """Seconds since a worker was heard."""
        silence = self._silences.get(rank)
        return self.now - silence.since if silence is not None else 0.0

    def is_overdue(self, rank: int) -> bool:
        """Whether a worker is silent for longer than the limit."""
        return self.silent_for(rank) > self.limit

    def why_frozen(self, rank: int) -> str:
        """The evidence that a worker that is overdue does not run; "" if there is none."""
        silence = self._silences.get(rank)
        if silence is None or not self.is_overdue(rank):
            return ""
        if silence.state in STOPPED:
            return STOPPED[silence.state]
        asleep_for = self.now - silence.asleep_since
        if silence.asleep >= _FEWEST_SAMPLES and asleep_for >= _SHORTEST_SLEEP:
            return "all its threads sleep, in code that keeps Python's lock"
        return ""

    def why_late(self, rank: int) -> str:
        """What else is known of a silent worker."""
        silence = self._silences.get(rank)
        return _LATE.get(silence.state if silence else "", "nothing shows that it has stopped")

    def first_told(self, rank: int) -> bool:
        """Whether it was not told before, in this silence, that the worker is late; it is now."""
        silence = self._silences.get(rank)
        if silence is None or silence.told:
            return False
        silence.told = True
        return True


def process_state(pid: int | None) -> str:
    """What a process does, in Linux's letters; "" if that is unknown.

    T, t: it is stopped; R: some thread runs or could run; D: one waits for a disk; S: all sleep.
    A thread that waits for Python's lock wakes for a moment every 5 ms, so one counts as running if
    it does at three looks in a row; that takes 4 ms, where any runs.
    """
    folder = f"/proc/{pid}"
    state = _letter(folder)
    if state not in ("R", "D", ASLEEP):  # stopped, or ended
        return state
    running: set[str] | None = None
    for pause in _LOOKS:
        time.sleep(pause)
        try:
            threads = os.listdir(f"{folder}/task")
        except OSError:
            return ""
        states = {thread: _letter(f"{folder}/task/{thread}") for thread in threads}
        if "D" in states.values():
            return "D"
        awake = {thread for thread, letter in states.items() if letter == "R"}
        running = awake if running is None else running & awake
        if not running:
            return ASLEEP
    return "R"


def why_stopped(pid: int | None) -> str:
    """That a process of this machine is stopped, in words; "" if it is not."""
    return "" if pid is None else STOPPED.get(_letter(f"/proc/{pid}"), "")


def _letter(folder: str) -> str:
    try:
        with open(f"{folder}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
