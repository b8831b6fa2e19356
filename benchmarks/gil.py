"""What do workers that are threads lose to Python's interpreter lock, and what without it?

    python3.13t benchmarks/gil.py           # a free-threaded Python: with the lock and without
    python benchmarks/gil.py                # any other: with it alone

Programs of many small operations (gil_work.py) run on one worker, on several that are threads, and
on as many processes; each in a child process of its own, in turns, the order turned round each
round. Then the session's own costs: a no-op on all workers and a sync, many no-ops, collectives.
Ratios are taken within a round; the tables have their medians, the least and the greatest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from children import HERE, ChildFailed, describe_machine, load, run_child, say
from control_plane_report import table

PROGRAMS = {
    "train_32": "forward, backward, SGD, d=32",
    "train_256": "the same, d=256",
    "decode": "a token of 12 layers, d=256",
    "load": "a loader's batches",
}
COSTS = {
    "noop": "no-op and sync",
    "pipelined": "one of many no-ops",
    "all_reduce_1k": "all_reduce, 1 KiB",
    "all_reduce_1m": "all_reduce, 1 MiB",
}
Sample = dict[str, Any]


class Side(NamedTuple):
    """What is measured in one child."""

    engine: str
    alone: bool  # with one worker
    lock: bool

    def __str__(self) -> str:
        who = "one worker" if self.alone else self.engine
        return who if self.lock else f"{who}, no lock"


def sides() -> list[Side]:
    """All that this Python can run."""
    locks = [True, False] if sysconfig.get_config_var("Py_GIL_DISABLED") else [True]
    kinds = [("threads", True), ("threads", False), ("processes", False)]
    return [Side(engine, alone, lock) for engine, alone in kinds for lock in locks]


def measure(args: argparse.Namespace) -> list[dict[Side, Sample]]:
    """One dict a round."""
    rounds: list[dict[Side, Sample]] = []
    options = ["--seconds", str(args.seconds), "--calls", str(args.calls)]
    for turn in range(args.rounds):
        rounds.append({})
        for side in sides() if turn % 2 == 0 else reversed(sides()):
            say(f"round {turn + 1}/{args.rounds}: {side}, load {load()}")
            os.environ["PYTHON_GIL"] = str(int(side.lock))
            if not sysconfig.get_config_var("Py_GIL_DISABLED"):
                del os.environ["PYTHON_GIL"]  # such a Python refuses to begin with it
            workers = "1" if side.alone else str(args.workers)
            child = (str(HERE / "gil_child.py"), side.engine, "--workers", workers, *options)
            try:
                sample = run_child(*child)
            except ChildFailed as exc:
                say(f"{side}: {exc}")
                continue
            assert sample["lock"] is side.lock, "something has turned the lock on"
            rounds[-1][side] = sample
            if args.json is not None:
                samples = [{str(side): one[side] for side in one} for one in rounds]
                args.json.write_text(json.dumps(samples, indent=1) + "\n")
    return rounds


def _spread(values: Iterable[float], digits: int = 2) -> str:
    found = sorted(values)
    if not found:
        return "–"
    middle, least, most = statistics.median(found), found[0], found[-1]
    return f"{middle:.{digits}f} ({least:.{digits}f}–{most:.{digits}f})"


def _ratios(rounds: list[dict[Side, Sample]], key: str, a: Side, b: Side) -> list[float]:
    return [one[a][key] / one[b][key] for one in rounds if a in one and b in one]


def report(rounds: list[dict[Side, Sample]], args: argparse.Namespace) -> str:
    """The tables, in Markdown."""
    lone, threads, processes = (
        Side(engine, alone, True)
        for engine, alone in (("threads", True), ("threads", False), ("processes", False))
    )
    every = [side for side in sides() if not side.alone]
    free = [side for side in every if not side.lock]
    parts = [
        f"{args.workers} workers, {json.dumps(describe_machine())}",
        f"All workers together over one worker with the lock (more is better), and beside it one "
        f"worker's rate a second; {args.rounds} rounds of {args.seconds:g} s",
    ]
    head = ["program", "one worker", *map(str, every)]
    if free:
        head.append("threads, no lock / the better processes")
    rows = []
    for key, words in PROGRAMS.items():
        row = [words, _spread((one[lone][key] for one in rounds if lone in one), 0)]
        row += [_spread(_ratios(rounds, key, side, lone)) for side in every]
        if free:
            both = [
                max(one[processes][key], one[processes._replace(lock=False)][key])
                for one in rounds
                if processes in one and processes._replace(lock=False) in one
            ]
            mine = [one[free[0]][key] for one in rounds if len(one) == len(sides())]
            row.append(_spread(a / b for a, b in zip(mine, both, strict=False)))
        rows.append(row)
    parts.append(table(head, rows))
    head, rows = ["what it costs, µs", *map(str, every)], []
    if free:
        head += ["threads: no lock / lock", "processes: no lock / lock"]
    for key, words in COSTS.items():
        row = [words]
        row += [
            _spread((one[side][key] * 1e6 for one in rounds if side in one), 1) for side in every
        ]
        if free:
            row += [
                _spread(_ratios(rounds, key, side._replace(lock=False), side))
                for side in (threads, processes)
            ]
        rows.append(row)
    parts.append(table(head, rows))
    return "\n\n".join(parts)


def main() -> None:
    """Measure all sides, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4, help="(4)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure (2)")
    parser.add_argument("--calls", type=int, default=2000, help="timed one by one (2000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    args = parser.parse_args()
    rounds = measure(args)
    print(report(rounds, args))


if __name__ == "__main__":
    main()
