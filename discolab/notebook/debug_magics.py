"""The debugger's magics: go on, look around, breakpoints, what is over, compare; ``%disco_debug``.

A table: what a row does is the command of the same name, most of them `Debugging`'s.
"""

from __future__ import annotations

import ast
import json
from argparse import Namespace
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser, argument

from ..debugger.picture import breaks_parts
from ..debugger.stops import Stop
from ..runtime.failures import name_ranks
from ..views import Shown
from .lab import Lab
from .magic import FRAME, RANKS, SESSION, TIMEOUT, Magic, read_options, reading_text, unquoted

# -- going on ------------------------------------------------------------------------------------


def _where_it_stands(result: Any, _: Namespace) -> Any:
    """Where the workers stand, or the program's value; say so if it has ended without one."""
    if result is None or (isinstance(result, Stop) and result.finished):
        print("the program has ended on all workers")
        return None
    return result


_LINE = argument("line", nargs="?", type=int, metavar="LINE", help="of this function")
_TH = argument("n", nargs="?", type=int, default=1, help="stop at the n-th breakpoint (1)")
_GOING_ON = {
    "step": (
        "Go to the next line on all workers, in functions that it calls too.",
        ("%disco_step", "%disco_step -r 0,2   # these workers only"),
        (RANKS,),
    ),
    "next": (
        "Go to the next line of this function, or of its caller when it returns.",
        ("%disco_next", "%disco_next -r tp=0"),
        (RANKS,),
    ),
    "out": (
        "Go on until this function has returned.",
        ("%disco_out", "%disco_out -r 1"),
        (RANKS,),
    ),
    "until": (
        "Go to a later line of this function, as out of a loop, or to a line of it.",
        ("%disco_until", "%disco_until 12"),
        (_LINE, RANKS),
    ),
    "continue": (
        "Go on to the next breakpoint, or the end.",
        ("%disco_continue", "%disco_continue 3   # to the third from here"),
        (_TH, RANKS),
    ),
    "pause": (
        "Stop workers that run at the next line that they come to.",
        ("%disco_pause", "%disco_pause --timeout 30"),
        (),
    ),
}
for _name, (_help, _examples, _options) in _GOING_ON.items():
    Magic(
        name=f"disco_{_name}",
        help=_help,
        examples=_examples,
        options=(*_options, TIMEOUT, SESSION),
        show=_where_it_stands,
    ).enter()


def _ended(stuck: list[int], _: Namespace) -> None:
    print("the program was ended")
    if stuck:
        print(
            f"{name_ranks(stuck)} did not stop, inside a call that Python can't interrupt; "
            "%disco_restart starts anew"
        )


Magic(
    name="disco_abort",
    help="End the program that is stepped; the session goes on.",
    examples=("%disco_abort", "%disco_abort -s pair   # in the session of that name"),
    options=(SESSION,),
    show=_ended,
).enter()

# -- looking around ------------------------------------------------------------------------------

Magic(
    name="disco_debugger",
    help="Show the program that is stepped, with buttons and keys: s n o c; live.",
    examples=("%disco_debugger", "%disco_debug   # the same"),
    options=(SESSION,),
).enter()

Magic(
    name="disco_where",
    help="Show where each worker is, its stack, and its variables there.",
    examples=("%disco_where", "%disco_where -r 2 --frame 1   # in the function that called"),
    options=(FRAME, RANKS, SESSION),
).enter()

Magic(
    name="disco_eval",
    usage="EXPR [-r RANKS] [-f N] [options]",
    help="Show the value of an expression where the workers stand.",
    examples=("%disco_eval loss.item()", "%disco_eval x.shape -r 0,2"),
    options=(FRAME, RANKS, TIMEOUT, SESSION),
    read=reading_text("expression", "%disco_eval: what? For instance: %disco_eval x.shape"),
    expands=False,
).enter()


def _set(lab: Lab, text: str, **options: Any) -> Any:
    """Take an assignment apart: a variable, an item or an attribute; and an expression."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        body = []
    statement = body[0] if len(body) == 1 else None
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        raise UsageError("%disco_set: a name, = and an expression, such as: lr = lr / 2")
    name = ast.get_source_segment(text, statement.targets[0])
    value = ast.get_source_segment(text, statement.value)
    return lab.debugging.disco_set(name or "", value or "", **options)


Magic(
    name="disco_set",
    usage="NAME = EXPR [-r RANKS] [-f N] [options]",
    help="Give a variable a new value where the workers stand.",
    examples=("%disco_set lr = lr / 2", "%disco_set x[0] = 0 -r 1"),
    options=(FRAME, RANKS, TIMEOUT, SESSION),
    read=reading_text("text"),
    call=_set,
    expands=False,
).enter()

# -- breakpoints --------------------------------------------------------------------------------


def _read_break(parser: MagicArgumentParser, line: str, cell: str | None = None) -> Namespace:
    if line.split()[-1:] in (["-d"], ["--delete"]):
        raise UsageError("%disco_break: -d which? The number of one, or all")
    args = reading_text("where")(parser, line, None)
    if args.remove and not (args.remove == "all" or args.remove.isdecimal()):
        raise UsageError(f"%disco_break: -d takes the number of one, or all: {args.remove!r}")
    if args.remove and args.where:
        raise UsageError("%disco_break: a breakpoint to set, or -d, not both")
    if (args.hits or args.log) and not args.where:
        raise UsageError("%disco_break: --hits and --log are of a breakpoint: at which line?")
    args.where = unquoted(args.where) if args.where[:1] in ("'", '"') else args.where
    args.hits, args.log = unquoted(args.hits), unquoted(args.log)
    return args


def _breakpoints(breaks: list[Any], args: Namespace) -> Any:
    if not args.where and not args.remove:
        return Shown(breaks_parts(breaks))
    gone = "removed " if args.remove else ""
    if not breaks:
        print("there are no breakpoints")
    for point in breaks:
        print(f"{gone}breakpoint {point.number}: {point}")
    return None


Magic(
    name="disco_break",
    usage="[FILE:LINE [if COND] [--hits WHEN] [--log TEXT] | -d NUMBER] [options]",
    help="""Set a breakpoint; alone: list them.

