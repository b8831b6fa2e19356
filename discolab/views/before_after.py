"""A small picture of what a collective moved: each worker's values before and after it.

Each value has the colour of the worker that it comes from; a sum has stripes of all whose values
were added. Where it comes from is worked out from the values alone, so distinct ones draw best:
``10**rank`` times something, say. `before_after` runs on the controller and asks the workers for
records, which have the values of small tensors only; the rest is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError
from ..runtime.failures import Failure
from ..runtime.functions import worker_function
from .facts.describe import DRAWING, describe
from .facts.tensors import why_no_data
from .formats import format_number
from .parts import Box, Lane, Lanes
from .pictures import Shown
from .summary import summarize

_PATIENCE = 5.0  # seconds
_MOST_WORKERS = 8  # of whose values every sum is tried
_MOST_VALUES = 64  # of one tensor; a larger one is described in a line
_Records = Mapping[int, Mapping[str, Any]]
_Origins = dict[float, tuple[int, ...]]


def before_after(*stages: DRef) -> Shown:
    """Draw what each worker holds at each stage, in the colours of where it comes from.

    Parameters
    ----------
    stages
        Two or more values of one session, the first from before the collective. A worker that
        holds None there has nothing.

    Raises
    ------
    ArgumentError
        If there are fewer than two, or they are of several sessions.
    WaitTimeoutError
        If a worker is busy for 5 seconds.
    DiscoError
        If one has died.

    Examples
    --------
    >>> before_after(sess["x"], sess["total"])  # doctest: +SKIP
    """
    if len(stages) < 2 or not all(isinstance(stage, DRef) for stage in stages):
        raise ArgumentError("before_after draws two DRefs or more: sess['x'], sess['y']")
    session = stages[0].session
    if any(stage.session is not session for stage in stages):
        raise ArgumentError("before_after: the values are of several sessions")
    described = [session.call_packed(record_of, stage) for stage in stages]
    records = [_answers(session.peek(record, timeout=_PATIENCE)) for record in described]
    heads = [stage.name or ("before" if i == 0 else "after") for i, stage in enumerate(stages)]
    return Shown(before_after_parts(heads, records))


def _answers(answers: Mapping[int, Any]) -> _Records:
    """What the workers have answered, as records; of a poisoned value what has failed."""
    return {
        rank: {"kind": "failure", "message": answer.headline}
        if isinstance(answer, Failure)
        else answer
        for rank, answer in answers.items()
    }


@worker_function(DRAWING)
def record_of(value: Any) -> dict[str, Any]:
    """What is drawn of a value: all of a small tensor (a worker function)."""
    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    small = dense and not why_no_data(value)
    if small and value.numel() <= _MOST_VALUES and not value.is_complex():
        return {"shape": list(value.shape), "values": value.detach().flatten().tolist()}
    return describe(value, False)


def before_after_parts(heads: Sequence[str], stages: Sequence[_Records]) -> Lanes:
    """The picture from records.

    Parameters
    ----------
    heads
        What each stage is called.
    stages
        For each the record of every worker; the first is where values come from.
    """
    before = {rank: _values(record) for rank, record in stages[0].items()}
    origins = origins_of(before)
    lanes = []
    for rank in sorted(before):
        own: _Origins = dict.fromkeys(before[rank], (rank,))  # what it had, it kept
        known: list[_Origins] = [own, *[{**origins, **own}] * (len(stages) - 1)]
        rows = tuple(_rows(stage[rank], table) for stage, table in zip(stages, known, strict=True))
        lanes.append(Lane(rank, rows))
    return Lanes(tuple(heads), tuple(lanes))


def origins_of(before: Mapping[int, Sequence[float]]) -> _Origins:
    """From which workers a value comes: one that has it, or those whose values add up to it.

    Only values at the same place are added. A value that more than one worker has is left out.

    Examples
    --------
    >>> origins_of({0: [1, 2], 1: [10, 20]})
    {11: (0, 1), 22: (0, 1), 1: (0,), 2: (0,), 10: (1,), 20: (1,)}
    """
    found: _Origins = {}
    ranks = sorted(before)
    sizes = range(2, len(ranks) + 1) if len(ranks) <= _MOST_WORKERS else [len(ranks)]
    for size in sizes:
        for some in combinations(ranks, size):
            for parts in zip(*(before[rank] for rank in some), strict=False):
                found.setdefault(sum(parts), some)
    holders: dict[float, set[int]] = {}
    for rank, values in before.items():
        for value in values:
            holders.setdefault(value, set()).add(rank)
    for value, who in holders.items():
        if len(who) == 1:
            found[value] = tuple(who)
        else:
            found.pop(value, None)
    return found


def _values(record: Mapping[str, Any]) -> list[float]:
    values: list[float] = record.get("values", [])
    return values


def _rows(record: Mapping[str, Any], origins: _Origins) -> tuple[tuple[Box, ...], ...]:
    """The boxes of one value: a row for a vector, several for a matrix."""
    if record.get("kind") == "none":
        return ()
    if "values" not in record:
        return ((Box(summarize(record, 40)),),)
    boxes = [Box(format_number(value), origins.get(value, ())) for value in record["values"]]
    shape = record["shape"]
    width = max(1, shape[-1] if len(shape) > 1 else len(boxes))
    return tuple(tuple(boxes[i : i + width]) for i in range(0, len(boxes), width)) or ((),)
