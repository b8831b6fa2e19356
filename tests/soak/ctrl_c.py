"""Thousands of Ctrl-C at random moments: ``python -m tests.soak.ctrl_c ENGINE LOOP ROUNDS SEED``.

Each round is a loop of dropped DRefs (``drops``) or a fetch of what workers still compute
(``fetches``), into which another process sends SIGINT, after at most `LONGEST` seconds. None may be
lost, no worker may go on with what was asked, and no register is left. Prints the counts as JSON;
exits with 1 on a fault.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import struct
import sys
import time
import traceback
from collections import Counter

from discolab import Session, make_session

from . import work

LONGEST = 0.003  # seconds; a round of calls has begun, and waits, by then
LOST = 5.0  # seconds after which a Ctrl-C is lost
_DELAY = struct.Struct("d")
_MOST_TOLD = 5


class Finger:
    """Presses Ctrl-C: a process of its own, as a terminal is none of the program's threads."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._writer)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            while data := os.read(reader, _DELAY.size):
                until = time.monotonic() + _DELAY.unpack(data)[0]
                while time.monotonic() < until:
                    pass
                os.kill(os.getppid(), signal.SIGINT)
            os._exit(0)
        os.close(reader)

    def press_in(self, seconds: float) -> None:
        """Send SIGINT so many seconds from now."""
        os.write(self._writer, _DELAY.pack(seconds))

    def close(self) -> None:
        os.close(self._writer)
        os.waitpid(self._pid, 0)


class Loops:
    """Rounds on one session."""

    def __init__(self, session: Session, seed: int, finger: Finger) -> None:
        self._session, self._rng, self._finger = session, random.Random(seed), finger
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._registers = self._live()

    def run(self, loop: str, rounds: int) -> None:
        """Count what becomes of so many presses."""
        take = {"drops": self._drops, "fetches": self._fetches}[loop]
        for _ in range(rounds):
            delay = self._rng.random() * LONGEST
            try:
                take(delay)
                time.sleep(LOST)
                self._fault("lost", f"a Ctrl-C after {delay * 1e3:.3f} ms")
            except KeyboardInterrupt as exc:
                where = traceback.extract_tb(exc.__traceback__)
            self.counts["came"] += 1
            if loop == "fetches":
                self._workers_have_stopped(where)
        left = self._live() - self._registers
        if left:
            self._fault("registers", f"{left} registers are left")

    def _drops(self, delay: float) -> None:
        deadline = time.monotonic() + LOST
        self._finger.press_in(delay)
        while time.monotonic() < deadline:
            refs = [self._session.call_packed(int) for _ in range(10)]
            del refs

    def _fetches(self, delay: float) -> None:
        what = self._rng.choice(list(work.BLOCKING))
        function, argument = work.BLOCKING[what]
        ref = self._session.call_packed(function, argument)
        self._finger.press_in(delay)
        ref.debug_get_from_all(timeout=LOST)

    def _workers_have_stopped(self, where: traceback.StackSummary) -> None:
        if len([frame for frame in where if "/tests/soak/" not in frame.filename]) < 2:
            self.counts["before the fetch"] += 1  # or as its first function begins
            self._session.interrupt()
        busy = [str(status) for status in self._session.status() if status.state != "idle"]
        if busy:
            self._fault("busy", "\n".join([*traceback.format_list(where), *busy]))
            self._session.interrupt()

    def _fault(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= _MOST_TOLD:
            self.faults.append(f"{kind}: {text}")

    def _live(self) -> int:
        gc.collect()
        self._session.sync_all(timeout=60)
        return self._session.statistics().live_registers


def main(engine: str, loop: str, rounds: str, seed: str) -> int:
    """Run it; see the module."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    sys.setswitchinterval(5e-4)  # on threads a round otherwise waits for its workers to compute
    finger = Finger()
    options = {"nodes": "local:2"} if engine == "sockets" else {}
    with make_session(2, engine, devices="cpu", timeout=60, **options) as session:
        session.init_ccl("auto")
        loops = Loops(session, int(seed), finger)
        began = time.monotonic()
        loops.run(loop, int(rounds))
        seconds = time.monotonic() - began
    finger.close()
    print("\n".join(loops.faults), file=sys.stderr)
    print(json.dumps({"engine": engine, "loop": loop, "s": round(seconds), **loops.counts}))
    return int(bool(loops.faults))


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(f"usage: python -m tests.soak.ctrl_c ENGINE LOOP ROUNDS SEED\n\n{__doc__}")
    sys.exit(main(*sys.argv[1:]))
