"""Says which difference comes first, where in the program that is, and why.

On the controller, after all was measured. A value of which workers hold terms is as it should be
in the middle of a program; where the next whole value differs from worker to worker, or the
program ends, the sum was forgotten, and the first such term is named. The evidence for the cause is
gathered from the workers, as samples; causes.py says what it shows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..views.formats import format_workers
from .causes import (
    Evidence,
    Tensors,
    alike_groups,
    causes_of,
    is_observation,
    missing_sum,
)
from .matcher import NO_LAYOUT, Matcher
from .measure import MOST_SAMPLES, sample
from .pairs import Pair, Setting
from .results import Finding, Point
from .rounding import LIKELY
from .settings import PERHAPS, causing

_MOST_SIBLINGS = 6  # modules that one value goes to
_TERMS_BEFORE = 10  # values before a difference that may have been added wrongly
_WHOLE = 2**22  # elements: of larger values only samples are looked at for causes
_MOST_SETTINGS, _MOST_DETOURS = 8, 4
_LARGE = 0.1  # of a typical element: this does not vanish by itself
_ROUNDING = 1e-4
_ROUNDINGS = 8  # epsilons of a typical element: more than rounding the result makes
_FEW_ROUNDINGS = 2  # the same: what rounding makes mostly
_SOME = 16  # elements: of fewer two runs say too little of rounding
_ONE_NUMBER = 1e-5
_NEAR = 0.1  # of the largest error: less is none
_OWN, _CHANCE = 0.05, 8.0  # of an error, of one element's: less comes of other terms by chance
_HIDDEN = -1e3  # what a mask adds: the softmax of it is zero, as of -inf
_MANY = 32  # elements: of fewer chance has too much of a share
_EXPLAINED = 1e-3  # of an error's square: less need not be explained
_UNSUMMED = 1e-2  # of a typical element: with a sum left out a shard is off by more


@dataclass
class Compared:
    """All points of a comparison, in the order of the reference's program.

    Attributes
    ----------
    by_design
        The keys of values that differ, and from which no error comes.
    doubted
        Whether forward is known to be wrong, perhaps: what a coarse dtype has become the same again
        only nearly is no other way then.
    """

    parameters: list[Point] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    gradients: list[Point] = field(default_factory=list)
    by_design: set[str] = field(default_factory=set)
    doubted: bool = False

    def pass_by(self, point: Point) -> None:
        """Leave a value out that differs by design; of a parameter its gradient, too."""
        self.by_design.add(point.key)
        if point.kind != "parameter":
            return
        for number, other in enumerate(self.gradients):
            if other.key == f"{point.key}.grad" and not other.agrees:
                problem = "its parameter is another one by design"
                self.gradients[number] = replace(other, problem=problem, agrees=True)

    @property
    def runs(self) -> tuple[list[Point], list[Point], list[Point]]:
        """Parameters, forward, backward."""
        return self.parameters, self.points, self.gradients

    @property
    def every(self) -> list[Point]:
        """All of them."""
        return [point for points in self.runs for point in points]


def known_causes(first: Finding) -> tuple[str, ...]:
    """The causes of a finding; what only says how much differs is none."""
    return tuple(cause for cause in first.causes if not is_observation(cause))


def first_divergence(
    matcher: Matcher, compared: Compared, end: Point | None = None
) -> Finding | None:
    """The first difference, in the order of the reference's program; None if there is none.

    `end`: what comes after all points, where these are only some of the program.
    """
    first = _first(matcher, compared, end)
    if first is None:
        return first
    point = first.point
    more: list[str] = []
    if point.gradient:
        more = _lost_gradients(matcher, compared, first)
    elif point.kind in ("input", "output", "result"):
        calls = _calls_between(matcher, compared, first)
        more = list(filter(None, [matcher.presence.not_run(calls, first.ranks)]))
    return replace(first, causes=(*more, *first.causes)) if more else first


def _calls_between(matcher: Matcher, compared: Compared, first: Finding) -> dict[str, str]:
    """The modules that the reference ran between what last agrees on workers and a difference.

    That workers did not run one of them can't be right; what stages left out before did no harm.
    By the workers' name; the type of each.
    """
    ours = matcher.ours.recorder
    order = {key: number for number, key in enumerate(ours.entries)}
    end = order.get(first.point.key, -1)
    agreeing = [
        p for p in compared.points
        if p.agrees and not p.partial and order.get(p.key, end) < end
        and p.kind in ("input", "output", "note") and not p.problem
        and (p.module or p.kind != "input")  # all are given the program's inputs
    ]  # fmt: skip
    mine = [p for p in agreeing if set(first.ranks) <= set(matcher.pairs[p.key].held)]
    start = max((order[p.key] for p in mine or agreeing), default=-1)  # a stage has none before
    found = {}
    for key, entry in list(ours.entries.items())[start + 1 : end + 1]:
        path = entry.name.split("#")[0]
        if entry.kind == "output" and key != first.point.key and path in ours.modules:
            found[matcher.names.rename(entry.name, "output")] = ours.modules[path][0]
    return found


def _lost_gradients(matcher: Matcher, compared: Compared, first: Finding) -> list[str]:
    """Where autograd ends on workers and not in the reference, if a gradient is wrong for it.

    Certain as a fact; that it is why a gradient differs is said only where one is missing or
    nothing else explains it.
    """
    if first.causes and "no gradient" not in first.causes[0] and "all zeros" not in first.causes[0]:
        return []
    found = []
    for (name, place), ranks in matcher.workers.lost_gradients().items():
        found.append(
            f"ccl.{name} at {place} on {format_workers(ranks)} was given a tensor that requires "
            f"grad: ccl.{name} has no gradient; discolab.ccl.autograd has collectives with one"
        )
    entries = matcher.ours.recorder.entries
    wanted = [
        p for p in compared.points
        if p.kind in ("output", "note", "input") and not p.problem and entries[p.key].requires_grad
    ]  # fmt: skip
    ends = matcher.workers.ungraded([p.theirs for p in wanted])
    for number, point in enumerate(wanted):
        ranks = [rank for rank, each in enumerate(ends) if each[number]]
        if ranks and not found:
            found.append(
                f"the {point.words} on {format_workers(ranks)} does not require grad, the "
                "reference's does: it was detached before that"
            )
            break
    return found


def _first(matcher: Matcher, compared: Compared, end: Point | None) -> Finding | None:
    otherwise = {p.key for p in compared.points if not p.agrees and not p.gradient}
    for points in compared.runs:
        for number, point in enumerate(points):
            if not _wrong(point) or _rejoined(points, number, compared.doubted):
                continue
            if point.key in compared.by_design:
                continue
            if _adds_bias_later(matcher, points, number):
                continue
            later = _summed_later(points, number, end)
            lacks = _may_lack_sum(points, number) and (later is not True or "Shard" in point.layout)
            earlier = _averaged(matcher, points, number)
            if earlier is None and lacks:
                earlier = _unsummed(matcher, points, number, otherwise)
                if earlier is not None and (
                    _in_groups(matcher, point, points[earlier])
                    or _summed_between(matcher, points, earlier, number)
                ):
                    earlier = None
            if earlier is not None and points[earlier].key not in compared.by_design:
                return _finding(matcher, compared, points, earlier, points[earlier], True, later)
            return _finding(matcher, compared, points, number, point, False, later)
    return None


def _wrong(point: Point) -> bool:
    if point.problem:
        return not point.agrees or (point.kind == "result" and not point.gradient)
    return not point.agrees or point.ends_unsummed


def _rejoined(points: Sequence[Point], number: int, doubted: bool) -> Point | None:
    """Where a program agrees again that did something in another way, as to add a bias later.

    That is the output of a module around it, or the result; in backward the gradient of an input.
    What is off by little may agree again because the tolerance is wider than that: it must come
    down to rounding.
    """
    point = points[number]
    ends = ["parameter", "buffer", "state", "argument" if point.gradient else "result"]
    if not point.gradient:
        ends.append("note")  # named by the user: it should be the same
    if point.problem or point.agrees or point.kind in ends:
        return None
    if point.gradient and point.kind == "output" and _reaches_parameters(points, number):
        return None
    for later in points[number + 1 :]:
        if later.problem or not later.agrees or later.partial or not _around(later, point):
            continue
        if not _all_whole(points, later):
            continue
        if "float" not in later.dtype and "complex" not in later.dtype:
            continue  # as an argmax, which is often the same for others
        if later.size == 1:  # as a loss, which many differences leave nearly as it was
            if later.relative <= _ONE_NUMBER * point.relative:
                return later
        elif later.relative <= _ROUNDING * point.relative:
            return later
        elif point.relative > _LARGE:
            near = later.relative <= _rounding_until(points[:number], later.dtype, doubted)
            near = near and not 0 < LIKELY * later.rounding < later.error
            return later if near and not _diluted(points, number, later) else None
    return None


def _adds_bias_later(matcher: Matcher, points: Sequence[Point], number: int) -> bool:
    """Whether a module of the workers leaves a bias out that is not left out of what comes of it.

    It has no such parameter, and its output is off by just that. If a later value is not, the
    program has added it, and what is wrong there is something else.
    """
    point = points[number]
    if point.kind != "output" or point.gradient or point.problem or not point.module:
        return False
    path = point.module.split("#")[0]
    lacking = [
        key for key, pair in matcher.pairs.items()
        if pair.point.kind == "parameter" and not pair.held and not pair.point.gradient
        and pair.point.module.rpartition(".")[0] == path
        and point.shape[-1:] == pair.point.shape
    ]  # fmt: skip
    later = [p for p in points[number + 1 :] if p.shape == point.shape and not p.problem]
    later = [p for p in later if p.kind in ("input", "output", "note", "result")][:1]
    for key in lacking:
        bias = matcher.ours.value(key).double().cpu()
        if _lacks(matcher, point, bias):
            return bool(later) and not _lacks(matcher, later[0], bias)
    return False


def _lacks(matcher: Matcher, point: Point, term: torch.Tensor) -> bool:
    """Whether what workers hold, or its sum, is off by a term that is not added."""
    pair, whole = matcher.pairs[point.key], matcher.ours.value(point.key).double().cpu()
    if whole.numel() > MOST_SAMPLES:
        return False
    (held,) = matcher.workers.samples([point.theirs])
    held = {rank: part for rank, part in held.items() if rank in pair.held}
    wanted = whole - term
    layout = pair.layouts[0]

    def near(part: torch.Tensor, expected: torch.Tensor) -> bool:
        allowed = 4 * (pair.tolerance.atol + pair.tolerance.rtol * expected.abs())
        return part.shape == expected.shape and bool(((part - expected).abs() <= allowed).all())

    if all(near(part, layout.part_of(wanted, rank).reshape(-1)) for rank, part in held.items()):
        return True
    sizes = {part.shape for part in held.values()}
    return len(sizes) == 1 and near(torch.stack(list(held.values())).sum(0), wanted.reshape(-1))


def _reaches_parameters(points: Sequence[Point], number: int) -> bool:
    """Whether the gradient of a parameter differs that is made of a module's wrong gradient."""
    path = points[number].module.split("#")[0]
    below = f"{path}." if path else ""
    return any(
        p.kind == "parameter" and p.module.startswith(below) and _wrong(p)
        for p in points[number + 1 :]
    )


