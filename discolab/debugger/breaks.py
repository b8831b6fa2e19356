"""Breakpoints: read from what a user types, carried to the workers, looked up there by line.

`parse_break` runs on the controller, where the source is; it finds the file and refuses a line
that can't be. A worker's `BreakTable` is replaced on the thread that hears of it, and read by the
worker's own.
"""

from __future__ import annotations

import ast
import functools
import linecache
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from types import CodeType, MappingProxyType
from typing import Any

from ..runtime.errors import ArgumentError
from ..runtime.failures import name_ranks
from ..runtime.sources import display_name, installed_path, is_cell, lines_of, place

_HERE = re.compile(r"(?P<line>\d+)(?:\s+if\b(?P<condition>.*))?", re.DOTALL)
_THERE = re.compile(
    r"(?P<file>.+?)(?::|, line )\s*(?P<line>\d+)(?:\s+if\b(?P<condition>.*))?", re.DOTALL
)
_HITS = re.compile(r"\s*(==|>=|<=|>|<|%)?\s*(\d+)\s*")
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "%": lambda hit, every: hit % every == 0,
}
_SHOWN = re.compile(r"\{([^{}]*)\}")
_FORMS = "LINE, FILE:LINE or a function's name, and maybe: if CONDITION"


@dataclass(frozen=True)
class Break:
    """A breakpoint.

    Attributes
    ----------
    number
        By which it is named.
    file, line
        The file as code objects name it, or the last parts of its path.
    condition
        An expression; "" for none.
    ranks
        The workers on which it counts, None for all. The others come to it only to meet them.
    hits
        At which of the times that it would stop a worker it does: ``3``, ``>= 3``, ``% 10`` for
        each tenth; "": at all.
    log
        What it prints instead of stopping, with values of expressions in braces; "": it stops.
    """

    number: int
    file: str
    line: int
    condition: str = ""
    ranks: tuple[int, ...] | None = None
    hits: str = ""
    log: str = ""

    def __str__(self) -> str:
        condition = f" if {self.condition}" if self.condition else ""
        whose = "" if self.ranks is None else f" on {name_ranks(self.ranks)}"
        hits = f", hit {self.hits}" if self.hits else ""
        log = f", logs {self.log!r}" if self.log else ""
        return f"{place(self.file, self.line)}{condition}{whose}{hits}{log}"

    def is_in(self, filename: str) -> bool:
        """Whether it is in the source file of that name."""
        file = self.file
        if file == filename or (is_cell(filename) and display_name(filename) == file):
            return True
        if os.path.isabs(file):  # an installed package may be in another folder on another host
            inner = installed_path(file)
            return inner != file and inner == installed_path(filename)
        return filename.replace("\\", "/").endswith("/" + file.replace("\\", "/"))

    def packed(self) -> tuple[Any, ...]:
        """For a line; `break_of` undoes it."""
        return astuple(self)


def break_of(packed: Any) -> Break:
    """What `Break.packed` has made."""
    number, file, line, condition, ranks, hits, log = packed
    return Break(number, file, line, condition, None if ranks is None else tuple(ranks), hits, log)


# -- on the worker -------------------------------------------------------------------------------

_NONE: Mapping[int, tuple[Break, ...]] = MappingProxyType({})


class BreakTable:
    """The breakpoints of one worker.

    Attributes
    ----------
    version
        Changes whenever they do.
    """

    def __init__(self) -> None:
        self.version = 0
        self._breaks: tuple[Break, ...] = ()

    def __iter__(self) -> Iterator[Break]:
        return iter(self._breaks)

    def replace(self, packed: Iterable[Any]) -> None:
        """Have these, as `Break.packed` makes them, and no others."""
        breaks = tuple(map(break_of, packed))
        if breaks != self._breaks:
            self._breaks = breaks
            self.version += 1

    def of(self, code: CodeType) -> Mapping[int, tuple[Break, ...]]:
        """Line -> breakpoints there, of the lines of one code object, those within it left out."""
        found: dict[int, tuple[Break, ...]] = {}
        for one in self._breaks:
            if one.is_in(code.co_filename) and any(n == one.line for *_, n in code.co_lines()):
                found[one.line] = (*found.get(one.line, ()), one)
        return found or _NONE


@functools.lru_cache(maxsize=256)
def compiled(condition: str) -> CodeType:
    """The code of a condition."""
    return compile(condition, "<condition>", "eval")


def is_hit(hits: str, count: int) -> bool:
    """Whether a hit condition holds at the `count`-th time."""
    match = _HITS.fullmatch(hits)
    return match is None or _COMPARED[match[1] or "=="](count, int(match[2]))


def as_f_string(expression: str) -> str:
    """What stands in braces in a log, as an expression: with a format, as ``{loss:.3}``, too."""
    return f"f'''{{{expression}}}'''"


def log_text(log: str, value_of: Callable[[str], object]) -> str:
    """The message of a logpoint, with each ``{expression}`` replaced by what `value_of` gives."""
    return _SHOWN.sub(lambda match: str(value_of(match[1])), log)


# -- on the controller ---------------------------------------------------------------------------


