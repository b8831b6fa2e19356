"""Matches values of the two sides: pairs them, finds how each lies, has the workers measure it.

On the controller. What was found is a `Point`. Layouts are taken from the user, from DTensors, or
from shapes; where the values are not the reference's as they lie, sums and fused parts are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from statistics import median
from typing import Any

import torch

from ..layouts.infer import copies_on, fused_layouts, infer_layouts, partial_layouts
from ..layouts.layout import Shape, ShardLayout, Workers
from ..layouts.text import UnknownPlacementError, layout_of
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError
from ..views.dref.differences import place_of
from ..views.formats import format_shape, format_workers
from .arguments import GivenLayouts
from .measure import (
    MOST_SAMPLES,
    Row,
    difference,
    sample,
    sample_places,
    scale_of,
    tolerance_for,
)
from .orders import MOST_ROWS, Order, cut_dim, fitting_orders, marks_of, ordered, parts_of
from .pairs import (
    FactsByKey,
    Names,
    Pair,
    Setting,
    by_key,
    check_some_match,
    is_number,
    lone_keys,
    settings_of,
)
from .presence import Presence
from .results import Point, point_name
from .rounding import TIMES, Noise
from .sides import Fact, Side, WorkerSides

PARAMETERS = ("parameter", "buffer")
FORWARD = ("argument", "input", "output", "note", "result", "state")
NO_LAYOUT = "the shapes fit no layout"

_OF_BATCH = "parts of the batch"  # who says how a value lies
_BATCH = 32 * 2**20  # bytes that a worker of another process is sent at once
_NEARER = 0.5  # of the error as it lies: a sum with less is what the workers hold terms of
_NEARLY = 1e-2  # of that error: the sum of the first difference's terms is shown, not the terms
_FLOOR = 0.25  # of the median gradient of a parameter: smaller ones may be pure rounding


class Matcher:
    """Compares what the two sides have recorded, one kind of value after the other.

    Parameters
    ----------
    ours, workers
        The two sides.
    token
        Of our side on the shelf, where workers of this process see it.
    names, given
        What the user says of names and layouts.
    tolerances
        `rtol` and `atol`, None where the dtype decides.
    meshes
        In which values may be cut, the likeliest first.
    """

    def __init__(
        self,
        ours: Side,
        workers: WorkerSides,
        token: str,
        names: Names,
        given: GivenLayouts,
        tolerances: tuple[float | None, float | None],
        meshes: Sequence[Workers],
    ) -> None:
        self.ours, self.workers, self.token = ours, workers, token
        self.names, self.given, self.meshes = names, given, meshes
        self.rtol, self.atol = tolerances
        self.num_workers = workers.session.num_workers
        self.presence = Presence(self.num_workers)
        self.pairs: dict[str, Pair] = {}
        self.keys: set[str] = set()  # of all that the workers have
        self._lone: tuple[set[str], set[str]] = set(), set()  # of both sides, see `lone_keys`
        self._far = workers.without_reference(token)
        self.in_rows: dict[str, Point] = {}  # by key, what is wrong if rows lie in a row
        self.orders: dict[tuple[int, int], list[Order]] = {}  # of rows, by how many in what parts
        self._nearer: dict[Any, Point] = {}  # by identity: what differs, as a sum that is nearer

    # -- the kinds of values, in the order of a run --------------------------------------------

    def compare_parameters(self, theirs: Sequence[list[Fact]]) -> list[Point]:
        """Compare parameters and buffers; `theirs` are the facts of each worker."""
        held = self._by_key(theirs)
        ours = self.ours.facts(PARAMETERS)
        self.names.unwrap([str(fact[0]) for fact in ours], list(held))
        return self._compare(ours, held)

    def learn_modules(self, theirs: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Take in which modules each worker has.

        Raises
        ------
        ArgumentError
            If none of them has the name of one of the reference.
        """
        modules = [{path: tuple(about) for path, *about in each} for each in theirs]
        self.presence.modules = modules
        paths = list(dict.fromkeys(path for each in modules for path in each))
        check_some_match(list(self.ours.recorder.modules), paths, self.names)

    def compare_forward(
        self, theirs: Sequence[list[Fact]], plain_values: Sequence[dict[str, tuple[str, str]]]
    ) -> list[Point]:
        """Compare what was recorded in forward.

        Parameters
        ----------
        theirs
            The facts of each worker.
        plain_values
            Of each worker, see `WorkerSides.plain_values`.
        """
        held = self._by_key(theirs)
        ours = self.ours.facts(FORWARD)
        self._lone = lone_keys(ours), lone_keys(next(iter(f.values())) for f in held.values())
        self.presence.learn(held)
        points = self._compare(ours, held)
        if any(p.kind == "state" and not p.agrees for p in points):
            kept = self.workers.unchanged()
            problem = "workers leave it as it was, the reference does not"
            points = [
                replace(p, problem=problem, agrees=True) if p.theirs in kept else p for p in points
            ]
        ours_plain = self.ours.recorder.plain_values
        others = self.presence.other_values(ours_plain, plain_values, held, self.names.rename)
        return [*points, *others]

    def for_workers(self, workers: WorkerSides) -> Matcher:
        """The same for another run of the workers' program, forward."""
        other = Matcher(
            self.ours, workers, self.token, self.names, self.given, (self.rtol, self.atol),
            self.meshes,
        )  # fmt: skip
        other.presence.modules, other.orders = self.presence.modules, self.orders
        return other

    def compare_forward_again(self) -> list[Point]:
        """Compare what a second run of the workers' program has recorded."""
        return self.compare_forward(self.workers.facts(FORWARD), self.workers.plain_values())

    def send_parts(self, wanted: list[tuple[Pair, list[ShardLayout]]]) -> DRef | None:
        """Give workers that can't see the reference their parts; a layout for each pair."""
        return self._send(wanted) if self._far else None

    def compare_operations(self, theirs: Sequence[list[Fact]]) -> list[Point]:
        """Compare the operations that both sides have run."""
        return self._compare(self.ours.facts(("operation",)), self._by_key(theirs))

    def starts(self, points: Sequence[Point]) -> dict[str, tuple[Shape, ShardLayout]]:
        """From what backward starts: the tensors of the result whose layout is known."""
        starts = {}
        for leaf, tensor in self.ours.results():
            pair = self.pairs.get(f"result||{leaf}")
            if pair is None or not tensor.requires_grad or pair.point.problem:
                continue
            if any(is_number(fact) for fact in pair.held.values()):
                continue
            judged = next(p for p in points if p.key == pair.point.key)
            starts[leaf] = tuple(tensor.shape), pair.layout_named(judged.layout)
        return starts

    def compare_gradients(
        self, theirs: Sequence[list[Fact]], parts: int, of_parts: bool
    ) -> tuple[list[Point], list[str]]:
        """Compare gradients as they are, then as averages where that explains what differs.

        Each worker of a data-parallel program has a part of the batch. DDP and FSDP average the
        gradients of parameters; and a loss that is a mean is one over the worker's part. Where
        the gradients bear that out, the reference's are multiplied by what follows from it and
        compared again; a gradient that does not fit then differs.

        Parameters
        ----------
        parts
            Over how many workers the batch is spread, see `count_of_parts`.
        of_parts
            Whether each worker's loss may be a mean over its part, see `has_loss_of_parts`.

        Returns
        -------
        tuple
            The points, and what to tell of it.
        """
        held = self._by_key(theirs)
        points = self._compare(self.ours.gradient_facts(), held)
        if parts < 2 or not any(map(_differs, points)):
            return points, []
        if of_parts:  # else backward starts from the same gradients on both sides
            with _scaled_gradients(self.ours, parts, of_parameters=False) as keep:
                scaled = self._compare(self.ours.gradient_facts(), held)
                if _first_fits(points, scaled):
                    keep()
                    scaled = [
                        one if _is_whole(one) and (other.partial or not other.agrees) else other
                        for one, other in zip(points, scaled, strict=True)
                    ]
                    note = (
                        f"the loss is a mean over each worker's part of the batch: gradients "
                        f"between the modules are {parts} × the reference's, and were compared "
                        "with these"
                    )
                    return scaled, [note]
        with _scaled_gradients(self.ours, 1 / parts, of_parameters=True) as keep:
            scaled = self._compare(self.ours.gradient_facts(), held)
            if _most_fit(points, scaled):
                keep()
                last = self.num_workers - 1
                twice = " (or the loss is divided twice)" if of_parts else ""
                who = f"workers 0-{last}" if parts == last + 1 else f"groups of {parts} workers"
                note = (
                    f"parameter gradients are averaged over {who}, as DDP and FSDP do: compared "
                    f"with the reference / {parts}{twice}"
                )
                return scaled, [note]
        return self._compare(self.ours.gradient_facts(), held), []

    def count_of_parts(self, cuts: Sequence[ShardLayout], points: Sequence[Point]) -> int:
        """Over how many workers the batch is spread: as inputs, or along dim 0 of the result.

        A program that runs backward itself may take its part itself, and give a loss: then along
        dim 0 of what goes through its modules.
        """
        counts = [_count_of_parts(layout, None) for layout in cuts]
        kinds = ("result", "input", "output") if self.ours.ran_backward else ("result",)
        for point in points:
            if point.kind in kinds and not point.problem and point.layout:
                layouts = self.pairs[point.key].layouts
                counts += [
                    _count_of_parts(each, 0) for each in layouts if each.words == point.layout
                ]
        return max(counts, default=1)

    def losses_of_parts(
        self, points: Sequence[Point], cuts: Sequence[ShardLayout]
    ) -> tuple[list[Point], list[str]]:
        """Compare the numbers that workers have of their parts of the batch as averages of these.

        That is how a loss is where a data-parallel program computes it in a module, or gives it.

        Returns
        -------
        tuple
            The points, and what to tell of it.
        """
        spread = any(_count_of_parts(layout, 0) > 1 for layout in cuts)
        if not spread and self.count_of_parts([], points) < 2:
            return list(points), []
        found, told = [], []
        for point in points:
            pair = self.pairs.get(point.key)
            if (
                pair is not None and not point.agrees and not point.problem
                and point.kind in ("output", "result") and not point.shape
                and "float" in point.dtype and pair.layouts[0].source == "inferred"
            ):  # fmt: skip
                mean = self._as_mean(pair)
                if mean is not None:
                    point = as_point(mean, point)
                    told.append(point.words)
            found.append(point)
        if not told:
            return found, []
        return found, [
            f"each worker has the {told[0]} of its part of the batch: their average is the "
            "reference's"
        ]

    def _as_mean(self, pair: Pair) -> Point | None:
        """A value as the mean of what workers hold, if that is the reference's."""
        (parts,) = self.workers.samples([pair.point.theirs])
        for total in self._sums(pair):
            ops = tuple("avg" if op else "" for op in total.partial)
            mean = replace(total, layout=replace(total.layout, partial=ops), source=_OF_BATCH)
            point = self._judged_sum(pair, mean, {r: parts[r] for r in pair.held})
            if point.agrees:
                pair.layouts.append(mean)
                return point
        return None

    def has_loss_of_parts(self, points: Sequence[Point]) -> bool:
        """Whether each worker may have a loss of its own, over its part of the batch.

        Not where backward starts from gradients of the result, nor where the loss comes of a value
        that all have whole, as after a sum or a gather. What a program that runs backward gives
        need not be the loss.
        """
        if any(point.source == _OF_BATCH for point in points):
            return True
        if self.ours.loss is None and not self.ours.ran_backward:
            return False
        kind = "output" if self.ours.ran_backward else "result"
        entries = self.ours.recorder.entries
        last = [p for p in points if p.kind == kind and entries[p.key].requires_grad][-1:]
        return not any(
            p.agrees and not p.problem and not p.partial and "Shard" not in p.layout for p in last
        )

    def settings(self, path: str) -> list[Setting]:
        """How a module of the reference is set up otherwise on workers."""
        ours = self.ours.recorder.modules.get(path)
        other = self.names.rename(path)
        modules = enumerate(self.presence.modules)
        theirs = {rank: known[other] for rank, known in modules if other in known}
        return settings_of(ours, theirs) if ours is not None and theirs else []

    # -- pairs ---------------------------------------------------------------------------------

    def _by_key(self, theirs: Sequence[list[Fact]]) -> FactsByKey:
        held = by_key(theirs)
        self.keys |= set(held)
        return held

    def _compare(self, ours: Sequence[Fact], held: FactsByKey) -> list[Point]:
        pairs = []
        for key, shape, dtype, number, _ in ours:
            kind, module, leaf = str(key).removesuffix(".grad").split("|")
            gradient = str(key).endswith(".grad")
            theirs = self.names.find(key, held, *self._lone)
            shown = "" if str(key).removesuffix(".grad") in self._lone[0] else leaf
            point = Point(kind, module, shown, gradient, shape, dtype, key, theirs or "")
            if theirs is not None:
                self.presence.without_tokens(point, held, theirs)
            pair = self._pair(point, number, held.get(theirs or "", {}))
            if kind in ("argument", "result", "note") or theirs is not None or pair.point.problem:
                pairs.append(pair)
                self.pairs[key] = pair
        measured = [self._as_piece(point) for point in self._measure(pairs)]
        return self.presence.judged(measured, self.pairs)

    def _as_piece(self, point: Point) -> Point:
        """The point; one that was not compared if it is one of several pieces of a batch.

        A worker that runs a batch in pieces, which together are not all of it, has only some of
        the micro-batches: its replica's. Which these are no shape tells. Calls on the same values,
        as checkpoint makes them, are no pieces.
        """
        pair = self.pairs.get(point.key)
        if pair is None or (point.agrees and not point.problem) or "#" in point.module:
            return point
        key, other = (each.removesuffix(".grad") for each in (point.key, point.theirs))
        again = _next_call(other)
        if (
            point.kind not in ("input", "output", "note")
            or again not in self.keys
            or _next_call(key) in self.ours.recorder.entries
            or any(layout.source != "inferred" for layout in pair.layouts)
            or not any(shape[:1] < point.shape[:1] for shape in pair.shapes.values())
        ):
            return point
        one, two = self.workers.samples([other, again])
        if all(rank in two and torch.equal(part, two[rank]) for rank, part in one.items()):
            return point
        problem = (
            "workers run it in several calls, the reference in one: which part of the batch each "
            "call has is not known"
        )
        return replace(pair.point, problem=problem)

    def _pair(self, point: Point, number: int, held: dict[int, Fact]) -> Pair:
        """Make a pair; its point has a problem if no layout fits."""
        shapes = {rank: tuple(fact[1]) for rank, fact in held.items()}
        given = self._given_layout(point)
        layouts, problem = _layouts_of(
            point.shape, shapes, held, given, self.meshes, self.num_workers
        )
        if problem:
            point = replace(point, problem=problem)
        of = self.pairs.get(point.key.removesuffix(".grad")) if point.gradient else None
        dealt = [] if of is None else [each for each in of.layouts if each.order is not None]
        return Pair(point, number, held, [*dealt, *layouts])

    def _given_layout(self, point: Point) -> ShardLayout | None:
        layout = self.given.find(point.name)
        if layout is None and point.gradient:
            layout = self.given.find(point_name(point.kind, point.module, point.leaf, False))
            if layout is not None and layout.is_partial:
                return None  # terms of a sum have the sum's whole gradient
        return layout

    # -- measuring -----------------------------------------------------------------------------

    def _measure(self, pairs: list[Pair]) -> list[Point]:
        """Measure all pairs that can be, and give the points with what was found, in order."""
        self._set_tolerances(pairs)
        lone: dict[Any, Pair] = {}
        identities = [pair.identity for pair in pairs]
        for pair, identity in zip(pairs, identities, strict=True):
            if not pair.point.problem:
                lone.setdefault(identity, pair)
        first = self._first_round(list(lone.values()))
        found = self._second_round(first)
        in_rows = {identity: point for identity, (_, point) in zip(lone, first, strict=True)}
        by_identity = {
            identity: point
            for identity, (_, point) in zip(lone, found, strict=True)
        }  # fmt: skip
        points = []
        for pair, identity in zip(pairs, identities, strict=True):
            point = pair.point
            if not point.problem:
                pair.layouts = lone[identity].layouts  # with an order that was found
                point = as_point(by_identity[identity], point)
                if point.agrees and pair.layout_named(point.layout).order is not None:
                    self.in_rows[point.key] = as_point(in_rows[identity], point)
            points.append(point)
        return points

    def _set_tolerances(self, pairs: list[Pair]) -> None:
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
            copied = point.kind == "parameter" and not point.gradient
            pair.tolerance = tolerance_for(kinds, max(scale, least), self.rtol, self.atol, copied)
            pair.point = replace(point, scale=max(scale, least))

    def _first_round(self, pairs: list[Pair]) -> list[tuple[Pair, Point]]:
        plain = [pair for pair in pairs if not pair.layouts[0].is_partial]
        rows = dict(zip(map(id, plain), self._rows([(p, p.layouts) for p in plain]), strict=True))
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
            id(pair): point
            for pair, point in [
                *self._as_ordered(again), *self._as_fused(again), *self._as_sums(again)
            ]
        }  # fmt: skip
        return [(pair, better.get(id(pair), point)) for pair, point in found]

    def _as_ordered(self, again: list[tuple[Pair, Point]]) -> Iterator[tuple[Pair, Point]]:
        """Those whose rows are dealt to workers otherwise than in a row, as in strides.

        The order in which a result lies must be that of something before it. Gradients lie as
        their values, if these tell.
        """
        open_ = [
            pair for pair, _ in again
            if 0 not in pair.point.shape and (not pair.point.gradient or self._fits_any(pair))
        ]  # fmt: skip
        plain = {id(pair): point for pair, point in again}
        marked = [pair for pair in open_ if not pair.point.gradient]
        found = {
            number: point for number, point in self._fitting(self._marked_orders(marked))
            if point.agrees
        }  # fmt: skip
        rest = [pair for pair in open_ if id(pair) not in found]
        found |= {
            number: point for number, point in self._fitting(self._known_orders(rest))
            if point.agrees or _is_nearer(point, plain[number])
        }  # fmt: skip
        for pair, _ in again:
            if id(pair) in found:
                yield pair, found[id(pair)]

    def _fits_any(self, pair: Pair) -> bool:
        """Whether a gradient is of a value that says nothing of how it lies, as zeros."""
        value = self.ours.value(pair.point.key.removesuffix(".grad"))
        return bool((value == value.flatten()[0]).all())

    def _marked_orders(self, pairs: Sequence[Pair]) -> list[tuple[Pair, list[ShardLayout]]]:
        """The orders that a mark of each row allows, along the one dimension that is cut."""
        wanted = [
            (pair, layout, dim) for pair in pairs for layout in pair.layouts
            if (dim := cut_dim(layout)) is not None
            and pair.point.kind not in ("result", "operation")
            and pair.point.shape[dim] <= MOST_ROWS
        ]  # fmt: skip
        if not wanted:
            return []
        held = self.workers.marks([(pair.point.theirs, dim) for pair, _, dim in wanted])
        found = []
        for (pair, layout, dim), parts in zip(wanted, held, strict=True):
            whole = marks_of(self.ours.value(pair.point.key), dim)
            kept = self._rows_of(layout, {r: parts[r] for r in pair.held}, len(whole))
            others = pair.point.kind in ("parameter", "buffer", "argument")
            orders = [] if kept is None else (
                fitting_orders(whole, kept, parts_of(layout, dim), others)
            )  # fmt: skip
            found.append((pair, [ordered(layout, dim, order) for order in orders]))
        return found

    def _known_orders(self, pairs: Sequence[Pair]) -> list[tuple[Pair, list[ShardLayout]]]:
        """The orders in which other values lie."""
        return [
            (pair, [
                ordered(layout, dim, order)
                for layout in pair.layouts if layout.order is None and not layout.is_partial
                for dim in sorted({dim for dim in layout.dims if dim is not None})
                for order in self.orders.get((pair.point.shape[dim], parts_of(layout, dim)), ())
            ])
            for pair in pairs
        ]  # fmt: skip

    def _fitting(self, wanted: list[tuple[Pair, list[ShardLayout]]]) -> Iterator[tuple[int, Point]]:
        """How each fits the likeliest of its layouts, by the pair's identity as an object."""
        wanted = [(pair, layouts) for pair, layouts in wanted if layouts]
        for (pair, layouts), rows in zip(wanted, self._rows(wanted), strict=True):
            best = self._best(pair, rows, layouts)
            layout = next(each for each in layouts if each.words == best.layout)
            assert layout.order is not None
            dim, words, order = layout.order
            known = self.orders.setdefault((len(order), parts_of(layout, dim)), [])
            if best.agrees and pair.point.kind not in PARAMETERS and (words, order) not in known:
                known.append((words, order))
            pair.layouts.append(layout)
            yield id(pair), best

    @staticmethod
    def _rows_of(
        layout: ShardLayout, parts: dict[int, torch.Tensor], size: int
    ) -> torch.Tensor | None:
        """The marks of all rows, part after part; of copies those of the first worker."""
        first: dict[int, torch.Tensor] = {}
        for rank, part in sorted(parts.items()):
            place = layout.workers.coordinate(rank)
            at = next(p for p, d in zip(place, layout.dims, strict=True) if d is not None)
            first.setdefault(at, part)
        rows = torch.cat([first[at] for at in sorted(first)])
        return rows if len(rows) == size else None

    def _as_fused(self, again: list[tuple[Pair, Point]]) -> Iterator[tuple[Pair, Point]]:
        wanted = []
        before = {id(pair): point for pair, point in again}
        for pair, _ in again:
            layouts = [
                fused
                for layout in pair.layouts
                for fused in fused_layouts(layout, pair.point.shape, pair.shapes)
            ]
            if layouts and not pair.layouts[0].is_partial:
                wanted.append((pair, layouts))
        for (pair, layouts), rows in zip(wanted, self._rows(wanted), strict=True):
            point = self._best(pair, rows, layouts)
            plain = before[id(pair)]
            if point.agrees or 0 < len(point.ranks) < min(len(plain.ranks), len(point.rows)):
                pair.layouts += [each for each in layouts if each.words == point.layout]
                yield pair, point  # it fits, or fits on workers where the plain one does not

    def _as_sums(self, again: list[tuple[Pair, Point]]) -> Iterator[tuple[Pair, Point]]:
        """Those of which workers hold the terms; known by samples, so that nothing large moves."""
        wanted = []
        for pair, point in again:
            if sums := self._sums(pair):
                wanted.append((pair, point, sums))
        if not wanted:
            return
        taken = self.workers.samples([pair.point.theirs for pair, _, _ in wanted])
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

    def likely_layouts(self, point: Point) -> list[ShardLayout]:
        """How a value may lie that differs: in rows, and in the orders of other values."""
        pair = self.pairs[point.key]
        lies = pair.layout_named(point.layout)
        return [lies, *self._known_orders([pair])[0][1]] if lies.order is None else [lies]

    def judged_as(self, point: Point, layout: ShardLayout) -> Point:
        """How a value differs from the reference's if it lies in this layout."""
        pair = self.pairs[point.key]
        (rows,) = self._rows([(pair, [layout])])
        if layout not in pair.layouts:
            pair.layouts.append(layout)
        return as_point(self._best(pair, rows, [layout]), point)

    def terms_are_parts(self, point: Point) -> bool:
        """Whether of each element of a sum one worker has all, and the others have zeros."""
        return all(
            bool((torch.stack([part != 0 for part in team]).sum(0) <= 1).all())
            for team in self.teams(point)
        )

    def teams(self, point: Point) -> list[list[torch.Tensor]]:
        """Samples of what workers hold, in teams of those whose terms make one value."""
        (held,) = self.workers.samples([point.theirs])
        pair = self.pairs[point.key]
        layout = next((each for each in self._sums(pair) if each.words == point.layout), None)
        ranks = tuple(rank for rank in held if rank in pair.held)
        teams = [ranks] if layout is None else layout.teams(ranks)
        return [[held[rank] for rank in team] for team in teams]

    def _sums(self, pair: Pair) -> list[ShardLayout]:
        """The layouts in which workers may hold terms of a value."""
        return [s for each in copies_on(pair.layouts, self.meshes) for s in partial_layouts(each)]

    def layout_of_terms(self, pair: Pair) -> ShardLayout:
        """Over which workers a value is summed, if they hold terms of it."""
        near = self._nearer.get(pair.identity)
        sums = self._sums(pair)
        named = (each for each in sums if near is not None and each.words == near.layout)
        return next(named, sums[0])

    def shown_as_sums(self, points: Sequence[Point], first: Point | None) -> list[Point]:
        """Show terms that sum up to nearly the reference's as a sum.

        Each of them is far from the whole, which is no difference. Of the `first` difference the
        sum must be off by far less.
        """
        return [
            self._as_sum(point, _NEARLY if first is not None and point.key == first.key else 1.0)
            for point in points
        ]

    def _as_sum(self, point: Point, times: float) -> Point:
        """A value that differs as the sum of the workers' terms, if that is off by so much less."""
        pair = self.pairs.get(point.key)
        if pair is None or point.agrees or point.problem:
            return point
        near = self._nearer.get(pair.identity)
        if near is None or near.relative > times * point.relative:
            return point
        return as_point(near, point)

    # -- rounding ------------------------------------------------------------------------------

    def may_be_rounding(self, point: Point) -> bool:
        """Whether numbers that are rounded differ by more than their dtype's usual tolerance."""
        if point.problem or point.agrees or self.rtol is not None or self.atol is not None:
            return False
        if point.kind in PARAMETERS and not point.gradient:
            return False
        return "float" in point.dtype

    def judged_by_noise(self, point: Point, noise: Noise) -> Point:
        """The point with what rounding makes of the reference; if it is no more it agrees."""
        if point.rows and "float" in point.dtype:
            point = replace(point, rounding=noise.of(point.key, lambda whole: whole)[1])
        if not self.may_be_rounding(point) or not point.rows:
            return point
        pair = self.pairs[point.key]
        nearer = self._nearer.get(pair.identity)
        for judged in (point, *([as_point(nearer, point)] if nearer is not None else [])):
            layout = next((lay for lay in pair.layouts if lay.words == judged.layout), None)
            if judged.partial or layout is None:  # a sum: it was compared as a whole
                rounds = all(
                    _is_rounding(row, noise, point.key, None) for row in judged.rows.values()
                )
            else:
                rounds = all(
                    _is_rounding(row, noise, point.key, partial(layout.part_of, rank=rank))
                    for rank, row in judged.rows.items()
                )
            if rounds:
                return replace(judged, agrees=True, ranks=(), unlike=False, rounding=point.rounding)
        return point

    def _judged_sum(self, pair: Pair, layout: ShardLayout, parts: dict[int, torch.Tensor]) -> Point:
        """Compare the sums of samples with the reference's."""
        whole = self.ours.value(pair.point.key)
        rows: dict[int, Row] = {}
        teams = layout.teams(tuple(parts))
        for team in teams:
            total = torch.stack([parts[rank] for rank in team]).sum(0)
            if "avg" in layout.partial:
                total = total / len(team)
            expected = layout.part_of(whole, team[0])
            size = expected.numel()
            row = difference(total, sample(expected, MOST_SAMPLES), pair.tolerance)
            if row["place"] is not None and size > MOST_SAMPLES:
                row["place"] = int(sample_places(size, MOST_SAMPLES)[row["place"]])
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

    def _rows(self, wanted: list[tuple[Pair, list[ShardLayout]]]) -> list[dict[int, list[Row]]]:
        """Have the workers compare; for each pair the rows of each worker, one for each layout."""
        found: list[dict[int, list[Row]]] = []
        for batch in self._batches(wanted):
            jobs = [
                (
                    pair.point.theirs, pair.point.key, pair.point.shape,
                    [layout.plain for layout in layouts],
                    (pair.tolerance.rtol, pair.tolerance.atol, pair.tolerance.noise),
                )
                for pair, layouts in batch
            ]  # fmt: skip
            sent = self._send(batch) if self._far else None
            answers = self.workers.measure(self.token, jobs, sent)
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
        parts: dict[int, list[torch.Tensor | None]] = {rank: [] for rank in self._far}
        for rank, values in parts.items():
            for pair, layouts in batch:
                value = self.ours.value(pair.point.key)
                if rank in pair.held and len(layouts) == 1:
                    value = layouts[0].part_of(value, rank)
                values.append(value.cpu().contiguous() if rank in pair.held else None)
        return self.workers.send(parts)