def _rounding_until(points: Sequence[Point], dtype: str, doubted: bool) -> float:
    """By how much of a typical element rounding may have values off, as it had those before."""
    least, times = (_FEW_ROUNDINGS, 1) if doubted else (_ROUNDINGS, 2)
    before = [
        p.relative for p in points if p.agrees and not p.problem and p.dtype == dtype and p.rows
    ]
    return max(least * torch.finfo(getattr(torch, dtype)).eps, times * max(before, default=0.0))


def _diluted(points: Sequence[Point], number: int, later: Point) -> bool:
    """Whether a value agrees only since its tolerance is wide, as that of bfloat16.

    The error is there as before, in what was added to something larger: a residual.
    """
    wrong: dict[tuple[int, ...], float] = {}  # by shape, the error that was last beyond tolerance
    for point in (*points[number : points.index(later, number)], later):
        if point.problem or "float" not in point.dtype:
            continue
        if not point.agrees:
            wrong[point.shape] = point.error
            continue
        rounding = _ROUNDINGS * torch.finfo(getattr(torch, point.dtype)).eps * point.scale
        if point.error > max(rounding, wrong.get(point.shape, math.inf) / 2):
            return True
    return False


def _all_whole(points: Sequence[Point], later: Point) -> bool:
    """Whether all that a module puts out, or all that it is given, agrees: each value of several.

    What differs inside may go into any of them.
    """
    return all(
        p.problem or (p.agrees and not p.partial)
        for p in points
        if (p.module, p.kind, p.gradient) == (later.module, later.kind, later.gradient)
    )


