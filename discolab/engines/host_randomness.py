"""Python's and numpy's random numbers: each worker thread has its own state, as a process would.

`random.seed(0)` on four threads would seed one stream that all of them then draw from. While
`install`ed, the functions of the module `random` and those of `numpy.random` that draw from
numpy's legacy state look first who calls; a worker's states are made at its first draw and
kept in `_states`, to which only that worker's threads write their own entry.

Not covered: names bound before the first session (``from random import shuffle``), and libraries
that hold numpy's state itself. `random.Random` and `numpy.random.default_rng` are one's own anyway.
"""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy.random

from ..runtime.worker import Worker, current_worker_or_none

_states: weakref.WeakKeyDictionary[Worker, dict[str, Any]] = weakref.WeakKeyDictionary()
_undo: list[tuple[Any, str, Any]] = []


def install() -> None:
    """Have the functions look who calls; does nothing when they already do."""
    if _undo:
        return
    _replace_methods_of(random, vars(random)["_inst"], random.Random)
    legacy = numpy.random.mtrand._rand
    functions = ("seed", "ranf", "sample")
    _replace_methods_of(numpy.random, legacy, numpy.random.RandomState, functions)


def uninstall() -> None:
    """Put the functions back; what others replaced since is left alone."""
    while _undo:
        module, name, original = _undo.pop()
        if getattr(getattr(module, name), "discolab_wraps", None) is original:
            setattr(module, name, original)


def _replace_methods_of(
    module: Any, shared: Any, make: Callable[[], Any], also: tuple[str, ...] = ()
) -> None:
    """Replace the functions of `module` that are methods of its one `shared` state."""
    for name, original in list(vars(module).items()):
        if getattr(original, "__self__", None) is shared or name in also:
            wrapper = _of_worker(module.__name__, make, name, original)
            _undo.append((module, name, original))
            setattr(module, name, wrapper)


def _of_worker(module: str, make: Callable[[], Any], name: str, original: Any) -> Any:
    aliases = {"ranf": "random_sample", "sample": "random_sample"}
    method = aliases.get(name, name) if module == "numpy.random" else name

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        worker = current_worker_or_none()
        if worker is None:
            return original(*args, **kwargs)
        states = _states.setdefault(worker, {})
        state = states.get(module)
        if state is None:
            state = states.setdefault(module, make())
        return getattr(state, method)(*args, **kwargs)

    draw.discolab_wraps = original  # type: ignore[attr-defined]
    return draw
