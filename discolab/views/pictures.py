"""From a value to what shows it: its picture as parts, these as text and HTML or for rich.

`picture_of` is the one place that says what the picture of a value is. A value with a `part` is
drawn by that; each view registers itself for the values that have none.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from ..runtime.display import Form, Pictured
from ..runtime.errors import DiscoError
from .parts import Part, Text
from .render.html import render_html
from .render.text import render_text


@singledispatch
def picture_of(value: Any) -> Part:
    """The picture of a value.

    Raises
    ------
    DiscoError
        If it can't be drawn now, such as a DRef of a closed session.
    """
    part: Part = value.part
    return part


def draw_as(value: Any, form: Form) -> Any:
    """What a notebook, a terminal or rich shows of a value; it is entered in `runtime.display`.

    A value that has no picture now, such as a DRef of a closed session, is shown as its repr.
    """
    if form == "text":
        return render_text(picture_of(value))
    try:
        part = picture_of(value)
    except DiscoError:
        if form == "bundle":
            return {"text/plain": repr(value)}
        part = Text(repr(value))
    if form == "bundle":
        return bundle_of(part)
    from .render.rich import render_rich  # rich is there: it is what asks

    return render_rich(part)


def bundle_of(part: Part) -> dict[str, str]:
    """A part as text/plain and text/html."""
    return {"text/plain": render_text(part), "text/html": render_html(part)}


class Shown(Pictured):
    """A picture that was taken once, and shows as text and as HTML."""

    def __init__(self, part: Part) -> None:
        self.part = part