def check_hits(hits: str) -> None:
    """Raise an ArgumentError if this is no hit condition."""
    match = _HITS.fullmatch(hits)
    if match is None or (match[1] == "%" and not int(match[2])):
        raise ArgumentError(f"the hit condition {hits!r} can't be read: write 3, >= 3 or % 10")


def check_log(log: str) -> None:
    """Raise an ArgumentError if an expression in the message of a logpoint can't be compiled."""
    for expression in _SHOWN.findall(log):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(as_f_string(expression), "<log>", "eval")
        except (SyntaxError, ValueError) as exc:
            why = exc.msg if isinstance(exc, SyntaxError) else str(exc)
            raise ArgumentError(f"{{{expression}}} in a log can't be compiled: {why}") from None


def parse_break(text: str, default_file: str | None = None, *, is_file: bool = False) -> Break:
    """Read a breakpoint: ``12 if loss > 9``, ``model.py:30``, ``Cell In[3]:12``.

    Parameters
    ----------
    text
        A line, or a file and a line, and maybe a condition. Of a path the last parts are enough.
    default_file
        The file of a line alone.
    is_file
        Whether `default_file` is as code objects have it: of cells several may have one name.

    Raises
    ------
    ArgumentError
        If it can't be read, there is no such file or line, no code is on the line, or the condition
        can't be compiled.
    """
    match = _HERE.fullmatch(text.strip()) or _THERE.fullmatch(text.strip())
    if match is None:
        raise ArgumentError(f"can't read the breakpoint {text!r}: write {_FORMS}")
    parts = match.groupdict()
    named = (parts.get("file") or default_file or "").strip()
    if not named:
        raise ArgumentError(f"breakpoint {text!r} is in which file? Write FILE:{parts['line']}")
    condition = parts["condition"]
    if condition is not None:
        condition = condition.strip()
        _check_condition(condition, text)
    own = is_file and not parts.get("file")
    file, line = named if own else find_file(named), int(parts["line"])
    _check_line(file, line)
    return Break(0, file, line, condition or "")


def find_file(name: str) -> str:
    """The file name, as code objects have it, that stands for a cell, a path or a path's end.

    Raises
    ------
    ArgumentError
        If there is none, or there are several.
    """
    known = list(linecache.cache)
    cells = [file for file in known if name in (file, _cell_name(file))]
    if cells:
        return cells[-1]
    path = os.path.expanduser(name)
    for folder in ("", *sys.path):
        full = os.path.abspath(os.path.join(folder, path))
        if os.path.isfile(full):
            return full
    # past what a module that imports its parts when they are asked for does
    loaded = [getattr(m, "__dict__", {}).get("__file__") for m in sys.modules.copy().values()]
    files = {file for file in (*known, *loaded) if isinstance(file, str)}
    end = "/" + name.replace("\\", "/")
    found = sorted(file for file in files if file.replace("\\", "/").endswith(end))
    if not found:
        raise ArgumentError(f"no source file {name!r} is known here: give its whole path")
    if len(found) > 1:
        listed = ", ".join(found[:4]) + (", …" if len(found) > 4 else "")
        raise ArgumentError(f"{name!r} is the end of several paths: {listed}; write more of it")
    return found[0]


def lines_with_code(file: str) -> list[int]:
    """The lines of a file on which a program can stop, in order.

    Raises
    ------
    ArgumentError
        If it can't be compiled.
    """
    try:
        source = "".join(lines_of(file))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            code = compile(source, file, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError) as exc:
        raise ArgumentError(f"{display_name(file)} can't be compiled: {exc}") from None
    return sorted(set(_lines(code)))


def _lines(code: CodeType) -> Iterator[int]:
    for _, _, line in code.co_lines():
        if line:
            yield line
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _lines(inner)


def _check_line(file: str, line: int) -> None:
    source, name = lines_of(file), display_name(file)
    if not source:
        raise ArgumentError(f"the source of {name} can't be read")
    if not 1 <= line <= len(source):
        raise ArgumentError(f"{name} has no line {line}: its lines are 1 to {len(source)}")
    lines = lines_with_code(file)
    if line in lines:
        return
    later = [one for one in lines if one > line]
    if later:
        hint = f"the next line with code is {later[0]}"
    else:
        hint = f"the last line with code is {lines[-1]}" if lines else "no line of it has any"
    text = source[line - 1].strip()
    raise ArgumentError(f"no code is on line {line} of {name} ({text or 'an empty line'}): {hint}")


def _check_condition(condition: str, text: str) -> None:
    if not condition:
        raise ArgumentError(f"breakpoint {text!r} has no condition after its 'if'")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled(condition)
    except (SyntaxError, ValueError) as exc:
        why = exc.msg if isinstance(exc, SyntaxError) else str(exc)
        hint = "; to compare write ==" if re.search(r"[^=<>!:]=(?!=)", condition) else ""
        raise ArgumentError(f"the condition {condition!r} can't be compiled: {why}{hint}") from None


def _cell_name(file: str) -> str | None:
    return display_name(file) if is_cell(file) else None
