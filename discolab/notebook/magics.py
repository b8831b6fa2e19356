"""The magics for sessions, cells, checkpoints and pictures; those of the debugger: debug_magics.py.

Six stand on the first screen: ``%disco_session``, ``%%disco``, ``%disco_run``, ``%disco_load``,
``%disco_show WHAT``, ``%disco_debug WHAT``. Each word of the last two is a magic of its own, too.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from itertools import pairwise
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser, argument
from IPython.display import display

from ..engines import ENGINES
from ..views.registers.table import SORTS
from .lab import Lab
from .live import PROGRESS_AFTER
from .magic import (
    SESSION,
    TARGETS,
    TIMEOUT,
    Magic,
    names_in,
    read_options,
    split_options,
    unquoted,
    without_comment,
    words_of,
)
from .output import GROUPINGS

_SESSION_NAME = argument("name", nargs="?", help="the session (default: the one used last)")
_AT_ONCE = argument(
    "--stream", dest="stream", action="store_true", default=None, help="output at once"
)
_AT_THE_END = argument("--no-stream", dest="stream", action="store_false", help="output at the end")
_GROUPING = argument(
    "--group-outputs", choices=GROUPINGS, default="order", help="order of the output"
)

# -- sessions ------------------------------------------------------------------------------------


def _session(
    lab: Lab,
    num_workers: int | None,
    count: int | None,
    gpu_ids: str | None,
    restore: str | None,
    **options: Any,
) -> None:
    workers = num_workers or count
    if restore is not None:
        restore = unquoted(restore)
        saved = lab.snapshotting.saved(restore)  # before a session of that name is shut down
        workers = workers or saved.num_workers
    if workers is None:
        raise UsageError("%disco_session: how many workers? For four: %disco_session 4")
    devices = options.pop("devices")
    if gpu_ids:
        devices = ",".join(f"cuda:{index.strip()}" for index in gpu_ids.split(","))
    options["devices"] = devices.split(",") if devices and "," in devices else devices
    options["name"] = unquoted(options["name"])
    session = lab.sessions.disco_session(workers, **options)
    print(lab.sessions.describe(session))
    if restore is not None:
        print(lab.snapshotting.restore_into(session, restore))


Magic(
    name="disco_session",
    usage="N [--engine ENGINE] [options]",
    help="""Start N workers; their session is bound to a variable of the notebook, `sess`.

`%disco_session 4` gives four, one a GPU, or on the CPU where there is none. `%config Disco` shows
defaults that can be set for all sessions: engine, timeout, heartbeat, statistics_limit.""",
    examples=(
        "%disco_session 4",
        "%disco_session 4 --engine processes --mesh dp=2,tp=2",
        "%disco_session 8 --engine sockets --nodes 2   # says what to run on the other machine",
        "%disco_session 4 --restore setup   # with the variables that %disco_snapshot has saved",
    ),
    options=(
        argument("num_workers", type=int, nargs="?", metavar="N", help="how many workers"),
        argument("-n", dest="count", type=int, metavar="N", help="the same"),
        argument("--engine", help=f"one of: {', '.join(ENGINES)} (default: threads)"),
        argument("--devices", help="cpu, or one for each worker: cuda:0,cuda:1"),
        argument("-g", "--gpu-ids", metavar="IDS", help="GPUs by index: 0,1"),
        argument("--groups", type=int, default=1, help="split the workers into this many groups"),
        argument("--ccl", default="auto", help="collective backend: auto, local, gloo, nccl, mpi"),
        argument("--mesh", metavar="AXES", help="arrange the workers in a mesh: dp=2,tp=2"),
        argument(
            "--nodes",
            metavar="N",
            help="sockets: how many nodes the workers are on; local:2 starts two on this machine",
        ),
        argument("--host", metavar="ADDRESS", help="sockets, ray: where workers connect to"),
        argument("--port", type=int, metavar="PORT", help="sockets, ray: the port there"),
        argument("--key-file", metavar="FILE", help="sockets: the keys of the session"),
        argument("--address", metavar="ADDRESS", help="ray: the cluster; auto: the one here"),
        argument(
            "--heartbeat",
            type=float,
            metavar="S",
            help="processes, sockets, ray: seconds of silence after which a worker counts as "
            "frozen",
        ),
        argument(
            "--start-timeout",
            type=float,
            metavar="S",
            help="processes, sockets, ray: seconds that the workers may take to be there",
        ),
        argument(
            "--respawn",
            action="store_true",
            default=None,
            help="processes, sockets, ray: a worker that dies is replaced at once",
        ),
        argument(
            "--timeout",
            type=float,
            metavar="S",
            help="seconds after which a wait for the workers is given up (default: never)",
        ),
        argument(
            "--statistics-limit",
            type=int,
            metavar="BYTES",
            help="of a tensor up to which a picture reads all values (default: 4 MiB)",
        ),
        argument("--name", default="sess", help="the variable that holds the session"),
        argument(
            "--restore",
            metavar="SNAPSHOT",
            help="give the workers the variables that %%disco_snapshot has saved",
        ),
    ),
    call=_session,
).enter()


def _restart(lab: Lab, targets: str | None, name: str | None, **options: Any) -> None:
    if targets is None:
        print(lab.sessions.describe(lab.sessions.disco_restart(name, **options)))
        return
    given = [f"--{option}" for option, value in options.items() if value is not None]
    if given:
        raise UsageError(f"%disco_restart: workers are restarted as they were, without {given[0]}")
    for result in lab.sessions.disco_restart_worker(targets, session=name):
        display(result)


Magic(
    name="disco_restart",
    help="""Start the session anew with the same settings; values on workers are gone.

