"""Patterns for parameters' names. Pure."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from ...runtime.errors import ArgumentError

MOST_NAMES = 10  # parameters that one error lists


@lru_cache(maxsize=4096)
def matcher(pattern: str) -> Callable[[str], object]:
    """What says whether a name matches a glob, where ``*`` is dots too, or ``re:…``, as a whole.

    Raises
    ------
    ArgumentError
        If it is no regular expression.
    """
    try:
        expression = pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern)
        return re.compile(expression).fullmatch
    except (re.error, RecursionError, OverflowError) as error:
        raise ArgumentError(f"the pattern {pattern!r} is no regular expression: {error}") from None


def unknown_names(names: Sequence[str], known: Iterable[str]) -> ArgumentError:
    """The error of names that a checkpoint does not have."""
    near = difflib.get_close_matches(names[0], list(known), 3)
    mean = f"; near are {', '.join(map(repr, near))}" if near else ""
    listed = ", ".join(map(repr, names[:MOST_NAMES]))
    return ArgumentError(f"the checkpoint has no parameter {listed}{mean}")
