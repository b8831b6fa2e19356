"""The breakpoints of a session: set, removed, and found by the name of a function.

A name is ``attention``, ``Block.forward``, ``model.blocks[0]``. It is looked for in the source at
hand first, as of a cell that is about to define it, and then among what a worker has. A module
stands for its ``forward``, another class for its ``__init__``. What a breakpoint is, and how a
worker knows where to stop, is in breaks.py.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import torch

from ..runtime.errors import ArgumentError
from ..runtime.sources import lines_of
from ..runtime.worker import Worker, current_worker
from . import frames
from .breaks import Break, check_hits, check_log, parse_break
from .controller import DebugController, Ranks

_NAMED = re.compile(
    r"\s*(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*|\[\d+\])*)(?P<condition>\s+if\b.*)?\s*", re.DOTALL
)
_OF_CLASSES = ("forward", "__init__")


def read_name(text: str) -> tuple[str, str] | None:
    """The name and the condition (`` if x``) of a breakpoint at a function; None if it is none."""
    match = _NAMED.fullmatch(text)
    return (match["name"], match["condition"] or "") if match else None


def line_in_file(file: str, name: str) -> int | None:
    """The first line of the function of that name that a file defines; None if it does not."""
    source = "".join(lines_of(file))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = compile(source, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    known = {one.co_qualname.replace(".<locals>", ""): one for one in _within(code)}
    for full in (*(f"{name}.{method}" for method in _OF_CLASSES), name):
        if full in known and known[full].co_flags & inspect.CO_OPTIMIZED:
            return first_line(known[full])
    return None


def locate_in_frame(worker: Worker, frame: FrameType, name: str) -> tuple[str, int]:
    """Where the function of that name begins, for one that stands; for `Debugger.ask`."""
    return _place(name, frames.evaluate(frame, name))


def locate(name: str) -> tuple[str, int, str]:
    """Where the function of that name of this worker begins, or why not (a worker function)."""
    known = current_worker().namespace
    try:
        return *_place(name, eval(name, dict(known))), ""
    except ArgumentError as exc:
        return "", 0, str(exc)
    except Exception as exc:  # of an attribute of the user's, too
        return "", 0, f"the workers have no function {name} ({type(exc).__name__}: {exc})"


def first_line(code: CodeType) -> int:
    """The first line of a function's body that runs; of one on a single line, that."""
    lines = (line for *_, line in code.co_lines() if line and line > code.co_firstlineno)
    return next(lines, code.co_firstlineno)


def _place(name: str, value: Any) -> tuple[str, int]:
    code = getattr(_function(value), "__code__", None)
    if not isinstance(code, CodeType):
        raise ArgumentError(
            f"{name} is a {type(value).__name__}, with no lines of Python to stop at: name a "
            "function, a method, a class or a module"
        )
    return code.co_filename, first_line(code)


def _function(value: Any) -> Any:
    if isinstance(value, torch.nn.Module):
        return type(value).forward
    if isinstance(value, type):
        return value.forward if issubclass(value, torch.nn.Module) else value.__init__
    while isinstance(value, functools.partial):
        value = value.func
    return inspect.unwrap(getattr(value, "__func__", value))


def _within(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _within(inner)


# -- the breakpoints of a session ----------------------------------------------------------------

_NAMED_AT = f"{locate_in_frame.__module__}:{locate_in_frame.__name__}"
_ANSWER = 10.0  # seconds that a worker is given to find a function


class Breakpoints:
    """Those of one session.

    Attributes
    ----------
    lasting
        By number: of programs that begin later, too.
    own
        Those of the program that runs alone.
    """

    def __init__(self, controller: DebugController) -> None:
        self._controller = controller
        self.lasting: dict[int, Break] = {}
        self.own: dict[int, Break] = {}
        self._next = 1

    def add(
        self,
        text: str,
        file: str = "",
        ranks: Ranks = None,
        *,
        hits: str = "",
        log: str = "",
        timeout: float | None = None,
    ) -> Break:
        """Set one; see `Debugger.break_at`."""
        if hits:
            check_hits(hits)
        check_log(log)
        chosen = None if ranks is None else tuple(self._controller.ranks(ranks))
        found = self.parse(text, file or self._here(), timeout)
        found = replace(found, number=self.number(), ranks=chosen, hits=hits, log=log)
        self.lasting[found.number] = found
        self._tell_breaks()
        return found

    def clear(self, number: int | None = None) -> list[Break]:
        """Remove one, or all; those removed."""
        known = {**self.lasting, **self.own}
        if number is not None and number not in known:
            numbers = ", ".join(map(str, sorted(known))) or "none"
            raise ArgumentError(f"there is no breakpoint {number!r} (there are: {numbers})")
        gone = [known[n] for n in sorted(known) if number in (None, n)]
        for one in gone:
            self.lasting.pop(one.number, None)
            self.own.pop(one.number, None)
        self._tell_breaks()
        return gone

    def all(self) -> list[Break]:
        """Those that are set, and those of the program that runs."""
        own = self.own if self._controller.is_active else {}
        return [one for _, one in sorted({**self.lasting, **own}.items())]

    def parse(self, text: str, file: str, timeout: float | None = None) -> Break:
        """A breakpoint in words, which may be the name of a function."""
        named = read_name(text) if isinstance(text, str) else None
        if named is None:
            return parse_break(text, file, is_file=bool(file))
        name, condition = named
        line = line_in_file(file, name) if file else None
        if line is None:
            file, line = self._locate(name, timeout)
        return parse_break(f"{line}{condition}", file, is_file=True)

    def _locate(self, name: str, timeout: float | None) -> tuple[str, int]:
        """Where a function of the workers begins."""
        if not self._controller.is_active:
            found = self._controller.session.call_packed(locate, name)
            file, line, why = found.debug_get_from_remote(0, timeout)
            if why:
                raise ArgumentError(f"breakpoint: {why}")
            return file, line
        first = self._controller.paused(None)[0]
        well, place_ = self._controller.ask([first], _NAMED_AT, (name,), _ANSWER)[first]
        if not well:
            raise ArgumentError(f"breakpoint: there is no function {name}: {place_}")
        return place_[0], place_[1]

    def number(self) -> int:
        """A number for the next one."""
        self._next += 1
        return self._next - 1

    def _tell_breaks(self) -> None:
        if self._controller.is_active:
            self._controller.set_breaks(tuple(one.packed() for one in self.all()))
        with self._controller.lock:
            self._controller.has_changed()

    def _here(self) -> str:
        """The file in which workers stand; of those that run, that of their program."""
        lockstep = self._controller.lockstep
        groups = lockstep.groups() if lockstep is not None and lockstep.paused else ()
        if lockstep is not None and groups:
            return lockstep.at[groups[0][0]].here.file
        return self._controller.file if self._controller.is_active else ""
