"""Saves that are killed (SIGKILL) at any moment, or run out of room: a program, since it forks.

``python -m tests.loader.killed_writer FOLDER`` prints what it has found, as JSON. At each step a
child saves version 2 over version 1 and is killed; then the folder must hold one of both, whole,
and whoever saves next must clear what is left.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from discolab.loader.atomic import Replacement
from discolab.loader.convert import shard
from discolab.loader.errors import CheckpointError
from discolab.loader.formats import open_checkpoint
from discolab.loader.presharded import logical
from discolab.loader.read import Files, read_entry

PLAN = {"a": "shard(0)", "b": "shard(1)"}
SHAPES = {"a": (8, 40), "b": (5, 64)}
KINDS: dict[str, dict[str, Any]] = {
    "single": {"format": "safetensors", "presharded": False},
    "several": {"format": "safetensors", "presharded": False, "max_file_bytes": 1000},
    "shards": {"format": "safetensors", "presharded": True},
    "cache": {"format": "tensor-cache", "presharded": False},
    "cache shards": {"format": "tensor-cache", "presharded": True},
}
PAIRS = [
    ("single", "single"),
    ("single", "shards"),
    ("shards", "several"),
    ("cache", "cache shards"),
]
STEPS = ("open", "pwrite", "posix_fallocate", "ftruncate", "fsync", "replace", "unlink")


def save(folder: Path, version: int, kind: str) -> None:
    """Write one of the two versions."""
    source, out = folder / f"{version}.safetensors", folder / "out"
    shard(source, out, PLAN, 2, progress=False, **KINDS[kind])


def version_of(folder: Path) -> int:
    """Which version the folder holds; 0 if it is not one of both, whole."""
    catalog = logical(open_checkpoint(folder / "out"))
    with Files(catalog.files) as files:
        found = {name: read_entry(files, entry) for name, entry in catalog.entries.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    wanted = {name: tuple(shape) for name, shape in shapes_of(folder).items()}
    values = {float(value) for tensor in found.values() for value in tensor.unique()}
    return int(values.pop()) if shapes == wanted and len(values) == 1 else 0


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of the parameters in the sources."""
    entries = open_checkpoint(folder / "1.safetensors").entries
    return {name: entry.shape for name, entry in entries.items()}


def leavings(folder: Path) -> list[str]:
    """What is in the folder and not part of the checkpoint."""
    catalog = open_checkpoint(folder / "out")
    needed = {os.path.basename(file.path) for file in catalog.files}
    indexes = ("tensor-cache.json", "model.safetensors.index.json")
    return sorted(set(os.listdir(folder / "out")) - needed - set(indexes))


def die_at(step: int) -> None:
    """Have this process killed before its `step`-th change to the file system."""
    counter = itertools.count(1)

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if next(counter) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    for name in STEPS:
        setattr(os, name, deadly(getattr(os, name)))


def child(work: Callable[[], None]) -> int:
    """Run it in a child process."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def ended(pid: int) -> int:
    """How a child ended: its exit status, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def at_every_step(folder: Path, before: str, after: str) -> dict[str, Any]:
    """Kill a save at each of its steps."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    save(folder, 1, before)
    versions = []
    for step in itertools.count(1):

        def work(step: int = step) -> None:
            die_at(step)
            save(folder, 2, after)

        code = ended(child(work))
        versions.append(version_of(folder))
        if code == 0:
            break
        if code != -signal.SIGKILL:
            return {"pair": [before, after], "bad": f"step {step} ended with {code}"}
        with Replacement(folder / "out", KINDS[before]["format"]):
            pass  # as each save begins
        if version_of(folder) != versions[-1]:
            return {"pair": [before, after], "bad": f"step {step}: clearing has changed it"}
        if versions[-1] != 1:
            save(folder, 1, before)
        if left := leavings(folder):
            return {"pair": [before, after], "bad": f"step {step} has left {left}"}
    return {"pair": [before, after], "versions": versions}


def at_random_moments(folder: Path, count: int) -> list[int]:
    """Kill a process that saves all the time."""
    chosen = random.Random(5)
    found = []
    shutil.rmtree(folder / "out")
    began = time.monotonic()
    save(folder, 1, "shards")
    takes = time.monotonic() - began

    def work() -> None:
        for number in itertools.count():
            save(folder, 1 + number % 2, ("shards", "several")[number % 2])

    for _ in range(count):
        pid = child(work)
        time.sleep(chosen.uniform(0, 3 * takes))
        os.kill(pid, signal.SIGKILL)
        ended(pid)
        found.append(version_of(folder))
    save(folder, 1, "shards")
    return [*found, *(-1 for _ in leavings(folder))]


def full_disk(folder: Path) -> list[Any]:
    """A save that may not write as much as it has to: its error, what is there then and besides."""

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        try:
            save(folder, 2, "shards")
        except CheckpointError as exc:
            (folder / "error").write_text(str(exc), encoding="utf-8")

    code = ended(child(work))
    error = (folder / "error").read_text(encoding="utf-8")
    return [code, error, version_of(folder), leavings(folder)]


def write_sources(folder: Path, factor: int) -> None:
    """The two versions: all ones, all twos."""
    for version in (1, 2):
        tensors = {
            name: torch.full((factor * shape[0], *shape[1:]), float(version))
            for name, shape in SHAPES.items()
        }
        save_file(tensors, folder / f"{version}.safetensors")


def main() -> None:
    """Print what came of it."""
    torch.set_num_threads(1)  # the children are forked
    folder = Path(sys.argv[1])
    write_sources(folder, 1)
    steps = [at_every_step(folder, *pair) for pair in PAIRS]
    write_sources(folder, 500)
    found = {"steps": steps, "random": at_random_moments(folder, 20), "full": full_disk(folder)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
