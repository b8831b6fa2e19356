"""HTML that is escaped by construction: what is not `Html` by type is text, and is escaped.

An attribute or a child of `tag`, an item that is joined and a value that is formatted in are all
made printable and escaped here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from markupsafe import Markup

from ..formats import printable

_EMPTY_ELEMENTS = {"br", "img"}


class Html(Markup):
    """Safe HTML. Its `join`, `format`, ``+`` and `escape` escape whatever is not."""

    __slots__ = ()

    @classmethod
    def escape(cls, s: Any, /) -> Html:
        """Make any text safe to stand in HTML, also between quotes; HTML stays what it is."""
        return cls(_escaped(s))


def _escaped(value: object) -> str:
    if isinstance(value, Markup):
        return value
    return escape(printable(value if isinstance(value, str) else str(value)), quote=True)


def joined(pieces: Iterable[object]) -> Html:
    """Pieces of HTML or text, one after the other."""
    return Html("".join(map(_escaped, pieces)))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """An element.

    Parameters
    ----------
    name
    children
        HTML, or text.
    attributes
        By name: ``class_`` is ``class``, ``aria_label`` is ``aria-label``. None: left out.

    Examples
    --------
    >>> tag("b", "1 < 2", class_="loud", title=None)
    Html('<b class="loud">1 &lt; 2</b>')
    """
    opening = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY_ELEMENTS:
        return Html(f"<{name}{opening}>")
    return Html(f"<{name}{opening}>{''.join(map(_escaped, children))}</{name}>")
