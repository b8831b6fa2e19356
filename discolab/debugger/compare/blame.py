"""Which difference comes first, where in the program that is, and the evidence for its cause.

On the controller, after all was measured. A value of which workers hold terms is as it should be
in the middle of a program; where the next whole value differs from worker to worker, or the
program ends, the sum was forgotten, and the first such term is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ...views.formats import format_workers
from . import remote
from .causes import causes_of, missing_sum
from .gathering import TERMS_BEFORE, Seen, gather
from .judging import Judge, Pair
from .results import Finding, Point

_LARGE = 0.1  # of a typical element: this does not vanish by itself
_ROUNDING = 1e-4
_ONE_NUMBER = 1e-5
_UNSUMMED = 1e-2  # of a typical element: with a sum left out a shard is off by more


def first_finding(judge: Judge, seen: Seen) -> Finding | None:
    """The first difference, in the order of the reference's program; None if there is none."""
    for points in (seen.parameters, seen.points, seen.gradients):
        for number, point in enumerate(points):
            if not _wrong(point) or rejoined(points, number) is not None:
                continue
            earlier = _unsummed(judge, points, number) if _may_lack_sum(points, number) else None
            found = point if earlier is None else points[earlier]
            place = number if earlier is None else earlier
            return _finding(judge, seen, points, place, found, earlier is not None)
    return None


def _wrong(point: Point) -> bool:
    if point.problem:
        return not point.agrees or (point.kind == "result" and not point.gradient)
    return not point.agrees or ends_unsummed(point)


def rejoined(points: Sequence[Point], number: int) -> Point | None:
    """Where a program agrees again that did something in another way, as to add a bias later.

    That is the output of a module around it, or the result; in backward the gradient of an input.
    What is off by little may agree again because the tolerance is wider than that: it must come
    down to rounding.
    """
    point = points[number]
    ends = ["parameter", "buffer", "argument" if point.gradient else "result"]
    if not point.gradient:
        ends.append("note")  # named by the user: it should be the same
    if point.problem or point.agrees or point.kind in ends:
        return None
    for later in points[number + 1 :]:
        if later.problem or not later.agrees or later.partial or not _around(later, point):
            continue
        if "float" not in later.dtype and "complex" not in later.dtype:
            continue  # as an argmax, which is often the same for others
        if later.size == 1:  # as a loss, which many differences leave nearly as it was
            if later.relative <= _ONE_NUMBER * point.relative:
                return later
        elif point.relative > _LARGE or later.relative <= _ROUNDING * point.relative:
            return later
    return None


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


def ends_unsummed(point: Point) -> bool:
    """Whether the program leaves terms where nothing comes that could sum them."""
    ends = point.kind == "result"
    if point.gradient:
        ends = point.kind in ("parameter", "argument")
    return point.partial and point.source == "inferred" and ends


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


def _unsummed(judge: Judge, points: Sequence[Point], number: int) -> int | None:
    """The first of the terms that lead up to a difference, if there are any."""
    found = None
    for place in range(number - 1, -1, -1):
        point = points[place]
        if point.problem or (point.kind in ("parameter", "buffer") and not point.gradient):
            continue
        if point.partial and point.source == "inferred":
            found = place
        elif "Shard" not in point.layout:
            break
    if found is None and points[number].gradient:  # one of several modules that a value goes to
        entries = judge.ours.tape.entries
        held = entries[points[number].key.removesuffix(".grad")].held.number
        for place, point in enumerate(points[:number]):
            entry = entries[point.key.removesuffix(".grad")]
            same = entry.kind == "input" and entry.held.number == held
            if same and point.partial and point.source == "inferred":
                return place
    return _added_unsummed(judge, points, number) if found is None else found


