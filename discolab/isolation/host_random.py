"""Python's and numpy's random numbers: each worker thread has its own state, as a process would.

`random.seed(0)` on four threads would seed one stream that all of them then draw from. While the
row is installed, the functions of the module `random` and those of `numpy.random` that draw from
numpy's legacy state look first who calls, under every name that a module has for them; and so do
the two objects that keep the states, for those who hold them. A worker's states are made at its
first draw and kept in `worker.random_states`, to which only that worker's threads write.

Not covered: `random.random`, `random.getrandbits` and methods of numpy's state that were kept
before the first session in something else than a module's name, such as a default argument.
`random.Random` and `numpy.random.default_rng` are one's own anyway.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy.random

from ..runtime.worker import Worker, current_worker_or_none
from . import table
from .patches import Patches
from .table import Row, Treatment
from .worker_local import OF_SCRIPT, own_value

_instance: Any = vars(random)["_inst"]
_legacy: Any = numpy.random.mtrand._rand


def _install(patches: Patches) -> None:
    """Have the functions look who calls."""
    _replace_methods_of(patches, random, _instance, _own_random)
    patches.change_class(_instance, _RandomOfWorkers)
    _replace_methods_of(patches, numpy.random, _legacy, _own_legacy)
    if hasattr(numpy.random, "set_bit_generator"):
        for function in (get_bit_generator, set_bit_generator):
            patches.replace(
                numpy.random,
                function.__name__,
                functools.partial(_second, function),
                everywhere=True,
            )
    # numpy.random.seed, .sample and .ranf ask for it by this name
    patches.replace(numpy.random.mtrand, "_rand", lambda _: _LegacyOfWorkers(), everywhere=True)


def _replace_methods_of(patches: Patches, module: Any, shared: Any, own: Callable[[], Any]) -> None:
    """Replace the functions of `module` that are methods of its one `shared` state."""
    for name, function in list(vars(module).items()):
        if getattr(function, "__self__", None) is shared:
            patches.replace(
                module,
                name,
                functools.partial(_of_worker, own, module.__name__, name),
                everywhere=True,
            )


def own_random_of(module: Any, shared: random.Random, name: str, patches: Patches) -> None:
    """Have what a module has bound of a `Random` of its own draw from the calling worker's.

    Parameters
    ----------
    name
        What it is: with `own_object` of this name both have one state.
    """
    _replace_methods_of(
        patches, module, shared, functools.partial(own_value, f"{OF_SCRIPT}{name}", random.Random)
    )


@functools.cache
def _of_worker(own: Callable[[], Any], module: str, name: str, original: Any) -> Any:
    method = getattr(original, "__name__", name)

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        state = own()
        return (original if state is None else getattr(state, method))(*args, **kwargs)

    # pickled by its name: another process must draw from its own state, not from a copy of this one
    draw.__module__, draw.__qualname__ = module, name
    # torch.compile would take what it draws for a constant
    draw._torchdynamo_disable = True  # type: ignore[attr-defined]
    return draw


def _own_random() -> random.Random | None:
    """The calling worker's state of `random`, None if no worker calls."""
    state: random.Random | None = _own("random", random.Random)
    return state


def _own_legacy() -> Any:
    """The calling worker's state of `numpy.random`, None if no worker calls."""
    return _own("numpy", numpy.random.RandomState)


def of_caller(state: Any) -> Any:
    """numpy's legacy state as who calls has it; any other is what it is."""
    return _own_legacy() or state if state is _legacy else state


def _own(library: str, make: Callable[[], Any]) -> Any:
    worker = current_worker_or_none()
    if worker is None:
        return None
    states = worker.random_states
    return states.get(library) or states.setdefault(library, make())


def _second(new: Any, before: Any) -> Any:
    return new


def get_bit_generator() -> Any:
    """What the legacy state of who asks draws from."""
    return (_own_legacy() or _legacy)._bit_generator


def set_bit_generator(bitgen: Any) -> None:
    """Have the legacy state of who asks draw from it."""
    numpy.random.RandomState.__init__(_own_legacy() or _legacy, bitgen)


class _RandomOfWorkers(random.Random):
    """The one state of `random`; all its other methods are made of these."""

    def random(self) -> float:
        own = _own_random()
        return super().random() if own is None else own.random()

    def getrandbits(self, k: int, /) -> int:
        own = _own_random()
        return super().getrandbits(k) if own is None else own.getrandbits(k)

    def seed(self, *args: Any, **kwargs: Any) -> None:
        own = _own_random()
        return super().seed(*args, **kwargs) if own is None else own.seed(*args, **kwargs)

    def getstate(self) -> Any:
        own = _own_random()
        return super().getstate() if own is None else own.getstate()

    def setstate(self, state: Any) -> None:
        own = _own_random()
        return super().setstate(state) if own is None else own.setstate(state)

    @property
    def gauss_next(self) -> float | None:
        """The second number of the pair that `gauss` has drawn."""
        value: float | None = vars(_own_random() or self)["gauss_next"]
        return value

    @gauss_next.setter
    def gauss_next(self, value: float | None) -> None:
        vars(_own_random() or self)["gauss_next"] = value


class _LegacyOfWorkers(numpy.random.RandomState):
    """numpy's one legacy state."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return super().__getattribute__(name)
        return getattr(_own_legacy() or _legacy, name)


def _in_child(worker: Worker) -> None:
    state = worker.random_states.get("numpy")  # Python seeds `random` anew in each child
    if state is not None:
        numpy.random.RandomState.__init__(_legacy, state._bit_generator)


table.add(
    Row(
        state="random numbers of Python and numpy",
        treatment=Treatment.PER_WORKER,
        meaning="The functions of `random` and those of `numpy.random` that draw from its legacy "
        "state use a state of the worker's own, also by names of modules bound before the first "
        "session. `random.random` or a method of numpy's state that was kept otherwise then, as a "
        "default argument, is the process's.",
        test="tests/engines/test_host_randomness.py::"
        "test_the_same_seed_gives_each_worker_the_same_numbers",
        install=_install,
        in_child=_in_child,
        library="Python",
    )
)
