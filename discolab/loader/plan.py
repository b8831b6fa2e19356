"""A plan says for each parameter's name how it is laid out. Pure, but for its files.

`Plan.resolve` makes a `Resolved` of it: the plan for one checkpoint and so many workers, that is,
what each of them holds.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch

from ..layouts.layout import REPLICATE, Cut, Layout, Workers, cached_cut, check
from ..layouts.text import WORDS, parse_layout
from ..runtime.arguments import Shared
from ..runtime.errors import ArgumentError
from .catalog import Catalog, Shape
from .progress import Preparation
from .styles import HOOK, WHOLE_MODULE, Style, style_named, style_of

MOST_NAMES = 10  # parameters that one error lists


@lru_cache(maxsize=4096)
def matcher(pattern: str) -> Callable[[str], object]:
    """What says whether a name matches a glob, where ``*`` is dots too, or ``re:…``, as a whole.

    Raises
    ------
    ArgumentError
        If it is no regular expression.
    """
    try:
        expression = pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern)
        return re.compile(expression).fullmatch
    except (re.error, RecursionError, OverflowError) as error:
        raise ArgumentError(f"the pattern {pattern!r} is no regular expression: {error}") from None


def unknown_names(names: Sequence[str], known: Iterable[str]) -> ArgumentError:
    """The error of names that a checkpoint does not have."""
    near = difflib.get_close_matches(names[0], list(known), 3)
    mean = f"; near are {', '.join(map(repr, near))}" if near else ""
    listed = ", ".join(map(repr, names[:MOST_NAMES]))
    return ArgumentError(f"the checkpoint has no parameter {listed}{mean}")


# -- for one checkpoint and so many workers --------------------------------------------------------


@dataclass(frozen=True)
class Resolved(Shared):
    """A plan for one checkpoint and for so many workers.

    Attributes
    ----------
    layouts
        Of each parameter, by name, in the checkpoint's order.
    unmatched
        Names that no rule matched; empty where the plan has no rules.
    unused
        Patterns of rules that decided nothing: they matched no name, or earlier ones did.
    """

    catalog: Catalog
    workers: Workers
    layouts: Mapping[str, Layout]
    unmatched: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def cut(self, name: str, rank: int) -> Cut | None:
        """What a worker holds of a parameter; None if its stage does not hold it.

        Raises
        ------
        ArgumentError
            If the checkpoint has no such parameter.
        """
        if name not in self.layouts:
            raise unknown_names([name], self.layouts)
        return cached_cut(self.layouts[name], self.catalog.entries[name].shape, self.workers, rank)

    def bytes_on(self, rank: int, dtype: torch.dtype | None = None) -> int:
        """Bytes of all tensors of a worker.

        Parameters
        ----------
        dtype
            What all floating ones are cast to; None: they stay as they are.
        """
        total = 0
        for name, entry in self.catalog.entries.items():
            Preparation.count("counting the bytes of shard")
            held = self.cut(name, rank)
            if held is not None:
                total += held.numel * entry.loaded_as(dtype).itemsize
        return total

    def subset(self, names: str | Iterable[str]) -> Resolved:
        """The same for some of the parameters, in the checkpoint's order.

        Parameters
        ----------
        names
            Names or patterns, as in rules.

        Raises
        ------
        ArgumentError
            If one matches nothing.
        """
        wanted = [names] if isinstance(names, str) else names
        if not isinstance(wanted, Iterable):
            raise ArgumentError(f"names of parameters are strings, got {names!r:.60}")
        chosen: set[str] = set()
        missing = []
        for one in wanted:
            found = {one} if one in self.layouts else set(filter(matcher(one), self.layouts))
            chosen |= found
            if not found:
                missing.append(one)
        if missing:
            raise unknown_names(missing, self.layouts)
        entries = {name: e for name, e in self.catalog.entries.items() if name in chosen}
        return replace(
            self,
            catalog=replace(self.catalog, entries=entries),
            layouts={name: self.layouts[name] for name in entries},
            unmatched=tuple(name for name in self.unmatched if name in chosen),
        )


# -- plans -----------------------------------------------------------------------------------------


__all__ = ["Plan", "Resolved", "Rule", "parse_layout"]


class Parameter:
    """A parameter, and the names by which rules can mean it; made once for all rules."""

    def __init__(self, name: str, shape: Shape) -> None:
        path, _, self.last = name.rpartition(".")
        self.for_torch: tuple[str, ...] = (name,)
        if path and self.last in ("weight", "bias"):
            self.for_torch = (name, path)
        self.name, self.shape, self.module = name, shape, path.rpartition(".")[2]
        self.for_tables: tuple[str, ...] = self.for_torch
        if name.startswith("model."):
            # tables in a model's configuration leave out the name of the model in its wrapper
            self.for_tables += tuple(one.removeprefix("model.") for one in self.for_torch)


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern, and what it says of the parameters whose names it matches.

    Attributes
    ----------
    pattern
        A glob for the whole name, where ``*`` stands for dots too; or ``re:`` and a regular
        expression for the whole name.
    says
        The layout; or a style, and then the pattern is for the name of a module whose weight and
        bias are meant, or of a parameter itself.
    """

    pattern: str
    says: Layout | Style

    def layout(self, parameter: Parameter) -> Layout | None:
        """The layout of a parameter; None if it is none of this rule's."""
        matches = matcher(self.pattern)
        if isinstance(self.says, Layout):
            return self.says if matches(parameter.name) else None
        names = parameter.for_torch if self.says.torch else parameter.for_tables
        if not any(map(matches, names)):
            return None
        return self.says.layout(parameter.module, parameter.last, len(parameter.shape))


