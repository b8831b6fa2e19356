"""Compare `discolab.rpc` with what else a user would take to call a function elsewhere.

    python benchmarks/rpc.py                        # all, about five minutes
    python benchmarks/rpc.py --quick
    python benchmarks/rpc.py --only discolab-processes torch-rpc --rounds 1

What is measured and how is told in benchmarks/README.md. This module only plans the run: each
side is measured in a child process of its own (rpc_child.py), and never do two of them run at
once. What is not installed, or fails, is noted and left out. Leave the machine alone meanwhile:
a no-op is mostly waiting to be scheduled.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from children import (
    HERE,
    ChildFailed,
    WaitingChild,
    describe_machine,
    exit_on_sigterm,
    load,
    run_child,
    say,
)
from rpc_report import OURS, TENSORPIPE, THREADS, RpcResults, print_report

ROUNDS = 3
TURNS = 15  # of the sides that the targets compare
PATIENCE = 240.0  # seconds that a side may take

# The sides in the order in which they take turns, and the packages that each needs.
PACKAGES: dict[str, tuple[str, ...]] = {
    "discolab-processes": (),
    "torch-rpc": (),
    "discolab-threads": (),
    "ray": ("ray",),
}
# Not Ray: its own processes work on while they are asked for nothing.
TAKE_TURNS = (OURS, TENSORPIPE, THREADS)


def installed(sides: Sequence[str], results: RpcResults) -> list[str]:
    """The sides whose packages are there; the others are noted."""
    found = []
    for side in sides:
        absent = [name for name in PACKAGES[side] if importlib.util.find_spec(name) is None]
        if absent:
            results.notes.append(f"{side}: not measured, {' and '.join(absent)} not installed")
            say(results.notes[-1])
        else:
            found.append(side)
    return found


def measure_rpc(
    rounds: int, turns: int, calls: int, seconds: float, sides: Sequence[str]
) -> RpcResults:
    """Measure each side once a round; the order is turned round each time.

    A side that fails before it gives any figure is not tried again.
    """
    results = RpcResults(describe_machine())
    left = installed(sides, results)
    for turn in range(rounds):
        for side in left[:] if turn % 2 == 0 else left[::-1]:
            before = load()
            say(f"round {turn + 1}/{rounds}: {side}, load {before}")
            call = str(HERE / "rpc_child.py"), side, f"--calls={calls}", f"--seconds={seconds}"
            try:
                sample = run_child(*call, patience=PATIENCE)
            except ChildFailed as exc:
                text = str(exc).strip()
                if exc.found is None:
                    left.remove(side)
                    results.notes.append(f"{side}: it does not run:\n{_indented(text)}")
                    say(results.notes[-1])
                    continue
                sample = {**exc.found, "failed": text[-300:]}
            results.samples.append({**sample, "round": turn, "load": before})
    taking = [side for side in TAKE_TURNS if side in left]
    if turns and len(taking) > 1:
        take_turns(results, taking, turns)
    return results


def take_turns(results: RpcResults, sides: Sequence[str], turns: int) -> None:
    """Fill in `turns`: a no-op and 64 MB of some sides, many times one after the other."""
    say(f"{turns} turns: {', '.join(sides)}, load {load()}")
    script = str(HERE / "rpc_child.py")
    try:
        with ExitStack() as stack:
            children = {
                side: stack.enter_context(WaitingChild(script, side, "--turns")) for side in sides
            }
            for child in children.values():  # one after the other: starting, too, is work
                child.ask()
            for turn in range(turns):
                order = sides if turn % 2 == 0 else sides[::-1]
                results.turns.append({side: children[side].ask() for side in order})
    except ChildFailed as exc:
        results.notes.append(f"the turns ended early:\n{_indented(str(exc))}")
        say(results.notes[-1])


def _indented(text: str, lines: int = 6) -> str:
    return "\n".join("    " + line for line in text.splitlines()[-lines:])


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=PACKAGES, default=list(PACKAGES), help="these sides (all)"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"({ROUNDS})")
    parser.add_argument(
        "--turns", type=int, default=TURNS, help=f"of what the targets compare ({TURNS})"
    )
    parser.add_argument("--calls", type=int, default=2000, help="timed one by one, at most (2000)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure, about (1)")
    parser.add_argument("--quick", action="store_true", help="one round, and little time for each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.turns, args.calls, args.seconds = 1, min(args.turns, 4), 300, 0.2
    if min(args.rounds, args.calls) < 1 or args.seconds <= 0 or args.turns < 0:
        parser.error("--rounds, --calls and --seconds are positive numbers")
    return args


def main() -> int:
    """Measure, print, and write the JSON file; misses do not change the exit code."""
    args = parse_arguments()
    exit_on_sigterm()
    results = measure_rpc(args.rounds, args.turns, args.calls, args.seconds, args.only)
    if results.samples:
        print_report(results)
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(results), indent=1) + "\n")
    return 0 if results.samples else 1


if __name__ == "__main__":
    sys.exit(main())
