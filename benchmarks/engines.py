"""Compare discolab's engines whose workers are processes with what else a user would take.

    python benchmarks/engines.py                            # all, about ten minutes
    python benchmarks/engines.py --sides discolab-processes tvm-processes --rounds 1

The same runs as a section of control_plane.py. What is measured and how is told in
benchmarks/README.md. This module only plans the run: each side is measured in a child process of
its own (engines_child.py), and never do two of them run at once. What is not installed, or
fails, is noted and left out.
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
from engines_report import OURS, RIVAL, EngineResults, print_engines

ROUNDS = 3
TURNS = 20  # of the two sides that the first target compares
PATIENCE = 240.0  # seconds that a side may take

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


def installed(sides: Sequence[str], results: EngineResults) -> list[str]:
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


def measure_engines(
    rounds: int = ROUNDS, calls: int = 2000, sides: Sequence[str] = tuple(PACKAGES)
) -> EngineResults:
    """Measure each side once a round; the order is turned round each time.

    A side that fails before it gives any figure is not tried again.
    """
    results = EngineResults(describe_machine())
    left = installed(sides, results)
    for turn in range(rounds):
        for side in left[:] if turn % 2 == 0 else left[::-1]:
            before = load()
            say(f"engines, round {turn + 1}/{rounds}: {side}, load {before}")
            call = str(HERE / "engines_child.py"), side, f"--calls={calls}"
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
    if {OURS, RIVAL} <= set(left):
        take_turns(results, (OURS, RIVAL))
    return results


def take_turns(results: EngineResults, sides: tuple[str, str]) -> None:
    """Fill in `turns`: a no-op of two sides, many times one after the other."""
    say(f"engines, no-op, {TURNS} turns: {' and '.join(sides)}, load {load()}")
    script = str(HERE / "engines_child.py")
    try:
        with ExitStack() as stack:
            children = {
                side: stack.enter_context(WaitingChild(script, side, "--turns")) for side in sides
            }
            for child in children.values():  # one after the other: starting, too, is work
                child.ask()
            for turn in range(TURNS):
                order = sides if turn % 2 == 0 else sides[::-1]
                results.turns.append({side: children[side].ask() for side in order})
    except ChildFailed as exc:
        results.notes.append(f"no turns of {' and '.join(sides)}:\n{_indented(str(exc))}")
        say(results.notes[-1])


def _indented(text: str, lines: int = 6) -> str:
    return "\n".join("    " + line for line in text.splitlines()[-lines:])


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sides", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"({ROUNDS})")
    parser.add_argument("--calls", type=int, default=2000, help="timed one by one, at most (2000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
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
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(results), indent=1) + "\n")
    return 0 if results.samples else 1


if __name__ == "__main__":
    sys.exit(main())
