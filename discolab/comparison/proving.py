"""Proves where a program goes wrong: runs it once more with the reference's value put there.

On the controller's thread. The workers run forward again, and each goes on with its part of the
reference's value in place of its own (activation patching). If what comes after is right then, that
is the place. If something goes wrong that was right, the workers' value is another one by design,
as the local ids of a vocabulary that is split; if all stays as wrong as it was, the error does not
come from there. The next value that differs is tried then.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..layouts.layout import ShardLayout
from ..runtime.errors import WaitTimeoutError, WorkerError
from .matcher import PARAMETERS, Matcher
from .results import Point
from .sides import WorkerSides, hold

_SAME = 1e-3  # of an error: a change by less is none
_LESS = 0.5  # of an error: what is left of one of which a part was taken away
_SENSELESS = -3.0  # times the reference's value: nothing is right that comes of it
_FAR = 0.5  # of a typical element: by less a value may be off that comes out right all the same


class Proof(enum.Enum):
    """What it shows to put the reference's value in place of one that differs."""

    PLACE = enum.auto()
    """What comes after is right then."""
    UNTIL = enum.auto()
    """It is right up to the next difference, and less wrong there."""
    PART = enum.auto()
    """Some of it is right then, or less wrong."""
    NOTHING = enum.auto()
    """It stays as wrong as it was."""
    DESIGN = enum.auto()
    """Something goes wrong that was right: the program needs the workers' value."""
    ALONE = enum.auto()
    """Nothing after it differs, with it or without."""
    UNKNOWN = enum.auto()
    """It can't be tried."""


@dataclass(frozen=True)
class Start:
    """What both sides were run with."""

    given: tuple[tuple[Any, ...], dict[str, Any]]
    seed: int
    cuts: Mapping[str, ShardLayout]
    whole: Mapping[str, int]


