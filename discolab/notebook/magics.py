"""The line and cell magics: thin wrappers over the methods of `Lab` of the same names.

Those that show something live are in view_magics.py.
"""

from __future__ import annotations

import argparse
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

from ..engines import ENGINES
from .live import PROGRESS_AFTER
from .magic_lines import (
    LabMagics,
    arguments_of,
    names_in,
    one_line_errors,
    session_option,
    split_options,
    targets_option,
    unquoted,
)
from .output import GROUPINGS
from .stepping_options import check_break, stepping_of, stepping_options


@magics_class
class DiscoMagics(LabMagics):
    """``%disco_session``, ``%%disco`` and their kin."""

    @magic_arguments()
    @argument("num_workers", type=int, nargs="?", help="how many workers")
    @argument("-n", dest="count", type=int, help="the same")
    @argument("--engine", default="threads", help=f"one of: {', '.join(ENGINES)}")
    @argument("--devices", help="cpu, or one for each worker: cuda:0,cuda:1")
    @argument("-g", "--gpu-ids", metavar="IDS", help="GPUs by index: 0,1")
    @argument("--groups", type=int, default=1, help="cut the workers in this many groups")
    @argument("--ccl", default="auto", help="collective backend: auto, local, gloo, nccl, mpi")
    @argument("--mesh", metavar="AXES", help="arrange the workers in a mesh: dp=2,tp=2")
    @argument(
        "--nodes",
        metavar="N",
        help="sockets: how many nodes the workers are on; local:2 starts two on this machine",
    )
    @argument("--host", metavar="ADDRESS", help="sockets, ray: where workers connect to")
    @argument("--port", type=int, metavar="PORT", help="sockets, ray: the port there")
    @argument("--key-file", metavar="FILE", help="sockets: the keys of the session")
    @argument("--address", metavar="ADDRESS", help="ray: the cluster; auto: the one here")
    @argument(
        "--heartbeat",
        type=float,
        metavar="S",
        help="processes, sockets, ray: seconds of silence after which a worker is taken for frozen",
    )
    @argument(
        "--start-timeout",
        type=float,
        metavar="S",
        help="processes, sockets, ray: seconds that the workers may take to be there",
    )
    @argument("--name", default="sess", help="the variable that holds the session")
    @line_magic
    @one_line_errors
    def disco_session(self, line: str) -> None:
        """Start workers; their session is bound to a variable of the notebook.

        ``%disco_session 4`` gives four, one a GPU, or on the CPU where there is none.
        """
        args = arguments_of(DiscoMagics.disco_session, line)
        num_workers = args.num_workers or args.count
        if num_workers is None:
            raise UsageError("%disco_session: how many workers? For four: %disco_session 4")
        devices = args.devices
        if args.gpu_ids:
            devices = ",".join(f"cuda:{index.strip()}" for index in args.gpu_ids.split(","))
        session = self.lab.disco_session(
            num_workers,
            engine=args.engine,
            devices=devices.split(",") if devices and "," in devices else devices,
            groups=args.groups,
            ccl=args.ccl,
            mesh=args.mesh,
            name=unquoted(args.name),
            nodes=args.nodes,
            host=args.host,
            port=args.port,
            key_file=args.key_file,
            address=args.address,
            heartbeat=args.heartbeat,
            start_timeout=args.start_timeout,
        )
        print(self.lab.describe(session))

    @magic_arguments()
    @argument("axes", nargs="*", help="such as dp=2,tp=2; one size may be -1")
    @session_option
    @line_magic
    @one_line_errors
    def disco_mesh(self, line: str) -> Any:
        """Arrange the workers in a mesh with named axes; without axes show the one that is."""
        args = arguments_of(DiscoMagics.disco_mesh, line)
        mesh = self.lab.disco_mesh("".join(args.axes), session=args.session)
        if mesh is None:
            print("no mesh yet: %disco_mesh dp=2,tp=2 makes one")
        return mesh

    @magic_arguments()
    @argument("name", nargs="?", help="the session (default: the one used last)")
    @line_magic
    @one_line_errors
    def disco_status(self, line: str) -> None:
        """Show what each worker does now; never waits for them."""
        print(self.lab.disco_status(arguments_of(DiscoMagics.disco_status, line).name))

    @magic_arguments()
    @argument("-n", type=int, default=8, metavar="N", help="collectives of each worker (8)")
    @targets_option
    @argument("--group", metavar="G", help="world, ranks 0,1 or an axis: of these groups only")
    @argument("--clear", action="store_true", help="forget what is over, after this look")
    @session_option
    @line_magic
    @one_line_errors
    def disco_doctor(self, line: str) -> Any:
        """Show the last collectives of each worker, and who waits for whom; works during a hang."""
        args = arguments_of(DiscoMagics.disco_doctor, line)
        return self.lab.disco_doctor(
            args.n,
            targets=args.targets,
            group=args.group,
            clear=args.clear,
            session=args.session,
        )

    @magic_arguments()
    @argument("name", nargs="?", help="the session (default: the one used last)")
    @argument("--engine", help=f"on another engine, one of: {', '.join(ENGINES)}")
    @argument("--nodes", metavar="N", help="sockets: how many nodes the workers are on")
    @line_magic
    @one_line_errors
    def disco_restart(self, line: str) -> None:
        """Start the session anew with the same settings; values on workers are gone."""
        args = arguments_of(DiscoMagics.disco_restart, line)
        session = self.lab.disco_restart(args.name, engine=args.engine, nodes=args.nodes)
        print(self.lab.describe(session))

    @magic_arguments()
    @argument("name", nargs="?", help="the session (default: the one used last)")
    @line_magic
    @one_line_errors
    def disco_shutdown(self, line: str) -> None:
        """Stop the workers, whatever they do."""
        name = arguments_of(DiscoMagics.disco_shutdown, line).name or self.lab.current
        self.lab.disco_shutdown(name)
        print(f"{name}: shut down")

    @magic_arguments()
    @argument("names", nargs="+", help="worker variables")
    @targets_option
    @session_option
    @argument("--timeout", type=float, metavar="S", help="seconds to wait")
    @line_magic
    @one_line_errors
    def disco_pull(self, line: str) -> None:
        """Fetch worker variables: a list with one value a worker; with -t 0 the value itself."""
        args = arguments_of(DiscoMagics.disco_pull, line)
        self.lab.disco_pull(
            names_in(args.names), session=args.session, targets=args.targets, timeout=args.timeout
        )

    @magic_arguments()
    @argument("names", nargs="+", help="notebook variables")
    @targets_option
    @session_option
    @line_magic
    @one_line_errors
    def disco_push(self, line: str) -> None:
        """Send notebook variables to the workers, each its own copy."""
        args = arguments_of(DiscoMagics.disco_push, line)
        self.lab.disco_push(names_in(args.names), session=args.session, targets=args.targets)

    @magic_arguments()
    @argument("path", help="a checkpoint: a file, a folder or an index file")
    @argument(
        "--plan", metavar="PLAN", help="layouts: a JSON file or a variable here (default: copies)"
    )
    @argument("--params", metavar="GLOBS", help="these parameters only: *.mlp.*,*.norm.weight")
    @argument("--dtype", metavar="D", help="what floating point is cast to, such as bf16")
    @argument("--as", dest="name", default="weights", metavar="NAME", help="variable (weights)")
    @argument("--dry-run", action="store_true", help="show what would be done; read no weight")
    @argument("--verify", action="store_true", help="compare files with checksums of the index")
    @argument("--check-nan", action="store_true", help="refuse NaN and infinity")
    @argument(
        "--read-by",
        choices=("each", "first"),
        default="each",
        help="each worker reads its shards (default), or the first those of all",
    )
    @argument("--timeout", type=float, metavar="S", help="seconds in which nothing comes")
    @session_option
    @line_magic
    @one_line_errors
    def disco_load(self, line: str) -> None:
        """Load a checkpoint into shards on the workers: ``%disco_load llama --plan plan.json``.

        Here ``weights["model.norm.weight"]`` is a DRef then, in ``%%disco`` the worker's tensor.
        """
        args = arguments_of(DiscoMagics.disco_load, line.rstrip().removesuffix(";"))
        words = ("plan", "params", "dtype", "session")
        given = {key: unquoted(getattr(args, key) or "") or None for key in words}
        found = self.lab.disco_load(
            unquoted(args.path),
            **given,
            name=unquoted(args.name),
            dry_run=args.dry_run,
            verify=args.verify,
            check_nan=args.check_nan,
            read_by=args.read_by,
            timeout=args.timeout,
        )
        display(found)  # not returned: `Out` would hold all of it on the workers

    @magic_arguments()
    @session_option
    @argument("--timeout", type=float, metavar="S", help="seconds to wait for the workers")
    @argument("--stream", dest="stream", action="store_true", default=None, help="output at once")
    @argument("--no-stream", dest="stream", action="store_false", help="output at the end")
    @argument("--group-outputs", choices=GROUPINGS, default="order", help="order of the output")
    @stepping_options
    @argument("script", help="a Python file")
    @argument("args", nargs=argparse.REMAINDER, help="its command line")
    @line_magic
    @one_line_errors
    def disco_run(self, line: str) -> Any:
        """Run a script written for torchrun on the workers: ``%disco_run train.py --steps 10``."""
        check_break("%disco_run", line)
        args = arguments_of(DiscoMagics.disco_run, line)
        stepping = stepping_of("%disco_run", args)
        path, *words = [unquoted(word) for word in (args.script, *args.args)]
        return self.lab.disco_run(
            path,
            words,
            session=args.session,
            timeout=args.timeout,
            stream=args.stream,
            group_outputs=args.group_outputs,
            **stepping,
        )

    @magic_arguments()
    @targets_option
    @session_option
    @argument(
        "-i",
        "--in",
        dest="push",
        action="append",
        metavar="NAMES",
        help="notebook variables to send first",
    )
    @argument(
        "-o",
        "--out",
        action="append",
        metavar="NAMES",
        help="worker variables to bind here, as DRefs",
    )
    @stepping_options
    @argument("--block", action="store_true", help="wait for the workers (the default)")
    @argument("-a", "--noblock", action="store_true", help="return at once with a handle")
    @argument("--stream", dest="stream", action="store_true", default=None, help="output at once")
    @argument("--no-stream", dest="stream", action="store_false", help="output at the end")
    @argument("--group-outputs", choices=GROUPINGS, default="order", help="order of the output")
    @argument(
        "--progress-after",
        type=float,
        default=PROGRESS_AFTER,
        metavar="SECS",
        help="seconds before a line says what the workers do; -1: never",
    )
    @argument(
        "--signal-on-interrupt",
        choices=("SIGINT", "none"),
        default="SIGINT",
        help="whether stop ends the cell on the workers too (the default), or the waiting only",
    )
    @argument("--local", action="store_true", help="run the cell in the notebook too, first")
    @argument("--timeout", type=float, metavar="S", help="seconds to wait for the workers")
    @argument("code", nargs="*", help="for the line form: what to run")
    @line_cell_magic
    @one_line_errors
    def disco(self, line: str, cell: str | None = None) -> Any:
        """Run a cell (or with one %, the line) on all workers; shows the last value's shards."""
        options, code = (line, None) if cell is not None else split_options(DiscoMagics.disco, line)
        check_break("%%disco", options)
        args = arguments_of(DiscoMagics.disco, options)
        stepping = stepping_of("%%disco", args)
        if args.noblock and (args.step or args.breaks or args.pm or args.nan):
            raise UsageError(
                "%%disco: a cell that may stop is waited for: leave out -a (--noblock), or the "
                "options that stop it"
            )
        if cell is not None and args.code:
            raise UsageError(
                f"%%disco: {' '.join(args.code)!r} is no option; code goes on the lines below"
            )
        source = cell if cell is not None else code
        if not source or not source.strip():
            source = ""
        if args.local:
            self.lab.shell.run_cell(source).raise_error()
        return self.lab.disco(
            source,
            session=args.session,
            targets=args.targets,
            push=names_in(args.push),
            out=names_in(args.out),
            block=args.block or not args.noblock,
            stream=args.stream,
            timeout=args.timeout,
            group_outputs=args.group_outputs,
            progress_after=args.progress_after,
            interrupt=args.signal_on_interrupt == "SIGINT",
            **stepping,
        )
