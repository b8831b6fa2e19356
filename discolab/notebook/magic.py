"""What a magic is: how its line is read, what it calls, what it shows, and what ``?`` says of it.

Every magic is one `Magic`, entered once in a table (`MAGICS`) by magics.py and
debug_magics.py. Unless it says otherwise, it calls the command of the `Lab` that has its name,
with its options as arguments. A *family* (``%disco_show WHAT``) is one magic for several others.

A `Magic` reads its line with `read_options` or its kin; beside them are the options that several
magics have.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import no_var_expand
from IPython.core.magic_arguments import MagicArgumentParser, argument

from ..runtime.errors import ArgumentError, DiscoError, SessionError, WorkerError
from .cell import CellSyntaxError
from .lab import Lab

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


# -- a magic ---------------------------------------------------------------------------------------


MAGICS: dict[str, Magic] = {}
"""Every magic by its name, aliases too."""

Options = Sequence[argument]


@dataclass(frozen=True, kw_only=True)
class Magic:
    """One magic.

    Attributes
    ----------
    name
        ``disco_step``.
    help
        What it does: a line, and perhaps more below.
    examples
        Two at least, as they are typed; what follows ``#`` says what that does.
    options
        What argparse is to know; the name of each is a parameter of what is called.
    usage
        Its line in short; "": all options.
    aliases
        Older names of it.
    call
        Gets the `Lab` and the options by name; None: the `Lab`'s command of that name.
    show
        Turns what the call returned, and the options, into what is shown.
    read
        Reads the line; gets the parser, the line, and the cell below it or None.
    cell
        Whether it has a form with two %, too.
    family
        The words that it takes, each with the name of the magic that it stands for.
    alone
        Of a family: the magic that it stands for without a word; "": a word is needed.
    expands
        Whether ``{name}`` and ``$name`` in its line stand for the notebook's variables.
    """

    name: str
    help: str
    examples: Sequence[str]
    options: Options = ()
    usage: str = ""
    aliases: Sequence[str] = ()
    call: Callable[..., Any] | None = None
    show: Callable[[Any, Namespace], Any] | None = None
    read: Callable[[MagicArgumentParser, str, str | None], Namespace] = read_options
    cell: bool = False
    family: dict[str, str] | None = None
    alone: str = ""
    expands: bool = True

    def enter(self) -> None:
        """Put it in the table, under all of its names."""
        for name in (self.name, *self.aliases):
            MAGICS[name] = self

    def parser(self) -> MagicArgumentParser:
        """What reads its options and writes its help."""
        percent = "%%%%" if self.cell and self.name == "disco" else "%%"  # argparse halves them
        words = "|".join(self.family) if self.family else ""
        what = "[WHAT [options]]" if self.alone else "WHAT [options]"
        usage = self.usage or (f"{what}   (WHAT: {words})" if words else "")
        parser = MagicArgumentParser(
            f"%{self.name}",
            usage=f"{percent}{self.name} {usage}" if usage else None,
            description="\n\n".join([self.help, *self._words(), self._examples()]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        # Python 3.14 would colour what `?` and docstrings show
        parser.color = False  # type: ignore[attr-defined]
        for option in self.options:
            parser.add_argument(*option.args, **option.kwds)
        parser.add_argument(
            "--help", action=_ShowHelp, nargs=0, default=argparse.SUPPRESS, help="show this"
        )
        return parser

    def function(self, lab: Lab) -> Callable[..., Any]:
        """What IPython calls: the line, and the cell below it if there is one."""
        parser = self.parser()

        @one_line_errors
        def run(line: str, cell: str | None = None) -> Any:
            if self.family is not None:
                return self._pass_on(lab, line, cell)
            args = self.read(parser, line, cell)
            given = dict(vars(args))
            if cell is not None:
                given["cell"] = cell
            if self.call is not None:
                result = self.call(lab, **given)
            else:
                result = lab.command(self.name)(**given)
            return result if self.show is None else self.show(result, args)

        if self.cell:
            function: Any = run
        else:

            def function(line: str) -> Any:  # a line magic: it takes no cell
                return run(line)

        function.__name__ = function.__qualname__ = self.name
        function.__doc__ = help_of(parser)
        function.parser = parser
        marked: Callable[..., Any] = function if self.expands else no_var_expand(function)
        return marked

    def _pass_on(self, lab: Lab, line: str, cell: str | None) -> Any:
        """Run the magic that the first word of a family stands for."""
        assert self.family is not None
        word, _, rest = line.strip().partition(" ")
        if word == "--help":
            print(help_of(self.parser()))
            return None
        magic = self.family.get(word) if word else self.alone
        if not magic:
            choices = ", ".join(self.family)
            if not word:
                raise UsageError(f"%{self.name}: what? One of: {choices}")
            near = difflib.get_close_matches(word, self.family, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"%{self.name}: there is no {word!r}, but: {choices}{hint}")
        if cell is None:
            return _run_line(lab.shell, magic, rest.strip())
        if not MAGICS[magic].cell:
            raise UsageError(f"%%{self.name} {word}: takes no cell; write it with one %")
        return lab.shell.run_cell_magic(magic, rest.strip(), cell)

    def _words(self) -> list[str]:
        """Of a family: each word with what it does."""
        if not self.family:
            return []
        width = max(map(len, self.family)) + 2
        lines = [
            f"  {word:{width}}{MAGICS[magic].help.splitlines()[0]} (%{magic})"
            for word, magic in self.family.items()
        ]
        return ["\n".join(["What there is, each with options of its own (--help):", *lines])]

    def _examples(self) -> str:
        return "\n".join(["Examples:", *(f"  {line}" for line in self.examples)])


def _run_line(_shell: Any, _magic: str, _line: str) -> Any:
    """Run a line magic; IPython looks for ``{name}`` and ``$name`` among the locals here, too."""
    return _shell.run_line_magic(_magic, _line)


def register(shell: Any, lab: Lab) -> None:
    """Give a shell all magics of the table."""
    for name, magic in MAGICS.items():
        kind = "line_cell" if magic.cell else "line"
        shell.register_magic_function(magic.function(lab), kind, name)


def help_of(parser: MagicArgumentParser) -> str:
    """What ``?`` and ``--help`` show: the usage line first."""
    return parser.format_help().removeprefix("usage: ").strip()


class _HelpShown(Exception):
    """``--help`` was among the options: there is nothing else to do."""


class _ShowHelp(argparse.Action):
    """Print what a magic does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, MagicArgumentParser)
        print(help_of(parser))
        raise _HelpShown


def one_line_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Show discolab's errors about what was typed as one line, by IPython's `UsageError`."""

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