class Prover:
    """Runs the workers' forward again, and compares it.

    Parameters
    ----------
    judged
        What is done to the points of a comparison to judge them as the first ones were.
    """

    def __init__(
        self,
        matcher: Matcher,
        workers: WorkerSides,
        start: Start,
        judged: Callable[[Matcher, list[Point]], list[Point]],
    ) -> None:
        self.matcher, self.workers, self.start, self._judged = matcher, workers, start, judged
        self._devices: set[str] | None = None  # on which the workers can run again
        self.still_wrong: Point | None = None  # the first after what was put last, if any

    def tried(self, point: Point, points: Sequence[Point]) -> tuple[Proof, ShardLayout | None]:
        """Put the reference's value in the place of a point.

        Gives how the value lies, too, if that is otherwise than the point says: in another order,
        or as terms of a sum.
        """
        group = self._together(point, points)
        if not group or not all(map(can_be_put, group)):
            return Proof.UNKNOWN, None
        if not self._can_run() or not self._is_safe(group):
            return Proof.UNKNOWN, None
        proof, lies = Proof.UNKNOWN, None
        for proof, lies in self._tries(point, group, points):
            if proof in (Proof.PLACE, Proof.UNTIL, Proof.UNKNOWN):
                return proof, lies
        return proof, lies

    def _tries(
        self, point: Point, group: Sequence[Point], points: Sequence[Point]
    ) -> Iterator[tuple[Proof, ShardLayout | None]]:
        """What is shown, for each way in which the value may lie; what is likeliest comes last."""
        matcher = self.matcher
        first, *others = matcher.likely_layouts(point)
        alone = [point] if point.kind in PARAMETERS and len(group) > 1 else group
        proof = self._shown(alone, points, {})
        if alone is not group and proof is not Proof.PLACE:
            together = self._shown(group, points, {})
            proof = together if together is Proof.PLACE else proof
        if proof in (Proof.PLACE, Proof.UNTIL, Proof.UNKNOWN):
            yield proof, None
            return
        for layout in others:
            shown = self._shown(group, points, {point.key: layout})
            proof = Proof.PART if shown is Proof.PART else proof
            yield shown, layout
        if point.unlike and not point.partial and "float" in point.dtype and not first.layout.cuts:
            terms = {p.key: matcher.layout_of_terms(matcher.pairs[p.key]) for p in group}
            as_terms = self._shown(group, points, terms)
            if as_terms in (Proof.PLACE, Proof.UNTIL):
                yield as_terms, terms[point.key]
                return
        yield proof, None

    def is_right_later(self, point: Point, points: Sequence[Point]) -> bool:
        """Whether what comes of a value is right, to rounding, though all that follows is lenient.

        What comes of it is seen where something senseless is put in its place.
        """
        group = self._together(point, points)
        if not group or any("float" not in p.dtype for p in group) or point.relative < _FAR:
            return False
        try:
            after = {p.key: p for p in self._run_with(group, {}, _SENSELESS)}
        except (WaitTimeoutError, WorkerError):
            return False
        known: list[Point] = []
        for p in points:
            if p.key not in after or p.problem or not p.agrees or "float" not in p.dtype:
                continue
            if not after[p.key].agrees and not p.partial:
                least = torch.finfo(getattr(torch, p.dtype)).eps
                before = (q.relative for q in known if q.dtype == p.dtype and not q.partial)
                return p.relative <= max(least, *before, 0.0)
            known.append(p)
        return False

    def first_of_several(self, found: Sequence[Point], points: Sequence[Point]) -> Point | None:
        """The first of values that are wrong each by itself; None if they are not the place.

        Parameters
        ----------
        found
            In the order of the program. Of none of them alone what comes after is right; those
            without which it is right all the same are no place.
        """
        groups = [self._together(point, points) for point in found]
        if len(found) < 2 or not self._is_place(groups, points):
            return None
        for number, point in enumerate(found[:-1]):
            gone = {p.key for p in groups[number]}
            rest = [[p for p in group if p.key not in gone] for group in groups[number + 1 :]]
            if not self._is_place(rest, points):
                return point
        return found[-1]

    def _is_place(self, groups: Sequence[Sequence[Point]], points: Sequence[Point]) -> bool:
        put = {point.key: point for group in groups for point in group}
        return bool(put) and self._shown(list(put.values()), points, {}) is Proof.PLACE

    def dealt_wrongly(self, parameters: Sequence[Point], points: Sequence[Point]) -> bool:
        """Whether parameters whose rows lie in another order are to lie in a row."""
        if not self._can_run() or not self._is_safe(parameters):
            return False
        layouts = {}
        for point in parameters:
            pair = self.matcher.pairs[point.key]
            layouts[point.key] = pair.layout_named(self.matcher.in_rows[point.key].layout)
        return self._shown(parameters, points, layouts) is Proof.PLACE

    def _shown(
        self,
        group: Sequence[Point],
        points: Sequence[Point],
        layouts: Mapping[str, ShardLayout],
    ) -> Proof:
        """`layouts`: of the values in the group, where they are put in otherwise than they lie."""
        try:
            after = self._run_with(group, layouts)
        except WaitTimeoutError:
            return Proof.UNKNOWN
        except WorkerError:
            numbers = all("int" in point.dtype for point in group)
            return Proof.DESIGN if numbers else Proof.UNKNOWN  # as ids that a part has not
        put = {point.key for point in group}
        entries = self.matcher.ours.recorder.entries
        values = {entries[key].snapshot.number for key in put}
        same = {
            point.key for point in points
            if point.key in entries and entries[point.key].snapshot.number in values
        }  # fmt: skip
        found = {p.key: p for p in after}
        last = max((n for n, point in enumerate(points) if point.key in put), default=-1)
        self.still_wrong = next(
            (
                p for p in points[last + 1 :]
                if not p.agrees and not p.problem and p.key not in same and p.key in found
                and not found[p.key].agrees
            ),
            None,
        )  # fmt: skip
        return _proof(put, same, points, found)

    def _can_run(self) -> bool:
        if self._devices is None:
            again = self.matcher.ours.can_run_again
            self._devices = self.workers.run_again_on() if again else {""}
        return "" not in self._devices

    def _together(self, point: Point, points: Sequence[Point]) -> list[Point]:
        """What is put in place at once: all that a call puts out, one value into whatever it goes.

        Of parameters all that differ in one module.
        """
        if point.problem or point.gradient:
            return []
        if point.kind in PARAMETERS:
            near = [p for p in points if p.kind == point.kind and not p.agrees and not p.problem]
            return [p for p in near if p.owner == point.owner]
        entries = self.matcher.ours.recorder.entries
        number = entries[point.key].snapshot.number
        return [
            p for p in points
            if p.key == point.key
            or (not p.agrees and not p.problem and p.kind == point.kind
                and (p.module == point.module
                     or (p.kind == "input" and entries[p.key].snapshot.number == number)))
        ]  # fmt: skip

    def _is_safe(self, group: Sequence[Point]) -> bool:
        """Whether it does no harm to put values there.

        A parameter that workers have in common is written by all. An accelerator may fall over an
        index that is too large.
        """
        owned = [point for point in group if point.kind in PARAMETERS]
        here = [self.matcher.ours.value(point.key) for point in owned]
        if owned and self.workers.share([point.theirs for point in owned], here):
            return False
        whole = [p for p in group if "int" in p.dtype]
        if not whole or self._devices == {"cpu"}:
            return True
        for point, held in zip(whole, self.workers.samples([p.theirs for p in whole]), strict=True):
            known = self.matcher.ours.value(point.key)
            for part in held.values():
                if not part.numel() or known.max() > part.max() or known.min() < part.min():
                    return False
        return True

    def _run_with(
        self, group: Sequence[Point], layouts: Mapping[str, ShardLayout], times: float = 1
    ) -> list[Point]:
        """Run forward with the reference's values; of a sum one worker has all, others zeros."""
        matcher, start = self.matcher, self.start
        wanted = []
        jobs = []
        for point in group:
            pair = matcher.pairs[point.key]
            layout = layouts.get(point.key, pair.layout_named(point.layout))
            wanted.append((pair, [layout]))
            summed = point.key in layouts and layout.is_partial
            teams = layout.teams(tuple(pair.held)) if summed else []
            nothing = {rank for team in teams for rank in team[1:]}
            factors = [0.0 if r in nothing else times for r in range(matcher.num_workers)]
            jobs.append((pair.point.theirs, pair.point.key, layout.plain, factors))
        inputs = self.workers.call(hold, *start.given)
        again = self.workers.putting(
            matcher.token, inputs, start.seed, start.cuts, start.whole, jobs,
            matcher.send_parts(wanted),
        )  # fmt: skip
        other = matcher.for_workers(again)
        return self._judged(other, other.compare_forward_again())


