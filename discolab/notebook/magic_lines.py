"""How the line of a magic is read: options, texts taken as they are typed, comments, quotes.

`read_options` and its kin are what a `Magic` reads its line with; below are the options that
several magics have.
"""

from __future__ import annotations

import difflib
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import NoReturn

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser, argument

_WORD = re.compile(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+")
_LAST_OPTION = re.compile(r"(?:^|\s)(-[a-z]|--[a-z-]+)\s+([\w=,:.-]+|'[^']*'|\"[^\"]*\")\s*$")


def read_options(parser: MagicArgumentParser, line: str, cell: str | None = None) -> Namespace:
    """Parse a line of options; an unknown one names those near it.

    Raises
    ------
    UsageError
    """
    known = sorted(o for action in parser._actions for o in action.option_strings)

    def fail(message: str) -> NoReturn:
        hint = ""
        for word in words_of(line):
            if word.startswith("-") and word.split("=")[0] not in known:
                near = difflib.get_close_matches(word, known, n=2)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                break
        options = ", ".join(o for o in known if o.startswith("--"))
        raise UsageError(f"%{parser.prog.lstrip('%')}: {message}{hint} (options: {options})")

    parser.error = fail  # type: ignore[method-assign]
    args: Namespace = parser.parse_argstring(without_comment(line))
    return args


def without_comment(line: str) -> str:
    """The line up to a ``#`` that begins a word outside of quotes."""
    quote = ""
    for at, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at]
    return line


def words_of(line: str) -> list[str]:
    """The words of a line as a shell parts them; an open quote is no matter."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def unquoted(word: str) -> str:
    """A word as a shell gives it to a program: IPython leaves the quotes on."""
    try:
        return "".join(shlex.split(word))
    except ValueError:
        return word


def split_options(parser: MagicArgumentParser, line: str) -> tuple[str, str]:
    """Options in front, what follows as it is: ``-t 0 x.shape``."""
    rest, options = line.lstrip(), []
    takes_value = {o for a in parser._actions if a.nargs is None for o in a.option_strings}
    while (rest.startswith("-") and rest[1:2].isalpha()) or rest.startswith("--"):
        word, rest = _first_word(rest)
        options.append(word)
        if word in takes_value and rest:
            value, rest = _first_word(rest)
            options.append(value)
    return " ".join(options), rest


def _first_word(text: str) -> tuple[str, str]:
    """What stands before the first space, or all of it that is in quotes; and the rest."""
    word = _WORD.match(text)
    end = word.end() if word is not None else len(text)
    return text[:end], text[end:].lstrip()


def reading_text(
    name: str, missing: str = ""
) -> Callable[[MagicArgumentParser, str, str | None], Namespace]:
    """A reader of a text that is taken as it is typed, such as an expression, and of options.

    Options stand before the text or after it. After it they must be whole, an option and a word:
    no Python expression ends so.

    Parameters
    ----------
    name
        What the text is called among the options.
    missing
        What to say, as a `UsageError`, if there is none; "": it may be missing.
    """

    def read(parser: MagicArgumentParser, line: str, cell: str | None = None) -> Namespace:
        options, text = split_options(parser, line)
        while match := _LAST_OPTION.search(text):
            if match[1] not in parser._option_string_actions:
                break
            text, options = text[: match.start()], f"{options} {match[1]} {match[2]}"
        args = read_options(parser, options)
        if missing and not text.strip():
            raise UsageError(missing)
        setattr(args, name, text.strip())
        return args

    return read


SESSION = argument(
    "-s", "--session", metavar="NAME", help="the session to use (default: the one used last)"
)
TARGETS = argument(
    "-t",
    "--targets",
    metavar="RANKS",
    help="ranks: 0, 1,3 or 0:4:2, or of a mesh tp=0 or pp=1,tp=0:2 (default: all)",
)
RANKS = argument(
    "-r",
    "--ranks",
    "-t",
    "--targets",
    dest="ranks",
    metavar="RANKS",
    help="of these workers only: 0, 1,3 or 0:4:2, or of a mesh tp=0 (default: all)",
)
FRAME = argument(
    "-f",
    "--frame",
    type=int,
    default=0,
    metavar="N",
    help="0: where the worker stands (default); 1: the function that called it, and so on",
)
TIMEOUT = argument("--timeout", type=float, metavar="S", help="seconds to wait")


def names_in(texts: Sequence[str] | None) -> list[str]:
    """Names separated by commas, in one word or several."""
    words = [name.strip() for text in texts or () for name in text.split(",")]
    return [word for word in words if word]