With -t only those workers: the others keep what they hold, and what is lost and what could be
restored is shown.""",
    examples=(
        "%disco_restart",
        "%disco_restart --engine processes",
        "%disco_restart -t 2          # a new worker 2",
    ),
    options=(
        _SESSION_NAME,
        argument(
            "-t",
            "--targets",
            metavar="RANKS",
            help="only these workers: 2, 1,3 or tp=0 (default: all, as a new session)",
        ),
        argument("--engine", help=f"on another engine, one of: {', '.join(ENGINES)}"),
        argument("--nodes", metavar="N", help="sockets: how many nodes the workers are on"),
    ),
    call=_restart,
).enter()


def _shutdown(lab: Lab, name: str | None) -> None:
    name = name or lab.sessions.current
    lab.sessions.disco_shutdown(name)
    print(f"{name}: shut down")


Magic(
    name="disco_shutdown",
    help="Stop the workers, whatever they do.",
    examples=("%disco_shutdown", "%disco_shutdown pair   # the session of that name"),
    options=(_SESSION_NAME,),
    call=_shutdown,
).enter()


def _mesh(lab: Lab, axes: list[str], session: str | None) -> Any:
    mesh = lab.sessions.disco_mesh("".join(axes), session=session)
    if mesh is None:
        print("no mesh yet: %disco_mesh dp=2,tp=2 makes one")
    return mesh


Magic(
    name="disco_mesh",
    help="Arrange the workers in a mesh with named axes; without axes show the one that is.",
    examples=("%disco_mesh dp=2,tp=2", "%disco_mesh dp=-1,tp=2   # as many as there are"),
    options=(argument("axes", nargs="*", help="such as dp=2,tp=2; one size may be -1"), SESSION),
    call=_mesh,
).enter()

# -- cells ---------------------------------------------------------------------------------------

_BREAK_EXAMPLE = '-b "12 if rank == 2"'
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


def _read_program(parser: MagicArgumentParser, line: str, cell: str | None = None) -> Namespace:
    """Read the line of a magic with `_STEPPING` options.

    Raises
    ------
    UsageError
        If a breakpoint lacks its line, or its quotes.
    """
    what = "%%disco" if parser.prog == "%disco" else parser.prog
    for word, after in pairwise([*words_of(without_comment(line)), ""]):
        if word in ("-b", "--break") and (not after or after.startswith("-")):
            raise UsageError(
                f"{what}: {word} needs the line to stop at: {_BREAK_EXAMPLE} (--block, to wait for "
                "the workers, is the default)"
            )
    args = read_options(parser, line)
    rest = [*getattr(args, "code", ()), *getattr(args, "args", ())]
    if args.breaks and (rest[:1] == ["if"] or getattr(args, "path", "") == "if"):
        raise UsageError(
            f"{what}: a breakpoint with a condition is put in quotes: {_BREAK_EXAMPLE}"
        )
    args.trace = None if args.trace is None else tuple(names_in([unquoted(args.trace)]))
    args.breaks = [unquoted(text) for text in args.breaks]
    return args


def _read_cell(parser: MagicArgumentParser, line: str, cell: str | None = None) -> Namespace:
    """Read the line above a cell; or, without one, options with the code behind them."""
    options, code = (line, "") if cell is not None else split_options(parser, line)
    args = _read_program(parser, options)
    if cell is None:
        args.cell = code
    elif args.code:
        raise UsageError(
            f"%%disco: {' '.join(args.code)!r} is no option; code goes on the lines below"
        )
    if args.noblock and (args.step or args.breaks or args.pm or args.nan):
        raise UsageError(
            "%%disco: a cell that may stop is waited for: leave out -a (--noblock), or the "
            "options that stop it"
        )
    return args


def _cell(
    lab: Lab,
    cell: str,
    code: list[str],
    push: list[str] | None,
    out: list[str] | None,
    block: bool,
    noblock: bool,
    local: bool,
    signal_on_interrupt: str,
    **options: Any,
) -> Any:
    source = cell if cell.strip() else ""
    if local:
        lab.shell.run_cell(source).raise_error()
    return lab.programs.disco(
        source,
        push=names_in(push),
        out=names_in(out),
        block=block or not noblock,
        interrupt=signal_on_interrupt == "SIGINT",
        **options,
    )


Magic(
    name="disco",
    usage="[-t RANKS] [options]   (code on the lines below; or with one %%, behind the options)",
    help="""Run a cell (or with one %, the line) on all workers; shows the last value's shards.