def can_be_put(point: Point) -> bool:
    """Whether a value of the reference can go on in place of the workers'."""
    known = point.kind in ("input", "output", "note", *PARAMETERS)
    return known and not (point.gradient or point.problem)


def _proof(
    put: set[str], same: set[str], before: Sequence[Point], after: Mapping[str, Point]
) -> Proof:
    """What the values after the last that was put show; `same`: the keys of what was put."""
    last = max((n for n, point in enumerate(before) if point.key in put), default=-1)
    later = [
        (p, after[p.key]) for p in before[last + 1 :]
        if p.key in after and not p.problem and p.kind not in ("argument", "state")
    ]  # fmt: skip
    if any(a.agrees and not b.agrees and not b.problem for a, b in later):
        return Proof.DESIGN
    wrong = [(a, b) for a, b in later if not a.agrees and "float" in a.dtype]
    if not wrong:
        return Proof.ALONE
    end, ended = wrong[-1]
    if ended.agrees:
        return Proof.PLACE
    fixed = [n for n, (a, b) in enumerate(wrong) if b.agrees and a.key not in same]
    rest = wrong[fixed[-1] + 1 :] if fixed else []
    around = {above for p in before if p.key in put for above in _above(p.owner)}
    if any(wrong[n][0].kind == "output" and wrong[n][0].module in around for n in fixed):
        return Proof.UNTIL  # what makes up for it in there would be wrong now
    rest = [(a, b) for a, b in rest if _changed(a.error, b.error)]
    if not rest:
        return Proof.PART if ended.error < _LESS * end.error else Proof.NOTHING
    return Proof.UNTIL if _square(rest[0][1]) < _square(rest[0][0]) else Proof.PART


def _above(path: str) -> Iterator[str]:
    """The calls of modules around one that are the first of their module."""
    path = path.partition("#")[0]
    while path := path.rpartition(".")[0]:
        yield path


def _square(point: Point) -> float:
    """Of all errors of a value."""
    return float(sum(row["rms"] ** 2 * row["size"] for row in point.rows.values()))


def _changed(before: float, after: float) -> bool:
    if not (math.isfinite(before) and math.isfinite(after)):
        return before != after and not (math.isnan(before) and math.isnan(after))
    return abs(after - before) > _SAME * before
