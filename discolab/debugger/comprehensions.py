"""Comprehensions, which are frames of their own up to Python 3.11, and parts of a frame afterwards.

Since 3.12 (PEP 709) the code of a list, set or dict comprehension stands in the code around it.
Generator expressions are frames everywhere. Either way a comprehension is one step: `Plan.inner`
tells the tracer which line events come from within one.
"""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Mapping
from types import CodeType, MappingProxyType

_NAMES = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_BEGINS = "LOAD_FAST_AND_CLEAR"  # saves a variable of the name that the comprehension uses
_BEFORE = (_BEGINS, "GET_ITER", "GET_AITER")  # what is run once, before the first element

_NONE: Mapping[int, bool] = MappingProxyType({})


def is_comprehension(code: CodeType) -> bool:
    """Whether a code object is a comprehension's or a generator expression's."""
    return code.co_name in _NAMES


@functools.lru_cache(maxsize=4096)
def inner_offsets(code: CodeType) -> Mapping[int, bool]:
    """The instructions of the comprehensions that stand in a code object.

    Returns
    -------
    Mapping[int, bool]
        Offset of the instruction -> whether only comprehensions have code on its line. If others
        have, too, a breakpoint of the line stops there, once, and not for each element.
    """
    if _BEGINS not in dis.opmap or dis.opmap[_BEGINS] not in code.co_code[::2]:
        return _NONE
    instructions = [one for one in dis.get_instructions(code) if one.positions is not None]
    inner: dict[int, int] = {}  # offset -> line
    whole = set()  # the positions of comprehensions
    for number, one in enumerate(instructions):
        if one.opname != _BEGINS:
            continue
        first, last = _ends(one)
        if last[1]:  # else Python was told to keep no columns (-X no_debug_ranges)
            whole.add(one.positions)
        for other in itertools.islice(instructions, number + 1, None):
            begin, end = _ends(other)
            if not (first <= begin and end <= last):
                break
            inner[other.offset] = begin[0]
    for one in instructions:  # what puts the saved variables back
        if one.positions in whole and one.opname not in _BEFORE:
            inner[one.offset] = _ends(one)[0][0]
    outer = {_ends(one)[0][0] for one in instructions if one.offset not in inner}
    return {offset: line not in outer for offset, line in inner.items()}


def _ends(one: dis.Instruction) -> tuple[tuple[int, int], tuple[int, int]]:
    """Line and column of the first and of the last character of an instruction's source."""
    line, end_line, column, end_column = one.positions or (None,) * 4
    return (line or 0, column or 0), (end_line or 0, end_column or 0)
