"""Describe a value on its worker in a kilobyte or two; draw it as text and HTML.

`describe` runs on each worker and returns a plain record. `dref_parts` turns the records of all
workers into a small tree of parts. `render_text` and `render_html` lower the same parts, so the
two never disagree. Nothing here moves a whole tensor, runs a collective, or raises.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .doctor_view import doctor_parts
from .dref.view import draw_dref, dref_parts, view
from .facts.describe import describe
from .parts import (
    Badge,
    Bars,
    Beside,
    Box,
    Card,
    Cell,
    Column,
    Details,
    Grid,
    Heat,
    HStack,
    Lane,
    Lanes,
    Legend,
    Line,
    Part,
    Row,
    Stack,
    Table,
    Text,
    Tile,
    VStack,
)
from .pictures import Shown
from .registers import facts as _probes  # noqa: F401 - loaded with discolab, see runtime/services.py
from .render.html import render_html
from .render.style import rank_colour
from .render.text import render_text
from .restart_view import restart_parts as _restart_parts  # noqa: F401 - it registers itself
from .session_view import mesh_parts, session_parts

if TYPE_CHECKING:
    from .before_after import before_after
    from .difference import Comparison
    from .render.rich import render_rich

_LATER = {
    "Comparison": ".difference",
    "before_after": ".before_after",
    "render_rich": ".render.rich",
}


def __getattr__(name: str) -> Any:
    """What few sessions use is imported when it is first used."""
    if name in _LATER:
        found = getattr(importlib.import_module(_LATER[name], __name__), name)
        globals()[name] = found  # the import has left the module of that name there
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Badge",
    "Bars",
    "Beside",
    "Box",
    "Card",
    "Cell",
    "Column",
    "Comparison",
    "Details",
    "Grid",
    "HStack",
    "Heat",
    "Lane",
    "Lanes",
    "Legend",
    "Line",
    "Part",
    "Row",
    "Shown",
    "Stack",
    "Table",
    "Text",
    "Tile",
    "VStack",
    "before_after",
    "describe",
    "doctor_parts",
    "draw_dref",
    "dref_parts",
    "mesh_parts",
    "rank_colour",
    "render_html",
    "render_rich",
    "render_text",
    "view",
    "session_parts",
]
