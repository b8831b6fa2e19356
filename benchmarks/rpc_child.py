"""Measure one runtime's remote calls, in a process of its own.

Started by rpc.py; what it prints is in rounds_child.py. Everything here runs on the main thread,
which is the controller.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

from rounds_child import Clock, Say, repeat, run, time_calls
from rpc_measures import FIGURES, THERE, TO, big_argument, noop
from rpc_sides import SIDES, Side, first_call


def start(side: Side) -> float:
    """Seconds until the first call has answered."""
    begin = Clock()
    side.start()
    first_call(side)
    return Clock() - begin


def measure(name: str, calls: int, seconds: float, say: Say) -> None:
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


def measure_in_turns(name: str, say: Say) -> None:
    """Measure a no-op and 64 MB once for each line that comes in."""
    side = SIDES[name]()
    start(side)
    repeat(lambda: side.caller.call(TO, noop), 1.0, least=10, most=500)
    for _ in sys.stdin:
        calls = time_calls(lambda: side.caller.call(TO, noop), calls=300, seconds=0.5)
        say({**calls, "argument": big_argument(side.caller, calls=0, seconds=0.3)})
    side.stop()


if __name__ == "__main__":
    run(__doc__ or "", SIDES, 1.0, measure, measure_in_turns)
