"""What a notebook shows of a picture: its text and its HTML."""

from __future__ import annotations

from typing import Any

from ..parts import Part
from .html import render_html
from .text import render_text


def bundle_of(part: Part) -> dict[str, str]:
    """A part as text/plain and text/html."""
    return {"text/plain": render_text(part), "text/html": render_html(part)}


class Shown:
    """A picture that was taken once, and shows as text and as HTML."""

    def __init__(self, part: Part) -> None:
        self.part = part

    def __repr__(self) -> str:
        return render_text(self.part)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        return bundle_of(self.part)
