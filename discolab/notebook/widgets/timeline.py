"""``%disco_timeline``: what each worker did when, live; who waited in which collective for whom.

A front end says which window of time it shows and how wide it is; each frame has, for each front
end, what is to be drawn there, joined to what its pixels can show. The facts are in
timeline_looks.py, which the pictures of one session share.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime.errors import ArgumentError
from ...trace import Span, Trace
from ...views import Line, Part, Text, VStack, rank_colour
from .base import LiveWidget, source
from .timeline_looks import ALL_TIME, TimelineLooks, save

_FIRST_WIDTH = 900  # pixels of a front end that has not said its own
_FIRST_SPAN = 10_000_000_000  # ns that it shows while it follows
_SHORTEST = 1_000  # ns
_MOST_SPANS = 1_500  # in a frame, for each front end: some 25 KB
_FINE = 4  # parts of a pixel in which places are told
_NEW = 5.0  # seconds in which a front end that was not heard of yet keeps its window
_MOST_DRAWN = 20_000  # events of a static picture
_LAST_LOOK = 0.1  # seconds for which the end of a cell waits for what is not read yet
_SHARE = 12  # frames are made in a twelfth of the time at most
_STATES = {"done": 0, "running": 1, "waiting": 2, "stopped": 3, "failed": 4}

FOLLOW, ALL, FIXED = "follow", "all", "fixed"


@dataclass
class View:
    """What a front end shows: the last `span` ns, all there is, or from `t0` to `t1`."""

    mode: str = FOLLOW
    span: int = _FIRST_SPAN
    t0: int = 0
    t1: int = 1
    width: int = _FIRST_WIDTH
    number: int = 0  # of its wish, so that it knows what answers it
    viewer: str = ""
    since: float = 0.0
    coarse: int = 0  # its pixels are joined by 2 ** coarse, if there is too much to tell

    def window(self, extent: tuple[int, int]) -> tuple[int, int]:
        """From when to when."""
        first, last = extent
        if self.mode == FIXED:
            return self.t0, max(self.t1, self.t0 + _SHORTEST)
        margin = max(_SHORTEST, (last - first) // 50)
        if self.mode == ALL or last - first < self.span:
            return first - margin, last + margin
        return last - self.span, last + self.span // 50


class Timeline(LiveWidget):
    """The timeline of a session of the notebook, by name; after a restart that of the new one."""

    _esm = source("timeline_lanes.js", "timeline_tables.js", "timeline.js")
    _css = source("timeline.css")

    def __init__(self, looks: TimelineLooks) -> None:
        super().__init__()
        self._looks = looks
        self._views: dict[str, View] = {}
        self._drawn: tuple[int, Part] | None = None
        self._last: dict[str, Any] = {}
        self._answered: dict[str, int] | None = None  # the wishes that `_last` answers
        self._next = 0.0  # when it is time for another

    # -- for programs ------------------------------------------------------------------------

    @property
    def trace(self) -> Trace:
        """All that is known now; see `discolab.trace.Trace`."""
        with self._looks.lock:
            return self._looks.trace()

    def to_chrome(self, path: str | Path | None = None) -> Path:
        """Write it for Chrome's and Perfetto's viewers; see `timeline_looks.save`."""
        with self._looks.lock:
            found = self._looks.trace()
        return save(found, self._looks.name, path)

    # -- as a widget ---------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """See `LiveWidget`; the last one again if it was dear, and nobody has asked for another."""
        wishes = {me: view.number for me, view in self._shown_views().items()}
        if wishes == self._answered and time.monotonic() < self._next:
            return self._last
        began = time.thread_time()
        self._last, self._answered = self._snapshot(), wishes
        self._next = time.monotonic() + _SHARE * (time.thread_time() - began)
        return self._last

    def _snapshot(self) -> dict[str, Any]:
        looks = self._looks
        with looks.lock:
            looks.look()
            extent, session = looks.extent(), looks.session
            views = self._shown_views() or {"": View()}
            return {
                "title": _title(looks),
                "on": looks.on,
                "profiled": looks.profiled,
                "notice": _notice(looks),
                "missing": looks.missing(),
                "count": looks.count,
                "behind": looks.follower.behind,
                "extent": extent,
                "going": looks.going,
                "lanes": [
                    {"rank": rank, "colour": rank_colour(rank), "device": str(device)}
                    for rank, device in enumerate(session.devices)
                ],
                "summary": looks.summary(),
                "views": {me: _drawn(view, looks, extent) for me, view in views.items()},
            }

    def static(self) -> Part:
        looks = self._looks
        with looks.lock:
            looks.look(_LAST_LOOK if self._watched else ALL_TIME)
            if self._drawn is None or self._drawn[0] != looks.version:
                self._drawn = looks.version, _picture(looks)
            return self._drawn[1]

    def essence(self) -> int:
        return self._looks.version

    def command(self, name: str, content: dict[str, Any]) -> None:
        looks = self._looks
        if name == "view":
            me = str(content.get("me"))
            self._views[me] = _view(content, self._views.get(me))
            return
        if name == "export":
            self.send({"type": "exported", "path": str(self.to_chrome())})
            return
        with looks.lock:
            if name in ("on", "off"):
                looks.switch(name == "on")
            elif name == "clear":
                looks.clear()
            elif name == "details":
                wanted = (_whole(content, key) for key in ("rank", "row", "seq", "count", "at"))
                found = looks.details(*wanted)
                self.send({"type": "details", "me": content.get("me"), "details": found})
            else:
                super().command(name, content)

    def _shown_views(self) -> dict[str, View]:
        """The windows of front ends that are there."""
        now = time.monotonic()
        for me, view in self._views.copy().items():
            if view.viewer not in self._viewers and now - view.since > _NEW:
                self._views.pop(me, None)
        return self._views.copy()


def _whole(content: dict[str, Any], key: str) -> int:
    try:
        return int(content[key])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ArgumentError(f"a whole number is needed as {key}") from None


def _view(content: dict[str, Any], before: View | None) -> View:
    """The window that a front end has asked for."""
    mode = content.get("mode")
    if mode not in (FOLLOW, ALL, FIXED):
        raise ArgumentError(f"a window is {FOLLOW}, {ALL} or {FIXED}; got {mode!r:.40}")
    return View(
        mode,
        max(_SHORTEST, _whole(content, "span")),
        _whole(content, "t0"),
        _whole(content, "t1"),
        min(max(_whole(content, "width"), 50), 10_000),
        _whole(content, "number"),
        str(content.get("viewer")),
        time.monotonic(),
        before.coarse if before is not None else 0,
    )


def _drawn(view: View, looks: TimelineLooks, extent: tuple[int, int]) -> dict[str, Any]:
    """What a front end is to draw: by lane and row its spans, and their names."""
    t0, t1 = view.window(extent)
    while True:
        lanes = looks.fold(t0, t1, max(view.width >> view.coarse, 8))
        count = sum(map(len, lanes.values()))
        if count <= _MOST_SPANS or view.width >> view.coarse <= 8:
            break
        view.coarse += 1
    names: dict[str, int] = {}
    scale = _FINE * view.width / max(1, t1 - t0)
    drawn = {rank: _rows(spans, t0 + looks.origin, scale, names) for rank, spans in lanes.items()}
    if view.coarse and count < _MOST_SPANS // 3:
        view.coarse -= 1  # the next time
    return {
        "number": view.number,
        "mode": view.mode,
        "t0": t0,
        "t1": t1,
        "width": view.width,
        "names": list(names),
        "lanes": drawn,
    }


def _rows(spans: list[Span], start: int, scale: float, names: dict[str, int]) -> dict[int, str]:
    """Of each row its spans as text, seven numbers each with commas between.

    How far after the end of the one before it begins, how long it is, state, name, how many were
    joined, how much higher its number is, and the part that waited; what is usual is left out.
    """
    told: dict[int, list[int | str]] = {}
    before: dict[int, tuple[int, int]] = {}
    for span in spans:
        end, seq = before.get(span.row, (0, 0))
        first, last = round((span.begin - start) * scale), round((span.end - start) * scale)
        before[span.row] = last, span.seq
        told.setdefault(span.row, []).extend(
            (
                first - end,
                last - first,
                _STATES.get(span.state, 1) or "",
                names.setdefault(span.name[:60], len(names)) or "",
                span.count if span.count > 1 else "",
                span.seq - seq,
                round(span.waited * scale) or "",
            )
        )
    return {row: ",".join(map(str, numbers)) for row, numbers in told.items()}


def _title(looks: TimelineLooks) -> str:
    count = looks.session.num_workers
    return f"{looks.name}: {count} worker{'' if count == 1 else 's'} ({looks.session.engine})"


def _notice(looks: TimelineLooks) -> str:
    if looks.session.closed:
        return "shut down: %disco_restart starts it again"
    return ""


def _picture(looks: TimelineLooks) -> Part:
    """The static picture, of the last events if there are very many."""
    if not looks.count:
        words = "tracing is on, nothing is recorded yet" if looks.wanted else "tracing is off"
        head = Line((Text("timeline", "title"), Text(f" · {_title(looks)}", "muted")))
        return VStack((head, Text(words, "muted")))
    found = looks.follower.trace()
    share = _MOST_DRAWN // max(1, len(found.events))
    kept = {rank: events[-share:] for rank, events in found.events.items()}
    parts = found.missing, found.dropped, found.clock_error, found.devices, found.taken
    part = Trace(found.title, kept, *parts).parts()
    if any(len(events) > share for events in found.events.values()):
        note = Text(f"drawn: the last {share} events of each worker", "muted")
        return VStack((part, note))
    return part
