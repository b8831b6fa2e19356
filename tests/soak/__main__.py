"""Random use of discolab for a while: ``python -m tests.soak ENGINE SECONDS SEED``.

A process of its own takes random steps on sessions of that engine (steps.py), and compares all that
comes out with a model; in the end nothing may be left (leftovers.py). On a fault this prints the
seed and the shortest story that it could find which still fails: it leaves out steps, and runs what
is left in a fresh process. Exits with 1 then.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

from .steps import Story

SHRINKING = float(os.environ.get("DISCOLAB_SOAK_SHRINKING", "300"))  # seconds
_TRIES = 2  # of each shorter story: some faults depend on timing
_LATE = 400.0  # seconds for start and end: a step that hangs ends the process before


def run(engine: str, *arguments: str, seconds: float) -> tuple[int, str]:
    """The exit status and the output of a process that takes steps, ended after so many seconds."""
    command = [sys.executable, "-m", "tests.soak.play", engine, *arguments]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]),
        "MALLOC_ARENA_MAX": "2",  # else each of many threads has one, which keeps what was freed
    }
    process = subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # what it has started holds the pipe, too
        return -9, process.communicate()[0] + "\nit did not end"
    return process.returncode, output


def kind_of(status: int, output: str) -> str:
    """What makes two faults the same one: the kind of error; "" if there is none."""
    if status == 0:
        return ""
    found = re.findall(r"^FAULT in \w+: (\w+)", output, re.MULTILINE)
    if found:
        return str(found[-1])
    return "hang" if "Timeout (" in output else f"status {status}"


class Shrinker:
    """Finds a shorter story that ends in the same kind of fault."""

    def __init__(self, engine: str, kind: str, folder: str) -> None:
        self._engine, self._kind = engine, kind
        self._path = os.path.join(folder, "story.jsonl")
        self._until = time.monotonic() + SHRINKING
        self.output = ""

    def fails(self, story: Story) -> bool:
        """Whether it does, in a fresh process."""
        with open(self._path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(step) + "\n" for step in story)
        for _ in range(_TRIES):
            left = self._until - time.monotonic()
            if left <= 0:
                return False
            status, output = run(self._engine, self._path, seconds=left)
            if kind_of(status, output) == self._kind:
                self.output = output
                return True
        return False

    def shrink(self, story: Story) -> Story | None:
        """A shorter one; None if not even all of it fails again."""
        length = 1
        while length < len(story) and not self.fails(story[-length:]):
            length *= 4
        if length >= len(story) and not self.fails(story):
            return None
        story = story[-length:]
        parts = 2
        while len(story) > 1 and time.monotonic() < self._until:
            size = -(-len(story) // parts)
            for start in range(0, len(story), size):
                shorter = story[:start] + story[start + size :]
                if self.fails(shorter):
                    story, parts = shorter, max(2, parts - 1)
                    break
            else:
                if size == 1:
                    break
                parts = min(len(story), parts * 2)
        return story


def main(engine: str, seconds: str, seed: str) -> int:
    """Soak, and shrink what fails."""
    with tempfile.TemporaryDirectory(prefix="discolab-soak-") as folder:
        log = os.path.join(folder, "log.jsonl")
        status, output = run(engine, seconds, seed, log, seconds=float(seconds) + _LATE)
        kind = kind_of(status, output)
        if not kind:
            print(f"{engine}, seed {seed}: {output.strip().splitlines()[-1]}")
            return 0
        print(output[-8000:])
        if not os.path.exists(log):
            print(f"{engine}, seed {seed}: {kind} before the first step")
            return 1
        with open(log, encoding="utf-8") as file:
            story = [json.loads(line) for line in file]
        print(
            f"{engine}, seed {seed}: {kind} after {len(story)} steps; looking for a shorter story"
        )
        sys.stdout.flush()
        shrinker = Shrinker(engine, kind, folder)
        shorter = shrinker.shrink(story)
        if shorter is None:
            print("it did not fail again; the last steps were")
            shorter = story[-20:]
        else:
            print(shrinker.output[-4000:])
            print(f"{engine}, seed {seed}: these {len(shorter)} steps fail with {kind}")
        for step in shorter:
            print("  " + json.dumps(step))
    return 1


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: python -m tests.soak ENGINE SECONDS SEED\n\n{__doc__}")
    sys.exit(main(*sys.argv[1:]))
