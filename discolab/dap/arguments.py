"""The arguments of a request, each checked as it is read: what is wrong is named to the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ..runtime.errors import ArgumentError

T = TypeVar("T")
_NEEDED: Any = object()
_NAMES = {str: "a string", int: "a whole number", bool: "true or false", list: "a list",
          dict: "an object"}  # fmt: skip


class Arguments:
    """The arguments of one request, or an object within them.

    Parameters
    ----------
    where
        What a person is told that they belong to: ``setBreakpoints``.
    given
        As they came.

    Raises
    ------
    ArgumentError
        Also of each method, if an argument is missing or of another type.
    """

    def __init__(self, where: str, given: Any) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise ArgumentError(f"{where}: arguments are an object; got {given!r:.60}")
        self._where = where
        self._given: Mapping[str, Any] = given or {}

    def text(self, name: str, default: str = _NEEDED) -> str:
        """A string."""
        return self._one(name, str, default)

    def number(self, name: str, default: int = _NEEDED) -> int:
        """A whole number."""
        return self._one(name, int, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        return self._one(name, bool, default)

    def object(self, name: str) -> Arguments:
        """An object; one without members if it is not there."""
        return Arguments(f"{self._where}: {name}", self._one(name, dict, {}))

    def objects(self, name: str) -> list[Arguments]:
        """A list of objects."""
        where = f"{self._where}: {name}"
        return [Arguments(where, one) for one in self._one(name, list, [])]

    def texts(self, name: str) -> list[str]:
        """A list of strings."""
        found = self._one(name, list, [])
        if not all(isinstance(one, str) for one in found):
            raise ArgumentError(f"{self._where}: {name} holds strings; got {found!r:.60}")
        return found

    def _one(self, name: str, kind: type[T], default: T) -> T:
        found = self._given.get(name)
        if found is None:
            if default is _NEEDED:
                raise ArgumentError(f"{self._where}: {name!r} is missing")
            return default
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise ArgumentError(f"{self._where}: {name!r} is {_NAMES[kind]}; got {found!r:.60}")
        return found
