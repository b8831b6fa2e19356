"""How far each worker has come: counted where the bytes land, shown as a bar for each worker.

A worker counts in a `Meter`, and says so ten times a second at most. Where it shares the session's
memory it writes to the session's `Board` itself; from another process the count comes over its
link, to the service below. What comes before any byte lands, and takes long where there are many
tensors, is said in a line (`Preparation`).

`_boards` is a dict of which single operations are used; each rank's number is written by that
worker's thread, or by the reader thread, alone. A `Preparation` is of one thread.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..runtime.services import SERVICES, Service
from ..runtime.worker import Worker

_EVERY = 0.1  # seconds between two reports
_LOOK_EVERY = 100  # tensors after which a preparation looks at the clock
SHOW_AFTER = 1.0  # seconds after which there are bars
LEAST = 1 << 20  # bytes: for less there are none, however slow the machine

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
        self._totals, self._what = totals, what
        self._show = show and sum(totals) >= LEAST
        self._began = self.moved_at
        self._seen = 0
        self._bars: Bars | None = None

    def __enter__(self) -> Board:
        Preparation.end_line()  # what comes now is shown by bars
        _boards[self.number] = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        del _boards[self.number]
        if self._bars is not None:
            if kind is None:
                self._bars.draw(self._totals)
            self._bars.close()

    def look(self) -> None:
        """Draw what is new; on the thread that waits."""
        total = sum(self.landed)
        now = time.monotonic()
        if total != self._seen:
            self._seen, self.moved_at = total, now
        if self._show and now - self._began > SHOW_AFTER:
            if self._bars is None:
                self._bars = bars[-1](self._what, self._totals, now - self._began)
            self._bars.draw(self.landed)


class Bars(Protocol):
    """What shows how far the workers are."""

    def draw(self, landed: Sequence[int]) -> None:
        """Show how many bytes have landed, by rank."""

    def close(self) -> None:
        """There is no more to show."""


class TextBars:
    """tqdm's bars on stderr: one for each worker in a terminal, else one for all."""

    def __init__(self, what: str, totals: Sequence[int], elapsed: float) -> None:
        tqdm = importlib.import_module("tqdm").tqdm
        self._several = sys.stderr.isatty()
        names = [f"{what}, worker {rank}" for rank in range(len(totals))]
        if not self._several:
            names, totals = [what], [sum(totals)]
        self._bars = [
            tqdm(total=total, desc=name, unit="B", unit_scale=True, unit_divisor=1024)
            for name, total in zip(names, totals, strict=True)
        ]
        for bar in self._bars:
            bar.start_t -= elapsed  # the rate is of the whole time

    def draw(self, landed: Sequence[int]) -> None:
        """See `Bars`."""
        counts = landed if self._several else [sum(landed)]
        for bar, count in zip(self._bars, counts, strict=True):
            if count > bar.n:
                bar.update(min(count, bar.total) - bar.n)

    def close(self) -> None:
        """See `Bars`."""
        for bar in self._bars:
            bar.close()


bars: list[Callable[[str, Sequence[int], float], Bars]] = [TextBars]
"""How bars are made, the last one counts: a notebook adds its own."""


class Line(Protocol):
    """What shows a line of text in place."""

    def draw(self, text: str) -> None:
        """Show another text."""

    def close(self) -> None:
        """There is no more to show."""


class TextLine:
    """A line on stderr."""

    def __init__(self) -> None:
        self._width = 0

    def draw(self, text: str) -> None:
        """See `Line`."""
        sys.stderr.write(f"\r{text.ljust(self._width)}")
        sys.stderr.flush()
        self._width = len(text)

    def close(self) -> None:
        """See `Line`."""
        sys.stderr.write("\n")


lines: list[Callable[[], Line]] = [TextLine]
"""How lines are made, the last one counts: a notebook adds its own."""


class Preparation:
    """Says what a thread is doing with an index, if it takes more than a second.

    Whoever goes through the tensors counts them, with `count`; that is nothing where nobody shows
    it. Whoever waits for workers calls what `waiting` gives. One that is within another counts for
    that one.

    Parameters
    ----------
    what
        What is being prepared: "loading".
    show
        Whether to say it.
    """

    _of_thread = threading.local()

    def __init__(self, what: str, show: bool) -> None:
        self._what, self._show = what, show
        self._doing, self._count, self._look_at = "", 0, _LOOK_EVERY
        self._began, self._drawn_at = time.monotonic(), 0.0
        self._line: Line | None = None

    def __enter__(self) -> Preparation:
        if self._show and self._shown() is None:
            self._of_thread.shown = weakref.ref(self)  # no more once its block is left, however
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown() is self:
            self.end_line()
            self._of_thread.shown = None

    @classmethod
    def _shown(cls) -> Preparation | None:
        shown = getattr(cls._of_thread, "shown", None)
        return None if shown is None else shown()

    @classmethod
    def count(cls, doing: str, number: int = 1) -> None:
        """So many tensors more, of which this thread is `doing` something."""
        self = cls._shown()
        if self is None:
            return
        if doing is not self._doing:
            self._doing, self._count, self._look_at = doing, 0, 1
        self._count += number
        if self._count >= self._look_at:
            self._look_at = self._count + _LOOK_EVERY
            self._look()

    @classmethod
    def waiting(cls, doing: str) -> Callable[[], None]:
        """What to call every now and then while this thread waits for workers that do that."""

        def look() -> None:
            self = cls._shown()
            if self is not None:
                self._doing, self._count = doing, 0
                self._look()

        return look

    @classmethod
    def end_line(cls) -> None:
        """Leave this thread's line as it is; what comes after has another one."""
        self = cls._shown()
        if self is not None and self._line is not None:
            line, self._line = self._line, None
            line.draw(self._text())
            line.close()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._began <= SHOW_AFTER or now - self._drawn_at < _EVERY:
            return
        self._drawn_at = now
        if self._line is None:
            self._line = lines[-1]()
        self._line.draw(self._text())

    def _text(self) -> str:
        seconds = time.monotonic() - self._began
        count = f" {self._count:,}" if self._count else ""
        return f"{self._what}: {self._doing}{count} ({seconds:.0f} s)"


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
