"""What all magics of discolab have in common: options, help, errors.

An error of discolab that means "you typed something that can't be" is shown as one line,
without a stack, by IPython's `UsageError`.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import Magics
from IPython.core.magic_arguments import MagicArgumentParser, argument

from ..runtime.errors import ArgumentError, DiscoError, SessionError, WorkerError
from .cell import CellSyntaxError
from .lab import Lab

_WORD = re.compile(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+")
_LAST_OPTION = re.compile(r"(?:^|\s)(-[a-z]|--[a-z-]+)\s+([\w=,:.-]+)\s*$")


def arguments_of(magic: Any, line: str) -> Namespace:
    """Parse the line of a magic; an unknown option names those near it.

    Raises
    ------
    UsageError
    """
    parser: MagicArgumentParser = magic.parser
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
    found: Namespace = parser.parse_argstring(without_comment(line))
    return found


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


def split_options(magic: Any, line: str) -> tuple[str, str]:
    """Options in front, what follows as it is: ``-t 0 x.shape``."""
    rest, options = line.lstrip(), []
    takes_value = {o for a in magic.parser._actions if a.nargs is None for o in a.option_strings}
    while (rest.startswith("-") and rest[1:2].isalpha()) or rest.startswith("--"):
        word, rest = _first_word(rest)
        options.append(word)
        if word in takes_value and rest:
            value, rest = _first_word(rest)
            options.append(value)
    return " ".join(options), rest


def _first_word(text: str) -> tuple[str, str]:
    """What stands before the first space, or all of it that is in quotes; and the rest."""
    found = _WORD.match(text)
    end = found.end() if found is not None else len(text)
    return text[:end], text[end:].lstrip()


def text_and_options(magic: Any, line: str) -> tuple[str, Namespace]:
    """A text that is taken as it is typed, such as an expression, with options before or after it.

    What follows must be whole: an option and a word. No Python expression ends so.

    Raises
    ------
    UsageError
    """
    options, text = split_options(magic, line)
    while found := _LAST_OPTION.search(text):
        if found[1] not in magic.parser._option_string_actions:
            break
        text, options = text[: found.start()], f"{options} {found[1]} {found[2]}"
    return text.strip(), arguments_of(magic, options)


class _HelpShown(Exception):
    """``--help`` was among the options: there is nothing else to do."""


class _ShowHelp(argparse.Action):
    """Print what a magic does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(parser.format_help().removeprefix("::\n\n").strip())
        raise _HelpShown


def one_line_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Show discolab's errors about what was typed as one line."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except _HelpShown:
            return None
        except (WorkerError, CellSyntaxError):
            raise  # these have stacks and lines to show
        except (ArgumentError, SessionError) as exc:
            raise UsageError(str(exc)) from None
        except DiscoError as exc:
            text = f"{type(exc).__name__}: {exc}"
            exc._render_traceback_ = lambda: [text]  # type: ignore[attr-defined]
            raise
        except KeyboardInterrupt as exc:
            if not hasattr(exc, "_render_traceback_"):
                exc._render_traceback_ = lambda: ["KeyboardInterrupt: stopped"]  # type: ignore[attr-defined]
            raise

    return wrapped


session_option = argument(
    "-s", "--session", metavar="NAME", help="the session to use (default: the one used last)"
)
targets_option = argument(
    "-t",
    "--targets",
    metavar="RANKS",
    help="ranks: 0, 1,3 or 0:4:2, or of a mesh tp=0 or pp=1,tp=0:2 (default: all)",
)
ranks_option = argument(
    "-r",
    "--ranks",
    "-t",
    "--targets",
    dest="ranks",
    metavar="RANKS",
    help="of these workers only: 0, 1,3 or 0:4:2, or of a mesh tp=0 (default: all)",
)
frame_option = argument(
    "-f",
    "--frame",
    type=int,
    default=0,
    metavar="N",
    help="0: where the worker stands (default); 1: the function that called it, and so on",
)
timeout_option = argument("--timeout", type=float, metavar="S", help="seconds to wait")


def names_in(texts: Sequence[str] | None) -> list[str]:
    """Names separated by commas, in one word or several."""
    words = [name.strip() for text in texts or () for name in text.split(",")]
    return [word for word in words if word]


class LabMagics(Magics):
    """Magics that are thin wrappers over the methods of a `Lab`."""

    lab: Lab

    def __init__(self, shell: Any, lab: Lab) -> None:
        super().__init__(shell)
        self.lab = lab
        for kind in self.magics.values():
            for magic in kind.values():
                if "--help" not in magic.parser._option_string_actions:
                    magic.parser.add_argument("--help", action=_ShowHelp, nargs=0, help="show this")
