"""Load once in a process of its own, for loader.py: prints one JSON object.

python benchmarks/loader_child.py make FOLDER --mb 2000 --files 1 --copies tvm torch
python benchmarks/loader_child.py load SIDE FOLDER {warm,cold} [--watch]
python benchmarks/loader_child.py member PROGRAM RANK FOLDER STORE    # started by a side
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import loader_weights
from loader_gloo import Member
from loader_peers import SIDES
from loader_watch import MemoryWatch, tick_while


def make(args: argparse.Namespace) -> dict[str, Any]:
    """Write the weights, and tell about them."""
    found = loader_weights.make(args.folder, args.mb, args.files, args.copies)
    return {
        "folder": str(found.folder),
        "weights": len(found.weights),
        "bytes": found.nbytes,
        "shard_bytes": found.shard_bytes,
        "column_share": found.column_share,
    }


def load(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one load of one side."""
    checkpoint = loader_weights.opened(args.folder)
    side = SIDES[args.side](checkpoint)
    memory = MemoryWatch() if args.watch else None
    side.touch()
    (loader_weights.warm if args.state == "warm" else loader_weights.evict)(side.files)
    found: dict[str, Any] = {
        "side": args.side,
        "state": args.state,
        "version": side.version,
        "resident": loader_weights.resident(side.files),
    }

    def timed() -> float:
        begin = time.perf_counter()
        side.load()
        return time.perf_counter() - begin

    before = os.times()
    if memory is None:
        found["seconds"] = timed()
    else:
        with memory:
            found["seconds"], late = tick_while(timed)
        found |= {"memory": memory.more, "peak": memory.peak, "late": lateness(late)}
    after = os.times()
    found["cpu_s"] = {"user": after.user - before.user, "system": after.system - before.system}
    check(checkpoint, {w.name: side.sums(w.name) for w in checkpoint.checked()})
    side.close()
    return found | side.extras


def lateness(late: Sequence[float]) -> dict[str, float]:
    """Of ticks, in milliseconds."""
    if len(late) < 2:
        return {}
    cuts = statistics.quantiles(late, n=100, method="inclusive")
    found = {"p50_ms": cuts[49], "p99_ms": cuts[98], "max_ms": max(late)}
    return {"ticks": len(late), **{name: value * 1e3 for name, value in found.items()}}


def check(checkpoint: loader_weights.Checkpoint, sums: dict[str, list[int]]) -> None:
    """End with an error if a side has loaded something else than what lies in the file."""
    right = json.loads((checkpoint.folder / loader_weights.SUMS).read_text())
    wrong = [name for name in right if sums.get(name) != right[name]]
    if wrong or not right:
        sys.exit(f"these parameters are wrong on some worker: {', '.join(wrong)}")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="do", required=True)
    making = commands.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("--mb", type=int, required=True)
    making.add_argument("--files", type=int, required=True)
    making.add_argument("--copies", nargs="*", default=[], choices=("tvm", "torch"))
    loading = commands.add_parser("load")
    loading.add_argument("side", choices=SIDES)
    loading.add_argument("folder")
    loading.add_argument("state", choices=("warm", "cold"))
    loading.add_argument("--watch", action="store_true")
    member = commands.add_parser("member")
    member.add_argument("program")
    member.add_argument("rank", type=int)
    member.add_argument("folder")
    member.add_argument("store")
    return parser.parse_args()


def main() -> None:
    """Do what is asked."""
    args = parse_arguments()
    if args.do == "member":
        member = Member(args.program, args.rank, args.folder, args.store)
        member.load()
        member.sums()
    else:
        print(json.dumps(make(args) if args.do == "make" else load(args)), flush=True)


if __name__ == "__main__":
    main()
