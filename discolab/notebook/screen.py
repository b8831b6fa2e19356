"""The little of a terminal that progress bars need: carriage return and cursor up.

tqdm gives each bar of a process a row of its own and moves between them; with several workers
in one process each worker's text has such moves in it.
"""

from __future__ import annotations

import re

UP = "\x1b[A"
# a new line, a return to its start, a control sequence (colours and the like), or plain text
_TOKEN = re.compile(r"\n|\r|\x1b\[[0-9;]*[A-Za-z]|[^\n\r\x1b]+|\x1b")


class Screen:
    """Rows of text with a cursor; `take` gives the rows and wipes them."""

    def __init__(self) -> None:
        self._rows = [""]
        self._row = 0
        self._start = False
        self._moved = False

    def write(self, text: str) -> None:
        """Print `text`; colours are left out."""
        for token in _TOKEN.findall(text):
            if token == "\n":
                self._row += 1
                self._start = False
                if self._row == len(self._rows):
                    self._rows.append("")
            elif token == "\r":
                self._start = True
            elif token == UP:
                self._row = max(0, self._row - 1)
                self._moved = True
            elif not token.startswith("\x1b"):
                self._rows[self._row] = token if self._start else self._rows[self._row] + token
                self._start = False

    def take_whole(self) -> list[str]:
        """The rows above the cursor, removed."""
        rows, self._rows = self._rows[: self._row], self._rows[self._row :]
        self._row = 0
        return rows

    def take(self) -> list[str]:
        """All rows, removed; blank ones that only made room for a bar are left out."""
        rows = self._rows[:-1] if not self._rows[-1].strip() else self._rows
        if self._moved:
            rows = [row for row in rows if row.strip()]
        self.__init__()  # type: ignore[misc]
        return rows
