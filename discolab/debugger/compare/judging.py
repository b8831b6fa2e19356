"""Compares values of the two sides: finds how each lies, and has the workers measure it.

On the controller. What was found is a `Point`. Layouts are taken from the user, from DTensors, or
from shapes; where the values are not the reference's as they lie, sums and fused parts are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from ...layouts.infer import copies_on, fused_layouts, partial_layouts
from ...layouts.layout import ShardLayout, Workers
from ...runtime.dref import DRef
from ...runtime.registers import OWN
from ...runtime.session import Session
from ...views.dref.differences import place_of
from . import remote
from .laying import layouts_of
from .measuring import EXACT, Row, Tolerance, difference, scale_of, tolerance_for
from .results import Finding, Point
from .sides import Fact, Side

_BATCH = 32 * 2**20  # bytes that a worker of another process is sent at once
_NEARER = 0.5  # of the error as it lies: a sum with less is what the workers hold terms of
_FLOOR = 0.25  # of the median gradient of a parameter: smaller ones may be pure rounding


@dataclass(slots=True)
class Pair:
    """A value of the reference and what the workers hold of it."""

    point: Point
    number: int  # of the reference's value: pairs of the same values are measured once
    held: dict[int, Fact]
    layouts: list[ShardLayout]
    tolerance: Tolerance = EXACT

    @property
    def identity(self) -> tuple[Any, ...]:
        """What must be the same for the measurement to be the same."""
        numbers = tuple((rank, fact[3]) for rank, fact in self.held.items())
        return self.number, numbers, tuple(self.layouts), self.tolerance


class Judge:
    """Measures pairs for one comparison."""

    def __init__(
        self,
        session: Session,
        ours: Side,
        theirs: DRef,
        token: str,
        meshes: Sequence[Workers],
        tolerances: tuple[float | None, float | None],
        timeout: float | None,
    ) -> None:
        self.session, self.ours, self.theirs, self.token = session, ours, theirs, token
        self.meshes, self.rtol, self.atol, self.timeout = meshes, *tolerances, timeout
        near = session.fetch(self.call(remote.shares_memory, token), None, timeout)
        self._far = [rank for rank, here in enumerate(near) if not here]
        self._nearer: dict[Any, Point] = {}  # by identity: what differs, as a sum that is nearer

    def call(self, func: Any, *args: Any) -> DRef:
        """Call a worker function for this comparison."""
        ref = self.session.call_packed(func, *args)
        ref.name = OWN
        return ref

    # -- how values lie ------------------------------------------------------------------------

    def pair(
        self, point: Point, number: int, held: dict[int, Fact], given: ShardLayout | None
    ) -> Pair:
        """Make a pair; its point has a problem if nothing fits."""
        shapes = {rank: tuple(fact[1]) for rank, fact in held.items()}
        layouts, problem = layouts_of(
            point.shape, shapes, held, given, self.meshes, self.session.num_workers
        )
        if problem:
            point = replace(point, problem=problem)
        return Pair(point, number, held, layouts)

    # -- measuring -----------------------------------------------------------------------------

    def judge(self, pairs: list[Pair], exact: bool = False) -> list[Point]:
        """Measure all pairs that can be, and give the points with what was found, in order."""
        self._set_tolerances(pairs, exact)
        lone: dict[Any, Pair] = {}
        for pair in pairs:
            if not pair.point.problem:
                lone.setdefault(pair.identity, pair)
        found = self._first_round(list(lone.values()))
        found = self._second_round(found)
        by_identity = {
            identity: point
            for identity, (_, point) in zip(lone, found, strict=True)
        }  # fmt: skip
        points = []
        for pair in pairs:
            point = pair.point
            if not point.problem:
                judged = by_identity[pair.identity]
                point = as_point(judged, point)
            points.append(point)
        return points

    def _set_tolerances(self, pairs: list[Pair], exact: bool) -> None:
        scales = [scale_of(self.ours.value(pair.point.key)) for pair in pairs]
        of_parameters = [
            scale
            for scale, pair in zip(scales, pairs, strict=True)
            if pair.point.gradient and pair.point.kind == "parameter"
        ]
        floor = _FLOOR * median(of_parameters) if of_parameters else 0.0
        typical = median(scales) if scales else 0.0
        for scale, pair in zip(scales, pairs, strict=True):
            point = pair.point
            least = floor if point.gradient and point.kind == "parameter" else 1e-3 * typical
            held = [str(fact[2]) for fact in pair.held.values()]
            # one worker that holds a coarser dtype than the others is no reason to be lenient
            dtypes = {point.dtype, max(sorted(set(held)), key=held.count) if held else point.dtype}
            kinds = tuple(getattr(torch, dtype.removeprefix("python ")) for dtype in dtypes)
            copied = exact or (point.kind == "parameter" and not point.gradient)
            pair.tolerance = tolerance_for(kinds, max(scale, least), self.rtol, self.atol, copied)
            pair.point = replace(point, scale=max(scale, least))

    def _first_round(self, pairs: list[Pair]) -> list[tuple[Pair, Point]]:
        plain = [pair for pair in pairs if not pair.layouts[0].is_partial]
        rows = dict(
            zip(map(id, plain), self._measure([(p, p.layouts) for p in plain]), strict=True)
        )
        found = []
        for pair in pairs:
            if id(pair) in rows:
                point = self._best(pair, rows[id(pair)], pair.layouts)
            else:
                point = replace(pair.point, agrees=False)  # a sum: the second round's affair
            found.append((pair, point))
        return found

    def _second_round(self, found: list[tuple[Pair, Point]]) -> list[tuple[Pair, Point]]:
        """Look at those that disagree again: as sums, and as fused parts."""
        again = [
            (pair, point)
            for pair, point in found
            if not point.agrees
            and (pair.layouts[0].source == "inferred" or pair.layouts[0].is_partial)
        ]
        better = {
            id(pair): point for pair, point in [*self._as_fused(again), *self._as_sums(again)]
        }
        return [(pair, better.get(id(pair), point)) for pair, point in found]

    def _as_fused(self, again: list[tuple[Pair, Point]]) -> Iterator[tuple[Pair, Point]]:
        wanted = []
        for pair, _ in again:
            shapes = {rank: tuple(fact[1]) for rank, fact in pair.held.items()}
            layouts = [
                one for s in pair.layouts for one in fused_layouts(s, pair.point.shape, shapes)
            ]
            if layouts and not pair.layouts[0].is_partial:
                wanted.append((pair, layouts))
        for (pair, layouts), rows in zip(wanted, self._measure(wanted), strict=True):
            point = self._best(pair, rows, layouts)
            if point.agrees:
                yield pair, point

    def _as_sums(self, again: list[tuple[Pair, Point]]) -> Iterator[tuple[Pair, Point]]:
        """Those of which workers hold the terms; known by samples, so that nothing large moves."""
        wanted = []
        for pair, point in again:
            sums = [
                s
                for layout in copies_on(pair.layouts, self.meshes)
                for s in partial_layouts(layout)
            ]
            if sums:
                wanted.append((pair, point, sums))
        if not wanted:
            return
        taken = self.samples([pair.point.theirs for pair, _, _ in wanted])
        for (pair, plain, sums), every in zip(wanted, taken, strict=True):
            self._nearer.pop(pair.identity, None)
            parts = {rank: part for rank, part in every.items() if rank in pair.held}
            for layout in sums:
                averaged = pair.point.kind == "parameter" and layout.source == "inferred"
                if averaged and _all_same(layout, parts):
                    continue  # as gradients that were averaged: these are no terms
                point = self._judged_sum(pair, layout, parts)
                if point.agrees or layout.source != "inferred":
                    yield pair, point
                    break
                if point.relative < _NEARER * plain.relative:
                    self._nearer[pair.identity] = point

    def shown_as_sums(
        self, points: Sequence[Point], pairs: Mapping[str, Pair], first: Finding | None
    ) -> list[Point]:
        """Show terms that sum up to nearly the reference's as a sum, but for the first difference.

        Each of them is far from the whole, which is no difference.
        """
        found = []
        for point in points:
            pair = pairs.get(point.key)
            if pair is not None and not (point.agrees or point.problem):
                near = self._nearer.get(pair.identity)
                if near is not None and (first is None or point.key != first.point.key):
                    point = as_point(near, point)
            found.append(point)
        return found

    def _judged_sum(self, pair: Pair, layout: ShardLayout, parts: dict[int, torch.Tensor]) -> Point:
        """Compare the sums of samples with the reference's."""
        whole = self.ours.value(pair.point.key)
        rows: dict[int, Row] = {}
        wide = Tolerance(2 * pair.tolerance.rtol, 2 * pair.tolerance.atol)
        teams = layout.teams(tuple(parts))
        for team in teams:
            total = torch.stack([parts[rank] for rank in team]).sum(0)
            if "avg" in layout.partial:
                total = total / len(team)
            expected = layout.part_of(whole, team[0])
            size = expected.numel()
            row = difference(total, remote.sample(expected, remote.MOST_SAMPLES), wide)
            if row["place"] is not None and size > remote.MOST_SAMPLES:
                row["place"] = int(remote.places(size, remote.MOST_SAMPLES)[row["place"]])
            rows[team[0]] = row
        few = max(len(parts[team[0]]) for team in teams)
        return self._point(pair, rows, layout, sampled=few)

    def _best(self, pair: Pair, rows: dict[int, list[Row]], layouts: list[ShardLayout]) -> Point:
        """The first layout that agrees, else the one that comes nearest."""
        points = [
            self._point(pair, {rank: each[number] for rank, each in rows.items()}, layout)
            for number, layout in enumerate(layouts)
        ]
        return next((p for p in points if p.agrees), None) or min(
            points, key=lambda p: (sum(row["over"] for row in p.rows.values()), p.error)
        )

    def _point(
        self, pair: Pair, rows: Mapping[int, Row], layout: ShardLayout, sampled: int = 0
    ) -> Point:
        point = pair.point
        over = tuple(rank for rank, row in rows.items() if row["over"])
        if layout.is_partial and over:
            over = tuple(sorted(pair.held))
        error = max((row["max_abs"] for row in rows.values()), default=0.0)
        told = {}
        for rank, row in rows.items():
            cut = layout.cut(point.shape, rank)
            index = None
            if row["place"] is not None and cut is not None:
                index = list(place_of(row["place"], cut.shape))
            told[rank] = {**row, "index": index}
        same = [row for rank, row in rows.items() if row["over"]]
        return replace(
            point,
            layout=layout.words,
            source=layout.source,
            partial=layout.is_partial,
            sampled=sampled,
            agrees=not over,
            error=error,
            relative=self._relative(point, error, rows),
            ranks=over,
            rows=told,
            unlike=len({(row["max_abs"], row["place"]) for row in same}) > 1
            or len(same) < len(rows),
        )

    @staticmethod
    def _relative(point: Point, error: float, rows: Mapping[int, Row]) -> float:
        """Of integers the share that differs: how far one is from another says nothing."""
        if point.dtype.removeprefix("python ").startswith(("int", "uint", "bool")):
            return max((row["over"] / max(row["size"], 1) for row in rows.values()), default=0.0)
        return error / point.scale if point.scale else error

    def _measure(self, wanted: list[tuple[Pair, list[ShardLayout]]]) -> list[dict[int, list[Row]]]:
        """Have the workers compare; for each pair the rows of each worker, one for each layout."""
        found: list[dict[int, list[Row]]] = []
        for batch in self._batches(wanted):
            jobs = [
                (
                    pair.point.theirs, pair.point.key, pair.point.shape,
                    [layout.plain for layout in layouts],
                    pair.tolerance.rtol, pair.tolerance.atol,
                )
                for pair, layouts in batch
            ]  # fmt: skip
            sent = self._send(batch) if self._far else None
            call = self.call(remote.measure, self.theirs, self.token, jobs, sent)
            answers = self.session.fetch(call, None, self.timeout)
            for number in range(len(batch)):
                each = {rank: answer[number] for rank, answer in enumerate(answers)}
                held = batch[number][0].held
                assert all(each[rank] is not None for rank in held), batch[number][0].point.key
                found.append({rank: each[rank] for rank in held})
        return found

    def _batches(
        self, wanted: list[tuple[Pair, list[ShardLayout]]]
    ) -> Iterator[list[tuple[Pair, list[ShardLayout]]]]:
        if not self._far:
            if wanted:
                yield wanted
            return
        batch: list[tuple[Pair, list[ShardLayout]]] = []
        size = 0
        for one in wanted:
            value = self.ours.value(one[0].point.key)
            size += value.numel() * value.element_size()
            batch.append(one)
            if size > _BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _send(self, batch: list[tuple[Pair, list[ShardLayout]]]) -> DRef:
        """Give each worker that can't see the reference the parts of it that it should hold."""
        place = self.call(_nothing)
        for rank in self._far:
            parts = []
            for pair, layouts in batch:
                value = self.ours.value(pair.point.key)
                if rank in pair.held and len(layouts) == 1:
                    value = layouts[0].part_of(value, rank)
                parts.append(value.cpu().contiguous() if rank in pair.held else None)
            self.session.set_value(place, rank, parts, self.timeout)
        return place

    def samples(self, keys: list[str], most: int = remote.MOST_SAMPLES) -> list[dict[int, Any]]:
        """Elements of the workers' values; for each key by rank."""
        call = self.call(remote.samples, self.theirs, [(key, most) for key in keys])
        answers = self.session.fetch(call, None, self.timeout)
        return [
            {rank: answer[n] for rank, answer in enumerate(answers) if answer[n] is not None}
            for n in range(len(keys))
        ]


def as_point(judged: Point, point: Point) -> Point:
    """What was found of the same values, for another point."""
    return replace(
        judged, kind=point.kind, module=point.module, leaf=point.leaf,
        gradient=point.gradient, key=point.key, theirs=point.theirs,
    )  # fmt: skip


def _all_same(layout: ShardLayout, parts: dict[int, torch.Tensor]) -> bool:
    """Whether workers hold copies, of which the sum would be a multiple."""
    return all(
        torch.allclose(parts[team[0]], parts[rank], rtol=1e-6, atol=0.0) and bool(parts[rank].any())
        for team in layout.teams(tuple(parts))
        for rank in team
    )


def _nothing() -> None:
    """Make a register (a worker function)."""
