"""Syntax trees: before 3.13, Python counts how deep it is in a tree once for all threads.

Two threads in `ast.parse` at the same time (as in `inspect.getsource` of a class, and in
torch.jit) then spoil each other's count, and one gets "SystemError: AST constructor recursion depth
mismatch": https://github.com/python/cpython/issues/106905. So one thread parses at a time; `_lock`
is held for nothing else. What the garbage collector calls meanwhile may wait for another thread, so
nobody waits longer than `_PATIENCE` seconds.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from . import table
from .patches import Patches
from .table import Row, Treatment

_PATIENCE = 10.0
_lock = threading.RLock()


def _one_at_a_time(parse: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(parse)
    def parse_alone(*args: Any, **kwargs: Any) -> Any:
        lock = _lock
        held = lock.acquire(timeout=_PATIENCE)
        try:
            return parse(*args, **kwargs)
        finally:
            if held:
                lock.release()

    return parse_alone


def _install(patches: Patches) -> None:
    if sys.version_info < (3, 13):
        patches.replace(ast, "parse", _one_at_a_time)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

table.add(
    Row(
        state="`ast.parse`",
        treatment=Treatment.IN_TURNS,
        meaning="Before Python 3.13 two threads that parse at the same time spoil each other's "
        "count of the depth, a SystemError; so one thread parses at a time.",
        test="tests/isolation/test_programs.py::test_workers_parse_at_the_same_time",
        install=_install,
        library="Python",
    )
)
