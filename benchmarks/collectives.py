"""Time collectives of 4 workers beside Gloo and beside the memory's own speed, in one run.

    python benchmarks/collectives.py                       # everything, under four minutes
    python benchmarks/collectives.py --ops all_reduce --sizes 1K 64M --rounds 9

What is measured and how is told in benchmarks/README.md. The contestants are child processes
(collectives_child.py) that live as long as the run and do nothing unless told to; this module
tells one at a time. The state is one `Results`, filled on the main thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Self

from collectives_bytes import MEMBERS, OPS, SMALLEST
from collectives_report import Results, print_report, show_size
from control_plane import describe_machine

HERE = Path(__file__).resolve().parent
SIDES = ("discolab", "gloo processes", "gloo threads", "bound")
SIZES = tuple(1 << bits for bits in (10, 14, 16, 18, 20, 24, 26, 28))
MOST_CALLS = 5000  # in one measurement
PATIENCE = 150  # seconds that a contestant may take to answer


class ContestantFailed(Exception):
    """A contestant gave a wrong result, or none; the text says which and why."""


class Child:
    """One process of a contestant, and the pipes to it."""

    def __init__(self, *arguments: str) -> None:
        paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `end` closes it
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "collectives_child.py"), *arguments],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def tell(self, order: dict[str, Any]) -> None:
        """Send an order; `hear` gives the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: `hear` says so

    def hear(self) -> dict[str, Any]:
        """The answer to the last order."""
        assert self._process.stdout is not None
        late = threading.Timer(PATIENCE, self._process.kill)
        late.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):  # libraries print too
                    answer: dict[str, Any] = json.loads(line)
                    if "error" in answer:
                        raise ContestantFailed(answer["error"])
                    return answer
        finally:
            late.cancel()
        self._errors.seek(0)
        told = self._errors.read().strip()[-1000:]
        raise ContestantFailed(told or f"ended, or gave no answer within {PATIENCE} s")

    def end(self) -> None:
        """Close its input, at which it ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


class Contestant:
    """One side: one child, or one for each member. Used in ``with``."""

    def __init__(self, side: str, cores: int) -> None:
        self.name = side
        self._folder = tempfile.TemporaryDirectory()
        if side == "gloo processes":
            store = str(Path(self._folder.name) / "store")
            calls = [["gloo-process", f"--rank={r}", f"--store={store}"] for r in range(MEMBERS)]
        else:
            calls = [[side.replace(" ", "-"), f"--cores={cores}"]]
        self._children = [Child(*call) for call in calls]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.end()
        self._folder.cleanup()

    def ready(self) -> str:
        """Wait until all its processes have found each other; the version of what is measured."""
        return str(self._answers()[0]["version"])

    def prepare(self, op: str, size: int) -> None:
        """Make buffers and check one result."""
        self._ask({"do": "prepare", "op": op, "size": size})

    def time(self, count: int) -> dict[str, float]:
        """Seconds of one operation, of the process that took longest."""
        return max(self._ask({"do": "time", "count": count}), key=lambda found: found["seconds"])

    def _ask(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        for child in self._children:
            child.tell(order)
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        try:
            return [child.hear() for child in self._children]
        except ContestantFailed as exc:
            raise ContestantFailed(f"{self.name}: {exc}") from None


def measure(
    results: Results, sides: Sequence[Contestant], op: str, size: int, args: argparse.Namespace
) -> None:
    """Add the rounds of one operation and size to `samples`."""
    say(f"{op}, {show_size(size)}")
    last: dict[str, float] = {}
    for side in sides:
        side.prepare(op, size)
        first = side.time(1)["seconds"]
        last[side.name] = side.time(calls_in(args.seconds / 10, first))["seconds"]
    for turn in range(args.rounds):
        for side in sides if turn % 2 == 0 else reversed(sides):
            found = side.time(calls_in(args.seconds, last[side.name]))
            last[side.name] = found["seconds"]
            case = {"op": op, "size": size, "round": turn, "side": side.name}
            results.samples.append({**case, **found})


def calls_in(seconds: float, each: float) -> int:
    """How many calls fill so much time; at least one."""
    return max(1, min(MOST_CALLS, int(seconds / each)))


def fitting(sizes: Sequence[int], notes: list[str]) -> Iterator[int]:
    """The sizes for which memory suffices, as far as the system tells."""
    memory = available_memory()
    for size in sizes:
        # four contestants with (n + 1) S each, and what the check of one takes
        needed = (4 * (MEMBERS + 1) + 2 * MEMBERS) * size
        if memory is not None and needed > memory:
            notes.append(
                f"{show_size(size)}: not measured, it needs {show_size(needed)} of memory and "
                f"{show_size(memory)} are free"
            )
        else:
            yield size


def available_memory() -> int | None:
    """Bytes that may be taken without swapping, None if the system does not tell."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


@contextmanager
def started(machine: dict[str, Any]) -> Iterator[list[Contestant]]:
    """All contestants, ready; enters their versions."""
    with ExitStack() as stack:
        sides = [stack.enter_context(Contestant(side, machine["cores"])) for side in SIDES]
        versions = {side.name: side.ready() for side in sides}
        machine["discolab"], machine["torch"] = versions["discolab"], versions["bound"]
        yield sides


def processor() -> str:
    """The name of the processor, "" if the system does not tell."""
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        return platform.processor()
    return found[1].strip() if found else platform.processor()


def say(text: str) -> None:
    """Progress, apart from the results."""
    print(text, file=sys.stderr, flush=True)


def parse_size(text: str) -> int:
    """``64M`` as bytes."""
    found = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    size = int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]] if found else 0
    if not size or size % SMALLEST:
        raise argparse.ArgumentTypeError(f"{text!r} is no multiple of {SMALLEST} bytes, as 64K is")
    return size


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), metavar="OP")
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=list(SIZES), metavar="SIZE")
    parser.add_argument("--rounds", type=int, default=5, help="times each side is measured (5)")
    parser.add_argument(
        "--seconds", type=float, default=0.15, help="that one measurement should take (0.15)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    args = parser.parse_args()
    if args.rounds < 1 or args.seconds <= 0:
        parser.error("--rounds and --seconds are positive numbers")
    return args


def main() -> int:
    """Measure, print, and write the JSON file; misses do not change the exit code."""
    args = parse_arguments()
    machine = {**describe_machine(), "cpu": processor()}
    results = Results(machine)
    sizes = list(fitting(args.sizes, results.notes))
    try:
        with started(machine) as contestants:
            for op in args.ops:
                for size in sizes:
                    measure(results, contestants, op, size, args)
    except ContestantFailed as exc:
        say(f"a measurement failed: {exc}")
        return 1
    print_report(results)
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(results), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