def _around(later: Point, point: Point) -> bool:
    """Whether all that comes of one value goes into the other."""
    if later.kind == ("argument" if later.gradient else "result"):
        return True
    if later.kind != ("input" if point.gradient else "output"):
        return False
    path = point.module.split("#")[0]
    if later.module == point.module:
        return point.kind != later.kind
    return not later.module or path.startswith(f"{later.module.split('#')[0]}.")


def _may_lack_sum(points: Sequence[Point], number: int) -> bool:
    """Whether terms that were not summed may be why a value differs.

    The workers then differ among themselves, and not by little; and what the value comes from
    does not agree yet. (That the parts of a shard differ among themselves says nothing.)
    """
    point = points[number]
    shard = "Shard" in point.layout
    if not point.partial and (not point.unlike or (shard and point.relative < _UNSUMMED)):
        return False
    owner = point.module
    if point.kind == "parameter":
        owner = point.module.rpartition(".")[0]
    before = [p for p in points[:number] if not p.problem]
    inner = f"{owner.split('#')[0]}." if owner else ""
    if any(p.module.split("#")[0].startswith(inner) and p.kind in ("input", "output")
           and p.module != owner for p in before):  # fmt: skip
        return True  # what lies inside may be where the terms are
    comes_in = "output" if point.gradient else "input"
    origin = [p for p in before if p.module == owner and p.kind == comes_in]
    return not origin or not all(p.agrees and not p.partial for p in origin)


def _averaged(matcher: Matcher, points: Sequence[Point], number: int) -> int | None:
    """The first value up to a difference that is the reference / n, on all workers alike.

    Numbers that are alike on all workers are no terms of a sum, though n of them have that sum.
    """
    found = None
    for place in range(number, -1, -1):
        point = points[place]
        if point.problem or point.kind in ("parameter", "buffer"):
            continue
        if not point.partial or point.source != "inferred":
            continue  # agrees, perhaps, since a norm has taken the factor out
        if not _whole_later(matcher, points, place, number) and _alike(matcher, point):
            found = place
    return found


def _equal_terms(matcher: Matcher, points: Sequence[Point], place: int) -> bool:
    """Whether what all hold alike may still be terms, as those of constant weights are.

    They are made of parts then that are alike themselves.
    """
    for point in reversed(points[:place]):
        if point.problem or point.kind in ("parameter", "buffer"):
            continue
        if not point.partial:
            return "Shard" in point.layout and _alike(matcher, point)
        if not _alike(matcher, point):
            break
    return False


