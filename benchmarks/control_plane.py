"""Compare discolab's control plane with that of TVM's Disco, side by side in one run.

    python benchmarks/control_plane.py                 # everything, about twenty minutes
    python benchmarks/control_plane.py --rounds 2 --workers 4 --no-pin --no-extras --no-engines

What is measured and how is told in benchmarks/README.md. This module only plans the run: each
figure comes from a child process of its own (control_plane_child.py, cell_cost.py), and never
do two of them run at once. Workers in other processes have a program of their own, engines.py,
which is a section here. The state is one `Results`, filled on the main thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from children import HERE, ChildFailed, describe_machine, exit_on_sigterm, run_child, say
from control_plane_report import Results, print_report
from engines import ROUNDS, measure_engines
from engines_report import print_engines

IMPORT_ROUNDS = 7
CELLS = 200

# Import packages in the order given; print the seconds that torch took, and all the rest. Whoever
# imports torch first has it imported, and timed, just before: so neither counts the other's work.
IMPORTS = """
import builtins, json, sys, time
plain, taken = builtins.__import__, {}
def timed(name, *rest):
    if name.partition(".")[0] == "torch" and "torch" not in sys.modules:
        begin = time.perf_counter()
        plain("torch")
        taken["torch"] = time.perf_counter() - begin
    return plain(name, *rest)
builtins.__import__ = timed
begin = time.perf_counter()
for name in sys.argv[1:]:
    timed(name)
taken["rest"] = time.perf_counter() - begin - taken["torch"]
print(json.dumps(taken))
"""


def missing_peer() -> str | None:
    """Why TVM's Disco can't be measured here; None if it can."""
    absent = [name for name in ("tvm", "tvm_ffi") if importlib.util.find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} not installed"
    try:
        run_child(str(HERE / "control_plane_child.py"), "tvm", "--workers=1", "--calls=100")
    except ChildFailed as exc:
        return f"it does not run: {str(exc).splitlines()[-1]}"
    return None


def choose_cores(pin: str, notes: list[str]) -> list[int | None]:
    """The core for each half of the run: None for unpinned, a number for pinned."""
    wanted: list[int | None] = []
    if pin in ("no", "both"):
        wanted.append(None)
    if pin in ("yes", "both"):
        if hasattr(os, "sched_setaffinity"):
            wanted.append(max(os.sched_getaffinity(0)))
        else:
            notes.append("pinned: not measured, this system has no os.sched_setaffinity")
    return wanted


def plan(
    rounds: int, workers: list[int], cores: list[int | None], sides: list[str]
) -> Iterator[tuple[int, int | None, int, str]]:
    """Round, core, number of workers, side: the sides take turns, and who is first changes."""
    for turn in range(rounds):
        for core in cores:
            for count in workers:
                for side in sides if turn % 2 == 0 else reversed(sides):
                    yield turn, core, count, side


def measure_sides(results: Results, args: argparse.Namespace, sides: list[str]) -> None:
    """Fill in `samples`."""
    cores = choose_cores(args.pin, results.notes)
    steps = list(plan(args.rounds, args.workers, cores, sides))
    for number, (turn, core, count, side) in enumerate(steps, 1):
        where = "unpinned" if core is None else f"core {core}"
        say(f"[{number}/{len(steps)}] round {turn + 1}: {side}, {count} workers, {where}")
        call = [side, f"--workers={count}", f"--calls={args.calls}"]
        if core is not None:
            call.append(f"--core={core}")
        sample = run_child(str(HERE / "control_plane_child.py"), *call)
        results.versions[side] = sample.pop("version")
        results.samples.append({**sample, "round": turn, "pinned": core is not None})


def measure_imports(results: Results) -> None:
    """Fill in `imports`; a first round only warms the file cache."""
    orders = {"after": ["torch", "discolab"], "before": ["discolab", "torch"]}
    for turn in range(-1, IMPORT_ROUNDS):
        say(f"imports {turn + 1}/{IMPORT_ROUNDS}")
        sample = {}
        for order in orders if turn % 2 else reversed(orders):
            taken = run_child("-c", IMPORTS, *orders[order])
            sample[f"{order}_torch_ms"] = 1e3 * taken["rest"]
            sample["torch_ms"] = 1e3 * taken["torch"]
        if turn >= 0:
            results.imports.append(sample)


def measure_cells(results: Results) -> None:
    """Fill in `cells`, if there is a client for kernels."""
    absent = [n for n in ("ipykernel", "jupyter_client") if importlib.util.find_spec(n) is None]
    if absent:
        results.notes.append(f"%%disco cell: not measured, {' and '.join(absent)} not installed")
        return
    say(f"cells: {CELLS} of each kind in a kernel")
    results.cells = run_child(str(HERE / "cell_cost.py"), f"--cells={CELLS}")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N")
    parser.add_argument("--rounds", type=int, default=5, help="times each side is run (5)")
    parser.add_argument(
        "--calls", type=int, default=2000, help="calls timed one by one (2000); 10 x pipelined"
    )
    pin = parser.add_mutually_exclusive_group()
    pin.add_argument("--pin", dest="pin", action="store_const", const="yes", help="one core only")
    pin.add_argument("--no-pin", dest="pin", action="store_const", const="no", help="all cores")
    pin.add_argument(
        "--both", dest="pin", action="store_const", const="both", help="both (the default)"
    )
    parser.add_argument(
        "--no-extras", action="store_true", help="leave out the import and the %%%%disco cell"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument(
        "--no-engines", action="store_true", help="leave out the workers in other processes"
    )
    parser.add_argument(
        "--engine-rounds", type=int, default=ROUNDS, metavar="N", help=f"their rounds ({ROUNDS})"
    )
    parser.set_defaults(pin="both")
    args = parser.parse_args()
    if min(*args.workers, args.rounds, args.calls, args.engine_rounds) < 1:
        parser.error("--workers, --rounds, --calls and --engine-rounds are positive numbers")
    return args


def main() -> int:
    """Measure, print, and write the JSON file; misses do not change the exit code."""
    args = parse_arguments()
    exit_on_sigterm()
    results = Results(describe_machine())
    reason = missing_peer()
    if reason is not None:
        results.notes.append(
            f"TVM's Disco: not measured, {reason}; so there are no ratios. To install it:\n"
            "    pip install -r benchmarks/requirements.txt"
        )
        say(results.notes[-1])
    try:
        measure_sides(results, args, ["discolab"] if reason else ["discolab", "tvm"])
        if not args.no_extras:
            measure_imports(results)
            measure_cells(results)
        if not args.no_engines:
            results.engines = measure_engines(args.engine_rounds, args.calls)
    except ChildFailed as exc:
        say(f"a measurement failed:\n{exc}")
        return 1
    print_report(results)
    if results.engines is not None:
        print_engines(results.engines)
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(results), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
