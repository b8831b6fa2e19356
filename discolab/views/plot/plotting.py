"""Asks the workers for regions of a tensor: what stands between a picture and the session.

Any thread may call a `Reader`, one at a time. No wait takes longer than `_PATIENCE`; a worker
that is busy is not asked a second time before it has answered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any
from weakref import ref as weakref

from ...runtime.channel import Ticket
from ...runtime.dref import DRef
from ...runtime.errors import ArgumentError, SessionClosedError
from ...runtime.failures import Failure
from ..dref.ask import failure_record, layout_of, state_record
from ..parts import Part
from .picture import STATS, Picture, Stat, make_picture, shade
from .plot_view import drawn_size, plot_parts
from .regions import MOST_CELLS, READING, Cut, read_facts, read_histograms, read_regions
from .sheet import Sheet, Window, choices, choose_blocks, make_sheet, sources

_PATIENCE = 0.8  # seconds
_TICK = 0.02
GONE = "the value was released with its picture: run the cell again"
_STATIC_CELLS = 9_000  # in all: they have to fit in 20 KB of HTML


class Reader:
    """Reads pictures of what one DRef names.

    Parameters
    ----------
    ref
        Of a live session.
    dims, index
        See `sheet.make_sheet`.

    Raises
    ------
    ArgumentError, SessionClosedError
        As `discolab.plot`.
    """

    def __init__(self, ref: DRef, dims: Any = None, index: Any = None) -> None:
        if not isinstance(ref, DRef):
            raise ArgumentError(f"plot draws what a DRef names: got {_a(type(ref).__name__)}")
        if ref.session.closed:
            raise SessionClosedError("plot: the session of this DRef was shut down")
        self.held: DRef | None = ref
        self._weak = weakref(ref)
        self._name = ref.name
        self.dims, self.index = dims, index
        self._late: dict[int, tuple[DRef, Ticket]] = {}  # not answered yet, by rank
        self._facts: dict[int, Mapping[str, Any]] = {}
        self.sheet = self._lay_out()

    # -- what it draws ---------------------------------------------------------------------

    @property
    def ref(self) -> DRef:
        """What is drawn.

        Raises
        ------
        ArgumentError
            If it was let go, and nobody else holds it.
        """
        ref = self.held if self.held is not None else self._weak()
        if ref is None:
            raise ArgumentError(GONE)
        return ref

    @property
    def name(self) -> str | None:
        """What it is, or was, called."""
        ref = self._weak()
        if ref is not None:
            self._name = ref.name
        return self._name

    @property
    def is_gone(self) -> bool:
        """Whether it was let go, and nobody else holds it."""
        return self._weak() is None

    def let_go(self) -> None:
        """Keep the value alive no more."""
        self.held = None
        self._late = {}

    def take_hold(self) -> None:
        """Keep it alive again, if it is alive."""
        self.held = self._weak()

    # -- what is where ---------------------------------------------------------------------

    def _lay_out(self) -> Sheet:
        """Ask those that have not told it what they hold, and lay out the sheet."""
        session = self.ref.session
        lacking = [r for r in range(session.num_workers) if r not in self._facts]
        if lacking:
            answers = self._ask(lambda: session.call_packed(read_facts, self.ref), lacking)
            known = {rank: answer for rank, answer in answers.items() if "kind" in answer}
            self._facts.update({r: a for r, a in known.items() if a["kind"] in ("tensor", "other")})
            if not self._facts:
                first = next(iter(known.values()))
                raise ArgumentError(f"plot: nothing to draw: worker 0 {first.get('message')}")
        return make_sheet(self._facts, layout_of(session, self.ref), self.dims, self.index)

    def turn(self, dims: Any, index: Any) -> None:
        """Draw other dims, or cut elsewhere; as it was if that is refused."""
        before = self.dims, self.index
        self.dims, self.index = dims, index
        try:
            self.sheet = self._lay_out()
        except ArgumentError:
            self.dims, self.index = before
            raise

    @property
    def choices(self) -> tuple[tuple[str, str], ...]:
        """See `sheet.choices`."""
        return tuple(choices(self.sheet))

    # -- pictures --------------------------------------------------------------------------

    def look(self, window: Window, pixels: tuple[int, int], choice: str) -> Picture:
        """Read a region at so many pixels, down and across, at most."""
        if self.sheet.assumed and not set(self.sheet.assumed) & set(self._late):
            self.sheet = self._lay_out()
        sheet = self.sheet
        window = _within(sheet, window)
        blocks = choose_blocks(sheet, window, pixels, MOST_CELLS)
        return self._read(sheet, window, blocks, choice)

    def whole(self, choice: str) -> Picture:
        """All of it, for a saved notebook."""
        sheet = self.sheet
        most = max(_STATIC_CELLS // max(len(sheet.shards), 1), 64)
        blocks = choose_blocks(sheet, sheet.window, drawn_size(sheet), most)
        return self._read(sheet, sheet.window, blocks, choice)

    def _read(self, sheet: Sheet, window: Window, blocks: tuple[int, int], choice: str) -> Picture:
        cuts = self._cuts(sheet, window, blocks, choice)
        answers = self._ask_cuts(cuts, lambda asked: (read_regions, self.ref, asked))
        return make_picture(sheet, window, blocks, choice, answers)

    def histogram(
        self, window: Window, choice: str, low: float, high: float
    ) -> tuple[list[int], list[int]]:
        """Count the values of a region in 24 bins; with the ranks that have not answered."""
        cuts = self._cuts(self.sheet, _within(self.sheet, window), (1, 1), choice)
        answers = self._ask_cuts(cuts, lambda asked: (read_histograms, self.ref, asked, low, high))
        counts = [0] * 24
        for answer in answers.values():
            found = answer.get("counts") or [0] * 24
            counts = [one + other for one, other in zip(counts, found, strict=True)]
        lacking = sorted(rank for rank, answer in answers.items() if not answer.get("counts"))
        return counts, lacking

    def _cuts(
        self, sheet: Sheet, window: Window, blocks: tuple[int, int], choice: str
    ) -> list[Cut | None]:
        cuts: list[Cut | None] = [None] * self.ref.session.num_workers
        for shard, wanted in sources(sheet, choice):
            for rank, _ in wanted:
                cuts[rank] = shard.cut(window, blocks)
        return cuts

    def _ask_cuts(
        self, cuts: list[Cut | None], call: Callable[[list[Cut | None]], tuple[Any, ...]]
    ) -> dict[int, Mapping[str, Any]]:
        wanted = [rank for rank, cut in enumerate(cuts) if cut is not None]
        asked = [None if rank in self._late else cut for rank, cut in enumerate(cuts)]
        session = self.ref.session
        return self._ask(lambda: session.call_packed(*call(asked)), wanted)

    # -- asking ------------------------------------------------------------------------------

    def has_news(self) -> bool:
        """Whether a worker that was late has answered by now, and is to be asked again."""
        answered = [rank for rank, (_, ticket) in self._late.items() if rank in ticket.values]
        for rank in answered:
            del self._late[rank]
        return bool(answered)

    def _ask(self, call: Callable[[], DRef], ranks: Sequence[int]) -> dict[int, Mapping[str, Any]]:
        """What workers answer in time; a record as in `states` of one that does not."""
        self.has_news()
        session = self.ref.session
        asked = [rank for rank in ranks if rank not in self._late]
        values: Mapping[int, Any] = {}
        if asked:
            ref = call()
            ticket = session.request(ref, asked, what="a picture")
            self._wait(ticket)
            values = dict(ticket.values)
            self._late.update({rank: (ref, ticket) for rank in asked if rank not in values})
        lacking = [rank for rank in ranks if rank not in values]
        states = session.status() if lacking else []
        for rank in lacking:
            if states[rank].state == "dead":
                self._late.pop(rank, None)
        found: dict[int, Mapping[str, Any]] = {}
        for rank in ranks:
            value = values.get(rank)
            if isinstance(value, Failure):
                found[rank] = failure_record(value)
            elif value is None:
                found[rank] = state_record(states[rank]) if lacking and rank in lacking else {}
            else:
                found[rank] = value
        return found

    def _wait(self, ticket: Ticket) -> None:
        """Until all have answered, or those that have not are at work on something else."""
        deadline = time.monotonic() + _PATIENCE
        while not ticket.acquire(_TICK) and time.monotonic() < deadline:
            states = self.ref.session.status()
            open_ = [states[rank] for rank in ticket.missing]
            if open_ and all(_otherwise_engaged(state) for state in open_):
                return


def _otherwise_engaged(state: Any) -> bool:
    if state.state == "dead":
        return True
    return state.state != "idle" and state.seconds > 0.1 and READING not in state.detail


def _within(sheet: Sheet, window: Window) -> Window:
    """A window cut to the sheet, of one element at least."""
    ends = []
    for axis in (0, 1):
        start = min(max(int(window[axis]), 0), sheet.size[axis] - 1)
        ends.append((start, min(max(int(window[axis + 2]), start + 1), sheet.size[axis])))
    (top, bottom), (left, right) = ends
    return top, left, bottom, right


def _a(name: str) -> str:
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"


def check_options(stat: Any, vmin: Any, vmax: Any) -> None:
    """Raise an ArgumentError for options that are not as `discolab.plot` says."""
    if stat not in STATS:
        raise ArgumentError(f"plot: stat is one of {', '.join(STATS)}: got {stat!r}")
    for name, value in (("vmin", vmin), ("vmax", vmax)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise ArgumentError(f"plot: {name} is a number or None: got {value!r:.60}")
        if value is not None and not math.isfinite(value):
            raise ArgumentError(f"plot: {name} is a finite number or None: got {value}")
    if vmin is not None and vmax is not None and not vmin < vmax:
        raise ArgumentError(f"plot: vmin must be below vmax: got {vmin} and {vmax}")


def parts_of(
    picture: Picture,
    name: str | None,
    stat: Stat = "mean",
    choice: str = "value",
    vmin: float | None = None,
    vmax: float | None = None,
) -> Part:
    """The saved picture of a whole."""
    shades = shade(picture, stat, vmin, vmax)
    return plot_parts(picture, name=name, stat=stat, choice=choice, shades=shades)
