"""Cut a checkpoint for so many workers, or for others than it was cut for, without a session.

Each thread has one shard in memory at a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from ..layouts.layout import Cut, Workers
from .arrangement import Slot
from .catalog import Catalog
from .files import Sink, md5_of
from .formats import open_checkpoint
from .formats.checks import cast_dtype
from .plan import Plan, Resolved
from .presharded import Sharding, logical, shard_name
from .progress import Board
from .read import Files, read_entry, whole
from .target import Target

_THREADS = 4
_LOOK = 0.1  # seconds between two looks at the progress

Task = tuple[str, Cut, Slot]


def shard(
    source: str | os.PathLike[str] | Catalog,
    out: str | os.PathLike[str],
    plan: Any = None,
    workers: int | Workers = 1,
    groups: int = 1,
    *,
    format: str = "safetensors",
    dtype: Any = None,
    presharded: bool = True,
    max_file_bytes: int | None = None,
    bf16_as: str = "raw",
    metadata: dict[str, Any] | None = None,
    source_plan: Any = None,
    progress: bool = True,
) -> Catalog:
    """Write a checkpoint as the shards that so many workers hold of it.

    Parameters
    ----------
    source
        Of any format that can be read, presharded for another number of workers too.
    out
        A folder; that of the source too, which is then replaced.
    plan
        The layouts, see `Plan.of`.
    workers
        How many, or as a mesh.
    groups
        Pipeline stages among them.
    dtype
        What floating-point parameters are cast to; None: they stay as they are.
    presharded
        False: whole parameters, as to put shards together again.
    source_plan
        How the source was cut, if it is presharded and does not say so itself; None: `plan`.
    format, max_file_bytes, bf16_as, metadata
        See `save`.
    progress
        Whether to show a bar if it takes more than a second.

    Returns
    -------
    Catalog
        What was written.

    Raises
    ------
    CheckpointError
        If the source is not whole, or `out` can't be written. What `out` held is as it was.
    ArgumentError
        If the plan does not fit.
    """
    target = Target(format, presharded, max_file_bytes, bf16_as, metadata)
    cast = cast_dtype(dtype)
    given = Plan.of(plan)
    catalog = source if isinstance(source, Catalog) else open_checkpoint(source)
    how = plan if source_plan is None else source_plan
    catalog = logical(catalog, None if how is None else Plan.of(how))
    resolved = given.resolve(catalog, Workers.given(workers, groups))
    kinds = {}
    for name, entry in catalog.entries.items():
        if cast is not None and entry.dtype.is_floating_point:
            kinds[name] = target.kind(name, cast)
        else:
            kinds[name] = target.kind(name, entry.dtype, entry.stored)
    shapes = {name: entry.shape for name, entry in catalog.entries.items()}
    sharding = Sharding(resolved.workers, resolved.layouts, shapes)

    def fill(paths: Sequence[str], slots: Mapping[str, Slot]) -> None:
        _Copying(resolved, paths, progress).run(_tasks(resolved, slots, presharded))

    return target.write(out, kinds, sharding, fill, _checksums)


def _checksums(paths: Sequence[str]) -> list[str]:
    with ThreadPoolExecutor(_threads()) as pool:
        return list(pool.map(md5_of, paths))


def _threads() -> int:
    return min(_THREADS, os.cpu_count() or 1)


def _tasks(resolved: Resolved, slots: Mapping[str, Slot], presharded: bool) -> list[Task]:
    """Which box of which parameter goes where, as they lie in the new files."""
    found: list[Task] = []
    count = resolved.workers.count
    for name, entry in resolved.catalog.entries.items():
        if not presharded:
            found.append((name, whole(entry), slots[name]))
            continue
        for rank in range(count):
            made = resolved.cut(name, rank)
            if made is not None:
                found.append((name, made, slots[shard_name(name, rank, count)]))
    return sorted(found, key=lambda task: (task[2].file, task[2].offset))


class _Copying:
    """Some threads that copy shards; `_done[i]` is written by thread i alone."""

    def __init__(self, resolved: Resolved, paths: Sequence[str], progress: bool) -> None:
        self._catalog, self._paths, self._progress = resolved.catalog, paths, progress
        self._stop = threading.Event()
        self._done = [0] * _threads()

    def run(self, tasks: Sequence[Task]) -> None:
        """Copy all; the first error stops all threads."""
        count = len(self._done)
        total = sum(slot.record.nbytes for _, _, slot in tasks)
        board = Board("sharding", [total], self._progress)
        with board, ThreadPoolExecutor(count, "shard") as pool:
            running = [pool.submit(self._copy, i, tasks[i::count]) for i in range(count)]
            try:
                while any(not future.done() for future in running):
                    wait(running, timeout=_LOOK)
                    board.landed[0] = sum(self._done)
                    board.look()
            except BaseException:
                self._stop.set()
                raise
        for future in running:
            future.result()

    def _copy(self, number: int, tasks: Sequence[Task]) -> None:
        def report(nbytes: int) -> None:
            self._done[number] += nbytes

        try:
            with Files(self._catalog.files) as files, Sink(self._paths, True, report) as sink:
                for name, made, slot in tasks:
                    if self._stop.is_set():
                        return
                    entry = self._catalog.entries[name]
                    part = read_entry(files, entry, made, slot.record.stored)
                    sink.put(slot, part, (0,) * part.dim())
        except BaseException:
            self._stop.set()
            raise
