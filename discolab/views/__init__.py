"""Describe a value on its worker in a few hundred bytes; draw it as text and HTML.

`describe` runs on each worker and returns a plain record. `dref_parts` turns the records of all
workers into a small tree of parts. `render_text` and `render_html` lower the same parts, so the
two never disagree. Nothing here moves a whole tensor, runs a collective, or raises.
"""

from .before_after import before_after
from .describe import describe
from .doctor_view import doctor_parts
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
