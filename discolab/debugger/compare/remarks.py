"""What a comparison remarks besides the first difference. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from .blame import rejoined
from .judging import Pair
from .results import Finding, Point

_MOST_SETTINGS, _MOST_DETOURS = 8, 4


def settings_notes(
    paths: Iterable[str], settings: Callable[[str], list[str]], known: Sequence[str]
) -> list[str]:
    """Which modules are set up otherwise, where nothing else may show it; not what is `known`."""
    told: dict[str, list[str]] = {}
    for path in paths:
        for words in settings(path):
            found = told.setdefault(words, [])
            if not any(not above or path.startswith(f"{above}.") for above in found):
                found.append(path)
    notes = []
    for words, found in told.items():
        if words not in known:
            more = f" and {len(found) - 4} more" if len(found) > 4 else ""
            names = ", ".join(path or "the model" for path in found[:4])
            notes.append(f"{names}{more}: {words}")
    return notes[:_MOST_SETTINGS]


def value_notes(pairs: Mapping[str, Pair], points: Iterable[Point]) -> list[str]:
    """Other dtypes than the reference's, and NaN on both sides."""
    dtypes: dict[tuple[str, str], list[str]] = {}
    unknown: list[str] = []
    for point in points:
        pair = pairs.get(point.key)
        if pair is None or point.problem:
            continue
        theirs = sorted({str(fact[2]) for fact in pair.held.values()} - {point.dtype})
        if theirs and not any(name.startswith("python ") for name in (*theirs, point.dtype)):
            dtypes.setdefault((", ".join(theirs), point.dtype), []).append(point.words)
        if any(row["nan"] for row in point.rows.values()):
            unknown.append(point.words)
    notes = [
        f"dtypes differ: workers {theirs}, reference {mine}: {_few(words)}"
        for (theirs, mine), words in dtypes.items()
    ]
    if unknown:
        notes.append(f"NaN on both sides, which says nothing of their values: {_few(unknown)}")
    return notes


def _few(words: Sequence[str]) -> str:
    return ", ".join(words[:2]) + (f" and {len(words) - 2} more" if len(words) > 2 else "")


def detour_notes(runs: Iterable[Sequence[Point]], first: Finding | None) -> list[str]:
    """Where the workers do something in another way that makes no difference in the end.

    Parameters
    ----------
    runs
        The points of forward, and those of backward.
    first
        Behind it all is different.
    """
    found: dict[str, list[str]] = {}
    end = None if first is None else first.point
    if end is not None and end.kind in ("parameter", "buffer") and not end.gradient:
        return []
    for points in runs:
        for number, point in enumerate(points):
            if end is not None and point.key == end.key:
                return _detours(found)
            later = rejoined(points, number)
            if later is not None:
                found.setdefault(later.words, []).append(point.words)
    return _detours(found)


def _detours(found: dict[str, list[str]]) -> list[str]:
    notes = []
    for later, words in list(found.items())[:_MOST_DETOURS]:
        more = f" and {len(words) - 2} more" if len(words) > 2 else ""
        differ = "differ" if len(words) > 1 else "differs"
        notes.append(
            f"another way, the same in the end: {', '.join(words[:2])}{more} {differ}, "
            f"the {later} agrees"
        )
    return notes
