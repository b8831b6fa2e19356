"""Since which cell the workers' variables differ, hold NaN, or are not there, for `explain`.

What matters comes first: what the lines that failed read, then of what that was made, then what
changed shortly before. Of all other variables one line is told at most, and none of which an
earlier failure has told.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..runtime.failures import name_ranks
from ..runtime.sources import is_cell, place
from .fingerprints import GONE, RANDOM, UNREAD, Entry, Print
from .frames import GIVEN
from .reads import distances, is_set, read_at, root_of, tree_of

_MOST_DIFFERENCES = 3
_MOST_NAMES = 3
_RECENT, _OLD = 100, 200  # weights of what the lines that failed do not read
_USES = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Call)
_RANKS = ("rank", "get_rank", "get_local_rank", "local_rank", "global_rank")
_SEEDS = {"manual_seed", "manual_seed_all", "seed"}  # called with the rank, each is to draw its own

Values = dict[int, dict[str, Print]]
"""By rank and name."""
Asked = Callable[[Sequence[str]], Mapping[int, dict[str, Print] | None]]
"""What variables are now, by rank; None of a worker that may be writing to them."""


@dataclass(frozen=True)
class Fact:
    """One thing that is known.

    Attributes
    ----------
    text
        ``worker 1 raised ValueError: x``.
    place
        ``Cell In[3], line 4``; "" if it has none.
    sure
        Whether it was recorded; else it is inferred, and says "perhaps".
    """

    text: str
    place: str = ""
    sure: bool = True


@dataclass(frozen=True)
class Failing:
    """What failed, as far as it says which variables matter.

    Attributes
    ----------
    call
        Its ordinal.
    file
        Of the cell.
    lines
        ``(file, line)`` at which it failed.
    apart
        Whether it failed on some of the workers only.
    missing
        The names that were not defined, and on which workers.
    before
        The calls that had failed before.
    """

    call: int
    file: str = ""
    lines: tuple[tuple[str, int], ...] = ()
    apart: bool = False
    missing: Mapping[str, Sequence[int]] = field(default_factory=dict)
    before: tuple[int, ...] = ()


@dataclass(frozen=True)
class Records:
    """What is recorded of each worker, by rank: entries, its last cell, when it was restarted."""

    entries: Mapping[int, Sequence[Entry]]
    last: Mapping[int, int]
    joined: Mapping[int, int]


@dataclass(frozen=True)
class Moment:
    """What each worker's variables were after a cell; `file` is "" for what they are now."""

    ordinal: int
    file: str
    values: Values


def differing(records: Records, ask: Asked, failing: Failing | None) -> list[Fact]:
    """What is to be told of the variables, the most important first."""
    moments = _timeline(records.entries)
    if not moments:
        return []
    direct = {name for line in (failing.lines if failing else ()) for name in read_at(*line)}
    direct -= GIVEN
    files = [moment.file for moment in moments] + ([failing.file] if failing else [])
    far = distances(sorted(direct), dict.fromkeys(files))
    end = moments[-1].values
    names = {name for held in end.values() for name in held}
    suspect = {name for name in names if len(_classes(end, name)) > 1 or _nan(end, name)}
    others = direct | {RANDOM} | {name for name in names if failing is None or name in far}
    found = ask([*sorted(suspect), *sorted(others - suspect)])  # there may not be time for all
    busy = [rank for rank in records.entries if found.get(rank) is None]
    if busy:  # what they have written since their last cell is not known
        until = min(records.last[rank] for rank in busy)
        moments = [moment for moment in moments if moment.ordinal <= until]
        if not moments:  # one has no record yet, as while a new worker is set up
            return []
    else:
        moments += _now(moments[-1], found, failing)
    weigh = _Weights(moments, failing, far)
    told = [*_with_nan(moments, weigh), *_differences(moments, weigh)]
    if failing is not None and failing.apart:
        told += _never_equal(moments, direct)
    told += _drawn_apart(moments, weigh)
    if busy:
        told = [(weight, _stale(fact)) for weight, fact in told]
    told.sort(key=lambda one: one[0])
    facts = [fact for weight, fact in told if weight[0] < _RECENT]
    facts += [fact for weight, fact in told if weight[0] >= _RECENT][:1]
    return [*(_missing(moments, failing, records.joined) if failing else ()), *facts]


