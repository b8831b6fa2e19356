"""Magics for what is over: post-mortem, and what was recorded.

Each is a method of `LookingBack` of the same name.
"""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from .magic_lines import (
    LabMagics,
    arguments_of,
    frame_option,
    one_line_errors,
    ranks_option,
    session_option,
    timeout_option,
)


@magics_class
class LookingBackMagics(LabMagics):
    """``%disco_pm``, ``%disco_history``, ``%disco_back``, ``%disco_forth``."""

    @magic_arguments()
    @argument("who", nargs="?", metavar="RANKS", help="the workers (default: all that failed)")
    @argument("-e", "--eval", dest="expression", metavar="EXPR", help="show its value there")
    @argument("--forget", action="store_true", help="let the frames go, and what they hold")
    @frame_option
    @ranks_option
    @timeout_option
    @session_option
    @no_var_expand
    @line_magic
    @one_line_errors
    def disco_pm(self, line: str) -> Any:
        """Show each worker where the last cell failed: the stack, and the variables there.

        ``%disco_pm 2 -e x.shape`` shows the value of an expression: all that follows ``-e``.
        """
        options, found, expression = f" {line}".partition(" -e ")
        args = arguments_of(LookingBackMagics.disco_pm, options)
        if found and not expression.strip():
            raise UsageError("%disco_pm: -e what? For instance: -e x.shape")
        shown = self.lab.disco_pm(
            args.who or args.ranks,
            frame=args.frame,
            expression=expression.strip() if found else args.expression,
            forget=args.forget,
            timeout=args.timeout,
            session=args.session,
        )
        if args.forget:
            print("the frames of the last failure are let go")
        return shown

    @magic_arguments()
    @argument("name", nargs="?", help="the variable (default: which were recorded)")
    @argument("-n", "--last", type=int, default=50, metavar="N", help="changes shown (50)")
    @ranks_option
    @session_option
    @line_magic
    @one_line_errors
    def disco_history(self, line: str) -> Any:
        """Show a variable over time on each worker: what ``%%disco --trace`` has recorded."""
        args = arguments_of(LookingBackMagics.disco_history, line)
        found = self.lab.disco_history(args.name, args.ranks, last=args.last, session=args.session)
        if args.name is None:
            print("recorded: " + ", ".join(found))
            return None
        return found

    @magic_arguments()
    @argument("n", nargs="?", type=int, default=1, help="how many lines (1)")
    @session_option
    @line_magic
    @one_line_errors
    def disco_back(self, line: str) -> Any:
        """Go back in what ``%%disco --trace`` has recorded, line by line."""
        args = arguments_of(LookingBackMagics.disco_back, line)
        return self.lab.disco_back(args.n, session=args.session)

    @magic_arguments()
    @argument("n", nargs="?", type=int, default=1, help="how many lines (1)")
    @session_option
    @line_magic
    @one_line_errors
    def disco_forth(self, line: str) -> Any:
        """Go forth again in what was recorded, after ``%disco_back``."""
        args = arguments_of(LookingBackMagics.disco_forth, line)
        return self.lab.disco_forth(args.n, session=args.session)