All workers gather at the line, then it is decided, and all stop or none. It is kept for the
programs to come; a line alone is of the cell in which the workers stand.""",
    examples=(
        "%disco_break model.py:12 if rank == 2",
        "%disco_break model.py:12 --log 'loss {loss.item():.3}'",
        "%disco_break            # list them",
        "%disco_break -d all",
    ),
    options=(
        argument("-d", "--delete", dest="remove", metavar="NUMBER", help="remove this one, or all"),
        argument(
            "--hits",
            default="",
            metavar="WHEN",
            help="at which of the times that it would stop it does: 3, '>= 3', '%%%% 10'",
        ),
        argument(
            "--log",
            default="",
            metavar="TEXT",
            help="each worker prints this, with values for {expressions}, and does not stop",
        ),
        RANKS,
        SESSION,
    ),
    read=_read_break,
    show=_breakpoints,
    expands=False,
).enter()

# -- other front ends ----------------------------------------------------------------------------


def _served(server: Any, args: Namespace) -> None:
    if server is None:
        print("editors can no longer attach")
        return
    if args.jupyterlab:
        print("JupyterLab's debugger shows the workers of this session: switch it on (the bug)")
        return
    print(f"editors can attach to this session at {server.host}:{server.port}")
    if server.file is not None:
        print("`discolab dap` in a terminal prints what belongs in launch.json")
    else:  # there is no place for the file that it reads
        print(json.dumps(server.launch, indent=2))


Magic(
    name="disco_dap",
    help="""Serve the debugger to VS Code and other editors: workers are threads there.

It listens on this machine alone; an editor must show a token, which `discolab dap` prints.
With --jupyterlab the debugger of JupyterLab (the bug above the notebook) shows the workers, until
--close or the end of the session; it shows the kernel then again.""",
    examples=("%disco_dap", "%disco_dap --jupyterlab", "%disco_dap --close"),
    options=(
        argument("--port", type=int, default=0, metavar="P", help="where (default: a free one)"),
        argument(
            "--jupyterlab", action="store_true", help="JupyterLab's own debugger shows the workers"
        ),
        argument("--close", action="store_true", help="stop serving it"),
        SESSION,
    ),
    show=_served,
).enter()

# -- what is over --------------------------------------------------------------------------------


def _read_pm(parser: MagicArgumentParser, line: str, cell: str | None = None) -> Namespace:
    """All that follows ``-e`` is an expression."""
    options, flag, expression = f" {line}".partition(" -e ")
    args = read_options(parser, options)
    if flag and not expression.strip():
        raise UsageError("%disco_pm: -e what? For instance: -e x.shape")
    if flag:
        args.expression = expression.strip()
    return args


def _pm(lab: Lab, who: str | None, ranks: str | None, **options: Any) -> Any:
    return lab.debugging.disco_pm(who or ranks, **options)


def _post_mortem(result: Any, args: Namespace) -> Any:
    if args.forget:
        print("the frames of the last failure are released")
    return result


Magic(
    name="disco_pm",
    help="""Show each worker where the last cell failed: the stack, and the variables there.

`-e EXPR` shows the value of an expression there: all that follows -e.""",
    examples=("%disco_pm", "%disco_pm 2 -e x.shape"),
    options=(
        argument("who", nargs="?", metavar="RANKS", help="the workers (default: all that failed)"),
        argument("-e", "--eval", dest="expression", metavar="EXPR", help="show its value there"),
        argument("--forget", action="store_true", help="release the frames, and what they hold"),
        FRAME,
        RANKS,
        TIMEOUT,
        SESSION,
    ),
    read=_read_pm,
    call=_pm,
    show=_post_mortem,
    expands=False,
).enter()


Magic(
    name="disco_explain",
    help="""Say what went wrong last: what failed, on whom, and since when the workers differ.