class Plan:
    """Rules for parameters' names; the first that matches counts.

    Parameters
    ----------
    rules
        A mapping or a list of pairs of a pattern and a layout, as `parse_layout` takes it, or a
        parallel style: one of torch's, or the name of one of a `tp_plan` table. See `Rule`.
    default
        The layout of parameters that no rule matches.

    Raises
    ------
    ArgumentError
        If a rule can't be read; it names the rule.
    """

    def __init__(
        self, rules: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), default: Any = REPLICATE
    ) -> None:
        pairs = list(rules.items()) if isinstance(rules, Mapping) else _pairs(rules)
        made = [Rule(_pattern(pattern), _said(pattern, says)) for pattern, says in pairs]
        if any(isinstance(rule.says, Style) and not rule.says.torch for rule in made):
            # in a table of Hugging Face, this word is said of modules as well
            made = [
                replace(rule, says=WHOLE_MODULE) if says == WHOLE_MODULE.name else rule
                for rule, (_, says) in zip(made, pairs, strict=True)
            ]
        self.rules: tuple[Rule, ...] = tuple(made)
        self.default = parse_layout(default)

    @classmethod
    def of(cls, plan: Any) -> Plan:
        """The plan that `plan` means.

        Parameters
        ----------
        plan
            None (every worker holds all); a `Plan`; rules as for `Plan`; ``{"rules": …,
            "default": …}``; or the path of a JSON file with one of the last two.

        Raises
        ------
        ArgumentError
            If it is none of these, or the file can't be read.
        """
        if plan is None:
            return cls()
        if isinstance(plan, Plan):
            return plan
        if isinstance(plan, Mapping):
            return cls._of_mapping(plan)
        if isinstance(plan, str | os.PathLike):
            return cls._of_file(cast("str | os.PathLike[str]", plan))
        if isinstance(plan, list | tuple):
            return cls(plan)
        raise ArgumentError(
            f"a plan is a dict of rules, as {{'*.q_proj.weight': 'shard(0)'}}, the path of a JSON "
            f"file with one, a Plan or None; got {type(plan).__name__}"
        )

    @classmethod
    def _of_mapping(cls, given: Mapping[str, Any]) -> Plan:
        if not isinstance(given.get("rules"), Mapping | list):
            return cls(given)
        unknown = [key for key in given if key not in ("rules", "default")]
        if unknown:
            raise ArgumentError(
                f"a plan with 'rules' has 'default' beside it and nothing else; got {unknown[0]!r}"
            )
        return cls(given["rules"], given.get("default", REPLICATE))

    @classmethod
    def _of_file(cls, path: str | os.PathLike[str]) -> Plan:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            hint = ""
            if isinstance(path, str) and re.match(r"\s*(\[|replicate|shard)", path):
                hint = f"; for one layout for all, give {{'*': {path!r}}}"
            why = getattr(error, "strerror", None) or error
            raise ArgumentError(
                f"the plan {os.fspath(path)!r} can't be read: {why}{hint}"
            ) from None
        try:
            found = json.loads(text, object_pairs_hook=_no_duplicates)
            if not isinstance(found, Mapping):
                raise ArgumentError("it must hold an object of rules")
            return cls._of_mapping(found)
        except (ArgumentError, json.JSONDecodeError, RecursionError) as error:
            raise ArgumentError(f"the plan {os.fspath(path)!r}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain words, for JSON; `Plan.of` makes the same plan of it."""
        patterns = [rule.pattern for rule in self.rules]
        pairs = [(rule.pattern, str(rule.says)) for rule in self.rules]
        # a dict can't say the same pattern twice
        plain = dict(pairs) if len(set(patterns)) == len(patterns) else [list(p) for p in pairs]
        return {"rules": plain, "default": str(self.default)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def layout(self, name: str, shape: Shape) -> Layout:
        """The layout of a parameter, whether it fits or not."""
        found = self.find(name, shape)
        return self.default if found is None else found[1]

    def resolve(self, catalog: Catalog, workers: Workers | int) -> Resolved:
        """Every parameter of a checkpoint with its layout, for these workers.

        Raises
        ------
        ArgumentError
            If layouts do not fit; it lists up to ten of their parameters with what does not fit.
        """
        if isinstance(workers, int):
            workers = Workers.of(workers)
        if not isinstance(catalog, Catalog) or not isinstance(workers, Workers):
            raise ArgumentError(
                "resolve takes a catalog (open_checkpoint(path)) and a number of workers, got "
                f"{type(catalog).__name__} and {type(workers).__name__}"
            )
        layouts: dict[str, Layout] = {}
        unmatched, wrong = [], []
        used: set[Rule] = set()
        for name, entry in catalog.entries.items():
            Preparation.count("laying out tensor")
            found = self.find(name, entry.shape)
            if found is None:
                unmatched.append(name)
            else:
                used.add(found[0])
            layouts[name] = self.default if found is None else found[1]
            try:
                check(layouts[name], entry.shape, workers)
            except ArgumentError as error:
                by = f"rule {found[0].pattern!r}" if found else "default"
                wrong.append(f"  {name} {list(entry.shape)} ({by}): {error}")
        if wrong:
            more = len(wrong) - MOST_NAMES
            lines = wrong[:MOST_NAMES] + ([f"  … and {more} more"] if more > 0 else [])
            many = "1 parameter does" if len(wrong) == 1 else f"{len(wrong)} parameters do"
            raise ArgumentError("\n".join([f"{many} not fit the plan:", *lines]))
        unused = tuple(
            rule.pattern
            for rule in self.rules
            if rule not in used and not (isinstance(rule.says, Style) and rule.says.cuts == HOOK)
        )
        return Resolved(catalog, workers, layouts, tuple(unmatched) if self.rules else (), unused)

    def find(self, name: str, shape: Shape) -> tuple[Rule, Layout] | None:
        """The first rule that matches a parameter, with the layout that it gives; None: no rule."""
        parameter = Parameter(name, shape)
        for rule in self.rules:
            layout = rule.layout(parameter)
            if layout is not None:
                return rule, layout
        return None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self.rules == other.rules and self.default == other.default

    def __hash__(self) -> int:
        return hash((self.rules, self.default))

    def __repr__(self) -> str:
        rules = ", ".join(f"{rule.pattern!r}: '{rule.says}'" for rule in self.rules)
        return f"Plan({{{rules}}}, default='{self.default}')"


def _pattern(given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise ArgumentError(f"a rule's pattern is a text, as '*.q_proj.weight'; got {given!r}")
    matcher(given)
    return given


def _said(pattern: str, given: Any) -> Layout | Style:
    try:
        if isinstance(given, Style):
            return given
        if isinstance(given, str):
            word = given.strip().removesuffix("()")
            if re.fullmatch(r"[A-Za-z_]\w*", word) and word.lower() not in WORDS:
                return style_named(word)
        elif not isinstance(given, Layout | Mapping | list | tuple):
            style = style_of(given)
            if style is not None:
                return style
        return parse_layout(given)
    except ArgumentError as error:
        raise ArgumentError(f"rule {pattern!r}: {error}") from None


def _pairs(rules: Iterable[Any]) -> list[tuple[str, Any]]:
    pairs = list(rules)
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ArgumentError(
                f"rules in a list are pairs of a pattern and a layout; got {pair!r}"
            )
    return [(pattern, says) for pattern, says in pairs]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ArgumentError(f"{key!r} is there twice")
        found[key] = value
    return found
