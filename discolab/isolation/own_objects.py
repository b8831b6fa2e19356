"""An object that a library made once, and of which each worker has one of its own.

The object stays the one that it is, under every name and in every default argument that holds it:
it gets a class of which each method and attribute is that of the calling worker's object. A worker
makes its own at its first use and keeps it until its script ends; the notebook's is what was there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import table
from .patches import Patches
from .worker_local import OF_SCRIPT, own_value

_SPECIAL = (  # Python looks for these in the class
    "add", "bool", "call", "contains", "delitem", "enter", "eq", "exit", "getitem", "iadd", "iter",
    "len", "ne", "repr", "reversed", "setitem",
)  # fmt: skip


def own_object(
    thing: Any,
    name: str,
    make: Callable[[], Any],
    patches: Patches,
    inherit: Callable[[Any], None] | None = None,
) -> None:
    """Have each worker find an object of its own in `thing`.

    Parameters
    ----------
    thing
        An object of a class that Python code has made.
    name
        What it is: its key in `Worker.process_state`.
    make
        Makes a worker's.
    inherit
        Makes a worker's the process's, in a process that the worker forks; by default `thing` gets
        its attributes.
    """
    kind: Any = type(thing)
    key = f"{OF_SCRIPT}{name}"
    here = functools.partial(own_value, key, make)
    table.inherits(key, inherit or (lambda own: vars(thing).update(vars(own))))

    def get(self: Any, attribute: str) -> Any:
        own = None if attribute == "__class__" else here()
        return kind.__getattribute__(self, attribute) if own is None else getattr(own, attribute)

    def set_(self: Any, attribute: str, value: Any) -> None:
        own = here()
        if own is None:
            kind.__setattr__(self, attribute, value)
        else:
            setattr(own, attribute, value)

    def special(method: str) -> Callable[..., Any]:
        def of_worker(self: Any, *args: Any) -> Any:
            own = here()
            return getattr(kind, method)(self if own is None else own, *args)

        return of_worker

    methods = [f"__{base}__" for base in _SPECIAL if hasattr(kind, f"__{base}__")]
    names: dict[str, Any] = {method: special(method) for method in methods}
    names |= {"__getattribute__": get, "__setattr__": set_, "__module__": kind.__module__}
    names |= {"__slots__": (), "__hash__": kind.__hash__}
    patches.change_class(thing, type(kind.__name__, (kind,), names))


class _List(list[Any]):
    """A list whose class can be changed."""


def own_list(module: ModuleType, name: str, patches: Patches) -> None:
    """Have each worker find an empty list of its own under a name of a module."""

    def over(shared: list[Any]) -> list[Any]:
        new = _List(shared)
        own_object(new, f"{module.__name__}.{name}", list, patches, shared.extend)
        return new

    patches.replace(module, name, over, everywhere=True)
