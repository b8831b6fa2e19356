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
    classes: dict[int, type] = {}  # by their ids: a metaclass may say that they are equal
    notebook = sys.modules.get("__main__")  # which may have other names too
    for name, module in sys.modules.copy().items():
        if module is notebook or name.startswith(_HERE) or not isinstance(module, ModuleType):
            continue
        names = _dict_of(module).copy()
        found.append((module, names))
        classes.update((id(value), value) for value in names.values() if _is_class(value))
    found += [(kind, _dict_of(kind).copy()) for kind in classes.values()]
    return found


def put_back(before: Attributes, folder: str) -> None:
    """Undo what scripts of a folder, and modules beside them, have put in place of attributes.

    What libraries have changed stays: they have noted that they did. So does what the notebook's
    own modules of that folder have, which it may have loaded anew meanwhile: scripts have others.
    """
    for owner, names in before:
        module = owner if isinstance(owner, ModuleType) else sys.modules.get(str(owner.__module__))
        if isinstance(module, ModuleType) and _is_in(folder, _dict_of(module)):
            continue
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
    """Whether a function or class is of a script of a folder, or of a module in it.

    The type is asked for: what is put into a module may be a proxy that answers for another object.
    """
    if type(value) is property:
        value = value.fget
    while type(value) in (staticmethod, classmethod, MethodType, functools.partial):
        value = value.func if type(value) is functools.partial else value.__func__
    if _is_class(value):
        return bool(value.__module__ == "__main__")
    return type(value) is FunctionType and _is_in(folder, value.__globals__)


def _is_class(value: Any) -> bool:
    return issubclass(type(value), type)


def _is_in(folder: str, names: dict[str, Any]) -> bool:
    """Whether a module, by its names, is a file in a folder, and of no library."""
    file = str(names.get("__file__") or "")
    return file.startswith(os.path.join(folder, "")) and not is_library_file(file)
