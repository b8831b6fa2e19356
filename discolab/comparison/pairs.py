"""Which values of the two sides belong together: by the paths of modules and by names. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..layouts.layout import ShardLayout
from ..runtime.errors import ArgumentError
from ..views.formats import format_workers
from .measure import EXACT, Tolerance
from .results import Point
from .sides import Fact

FactsByKey: TypeAlias = dict[str, dict[int, Fact]]
"""By key, then by rank."""


@dataclass(slots=True)
class Pair:
    """A value of the reference and what the workers hold of it.

    Attributes
    ----------
    number
        Of the reference's value: pairs of the same values are measured once.
    held
        By rank.
    layouts
        That the value may have, the likeliest first.
    """

    point: Point
    number: int
    held: dict[int, Fact]
    layouts: list[ShardLayout]
    tolerance: Tolerance = EXACT

    @property
    def shapes(self) -> dict[int, tuple[int, ...]]:
        """What each worker holds."""
        return {rank: tuple(fact[1]) for rank, fact in self.held.items()}

    @property
    def identity(self) -> tuple[Any, ...]:
        """What must be the same for the measurement to be the same."""
        numbers = tuple((rank, fact[3]) for rank, fact in self.held.items())
        return self.number, numbers, tuple(self.layouts), self.tolerance

    def layout_named(self, words: str) -> ShardLayout:
        """The layout that a point of this pair was found to have."""
        return next((each for each in self.layouts if each.words == words), self.layouts[0])


def by_key(facts: Sequence[Iterable[Fact]]) -> FactsByKey:
    """The facts of all workers by their key."""
    found: FactsByKey = {}
    for rank, each in enumerate(facts):
        for fact in each:
            found.setdefault(str(fact[0]), {})[rank] = fact
    return found


def is_number(fact: Fact) -> bool:
    """Whether a fact is of a number that is no tensor."""
    return str(fact[2]).startswith("python ")


def lone_keys(facts: Iterable[Fact]) -> set[str]:
    """The keys of what is the one tensor, or the one number, that a name has."""
    groups: dict[str, list[Fact]] = {}
    for fact in facts:
        groups.setdefault(str(fact[0]).rpartition("|")[0], []).append(fact)
    found = set()
    for group in groups.values():
        tensors = [fact for fact in group if not is_number(fact)] or group
        if len(tensors) == 1:
            found.add(str(tensors[0][0]))
    return found


class Names:
    """Finds the sharded program's key for a key of the reference.

    Parameters
    ----------
    names
        Paths of the reference to paths of the sharded model, where these differ; a path stands
        for all that is below it too.
    """

    def __init__(self, names: Mapping[str, str] | None) -> None:
        self._names = dict(names or {})
        self.used: set[str] = set()
        for path, other in self._names.items():
            if not isinstance(path, str) or not isinstance(other, str):
                raise ArgumentError(
                    "compare: names= maps paths of the reference to paths of the sharded model, "
                    f'as {{"blocks": "layers"}}; got {path!r}: {other!r}'
                )

    @property
    def given(self) -> list[str]:
        """The paths that were given."""
        return list(self._names)

    def unwrap(self, ours: Sequence[str], theirs: Sequence[str]) -> None:
        """Take the workers' model out of a wrapper, as DDP's, that has it as ``module``.

        Parameters
        ----------
        ours, theirs
            Keys of parameters.
        """
        if self._names or not ours or not theirs or set(ours) & set(theirs):
            return
        bare = {key.replace("|module.", "|", 1) for key in theirs if "|module." in key}
        if len(bare) == len(theirs) and bare & set(ours):
            self._names[""] = "module"

    def rename(self, name: str, kind: str = "") -> str:
        """The sharded model's path for a path of the reference; what is no path stays."""
        if kind in ("argument", "result", "note"):
            return name
        path, hash_sign, call = name.partition("#")
        for known in sorted(self._names, key=len, reverse=True):
            if path == known or path.startswith(f"{known}.") or not known:
                self.used.add(known)
                below = path.removeprefix(known).lstrip(".")
                parts = (self._names[known], below)
                return ".".join(filter(None, parts)) + hash_sign + call
        return name

    def find(self, key: str, held: FactsByKey, ours: set[str], theirs: set[str]) -> str | None:
        """The key among `held` that belongs to a key of the reference.

        Parameters
        ----------
        ours, theirs
            The `lone_keys` of both sides: these belong together whatever they are packed in.
        """
        gradient = key.endswith(".grad")
        kind, name, leaf = key.removesuffix(".grad").split("|")
        end = ".grad" if gradient else ""
        other = self.rename(name, kind)
        if f"{kind}|{other}|{leaf}{end}" in held:
            return f"{kind}|{other}|{leaf}{end}"
        if kind == "input" or key.removesuffix(".grad") not in ours:
            return None
        lone = [k for k in theirs if k.startswith(f"{kind}|{other}|") and f"{k}{end}" in held]
        return f"{lone[0]}{end}" if len(lone) == 1 else None