It is told from what is recorded (failed calls, collectives, what the variables were after each
cell), also while a program hangs in the background. What is inferred says "perhaps".""",
    examples=("%disco_explain", "%disco_explain -s pair   # in the session of that name"),
    options=(SESSION,),
).enter()


Magic(
    name="disco_traceback",
    help="""Show the last error of workers again, with all frames.

Below a cell that fails, frames of libraries in a row are one line.""",
    examples=("%disco_traceback", "%disco_traceback -r 2   # of this worker"),
    options=(RANKS, SESSION),
    show=lambda text, _: print(text),
).enter()


def _history(result: Any, args: Namespace) -> Any:
    if args.name is None:
        print("recorded: " + ", ".join(result))
        return None
    return result


Magic(
    name="disco_history",
    help="Show a variable over time on each worker: what `%%disco --trace` has recorded.",
    examples=("%disco_history loss", "%disco_history   # which were recorded"),
    options=(
        argument("name", nargs="?", help="the variable (default: which were recorded)"),
        argument("-n", "--last", type=int, default=50, metavar="N", help="changes shown (50)"),
        RANKS,
        SESSION,
    ),
    show=_history,
).enter()

_LINES = argument("n", nargs="?", type=int, default=1, help="how many lines (1)")
Magic(
    name="disco_back",
    help="Go back in what `%%disco --trace` has recorded, line by line.",
    examples=("%disco_back", "%disco_back 10   # ten lines"),
    options=(_LINES, SESSION),
).enter()
Magic(
    name="disco_forward",
    aliases=("disco_forth",),
    help="Go forward again in what was recorded, after `%disco_back`.",
    examples=("%disco_forward", "%disco_forward 10   # ten lines"),
    options=(_LINES, SESSION),
).enter()

# -- beside a reference --------------------------------------------------------------------------


def _compare(
    lab: Lab,
    layout: list[str],
    layouts: str | None,
    names: str | None,
    loss: str | None,
    no_backward: bool,
    **options: Any,
) -> Any:
    def named(name: str | None) -> Any:
        return None if name is None else lab.comparing.variable(name)

    chosen: dict[str, Any] = dict(named(layouts) or {})
    for text in layout:
        pattern, equals, words = unquoted(text).partition("=")
        if not equals:
            raise UsageError(f"%disco_compare: --layout {text} has no =: write '*.weight=shard(0)'")
        chosen[pattern.strip()] = words.strip()
    return lab.comparing.disco_compare(
        layouts=chosen, names=named(names), loss=named(loss), backward=not no_backward, **options
    )


Magic(
    name="disco_compare",
    usage="REFERENCE [INPUTS] [options]",
    help="""Find the first place where a sharded program and its reference differ, and why.

`%disco_compare model x` calls the model here with x, and the workers' variable of the same name.
Below `%%disco_compare model x` stands code for the workers instead, which ends with the sharded
result; x is bound there. A dict alone, as `batch`, has the names of arguments as keys.""",
    examples=(
        "%disco_compare model x",
        "%disco_compare model batch --module sharded",
        "%disco_compare model x --layout '*.qkv.weight=shard(0, segments=3)'",
    ),
    options=(
        argument("reference", help="a notebook variable: the module or function on one device"),
        argument("inputs", nargs="*", help="notebook variables: what both are called with"),
        argument(
            "--module",
            metavar="NAME",
            help="the worker variable with the sharded module (default: the one of the same name)",
        ),
        argument(
            "--layout",
            action="append",
            default=[],
            metavar="GLOB=LAYOUT",
            help="layouts: '*.qkv.weight=shard(0, segments=3)'; may be given several times",
        ),
        argument("--layouts", metavar="VAR", help="a notebook variable with a dict of layouts"),
        argument("--names", metavar="VAR", help="a dict: paths there to other paths on workers"),
        argument("--loss", metavar="VAR", help="a function that makes a loss of the result"),
        argument("--no-backward", action="store_true", help="compare forward only"),
        argument("--rtol", type=float, help="relative tolerance (default: by the dtype)"),
        argument("--atol", type=float, help="absolute tolerance"),
        argument("--seed", type=int, default=0, help="of the random state at the start (0)"),
        argument("--timeout", type=float, metavar="S", help="seconds to wait for the workers"),
        SESSION,
    ),
    call=_compare,
    cell=True,
).enter()

_WORDS = (
    "step", "next", "out", "until", "continue", "pause", "abort", "where", "eval", "set", "break",
    "pm", "explain", "traceback", "history", "back", "forward", "compare", "dap",
)  # fmt: skip
Magic(
    name="disco_debug",
    help="""Step through a program on all workers, and look around; alone: a panel with buttons.

A program is stepped once it has stopped: `%%disco --step`, `%%disco -b "12 if rank == 2"`,
`breakpoint()` in a cell.""",
    examples=(
        "%disco_debug             # the panel",
        "%disco_debug next",
        "%disco_debug eval x.shape -r 0,2",
    ),
    family={what: f"disco_{what}" for what in _WORDS},
    alone="disco_debugger",
    cell=True,
    expands=False,
).enter()