def _alike(matcher: Matcher, point: Point) -> bool:
    """Whether all workers whose terms make one value hold the same."""
    return all(_same(part, team[0]) for team in matcher.teams(point) for part in team)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two workers hold the same, but for rounding in another order."""
    if one.shape != other.shape:
        return False
    near = 1e-6 * float(other.abs().max()) if other.numel() else 0.0
    return bool(((one - other).abs() <= near).all())


def _in_groups(matcher: Matcher, wrong: Point, terms: Point) -> bool:
    """Whether groups of workers hold the same of a value, and each worker its own of its terms.

    A sum has been made between the two, though not over all workers.
    """
    if "Shard" in wrong.layout:
        return False
    taken = matcher.workers.samples([wrong.theirs, terms.theirs])
    after, before = (
        alike_groups({r: t for r, t in each.items() if r in matcher.pairs[p.key].held}, _same)
        for each, p in zip(taken, (wrong, terms), strict=True)
    )
    return min(map(len, after), default=0) > 1 and len(after) < len(before)


def _summed_between(matcher: Matcher, points: Sequence[Point], place: int, number: int) -> bool:
    """Whether terms were summed before a value that differs, which then is wrong since the sum.

    A worker whose terms are not the sum and whose value agrees all the same has the sum. Where
    all workers differ, a forgotten sum shows each worker's own terms in how its value is off; of
    values of one shape that is seen, and no other values say anything.
    """
    wrong = points[number]
    if wrong.partial or "float" not in wrong.dtype:
        return False
    leads = [
        p for p in points[place:number]
        if p.partial and p.source == "inferred" and not p.problem and p.shape == wrong.shape
    ][-_TERMS_BEFORE:]  # fmt: skip
    lead, *others = dict.fromkeys(p.theirs for p in (points[place], *leads))
    taken = matcher.workers.samples([wrong.theirs, lead, *others], _WHOLE)
    held, terms = taken[0], dict(zip((lead, *others), taken[1:], strict=True))
    wanted = sample(matcher.ours.value(points[place].key), _WHOLE)
    gaps = {r: (part - wanted).abs() for r, part in terms[lead].items()}
    near = _NEAR * max((float(gap.max()) for gap in gaps.values()), default=0.0)
    right = [r for r, row in wrong.rows.items() if row["max_abs"] <= _NEAR * wrong.error]
    if any(r in gaps and _mostly(gaps[r] > near) for r in right):
        return True
    if not leads or wrong.size > _WHOLE:
        return False
    whole = matcher.ours.value(wrong.key)
    layout = matcher.pairs[wrong.key].layout_named(wrong.layout)
    for point in leads:
        total, parts = matcher.ours.value(point.key), terms[point.theirs]
        for rank in set(wrong.ranks) & set(parts) & set(held):
            off, known, own = (
                sample(layout.part_of(value.reshape(wrong.shape), rank), _WHOLE)
                for value in (whole, total, parts[rank])
            )
            if _shows(held[rank] - off, known, own):
                return False
    return True


def _mostly(which: torch.Tensor) -> bool:
    return bool(which.numel()) and float(which.double().mean()) > 0.5


def _shows(off: torch.Tensor, known: torch.Tensor, term: torch.Tensor) -> bool:
    """Whether a term explains some of an error, or may, that a `known` value and a constant leave.

    It may where there are too few elements to say.
    """
    if off.numel() < _MANY or not bool(torch.isfinite(off).all()):
        return True
    step = max(off.numel() // MOST_SAMPLES, 1)
    off = off[::step]
    columns = [torch.ones_like(off), known[::step], term[::step]]

    def left(count: int) -> float:
        basis = torch.stack(columns[:count], 1)
        basis = basis / basis.norm(dim=0).clamp_min(1e-300)
        fit = torch.linalg.lstsq(basis, off[:, None]).solution
        return float((off[:, None] - basis @ fit).square().sum())

    without = left(2)
    if without <= _EXPLAINED * left(1):
        return False
    return 1.0 - left(3) / without >= max(_OWN, _CHANCE / len(off))


def _unsummed(
    matcher: Matcher, points: Sequence[Point], number: int, otherwise: Collection[str]
) -> int | None:
    """The first of the terms that lead up to a difference, if there are any.

    `otherwise`: the keys of values that are computed another way in forward. Of such a value each
    worker may have its own part, as of an embedding's rows, and its gradient is no term.
    """
    found = None
    for place in range(number - 1, -1, -1):
        point = points[place]
        if point.problem or (point.kind in ("parameter", "buffer") and not point.gradient):
            continue
        if point.gradient and point.key.removesuffix(".grad") in otherwise:
            continue
        if point.partial and point.source == "inferred":
            if not _whole_later(matcher, points, place, number):
                found = place
        elif "Shard" not in point.layout:
            break
    if found is not None and points[number].gradient:
        found = _sibling_unsummed(matcher, points, found, number)
    if found is None and points[number].gradient:  # one of several modules that a value goes to
        entries = matcher.ours.recorder.entries
        held = entries[points[number].key.removesuffix(".grad")].snapshot.number
        for place, point in enumerate(points[:number]):
            entry = entries[point.key.removesuffix(".grad")]
            same = entry.kind == "input" and entry.snapshot.number == held
            if same and point.partial and point.source == "inferred":
                return place
    if found is None:
        found = _unsummed_on_the_way(matcher, points, number)
    return _added_unsummed(matcher, points, number) if found is None else found


def _unsummed_on_the_way(matcher: Matcher, points: Sequence[Point], number: int) -> int | None:
    """The first terms of a parameter's gradient, if what its layer is given gets terms, too.

    That is seen where the module that has made that value gets them: nothing sums them between the
    two, so it is not this gradient alone that lacks a sum.
    """
    point, entries = points[number], matcher.ours.recorder.entries
    if not point.gradient or point.kind != "parameter":
        return None

    def forward_number(place: int) -> int:
        return entries[points[place].key.removesuffix(".grad")].snapshot.number

    owner = point.module.rpartition(".")[0]
    terms = [
        place for place, p in enumerate(points)
        if p.kind in ("input", "output") and p.partial and p.source == "inferred"
    ]  # fmt: skip
    mine = [place for place in terms if points[place].module == owner]
    given = {forward_number(place) for place in mine if points[place].kind == "input"}
    made = {forward_number(place) for place in terms if points[place].kind == "output"}
    return mine[0] if given & made else None


def _sibling_unsummed(matcher: Matcher, points: Sequence[Point], found: int, number: int) -> int:
    """Which of several modules that one value goes to leaves its terms of the gradient unsummed.

    The terms of others are summed after that. What is wrong is off by as much as the unsummed ones.
    """
    entries = matcher.ours.recorder.entries

    def forward_number(place: int) -> int | None:
        entry = entries.get(points[place].key.removesuffix(".grad"))
        return entry.snapshot.number if entry is not None and entry.kind == "input" else None

    value = forward_number(found)
    siblings = [
        place for place in range(found, number)
        if value is not None and forward_number(place) == value and points[place].partial
        and points[place].source == "inferred" and points[place].shape == points[number].shape
    ][:_MOST_SIBLINGS]  # fmt: skip
    if len(siblings) < 2 or points[number].layout.count("Shard"):
        return found
    wrong = points[number]
    taken = matcher.workers.samples([p.theirs for p in (wrong, *(points[s] for s in siblings))])
    gone, *others = (
        _off(matcher, point, held)
        for point, held in zip((wrong, *(points[s] for s in siblings)), taken, strict=True)
    )
    near = 1e-3 * max((float(gap.abs().max()) for gap in gone.values()), default=0.0)
    for count in range(1, len(siblings)):
        for some in itertools.combinations(range(len(siblings)), count):
            terms = [others[place] for place in some]
            if gone and all(
                all(rank in term for term in terms)
                and bool(((gap - sum(term[rank] for term in terms)).abs() <= near).all())
                for rank, gap in gone.items()
            ):
                return siblings[some[0]]
    return found


def _off(matcher: Matcher, point: Point, held: Tensors) -> Tensors:
    """By how much each worker's elements are off, where it has all of the value."""
    expected = sample(matcher.ours.value(point.key), MOST_SAMPLES)
    return {r: part - expected for r, part in held.items() if part.shape == expected.shape}


