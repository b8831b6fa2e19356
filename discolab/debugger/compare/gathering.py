"""Gathers the evidence of one difference: samples of the workers and what they should be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import remote
from .evidence import Evidence, Tensors
from .judging import Judge, Pair
from .results import Point

TERMS_BEFORE = 10  # values before a difference that may have been added wrongly
_WHOLE = 2**22  # elements: of larger values only samples are looked at for causes


@dataclass(frozen=True)
class Seen:
    """All that a cause may be found in: points in order, and their pairs by key."""

    parameters: Sequence[Point]
    points: Sequence[Point]
    gradients: Sequence[Point]
    pairs: Mapping[str, Pair]
    settings: Callable[[str], list[str]]


def gather(
    judge: Judge, seen: Seen, points: Sequence[Point], number: int, pair: Pair, point: Point
) -> Evidence | None:
    """What is to be looked at of a value that differs; None if there is nothing."""
    layout = next((s for s in pair.layouts if s.words == point.layout), pair.layouts[0])
    whole = judge.ours.value(point.key)
    sizes = [len_of(fact[1]) for fact in pair.held.values()]
    most = _WHOLE if max(sizes) <= _WHOLE else remote.MOST_SAMPLES
    (local,) = judge.samples([point.theirs], most)
    if not local or whole.is_complex():
        return None
    teams = sorted(local)

    def expected(value: torch.Tensor) -> dict[int, torch.Tensor]:
        return {r: remote.sample(layout.part_of(value, r), most) for r in teams}

    cut = [dim for dim in layout.dims if dim is not None]
    terms: list[tuple[str, Any]] = []
    if whole.numel() <= _WHOLE:
        for words, value in _terms(judge, seen, points, number, point, whole):
            terms.append((words, expected(value)))
    return Evidence(
        **_without_same_infinities(local, expected(whole)),
        shapes={rank: tuple(fact[1]) for rank, fact in pair.held.items()},
        whole=max(sizes) <= most,
        odd=tuple(rank for rank in point.ranks if rank in local),
        rtol=pair.tolerance.rtol,
        atol=max(pair.tolerance.atol, 1e-6 * point.scale),
        dim=cut[0] if cut else None,
        replicated=not cut,
        terms=[
            (words, {r: t.nan_to_num(0, 0, 0) for r, t in each.items()}) for words, each in terms
        ],
        reference=whole.detach().to("cpu", torch.float64) if whole.numel() <= _WHOLE else None,
        gradient=point.gradient,
        parameter=point.kind == "parameter",
    )


def _without_same_infinities(local: Tensors, expected: Tensors) -> dict[str, Tensors]:
    """Zeros where both sides are infinite or NaN alike: that is no difference."""
    gone = {
        rank: (part == expected[rank]) & part.isinf() | part.isnan() & expected[rank].isnan()
        for rank, part in local.items()
        if part.shape == expected[rank].shape
    }
    return {
        name: {r: t.masked_fill(gone[r], 0) if r in gone else t for r, t in side.items()}
        for name, side in (("local", local), ("expected", expected))
    }


def len_of(shape: Iterable[int]) -> int:
    """The number of elements of a shape."""
    size = 1
    for extent in shape:
        size *= extent
    return size


def _terms(
    judge: Judge,
    seen: Seen,
    points: Sequence[Point],
    number: int,
    point: Point,
    whole: torch.Tensor,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Values of the reference that may have been added once too often, or left out."""
    before = [p for p in points[max(number - TERMS_BEFORE, 0) : number] if not p.problem]
    around = [
        p for p in points[:number]
        if p.kind == "input" and not p.problem and point.module.startswith(_parent(p.module))
    ]  # fmt: skip
    around.sort(key=lambda p: p.module.count("."))  # one value under several names: the outermost
    owners = {p.module.split("#")[0] for p in [*before, point]}
    if not point.gradient:
        for parameter in seen.parameters:
            name = parameter.module
            flat = whole.dim() > 0 and parameter.shape == (whole.shape[-1],)
            if flat and name.rpartition(".")[0] in owners:
                value = judge.ours.value(parameter.key)
                yield f"bias {name}", value.to(whole.device).expand(whole.shape)
    given: set[int] = set()
    for other in [*around[-8:], *reversed(before)]:
        value = judge.ours.value(other.key)
        if value.shape == whole.shape and value.is_floating_point():
            seen_number = seen.pairs[other.key].number
            if seen_number not in given:
                given.add(seen_number)
                yield other.words, value


def _parent(module: str) -> str:
    return module.split("#")[0].rpartition(".")[0]
