"""The options of ``%%disco`` and ``%disco_run`` that have a program stepped or recorded."""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument

from .magic_lines import names_in, unquoted, without_comment, words_of

_EXAMPLE = '-b "12 if rank == 2"'
_STEPPING = (
    argument("--step", action="store_true", help="stop all workers at the first line"),
    argument(
        "-b",
        "--break",
        dest="breaks",
        action="append",
        default=[],
        metavar='"LINE [if COND]"',
        help="stop there; also FILE:LINE; may be given several times",
    ),
    argument(
        "--trace",
        nargs="?",
        const="",
        metavar="NAMES",
        help="record these values, or all, line by line: see %%disco_history",
    ),
    argument("--pm", action="store_true", help="a worker that fails stays there, to be looked at"),
    argument("--nan", action="store_true", help="stop where a value first is not finite"),
)


def stepping_options(func: Any) -> Any:
    """The options of a magic that runs a program which may be stepped."""
    for option in reversed(_STEPPING):
        func = option(func)
    return func


def stepping_of(what: str, args: Namespace) -> dict[str, Any]:
    """Arguments of `Lab.disco` and `Lab.disco_run` from `stepping_options`.

    Raises
    ------
    UsageError
        If there is a break point without quotes.
    """
    after = [*getattr(args, "code", ()), *getattr(args, "args", ())]
    if args.breaks and (after[:1] == ["if"] or getattr(args, "script", "") == "if"):
        raise UsageError(f"{what}: a break point with a condition is put in quotes: {_EXAMPLE}")
    trace = None if args.trace is None else tuple(names_in([unquoted(args.trace)]))
    return {
        "step": args.step,
        "breaks": [unquoted(text) for text in args.breaks],
        "trace": trace,
        "pm": args.pm,
        "nan": args.nan,
    }


def check_break(what: str, line: str) -> None:
    """Say what ``-b`` is, where nothing follows it.

    Raises
    ------
    UsageError
    """
    words = words_of(without_comment(line))
    for word, after in pairwise([*words, ""]):
        if word in ("-b", "--break") and (not after or after.startswith("-")):
            raise UsageError(
                f"{what}: {word} needs the line to stop at: {_EXAMPLE} (--block, to wait for the "
                "workers, is the default)"
            )
