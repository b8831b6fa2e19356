"""Inference mode that a script leaves on.

torch ends the mode when the object that began it goes: if that happens after the script, the thread
gets back the gradient mode of the middle of that script. So each thread notes which contexts it is
in, in a `threading.local`, and the script's end leaves those that are open.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import table
from .patches import Patches
from .table import Row, Treatment


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.entered: list[weakref.ref[Any]] = []


_here = _Contexts()


@contextmanager
def inference_as_before() -> Iterator[None]:
    """At its end the calling thread leaves each `torch.inference_mode` that it has entered here."""
    before, _here.entered = _here.entered, []
    try:
        yield
    finally:
        while _here.entered:
            context = _here.entered.pop()()
            if context is not None:
                context.__exit__(None, None, None)
        _here.entered = before


def _enter_over(enter: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(enter)
    def enter_and_note(self: Any) -> None:
        enter(self)
        entered = _here.entered
        while entered and entered[-1]() is None:  # the mode ended with its object
            entered.pop()
        entered.append(weakref.ref(self))

    return enter_and_note


def _exit_over(leave: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(leave)
    def exit_and_forget(self: Any, *error: Any) -> None:
        leave(self, *error)
        entered = _here.entered
        for place in reversed(range(len(entered))):
            if entered[place]() is self:
                del entered[place]
                return

    return exit_and_forget


def _install(patches: Patches) -> None:
    patches.replace(torch.inference_mode, "__enter__", _enter_over)
    patches.replace(torch.inference_mode, "__exit__", _exit_over)


table.add(
    Row(
        state="`torch.inference_mode` that a script leaves on",
        treatment=Treatment.PER_WORKER,
        meaning="A script's end leaves it, also where the object that began it is kept: the next "
        "script and cells compute gradients again.",
        test="tests/isolation/test_programs.py::test_a_script_leaves_inference_mode",
        install=_install,
        in_own_process=True,  # a worker's thread runs one script after the other
    )
)