def _is_nearer(point: Point, plain: Point) -> bool:
    """Whether a value that differs is as the reference's in a known order, at least as much."""
    over, over_plain = (sum(row["over"] for row in p.rows.values()) for p in (point, plain))
    off, off_plain = (sum(row["rms"] for row in p.rows.values()) for p in (point, plain))
    return bool(over <= over_plain and off <= 1.1 * off_plain)


def _is_rounding(row: Row, noise: Noise, key: str, part: Any) -> bool:
    if not row["over"]:
        return True
    if not math.isfinite(row["max_abs"]):
        return False
    rms, most = noise.of(key, part or (lambda whole: whole))
    return bool(row["rms"] <= TIMES * rms and row["max_abs"] <= TIMES * most)


def _next_call(key: str) -> str:
    """The key of the same value in a module's second call; of none for no key."""
    kind, _, rest = key.partition("|")
    name, _, leaf = rest.partition("|")
    return f"{kind}|{name}#2|{leaf}"


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


# -- how a value may lie ---------------------------------------------------------------------------


def _layouts_of(
    shape: Shape,
    shapes: dict[int, Shape],
    held: dict[int, Fact],
    given: ShardLayout | None,
    meshes: Sequence[Workers],
    num_workers: int,
) -> tuple[list[ShardLayout], str]:
    """The layouts that a value may have, the likeliest first; or why there is none."""
    if not held:
        return [], "no worker has it"
    if given is not None:
        return _stated(given, shape, shapes, "the given layout")
    said = {rank: fact[4] for rank, fact in held.items() if fact[4] is not None}
    if said:
        stated = {repr(each): each for each in said.values()}
        if len(stated) > 1 or len(said) < len(held):
            return [], "DTensors of the workers disagree about their layout"
        layout = _layout_of_dtensor(next(iter(stated.values())), num_workers)
        if isinstance(layout, str):
            return [], layout
        return _stated(layout, shape, shapes, "the DTensor's layout")
    layouts = infer_layouts(shape, shapes, meshes)
    if layouts:
        return layouts, ""
    return [], f"{NO_LAYOUT}: {_held_words(shapes)}, reference {_shape(shape)}"


