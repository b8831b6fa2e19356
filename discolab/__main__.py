"""Command line: ``discolab demo``, ``node``, ``keys``, ``dap``; ``show``, ``shard`` for files."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from .runtime import ArgumentError, DiscoError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="discolab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    _add_node(commands)
    _add_keys(commands)
    _add_dap(commands)
    _add_show(commands)
    _add_shard(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except DiscoError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever reads has enough, as head; nothing is left to be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="train a tensor-parallel MLP on several workers")
    demo.add_argument("--workers", type=int, default=4, help="how many (default 4)")
    demo.add_argument("--steps", type=int, default=150, help="of gradient descent (default 150)")
    demo.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    from .demo import run

    return 0 if run(args.workers, args.steps) else 1


def _add_node(commands: Any) -> None:
    text = (
        "Run workers of a session that is on another machine. Started by torchrun, srun or mpirun, "
        "each of the processes is a node with one worker."
    )
    node = commands.add_parser(
        "node", help="run workers of another machine's session", description=text
    )
    node.add_argument(
        "--connect", required=True, metavar="tcp://HOST:PORT", help="where the session is"
    )
    node.add_argument(
        "--key-file", metavar="F", help="the session's keys (default: `discolab keys` says which)"
    )
    node.add_argument(
        "--workers", type=int, metavar="N", help="how many (default: what the session has on each)"
    )
    node.add_argument(
        "--devices",
        metavar="D",
        help="cpu, or cuda:0,cuda:1 (default: the GPUs in turn, or the CPU)",
    )
    node.add_argument(
        "--rank", type=int, metavar="R", help="order among the nodes (default: as they come)"
    )
    node.add_argument(
        "--wait",
        type=float,
        metavar="S",
        help="for the session to be there (120; --stay: any time)",
    )
    node.add_argument(
        "--stay", action="store_true", help="when a session has ended, wait for the next one"
    )
    node.set_defaults(run=_node)


def _node(args: argparse.Namespace) -> int:
    from .engines.keys import load_keys
    from .engines.node_agent import run_nodes
    from .runtime.rank_from_environment import launcher_rank

    if args.workers is not None and args.workers < 1:
        raise ArgumentError(f"--workers is how many workers to run here, 1 or more: {args.workers}")
    signal.signal(signal.SIGTERM, _end)
    place = launcher_rank(os.environ)
    workers, rank = args.workers, args.rank
    if place is not None:
        workers = 1 if workers is None else workers
        rank = place.rank if rank is None else rank
    if "" not in sys.path and os.getcwd() not in sys.path:  # modules beside the program
        sys.path.insert(0, os.getcwd())
    return run_nodes(
        args.connect,
        load_keys(args.key_file, make=False),
        stay=args.stay,
        workers=workers,
        devices=args.devices,
        rank=rank,
        place=place,
        wait=args.wait,
        say=_say,
    )


def _say(text: str) -> None:
    print(f"discolab node on {socket.gethostname()} (pid {os.getpid()}): {text}", flush=True)


def _end(_number: int, _frame: Any) -> None:
    raise SystemExit(143)


def _add_keys(commands: Any) -> None:
    keys = commands.add_parser(
        "keys", help="say which file holds the keys, made if it is not there"
    )
    keys.set_defaults(run=_keys)


def _keys(_args: argparse.Namespace) -> int:
    from .engines.keys import default_file, load_keys

    load_keys()
    print(default_file())
    return 0


def _add_dap(commands: Any) -> None:
    text = (
        "Say how an editor attaches to the debugger of a session that is served (%disco_debug dap, "
        "or discolab.dap.serve): the configuration for launch.json. With --stdio be the debug "
        "adapter that an editor starts; with --vsix write the extension for VS Code."
    )
    dap = commands.add_parser(
        "dap", help="attach an editor to the debugger of a session", description=text
    )
    dap.add_argument("--port", type=int, metavar="P", help="of the session (default: the one)")
    dap.add_argument("--stdio", action="store_true", help="pass messages on, with the token")
    dap.add_argument("--vsix", metavar="FILE", help="write the extension for VS Code here")
    dap.set_defaults(run=_dap)


def _dap(args: argparse.Namespace) -> int:
    from .dap import relay, served, vscode

    if args.vsix is not None:
        print(f"install it with: code --install-extension {vscode.write_extension(args.vsix)}")
    elif args.stdio:
        relay.run(relay.the_one(args.port))
    else:
        print(served.told(args.port))
    return 0


def _add_show(commands: Any) -> None:
    text = (
        "Tell what a checkpoint holds: tensor-cache, safetensors, torch.distributed.checkpoint, "
        "torch.save. With --workers also what a load would do on them, and what each would hold. "
        "No weight is read."
    )
    show = commands.add_parser("show", help="tell what a checkpoint holds", description=text)
    show.add_argument("path", metavar="PATH", help="a file, a folder or an index file")
    _add_plan(show)
    show.add_argument("--workers", type=int, metavar="N", help="how many would load it")
    show.add_argument(
        "--params", action="append", metavar="GLOB", help="these parameters only: '*.mlp.*'"
    )
    show.add_argument("--dtype", metavar="D", help="what floating point is cast to, such as bf16")
    show.add_argument("--all", action="store_true", help="every row of a long table")
    show.set_defaults(run=_show)


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--plan", metavar="plan.json", help="the layouts of parameters (docs/loader.md)"
    )
    command.add_argument(
        "--groups", type=int, default=1, metavar="G", help="pipeline stages of the workers (1)"
    )


def _show(args: argparse.Namespace) -> int:
    if args.workers is None and (args.dtype or args.groups != 1):
        raise ArgumentError("--dtype and --groups are about what workers hold: give --workers too")
    from .loader import show
    from .loader.tables import LIMIT

    limit = None if args.all else LIMIT
    print(
        show(
            args.path,
            args.plan,
            args.workers,
            args.groups,
            params=args.params,
            dtype=args.dtype,
            limit=limit,
        )
    )
    return 0


def _add_shard(commands: Any) -> None:
    text = (
        "Write a checkpoint split for a number of workers: each then reads a file of its own. "
        "Shards that exist already are split again. A few shards at a time are in memory."
    )
    shard = commands.add_parser("shard", help="split a checkpoint for workers", description=text)
    shard.add_argument("path", metavar="IN", help="a file, a folder or an index file")
    shard.add_argument("out", metavar="OUT", help="the folder to write")
    _add_plan(shard)
    shard.add_argument("--workers", type=int, required=True, metavar="N", help="for how many")
    shard.add_argument(
        "--source-plan", metavar="F", help="how others have cut IN, if not as --plan says"
    )
    shard.add_argument("--format", choices=("safetensors", "tensor-cache"), default="safetensors")
    shard.add_argument("--dtype", metavar="D", help="what floating point is cast to, such as bf16")
    shard.add_argument(
        "--whole", action="store_true", help="write whole parameters: another format or dtype only"
    )
    shard.set_defaults(run=_shard)


def _shard(args: argparse.Namespace) -> int:
    if args.whole and args.plan and not args.source_plan:
        raise ArgumentError(
            "--whole splits nothing, so --plan has no effect: leave one of them out"
        )
    from .loader import shard, show
    from .loader.showing import as_dtype

    shard(
        args.path,
        args.out,
        args.plan,
        args.workers,
        args.groups,
        format=args.format,
        source_plan=args.source_plan,
        dtype=as_dtype(args.dtype),
        presharded=not args.whole,
    )
    print(show(args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