def _stale(fact: Fact) -> Fact:
    return Fact(f"{fact.text}, perhaps no longer", fact.place, sure=False)


# -- what was when ---------------------------------------------------------------------------------


def _timeline(entries: Mapping[int, Sequence[Entry]]) -> list[Moment]:
    """After each cell what each worker's variables were."""
    cells = {ordinal: file for line in entries.values() for ordinal, file, _ in line}
    now: Values = {rank: {} for rank in entries}
    at = dict.fromkeys(entries, 0)
    moments = []
    for ordinal, file in sorted(cells.items()):
        for rank, line in entries.items():
            while at[rank] < len(line) and line[at[rank]][0] <= ordinal:
                _enter(now[rank], line[at[rank]][2])
                at[rank] += 1
        moments.append(Moment(ordinal, file, {rank: dict(held) for rank, held in now.items()}))
    return moments


def _enter(held: dict[str, Print], changed: Mapping[str, Print]) -> None:
    for name, found in changed.items():
        if found[0] == GONE:
            held.pop(name, None)
        else:
            held[name] = found


def _now(
    last: Moment, found: Mapping[int, dict[str, Print] | None], failing: Failing | None
) -> list[Moment]:
    """How the variables are at this moment, if that is not how they were after the last cell."""
    values = {rank: dict(held) for rank, held in last.values.items()}
    for rank, held in values.items():
        _enter(held, found[rank] or {})  # what can't be read now is not what it was before
    if values == last.values:
        return []
    if failing is not None and failing.call > last.ordinal:  # they stand in the cell that fails
        return [Moment(failing.call, failing.file, values)]
    return [Moment(last.ordinal + 1, "", values)]


def _classes(values: Values, name: str) -> list[list[int]]:
    """The workers by what they hold under a name, the most first; [] if that is not known."""
    found: dict[str, list[int]] = {}
    for rank, held in values.items():
        if name not in held or held[name][0] == UNREAD:
            return []
        found.setdefault(held[name][0], []).append(rank)
    return sorted(found.values(), key=lambda ranks: (-len(ranks), ranks))


def _nan(values: Values, name: str) -> list[int]:
    """On which workers a variable holds NaN."""
    return [rank for rank, held in values.items() if name in held and held[name][1]]


def _names(moment: Moment) -> list[str]:
    return sorted({name for held in moment.values.values() for name in held})


def _last_change(moments: Sequence[Moment], name: str) -> str:
    """The cell that has last changed a variable on some worker."""
    file = moments[0].file
    for before, after in itertools.pairwise(moments):
        if after.file and any(
            before.values[rank].get(name) != held.get(name) for rank, held in after.values.items()
        ):
            file = after.file
    return file


# -- what matters ----------------------------------------------------------------------------------

Weight = tuple[int, int]
"""The lower, the sooner it is told."""
Told = tuple[Weight, Fact]


class _Weights:
    """How much the variables matter."""

    def __init__(
        self, moments: Sequence[Moment], failing: Failing | None, far: Mapping[str, int]
    ) -> None:
        self._moments, self._failing, self._far = moments, failing, far
        before = [m.ordinal for m in moments if failing is not None and m.ordinal < failing.call]
        self._recent = max(before, default=-1)

    def of(self, name: str, number: int) -> Weight | None:
        """Of a variable of which there is something to tell since a moment; None: not again."""
        if self._failing is None:
            return 0, number
        ordinal = self._moments[number].ordinal
        before = self._failing.before
        is_told = any(call >= ordinal for call in before)
        is_recent = ordinal >= self._recent and not is_told
        if name in self._far or (name == RANDOM and is_recent):
            return self._far.get(name, 1), number
        if is_told:
            return None
        return (_RECENT if is_recent else _OLD), -number


# -- what is told ----------------------------------------------------------------------------------


