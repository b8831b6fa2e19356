"""Watch a process while it loads: its memory, from another process, and a ticker within it.

    python benchmarks/loader_watch.py    # reads process ids from standard input, answers at its end

The memory is sampled by a process of its own, which no interpreter lock of the watched can stop.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from children import _MARK, _marked

EVERY = 0.002  # seconds between two samples, and between two ticks


def memory_of(pids: list[int]) -> dict[str, int]:
    """Anonymous and shared memory of processes together, in bytes."""
    found = {"anonymous": 0, "shared": 0}
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # it has ended
            continue
        for name, field in (("anonymous", "RssAnon:"), ("shared", "RssShmem:")):
            found[name] += 1024 * int(text.partition(field)[2].split(None, 1)[0])
    return found


def family() -> list[int]:
    """Process ids of this benchmark's child and of all that it has started."""
    mark = os.environ.get(_MARK)
    return sorted({os.getpid(), *(_marked(mark) if mark else ())})


class MemoryWatch:
    """The greatest memory of this process and of those that it has started; use it in ``with``.

    Attributes
    ----------
    base
        Bytes at the time it was made, by kind.
    peak
        The greatest seen in ``with``, by kind.
    """

    def __init__(self) -> None:
        self._pids = family()
        self.base = memory_of(self._pids)
        self.peak = dict(self.base)

    def __enter__(self) -> MemoryWatch:
        pipe = subprocess.PIPE
        self._watcher = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe)
        assert self._watcher.stdin is not None
        assert self._watcher.stdout is not None
        self._watcher.stdin.write(json.dumps(self._pids).encode() + b"\n")
        self._watcher.stdin.flush()
        self._watcher.stdout.readline()  # it watches
        return self

    def __exit__(self, *_: object) -> None:
        told, _ = self._watcher.communicate(timeout=30)
        self.peak = json.loads(told)

    @property
    def more(self) -> int:
        """Bytes of anonymous memory at the peak, beyond those at the begin."""
        return self.peak["anonymous"] - self.base["anonymous"]


def watch() -> None:
    """Be the process that samples: until standard input ends."""
    pids = json.loads(sys.stdin.readline())
    print(flush=True)
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    peak = memory_of(pids)
    while not ended.wait(EVERY):
        now = memory_of(pids)
        peak = {name: max(peak[name], now[name]) for name in peak}
    print(json.dumps(peak), flush=True)


def tick_while(work: Callable[[], float]) -> tuple[float, list[float]]:
    """Do `work` in a thread while this one ticks; its result, and how late each tick was in s.

    The ticks have fixed times, so one stop of 0.1 s makes 50 ticks late, not one.
    """
    results: list[float] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as exc:  # raised below, on the main thread
            errors.append(exc)

    thread = threading.Thread(target=run)
    late = []
    due = time.perf_counter() + EVERY
    thread.start()
    while thread.is_alive():
        time.sleep(max(0.0, due - time.perf_counter()))
        now = time.perf_counter()
        while due <= now:
            late.append(now - due)
            due += EVERY
    thread.join()
    if errors:
        raise errors[0]
    return results[0], late


if __name__ == "__main__":
    watch()
