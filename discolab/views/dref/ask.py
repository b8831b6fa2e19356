"""Asks the workers what they hold of a DRef: one record each, from all of them within a second.

Runs on the controller, in the thread of whoever draws. A worker that gives no value (its call
failed, it is busy, silent or dead) gets a record that says so, beside those of `describe`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ...runtime.dref import DRef
from ...runtime.errors import DiscoError, WaitTimeoutError
from ...runtime.failures import Failure, explain
from ...runtime.registers import OWN
from ...runtime.restart import LOST
from ...runtime.session import Session
from ...runtime.sources import place
from ...runtime.status import WorkerStatus
from ..facts.describe import (
    DRAWING,
    MOST_NAMED,
    block_size,
    describe,
    overflow_blocks,
    overflow_rows,
)
from ..facts.guard import FAILURES
from ..formats import format_seconds
from .contents import NO_VALUE, content_key, row_verdict
from .summary import LayoutFacts

_MOST_OVERFLOW_ROWS = 500


def ask_workers(
    ref: DRef, stats: Literal["auto"] | bool, deadline: float
) -> dict[int, dict[str, Any]]:
    """What each worker holds of a DRef: a record for every rank.

    Parameters
    ----------
    ref
        Of a live session.
    stats
        See `describe`: ``"auto"`` reads statistics of tensors up to 4 MiB.
    deadline
        On the clock of ``time.monotonic``; a worker that has not answered by then counts as busy.

    Raises
    ------
    DiscoError
        If the session is closed, or this is a worker of it.
    """
    session = ref.session
    answers = ask(ref, deadline - time.monotonic(), describe, stats)
    lacking = [rank for rank in range(session.num_workers) if answers.get(rank) is None]
    states = session.status() if lacking else []
    busy = [status for status in states if status.state not in ("idle", "dead")]
    if busy and all(_is_drawing(status.detail) for status in busy):
        session.interrupt(timeout=0.2)  # nothing but a slow __repr__ is in the way
    records: dict[int, dict[str, Any]] = {}
    for rank in range(session.num_workers):
        answer = answers.get(rank)
        if isinstance(answer, Failure):
            records[rank] = failure_record(answer)
        else:
            records[rank] = answer or state_record(states[rank])
    with_value = {r: record for r, record in records.items() if record["kind"] not in NO_VALUE}
    if count := _unnamed_tensors(with_value):
        _add_overflow_rows(ref, with_value, count, deadline)
    return records


def _is_drawing(detail: str) -> bool:
    """Whether nothing else runs: also if the __repr__ sleeps, which status says in front."""
    return detail.startswith(DRAWING) or detail.partition(" at ")[0].endswith(f" in {DRAWING}")


def ask(
    ref: DRef,
    patience: float,
    function: Any,
    *args: Any,
    ranks: Sequence[int] | None = None,
) -> dict[int, Any]:
    """What workers answer within `patience` seconds; of one that has died nothing.

    Parameters
    ----------
    ref
        A value of a live session.
    patience
        Seconds to wait at most; 0 or less: take what is there at once.
    function, args
        A worker function; it gets the value, then `args`.
    ranks
        Whose answers to wait for; None: all.
    """
    return answers_of(ref.session.call_packed(function, ref, *args), patience, ranks)


def answers_of(asked: DRef, patience: float, ranks: Sequence[int] | None = None) -> dict[int, Any]:
    """What a call gave on the workers that have answered it in time; parameters as `ask`."""
    session = asked.session
    asked.name = OWN
    ticket = session.request(asked, ranks)
    patience = max(patience, 0.0)
    deadline = time.monotonic() + patience
    try:
        return session.wait(ticket, patience)
    except WaitTimeoutError:
        pass
    except DiscoError:  # some have died: those that live answer all the same
        dead = {status.rank for status in session.status() if status.state == "dead"}
        if not dead:
            raise
        while not dead.issuperset(ticket.missing) and time.monotonic() < deadline:
            ticket.acquire(0.02)
    return dict(ticket.values)


def layout_of(session: Session, ref: DRef | None = None) -> LayoutFacts:
    """What the controller knows of how workers hold a value: that of a DRef, or any other."""
    mesh, placed = session.current_mesh, session._mesh
    in_order = mesh is not None and list(mesh.ranks) == list(range(session.num_workers))
    placements = None if ref is None else ref.placements
    mesh_shape = None  # of the mesh that placements are for, if they fit its axes
    if placed is not None and isinstance(placements, list | tuple):
        mesh_shape = placed.sizes if len(placed.sizes) == len(placements) > 1 else None
    return LayoutFacts(
        num_workers=session.num_workers,
        placements=placements,
        num_groups=session.num_groups,
        mesh_shape=mesh_shape,
        axes=dict(zip(mesh.axes, mesh.sizes, strict=True)) if mesh and in_order else None,
    )


# -- workers that gave no value --------------------------------------------------------------------


def failure_record(failure: Failure) -> dict[str, Any]:
    """The record of a poisoned register: the error, where it was raised, and its traceback."""
    if failure.type_name == LOST:
        message = f"lost with the worker that had this place; made by {failure.summary}"
        return {"kind": "lost", "message": message}
    words = [failure.headline.partition("\n")[0]]
    if failure.frames:
        filename, line, _ = failure.frames[-1]
        words.append(place(filename, line))
    words.append(failure.summary)
    record = {"kind": "failure", "message": " · ".join(words)}
    if failure.frames or "\n" in failure.headline:
        record["traceback"] = "\n".join(explain([failure])[1:])  # without the rank: they are joined
    return record


def state_record(status: WorkerStatus) -> dict[str, Any]:
    """The record of a worker that has not answered: what it does, and since when."""
    if status.state == "dead":
        return {"kind": "dead", "message": status.detail}
    if status.state == "idle":  # as far as is known: it may be stopped
        return {"kind": "missing", "message": status.detail}
    words = f"{status.state} {status.detail}".strip()
    if status.seconds:
        words += f", for {format_seconds(status.seconds)}"
    if status.queued:
        words += f", {status.queued} queued"
    return {"kind": "pending", "message": words}


# -- values of more tensors than a record names ----------------------------------------------------


def _unnamed_tensors(records: Mapping[int, Mapping[str, Any]]) -> int:
    """How many tensors follow after those that records name, if it is worth asking for them.

    0 unless all records are of the same number of tensors and all digests are known, but differ.
    """
    if not any(record.get("more") for record in records.values()):
        return 0
    kinds = {(record.get("kind"), record.get("more")) for record in records.values()}
    keys = {rank: content_key(record) for rank, record in records.items()}
    if len(kinds) != 1 or None in keys.values() or len(set(keys.values())) < 2:
        return 0
    first = next(iter(records.values()))
    brief = len(first.get("brief") or [])
    named = len(first.get("params") or first.get("items") or []) + brief
    return max(int(first["more"]) - brief, 0) if named == MOST_NAMED else 0


def _add_overflow_rows(
    ref: DRef, records: Mapping[int, dict[str, Any]], count: int, deadline: float
) -> None:
    """Add to each record's ``brief`` which of `count` unnamed tensors differ.

    Two rounds: digests of blocks, then the names in blocks that differ. Records stay as they are
    if a worker gives no answer.
    """
    num_groups = ref.session.num_groups
    try:
        blocks = _lists_of(ref, records, deadline, overflow_blocks, count)
        if blocks is None or len({len(digests) for digests in blocks.values()}) != 1:
            return
        odd: list[int] = []
        distinct: list[int] = []
        for number in range(len(next(iter(blocks.values())))):
            digests = {rank: told[number] for rank, told in blocks.items()}
            if len(set(digests.values())) > 1:
                unlike = row_verdict(digests, num_groups).role == "warning"
                (odd if unlike else distinct).append(number)
        wanted = sorted((odd + distinct)[: max(_MOST_OVERFLOW_ROWS // block_size(count), 1)])
        if not wanted:
            return
        rows = _lists_of(ref, records, deadline, overflow_rows, count, wanted)
        if rows is None or len({tuple(row[0] for row in told) for told in rows.values()}) != 1:
            return
        for rank, told in rows.items():
            records[rank]["brief"] = [*records[rank]["brief"], *told]
    except (DiscoError, *FAILURES):
        return


def _lists_of(
    ref: DRef, records: Mapping[int, Any], deadline: float, function: Any, *args: Any
) -> dict[int, list[Any]] | None:
    """What the workers of the records answer; None if one gives no list in time."""
    patience = deadline - time.monotonic()
    if patience <= 0:
        return None
    answers = ask(ref, patience, function, *args)
    lists = {rank: answers[rank] for rank in records if isinstance(answers.get(rank), list)}
    return lists if len(lists) == len(records) else None
