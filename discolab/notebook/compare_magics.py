"""``%disco_compare``: a sharded program against its reference; see `Comparing.disco_compare`."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from .magic_lines import (
    LabMagics,
    arguments_of,
    one_line_errors,
    session_option,
    unquoted,
)


@magics_class
class CompareMagics(LabMagics):
    """``%disco_compare`` and ``%%disco_compare``."""

    @magic_arguments()
    @argument("reference", help="a notebook variable: the module or function on one device")
    @argument("inputs", nargs="*", help="notebook variables: what both are called with")
    @argument(
        "--module",
        metavar="NAME",
        help="the worker variable with the sharded module (default: the one of the same name)",
    )
    @argument(
        "--layout",
        action="append",
        default=[],
        metavar="GLOB=LAYOUT",
        help="how values lie: '*.qkv.weight=shard(0, segments=3)'; may be given several times",
    )
    @argument("--layouts", metavar="VAR", help="a notebook variable with a dict of layouts")
    @argument("--names", metavar="VAR", help="a dict: paths there to other paths on the workers")
    @argument("--loss", metavar="VAR", help="a function that makes a loss of the result")
    @argument("--no-backward", action="store_true", help="compare forward only")
    @argument("--rtol", type=float, help="relative tolerance (default: by the dtype)")
    @argument("--atol", type=float, help="absolute tolerance")
    @argument("--seed", type=int, default=0, help="of the random state at the start (0)")
    @argument("--timeout", type=float, metavar="S", help="seconds to wait for the workers")
    @session_option
    @line_cell_magic
    @one_line_errors
    def disco_compare(self, line: str, cell: str | None = None) -> Any:
        """Find the first place where a sharded program and its reference differ, and why.

        ``%disco_compare model x`` calls the model here with x, and the workers' variable of the
        same name. Below ``%%disco_compare model x`` stands code for the workers instead, which
        ends with the sharded result; x is bound there.
        """
        args = arguments_of(CompareMagics.disco_compare, line)
        layouts: dict[str, Any] = dict(self._named(args.layouts) or {})
        for text in args.layout:
            pattern, equals, layout = unquoted(text).partition("=")
            if not equals:
                raise UsageError(
                    f"%disco_compare: --layout {text} has no =: write '*.weight=shard(0)'"
                )
            layouts[pattern.strip()] = layout.strip()
        return self.lab.disco_compare(
            args.reference,
            args.inputs,
            cell,
            module=args.module,
            layouts=layouts,
            names=self._named(args.names),
            loss=self._named(args.loss),
            backward=not args.no_backward,
            rtol=args.rtol,
            atol=args.atol,
            seed=args.seed,
            timeout=args.timeout,
            session=args.session,
        )

    def _named(self, name: str | None) -> Any:
        """The notebook variable of an option."""
        return None if name is None else self.lab.variable(name)
