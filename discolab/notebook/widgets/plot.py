"""A picture of one tensor over its workers that can be zoomed into.

The front end asks for regions as it needs them (`look`), and is answered by a message with one
level of colour a pixel; numbers stay here until the cursor is on them (`point`). What the frame
holds changes only with the options: it is `_version` that tells the front end to look again.

Which thread: commands on the thread for buttons, `snapshot` on the pump's. `_lock` is held while
the reader is used; the pump does not wait for it.
"""

from __future__ import annotations

import itertools
import math
import re
import threading
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ...runtime.dref import DRef
from ...runtime.errors import ArgumentError, DiscoError
from ...runtime.failures import name_ranks
from ...views.formats import format_ranks, format_workers
from ...views.parts import Part
from ...views.plot.picture import STATS, Array, Picture, Shades, Stat, shade
from ...views.plot.plot_view import (
    drawn_ratio,
    format_axes,
    format_point,
    format_stat,
    format_state,
    short_state,
    title_of,
)
from ...views.plot.plotting import GONE, Reader, check_options, parts_of
from ...views.render.style import colour_at, gradient, rank_colour
from .base import LiveWidget, source

_SECONDS = re.compile(r" for [\d.]+ m?s\b")  # which one worker has been busy, another a bit less
_MOST_TEXTS = 600  # values that are written into their pixels
_LONGEST_LINE = 700
_MAPS = {
    str(diverging).lower(): "".join(
        f"{red:02x}{green:02x}{blue:02x}"
        for red, green, blue in (colour_at(level, diverging) for level in range(256))
    )
    for diverging in (False, True)
}
_GRADIENTS = {name: gradient(name == "true") for name in _MAPS}

_plots: WeakValueDictionary[int, TensorPlot] = WeakValueDictionary()
_counter = itertools.count()


def plot(
    ref: DRef,
    dims: int | tuple[int, ...] | None = None,
    index: Mapping[int, int] | Sequence[int | None] | None = None,
    stat: Stat = "mean",
    vmin: float | None = None,
    vmax: float | None = None,
) -> TensorPlot:
    """Draw a tensor over its workers as a picture that can be zoomed into.

    Workers are asked for the region that is seen, at the resolution of the screen: no tensor is
    moved, no collective is run. One that is busy is shown as such and asked again.

    The picture keeps the value alive while it is on a page; a moment after it was taken off (its
    cell was run again, its output cleared) it does so no more.

    Parameters
    ----------
    ref
        Names a tensor on each worker; set its `placements` to see them joined.
    dims
        The dims that run down and across; None: those that are cut, then the last ones.
    index
        Where the other dims are cut: ``{0: 5}``, or a number or None for each dim.
    stat
        What a pixel stands for: ``"mean"`` of its elements, ``"absmax"``, the largest magnitude,
        or ``"nonfinite"``, how many are not finite.
    vmin, vmax
        The ends of the scale of colours; None: the lowest and highest value seen.

    Returns
    -------
    TensorPlot
        Shows itself.

    Raises
    ------
    ArgumentError
        If there is no tensor to draw, or an option does not fit it.
    SessionClosedError
    """
    return TensorPlot(ref, dims, index, stat, vmin, vmax)