def _stated(
    layout: ShardLayout, shape: Shape, shapes: dict[int, Shape], who: str
) -> tuple[list[ShardLayout], str]:
    if layout.fits(shape, shapes):
        return [layout], ""
    try:
        wanted = {rank: layout.cut(shape, rank) for rank in shapes}
    except ArgumentError as error:
        return [], str(error)
    want = {rank: part.shape for rank, part in wanted.items() if part is not None}
    return [], (
        f"{who} {layout.words} of {_shape(shape)} gives {_held_words(want)}, "
        f"the workers hold {_held_words(shapes)}"
    )


def _layout_of_dtensor(said: Sequence[Any], num_workers: int) -> ShardLayout | str:
    """The layout that a DTensor states, or why it can't be followed."""
    placements, sizes, ranks, _ = said
    if tuple(ranks) != tuple(range(num_workers)):
        return f"a DTensor on a mesh of workers {', '.join(map(str, ranks))}"
    try:
        layout = layout_of(placements)
    except UnknownPlacementError as error:
        return f"a DTensor with placement {error.kind}"
    return ShardLayout(layout, Workers(tuple(sizes)), "DTensor")


def _shape(shape: Shape) -> str:
    return format_shape(list(shape))


def _held_words(shapes: Mapping[int, Shape]) -> str:
    groups: dict[Shape, list[int]] = {}
    for rank, shape in shapes.items():
        groups.setdefault(shape, []).append(rank)
    if len(groups) == 1 < len(shapes):
        return f"{_shape(next(iter(groups)))} on each worker"
    return ", ".join(
        f"{_shape(shape)} on {format_workers(ranks)}" for shape, ranks in groups.items()
    )


