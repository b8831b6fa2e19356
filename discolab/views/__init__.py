"""Describe a value on its worker in a few hundred bytes; draw it as text and HTML.

`describe` runs on each worker and returns a plain record. `dref_parts` turns the records of all
workers into a small tree of parts. `render_text` and `render_html` lower the same parts, so the
two never disagree. Nothing here moves a whole tensor, runs a collective, or raises.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .describe import describe
from .draw import draw_dref
from .dref_view import dref_parts
from .html import rank_colour, render_html
from .mesh_view import mesh_parts
from .parts import (
    Box,
    Column,
    Details,
    Grid,
    Lane,
    Lanes,
    Line,
    Part,
    Row,
    Stack,
    Table,
    Text,
    Tile,
)
from .text import render_text

if TYPE_CHECKING:
    from .before_after import before_after
    from .doctor_view import doctor_parts

_LATER = {"before_after": ".before_after", "doctor_parts": ".doctor_view"}


def __getattr__(name: str) -> Any:
    """What few sessions use is imported when it is first used."""
    if name in _LATER:
        found = getattr(importlib.import_module(_LATER[name], __name__), name)
        globals()[name] = found  # the import has left the module of that name there
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Box",
    "Column",
    "Details",
    "Grid",
    "Lane",
    "Lanes",
    "Line",
    "Part",
    "Row",
    "Stack",
    "Table",
    "Text",
    "Tile",
    "before_after",
    "describe",
    "doctor_parts",
    "draw_dref",
    "dref_parts",
    "mesh_parts",
    "rank_colour",
    "render_html",
    "render_text",
]
