"""How far each worker has come: counted where the bytes land, shown as a bar for each worker.

A worker counts in a `Meter`, and says so ten times a second at most. Where it shares the session's
memory it writes to the session's `Board` itself; from another process the count comes over its
link, to the service below. `_boards` is a dict of which single operations are used; each rank's
number is written by that worker's thread, or by the reader thread, alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import time
from typing import Any

from ..runtime.link import SERVICES, Service
from ..runtime.worker import Worker

_EVERY = 0.1  # seconds between two reports
SHOW_AFTER = 1.0  # seconds after which there are bars

_boards: dict[int, Board] = {}
_numbers = itertools.count(1)


class Board:
    """Bytes that have landed, by rank, and the bars that show them.

    Parameters
    ----------
    what
        What is done, for the bars: "loading".
    totals
        The bytes that each worker has to do, by rank.
    show
        Whether to show bars, once a second has passed.
    """

    def __init__(self, what: str, totals: list[int], show: bool) -> None:
        self.number = next(_numbers)
        self.landed = [0] * len(totals)
        self.moved_at = time.monotonic()  # when it was last seen that something had landed
        self._totals, self._what, self._show = totals, what, show
        self._began = self.moved_at
        self._seen = 0
        self._bars: list[Any] | None = None

    def __enter__(self) -> Board:
        _boards[self.number] = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        del _boards[self.number]
        if self._bars is not None:
            if kind is None:
                self.landed = list(self._totals)
                self._draw(self._bars)
            for bar in self._bars:
                bar.close()

    def look(self) -> None:
        """Draw what is new; on the thread that waits."""
        total = sum(self.landed)
        now = time.monotonic()
        if total != self._seen:
            self._seen, self.moved_at = total, now
        if self._show and now - self._began > SHOW_AFTER:
            if self._bars is None:
                self._bars = _make_bars(self._what, self._totals, now - self._began)
            self._draw(self._bars)

    def _draw(self, bars: list[Any]) -> None:
        counts = self.landed if len(bars) > 1 else [sum(self.landed)]
        for bar, landed in zip(bars, counts, strict=True):
            if landed > bar.n:
                bar.update(min(landed, bar.total) - bar.n)


def _make_bars(what: str, totals: list[int], late: float) -> list[Any]:
    """A bar for each worker where several can be shown, else one for all."""
    make: Any = importlib.import_module("tqdm").tqdm
    several = sys.stderr.isatty()
    shell = sys.modules.get("IPython")
    in_kernel = shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None
    if in_kernel and importlib.util.find_spec("ipywidgets") is not None:
        make = importlib.import_module("tqdm.notebook").tqdm
        several = True
    names = [f"{what}, worker {rank}" for rank in range(len(totals))] if several else [what]
    if not several:
        totals = [sum(totals)]
    bars = [
        make(total=total, desc=name, unit="B", unit_scale=True, unit_divisor=1024, mininterval=0.1)
        for name, total in zip(names, totals, strict=True)
    ]
    for bar in bars:
        bar.start_t -= late  # the rate is of the whole time
    return bars


class Meter:
    """Counts what has landed on one worker; its thread alone uses it."""

    def __init__(self, board: int, worker: Worker) -> None:
        self._board, self._worker = board, worker
        self._landed = 0
        self._told_at = 0.0

    def __call__(self, landed: int) -> None:
        self._landed += landed
        now = time.monotonic()
        if now - self._told_at >= _EVERY:
            self._told_at = now
            worker = self._worker
            if worker.link is None:
                _enter(self._board, worker.worker_id, self._landed)
            else:
                worker.link.tell("loader", (self._board, self._landed))


def _enter(number: int, rank: int, landed: int) -> None:
    board = _boards.get(number)
    if board is not None:
        board.landed[rank] = landed


class _Progress(Service):
    """What workers in other processes say of their progress."""

    def receive(self, rank: int, value: Any) -> None:
        _enter(value[0], rank, value[1])


SERVICES["loader"] = lambda _session: _Progress()
