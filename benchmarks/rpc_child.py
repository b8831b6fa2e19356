"""Measure one runtime's remote calls, in a process of its own.

Started by rpc.py. It prints the figures so far as one JSON object on one line, again after each
figure: a runtime that takes the process down with it leaves those before. Everything here runs
on the main thread, which is the controller.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from engines_child import Clock, repeat, time_calls
from rpc_measures import FIGURES, THERE, TO, big_argument, noop
from rpc_sides import SIDES, Side, first_call


def start(side: Side) -> float:
    """Seconds until the first call has answered."""
    begin = Clock()
    side.start()
    first_call(side)
    return Clock() - begin


def measure(name: str, calls: int, seconds: float, say: Callable[[dict[str, Any]], None]) -> None:
    """Measure one side, and say all that was found after each figure.

    A figure that can't be had is left out, and told in ``errors``.
    """
    side = SIDES[name]()
    found: dict[str, Any] = {"side": name, "version": side.version, "errors": {}, "there": {}}
    found["start_s"] = start(side)
    say(found)
    for figure, take in FIGURES.items():
        try:
            found[figure] = take(side.caller, calls, seconds)
        except Exception:
            found["errors"][figure] = traceback.format_exc()[-1000:]
        say(found)
    for figure in THERE:
        try:
            found["there"][figure] = side.there(figure, calls, seconds)
        except Exception:
            found["errors"][f"{figure}, worker to worker"] = traceback.format_exc()[-1000:]
        say(found)
    side.stop()


def measure_in_turns(name: str, say: Callable[[dict[str, Any]], None]) -> None:
    """Measure a no-op and 64 MB once for each line that comes in."""
    side = SIDES[name]()
    start(side)
    repeat(lambda: side.caller.call(TO, noop), 1.0, least=10, most=500)
    for _ in sys.stdin:
        calls = time_calls(lambda: side.caller.call(TO, noop), calls=300, seconds=0.5)
        say({**calls, "argument": big_argument(side.caller, calls=0, seconds=0.3)})
    side.stop()


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure, about")
    parser.add_argument("--turns", action="store_true", help="measure once a line of input")
    args = parser.parse_args()
    out = os.dup(1)
    os.dup2(2, 1)  # what the runtimes write must not come between the figures

    def say(found: dict[str, Any]) -> None:
        os.write(out, (json.dumps(found) + "\n").encode())

    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    with tempfile.TemporaryDirectory(prefix="discolab-benchmark-") as folder:
        tempfile.tempdir = folder  # for keys
        if args.turns:
            measure_in_turns(args.side, say)
        else:
            measure(args.side, args.calls, args.seconds, say)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
