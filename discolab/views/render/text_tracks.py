"""Lowers `Tracks` to lines of text: a character for each of 60 pieces of the time. Pure."""

from __future__ import annotations

from ..parts import Track, Tracks

_WIDTH = 60
_IDLE, _BUSY = "·", "█"
_MARKS = {"busy": _BUSY, "move": "▒", "wait": "░", "stopped": "x", "failed": "!"}
_ORDER = tuple(_MARKS)  # what comes later is drawn over what came before
_SMALLEST = 0.5  # of a piece that a stretch must cover to be drawn; failures always are
LEGEND = f"{_BUSY} busy  ░ waiting for others  ▒ in a collective  {_IDLE} idle"


def track_lines(tracks: Tracks) -> list[str]:
    """Each worker's time, between its ticks and a line that says what the characters mean."""
    width = max((len(str(track.rank)) for track in tracks.tracks), default=1)
    lines = [f"{track.rank:>{width}} {_drawn(track)}" for track in tracks.tracks]
    words = [words for _, words in tracks.ticks]
    if len(words) > 1:
        lines.append(" " * (width + 1) + words[0] + words[-1].rjust(_WIDTH - len(words[0])))
    marks = "".join("".join(line) for line in lines)
    more = [f"{_MARKS[look]} {look}" for look in ("stopped", "failed") if _MARKS[look] in marks]
    return [*lines, "  ".join([LEGEND, *more])]


def _drawn(track: Track) -> str:
    line = [_IDLE] * _WIDTH
    stretches = [stretch for row in track.rows for stretch in row if stretch.look in _MARKS]
    stretches.sort(key=lambda stretch: _ORDER.index(stretch.look))
    for look in _ORDER:
        covered = [0.0] * _WIDTH
        for stretch in stretches:
            if stretch.look == look:
                _cover(covered, stretch.start * _WIDTH, stretch.end * _WIDTH)
        least = 0.0 if look in ("stopped", "failed") else _SMALLEST
        for place, part in enumerate(covered):
            if part > 0 and part >= least:
                line[place] = _MARKS[look]
    return "".join(line)


def _cover(covered: list[float], start: float, end: float) -> None:
    """Add how much of each piece lies between `start` and `end`, both in pieces."""
    end = max(end, start + 1e-9)
    for place in range(max(0, int(start)), min(_WIDTH, int(end) + 1)):
        covered[place] += max(0.0, min(end, place + 1) - max(start, place))
