"""Parameters whose names differ in a number only, as those of layers, told in one line. Pure."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from ...views.formats import format_ranks

_NUMBER = re.compile(r"(?:^|(?<=[._]))\d+(?=$|[._])")


@dataclass(frozen=True, slots=True)
class Fold:
    """Parameters that are told together.

    Attributes
    ----------
    label
        What they are called: a name, or one with ``*`` or ``{0-15}`` in the place of numbers.
    names
        Theirs, in order.
    """

    label: str
    names: tuple[str, ...]


def fold(kinds: Mapping[str, Hashable]) -> list[Fold]:
    """Put names together that differ in numbers only and are of one kind.

    Parameters
    ----------
    kinds
        For each name what it must have in common with others; in the order of the result.

    Examples
    --------
    >>> [f.label for f in fold({"h.0.w": 1, "h.0.b": 2, "h.1.w": 1, "h.1.b": 2, "out": 1})]
    ['h.*.w', 'h.*.b', 'out']
    >>> [f.label for f in fold({"h.0.w": 1, "h.1.w": 1, "h.2.w": 2, "h.3.w": 2})]
    ['h.{0,1}.w', 'h.{2,3}.w']
    """
    every: dict[str, list[str]] = {}
    alike: dict[tuple[str, Hashable], list[str]] = {}
    for name, kind in kinds.items():
        template = _NUMBER.sub("*", name)
        every.setdefault(template, []).append(name)
        alike.setdefault((template, kind), []).append(name)
    return [
        Fold(_label(names, every[template]), tuple(names)) for (template, _), names in alike.items()
    ]


def fold_names(names: Sequence[str]) -> list[str]:
    """Labels of names that need nothing else in common."""
    return [
        found.label + (f" ×{len(found.names)}" if len(found.names) > 1 else "")
        for found in fold(dict.fromkeys(names))
    ]


def _label(names: Sequence[str], every: Sequence[str]) -> str:
    """What some of the names of one template are called."""
    if len(names) == 1:
        return names[0]
    here = [set(column) for column in zip(*map(_numbers, names), strict=True)]
    there = [set(column) for column in zip(*map(_numbers, every), strict=True)]
    words = [
        str(next(iter(some))) if len(some) == 1 else "*" if some == all_ else _set(some)
        for some, all_ in zip(here, there, strict=True)
    ]
    found = iter(words)
    return _NUMBER.sub(lambda _: next(found), names[0])


def _numbers(name: str) -> list[int]:
    return [int(digits) for digits in _NUMBER.findall(name)]


def _set(numbers: set[int]) -> str:
    return "{" + format_ranks(numbers) + "}"
