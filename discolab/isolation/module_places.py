"""Where modules are found. No state."""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec
from typing import Any


def place(spec: ModuleSpec) -> Any:
    """A module's file, or where a folder without __init__.py is found."""
    if spec.origin:
        return spec.origin
    try:
        return list(spec.submodule_search_locations or ())
    except KeyError:  # what it is in has gone
        return []


def is_beside(spec: ModuleSpec, folders: list[str]) -> bool:
    """Whether a module is found in one of these folders."""
    name = spec.name.partition(".")[0]
    if name == __name__.partition(".")[0]:  # a script may stand beside this package's sources
        return False
    found = place(spec)
    places = [found] if isinstance(found, str) else found
    inside = [os.path.join(os.path.abspath(folder), name) for folder in folders]
    return any(
        place in (f"{path}.py", path) or place.startswith((os.path.join(path, ""), f"{path}."))
        for place in map(os.path.abspath, places)
        for path in inside
    )