def _agrees_around(points: Sequence[Point], place: int) -> bool:
    """Whether a later value into which all goes that comes of this one is whole, and agrees."""
    point = points[place]
    if point.kind == "parameter":
        point = replace(point, kind="output", module=point.module.rpartition(".")[0])
    return any(
        later.agrees and not later.partial and not later.problem and _around(later, point)
        and _all_whole(points, later)
        for later in points[place + 1 :]
    )  # fmt: skip


def _whole_later(matcher: Matcher, points: Sequence[Point], place: int, end: int) -> bool:
    """Whether terms were summed, since what comes of them, or the same value, is whole."""
    if _agrees_around(points, place):
        return True
    value = matcher.ours.value(points[place].key)
    return any(
        p.agrees and not p.partial and not p.problem
        and (p.shape, p.dtype) == (points[place].shape, points[place].dtype)
        and torch.equal(matcher.ours.value(p.key), value)
        for p in points[place + 1 : end]
    )  # fmt: skip


def _summed_later(points: Sequence[Point], number: int, end: Point | None) -> bool | None:
    """Whether the next value that all workers should hold alike is alike on them."""
    if points[number].gradient:
        return None
    for point in [*points[number + 1 :], *([] if end is None else [end])]:
        if point.problem or "Shard" in point.layout or not point.rows or point.kind == "buffer":
            continue
        return point.agrees or not (point.unlike or point.partial)
    return None


def _added_unsummed(matcher: Matcher, points: Sequence[Point], number: int) -> int | None:
    """The terms that were added to something else: they are off by as much as what came of it."""
    wrong = points[number]
    terms = [
        place for place, p in enumerate(points[:number])
        if p.partial and p.source == "inferred" and not p.problem and p.shape == wrong.shape
    ][-_TERMS_BEFORE:]  # fmt: skip
    if not terms or wrong.layout.count("Shard"):
        return None
    taken = matcher.workers.samples([wrong.theirs, *(points[place].theirs for place in terms)])
    gone = _off(matcher, wrong, taken[0])
    near = 1e-3 * max((float(gap.abs().max()) for gap in gone.values()), default=0.0)
    for place, held in zip(terms, taken[1:], strict=True):
        other = _off(matcher, points[place], held)
        if other and all(bool(((gone[r] - g).abs() <= near).all()) for r, g in other.items()):
            return place
    return None


def finding_at(
    matcher: Matcher, compared: Compared, points: Sequence[Point], number: int
) -> Finding:
    """What is to be said of one of the points, which is known to differ."""
    return _finding(
        matcher, compared, points, number, points[number], False,
        _summed_later(points, number, None),
    )  # fmt: skip


def _finding(
    matcher: Matcher,
    compared: Compared,
    points: Sequence[Point],
    number: int,
    point: Point,
    unsummed: bool,
    summed_later: bool | None,
) -> Finding:
    causes: list[str] = []
    if point.problem:
        place = "" if not point.agrees else "what the program gives can't be compared"
        return Finding(point, (point.problem,), place)
    pair = matcher.pairs[point.key]
    own: list[str] = []
    settings = [(path, one) for path in _near_modules(point) for one in matcher.settings(path)]
    end = ""
    if unsummed or (point.partial and point.agrees):
        words, end = _unsummed_words(matcher, points, number, point)
        causes.append(words)
        point = replace(point, ranks=tuple(sorted(pair.held)), agrees=False)
    else:
        causes += _dtypes(pair)
        causes += _coarser_inside(matcher, points[:number], point)
        evidence = _gather(matcher, compared, points, number, pair, point, summed_later)
        if evidence is not None:
            known = causes_of(evidence)
            if point.kind == "parameter" and not point.gradient:
                known = [*_other_parameter(matcher, compared, pair, evidence), *known]
            causes += known
        if settings:
            own, perhaps = causing(matcher, pair, point, settings, evidence)
            causes += perhaps
    side = matcher.ours
    stepped = bool(side.steps) and point.key not in side.before_step
    return Finding(point, (*own, *causes), _place(points, number, point, end, stepped))


def _unsummed_words(
    matcher: Matcher, points: Sequence[Point], number: int, point: Point
) -> tuple[str, str]:
    """What to say of terms that nothing sums up, and what happens at the end of their module.

    What all hold alike is an average, or terms of parts that are alike.
    """
    if _alike(matcher, point):
        words = (
            f"is the reference / {len(matcher.pairs[point.key].held)} on all workers alike: "
            "averaged where a sum belongs, or divided twice"
        )
        if _equal_terms(matcher, points, number):
            return f"{words}, or terms that are equal and an all-reduce is missing", "it goes wrong"
        return words, ""
    parameter = point.kind == "parameter"
    owner = point.module.rpartition(".")[0]
    known = [
        p for p in points[:number]
        if p.module.split("#")[0] == owner and p.kind == "output" and not p.problem
    ]  # fmt: skip
    whole = bool(known) and all(p.agrees and not p.partial for p in known)
    whole = whole or _agrees_around(points, number)
    return missing_sum(point.gradient, parameter, whole), "nothing adds its terms up,"


