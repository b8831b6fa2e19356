"""Measure what stepping costs: a program that is armed but does not stop, a step, and a picture.

Beside it Python's own debugger, `bdb`, does the same on the same worker: a break point in the
user's file that is never come to. Ratios are to the same program run freely, in turns, of the least
of several rounds. torch computes on one thread. Prints one JSON object.

    python benchmarks/debugger.py
"""

from __future__ import annotations

import argparse
import bdb
import json
import linecache
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from discolab import Debugger, ThreadedSession, debugger_of

ROUNDS = 7
FILE = str(Path(tempfile.mkdtemp()) / "benchmarked.py")
SOURCE = """\
import time
import torch
from torch import nn


def lines(count):
    begin = time.thread_time()
    total = 0
    for i in range(count):
        total += i
        total -= 1
        total += 2
    return time.thread_time() - begin


def library(layers, x, count):
    begin = time.thread_time()
    for _ in range(count):
        layers(x)
    return time.thread_time() - begin


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.attention = nn.MultiheadAttention(d, 8, batch_first=True)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        n = self.norm(x)
        x = x + self.attention(n, n, n, need_weights=False)[0]
        return x + self.down(self.up(x).relu())


def train(block, optimizer, x, count):
    begin = time.thread_time()
    for _ in range(count):
        optimizer.zero_grad()
        loss = block(x).square().mean()
        loss.backward()
        optimizer.step()
    return time.thread_time() - begin


def nothing():
    return "a line that nobody comes to"
"""
NEVER = 1 + SOURCE.splitlines().index('    return "a line that nobody comes to"')


def program() -> dict[str, Any]:
    """The functions of the program, in a file of the user's."""
    Path(FILE).write_text(SOURCE)
    names: dict[str, Any] = {"__name__": "benchmarked"}
    exec(compile(SOURCE, FILE, "exec"), names)
    return names


class Peer(bdb.Bdb):
    """Python's debugger with one break point, which is never come to."""

    def __init__(self) -> None:
        super().__init__(skip=["torch.*", "discolab.*", "contextlib"])
        problem = self.set_break(FILE, NEVER)
        if problem:
            raise SystemExit(problem)

    def user_line(self, frame: Any) -> None:
        """See `bdb`: stopped; go on."""
        self.set_continue()


def under_bdb(func: Callable[..., float]) -> Callable[..., float]:
    """`func` run under `Peer`."""

    def run(*args: Any) -> float:
        peer = Peer()
        found = []
        peer.runcall(lambda: (peer.set_continue(), found.append(func(*args))))
        return found[0]

    return run


def in_turns(debugger: Debugger, func: Callable[..., float], *args: Any) -> dict[str, float]:
    """Least seconds of `func` on worker 0: free, armed, and under bdb."""
    session = debugger.session
    found: dict[str, list[float]] = {"free": [], "armed": [], "bdb": []}
    for _ in range(ROUNDS):
        found["free"].append(session.call_packed(func, *args).debug_get_from_remote(0))
        debugger.run(func, *args, breaks=[str(NEVER)], file=FILE)
        assert debugger.program is not None
        found["armed"].append(debugger.program.result().debug_get_from_remote(0))
        found["bdb"].append(session.call_packed(under_bdb(func), *args).debug_get_from_remote(0))
    return {name: min(seconds) for name, seconds in found.items()}


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    """Beside running freely."""
    return {
        "armed_x": round(seconds["armed"] / seconds["free"], 3),
        "bdb_x": round(seconds["bdb"] / seconds["free"], 3),
    }


def costs(width: int) -> dict[str, Any]:
    """What a program costs that is armed and does not stop, on one worker."""
    names = program()
    with ThreadedSession(1) as session:
        debugger = debugger_of(session)
        count = 100_000
        line = in_turns(debugger, names["lines"], count)
        layers = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(100)))
        calls = in_turns(debugger, _Held(names["library"], layers, torch.ones(1)), 20)
        torch.manual_seed(0)
        block = names["Block"](width)
        optimizer = torch.optim.AdamW(block.parameters())
        step = in_turns(
            debugger, _Held(names["train"], block, optimizer, torch.randn(4, 128, width)), 2
        )
    return {
        "line_us": {
            name: round((line[name] - line["free"]) / (4 * count) * 1e6, 3)
            for name in ("armed", "bdb")
        },
        "line": ratios(line),
        "library_call": ratios(calls),
        f"transformer_step_d{width}": {**ratios(step), "free_ms": round(step["free"] * 500, 1)},
    }


class _Held:
    """A function with arguments that stay where they are."""

    def __init__(self, func: Callable[..., float], *args: Any) -> None:
        self.func, self.args = func, args
        self.__name__ = func.__name__

    def __call__(self, *more: Any) -> float:
        return self.func(*self.args, *more)


def steps(engine: str, workers: int) -> dict[str, float]:
    """Milliseconds of a step of all workers together, and of a picture with variables."""
    from discolab import make_session

    source = (
        "def program():\n    x = 0\n    for i in range(100000):\n        x += i\n    return x\n"
    )
    linecache.cache["stepped.py"] = (len(source), None, source.splitlines(True), "stepped.py")
    names: dict[str, Any] = {"__name__": "stepped"}
    exec(compile(source, "stepped.py", "exec"), names)
    with make_session(workers, engine=engine) as session:
        debugger = debugger_of(session)
        debugger.run(names["program"], file="stepped.py")
        found: dict[str, list[float]] = {"next": [], "where": []}
        for _ in range(300):
            begin = time.perf_counter()
            debugger.next()
            found["next"].append(time.perf_counter() - begin)
        for _ in range(30):
            begin = time.perf_counter()
            repr(debugger.where())
            found["where"].append(time.perf_counter() - begin)
        debugger.abort()
    return {
        f"{name}_ms": round(statistics.median(seconds) * 1e3, 3) for name, seconds in found.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512, help="of the transformer block (512)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--engines", default="threads,processes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        result: dict[str, Any] = costs(args.width)
    finally:
        shutil.rmtree(Path(FILE).parent)
    for engine in args.engines.split(","):
        result[f"{engine}_{args.workers}_workers"] = steps(engine, args.workers)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
