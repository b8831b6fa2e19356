"""Compare discolab's engines whose workers are processes with what else a user would take.

    python benchmarks/engines.py                            # all, about ten minutes
    python benchmarks/engines.py --sides discolab-processes tvm-processes --rounds 1

The same runs as a section of control_plane.py. What is measured and how is told in
benchmarks/README.md. This module only plans the run: each side is measured in a child process of
its own (engines_child.py, rounds.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from children import describe_machine, exit_on_sigterm
from engines_report import OURS, RIVAL, EngineResults, print_engines
from rounds import add_arguments, installed, measure_rounds, take_turns, write_json

ROUNDS = 3
TURNS = 20  # of the two sides that the first target compares
CHILD = "engines_child.py"

# The sides in the order in which they take turns, and the packages that each needs.
PACKAGES: dict[str, tuple[str, ...]] = {
    "discolab-processes": (),
    "tvm-processes": ("tvm", "tvm_ffi"),
    "discolab-sockets": ("zmq",),
    "tvm-sockets": ("tvm", "tvm_ffi"),
    "discolab-ray": ("ray",),
    "ray": ("ray",),
    "torch-rpc": (),
    "ipyparallel": ("ipyparallel",),
    "nbdistributed": ("nbdistributed",),
}


def measure_engines(
    rounds: int = ROUNDS, calls: int = 2000, sides: Sequence[str] = tuple(PACKAGES)
) -> EngineResults:
    """Measure each side once a round, then the two of the first target in turns."""
    results = EngineResults(describe_machine())
    left = installed(PACKAGES, sides, results)
    left = measure_rounds(results, CHILD, left, rounds, f"--calls={calls}")
    if {OURS, RIVAL} <= set(left):
        take_turns(results, CHILD, (OURS, RIVAL), TURNS)
    return results


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sides", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    add_arguments(parser, ROUNDS)
    args = parser.parse_args()
    if min(args.rounds, args.calls) < 1:
        parser.error("--rounds and --calls are positive numbers")
    return args


def main() -> int:
    """Measure, print, and write the JSON file; misses do not change the exit code."""
    args = parse_arguments()
    exit_on_sigterm()
    results = measure_engines(args.rounds, args.calls, args.sides)
    print_engines(results)
    write_json(results, args.json)
    return 0 if results.samples else 1


if __name__ == "__main__":
    sys.exit(main())
