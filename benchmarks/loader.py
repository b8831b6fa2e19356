"""Compare loading a checkpoint into 4 workers' shards with what else a user would take.

    python benchmarks/loader.py                                  # 2 GB, all sides, five rounds
    python benchmarks/loader.py --mb 100 --rounds 1 --sides bound discolab get-slice
    python benchmarks/loader.py --folder /data/bench --json figures.json

What is measured and how is told in benchmarks/README.md. This module only plans the run: each
load is the only one of a child process (loader_child.py), and never do two of them run at once.
What is not installed, or fails, is noted and left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from children import HERE, ChildFailed, describe_machine, exit_on_sigterm, load, run_child, say
from collectives import processor
from loader_report import STATES, Results, print_report

ROUNDS = 5
MEGABYTES = 2000
PATIENCE = 300.0  # seconds that a child may take
CHILD = str(HERE / "loader_child.py")

# The sides in the order in which they take turns, each next to what it is compared with, and the
# packages that each needs.
PACKAGES: dict[str, tuple[str, ...]] = {
    "bound": (),
    "discolab": (),
    "get-slice": ("safetensors",),
    "discolab-processes": (),
    "scatter-discolab": ("safetensors",),
    "scatter-gloo": ("safetensors",),
    "scatter-torch-load": (),
    "load-file": ("safetensors",),
    "fastsafetensors": ("fastsafetensors",),
    "fastsafetensors-sharded": ("fastsafetensors",),
    "tvm": ("tvm", "tvm_ffi"),
    "discolab-processes-into": (),
    "bound-touched": (),
    "discolab-into": (),
}
COPIES = {"tvm": "tvm", "scatter-torch-load": "torch"}  # of the weights, by the side that reads it


def installed(sides: Sequence[str], results: Results) -> list[str]:
    """The sides whose packages are there; the others are noted."""
    found = []
    for side in PACKAGES:
        if side not in sides:
            continue
        absent = [name for name in PACKAGES[side] if importlib.util.find_spec(name) is None]
        if absent:
            note(results, f"{side}: not measured, {' and '.join(absent)} not installed")
        else:
            found.append(side)
    return found


def measure(results: Results, sides: list[str], states: Sequence[str], rounds: int) -> None:
    """Time each side once a round and state; the order is turned round each time.

    The first round is preceded by one in which all are watched instead: what watches takes time.
    A side that fails is not tried again.
    """
    folder = results.weights["folder"]
    for turn in range(-1, rounds):
        for state in states:
            for side in sides[:] if turn % 2 == 0 else sides[::-1]:
                before = load()
                name = "watched" if turn < 0 else f"round {turn + 1}/{rounds}"
                say(f"{name}, {state}: {side}, load {before}")
                watch = ["--watch"] if turn < 0 else []
                call = CHILD, "load", side, folder, state, *watch
                try:
                    sample = run_child(*call, patience=PATIENCE)
                except ChildFailed as exc:
                    if side in sides:
                        sides.remove(side)
                    text = "\n".join("    " + line for line in str(exc).splitlines()[-8:])
                    note(results, f"{side}: it does not run, {state}:\n{text}")
                    continue
                results.samples.append({**sample, "round": turn, "load": before})


def note(results: Results, text: str) -> None:
    """Keep for the report what a reader must know."""
    results.notes.append(text)
    say(text)


@contextmanager
def folder_for(given: Path | None, megabytes: int, copies: int) -> Iterator[Path]:
    """The folder given, or one that is removed at the end; it must have room."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="discolab-loader-") as temporary:
        folder = given or Path(temporary)
        needed = megabytes * 1_000_000 * (1 + copies) * 1.1
        made = any(folder.glob(f"llama-{megabytes}-*"))
        if not made and shutil.disk_usage(folder).free < needed:
            sys.exit(f"{folder} has no room for {needed / 1e9:.1f} GB; give another --folder")
        yield folder


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sides", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"({ROUNDS})")
    parser.add_argument("--mb", type=int, default=MEGABYTES, help=f"of weights ({MEGABYTES})")
    parser.add_argument("--files", type=int, default=1, help="that hold them (1)")
    parser.add_argument(
        "--folder", type=Path, help="where the weights are kept for the next run (a temporary one)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    args = parser.parse_args()
    if min(args.rounds, args.mb, args.files) < 1:
        parser.error("--rounds, --mb and --files are positive numbers")
    return args


def main() -> int:
    """Measure, print, and write the JSON file; misses do not change the exit code."""
    args = parse_arguments()
    exit_on_sigterm()
    results = Results({**describe_machine(), "cpu": processor()})
    sides = installed(args.sides, results)
    copies = [name for side, name in COPIES.items() if side in sides]
    with folder_for(args.folder, args.mb, len(copies)) as folder:
        say(f"weights of {args.mb} MB in {folder}")
        call = [CHILD, "make", str(folder), f"--mb={args.mb}", f"--files={args.files}"]
        results.weights = run_child(*call, "--copies", *copies, patience=PATIENCE)
        results.weights["files"] = args.files
        measure(results, sides, args.states, args.rounds)
    print_report(results)
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(results), indent=1) + "\n")
    return 0 if results.samples else 1


if __name__ == "__main__":
    sys.exit(main())
