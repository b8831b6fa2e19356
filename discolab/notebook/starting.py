"""How a session of the notebook is started: with what settings, and what is shown meanwhile."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..engines import ENGINES, make_session
from ..runtime.errors import ArgumentError
from ..runtime.mesh import parse_axes
from ..runtime.session import Session
from ..views.facts.tensors import limit_statistics
from .live import is_watched

_LONGEST = 100  # characters of the line while workers start


class StartInterrupted(KeyboardInterrupt):
    """A session was stopped while it started."""

    def __init__(self) -> None:
        super().__init__("stopped; the session was not started, and no worker is left")

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


@dataclass(frozen=True)
class Settings:
    """What a session was asked to be; enough to start it again.

    Attributes
    ----------
    num_workers, engine, devices, groups, ccl, mesh
        As for `Sessions.disco_session`.
    statistics_limit
        Bytes of a tensor up to which a picture reads all of its values; None: 4 MiB.
    options
        What only some engines take, by the names of their parameters; the others let it lie.
    """

    num_workers: int
    engine: str = "threads"
    devices: Any = None
    groups: int = 1
    ccl: str = "auto"
    mesh: str | None = None
    statistics_limit: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Look whether the engine takes all of the options.

        Raises
        ------
        ArgumentError
        """
        taken = taken_by(self.engine)
        for name in self.options:
            if name not in taken:
                fit = [engine for engine in ENGINES if name in taken_by(engine)]
                raise ArgumentError(
                    f"the engine {self.engine!r} takes no --{name.replace('_', '-')}"
                    + (f"; {', '.join(fit)} would" if fit else "")
                )

    def on(self, engine: str | None, options: Mapping[str, Any]) -> Settings:
        """The same on another engine (None: this one), with more options.

        Raises
        ------
        ArgumentError
            If there is no engine of that name, or it does not take one of the new options.
        """
        found = replace(self, engine=engine or self.engine, options=options)
        found.check()
        return replace(found, options={**self.options, **options})

    def start(self, shell: Any, set_up: Callable[[Session], None]) -> Session:
        """Start the session, with its collectives and its mesh; else nothing is left running.

        `set_up` prepares its workers for cells.

        Raises
        ------
        ArgumentError
            If something does not fit.
        StartInterrupted
        """
        taken, line = taken_by(self.engine), StartLine(shell)
        more = {name: value for name, value in self.options.items() if name in taken}
        if "progress" in taken:
            more["progress"] = line
        try:
            session = make_session(
                self.num_workers,
                engine=self.engine,
                num_groups=self.groups,
                devices=self.devices,
                **more,
            )
            try:
                set_up(session)
                if self.statistics_limit is not None:
                    session.call_without_result(limit_statistics, self.statistics_limit)
                session.init_ccl(self.ccl)
                if self.mesh:
                    session.mesh(**parse_axes(self.mesh))
            except BaseException:
                session.shutdown(cancel=True)
                raise
        except KeyboardInterrupt:
            raise StartInterrupted from None
        finally:
            line.end()
        return session

    def takes_the_place_of(self, other: Settings) -> bool:
        """Whether it may not start before `other` has ended: they want the same port, or slots."""
        if self.engine == other.engine == "ray":
            return True
        port = self.options.get("port")
        return bool(port) and port == other.options.get("port")


def taken_by(engine: str) -> Mapping[str, Any]:
    """The parameters of an engine's sessions."""
    kind = ENGINES.get(engine)
    if kind is None:
        raise ArgumentError(
            f"there is no engine {engine!r} in this version; there is: {', '.join(ENGINES)}"
        )
    return inspect.signature(kind).parameters


class StartLine:
    """Who is there and who is missing, while workers start: one line, written over and over.

    It is shown where somebody watches. Carriage returns leave nothing of it in a notebook that is
    saved, where an emptied display would leave an empty output.
    """

    def __init__(self, shell: Any) -> None:
        self._watched = is_watched(shell)
        self._width = 0

    def __call__(self, text: str) -> None:
        """Show `text` in the place of what is there."""
        if not self._watched or not (text or self._width):
            return
        text = " ".join(text.split())
        if len(text) > _LONGEST:
            text = text[: _LONGEST - 1] + "…"
        sys.stdout.write("\r" + text.ljust(self._width))
        sys.stdout.flush()
        self._width = len(text)

    def end(self) -> None:
        """Take the line away."""
        if self._width:
            self("")
            sys.stdout.write("\r")
