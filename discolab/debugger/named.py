"""Breakpoints at functions, by name: ``attention``, ``Block.forward``, ``model.blocks[0]``.

A name is looked for in the source at hand first, as of a cell that is about to define it, and then
among what a worker has. A module stands for its ``forward``, another class for its ``__init__``.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from ..runtime.errors import ArgumentError
from ..runtime.worker import Worker, current_worker
from . import frames

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
    source = "".join(linecache.getlines(file))
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
    """The first line of a function's body; of one on a single line, that."""
    lines = [line for _, _, line in code.co_lines() if line and line > code.co_firstlineno]
    return min(lines, default=code.co_firstlineno)


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
