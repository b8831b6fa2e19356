"""Draws what went wrong last: a numbered line for each thing known, with its place. Pure."""

from __future__ import annotations

from ...views.parts import Line, Part, Role, Text, VStack
from ..explaining import Explanation


def explanation_parts(found: Explanation) -> Part:
    """A line a fact, the first one loud if something has failed.

    Parameters
    ----------
    found
    """
    parts: list[Part] = [Line((Text("explain", "title"), Text(f" · {found.title}", "muted")))]
    for number, fact in enumerate(found.facts, 1):
        loud: Role = "error" if number == 1 and found.failed else "plain"
        spans = [Text(f"{number}. ", "muted"), Text(fact.text, loud if fact.sure else "muted")]
        if fact.place:
            spans += [Text(" · ", "muted"), Text(fact.place, "title")]
        parts.append(Line(tuple(spans)))
    if found.advice:
        parts.append(Text(found.advice, "muted"))
    return VStack(tuple(parts))
