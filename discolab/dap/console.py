"""The debug console takes the words of ``%disco_debug``: ``%next -r 2`` moves worker 2 alone."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..debugger.debugger import Debugger
from ..runtime.errors import ArgumentError

_LINE = re.compile(r"\s*%\s*(\w+)\b(.*)", re.DOTALL)
_RANKS = re.compile(r"(?:^|\s)-r\s*(\S+)")


def command_in(text: str) -> tuple[str, str] | None:
    """The word of a line that begins with %, and what follows; None if it is an expression."""
    match = _LINE.fullmatch(text)
    return (match[1], match[2].strip()) if match else None


def run_command(debugger: Debugger, word: str, rest: str) -> str:
    """Do what a line of the console asks; what it says.

    Raises
    ------
    ArgumentError
        If there is no such word.
    """
    command = _WORDS.get(word)
    if command is None:
        raise ArgumentError(f"%{word}: there are " + ", ".join(f"%{known}" for known in _WORDS))
    match = _RANKS.search(rest)
    ranks = match[1] if match else None
    return command(debugger, _RANKS.sub("", rest).strip(), ranks)


def _going(mode: str) -> Callable[[Debugger, str, str | None], str]:
    def go(debugger: Debugger, rest: str, ranks: str | None) -> str:
        if rest and not (mode == "until" and rest.isdecimal()):
            raise ArgumentError(f"%{mode}: can't read {rest!r}; it takes -r RANKS")
        debugger.go(mode, int(rest) if rest else None, ranks)
        return ""

    return go


_WORDS: dict[str, Callable[[Debugger, str, str | None], str]] = {
    **{mode: _going(mode) for mode in ("step", "next", "out", "until", "continue")},
    "where": lambda debugger, _, ranks: str(debugger.where(0, ranks)),
    "eval": lambda debugger, rest, ranks: str(debugger.eval(rest, ranks)),
}