class TensorPlot(LiveWidget):
    """See `discolab.plot`."""

    _esm = source("plot.js")
    _css = source("plot.css")
    _dear = True

    def __init__(
        self,
        ref: DRef,
        dims: Any = None,
        index: Any = None,
        stat: Stat = "mean",
        vmin: float | None = None,
        vmax: float | None = None,
    ) -> None:
        check_options(stat, vmin, vmax)
        reader = Reader(ref, dims, index)
        super().__init__()
        self._reader = reader
        self._lock = threading.Lock()
        self._stat, self._range = stat, (vmin, vmax)
        self._choice = reader.choices[0][0]
        self._held: tuple[float, float] | None = None
        self._version = 1
        self._shown_scale: tuple[float, float] | None = None
        self._last: dict[str, Picture] = {}  # by who asked
        self._whole = reader.whole(self._choice), self._choice
        _plots[next(_counter)] = self

    @property
    def ref(self) -> DRef | None:
        """What it draws; None once it does not keep it alive any more."""
        return self._reader.held

    def let_go(self) -> None:
        if "_reader" in vars(self):
            self._reader.let_go()

    def take_hold(self) -> None:
        self._reader.take_hold()

    # -- what is shown -------------------------------------------------------------------------

    def static(self) -> Part:
        """All of the tensor, as it was when it was last looked at."""
        picture, choice = self._whole
        return parts_of(picture, self._reader.name, self._stat, choice, *self._range)

    def snapshot(self) -> dict[str, Any]:
        """The sheet and the options."""
        if self._lock.acquire(blocking=False):
            try:
                self._version += self._reader.has_news()
            finally:
                self._lock.release()
        sheet = self._reader.sheet
        return {
            "version": self._version,
            "title": title_of(sheet, self._reader.name),
            "shape": list(sheet.shape),
            "dims": list(sheet.dims),
            "index": list(sheet.index),
            "size": list(sheet.size),
            "axes": list(format_axes(sheet)),
            "ratio": drawn_ratio(sheet),
            "joined": sheet.joined,
            "shards": [
                {
                    "place": list(shard.window),
                    "label": shard.label,
                    "members": list(shard.ranks),
                    "ranks": format_ranks(shard.ranks),
                    "owner": format_workers(shard.ranks),
                    "colour": rank_colour(shard.ranks[0]),
                }
                for shard in sheet.shards
            ],
            "choices": [list(choice) for choice in self._reader.choices],
            "choice": self._choice,
            "stats": list(STATS),
            "stat": self._stat,
            "held": self._held is not None,
            "others": [f"worker {rank} holds {kind}" for rank, kind in sheet.others.items()],
            "gone": GONE if self._reader.is_gone else "",
            "maps": _MAPS,
            "gradients": _GRADIENTS,
        }

    # -- what the front end asks ---------------------------------------------------------------

    def command(self, name: str, content: dict[str, Any]) -> None:
        known = {
            "look": self._look,
            "set": self._set,
            "point": self._point,
            "histogram": self._histogram,
            "again": self._again,
        }
        if name not in known:
            raise DiscoError(f"unknown command {name!r}")
        known[name](content)

    def _look(self, content: dict[str, Any]) -> None:
        window = _numbers(content.get("window"), 4)
        pixels = _numbers(content.get("pixels"), 2)
        down, across = (min(max(count, 1), 4096) for count in pixels)
        if self._reader.sheet.size[0] == 1:
            across = min(across, _LONGEST_LINE)
        asker = str(content.get("asker"))[:40]
        try:
            with self._lock:
                sheet = self._reader.sheet
                picture = self._reader.look(window, (down, across), self._choice)
                if self._reader.sheet is not sheet:
                    self._version += 1
        except DiscoError:
            self.send({"type": "refused", "asker": asker})
            raise
        if len(self._last) > 20:
            self._last.clear()
        self._last[asker] = picture
        if len(picture.shown) > len(self._whole[0].shown):  # a worker is not busy any more
            with self._lock:
                self._whole = self._reader.whole(self._choice), self._choice
        shades = shade(picture, self._stat, *(self._held or self._range))
        self._shown_scale = shades.low, shades.high
        said = {"type": "picture", "asker": asker, "number": content.get("number")}
        self.send(said | _message(picture, shades, self._stat, self._choice))

    def _set(self, content: dict[str, Any]) -> None:
        with self._lock:
            if "dims" in content or "index" in content:
                index = content.get("index", list(self._reader.sheet.index))
                self._reader.turn(content.get("dims", self._reader.dims), index)
                if self._choice not in dict(self._reader.choices):
                    self._choice = self._reader.choices[0][0]
            if "stat" in content:
                check_options(content["stat"], None, None)
                self._stat = content["stat"]
                self._held = None
            if "choice" in content:
                if content["choice"] not in dict(self._reader.choices):
                    raise ArgumentError(f"plot: there is no choice {content['choice']!r:.40}")
                self._choice = content["choice"]
                self._held = None
            if "hold" in content:
                self._held = self._shown_scale if content["hold"] else None
            if "hold" not in content and "stat" not in content:
                self._whole = self._reader.whole(self._choice), self._choice
            self._version += 1

    def _point(self, content: dict[str, Any]) -> None:
        row, column = _numbers(content.get("at"), 2)
        asker = str(content.get("asker"))[:40]
        picture = self._last.get(asker)
        if picture is not None:
            words = format_point(picture, row, column, self._choice)
            at = [row, column]
            self.send({"type": "point", "asker": asker, "at": at, "words": words})

    def _histogram(self, content: dict[str, Any]) -> None:
        asker = str(content.get("asker"))[:40]
        picture = self._last.get(asker)
        if picture is None or not np.isfinite(picture.low).any():
            return
        low, high = float(np.nanmin(picture.low)), float(np.nanmax(picture.high))
        choice = self._choice
        if (choice == "value" and self._reader.sheet.terms > 1) or choice.startswith("difference"):
            counts, edges = np.histogram(picture.mean[np.isfinite(picture.mean)], 24)
            found, low, high = [int(n) for n in counts], float(edges[0]), float(edges[-1])
            words = "of the pixels shown"
        else:
            if not picture.exact:  # the ends are known to three digits only
                low, high = low - 0.004 * abs(low), high + 0.004 * abs(high)
            with self._lock:
                found, lacking = self._reader.histogram(picture.window, choice, low, high)
            words = "of the region" + (", sampled" if _is_sampled(picture) else "")
            if lacking:
                words += f", without {format_workers(lacking)}"
        said = {"type": "histogram", "asker": asker, "counts": found}
        self.send(said | {"low": f"{low:.3g}", "high": f"{high:.3g}", "words": words})

    def _again(self, _content: dict[str, Any]) -> None:
        """Values may have been changed in place."""
        with self._lock:
            self._whole = self._reader.whole(self._choice), self._choice
            self._version += 1


