"""Waiting for what the workers run: their output is shown meanwhile, their result afterwards.

A part of a `Lab`. What stops for the debugger is kept by debugging.py until it has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..ccl.board.rounds import failed_in_collective
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError, DiscoError
from ..runtime.failures import Failure, summarize
from ..runtime.session import Session
from .cell import CellInterrupted, CellRun, has_value
from .live import PROGRESS_AFTER, LiveView
from .panels import Panels


class Running(Panels):
    """Sessions whose cells are waited for."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._cells: dict[str, int] = {}
        self._background: list[CellRun] = []  # not yet known to have ended

    def _next_file(self) -> str:
        """A file name for a cell, made for people: ``Cell In[3]``, its second ``Cell In[3].2``."""
        # the number in front of the cell; newer IPythons count on before they run it
        name = f"Cell In[{self.shell.displayhook.prompt_count}]"
        self._cells[name] = self._cells.get(name, 0) + 1
        return name if self._cells[name] == 1 else f"{name}.{self._cells[name]}"

    @contextmanager
    def _watching(
        self,
        session: Session,
        stream: bool | None = None,
        progress_after: float = PROGRESS_AFTER,
        group_outputs: str = "order",
    ) -> Iterator[None]:
        """Have a session's waits on this thread show output and progress, and the rest at the end.

        The parameters are those of `Lab.disco`.
        """
        watch = self._watches.get(session)
        view = LiveView(self.shell, self.output, session, stream, progress_after, watch)
        with self.output.during_cell(group_outputs):
            before = session.tick
            session.tick = view.tick  # type: ignore[method-assign]
            try:
                yield
            finally:
                session.tick = before  # type: ignore[method-assign]
                view.end()

    def _bound(self, session: Session, names: Sequence[str]) -> dict[str, DRef]:
        """DRefs of worker variables, which must be there on one worker at least."""
        refs = {name: session[name] for name in names}
        for name, ref in refs.items():
            there = session.peek(session.call_packed(has_value, ref), tell=True)
            if all(isinstance(answer, Failure) for answer in there.values()):
                raise ArgumentError(f"-o: no worker has a variable named {name!r}")
        return refs

    def _in_background(self, run: CellRun) -> None:
        """Have the next cell after its end tell if it failed."""
        if run not in self._background:
            self._background.append(run)

    def _background_ends(self) -> list[tuple[CellRun, str | None]]:
        """The cells in the background, with the words to say of those that have ended."""
        return [(run, _end_of(run)) for run in self._background]

    def _tell_ends(self, ends: Sequence[tuple[CellRun, str | None]]) -> None:
        for run, words in ends:
            if words is not None:
                self._background.remove(run)
                if words:
                    print(words, file=sys.stderr)


@contextmanager
def ending_on_stop(session: Session, interrupt: bool = True) -> Iterator[None]:
    """Where stop is pressed before or after a wait: end what the workers run, too.

    Raises
    ------
    CellInterrupted
        For any KeyboardInterrupt.
    """
    try:
        yield
    except CellInterrupted:
        raise
    except KeyboardInterrupt:
        if interrupt:
            session.interrupt()
        raise CellInterrupted([]) from None


def _end_of(run: CellRun) -> str | None:
    """How a cell in the background has ended, "" if it did well; None while it runs."""
    if not run.ready():
        if run.session.closed:
            return ""
        try:
            run.session._check_alive()
        except DiscoError as exc:
            return f"in the background: {exc}"
        return None
    failures = [failure for failure in run.failures if not failure.interrupted]
    if not failures:
        return ""
    words = f"in the background: {summarize(failures)}"
    return "\n".join(filter(None, [words, doctor_hint(failures)]))


def doctor_hint(failures: Sequence[Failure]) -> str:
    """What to look at next, if a collective is what went wrong first."""
    told = any(failed_in_collective(failure) and not failure.victim for failure in failures)
    return "%disco_doctor shows the last collectives of each worker" if told else ""
