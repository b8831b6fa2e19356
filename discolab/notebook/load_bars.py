"""Bars of loads and saves in a notebook: a line of text for each worker, in place.

And what is said before, while the index is read.

Text, so that they need no widgets and are there in a saved notebook.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from ..loader import progress

_EVERY = 0.1  # seconds between two pictures
_WIDTH = 80  # characters


class NotebookBars:
    """See `loader.progress.Bars`; drawn by the thread that waits."""

    def __init__(self, what: str, totals: Sequence[int], elapsed: float) -> None:
        self._format = importlib.import_module("tqdm").tqdm.format_meter
        self._what, self._totals = what, totals
        self._began = time.monotonic() - elapsed
        self._took: dict[int, float] = {}  # by rank, of those that are done
        self._drawn_at = 0.0
        self._landed: Sequence[int] = [0] * len(totals)
        self._handle: Any = display(self._bundle(), raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def draw(self, landed: Sequence[int]) -> None:
        """See `Bars`."""
        self._landed = list(landed)
        now = time.monotonic()
        for rank, (done, total) in enumerate(zip(landed, self._totals, strict=True)):
            if done >= total:
                self._took.setdefault(rank, now - self._began)
        if now - self._drawn_at >= _EVERY:
            self._drawn_at = now
            self._update()

    def close(self) -> None:
        """See `Bars`."""
        self._update()

    def _update(self) -> None:
        if self._handle is not None:
            self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        elapsed = time.monotonic() - self._began
        lines = [
            self._format(
                min(done, total),
                total,
                self._took.get(rank, elapsed),
                ncols=_WIDTH,
                prefix=f"{self._what}, worker {rank}",
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
            )
            for rank, (done, total) in enumerate(zip(self._landed, self._totals, strict=True))
        ]
        return {"text/plain": "\n".join(lines)}


class NotebookLine:
    """See `loader.progress.Line`."""

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, text: str) -> None:
        """See `Line`."""
        shown = {"text/plain": text}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(shown, raw=True)

    def close(self) -> None:
        """See `Line`: it stays."""


def _is_terminal() -> bool:
    return getattr(get_ipython(), "kernel", None) is None


def make_line() -> progress.Line:
    """A line for where we are."""
    return progress.TextLine() if _is_terminal() else NotebookLine()


def make(what: str, totals: Sequence[int], elapsed: float) -> progress.Bars:
    """Bars for where we are: in a notebook's kernel, or in IPython's terminal."""
    if _is_terminal():
        return progress.TextBars(what, totals, elapsed)
    return NotebookBars(what, totals, elapsed)


def install() -> None:
    """Have loads and saves show these."""
    if make not in progress.bars:
        progress.bars.append(make)
        progress.lines.append(make_line)


def uninstall() -> None:
    """Have them show what they did before."""
    if make in progress.bars:
        progress.bars.remove(make)
        progress.lines.remove(make_line)
