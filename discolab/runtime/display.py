"""Values that show themselves as pictures: in a notebook, where rich prints, some in their repr.

The layers below `views` have such values too, but know nothing of pictures. `discolab` enters
`views.pictures.draw_as` in `Drawn` once, before anybody can make a value; it is not changed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeAlias

Form: TypeAlias = Literal["bundle", "text", "rich"]


class Drawn:
    """A value that a notebook and rich show as a picture; its repr is a line of its own."""

    __slots__ = ()

    draw_as: ClassVar[Callable[[Any, Form], Any] | None] = None
    """Draws a value as a mime bundle, as text or as a renderable of rich."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        if Drawn.draw_as is None:
            return {"text/plain": repr(self)}
        bundle: dict[str, str] = Drawn.draw_as(self, "bundle")
        return bundle

    def __rich__(self) -> Any:
        return repr(self) if Drawn.draw_as is None else Drawn.draw_as(self, "rich")


class Pictured(Drawn):
    """A value that is looked at and no more: its repr is the text of its picture."""

    __slots__ = ()

    def __repr__(self) -> str:
        if Drawn.draw_as is None:
            return object.__repr__(self)
        text: str = Drawn.draw_as(self, "text")
        return text
