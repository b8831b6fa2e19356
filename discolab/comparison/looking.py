"""Looks into a module where something goes wrong, operation by operation, for the cause.

On the controller's thread. Both sides run forward once more (operations.py); their operations are
matched and compared like values, and diagnosed by the same rules (diagnose.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..layouts.layout import ShardLayout
from ..views.formats import format_workers
from .arguments import GivenLayouts
from .diagnose import Compared, first_divergence, known_causes, other_ways
from .matcher import Matcher
from .operations import (
    Operation,
    OperationRecorder,
    goes_on_alone,
    match_operations,
    mixed_parts,
    only_there,
    other_operations,
    settled,
    sources,
)
from .pairs import Names
from .results import Finding, Point
from .rounding import measure_noise
from .sides import Side, WorkerSides, hold, on_shelf

_NO_BACKWARD = None
_MOST = 4  # operations that are named


class Operations:
    """The operations in the module where `first` is, on both sides."""

    def __init__(self, ours: Side, workers: WorkerSides, matcher: Matcher, first: Finding) -> None:
        self.workers, self.matcher, self.first = workers, matcher, first
        self.window = _window(first.point)
        self.side = ours.looking_into(self.window)
        self.can_run = ours.can_run_again
        ours.restore()

    def explained(
        self, compared: Compared, given: Any, seed: int, cuts: dict[str, ShardLayout]
    ) -> Finding:
        """What was found, with what the operations say of the cause."""
        if not self.can_run or "float" not in self.first.point.dtype:  # of floats alone
            return self.first
        args, kwargs = given
        try:
            self.side.forward(args, kwargs, seed)
        except Exception:  # the reference itself has run: what fails is to look into it
            return self.first
        finally:
            self.side.restore()
        recorder = self.side.recorder
        assert isinstance(recorder, OperationRecorder)
        rename = self.matcher.names.rename
        inputs = self.workers.call(hold, args, kwargs)
        workers = self.workers.looking_into(
            rename(self.window, "output") if self.window else "", inputs, seed, cuts
        )
        known = [each for each in workers.operations() if each is not None]
        theirs = [operations for operations, _, _ in known]
        if not recorder.operations or len(theirs) < self.matcher.num_workers:
            return self.first
        names = match_operations(recorder.operations, theirs)
        facts = workers.rename_operations(names)
        with on_shelf(self.side) as token:
            matcher = Matcher(
                self.side, workers, token, Names(None), GivenLayouts({}, self.matcher.meshes),
                (self.matcher.rtol, self.matcher.atol), self.matcher.meshes,
            )  # fmt: skip
            matcher.orders = self.matcher.orders
            points = matcher.compare_operations(facts)
            noise = measure_noise(self.side, args, kwargs, seed, _NO_BACKWARD)
            if noise is not None:
                points = [matcher.judged_by_noise(point, noise) for point in points]
            calls = _calls_of_both(recorder.calls, [each for _, _, each in known], names)
            points = settled(points, calls, self._agreeing_calls(compared))
            points = sources(points, recorder.parents)
            found = first_divergence(
                matcher,
                Compared([p for p in compared.parameters if p.agrees], points, []),
                self.first.point,
            )
            if found is None:
                return self.first
            whole = {p.module for p in compared.parameters if "Shard" not in p.layout}
            causes = self._rearranged(matcher, points, found, whole)
            lines = _lines(theirs, names, found.ranks)
            others = self._others(other_operations(recorder.operations, theirs), points, found)
            if others:
                return replace(self.first, causes=(*others, *causes, *self.first.causes))
            line = lines.get(found.module, "")
            where = f"{found.point.words}{f' at {line}' if line else ''}"
            causes = causes or [f"{where}: {cause}" for cause in known_causes(found)]
        rank = min(found.ranks, default=0)
        if not causes and goes_on_alone(theirs[rank], names[rank], found.module):
            return self.first  # what workers alone do next may make up for it
        between = only_there(theirs[rank], names[rank], found.module)
        place = f"{self.first.place}; {_where(where, between)}"
        return replace(self.first, causes=(*causes, *self.first.causes), place=place)

    def _agreeing_calls(self, compared: Compared) -> set[str]:
        """The calls of modules inside the window of which all that comes out is in order."""
        outputs = [p for p in compared.points if p.kind == "output" and p.module != self.window]
        otherwise = compared.by_design | other_ways(compared)
        wrong = {
            p.module for p in outputs
            if p.problem or not (p.agrees or p.key in otherwise)
        }  # fmt: skip
        return {p.module for p in outputs} - wrong

    @staticmethod
    def _rearranged(
        matcher: Matcher, points: list[Point], found: Finding, whole: set[str]
    ) -> list[str]:
        """`whole`: the parameters that are not split, which nobody has mixed."""
        recorder = matcher.ours.recorder
        assert isinstance(recorder, OperationRecorder)
        known = {point.key: point for point in points}
        for key in recorder.parents.get(found.point.key, ()):
            parent = known.get(key)
            if parent is not None and parent.agrees and not parent.problem:
                layout = matcher.pairs[key].layout_named(parent.layout)
                weights = recorder.weights.get(key, ())
                if whole.intersection(weights):
                    return []
                if words := mixed_parts(found.point, parent, layout, weights):
                    return [words]
        return []

    @staticmethod
    def _others(
        others: list[tuple[str, str, str, list[int]]], points: list[Point], found: Finding
    ) -> list[str]:
        """Another operation on some workers, between what agrees and what differs."""
        end = _number(found.point.module)
        words = []
        for label, name, line, ranks in others:
            harmless = any(
                _number(label) < _number(p.module) < end and p.agrees and not p.problem
                and not p.partial and set(ranks) <= set(p.rows)
                for p in points
            )  # fmt: skip
            if _number(label) <= end and not harmless and set(found.ranks) >= set(ranks):
                usual = label.partition(":")[2]
                words.append(
                    f"{format_workers(ranks)}: {name} at {line}, where the reference and the "
                    f"others have {usual}"
                )
        return words


def _calls_of_both(
    ours: Mapping[str, Sequence[str]],
    theirs: Sequence[Mapping[str, Sequence[str]]],
    names: Sequence[Mapping[str, str]],
) -> dict[str, set[str]]:
    """By the reference's key, the calls around an operation: there, and around its like on workers.

    Of two that are not in the same call one may be another operation of the same name.
    """
    found = {key: set(calls) for key, calls in ours.items()}
    for each, labels in zip(theirs, names, strict=True):
        for key, calls in each.items():
            kind, label, leaf = key.split("|")
            found.setdefault(f"{kind}|{labels.get(label, '')}|{leaf}", set()).update(calls)
    return found


def _where(where: str, between: list[Operation]) -> str:
    """Which operation is the first that differs; of both sides, if workers run others before it."""
    if not between:
        return f"the first operation that differs: {where}"
    words = list(dict.fromkeys(f"{name} at {line}" if line else name for _, name, line in between))
    told = ", ".join(words[-_MOST:])
    more = f"{len(words) - _MOST} more, " if len(words) > _MOST else ""
    return (
        f"of the operations that both run the first that differs: {where}; before it the workers "
        f"alone run {more}{told}"
    )


def _lines(
    theirs: list[list[Operation]], names: list[dict[str, str]], ranks: tuple[int, ...]
) -> dict[str, str]:
    """Where a worker that differs runs each operation, by the reference's label."""
    rank = min(ranks, default=0)
    labels = names[rank]
    return {
        labels[label]: line
        for key, _, line in theirs[rank]
        if (label := key.partition("|")[2]) in labels
    }


def _number(label: str) -> int:
    return int(label.partition(":")[0])


def _window(point: Point) -> str:
    """The call inside which a value goes wrong."""
    if point.kind in ("result", "note"):
        return ""
    if point.kind == "output":
        return point.module
    return point.module.split("#")[0].rpartition(".")[0]