def check_some_match(ours: Sequence[str], theirs: Sequence[str], names: Names) -> None:
    """Raise if no inner module of the reference has one of its name on the workers.

    Raises
    ------
    ArgumentError
        With names that are near.
    """
    inner, others = [p for p in ours if p], [p for p in theirs if p]
    if not (inner and others):
        return
    if any(names.rename(path) in others for path in inner):
        return
    near: dict[str, str] = {}
    for path in inner[:50]:
        if any(path.startswith(f"{above}.") for above in near):
            continue  # a path stands for all below it
        last = path.rpartition(".")[2]
        found = difflib.get_close_matches(path, others, 1, 0.4)
        found = found or [other for other in others if other.rpartition(".")[2] == last][:1]
        if found:
            near[path] = found[0]
    pairs = [f'"{path}": "{other}"' for path, other in near.items()]
    hint = f"; near are names={{{', '.join(pairs[:3])}}}" if near else ""
    raise ArgumentError(
        "compare: no module of the reference has the name of a module of the sharded model: the "
        f"reference has {', '.join(inner[:4])}, the sharded model {', '.join(others[:4])}{hint}"
    )


def only_in(first: Iterable[str], second: Iterable[str]) -> tuple[str, ...]:
    """Paths of the first that the second has not; what is below such a path is left out."""
    known = set(second)
    found: list[str] = []
    for path in first:
        if path not in known and not any(path.startswith(f"{above}.") for above in found):
            found.append(path)
    return tuple(found)


@dataclass(frozen=True)
class Setting:
    """How a module is set up on workers otherwise than in the reference.

    `training` is its mode there, where it is that; else None, and `extra` is what it says of
    itself.
    """

    words: str
    ranks: tuple[int, ...]
    training: bool | None = None
    extra: str = ""


def settings_of(ours: tuple[Any, ...], theirs: Mapping[int, tuple[Any, ...]]) -> list[Setting]:
    """How the settings of one module differ, between workers or from the reference."""
    found: list[Setting] = []
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank, about in theirs.items():
        groups.setdefault(about, []).append(rank)
    modes: dict[bool, list[int]] = {}
    for about, ranks in groups.items():
        modes.setdefault(bool(about[2]), []).extend(ranks)
    like = all(about[0] == ours[0] for about in groups)  # of one's own module it may not matter
    odd = [(mode, ranks) for mode, ranks in modes.items() if mode != ours[2]]
    odd = odd if like or len(modes) > 1 else []
    for mode, ranks in odd:
        told = "train" if mode else "eval"
        mine = "train" if ours[2] else "eval"
        words = f"{format_workers(ranks)} {_is(ranks)} in {told} mode, the reference in {mine} mode"
        found.append(Setting(words, tuple(ranks), training=mode))
    settings: dict[tuple[str, str], list[int]] = {}
    for (kind, extra, _), ranks in groups.items():
        settings.setdefault((kind, extra), []).extend(ranks)
    for (kind, extra), ranks in settings.items():
        if (
            kind == ours[0]
            and extra != ours[1]
            and (len(settings) > 1 or _same_sizes(extra, ours[1]))
        ):
            words = f"{format_workers(ranks)}: {kind}({extra}); reference: {ours[0]}({ours[1]})"
            found.append(Setting(words, tuple(ranks), extra=extra))
    return found


def _is(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _same_sizes(one: str, other: str) -> bool:
    """Whether two settings differ in more than sizes, which sharding changes."""

    def without(text: str) -> str:
        parts = [part.strip() for part in text.split(",")]
        return ",".join(p for p in parts if not p.split("=")[-1].lstrip("(-").rstrip(")").isdigit())

    return without(one) != without(other)
