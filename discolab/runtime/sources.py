"""What to call a source file in front of a person: ``Cell In[3]`` rather than a hash.

`notebook` adds a namer; the list is only ever appended to.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Callable

_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

Paint = Callable[[str, str], str]
"""Colours a text by its role: ``place``, ``function``, ``arrow``, ``number``, ``code``, ``error``
or ``folded``."""

namers: list[Callable[[str], str | None]] = []


def display_name(filename: str) -> str:
    """The name of a cell, or `filename` as it is."""
    for namer in namers:
        name = namer(filename)
        if name is not None:
            return name
    return filename


def is_cell(filename: str) -> bool:
    """Whether `filename` stands for a notebook cell."""
    return any(namer(filename) is not None for namer in namers)


def is_installed(filename: str) -> bool:
    """Whether a file belongs to an installed package, not to the user's program."""
    return _INSTALLED.search(filename) is not None


def is_own_file(filename: str) -> bool:
    """Whether a source file is one of discolab's."""
    return filename.startswith(_PACKAGE)


def plain(_role: str, text: str) -> str:
    """The `Paint` without colours."""
    return text


def installed_path(filename: str) -> str:
    """``torch/file.py`` for a file of an installed package; else the file name as it is."""
    return _INSTALLED.sub("", filename)


def place(filename: str, line: int | None) -> str:
    """``Cell In[3], line 4`` or ``file.py:4``; of an installed package ``torch/file.py:4``."""
    if is_cell(filename):
        return f"{display_name(filename)}, line {line}"
    return f"{installed_path(filename)}:{line}"


def lines_of(filename: str) -> list[str]:
    """The lines of a source file as it is now, each with its end: of a module that was edited and
    reloaded, Python's `linecache` alone gives those from before.
    """
    linecache.checkcache(filename)
    return linecache.getlines(filename)


def excerpt(filename: str, line: int | None, around: int, paint: Paint = plain) -> list[str]:
    """Source lines around `line`, numbered, the line itself marked with an arrow.

    An interrupt can land where Python knows no line, and code that was given to `exec` has no
    source: nothing then.
    """
    found: list[str] = []
    lines = lines_of(filename) if line is not None else []
    if line is None or not 1 <= line <= len(lines):
        return found
    for number in range(max(1, line - around), min(line + around, len(lines)) + 1):
        text = lines[number - 1].rstrip()
        if text or number == line:
            mark = paint("arrow", "---->") if number == line else "     "
            words = paint("code", text) if text else ""
            found.append(f"{mark} {paint('number', f'{number:>3}')} {words}".rstrip())
    return found