Each worker has rank, world_size, device, ccl, torch, dist, rpc and disco_assert; `await` works.""",
    examples=(
        "%%disco -t 0,2              # on these workers only; the code stands below",
        "%%disco --step              # stop at the first line, on all workers",
        "%disco x.shape              # one line",
    ),
    options=(
        TARGETS,
        SESSION,
        argument(
            "-i",
            "--in",
            dest="push",
            action="append",
            metavar="NAMES",
            help="notebook variables to send first",
        ),
        argument(
            "-o",
            "--out",
            action="append",
            metavar="NAMES",
            help="worker variables to bind here, as DRefs",
        ),
        *_STEPPING,
        argument("--block", action="store_true", help="wait for the workers (the default)"),
        argument("-a", "--noblock", action="store_true", help="return at once with a handle"),
        _AT_ONCE,
        _AT_THE_END,
        _GROUPING,
        argument(
            "--progress-after",
            type=float,
            default=PROGRESS_AFTER,
            metavar="SECS",
            help="seconds before a line says what the workers do; -1: never",
        ),
        argument(
            "--signal-on-interrupt",
            choices=("SIGINT", "none"),
            default="SIGINT",
            help="whether stop ends the cell on the workers too (the default), or the waiting only",
        ),
        argument("--local", action="store_true", help="run the cell in the notebook too, first"),
        argument("--timeout", type=float, metavar="S", help="seconds to wait for the workers"),
        argument("code", nargs="*", help="for the line form: what to run"),
    ),
    read=_read_cell,
    call=_cell,
    cell=True,
).enter()


def _run(lab: Lab, path: str, args: list[str], **options: Any) -> Any:
    return lab.programs.disco_run(unquoted(path), [unquoted(word) for word in args], **options)


Magic(
    name="disco_run",
    usage="[options] SCRIPT [its arguments]",
    help="Run a script written for torchrun on the workers; its names are in the cells afterwards.",
    examples=(
        "%disco_run train.py --steps 10",
        '%disco_run -b "model.py:30 if rank == 2" train.py   # stop there',
    ),
    options=(
        SESSION,
        argument("--timeout", type=float, metavar="S", help="seconds to wait for the workers"),
        _AT_ONCE,
        _AT_THE_END,
        _GROUPING,
        *_STEPPING,
        argument("path", metavar="SCRIPT", help="a Python file"),
        argument("args", nargs=argparse.REMAINDER, help="its command line"),
    ),
    read=_read_program,
    call=_run,
).enter()

# -- variables and checkpoints -------------------------------------------------------------------


def _push(lab: Lab, names: list[str], **options: Any) -> None:
    lab.variables.disco_push(names_in(names), **options)


Magic(
    name="disco_push",
    help="Send notebook variables to the workers, each its own copy.",
    examples=("%disco_push batch,lr", "%disco_push -t 0 config"),
    options=(argument("names", nargs="+", help="notebook variables"), TARGETS, SESSION),
    call=_push,
).enter()


def _pull(lab: Lab, names: list[str], **options: Any) -> None:
    lab.variables.disco_pull(names_in(names), **options)


Magic(
    name="disco_pull",
    help="Fetch worker variables: a list with one value a worker; with -t 0 the value itself.",
    examples=("%disco_pull loss", "%disco_pull -t 0 logits   # that of worker 0"),
    options=(argument("names", nargs="+", help="worker variables"), TARGETS, SESSION, TIMEOUT),
    call=_pull,
).enter()


def _read_load(parser: MagicArgumentParser, line: str, cell: str | None = None) -> Namespace:
    args = read_options(parser, line.rstrip().removesuffix(";"))
    for key in ("plan", "params", "dtype", "session"):
        setattr(args, key, unquoted(getattr(args, key) or "") or None)
    args.path, args.name = unquoted(args.path), unquoted(args.name)
    return args


def _display(weights: Any, _: Namespace) -> None:
    """Show, and not return, what was loaded: `Out` would hold all of it on the workers."""
    display(weights)


Magic(
    name="disco_load",
    usage="CHECKPOINT [--plan PLAN] [options]",
    help="""Load a checkpoint into shards on the workers.

