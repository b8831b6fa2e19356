"""Where the loops of a code object are: as lines, read off the jumps back in its bytecode.

A loop is its first and last line. Trips are counted by the times that a frame has come to the first
line since it has entered the loop: of two workers in one loop the one with fewer is behind.
"""

from __future__ import annotations

import dis
import functools
from types import CodeType

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
