"""Run a measurement as a child process of its own, and leave nothing of it behind.

Used by the benchmarks that compare runtimes. A child writes JSON objects, one a line; the last one
counts. Runtimes under test start processes of their own, some of them in sessions of their own:
on Linux whatever a child has started is found by a mark in its environment, and ended by process
id once the child is done. No state but the running child; used on the main thread.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATIENCE = 600.0  # seconds that a child may take
GRACE = 8.0  # seconds that processes of a child may outlive it before they are ended
_MARK = "DISCOLAB_BENCHMARK_CHILD"


class ChildFailed(Exception):
    """A child gave no result, or did not end well; the text is the end of what it wrote.

    Attributes
    ----------
    found
        The last result that it printed before it failed, if any.
    """

    def __init__(self, text: str, found: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.found = found


def run_child(*arguments: str, patience: float = PATIENCE) -> dict[str, Any]:
    """Run Python on this checkout and return the last JSON object that it prints.

    The object gains ``left_behind``: how many processes had to be ended after it.

    Raises
    ------
    ChildFailed
        If it exits with an error, prints no object, or takes longer than `patience` seconds.
    """
    # files, not pipes: a process that outlives the child would keep a pipe open
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child, mark = _start(arguments, stdout=out, stderr=err)
        try:
            code: int | None = child.wait(patience)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            left = _end(child, mark)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    lines = [line for line in texts[0].splitlines() if line.startswith("{")]
    found: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
    if code == 0 and found is not None:
        return {**found, "left_behind": left}
    if code is None:
        raise ChildFailed(f"no result after {patience:g} s", found)
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    raise ChildFailed("\n".join(filter(None, [texts[1].strip()[-2000:], how])), found)


class WaitingChild:
    """A child that measures once each time it is asked, and waits in between; use it in ``with``.

    So several can take turns of a fraction of a second, and a load that comes and goes hits all.
    """

    def __init__(self, *arguments: str, patience: float = 120.0) -> None:
        self._patience = patience
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `__exit__`
        pipe = subprocess.PIPE
        self._child, self._mark = _start(arguments, stdin=pipe, stdout=pipe, stderr=self._errors)

    def ask(self) -> dict[str, Any]:
        """Have it measure once.

        Raises
        ------
        ChildFailed
            If no answer comes within `patience` seconds, or the child has ended.
        """
        give, take = self._child.stdin, self._child.stdout
        assert give is not None
        assert take is not None
        try:
            give.write(b"\n")
            give.flush()
        except BrokenPipeError:
            pass  # told below
        ready, _, _ = select.select([take], [], [], self._patience)
        line = take.readline() if ready else b""
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self._errors.seek(0)
        text = self._errors.read().strip()[-2000:]
        raise ChildFailed(text or f"no answer within {self._patience:g} s")

    def __enter__(self) -> WaitingChild:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.close()  # it ends then
            self._child.wait(GRACE)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        finally:
            _end(self._child, self._mark)
            self._errors.close()


def _start(arguments: Sequence[str], **streams: Any) -> tuple[subprocess.Popen[bytes], str]:
    """Start Python on this checkout, in a session of its own, with a mark by which it is found."""
    mark = uuid.uuid4().hex
    paths = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), _MARK: mark}
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, env=env, start_new_session=True, **streams), mark


def _end(child: subprocess.Popen[bytes], mark: str) -> int:
    """End a child if it runs, and what it left behind; how many processes that were."""
    if child.poll() is None:
        child.kill()
        child.wait()
    return end_left_behind(mark)


def exit_on_sigterm() -> None:
    """Have SIGTERM raise `SystemExit`, so that a running child is ended with us."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def end_left_behind(mark: str) -> int:
    """End what a child has left running; how many processes that were. 0 where /proc is missing."""
    deadline = time.monotonic() + GRACE
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return len(left)


def _marked(mark: str) -> list[int]:
    """Process ids of the living processes that were started with this mark."""
    wanted = f"{_MARK}={mark}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
        except OSError:  # it has ended meanwhile, or belongs to somebody else
            continue
    return pids


def describe_machine() -> dict[str, Any]:
    """What a reader must know about where the figures come from."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores,
        "python": platform.python_version(),
        "load": load(),
    }


def load() -> float | None:
    """How many processes wanted to run in the last minute, where the system says so."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def say(text: str) -> None:
    """Progress, apart from the results."""
    print(text, file=sys.stderr, flush=True)
