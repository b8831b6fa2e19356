"""Compare `discolab.rpc` with what else a user would take to call a function elsewhere.

    python benchmarks/rpc.py                        # all, about five minutes
    python benchmarks/rpc.py --quick
    python benchmarks/rpc.py --only discolab-processes torch-rpc --rounds 1

What is measured and how is told in benchmarks/README.md. This module only plans the run: each
side is measured in a child process of its own (rpc_child.py, rounds.py). Leave the machine alone
meanwhile: a no-op is mostly waiting to be scheduled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from children import describe_machine, exit_on_sigterm
from rounds import add_arguments, installed, measure_rounds, take_turns, write_json
from rpc_report import OURS, TENSORPIPE, THREADS, RpcResults, print_report

ROUNDS = 3
TURNS = 15  # of the sides that the targets compare
CHILD = "rpc_child.py"

# The sides in the order in which they take turns, and the packages that each needs.
PACKAGES: dict[str, tuple[str, ...]] = {
    "discolab-processes": (),
    "torch-rpc": (),
    "discolab-threads": (),
    "ray": ("ray",),
}
# Not Ray: its own processes work on while they are asked for nothing.
TAKE_TURNS = (OURS, TENSORPIPE, THREADS)


def measure_rpc(
    rounds: int, turns: int, calls: int, seconds: float, sides: Sequence[str]
) -> RpcResults:
    """Measure each side once a round, then those of the targets in turns."""
    results = RpcResults(describe_machine())
    left = installed(PACKAGES, sides, results)
    options = f"--calls={calls}", f"--seconds={seconds}"
    left = measure_rounds(results, CHILD, left, rounds, *options)
    taking = [side for side in TAKE_TURNS if side in left]
    if turns and len(taking) > 1:
        take_turns(results, CHILD, taking, turns)
    return results


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=PACKAGES, default=list(PACKAGES), help="these sides (all)"
    )
    add_arguments(parser, ROUNDS)
    parser.add_argument(
        "--turns", type=int, default=TURNS, help=f"of what the targets compare ({TURNS})"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure, about (1)")
    parser.add_argument("--quick", action="store_true", help="one round, and little time for each")
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
    write_json(results, args.json)
    return 0 if results.samples else 1


if __name__ == "__main__":
    sys.exit(main())
