"""A `Trace`: what a session's workers did in some time, to be summed up, drawn and saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path

from ..runtime.display import Drawn
from ..views.parts import Part
from ..views.pictures import picture_of
from .chrome import document, write
from .events import Event
from .rounds import Round, match
from .summary import Summary, parts_of, sum_up


class Trace(Drawn):
    """Events of some workers. It shows itself as text and, in a notebook, as HTML.

    Attributes
    ----------
    title
        Which session.
    events
        Of each worker by rank, in the order in which they ended; a collective, in which it began.
    missing
        In words, why nothing is known of a worker.
    dropped
        How many events of a worker were lost, as its ring was full.
    clock_error
        By how many ns the times of a worker of another machine may be wrong.
    devices
        Of each worker.
    taken
        When it was collected, in ns: until then goes what is not over.
    """

    def __init__(
        self,
        title: str,
        events: Mapping[int, tuple[Event, ...]] | None = None,
        missing: Mapping[int, str] | None = None,
        dropped: Mapping[int, int] | None = None,
        clock_error: Mapping[int, int] | None = None,
        devices: Mapping[int, str] | None = None,
        taken: int = 0,
    ) -> None:
        self.title = title
        self.events = dict(events or {})
        self.missing = dict(missing or {})
        self.dropped = dict(dropped or {})
        self.clock_error = dict(clock_error or {})
        self.devices = dict(devices or {})
        self.taken = taken

    def fill(self, other: Trace) -> None:
        """Become what another one is."""
        self.__dict__.update(other.__dict__)

    def extent(self) -> tuple[int, int]:
        """The earliest begin and the latest end, in ns; (0, 0) if there is nothing."""
        events = [event for mine in self.events.values() for event in mine]
        if not events:
            return 0, 0
        begin = min(event.begin for event in events)
        return begin, max(event.until(self.taken) for event in events)

    def between(self, t0: int, t1: int) -> Trace:
        """What began in a time, both ends included."""
        return self._those(lambda event: t0 <= event.begin <= t1)

    def _those(self, wanted: Callable[[Event], bool]) -> Trace:
        events = {rank: tuple(filter(wanted, mine)) for rank, mine in self.events.items()}
        parts = self.missing, self.dropped, self.clock_error, self.devices, self.taken
        return Trace(self.title, events, *parts)

    def rounds(self) -> tuple[Round, ...]:
        """The collectives over their members: when each came, and which waited for which."""
        return match((rank, event) for rank, events in self.events.items() for event in events)

    def summary(self) -> Summary:
        """Busy, waiting and idle time of each worker; waiting by place in the program."""
        return sum_up(self.events, self.rounds(), self.extent())

    def to_chrome(self, path: str | PathLike[str]) -> Path:
        """Save it for Perfetto (https://ui.perfetto.dev) or chrome://tracing, as JSON.

        With the suffix ``.gz`` it is compressed; Perfetto reads that too.
        """
        return write(
            Path(path),
            document(
                self.title,
                self.events,
                self.rounds(),
                self.extent(),
                self.devices,
                self.missing,
            ),
        )

    def notes(self) -> list[str]:
        """What is to be known of it beside its events, a sentence each."""
        notes = [f"worker {rank}: {why}" for rank, why in sorted(self.missing.items())]
        for rank, count in sorted(self.dropped.items()):
            lost = "oldest event was" if count == 1 else f"{count:,} oldest events were"
            notes.append(f"worker {rank}: its {lost} dropped, as its ring was full")
        worst = max(self.clock_error.values(), default=0)
        if worst:
            notes.append(f"clocks of several machines: times may be wrong by {worst / 1e6:.2g} ms")
        return notes

    def parts(self) -> Part:
        """What is drawn of it."""
        return parts_of(self.title, self.events, self.rounds(), self.extent(), self.notes())

    def __repr__(self) -> str:
        count = sum(map(len, self.events.values()))
        return f"<trace of {self.title}: {count} events>"


picture_of.register(Trace, Trace.parts)
