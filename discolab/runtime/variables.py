"""Variables of the workers' cells, as worker functions: get, set, list."""

from __future__ import annotations

import difflib
from typing import Any

from .errors import ArgumentError
from .worker import current_worker


def get_variable(name: str) -> Any:
    """The value of a global variable of this worker's cells."""
    namespace = current_worker().namespace
    try:
        return namespace[name]
    except KeyError:
        near = difflib.get_close_matches(name, list_variables(), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ArgumentError(f"this worker has no variable named {name!r}{hint}") from None


def set_variables(values: dict[str, Any]) -> None:
    """Set global variables of this worker's cells."""
    current_worker().namespace.update(values)


def list_variables() -> list[str]:
    """Names that the user gave, sorted."""
    return sorted(n for n in current_worker().namespace if not n.startswith("_"))