Here weights["model.norm.weight"] is a DRef then, in %%disco the worker's tensor.""",
    examples=(
        "%disco_load llama --plan plan.json --dtype bf16",
        "%disco_load llama --plan plan.json --dry-run   # show what would be done",
    ),
    options=(
        argument("path", metavar="CHECKPOINT", help="a file, a folder or an index file"),
        argument(
            "--plan",
            metavar="PLAN",
            help="layouts: a JSON file or a variable here (default: copies)",
        ),
        argument("--params", metavar="GLOBS", help="these parameters only: *.mlp.*,*.norm.weight"),
        argument("--dtype", metavar="D", help="what floating point is cast to, such as bf16"),
        argument("--as", dest="name", default="weights", metavar="NAME", help="variable (weights)"),
        argument("--dry-run", action="store_true", help="show what would be done; read no weight"),
        argument("--verify", action="store_true", help="compare files with checksums of the index"),
        argument("--check-nan", action="store_true", help="refuse NaN and infinity"),
        argument(
            "--read-by",
            choices=("each", "first"),
            default="each",
            help="each worker reads its shards (default), or the first those of all",
        ),
        argument("--timeout", type=float, metavar="S", help="seconds in which nothing comes"),
        SESSION,
    ),
    read=_read_load,
    show=_display,
).enter()


def _snapshot(
    lab: Lab, name: str | None, names: str | None, plan: str | None, **options: Any
) -> None:
    chosen = names_in([unquoted(names)]) if names else ()
    plan = unquoted(plan or "") or None
    if name is not None:
        print(lab.snapshotting.disco_snapshot(unquoted(name), names=chosen, plan=plan, **options))
        return
    if chosen or plan:
        raise UsageError("%disco_snapshot: which name? %disco_snapshot setup")
    found = lab.snapshotting.disco_snapshot()
    assert isinstance(found, list)
    lines = [str(snapshot).splitlines()[0] for snapshot in found]
    print("\n".join(lines) or f"no snapshots in {lab.sessions.config.snapshots}")


Magic(
    name="disco_snapshot",
    usage="[NAME] [options]",
    help="""Save the variables of the workers' cells; without a name, list the snapshots there are.

%disco_session 4 --restore NAME brings them back. What can't be saved is named.""",
    examples=(
        "%disco_snapshot setup",
        "%disco_snapshot   # list them: date, size, workers",
        "%disco_snapshot weights_only --names weights",
    ),
    options=(
        argument("name", nargs="?", metavar="NAME", help="its name, or the path of a folder"),
        argument("--names", metavar="NAMES", help="these variables only: model,opt"),
        argument(
            "--plan",
            metavar="PLAN",
            help="how tensors are laid out, for another number of workers (see %%disco_load)",
        ),
        SESSION,
        TIMEOUT,
    ),
    call=_snapshot,
).enter()

# -- pictures ------------------------------------------------------------------------------------


