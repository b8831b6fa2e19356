"""What a program gives on some workers and not on others, or otherwise than the reference. Pure.

A stage of a pipeline has and runs a part of the model only, which is no difference. Of a worker
that ran all that the others ran, what is missing is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..views.formats import format_workers
from .pairs import FactsByKey, Pair, is_number
from .results import Point

PlainValues = Mapping[str, tuple[str, str]]
"""By key: ``value`` and its repr, or ``type`` and its name."""

_MOST = 3


@dataclass
class Presence:
    """Which worker has run what, and what could not be compared for that."""

    num_workers: int
    modules: list[dict[str, tuple[Any, ...]]] = field(default_factory=list)  # of each worker
    ran: list[set[str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    plain: int = 0  # values that are no tensors and the same
    no_result: set[int] = field(default_factory=set)  # stages from which no backward can start

    def learn(self, held: FactsByKey) -> None:
        """Take in what the workers have of forward."""
        self.ran = [set() for _ in range(self.num_workers)]
        for key, facts in held.items():
            kind, name, _ = key.split("|")
            if kind == "output":
                for rank in facts:
                    self.ran[rank].add(name)

    def is_stage(self, rank: int) -> bool:
        """Whether a worker ran less than all workers together."""
        return bool(self.ran) and self.ran[rank] != set().union(*self.ran)

    # -- tensors -------------------------------------------------------------------------------

    def without_tokens(self, point: Point, held: FactsByKey, key: str) -> None:
        """Leave out the tensors without a dimension that stages give, as `send` makes them."""
        facts = held.get(key, {})
        tokens = [rank for rank, fact in facts.items() if tuple(fact[1]) == ()]
        if point.kind != "result" or point.shape == () or len(tokens) == len(facts):
            return
        held[key] = {rank: fact for rank, fact in facts.items() if rank not in tokens}

    def judged(self, points: list[Point], pairs: Mapping[str, Pair]) -> list[Point]:
        """The points, with those that are missing where they should not be."""
        return [self._judged(point, pairs) for point in points]

    def _judged(self, point: Point, pairs: Mapping[str, Pair]) -> Point:
        pair = pairs.get(point.key)
        if pair is None:
            return point
        if point.gradient:
            return self._judged_gradient(point, pair, pairs)
        absent = [rank for rank in range(self.num_workers) if rank not in pair.held]
        if not absent or not pair.held or point.kind not in ("result", "note"):
            return point
        who = format_workers(absent)
        if point.kind == "note" or all(self.is_stage(rank) for rank in absent):
            self.skipped.append(f"{who} {_have(absent)} no {point.words}")
            if point.kind == "result":
                self.no_result.update(absent)
            return point
        kept = "the others' agrees" if point.agrees else "the others' differs too"
        problem = f"{who} {_have(absent)} none, {kept}"
        return replace(point, problem=problem, agrees=False, ranks=tuple(absent))

    def _judged_gradient(self, point: Point, pair: Pair, pairs: Mapping[str, Pair]) -> Point:
        of = pairs.get(point.key.removesuffix(".grad"))
        if point.kind not in ("parameter", "result") or of is None or not of.held:
            return point
        owner = (of.point.theirs or of.point.key).split("|")[1].rpartition(".")[0]
        absent = [
            rank for rank in of.held
            if rank not in pair.held and rank not in self.no_result
            and not (self.is_stage(rank) and owner not in self.ran[rank])
        ]  # fmt: skip
        if not absent:
            return point
        problem = f"{format_workers(absent)} {_have(absent)} no gradient of it"
        return replace(point, problem=problem, agrees=False, ranks=tuple(absent))

    def not_run(self, calls: Mapping[str, str], ranks: Sequence[int]) -> str:
        """Which modules workers that differ did not run, though they have them and others did.

        Not what one of those that differ has run: experts are dealt to workers, each runs its own.

        Parameters
        ----------
        calls
            By the workers' name, the type of the module in the reference: of those that it runs
            before the difference and after all that agrees.
        """
        told: dict[str, list[int]] = {}
        ran = set().union(*self.ran) if self.ran else set()
        for name, kind in calls.items():
            path = name.split("#")[0]
            if name not in ran or any(name.startswith(f"{n}.") for n in told):
                continue
            idle = [
                r for r in ranks
                if name not in self.ran[r] and self.modules[r].get(path, ("",))[0] == kind
            ]  # fmt: skip
            if len(idle) == len(ranks) and name:
                told[name] = idle
        words = [f"{format_workers(idle)} did not run {name}" for name, idle in told.items()]
        return "; ".join(words[:_MOST])

    # -- what is no tensor ---------------------------------------------------------------------

    def other_values(
        self,
        ours: PlainValues,
        theirs: Sequence[PlainValues],
        held: FactsByKey,
        rename: Callable[[str, str], str],
    ) -> Iterator[Point]:
        """Points for what the reference gives that is no tensor, where the workers' is another."""
        for key, (what, words) in ours.items():
            kind, name, leaf = key.split("|")
            other = f"{kind}|{rename(name, kind)}|{leaf}"
            point = Point(kind, name, leaf, False, (), words, key, other, agrees=False)
            if what == "type":
                self.skipped.append(f"{point.words}: {_a(words)} is not looked into")
                continue
            groups: dict[str, list[int]] = {}
            for rank, each in enumerate(theirs):
                _, there = each.get(other, ("", "None" if words == "None" else "nothing"))
                if rank in held.get(other, {}):
                    there = "a number" if is_number(held[other][rank]) else "a tensor"
                if there != words:
                    groups.setdefault(there, []).append(rank)
            if not groups:
                self.plain += words != "None"
                continue
            told = ", ".join(f"{format_workers(r)} {_give(r)} {w}" for w, r in groups.items())
            ranks = tuple(sorted(rank for each in groups.values() for rank in each))
            yield replace(point, problem=f"the reference gives {words}, {told}", ranks=ranks)

    def tell_parameters(self, pairs: Mapping[str, Pair]) -> None:
        """Tell of parameters and buffers that workers do not have, though they have the module."""
        missing: dict[tuple[int, ...], list[str]] = {}
        for pair in pairs.values():
            point = pair.point
            if point.kind not in ("parameter", "buffer") or point.gradient or not pair.held:
                continue
            owner = point.theirs.split("|")[1].rpartition(".")[0]
            ranks = tuple(
                rank for rank, known in enumerate(self.modules)
                if rank not in pair.held and owner in known
            )  # fmt: skip
            if ranks:
                missing.setdefault(ranks, []).append(point.words)
        for ranks, words in missing.items():
            if not all(self.is_stage(rank) for rank in ranks):
                self.skipped.append(f"{format_workers(ranks)} {_have(ranks)} no {_few(words)}")

    def tell_rest(
        self,
        ours: Iterable[str],
        keys: Iterable[str],
        matched: set[str],
    ) -> None:
        """Tell of what is only on workers: calls, results; and which worker did not run what.

        Parameters
        ----------
        ours
            The calls of the reference, by the workers' names.
        keys
            All that the workers have; `matched` has what was compared.
        """
        every = sorted(set().union(*self.ran)) if self.ran else []
        missing: dict[tuple[tuple[int, ...], bool], list[str]] = {}
        for name in every:
            path = name.split("#")[0]
            absent = [rank for rank in range(self.num_workers) if name not in self.ran[rank]]
            for has in (True, False):
                ranks = tuple(rank for rank in absent if (path in self.modules[rank]) == has)
                if ranks:
                    missing.setdefault((ranks, has), []).append(name)
        for (ranks, has), names in missing.items():
            tops = [n for n in names if not any(n.startswith(f"{m}.") for m in names)]
            did = "did not run" if has else f"{_have(ranks)} no"
            self.skipped.append(f"{format_workers(ranks)} {did} {_few(tops)}")
        known = set(ours)
        calls = [n for n in every if "#" in n and n not in known and n.split("#")[0] in known]
        if calls:
            self.skipped.append(f"the reference does not call {_few(calls)}, the workers do")
        extra = [key for key in keys if key not in matched and key.startswith("result|")]
        extra = [key.split("|")[2] for key in extra if not key.endswith(".grad")]
        if extra:
            self.skipped.append(f"only on the workers: result {_few([f'({e})' for e in extra])}")


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(name or "the whole model" for name in names[:_MOST]) + more


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _give(ranks: Sequence[int]) -> str:
    return "gives" if len(ranks) == 1 else "give"


def _a(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
