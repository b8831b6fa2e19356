"""Formatting of numbers, sizes, shapes, rank sets and hostile strings, shared by all views.

Text and HTML both print what these functions return, so the two cannot disagree. Everything
here is pure and deterministic; no function raises for any value of its declared type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_BLOCKS = "▁▂▃▄▅▆▇█"
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def format_number(value: object) -> str:
    """Write a number with four significant digits; integers are written in full.

    Parameters
    ----------
    value : object
        An int, float or bool. None gives the empty string, a string is passed through.

    Returns
    -------
    str

    Examples
    --------
    >>> format_number(1234.5678), format_number(-0.0), format_number(7), format_number(None)
    ('1235', '0', '7', '')
    >>> format_number(float("nan")), format_number(1e-9)
    ('nan', '1e-09')
    """
    if value is None:
        return ""
    if isinstance(value, float):
        if math.isfinite(value) and 1000 <= abs(value) < 1e6:
            return f"{value:.0f}"
        return "0" if value == 0 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"int of {value.bit_length()} bits"
    return str(value)


def format_bytes(count: object) -> str:
    """Write a number of bytes with four significant digits and a binary unit.

    Examples
    --------
    >>> format_bytes(48), format_bytes(1536), format_bytes(16 * 2**20), format_bytes(None)
    ('48 B', '1.5 KiB', '16 MiB', '')
    """
    if not isinstance(count, int | float):
        return ""
    if abs(count) < 1024 or not math.isfinite(count):
        return f"{format_number(count)} B"
    size, unit = count / 1024, 0
    while abs(size) >= 1023.95 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """Write a duration in seconds or, below one, in milliseconds.

    Examples
    --------
    >>> format_seconds(3.21), format_seconds(0.0123), format_seconds(0.00042)
    ('3.2 s', '12 ms', '0.42 ms')
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.2g} ms" if seconds < 0.0995 else f"{seconds * 1000:.0f} ms"


def format_shape(shape: object) -> str:
    """Write a shape as ``[2, 3]``; an unknown shape as ``[?]``.

    Examples
    --------
    >>> format_shape([2, 3]), format_shape(()), format_shape(None)
    ('[2, 3]', '[]', '[?]')
    """
    if not isinstance(shape, list | tuple):
        return "[?]"
    return "[" + ", ".join(format_number(size) for size in shape) + "]"


def format_ranks(ranks: Iterable[int]) -> str:
    """Write a set of ranks with runs of three or more folded.

    Examples
    --------
    >>> format_ranks([3, 0, 1, 2, 6, 7])
    '0-3,6,7'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words: list[str] = []
    for first, last in runs:
        if last - first >= 2:
            words.append(f"{first}-{last}")
        else:
            words.extend(str(rank) for rank in range(first, last + 1))
    return ",".join(words)


def format_workers(ranks: Sequence[int]) -> str:
    """Name workers in a sentence.

    Examples
    --------
    >>> format_workers([2]), format_workers([0, 1, 2])
    ('worker 2', 'workers 0-2')
    """
    return ("worker " if len(set(ranks)) == 1 else "workers ") + format_ranks(ranks)


def format_bars(heights: Iterable[float]) -> str:
    """Write heights from 0 to 1 as block characters.

    Examples
    --------
    >>> format_bars([0, 0.5, 1])
    '▁▅█'
    """
    return "".join(_BLOCKS[min(max(int(height * 8), 0), 7)] for height in heights)


def cut(text: str, limit: int) -> str:
    """Shorten `text` to at most `limit` characters; an ellipsis says that something is gone."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


def strip_addresses(text: str) -> str:
    """Remove `` at 0x7f…``, which differs from run to run, from a repr.

    Examples
    --------
    >>> strip_addresses("<Foo object at 0x7f00beef>")
    '<Foo object>'
    """
    return _ADDRESS.sub("", text)


def printable(text: str) -> str:
    r"""Replace control, bidirectional, surrogate and other unprintable characters by escapes.

    Terminal colours, line breaks and text-reordering marks in a name or a repr thus show as what
    they are.

    Examples
    --------
    >>> print(printable("a\x1b[31m\nb"))
    a\x1b[31m\nb
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
