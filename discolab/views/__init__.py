"""Describe a value on its worker in a few hundred bytes; draw it as text and HTML.

`describe` runs on each worker and returns a plain record. `dref_parts` turns the records of all
workers into a small tree of parts. `render_text` and `render_html` lower the same parts, so the
two never disagree. Nothing here moves a whole tensor, runs a collective, or raises.
"""

from .describe import describe
from .draw import draw_dref
from .dref_view import dref_parts
from .html import rank_colour, render_html
from .mesh_view import mesh_parts
from .parts import Column, Details, Grid, Line, Part, Row, Stack, Table, Text, Tile
from .text import render_text

__all__ = [
    "Column",
    "Details",
    "Grid",
    "Line",
    "Part",
    "Row",
    "Stack",
    "Table",
    "Text",
    "Tile",
    "describe",
    "draw_dref",
    "dref_parts",
    "mesh_parts",
    "rank_colour",
    "render_html",
    "render_text",
]
