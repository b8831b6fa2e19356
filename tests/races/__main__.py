"""Look for races of first uses: ``python -m tests.races TIMES [PROGRAM…]``.

What torch prepares when it is used for the first time, it often prepares in two steps, and four
workers that run one program take them at the same moment. Each program runs TIMES times on four
threads, each time in a process in which nothing of it was used before, while Python switches
threads as often as it can. What comes out is compared with what comes out where the workers run one
after the other; of programs with collectives, where they run it a second time. Exits with 1 if
anything differs; that it did not is no proof.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

# imports wait for each other; they are not what is looked for
import torch._dynamo
import torch.ao.quantization.quantize_fx
import torch.distributions
import torch.utils.checkpoint

from discolab import ThreadedSession, ccl, current_worker

from .programs import alone, run, together

WORKERS = 4
_PATIENCE = 120.0  # seconds for a process


def at_once(name: str) -> list[Any]:
    """What the workers get who all begin at the same moment."""

    def begin() -> Any:
        ccl.barrier()
        return run(name, current_worker().rank)

    with ThreadedSession(WORKERS, timeout=_PATIENCE) as session:
        sys.setswitchinterval(1e-6)
        return session.call_packed(begin).debug_get_from_all()


def in_peace(name: str) -> list[Any]:
    """What they get where nothing is used for the first time by two at once."""

    def one(rank: int) -> Any:
        return run(name, rank) if current_worker().rank == rank else None

    with ThreadedSession(WORKERS, timeout=_PATIENCE) as session:
        if name in together:
            session.call_packed(lambda: run(name, current_worker().rank))
            found = session.call_packed(lambda: run(name, current_worker().rank))
            return found.debug_get_from_all()
        return [session.call_packed(one, r).debug_get_from_remote(r) for r in range(WORKERS)]


def in_a_fork(function: Callable[[str], list[Any]], name: str) -> Any:
    """What a function gives in a forked process; a text if that dies or does not end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(function(name), pipe)
            os._exit(0)
        except BaseException as exc:
            print(f"{name}: {exc!r:.500}", flush=True)
            os._exit(1)
    os.close(writer)
    data, deadline = b"", time.monotonic() + _PATIENCE
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            more = pipe.read(1 << 16)
            data += more
            if not more:
                break
        else:
            os.kill(pid, signal.SIGKILL)
            data = pickle.dumps("it did not end")
    _, status = os.waitpid(pid, 0)
    return pickle.loads(data) if data else f"it died, status {status}"


def differences(name: str, times: int) -> Counter[str]:
    """In what ways a program went wrong, and how often."""
    expected, found = in_a_fork(in_peace, name), Counter[str]()
    if any(isinstance(item, str) for item in expected):
        return Counter([f"fails by itself: {expected}"])
    for _ in range(times):
        got = in_a_fork(at_once, name)
        if isinstance(got, str):
            found[got] += 1
        elif got != expected:
            wrong = [r for r in range(WORKERS) if got[r] != expected[r]]
            first = got[wrong[0]]
            found[f"workers {wrong}: {first if isinstance(first, str) else 'other values'}"] += 1
    return found


def main() -> int:
    """Run what the command line says."""
    times, names = int(sys.argv[1]), sys.argv[2:] or [*alone, *together]
    torch.set_num_threads(1)
    raced = False
    for name in names:
        found = differences(name, times)
        raced |= bool(found)
        print(name, "ok" if not found else "", flush=True)
        for what, count in found.items():
            print(f"    {count} of {times}: {what:.500}", flush=True)
    return int(raced)


if __name__ == "__main__":
    sys.exit(main())
