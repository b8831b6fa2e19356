"""Functions and classes that a script puts into modules and classes of others, and leaves there.

A process of torchrun takes them with it. Here a `print` that is for rank 0 alone would be that of
the notebook from then on. Whoever runs scripts keeps what `attributes` gives, and calls `put_back`
when the last worker's script has ended; on one thread at a time.
"""

from __future__ import annotations

import functools
import os
import sys
from contextlib import suppress
from types import FunctionType, MethodType, ModuleType
from typing import Any

from ..runtime.user_code import is_library_file

_MISSING = object()
_HERE = f"{__name__.partition('.')[0]}."

Attributes = list[tuple[Any, dict[str, Any]]]
"""Modules and classes, each with what it has."""


def attributes() -> Attributes:
    """What the loaded modules have, and the classes in them."""
    found: Attributes = []
    classes: dict[type, None] = {}
    for name, module in sys.modules.copy().items():
        if name == "__main__" or name.startswith(_HERE) or not isinstance(module, ModuleType):
            continue
        names = _dict_of(module).copy()
        found.append((module, names))
        classes.update((value, None) for value in names.values() if issubclass(type(value), type))
    found += [(kind, _dict_of(kind).copy()) for kind in classes]
    return found


def put_back(before: Attributes, folder: str) -> None:
    """Undo what scripts of a folder, and modules beside them, have put in place of attributes.

    What libraries have changed stays: they have noted that they did.
    """
    for owner, names in before:
        for name, value in _dict_of(owner).copy().items():
            old = names.get(name, _MISSING)
            if value is old or not _is_of(folder, value):
                continue
            with suppress(AttributeError, TypeError):  # one that allows no change any more
                if isinstance(owner, ModuleType):
                    _set_in_module(owner, name, old)
                elif old is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)


def _dict_of(owner: Any) -> Any:
    """A module's own dict, also where its class answers each worker with another."""
    if isinstance(owner, ModuleType):
        return object.__getattribute__(owner, "__dict__")
    return type.__getattribute__(owner, "__dict__")


def _set_in_module(module: ModuleType, name: str, value: Any) -> None:
    if value is _MISSING:
        del _dict_of(module)[name]
    else:
        _dict_of(module)[name] = value


def _is_of(folder: str, value: Any) -> bool:
    """Whether a function or class is of a script of a folder, or of a module in it."""
    if isinstance(value, property):
        value = value.fget
    while isinstance(value, (staticmethod, classmethod, MethodType, functools.partial)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    if isinstance(value, type):
        return value.__module__ == "__main__"
    if not isinstance(value, FunctionType):
        return False
    file = value.__globals__.get("__file__") or ""
    return file.startswith(os.path.join(folder, "")) and not is_library_file(file)
