"""Waiting for what the workers run: their output is shown meanwhile, their result afterwards.

A part of a `Lab`. What stops for the debugger is kept by programs.py until it has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..ccl.board.rounds import failed_in_collective
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError, DiscoError
from ..runtime.failures import Failure, summarize
from ..runtime.session import Session
from .cell import CellInterrupted, CellRun, has_value
from .live import PROGRESS_AFTER, LiveView
from .sessions import Sessions


class Running:
    """What runs on the workers of one shell: cells that are waited for, or left to themselves.

    Attributes
    ----------
    background
        The cells that were left to themselves and are not yet known to have ended.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._shell = sessions.shell
        self._files: dict[str, int] = {}
        self.background: list[CellRun] = []

    def next_file(self) -> str:
        """A file name for a cell, made for people: ``Cell In[3]``, its second ``Cell In[3].2``."""
        # the number in front of the cell; newer IPythons count on before they run it
        name = f"Cell In[{self._shell.displayhook.prompt_count}]"
        self._files[name] = self._files.get(name, 0) + 1
        return name if self._files[name] == 1 else f"{name}.{self._files[name]}"

    @contextmanager
    def watching(
        self,
        session: Session,
        stream: bool | None = None,
        progress_after: float = PROGRESS_AFTER,
        group_outputs: str = "order",
    ) -> Iterator[None]:
        """Have a session's waits on this thread show output and progress, and the rest at the end.

        The parameters are those of `Programs.disco`.
        """
        watch = self._sessions.watches.get(session)
        view = LiveView(self._shell, self._sessions.output, session, stream, progress_after, watch)
        with self._sessions.output.during_cell(group_outputs):
            before = session.tick
            session.tick = view.tick  # type: ignore[method-assign]
            try:
                yield
            finally:
                session.tick = before  # type: ignore[method-assign]
                view.end()

    def bound(self, session: Session, names: Sequence[str]) -> dict[str, DRef]:
        """DRefs of worker variables, which must be there on one worker at least."""
        refs = {name: session[name] for name in names}
        for name, ref in refs.items():
            there = session.peek(session.call_packed(has_value, ref), tell=True)
            if all(isinstance(answer, Failure) for answer in there.values()):
                raise ArgumentError(f"-o: no worker has a variable named {name!r}")
        return refs

    def leave(self, run: CellRun) -> None:
        """Have the next cell after its end tell if it failed."""
        if run not in self.background:
            self.background.append(run)

    def ends(self) -> list[tuple[CellRun, str | None]]:
        """The cells in the background, with the words to say of those that have ended."""
        return [(run, _end_of(run)) for run in self.background]

    def tell_ends(self, ends: Sequence[tuple[CellRun, str | None]]) -> None:
        """Say how cells in the background have ended, and forget them; see `ends`."""
        for run, words in ends:
            if words is not None:
                self.background.remove(run)
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
