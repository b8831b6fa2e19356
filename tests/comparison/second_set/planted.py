"""A bug is a small change of a right program's text: what to put in place of what.

Each family of this directory is one file: a reference, the same model for several workers, programs
that compare the two, and below these ``RIGHT`` (programs without a bug), ``HARMLESS`` changes and ``BUGS``. What a bug
should be found as was written before `compare` had seen one of them.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


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
    accept: str = ""
    """A regular expression: causes that are right for it. Nothing: any cause is wrong."""
    found: str = ""
    """A regular expression for `first`: how `compare` says `place`."""


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
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