def _differences(moments: Sequence[Moment], weigh: _Weights) -> list[Told]:
    """The variables that were equal on all workers once, and differ now: since which cell."""
    end = moments[-1].values
    since: dict[tuple[Weight, int, bool, str], list[str]] = {}
    for name in _names(moments[-1]):
        if len(_classes(end, name)) < 2:
            continue
        counts = [len(_classes(moment.values, name)) for moment in moments]
        if 1 not in counts:  # of what was never equal nobody knows whether it should be
            continue
        equal = len(counts) - 1 - counts[::-1].index(1)
        number = next(at for at in range(equal, len(counts)) if counts[at] > 1)
        weight, how = weigh.of(name, number), _in_words(_classes(moments[number].values, name))
        if weight is not None:
            since.setdefault((weight, number, number == equal + 1, how), []).append(name)
    told: list[Told] = []
    for (weight, number, sure, how), names in sorted(since.items())[:_MOST_DIFFERENCES]:
        file = moments[number].file
        if file:
            words = f"equal on all workers before, {how} since" + (
                "" if sure else ", perhaps before"
            )
            where = _place_in(file, names)
        else:  # by what is no cell, or written where it was not looked
            words = f"equal on all workers after this cell, {how} now"
            where = cell_of(_last_change(moments, names[0]))
        told.append((weight, Fact(f"{_listed(names)}: {words}", where, sure)))
    return told


def _in_words(classes: Sequence[Sequence[int]]) -> str:
    if len(classes) == 2 and len(classes[0]) > len(classes[1]):
        return f"other on {name_ranks(classes[1])}"
    return f"{len(classes)} different values"


def _never_equal(moments: Sequence[Moment], direct: Iterable[str]) -> list[Told]:
    """What the lines read that failed on some workers only, if it was never equal on all."""
    told: list[Told] = []
    for name in sorted(direct):
        classes = [_classes(moment.values, name) for moment in moments]
        if len(classes[-1]) < 2 or any(len(one) == 1 for one in classes):
            continue
        words = f"{name}: {_in_words(classes[-1])}"
        where = _place_in(_last_change(moments, name), [name])
        told.append(((0, -1), Fact(words, where)))
    return told[:_MOST_DIFFERENCES]


def _missing(moments: Sequence[Moment], failing: Failing, joined: Mapping[int, int]) -> list[Fact]:
    """Since when variables are not on some workers that others have."""
    facts = []
    for name, ranks in failing.missing.items():
        since, had = None, False
        for moment in moments:
            has = {rank for rank, held in moment.values.items() if name in held}
            if has.intersection(ranks):
                since, had = None, True
            elif not has and not had:  # they have never had it: since when others have it
                since = None
            elif since is None:
                since = moment
        if since is None:
            continue
        words = f"{name}: not on {name_ranks(ranks)} since"
        if all(joined.get(rank, 0) > since.ordinal for rank in ranks):
            words += f" {'its' if len(ranks) == 1 else 'their'} restart, made before"
        facts.append(Fact(words, cell_of(since.file or _last_change(moments, name))))
    return facts


def _with_nan(moments: Sequence[Moment], weigh: _Weights) -> list[Told]:
    """Since which cell some variable has held NaN, and on whom it did first.

    Only what held it first is told: all that is computed with it has NaN too. What was made with
    NaN on all workers may be meant so, as a mask, and is told apart.
    """
    first: dict[tuple[bool, bool], int] = {}
    found: list[tuple[tuple[bool, bool], int, Weight, str, list[int]]] = []
    for name in _names(moments[-1]):
        number = len(moments)
        while number and _nan(moments[number - 1].values, name):
            number -= 1
        weight = weigh.of(name, number) if number < len(moments) else None
        if weight is None:
            continue
        ranks = _nan(moments[number].values, name)
        before = moments[number - 1].values if number else {}
        made = not any(name in held for held in before.values())
        has = [rank for rank, held in moments[number].values.items() if name in held]
        kind = (weight[0] >= _RECENT, made and ranks == has)
        first[kind] = min(number, first.get(kind, number))
        found.append((kind, number, weight, name, ranks))
    whose: dict[tuple[Weight, int, tuple[int, ...]], list[str]] = {}
    for kind, number, weight, name, ranks in found:
        if number == first[kind]:
            whose.setdefault((weight, number, tuple(ranks)), []).append(name)
    told: list[Told] = []
    for (weight, number, whom_first), names in sorted(whose.items())[:_MOST_DIFFERENCES]:
        everywhere = len(whom_first) == sum(names[0] in h for h in moments[number].values.values())
        whom = "all workers" if everywhere else f"{name_ranks(whom_first)} first"
        file = moments[number].file
        where = _place_in(file, names) if file else cell_of(_last_change(moments, names[0]))
        told.append((weight, Fact(f"{_listed(names)}: NaN on {whom}", where)))
    return told