# -- gradients that are averages -------------------------------------------------------------------


def _count_of_parts(layout: ShardLayout, only: int | None) -> int:
    """The parts that a layout makes, of a certain dim only or of any."""
    cuts = zip(layout.dims, layout.workers.sizes, strict=True)
    return prod(size for dim, size in cuts if dim is not None and only in (None, dim))


@contextmanager
def _scaled_gradients(
    ours: Side, factor: float, of_parameters: bool
) -> Iterator[Callable[[], None]]:
    """Multiply gradients of the reference; they are put back unless the function is called."""
    entries = [e for e in ours.recorder.entries.values() if e.gradient.value is not None]
    parameters = {id(e.gradient) for e in entries if e.kind == "parameter"}  # a note may be one
    scaled = {
        id(e.gradient): e.gradient
        for e in entries
        if (id(e.gradient) in parameters) is of_parameters
    }
    kept: list[bool] = []
    gradients = list(scaled.values())
    values = [gradient.value for gradient in gradients]
    try:
        for gradient, value in zip(gradients, values, strict=True):
            assert value is not None
            gradient.value, gradient.factor = value * factor, factor
        yield lambda: kept.append(True)
    finally:
        if not kept:
            for gradient, value in zip(gradients, values, strict=True):
                gradient.value, gradient.factor = value, 1.0


def _differs(point: Point) -> bool:
    return not point.problem and (not point.agrees or point.ends_unsummed)


def _is_whole(point: Point) -> bool:
    """Whether each worker has the reference's value: a mean over parts may come before it."""
    whole = point.agrees and not point.problem and not point.partial
    return whole and point.kind != "parameter" and "Shard" not in point.layout


def _first_fits(before: Sequence[Point], after: Sequence[Point]) -> bool:
    """Whether the gradient nearest the loss that fits one way only fits the new way.

    Later ones may be wrong for another reason.
    """
    for one, other in zip(before, after, strict=True):
        if one.kind != "parameter" and _differs(one) != _differs(other):
            return _differs(one)
    return False


def _most_fit(before: Sequence[Point], after: Sequence[Point]) -> bool:
    """Whether more parameters' gradients fit the new way only than the old way only."""
    gained = 0
    for one, other in zip(before, after, strict=True):
        if one.kind == "parameter":
            gained += int(_differs(one)) - int(_differs(other))
    return gained > 0
