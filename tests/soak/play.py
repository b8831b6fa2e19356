"""Takes the steps of a soak in this process: ``python -m tests.soak.play ENGINE SECONDS SEED LOG``.

Each step is written to the log before it is taken, so that the story is known however the process
ends. ``play ENGINE STORY`` takes the steps of a story again. Exits with 1 on a fault, whose first
line on standard output begins with FAULT.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any

from . import leftovers
from .steps import World, do, draw

HUNG = 90.0  # seconds that no step may take
START = 300.0  # seconds for a session to start: on a busy machine Ray takes minutes
_SAMPLE_EVERY = 5.0  # seconds
WARM_UP: list[dict[str, Any]] = [
    {"do": "make", "name": "a", "seed": 1, "size": 200_000},
    {"do": "reduce", "name": "b", "a": "a", "how": "sum", "axis": "world"},
    {"do": "save_and_load", "a": "a"},
    {"do": "snapshot", "a": "b"},
    {"do": "rpc", "seed": 1, "to": 1},
    {"do": "step_through", "seed": 1, "commands": 1},
]


class Unraised:
    """Errors that no step raises: in finalizers and in threads."""

    def __init__(self) -> None:
        self.found: list[str] = []
        sys.unraisablehook = self._finalizer
        threading.excepthook = self._thread

    def _finalizer(self, what: Any) -> None:
        if what.exc_type.__name__ != "WorkerInterrupted":  # it is sent again
            self.found.append(f"in {what.object!r}: {what.exc_value!r}")

    def _thread(self, what: Any) -> None:
        self.found.append(f"in thread {what.thread}: {what.exc_value!r}")


def play(engine: str, steps: Iterable[dict[str, Any]], seconds: float) -> str:
    """Take steps until there are no more or time is up; what is wrong, or ""."""
    faulthandler.dump_traceback_later(START, exit=True)
    unraised = Unraised()
    world = World(engine)  # what stays for the whole process is made by the first session
    for step in WARM_UP:
        faulthandler.dump_traceback_later(HUNG, exit=True)
        do(world, step)
    world.close()
    before = leftovers.Before()
    if engine == "ray":
        _allow_for_ray(before)
    world = World(engine)
    step = {"do": "start"}
    samples, sampled, began, count = [leftovers.memory()], time.monotonic(), time.monotonic(), 0
    try:
        for step in steps:
            limit = START if step["do"] == "new_session" else HUNG
            faulthandler.dump_traceback_later(limit, exit=True)
            do(world, step)
            count += 1
            now = time.monotonic()
            if unraised.found:
                return _fault(step, "an error that nobody raised: " + unraised.found[0])
            if step["do"] == "round_ends" and now - sampled > _SAMPLE_EVERY:
                samples.append(leftovers.memory())
                sampled = now
            if now - began > seconds:
                break
        faulthandler.dump_traceback_later(HUNG, exit=True)
        step = {"do": "end"}
        world.close()
        del world
    except BaseException as exc:
        traceback.print_exc()
        told = "".join(f"\nan error that nobody raised: {found}" for found in unraised.found)
        return _fault(step, f"{type(exc).__name__}: {exc}{told}")
    left = leftovers.Before.left(before)
    if left:
        return _fault(step, "what is left: " + "; ".join(left))
    more = leftovers.growth(samples)
    if more:
        return _fault(step, f"memory grows, by {more >> 20} MiB a third: {samples}")
    print(f"{count} steps, no fault; {samples[-1] >> 20} MiB at the end, {samples[0] >> 20} before")
    return ""


def _allow_for_ray(before: leftovers.Before) -> None:
    """Ray 2.60 leaves two sockets open each time it is started and left, without discolab too."""
    import ray

    start = ray.init

    def counted(*args: Any, **kwargs: Any) -> Any:
        before.not_ours += 2
        return start(*args, **kwargs)

    ray.init = counted


def _fault(step: dict[str, Any], text: str) -> str:
    return f"FAULT in {step['do']}: {text}"


def _written(steps: Iterable[dict[str, Any]], path: str) -> Iterable[dict[str, Any]]:
    for step in steps:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(step) + "\n")
        yield step


def main(engine: str, *arguments: str) -> int:
    """Run it; see the module."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    if len(arguments) == 1:
        with open(arguments[0], encoding="utf-8") as file:
            steps: Iterable[dict[str, Any]] = [json.loads(line) for line in file]
        fault = play(engine, steps, float("inf"))
    else:
        seconds, seed, path = arguments
        fault = play(engine, _written(draw(int(seed)), path), float(seconds))
    if fault:
        print(fault, flush=True)
        sys.stderr.flush()
        os._exit(1)  # whatever hangs at the end
    return 0


if __name__ == "__main__":
    sys.exit(main(*itertools.islice(sys.argv, 1, None)))
