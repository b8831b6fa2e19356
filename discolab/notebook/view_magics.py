"""Magics that show a live picture of a session; each is a method of `Panels` of the same name."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from ..views.registers.table import SORTS
from .magic_lines import LabMagics, arguments_of, one_line_errors, session_option, unquoted


@magics_class
class ViewMagics(LabMagics):
    """``%disco_registers``, ``%disco_devices``, ``%disco_timeline``, ``%disco_debugger``."""

    @magic_arguments()
    @argument("--sort", choices=SORTS, default="bytes", help="the order (default: bytes)")
    @argument(
        "--filter",
        action="append",
        default=[],
        metavar="TEXT",
        help="only registers of which this is told: a name, a type, a cell; may be given twice",
    )
    @argument(
        "--leaks",
        action="store_true",
        help="only those that no name leads to, or whose line makes more with each cell",
    )
    @session_option
    @line_magic
    @one_line_errors
    def disco_registers(self, line: str) -> Any:
        """Show every live register: what it holds, who made it and who holds it; live."""
        args = arguments_of(ViewMagics.disco_registers, line)
        return self.lab.disco_registers(
            args.session,
            sort=args.sort,
            filter=" ".join(unquoted(text) for text in args.filter),
            leaks=args.leaks,
        )

    @magic_arguments()
    @session_option
    @line_magic
    @one_line_errors
    def disco_debugger(self, line: str) -> Any:
        """Show the program that is stepped, with buttons and keys: s n o c; live."""
        args = arguments_of(ViewMagics.disco_debugger, line)
        return self.lab.disco_debugger(session=args.session)

    @magic_arguments()
    @session_option
    @line_magic
    @one_line_errors
    def disco_devices(self, line: str) -> Any:
        """Show what each worker does, for whom it waits, and what it uses; live."""
        args = arguments_of(ViewMagics.disco_devices, line)
        return self.lab.disco_devices(session=args.session)

    @magic_arguments()
    @argument("--on", action="store_true", help="record from now on; do not show it now")
    @argument("--off", action="store_true", help="record no more; show what was recorded")
    @argument("--profile", action="store_true", help="have torch.profiler look on too, until --off")
    @argument("--clear", action="store_true", help="forget what was recorded before")
    @argument("--export", metavar="FILE", help="write it to a file, for Perfetto or Chrome")
    @session_option
    @line_magic
    @one_line_errors
    def disco_timeline(self, line: str) -> Any:
        """Record what each worker does and when, and show it; live.

        ``--export`` and ``--clear`` leave it as it is whether it is recorded.
        """
        args = arguments_of(ViewMagics.disco_timeline, line)
        if args.on and args.off:
            raise UsageError("%disco_timeline: --on or --off, not both")
        before = self.lab.is_traced(args.session)
        only = args.export or args.clear
        on = before if only and not (args.on or args.off or args.profile) else not args.off
        shown = self.lab.disco_timeline(
            session=args.session, on=on, profile=args.profile, clear=args.clear
        )
        if on != before or args.on or args.off:
            words = "on: what the workers do from now on is recorded" if on else "off"
            print(f"tracing is {words}")
        if args.export:
            print(f"written to {shown.to_chrome(unquoted(args.export))}")
        return None if only or args.on else shown
