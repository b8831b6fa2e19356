"""Source files as a client sees them: a path on disk, or a number by which it asks for the text.

Cells of a notebook are no files, so a client fetches their text. It is found by `linecache`, where
the notebook keeps it.
"""

from __future__ import annotations

import linecache
import os
from typing import Any

from ..runtime.errors import ArgumentError
from ..runtime.sources import display_name, is_cell, is_installed, lines_of
from .arguments import Arguments


class Sources:
    """The files that one client was told of; used on any thread."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: dict[str, str] = {}  # path on disk -> as code objects have it

    def source(self, file: str) -> dict[str, Any]:
        """A file, for the client."""
        if os.path.isfile(file) and not is_cell(file):
            path = os.path.abspath(file)
            self._names[path] = file
            found: dict[str, Any] = {"name": os.path.basename(path), "path": path}
            if is_installed(file):
                found["presentationHint"] = "deemphasize"
            return found
        number = self._numbers.setdefault(file, len(self._numbers) + 1)
        return {"name": display_name(file), "path": file, "sourceReference": number}

    def file(self, source: Arguments) -> str:
        """The name, as code objects have it, of a file that the client names.

        Raises
        ------
        ArgumentError
            If it has no path, and a number that was not given to the client.
        """
        number = source.number("sourceReference", 0)
        for file, known in self._numbers.copy().items():
            if known == number:
                return file
        path = source.text("path", "")
        if not path:
            raise ArgumentError(f"a source has a path, or a sourceReference; got {number or None}")
        return self._names.get(path, path)

    def text(self, number: int) -> str:
        """The text of a file that is not on disk.

        Raises
        ------
        ArgumentError
            If no file has that number.
        """
        for file, known in self._numbers.copy().items():
            if known == number:
                return "".join(lines_of(file))
        raise ArgumentError(f"no source has the number {number}")

    def cells(self) -> list[dict[str, Any]]:
        """The cells that have run, in which breakpoints can be set."""
        return [self.source(file) for file in list(linecache.cache) if is_cell(file)]
