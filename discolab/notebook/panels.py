"""Live pictures of sessions in a notebook: registers, devices, timeline, debugger.

A part of a `Lab`. What they look like is in widgets/.
"""

from __future__ import annotations

from typing import Any

from ..runtime.session import Session
from .cells import CellTeller
from .sessions import Sessions
from .widgets.pump import pump


class Panels:
    """Has the sessions of one shell looked at."""

    def __init__(self, sessions: Sessions, cells: CellTeller) -> None:
        self._sessions = sessions
        self._shell = sessions.shell
        self._cells = cells
        self._cell_turn = (0, 0)  # the number of the last cell, and how many have ended
        sessions.at_start.append(self._goes_on_with)
        self._timelines: dict[str, Any] = {}  # `TimelineLooks` by the names of the sessions

    def watch_for_the_end(self) -> None:
        """When the kernel ends it ends its workers one by one: the last pictures are of before."""
        kernel: Any = getattr(self._shell, "kernel", None)
        if kernel is None:
            return
        do_shutdown = kernel.do_shutdown

        def rest_first(*args: Any, **kwargs: Any) -> Any:
            pump.rest()
            return do_shutdown(*args, **kwargs)

        kernel.do_shutdown = rest_first

    def watch_no_more(self) -> None:
        """Undo `watch_for_the_end`."""
        vars(getattr(self._shell, "kernel", self)).pop("do_shutdown", None)

    def cell_begins(self, *_: Any) -> None:
        """Note in the sessions' books which cell runs: what is made now is made by it."""
        number = int(self._shell.displayhook.prompt_count)
        self._cell_turn = number, self._cell_turn[1]
        for session in list(self._sessions.by_name.values()):
            session.track_registers().cell = number

    def cell_ends(self) -> None:
        """Names of the notebook may lead elsewhere now."""
        self._cell_turn = self._cell_turn[0], self._cell_turn[1] + 1

    def flush_panels(self) -> None:
        """Have what is open show the last of a cell that has ended."""
        pump.flush()

    def disco_registers(
        self,
        session: str | None = None,
        *,
        sort: str = "bytes",
        filter: str = "",
        leaks: bool = False,
    ) -> Any:
        """The live registers of a session: what they hold, who made and who holds them.

        Never waits for workers that compute; what they have not computed yet is shown as pending.

        Parameters
        ----------
        session
            Its name; None: the one used last.
        sort
            ``bytes`` (most first), ``age`` (oldest first), ``id``, ``name``, ``type`` or ``site``.
        filter
            Only registers of which all these words are told: ``float32 not found``.
        leaks
            Only those that no name of the notebook leads to (a result in ``Out`` or an error
            is none), or whose line makes more with each cell.

        Returns
        -------
        widgets.registers.RegistersWidget
            Shows itself; `rows` gives the facts.
        """
        from .holders import holders_of
        from .widgets.registers import RegistersWidget

        name = self._sessions.name_of(session)
        return RegistersWidget(
            lambda: self._named(name),
            lambda: holders_of(self._shell),
            lambda: self._cell_turn,
            self._cells.name_at,
            sort=sort,
            text=filter,
            leaks=leaks,
        )

    def disco_devices(self, *, session: str | None = None) -> Any:
        """What each worker of a session does and uses, live while somebody looks.

        Waits a tenth of a second, to see how much of the processor each uses.

        Returns
        -------
        widgets.devices.Devices
            Shows itself; `rows` gives the facts.
        """
        from .widgets.devices import Devices

        return Devices(self._sessions.name_of(session), self._named)

    def disco_debugger(self, session: str | None = None) -> Any:
        """The program that is stepped, with buttons and keys; live, between and during cells.

        Parameters
        ----------
        session
            Its name; None: the one used last.

        Returns
        -------
        widgets.stepper.Stepper
            Shows itself.
        """
        from .widgets.stepper import Stepper

        name = self._sessions.name_of(session)
        return Stepper(name, lambda: self._named(name), lambda: self._cell_turn)

    def disco_timeline(
        self,
        *,
        session: str | None = None,
        on: bool = True,
        profile: bool = False,
        clear: bool = False,
    ) -> Any:
        """What each worker did when, and who waited for whom; live while somebody looks.

        Parameters
        ----------
        session
            Its name; None: the one used last.
        on
            Record from now on, or no more. A session that takes this one's place goes on with it.
        profile
            Have torch.profiler see what the workers call, until recording ends.
        clear
            Forget what was recorded before.

        Returns
        -------
        widgets.timeline.Timeline
            Shows itself; `trace` and `to_chrome` give what was recorded.

        Raises
        ------
        WorkerError
            If the profiler could not be started.
        """
        from .widgets.timeline import Timeline
        from .widgets.timeline_looks import TimelineLooks

        name = self._sessions.name_of(session)
        looks = self._timelines.get(name)
        if looks is None:
            looks = self._timelines[name] = TimelineLooks(name, self._named)
        if clear:
            looks.clear()
        looks.switch(on, profile)
        return Timeline(looks)

    def is_traced(self, session: str | None = None) -> bool:
        """Whether `disco_timeline` has a session record."""
        looks = self._timelines.get(self._sessions.name_of(session))
        return looks is not None and bool(looks.wanted)

    def _goes_on_with(self, name: str, session: Session) -> None:
        if name in self._timelines:
            self._timelines[name].goes_on_with(session)

    def _named(self, name: str) -> Session:
        """The session that has the name now, also if it was shut down."""
        return self._sessions.by_name[name]