def _registers(lab: Lab, filter: list[str], **options: Any) -> Any:
    return lab.panels.disco_registers(filter=" ".join(unquoted(text) for text in filter), **options)


Magic(
    name="disco_registers",
    help="Show every live register: what it holds, who made it and who holds it; live.",
    examples=("%disco_registers", "%disco_registers --leaks", "%disco_registers --filter float32"),
    options=(
        argument("--sort", choices=SORTS, default="bytes", help="the order (default: bytes)"),
        argument(
            "--filter",
            action="append",
            default=[],
            metavar="TEXT",
            help="only registers of which this is told: a name, a type, a cell; may be given twice",
        ),
        argument(
            "--leaks",
            action="store_true",
            help="only those that no name leads to, or whose line makes more with each cell",
        ),
        SESSION,
    ),
    call=_registers,
).enter()

Magic(
    name="disco_devices",
    help="Show what each worker does, for whom it waits, and what it uses; live.",
    examples=("%disco_devices", "%disco_devices -s pair   # of the session of that name"),
    options=(SESSION,),
).enter()


def _timeline(
    lab: Lab, on: bool, off: bool, profile: bool, clear: bool, export: str, session: str | None
) -> Any:
    if on and off:
        raise UsageError("%disco_timeline: --on or --off, not both")
    before = lab.panels.is_traced(session)
    only = export or clear
    now = before if only and not (on or off or profile) else not off
    timeline = lab.panels.disco_timeline(session=session, on=now, profile=profile, clear=clear)
    if now != before or on or off:
        words = "on: what the workers do from now on is recorded" if now else "off"
        print(f"tracing is {words}")
    if export:
        print(f"written to {timeline.to_chrome(unquoted(export))}")
    return None if only or on else timeline


Magic(
    name="disco_timeline",
    help="""Record what each worker does and when, and show it; live.

`--export` and `--clear` leave it as it is whether it is recorded.""",
    examples=("%disco_timeline", "%disco_timeline --off --export trace.json   # for Perfetto"),
    options=(
        argument("--on", action="store_true", help="record from now on; do not show it now"),
        argument("--off", action="store_true", help="stop recording; show what was recorded"),
        argument(
            "--profile", action="store_true", help="have torch.profiler look on too, until --off"
        ),
        argument("--clear", action="store_true", help="forget what was recorded before"),
        argument("--export", metavar="FILE", help="write it to a file, for Perfetto or Chrome"),
        SESSION,
    ),
    call=_timeline,
).enter()

Magic(
    name="disco_status",
    help="Show what each worker does now; never waits for them.",
    examples=("%disco_status", "%disco_status pair   # of the session of that name"),
    options=(_SESSION_NAME,),
    show=lambda text, _: print(text),
).enter()

Magic(
    name="disco_doctor",
    help="Show the last collectives of each worker, and who waits for whom; works during a hang.",
    examples=("%disco_doctor", "%disco_doctor -n 3 --group tp"),
    options=(
        argument("-n", type=int, default=8, metavar="N", help="collectives of each worker (8)"),
        TARGETS,
        argument("--group", metavar="G", help="world, ranks 0,1 or an axis: of these groups only"),
        argument("--clear", action="store_true", help="forget what is over, after this look"),
        SESSION,
    ),
).enter()


def _whos(lab: Lab, names: list[str], **options: Any) -> Any:
    return lab.variables.disco_whos(names_in(names), **options)


Magic(
    name="disco_whos",
    help="""Show all variables of all workers: type, layout, bytes, and whether they are equal.

Values of tensors up to 4 MiB are compared; --stats compares larger ones, too.""",
    examples=("%disco_whos", "%disco_whos w*,loss --stats"),
    options=(
        argument("names", nargs="*", metavar="GLOBS", help="these only: w*,loss"),
        argument("--stats", action="store_true", help="read all values, however large"),
        SESSION,
    ),
    call=_whos,
).enter()

Magic(
    name="disco_show",
    help="Show something of the session.",
    examples=(
        "%disco_show registers --leaks",
        "%disco_show doctor",
        "%disco_show registers --help   # its options",
    ),
    family={
        what: f"disco_{what}"
        for what in ("registers", "devices", "timeline", "status", "doctor", "whos")
    },
    expands=False,
).enter()