def _other_parameter(
    matcher: Matcher, compared: Compared, pair: Pair, evidence: Evidence
) -> Iterator[str]:
    """Another parameter of the reference, as of another layer or expert.

    Certain where every element is the other's, on all workers that differ.
    """
    layout = pair.layout_named(pair.point.layout)
    size = len(evidence.local[evidence.odd[0]])
    for other in compared.parameters:
        if other.shape != pair.point.shape or other.key == pair.point.key or not size > 1:
            continue
        value = matcher.ours.value(other.key)
        parts = {r: sample(layout.part_of(value, r), MOST_SAMPLES) for r in evidence.odd}
        if all(
            part.numel() > 1
            and evidence.close(evidence.local[rank], part)
            and not evidence.close(evidence.expected[rank], part)
            and not bool((part == part[0]).all())
            for rank, part in parts.items()
        ):
            who = format_workers(evidence.odd)
            hold = "holds" if len(evidence.odd) == 1 else "hold"
            yield f"{who} {hold} the reference's {other.module}"
            return


def _near_modules(point: Point) -> list[str]:
    """The modules whose settings may matter: through which a value went that goes wrong there.

    Not the one that an input goes into, nor, in backward, the one that an output's comes into.
    """
    if point.kind in ("note", "argument", "result", "output" if point.gradient else "input"):
        return []
    path = point.module.split("#")[0]
    return [path.rpartition(".")[0]] if point.kind in ("parameter", "state") else [path]


def _dtypes(pair: Pair) -> Iterator[str]:
    """Workers that hold another dtype than the others."""
    groups: dict[str, list[int]] = {}
    for rank, fact in pair.held.items():
        groups.setdefault(str(fact[2]), []).append(rank)
    if len(groups) > 1:
        words = ", ".join(f"{format_workers(ranks)} {dtype}" for dtype, ranks in groups.items())
        yield f"dtypes differ: {words}; the reference {pair.point.dtype}"


def _coarser_inside(matcher: Matcher, before: Sequence[Point], point: Point) -> Iterator[str]:
    """Where a module that differs computes in a dtype with fewer digits, if that may be why.

    That is said if all inside agrees, for the dtype that it has, and what comes out is off by no
    more than the rounding of that dtype.
    """
    if point.kind != "output" or point.gradient or not point.module:
        return
    inner = f"{point.module}."
    inside = [p for p in before if p.module.startswith(inner) and p.kind in ("input", "output")]
    for first in inside:
        theirs = {fact[2] for fact in matcher.pairs[first.key].held.values()}
        dtype = getattr(torch, next(iter(theirs)), None) if len(theirs) == 1 else None
        if first.problem or dtype not in (torch.bfloat16, torch.float16) or first.dtype in theirs:
            continue
        if all(p.agrees for p in inside) and point.relative <= _ROUNDINGS * torch.finfo(dtype).eps:
            yield (
                f"is computed in {next(iter(theirs))} from the {first.words} on, by the reference "
                f"in {first.dtype}, and off by no more than that"
            )
        return


# -- place -----------------------------------------------------------------------------------------


def _place(
    points: Sequence[Point], number: int, point: Point, end: str, stepped: bool = False
) -> str:
    """What is known of where in the program a value goes wrong.

    `end`: what happens at the end of the module that puts it out, or after that; else empty.
    `stepped`: whether an optimizer has stepped before: parameters may be others since then.
    """
    if point.kind in ("parameter", "buffer") and not point.gradient:
        return "before the program ran: the model was made or loaded wrongly"
    if point.kind == "state":
        return "what forward computes agrees; the run has left something else in it"
    before = [p for p in points[:number] if not p.problem and p.kind not in ("buffer",)]
    agreeing = [p for p in before if p.agrees and p.kind != "parameter"]
    inner = f"{point.module}." if point.module else ""
    inside = [p for p in before if p.module.startswith(inner) and p.module != point.module]
    inputs = [p for p in before if p.module == point.module and p.kind == "input"]
    if point.gradient:
        return _place_of_gradient(before, point)
    if point.kind == "output" and end and not inside:
        return (
            f"its input agrees: {end} at the end of {point.module or 'the model'}.forward or "
            "after it"
        )
    if point.kind == "output" and inputs and all(p.agrees for p in [*inputs, *inside]):
        if not inside:
            inside_words = f"it goes wrong inside {point.module or 'the model'}"
            if stepped:
                return (
                    f"its input agrees: its parameters differ since an optimizer's step before "
                    f"this call, or {inside_words}"
                )
            return f"its input agrees: {inside_words}"
        lacking = [p for p in points[:number] if p.problem and p.module.startswith(inner)]
        known = "all inside agrees" if not lacking else "what was compared inside agrees"
        return (
            f"{known}: it goes wrong between these values, in {point.module or 'the model'}.forward"
        )
    if not agreeing:
        return "nothing before it was compared"
    return f"last that agrees: the {agreeing[-1].words}; it goes wrong after that"


def _place_of_gradient(before: Sequence[Point], point: Point) -> str:
    gone = [p for p in before if p.agrees and p.gradient]
    same = [p for p in gone if p.module == point.module and p.kind == "output"]
    if point.kind == "input" and same:
        return (
            f"forward agrees, and so does the {same[-1].words}: it goes wrong in the backward of "
            f"{point.module or 'the model'}"
        )
    if point.kind == "parameter":
        owner = point.module.rpartition(".")[0]
        flows = [p for p in gone if p.module.split("#")[0] == owner]
        if flows:
            return f"forward agrees, and so does the {flows[-1].words}"
    if not gone:
        return "forward agrees; it is the first gradient that was compared"
    return f"forward agrees; last gradient that agrees: the {gone[-1].words}"