def _drawn_apart(moments: Sequence[Moment], weigh: _Weights) -> list[Told]:
    """Variables that were made with random numbers while the workers' random states differed."""
    ranks = list(moments[-1].values)
    if len(ranks) < 2:
        return []
    before: Values = {rank: {} for rank in ranks}
    meant = False  # a cell has given each worker a seed of its own
    for number, moment in enumerate(moments):
        values = moment.values
        states = [values[rank].get(RANDOM) for rank in ranks]
        own = _meant_to_differ(moment.file)
        meant = len(set(states)) > 1 and (meant or bool(own & _SEEDS))
        drawn = all(before[rank].get(RANDOM) not in (None, values[rank].get(RANDOM))
                    for rank in ranks)  # fmt: skip
        if drawn and len(set(states)) > 1 and not meant:
            names = [
                name
                for name in _names(moment)
                if name != RANDOM
                and len(_classes(values, name)) == len(ranks)
                and name not in own
                and any(before[rank].get(name) != values[rank].get(name) for rank in ranks)
            ]
            weights = [weight for name in names if (weight := weigh.of(name, number)) is not None]
            if names:
                words = (
                    f"{', '.join(names[:_MOST_NAMES])}: another value on each worker, perhaps made "
                    "with random numbers of its own: is torch.manual_seed(seed) missing?"
                )
                fact = Fact(words, _place_in(moment.file, names), sure=False)
                return [(min(weights), fact)] if weights else []
        before = values
    return []


def _meant_to_differ(file: str) -> set[str]:
    """The names that a cell makes of `rank`, and the functions that it calls with it."""
    called, made = set[str](), set[str]()
    nodes = [node for node in ast.walk(tree_of(file)) if isinstance(node, _USES)]
    for _ in range(2):  # once more for what is made of such a name, as by `r = dist.get_rank()`
        for node in nodes:
            inner = list(ast.walk(node))
            if not any(_is_of_rank(one, made) for one in inner):
                continue
            if isinstance(node, ast.Call):
                called.add(ast.unparse(node.func).rpartition(".")[2])
            made |= {one.id for one in inner if isinstance(one, ast.Name) and is_set(one)}
    return called | made


def _is_of_rank(node: ast.AST, made: set[str]) -> bool:
    """Whether this reads the worker's number, or what was `made` of it."""
    match node:
        case ast.Name(id):
            return id == "rank" or (id in made and not is_set(node))
        case ast.Attribute(_, attr):
            return attr in _RANKS
        case ast.Constant(value):
            return value in ("RANK", "LOCAL_RANK")
    return False


# -- in words --------------------------------------------------------------------------------------


def _listed(names: Sequence[str]) -> str:
    variables = sorted(name for name in names if name != RANDOM)
    shown = [*variables[:_MOST_NAMES], *([RANDOM] if RANDOM in names else [])]
    more = len(variables) - len(variables[:_MOST_NAMES])
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _place_in(file: str, names: Sequence[str]) -> str:
    """The line of a cell that sets all of these, if there is just one; else the cell."""
    lines: dict[str, set[int]] = {name: set() for name in names if name != RANDOM}
    for node in ast.walk(tree_of(file)):
        target: ast.AST = node
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            target = node.value.func  # a method of it, as `x.add_(1)`
        elif not is_set(node):
            continue
        root = root_of(target)
        if isinstance(root, ast.Name) and root.id in lines:
            lines[root.id].add(root.lineno)
    found = list(lines.values())
    if found and all(len(one) == 1 and one == found[0] for one in found):
        return place(file, found[0].pop())
    return cell_of(file)


def cell_of(file: str) -> str:
    """``Cell In[3]``, or the path of a file."""
    return place(file, None).partition(", line")[0] if is_cell(file) else file
