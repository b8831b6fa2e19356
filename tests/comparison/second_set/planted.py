"""A bug is a small change of a right program's text: what to put in place of what.

Each family of this directory is one file: a reference, the same model for several workers, programs
that compare the two, and below these ``RIGHT`` (programs without a bug), ``HARMLESS`` changes
and ``BUGS``. What a bug should be found as was written before `compare` had seen one of them.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from discolab.comparison import ProgramComparison
from tests.comparison.families import case
from tests.comparison.families.case import ALL, Verdict, verdict


@dataclass(frozen=True)
class Bug:
    """One planted bug, and what is true of it; or a change that does no harm."""

    name: str
    program: str
    """Which function of the family compares the two."""
    old: str
    """Text of the right program; stands in it exactly once."""
    new: str
    place: str = ""
    """The first value that is wrong, as a person would point at it."""
    workers: tuple[int, ...] | str = ()
    """Whom to blame; "all"."""
    cause: str = ""
    """What is wrong, in words."""
    found: str = ""
    """A pattern: the names of points that are `place`."""
    accept: str = r"(?!)"
    """A pattern: what is right to say of the cause; whatever else is said is wrong."""

    def judged(self, comparison: ProgramComparison) -> Verdict:
        """What is said of it, held against what is true."""
        assert comparison.first is None or self.found, self.name
        ranks = ALL if self.workers == "all" else self.workers
        assert not isinstance(ranks, str)
        known = case.Bug(
            self.name, "", "", lambda _: comparison, (self.found,), (self.accept,), ranks
        )
        return verdict(known, comparison)


def text(family: ModuleType) -> str:
    """The programs of a family, without its lists of bugs."""
    assert family.__file__ is not None
    return Path(family.__file__).read_text().partition("\nRIGHT = ")[0] + "\n"


def line(family: ModuleType, bug: Bug) -> int:
    """The line of the bug."""
    return text(family).partition(bug.old)[0].count("\n") + 1


def plant(family: ModuleType, bug: Bug, directory: Path) -> ModuleType:
    """The family with this bug in it."""
    source = text(family)
    if source.count(bug.old) != 1:
        raise AssertionError(f"{bug.name}: {bug.old!r} stands {source.count(bug.old)} times")
    name = f"planted_{family.__name__.rpartition('.')[2]}_{abs(hash(bug.name))}"
    path = directory / f"{name}.py"
    path.write_text(source.replace(bug.old, bug.new))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def row(family: ModuleType, bug: Bug, judged: Verdict) -> str:
    """The row of a bug in the second table of docs/compare.md."""
    at = judged.said.partition(":")[0] if judged.place else "elsewhere"
    workers = "" if judged.workers else ", on other workers"
    program = f"{family.__name__.rpartition('.')[2]}, {bug.program.replace('_', ' ')}"
    return f"| {bug.name} | {program} | {at}{workers} | {judged.cause} |"