# -- evidence --------------------------------------------------------------------------------------


def _gather(
    matcher: Matcher,
    compared: Compared,
    points: Sequence[Point],
    number: int,
    pair: Pair,
    point: Point,
    summed_later: bool | None,
) -> Evidence | None:
    """What is to be looked at of a value that differs; None if there is nothing."""
    layout = pair.layout_named(point.layout)
    whole = matcher.ours.value(point.key)
    sizes = [math.prod(shape) for shape in pair.shapes.values()]
    most = _WHOLE if max(sizes) <= _WHOLE else MOST_SAMPLES
    (taken,) = matcher.workers.samples([point.theirs], most)
    local = {rank: part for rank, part in taken.items() if rank in pair.held}
    if not local or whole.is_complex():
        return None
    teams = sorted(local)

    def expected(value: torch.Tensor) -> dict[int, torch.Tensor]:
        return {r: sample(layout.part_of(value, r), most) for r in teams}

    cut = [dim for dim in layout.dims if dim is not None]
    terms: list[tuple[str, Any]] = []
    if whole.numel() <= _WHOLE:
        for words, value in _terms(matcher, compared, points, number, point, whole):
            terms.append((words, expected(value)))
    sides = _without_same_infinities(local, expected(whole))
    if all(torch.equal(part, sides["expected"][rank]) for rank, part in sides["local"].items()):
        return None
    return Evidence(
        **sides,
        shapes=pair.shapes,
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
        summed_later=summed_later,
    )


def _without_same_infinities(local: Tensors, expected: Tensors) -> dict[str, Tensors]:
    """Zeros where both sides are infinite or NaN alike, or hidden by a mask: that is the same."""
    gone = {
        rank: (part == expected[rank]) & part.isinf()
        | part.isnan() & expected[rank].isnan()
        | expected[rank].isneginf() & (part <= _HIDDEN)
        for rank, part in local.items()
        if part.shape == expected[rank].shape
    }
    return {
        name: {r: t.masked_fill(gone[r], 0) if r in gone else t for r, t in side.items()}
        for name, side in (("local", local), ("expected", expected))
    }