def open_plots() -> list[TensorPlot]:
    """The plots there are in this kernel; any thread may ask."""
    found = (known() for known in _plots.valuerefs())
    return [plot for plot in found if plot is not None]


def _is_sampled(picture: Picture) -> bool:
    return picture.every > 1


def _numbers(value: Any, count: int) -> tuple[Any, ...]:
    fits = isinstance(value, list) and len(value) == count
    if not fits or not all(isinstance(n, int | float) and math.isfinite(n) for n in value):
        raise ArgumentError(f"plot: {count} numbers expected, got {value!r:.60}")
    return tuple(int(n) for n in value)


def _message(picture: Picture, shades: Shades, stat: Stat, choice: str) -> dict[str, Any]:
    """A picture as the front end draws it."""
    low, high = shades.ends
    return {
        "window": list(picture.window),
        "blocks": list(picture.blocks),
        "origin": [picture.top * picture.blocks[0], picture.left * picture.blocks[1]],
        "pixels": list(picture.mean.shape),
        "levels": b64encode(shades.levels.tobytes()).decode("ascii"),
        "shown": [list(shard.window) for shard in picture.shown],
        "states": {str(rank): short_state(record) for rank, record in picture.states.items()},
        "problems": _problems(picture),
        "low": low,
        "high": high,
        "diverging": shades.diverging,
        "nonfinite": shades.nonfinite,
        "words": format_stat(picture, stat, choice),
        "texts": _texts(picture, stat),
        "line": _line(picture, stat),
    }


def _texts(picture: Picture, stat: Stat) -> list[list[str]] | None:
    """The values themselves, where there are so few that they can be read."""
    if not picture.exact or picture.mean.size > _MOST_TEXTS:
        return None
    values = picture.values(stat)
    return [
        [f"{value:.4g}" if known else "" for value, known in zip(*line, strict=True)]
        for line in zip(values.tolist(), picture.known.tolist(), strict=True)
    ]


def _problems(picture: Picture) -> list[str]:
    """Who is not seen, and why: once for all of whom the same is said."""
    told: dict[str, tuple[str, list[int]]] = {}
    for rank, record in picture.states.items():
        words = format_state(record)
        told.setdefault(_SECONDS.sub("", words), (words, []))[1].append(rank)
    return [f"{name_ranks(ranks)} {words}" for words, ranks in told.values()]


def _line(picture: Picture, stat: Stat) -> dict[str, list[float | None]] | None:
    """Mean, lowest and highest along a tensor of one dim."""
    if picture.mean.shape[0] != 1 or picture.mean.shape[1] > _LONGEST_LINE + 2:
        return None
    middle = picture.values(stat)
    around = (picture.low, picture.high) if stat == "mean" else (middle, middle)
    return {
        name: _plain(values[0])
        for name, values in zip(("mean", "low", "high"), (middle, *around), strict=True)
    }


def _plain(values: Array) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]
