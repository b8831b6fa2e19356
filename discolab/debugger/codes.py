"""What a recording knows of the code that it meets: how often each line ran, and what it sets."""

from __future__ import annotations

import dis
from types import CodeType

from .comprehensions import inner_offsets

_OPTIMIZED = 1  # of `co_flags`: a function's code
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")


class Code:
    """What is known of a code object.

    Attributes
    ----------
    code
    counts
        Line -> how often it has run; 0 -> how often the code was begun.
    sets
        Line -> the variables that it always gives a value, if it does not fail.
    is_function
    outside
        Of a function, names that may be global variables.
    makes
        Those of them that it gives values.
    """

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.counts: dict[int, int] = {}
        self.sets = _lines_that_set(code)
        self.is_function = bool(code.co_flags & _OPTIMIZED)
        self.outside = code.co_names if self.is_function else ()
        named = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        self.makes = {name for names in self.sets.values() for name in names} - named


def _lines_that_set(code: CodeType) -> dict[int, set[str]]:
    """The lines that assign variables; the heads of loops, which may not, are none."""
    found: dict[int, set[str]] = {}
    loops = set()
    inner = inner_offsets(code)
    for one in dis.get_instructions(code):
        if one.offset in inner:
            continue
        line = one.positions.lineno if one.positions is not None else None
        if line is None:
            continue
        if one.opname in ("FOR_ITER", "END_ASYNC_FOR"):
            loops.add(line)
        elif one.opname.startswith(_STORES):
            # newer Pythons join two instructions to one
            several = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            found.setdefault(line, set()).update(several[: 1 + one.opname.count("_STORE_")])
    return {line: names for line, names in found.items() if line not in loops}
