"""Magics of the debugger: step, look around, break points.

Each is a method of `Debugging` of the same name.
"""

from __future__ import annotations

import ast
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from ..debugger.picture import breaks_parts
from ..debugger.stops import Stop
from ..runtime.failures import name_ranks
from ..views import Shown
from .magic_lines import (
    LabMagics,
    arguments_of,
    frame_option,
    one_line_errors,
    ranks_option,
    session_option,
    text_and_options,
    timeout_option,
    unquoted,
)


@magics_class
class DebugMagics(LabMagics):
    """``%disco_step`` and its kin."""

    @magic_arguments()
    @ranks_option
    @timeout_option
    @session_option
    @line_magic
    @one_line_errors
    def disco_step(self, line: str) -> Any:
        """Go to the next line on all workers, in functions that it calls too."""
        args = arguments_of(DebugMagics.disco_step, line)
        return self._shown("step", args, args.ranks)

    @magic_arguments()
    @ranks_option
    @timeout_option
    @session_option
    @line_magic
    @one_line_errors
    def disco_next(self, line: str) -> Any:
        """Go to the next line of this function, or of its caller when it returns."""
        args = arguments_of(DebugMagics.disco_next, line)
        return self._shown("next", args, args.ranks)

    @magic_arguments()
    @ranks_option
    @timeout_option
    @session_option
    @line_magic
    @one_line_errors
    def disco_out(self, line: str) -> Any:
        """Go on until this function has returned."""
        args = arguments_of(DebugMagics.disco_out, line)
        return self._shown("out", args, args.ranks)

    @magic_arguments()
    @argument("number", nargs="?", type=int, metavar="LINE", help="of this function")
    @ranks_option
    @timeout_option
    @session_option
    @line_magic
    @one_line_errors
    def disco_until(self, line: str) -> Any:
        """Go to a later line of this function, as out of a loop, or to a line of it."""
        args = arguments_of(DebugMagics.disco_until, line)
        return self._shown("until", args, args.number, args.ranks)

    @magic_arguments()
    @argument("n", nargs="?", type=int, default=1, help="stop at the n-th break point (1)")
    @ranks_option
    @timeout_option
    @session_option
    @line_magic
    @one_line_errors
    def disco_continue(self, line: str) -> Any:
        """Go on to the next break point, or the end."""
        args = arguments_of(DebugMagics.disco_continue, line)
        return self._shown("continue", args, args.n, args.ranks)

    @magic_arguments()
    @timeout_option
    @session_option
    @line_magic
    @one_line_errors
    def disco_pause(self, line: str) -> Any:
        """Stop workers that run at the next line that they come to."""
        return self._shown("pause", arguments_of(DebugMagics.disco_pause, line))

    @magic_arguments()
    @session_option
    @line_magic
    @one_line_errors
    def disco_abort(self, line: str) -> None:
        """End the program that is stepped; the session goes on."""
        args = arguments_of(DebugMagics.disco_abort, line)
        stuck = self.lab.disco_abort(session=args.session)
        print("the program was ended")
        if stuck:
            print(
                f"{name_ranks(stuck)} did not stop, inside a call that Python can't interrupt; "
                "%disco_restart starts anew"
            )

    @magic_arguments()
    @frame_option
    @ranks_option
    @session_option
    @line_magic
    @one_line_errors
    def disco_where(self, line: str) -> Any:
        """Show where each worker is, its stack, and its variables there."""
        args = arguments_of(DebugMagics.disco_where, line)
        return self.lab.disco_where(args.ranks, frame=args.frame, session=args.session)

    @magic_arguments()
    @frame_option
    @ranks_option
    @timeout_option
    @session_option
    @no_var_expand
    @line_magic
    @one_line_errors
    def disco_eval(self, line: str) -> Any:
        """Show the value of an expression where the workers stand: ``%disco_eval loss.item()``."""
        text, args = text_and_options(DebugMagics.disco_eval, line)
        if not text:
            raise UsageError("%disco_eval: what? For instance: %disco_eval x.shape")
        return self.lab.disco_eval(
            text, args.ranks, frame=args.frame, timeout=args.timeout, session=args.session
        )

    @magic_arguments()
    @frame_option
    @ranks_option
    @timeout_option
    @session_option
    @no_var_expand
    @line_magic
    @one_line_errors
    def disco_set(self, line: str) -> Any:
        """Give a variable a new value where the workers stand: ``%disco_set lr = lr / 2``."""
        text, args = text_and_options(DebugMagics.disco_set, line)
        name, expression = _assignment(text)
        return self.lab.disco_set(
            name,
            expression,
            args.ranks,
            frame=args.frame,
            timeout=args.timeout,
            session=args.session,
        )

    @magic_arguments()
    @argument("-d", "--delete", metavar="NUMBER", help="remove this one, or all")
    @ranks_option
    @session_option
    @no_var_expand
    @line_magic
    @one_line_errors
    def disco_break(self, line: str) -> Any:
        """Set a break point: ``%disco_break model.py:12 if rank == 2``; alone: list them.

        All workers gather at the line, then it is decided, and all stop or none. It is kept for the
        programs to come; a line alone is of the cell in which the workers stand.
        """
        if line.split()[-1:] in (["-d"], ["--delete"]):
            raise UsageError("%disco_break: -d which? The number of one, or all")
        text, args = text_and_options(DebugMagics.disco_break, line)
        if args.delete and not (args.delete == "all" or args.delete.isdecimal()):
            raise UsageError(f"%disco_break: -d takes the number of one, or all: {args.delete!r}")
        if args.delete and text:
            raise UsageError("%disco_break: a break point to set, or -d, not both")
        found = self.lab.disco_break(
            unquoted(text) if text[:1] in ("'", '"') else text,
            args.ranks,
            remove=args.delete,
            session=args.session,
        )
        if not text and not args.delete:
            return Shown(breaks_parts(found))
        gone = "removed " if args.delete else ""
        if not found:
            print("there are no break points")
        for one in found:
            print(f"{gone}break point {one.number}: {one}")
        return None

    def _shown(self, what: str, args: Any, *given: Any) -> Any:
        """Go on, and say so if nothing comes of it."""
        method = getattr(self.lab, f"disco_{what}")
        found = method(*given, timeout=args.timeout, session=args.session)
        if found is None or (isinstance(found, Stop) and found.finished):
            print("the program has ended on all workers")
            return None
        return found


def _assignment(text: str) -> tuple[str, str]:
    """What is set, and to what: a variable, an item or an attribute, and an expression."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        body = []
    found = body[0] if len(body) == 1 else None
    if not isinstance(found, ast.Assign) or len(found.targets) != 1:
        raise UsageError("%disco_set: a name, = and an expression, such as: lr = lr / 2")
    name = ast.get_source_segment(text, found.targets[0])
    value = ast.get_source_segment(text, found.value)
    return name or "", value or ""
