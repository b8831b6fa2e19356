"""What tensors that differ on all workers are: looked up in how they were made and what is held.

Nothing tells a shard from a partial sum in a tensor alone. Three things can: the call that has made
it (a scatter gives out pieces), a tensor that all workers hold and of which each has its part, and
one that all workers hold and which is the sum of theirs. Where all are the same but for a little,
they may be copies that have come apart. A part is compared value by value on its worker. A sum is
found by random projections: a worker sends a few numbers for each tensor, and no collective runs.
Only tensors up to 4 MiB are looked at. Where nothing is found, nothing is claimed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...runtime.dref import DRef
from ...runtime.errors import DiscoError
from ...runtime.failures import Failure
from ...runtime.functions import worker_function
from ...runtime.restart import Equal, Part
from ...runtime.worker import Worker, current_worker
from ..facts.describe import DRAWING
from ..facts.guard import FAILURES
from ..facts.tensors import digest_of, is_dtensor, why_no_data
from ..formats import cut
from ..parts import Text
from .ask import ask
from .summary import ValueSummary

_LARGEST = 4 * 2**20  # bytes of a tensor
_MOST = 200  # tensors of a worker
_LONGEST = 0.15  # seconds
_ROUNDINGS = 8  # a sum may be off by so many roundings of its terms
_NEAR = 1e-4  # of its norm, by which a tensor may differ from one that is nearly equal
_FEW = 8  # elements; fewer are alike by chance, as losses are


def question(summary: ValueSummary) -> Text:
    """What is said of values of one shape of which nothing more is known."""
    single = all(not record.get("shape") for record in summary.good.values())
    what = "each worker's own" if single else "shards of a larger tensor"
    return Text(f"{len(summary.good)} different values: {what}, or partial sums?")


def relation_of(ref: DRef, summary: ValueSummary, deadline: float) -> Text | None:
    """What is known of tensors of one shape that differ on all workers; None for other values.

    The parameters are those of `differences.difference_parts`.
    """
    if not summary.unrelated:
        return None
    count = len(summary.good)
    try:
        made = getattr(ref.session._origins.get(ref.reg_id), "recipe", None)
        if isinstance(made, Equal) and (summary.num_groups == 1 or not made.in_group):
            return Text(f"{count} different values, although {made.how}", "warning")
        if isinstance(made, Part):
            return Text(f"{count} different values: the pieces of a scatter", "muted")
        if summary.bad or summary.num_groups > 1:
            return question(summary)
        found = _look(ref, deadline)
        return question(summary) if found is None else Text(f"{count} different values: {found}")
    except (DiscoError, *FAILURES):  # a view never raises
        return question(summary)


def _look(ref: DRef, deadline: float) -> str | None:
    """What the workers' other tensors tell."""
    session = ref.session
    names = {}
    for reg, handle in session._registers.in_use():
        other = None if handle is None else handle()
        if other is not None and reg != ref.reg_id:
            names[reg] = other.name or f"r{reg}"
    patience = deadline - time.monotonic()
    if patience <= 0:
        return None
    answers = ask(ref, patience, relations, session.num_workers, names)
    told = [answers.get(rank) for rank in range(session.num_workers)]
    known = [answer for answer in told if answer is not None and not isinstance(answer, Failure)]
    if len(known) < session.num_workers:
        return None
    for label, dims in known[0]["parts"].items():
        shared = set(dims).intersection(*(answer["parts"].get(label, ()) for answer in known))
        if shared:
            return f"the parts of {cut(label, 40)} along dim {min(shared)}"
    if _nearly_equal(known):
        return "nearly equal; replicas that have come apart, or shards?"
    return _sum_of(known)


def _nearly_equal(known: list[Mapping[str, Any]]) -> bool:
    """Whether all are the same but for a little: their mean is each of them, and says nothing.

    Projections of two tensors that have nothing to do with each other differ by about their norm.
    """
    own, count = [answer["own"] for answer in known], known[0]["count"]
    if count < _FEW or any(numbers is None or not numbers[2] for numbers in own):
        return False
    share = max(_NEAR, _ROUNDINGS * known[0]["eps"]) / math.sqrt(count)
    return all(
        abs(a - b) <= share * numbers[2]
        for numbers in own[1:]
        for a, b in zip(numbers[:2], own[0][:2], strict=True)
    )


