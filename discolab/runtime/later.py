"""Names and functions of modules that are imported when they are first used. No state."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` for names of modules of it.

    Parameters
    ----------
    modules
        By each name the module that has it, relative to the package; that of a module's own name is
        the module.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(modules[name], package)
        found = module if modules[name] == f".{name}" else getattr(module, name)
        setattr(sys.modules[package], name, found)  # the import may have left a module there
        return found

    return get


def function(package: str, module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when it is first called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module, package), name)(*args, **kwargs)

    return call