def _terms(
    matcher: Matcher,
    compared: Compared,
    points: Sequence[Point],
    number: int,
    point: Point,
    whole: torch.Tensor,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Values of the reference that may have been added once too often, or left out."""
    before = [p for p in points[max(number - _TERMS_BEFORE, 0) : number] if not p.problem]
    around = [
        p for p in points[:number]
        if p.kind == "input" and not p.problem and point.module.startswith(_parent(p.module))
    ]  # fmt: skip
    around.sort(key=lambda p: p.module.count("."))  # one value under several names: the outermost
    owners = {p.module.split("#")[0] for p in [*before, point]}
    own = point.module.split("#")[0]  # with what is inside: its modules need not be called
    if not point.gradient and point.kind not in ("parameter", "buffer"):
        for parameter in compared.parameters:
            name = parameter.module
            owner = name.rpartition(".")[0]
            if owner not in owners and not (not own or owner.startswith(f"{own}.")):
                continue
            for dim in (-1, 1):  # features come last, channels second
                fits = whole.dim() > (2 if dim == 1 else 0)
                if (
                    fits
                    and parameter.shape == (whole.shape[dim],)
                    and parameter.kind == "parameter"
                ):
                    value = matcher.ours.value(parameter.key).to(whole.device)
                    if dim == 1:
                        value = value.reshape(-1, *[1] * (whole.dim() - 2))
                    kind = "bias" if "bias" in name.rpartition(".")[2] else "parameter"
                    yield f"{kind} {name}", value.expand(whole.shape)
    given: set[int] = set()
    for other in [*around[-8:], *reversed(before)]:
        value = matcher.ours.value(other.key)
        if value.shape == whole.shape and value.is_floating_point():
            value_number = matcher.pairs[other.key].number
            if value_number not in given:
                given.add(value_number)
                yield other.words, value


def _parent(module: str) -> str:
    return module.split("#")[0].rpartition(".")[0]


# -- what else a reader should know ----------------------------------------------------------------


def settings_notes(
    paths: Iterable[str], settings: Callable[[str], list[Setting]], known: Sequence[str]
) -> list[str]:
    """Which modules are set up otherwise, where nothing else may show it; not what is `known`."""
    told: dict[str, list[str]] = {}
    for path in paths:
        for setting in settings(path):
            found = told.setdefault(setting.words, [])
            if not any(not above or path.startswith(f"{above}.") for above in found):
                found.append(path)
    notes = []
    for words, found in told.items():
        if words not in known and f"{PERHAPS}{words}" not in known:
            more = f" and {len(found) - 4} more" if len(found) > 4 else ""
            names = ", ".join(path or "the model" for path in found[:4])
            notes.append(f"{names}{more}: {words}")
    return notes[:_MOST_SETTINGS]


def value_notes(pairs: Mapping[str, Pair], points: Iterable[Point]) -> list[str]:
    """Other dtypes than the reference's, and NaN on both sides."""
    dtypes: dict[tuple[str, str], list[str]] = {}
    unknown: list[str] = []
    for point in points:
        pair = pairs.get(point.key)
        if pair is None or point.problem:
            continue
        theirs = sorted({str(fact[2]) for fact in pair.held.values()} - {point.dtype})
        if theirs and not any(name.startswith("python ") for name in (*theirs, point.dtype)):
            dtypes.setdefault((", ".join(theirs), point.dtype), []).append(point.words)
        if any(row["nan"] for row in point.rows.values()):
            unknown.append(point.words)
    notes = [
        f"dtypes differ: workers {theirs}, reference {mine}: {_few(words)}"
        for (theirs, mine), words in dtypes.items()
    ]
    if unknown:
        notes.append(f"NaN on both sides, which says nothing of their values: {_few(unknown)}")
    return notes


def zero_notes(value: Callable[[str], torch.Tensor], gradients: Iterable[Point]) -> Iterator[str]:
    """Gradients of parameters that agree since there is nothing in them, as behind zeros of LoRA.

    `value` gives the reference's by key.
    """
    zero = [
        p.module for p in gradients
        if p.kind == "parameter" and p.agrees and not p.problem and p.size
        and not value(p.key).any()
    ]  # fmt: skip
    if zero:
        one = len(zero) == 1
        what = "the gradient of a parameter" if one else f"the gradients of {len(zero)} parameters"
        verbs = ("is", "shows") if one else ("are", "show")
        yield (
            f"{what} {verbs[0]} zero on both sides and {verbs[1]} nothing: {_few(zero)} (compare "
            "with other values in the parameters, or other inputs)"
        )


def input_notes(gradients: Iterable[Point], first: Finding | None) -> Iterator[str]:
    """That only the gradient of what the program is called with differs, which few need."""
    wrong = [p for p in gradients if _wrong(p)]
    if first is None or not first.point.gradient or not wrong:
        return
    if all(p.kind in ("argument", "input") and not p.module for p in wrong):
        yield (
            "all else that was compared agrees: the gradient of an input matters if something "
            "before it is trained, not if it is data or a target"
        )


def _few(words: Sequence[str]) -> str:
    return ", ".join(words[:2]) + (f" and {len(words) - 2} more" if len(words) > 2 else "")


def doubtful_before(compared: Compared, first: Point) -> Point | None:
    """The earliest value in forward that agrees only since the tolerance of its dtype is wide.

    It is off by more than rounding did to the reference, of which `LIKELY` is the measure.
    """
    for point in compared.points:
        if point.key == first.key:
            break
        if (
            point.dtype in ("float16", "bfloat16")
            and point.agrees and not point.problem and point.size >= _SOME
            and 0 < LIKELY * point.rounding < point.error
            and point.relative > _FEW_ROUNDINGS * torch.finfo(getattr(torch, point.dtype)).eps
        ):  # fmt: skip
            return point
    return None


def unmatched_before(compared: Compared, first: Point) -> Point | None:
    """What modules were given or gave in other sizes, between what last agrees and a difference.

    Of an output that differs also what is anywhere inside its module.
    """
    found = None
    inside = first.module and f"{first.module}." if first.kind == "output" else None
    for point in compared.points:
        if point.key == first.key:
            return found
        if point.kind not in ("input", "output"):
            continue
        if point.agrees and not point.problem:
            if found and (inside is None or not found.module.startswith(inside)):
                found = None
        elif found is None and point.problem.startswith(NO_LAYOUT):
            found = point
    return None


def two_orders(matcher: Matcher, compared: Compared, first: Point) -> str:
    """What to say if rows lie in two orders before a difference, as of a batch and its labels.

    Each agrees by itself, and a program may well have both. Of parameters those of one module.
    """
    known: dict[tuple[Any, ...], dict[str, Point]] = {}
    if first.gradient or first.kind in ("parameter", "buffer"):
        return ""
    before = [p.key for p in compared.points].index(first.key)
    for point in (*compared.parameters, *compared.points[:before]):
        value = matcher.ours.value(point.key) if point.agrees and not point.problem else None
        if value is None or point.partial or bool((value == value.flatten()[0]).all()):
            continue
        layout = matcher.pairs[point.key].layout_named(point.layout)
        dims = {dim for dim in layout.dims if dim is not None}
        if len(dims) == 1:
            (dim,) = dims
            owned = point.kind in ("parameter", "buffer")
            owner = point.module.rpartition(".")[0] if owned else None
            known.setdefault((owner, dim, point.shape[dim]), {}).setdefault(point.layout, point)
    for several in known.values():
        if len(several) > 1:
            told = ", ".join(f"{p.words} in {p.layout}" for p in list(several.values())[:2])
            return f"before it rows lie in two orders: {told}: perhaps they do not belong together"
    return ""


def other_ways(compared: Compared) -> set[str]:
    """The keys of values in forward that differ, and of which what comes of them agrees."""
    return {
        point.key for number, point in enumerate(compared.points)
        if _rejoined(compared.points, number, compared.doubted) is not None
    }  # fmt: skip


def detour_notes(compared: Compared, first: Finding | None) -> list[str]:
    """Where the workers do something in another way that makes no difference in the end.

    Parameters
    ----------
    compared
        Of which forward and backward are looked at.
    first
        Behind it all is different.
    """
    found: dict[str, list[str]] = {}
    end = None if first is None else first.point
    if end is not None and end.kind in ("parameter", "buffer") and not end.gradient:
        return []
    for points in (compared.points, compared.gradients):
        for number, point in enumerate(points):
            if end is not None and point.key == end.key:
                return _detours(found)
            later = _rejoined(points, number, compared.doubted)
            if later is not None:
                found.setdefault(later.words, []).append(point.words)
    return _detours(found)


def _detours(found: dict[str, list[str]]) -> list[str]:
    notes = []
    for later, words in list(found.items())[:_MOST_DETOURS]:
        more = f" and {len(words) - 2} more" if len(words) > 2 else ""
        differ = "differ" if len(words) > 1 else "differs"
        notes.append(
            f"another way, the same in the end: {', '.join(words[:2])}{more} {differ}, "
            f"the {later} agrees"
        )
    return notes