def _sum_of(known: list[Mapping[str, Any]]) -> str | None:
    """The tensor, equal on all workers, that is the sum or the mean of theirs."""
    count = len(known)
    own = [answer["own"] for answer in known]
    if any(numbers is None for numbers in own):
        return None
    total = [sum(column) for column in zip(*(numbers[:2] for numbers in own), strict=True)]
    bound = _ROUNDINGS * known[0]["eps"] * sum(numbers[2] for numbers in own)
    if not bound:
        return None
    for label, (digest, numbers) in known[0]["same"].items():
        if any(answer["same"].get(label, ("",))[0] != digest for answer in known):
            continue
        for words, share in (("sum", 1), ("mean", count)):
            if all(abs(a - b * share) <= bound for a, b in zip(total, numbers, strict=True)):
                name = cut(label, 40)
                return f"their {words} is {name}, equal on all workers: perhaps partial sums"
    return None


# -- on the workers --------------------------------------------------------------------------------


@worker_function(DRAWING)
def relations(value: Any, num_workers: int, names: Mapping[int, str]) -> dict[str, Any] | None:
    """How this worker's other tensors relate to `value` (a worker function).

    Returns
    -------
    dict
        ``own``: its projections, None for what is not floating point; ``eps``; ``count`` of its
        elements; ``same``: by name, digest and projections of tensors of its shape; ``parts``: by
        name, the dims along which it is this worker's part of a larger one. None if the tensor
        can't be looked at.
    """
    try:
        worker = current_worker()
        if not _readable(value):
            return None
        mine = value.detach()
        floating = mine.is_floating_point()
        shape, rank = mine.shape, worker.worker_id
        found: dict[str, Any] = {"own": None, "eps": 0.0, "same": {}, "parts": {}}
        found["count"] = mine.numel()
        if floating:
            weights = torch.randn(2, mine.numel(), dtype=torch.float64, generator=_generator())
            found["own"] = _project(mine, weights, size=True)
            found["eps"] = torch.finfo(mine.dtype).eps
        ends = time.monotonic() + _LONGEST
        for label, other in _others(worker, value, names):
            if time.monotonic() > ends:
                break
            if other.dtype != mine.dtype or other.dim() != mine.dim():
                continue
            if other.shape == shape and floating:
                found["same"][label] = digest_of(other), _project(other, weights)
            dims = [
                dim
                for dim in range(mine.dim())
                if other.shape[dim] == num_workers * shape[dim]
                and other.shape[:dim] == shape[:dim]
                and other.shape[dim + 1 :] == shape[dim + 1 :]
                and torch.equal(other.narrow(dim, rank * shape[dim], shape[dim]), mine)
            ]
            if dims:
                found["parts"][label] = dims
        return found
    except FAILURES:  # it must not count as a failure of the user's program
        return None


def _others(
    worker: Worker, value: Any, names: Mapping[int, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The variables and registers of a worker that are tensors, each once."""
    seen = {id(value)}
    held = [(n, v) for n, v in worker.namespace.copy().items() if not n.startswith("_")]
    held += [(name, worker.registers.get(reg)) for reg, name in names.items()]
    count = 0
    for label, other in held:
        if id(other) not in seen and _readable(other):
            seen.add(id(other))
            yield label, other.detach()
            count += 1
            if count == _MOST:
                return


def _readable(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not is_dtensor(value)
        and value.layout is torch.strided
        and 0 < value.numel() * value.itemsize <= _LARGEST
        and not (value.is_quantized or value.is_nested or value.is_complex())
        and not why_no_data(value)
    )


def _generator() -> torch.Generator:
    """Weights are the same on all workers, and nobody's random state is touched."""
    return torch.Generator().manual_seed(20)


def _project(tensor: torch.Tensor, weights: torch.Tensor, *, size: bool = False) -> list[float]:
    """Two random sums of the elements; with `size` also one of their magnitudes."""
    flat = tensor.reshape(-1).to("cpu", torch.float64)
    numbers = [float(row @ flat) for row in weights]
    return [*numbers, float(weights[0].abs() @ flat.abs())] if size else numbers
