"""What is read off a code object: its comprehensions, its loops, the variables that its lines set.

Comprehensions are frames of their own up to Python 3.11. Since 3.12 (PEP 709) the code of a list,
set or dict comprehension stands in the code around it; generator expressions are frames everywhere.
Either way a comprehension is one step: `Plan.inner` tells the tracer which line events come from
within one. The variables of a comprehension in a module or a class stand beside the namespace then,
as fast variables. `scope_of` has both. CPython 3.12 spoils them if `f_locals` is read meanwhile: as
the trace function ends they are None.

A statement of several lines begins once, too: `Plan.parts` tells where it goes on.

A loop is its first and last line, read off the jumps back in the bytecode. Trips are counted by the
times that a frame has come to the first line since it has entered the loop: of two workers in one
loop the one with fewer is behind.

A `Code` is what a recording knows of code that it meets: how often each line ran, and what it
sets.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Mapping
from types import CodeType, FrameType, MappingProxyType
from typing import Any

from ..runtime.frames import quietly

_NAMES = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_BEGINS = "LOAD_FAST_AND_CLEAR"  # saves a variable of the name that the comprehension uses
_BEFORE = (_BEGINS, "GET_ITER", "GET_AITER")  # what is run once, before the first element
_JOINS = ("STORE_", "POP_JUMP", "JUMP_IF", "TO_BOOL")
_TAKES = (  # makes one of several values, as a call; what ends a loop or a `with` does not
    "BINARY_", "BUILD_", "CALL", "COMPARE_OP", "CONTAINS_OP", "DICT_", "FORMAT_", "GET_", "IS_OP",
    "KW_NAMES", "LIST_", "LOAD_ATTR", "LOAD_METHOD", "PRECALL", "SET_UPDATE", "UNARY_",
)  # fmt: skip

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


@functools.lru_cache(maxsize=4096)
def parts_of_statements(code: CodeType) -> Mapping[int, bool]:
    """Where a statement of several lines goes on, that Python tells of as of lines that begin.

    Of a call with an argument a line Python comes to the lines of the arguments, and then once more
    to the first, for the call itself.

    Returns
    -------
    Mapping[int, bool]
        Offset of the instruction -> whether it is that return to the line where it has begun.
    """
    inner = inner_offsets(code)
    known = [
        (one, one.positions.lineno, one.positions.end_lineno or 0)
        for one in dis.get_instructions(code)
        if one.positions is not None and one.positions.lineno and one.offset not in inner
    ]
    trips = set()  # where a loop goes on
    jumps: dict[int, int] = {}  # to where -> the first from where
    for one, *_ in known:
        if one.opcode in dis.hasjrel and isinstance(one.argval, int):
            if one.argval <= one.offset:
                trips.add(one.argval)
            else:
                jumps.setdefault(one.argval, one.offset)
    parts: dict[int, bool] = {}
    for number in range(1, len(known)):
        one, line, end = known[number]
        if one.opname.startswith(_JOINS):  # its own source is one of the values, or the variable
            end = sys.maxsize
        elif not known[number + _is_keywords(one)][0].opname.startswith(_TAKES):
            continue
        if end <= line or known[number - 1][1] == line or one.offset in trips:
            continue
        begins: list[int] = []  # of other lines, on the way back to where this one was left
        past = jumps.get(one.offset, one.offset)  # what follows that may have been passed over
        for at in range(number - 1, -1, -1):
            before, earlier, _ = known[at]
            if earlier == line and before.offset <= past:
                parts |= {offset: parts.get(offset, False) for offset in begins}
                parts[one.offset] = True
                break
            if not line <= earlier <= end or before.offset in trips:
                break
            if known[at - 1][1] != earlier:
                begins.append(before.offset)
            past = min(past, jumps.get(before.offset, past))
    return parts


def _is_keywords(one: dis.Instruction) -> bool:
    """Whether an instruction is the names of a call's keywords, which come before the call."""
    return one.opname == "LOAD_CONST" and type(one.argval) is tuple


def scope_of(frame: FrameType) -> Mapping[str, Any]:
    """The variables of a frame, which are not to be changed here.

    Of a class within a comprehension those of the class are missing, and the module's are there.
    """
    own = {} if frame.f_code.co_flags & inspect.CO_OPTIMIZED else fast_variables(frame)
    if own:
        return {**frame.f_globals, **own}
    names: Mapping[str, Any] = quietly(functools.partial(getattr, frame, "f_locals"))
    return names


def fast_variables(frame: FrameType) -> dict[str, Any]:
    """Those that a comprehension has in the code of a module or a class; empty outside of it."""
    found: dict[str, Any] = {}
    if not frame.f_code.co_varnames:  # always so before 3.12
        return found
    get = ctypes.pythonapi.PyFrame_GetVar
    get.restype, get.argtypes = ctypes.py_object, (ctypes.py_object, ctypes.py_object)
    for name in frame.f_code.co_varnames:
        try:
            found[name] = get(frame, name)
        except NameError:  # it has no value now
            pass
    return found


def _ends(one: dis.Instruction) -> tuple[tuple[int, int], tuple[int, int]]:
    """Line and column of the first and of the last character of an instruction's source."""
    line, end_line, column, end_column = one.positions or (None,) * 4
    return (line or 0, column or 0), (end_line or 0, end_column or 0)


# -- loops -----------------------------------------------------------------------------------------


Loop = tuple[int, int]


@functools.lru_cache(maxsize=4096)
def loops_of(code: CodeType) -> tuple[Loop, ...]:
    """The loops of more than one line, each outer one before those in it."""
    lines: list[tuple[int, int]] = []  # offset, line
    jumps: list[tuple[int, int]] = []  # from, back to
    line = code.co_firstlineno
    for one in dis.get_instructions(code):
        if one.positions is not None and one.positions.lineno is not None:
            line = one.positions.lineno
        lines.append((one.offset, line))
        target = one.argval
        if one.opcode in dis.hasjrel and isinstance(target, int) and target <= one.offset:
            jumps.append((one.offset, target))
    found = set()
    for start, target in jumps:
        within = [line for offset, line in lines if target <= offset <= start]
        if within and min(within) < max(within):
            found.add((min(within), max(within)))
    merged: dict[int, int] = {}  # `continue` jumps back too: the longest of those to one line
    for first, last in found:
        merged[first] = max(last, merged.get(first, 0))
    return tuple(sorted(merged.items(), key=lambda loop: (loop[0], -loop[1])))


# -- lines and what they set -----------------------------------------------------------------------


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
