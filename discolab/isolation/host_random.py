"""Python's and numpy's random numbers: each worker thread has its own state, as a process would.

`random.seed(0)` on four threads would seed one stream that all of them then draw from. While the
row is installed, the functions of the module `random` and those of `numpy.random` that draw from
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
from . import table
from .patches import Patches
from .table import Row, Treatment

_states: weakref.WeakKeyDictionary[Worker, dict[str, Any]] = weakref.WeakKeyDictionary()


def _install(patches: Patches) -> None:
    """Have the functions look who calls."""
    _replace_methods_of(patches, random, vars(random)["_inst"], random.Random)
    legacy = numpy.random.mtrand._rand
    functions = ("seed", "ranf", "sample")
    _replace_methods_of(patches, numpy.random, legacy, numpy.random.RandomState, functions)


def _replace_methods_of(
    patches: Patches,
    module: Any,
    shared: Any,
    make: Callable[[], Any],
    also: tuple[str, ...] = (),
) -> None:
    """Replace the functions of `module` that are methods of its one `shared` state."""
    for name, original in list(vars(module).items()):
        if getattr(original, "__self__", None) is shared or name in also:
            patches.replace(
                module, name, functools.partial(_of_worker, module.__name__, make, name)
            )


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

    return draw


table.add(
    Row(
        state="random numbers of Python and numpy",
        treatment=Treatment.PER_WORKER,
        meaning="The functions of `random` and those of `numpy.random` that draw from its legacy "
        "state use a state of the worker's own.",
        test="tests/engines/test_host_randomness.py",
        install=_install,
        in_own_process=True,
        library="Python",
    )
)