def _added_unsummed(judge: Judge, points: Sequence[Point], number: int) -> int | None:
    """The terms that were added to something else: they are off by as much as what came of it."""
    wrong = points[number]
    terms = [
        place for place, p in enumerate(points[:number])
        if p.partial and p.source == "inferred" and not p.problem and p.shape == wrong.shape
    ][-TERMS_BEFORE:]  # fmt: skip
    if not terms or wrong.layout.count("Shard"):
        return None
    taken = judge.samples([wrong.theirs, *(points[place].theirs for place in terms)])

    def off(point: Point, held: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        expected = remote.sample(judge.ours.value(point.key), remote.MOST_SAMPLES)
        return {r: part - expected for r, part in held.items() if part.shape == expected.shape}

    gone = off(wrong, taken[0])
    near = 1e-3 * max((float(gap.abs().max()) for gap in gone.values()), default=0.0)
    for place, held in zip(terms, taken[1:], strict=True):
        other = off(points[place], held)
        if other and all(bool(((gone[r] - g).abs() <= near).all()) for r, g in other.items()):
            return place
    return None


def _finding(
    judge: Judge, seen: Seen, points: Sequence[Point], number: int, point: Point, unsummed: bool
) -> Finding:
    causes: list[str] = []
    if point.problem:
        place = "" if not point.agrees else "what the program gives can't be compared"
        return Finding(point, (point.problem,), place)
    pair = seen.pairs[point.key]
    own = [words for path in _near_modules(point) for words in seen.settings(path)]
    if unsummed or (point.partial and point.agrees):
        causes.append(missing_sum(point.gradient, point.kind == "parameter"))
        point = replace(point, ranks=tuple(sorted(pair.held)), agrees=False)
    else:
        causes += _dtypes(pair)
        evidence = gather(judge, seen, points, number, pair, point)
        if evidence is not None:
            causes += causes_of(evidence)
    return Finding(point, (*own, *causes), _place(points, number, point, unsummed))


def _near_modules(point: Point) -> list[str]:
    """The modules whose settings may matter."""
    if point.kind in ("note", "argument", "result"):
        return []
    path = point.module.split("#")[0]
    return [path.rpartition(".")[0]] if point.kind == "parameter" else [path]


def _dtypes(pair: Pair) -> Iterator[str]:
    """Workers that hold another dtype than the others."""
    groups: dict[str, list[int]] = {}
    for rank, fact in pair.held.items():
        groups.setdefault(str(fact[2]), []).append(rank)
    if len(groups) > 1:
        words = ", ".join(f"{format_workers(ranks)} {dtype}" for dtype, ranks in groups.items())
        yield f"dtypes differ: {words}; the reference {pair.point.dtype}"


# -- place -----------------------------------------------------------------------------------------


def _place(points: Sequence[Point], number: int, point: Point, unsummed: bool) -> str:
    """What is known of where in the program a value goes wrong."""
    if point.kind in ("parameter", "buffer") and not point.gradient:
        return "before the program ran: the model was made or loaded wrongly"
    before = [p for p in points[:number] if not p.problem and p.kind not in ("buffer",)]
    agreeing = [p for p in before if p.agrees and p.kind != "parameter"]
    inner = f"{point.module}." if point.module else ""
    inside = [p for p in before if p.module.startswith(inner) and p.module != point.module]
    inputs = [p for p in before if p.module == point.module and p.kind == "input"]
    if point.gradient:
        return _place_of_gradient(before, point)
    if point.kind == "output" and unsummed and not inside:
        return (
            "its input agrees: nothing adds its terms up, at the end of "
            f"{point.module or 'the model'}.forward or behind it"
        )
    if point.kind == "output" and inputs and all(p.agrees for p in [*inputs, *inside]):
        if not inside:
            return f"its input agrees: it goes wrong inside {point.module or 'the model'}"
        last = agreeing[-1]
        return (
            f"all inside agrees up to the {last.words}: it goes wrong behind that, in "
            f"{point.module or 'the model'}.forward"
        )
    if not agreeing:
        return "nothing before it was compared"
    return f"last that agrees: the {agreeing[-1].words}; it goes wrong behind that"


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
