"""Ends a run of the tests in which one test hangs so hard that its own timeout can't end it.

pytest-timeout raises in the main thread, once for each test. That does not end a main thread that
stands in C++ code, nor one that hangs again while the test is taken down. So this process beside
the tests hears of each one that begins. If for long after that it hears of none, it says which one
hangs, lets the run print where every thread stands (pytest's faulthandler does on SIGABRT), and
ends it with the processes that it has started: those hold its pipes, and pytest-xdist would wait
for them. Before the first test, while tests are collected, nothing is timed: that takes long on a
busy machine.

Started by conftest.py: ``python watchdog.py PID``, a line on stdin for each test: the seconds that
it may take, and its name.
"""

import contextlib
import glob
import os
import select
import signal
import subprocess
import sys
import time

SECONDS_TO_PRINT = 15.0
END = b"no more tests"


class Watchdog:
    """The watchdog of this process, and how to talk to it."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", __file__, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def begins(self, test: str, seconds: float) -> None:
        """A test begins, which may take so long."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds:g} {test}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """No test comes any more. A process that a test has left may hold the pipe: say so, too."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            self._process.stdin.write(END + b"\n")
            self._process.stdin.close()
        self._process.wait()


def watch(pid: int) -> None:
    """Wait for lines; return when there are no more to come."""
    seconds, test, heard = "0", "", time.monotonic()
    while os.getppid() == pid:
        if select.select([sys.stdin], [], [], 1.0)[0]:
            line = os.read(sys.stdin.fileno(), 65536)
            last = line.splitlines()[-1] if line else END
            if last == END:
                return
            (seconds, test), heard = last.decode(errors="replace").split(" ", 1), time.monotonic()
        elif test and time.monotonic() - heard > float(seconds):
            end(pid, f"\n{test} hangs: it and its fixtures took more than {seconds} s")
            return


def end(pid: int, why: str) -> None:
    """Say why, have the process print its threads, end it, and say it again below them."""
    print(why, file=sys.stderr, flush=True)
    started = children(pid)
    os.kill(pid, signal.SIGABRT)
    deadline = time.monotonic() + SECONDS_TO_PRINT
    while os.getppid() == pid and time.monotonic() < deadline:
        time.sleep(0.1)
    if os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)
    for child in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    print(why, file=sys.stderr, flush=True)


def children(pid: int) -> list[int]:
    """The processes that this one has started, but for the watchdog; none without a /proc."""
    found = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError), open(path) as file:
            found += [int(child) for child in file.read().split()]
    return [child for child in found if child != os.getpid()]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    watch(int(sys.argv[1]))
