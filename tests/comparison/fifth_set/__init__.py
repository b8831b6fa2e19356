"""A fifth set: what differs by design, before a bug or without one; rows dealt in other orders.

The files are built as those of `second_set`, whose planted.py plants the bugs.
"""

from __future__ import annotations

from types import ModuleType

from tests.comparison.second_set.planted import Bug

from . import dealt, heads, stateful, vocabulary

FAMILIES: tuple[ModuleType, ...] = (vocabulary, dealt, heads, stateful)

BUGS: dict[str, tuple[ModuleType, Bug]] = {b.name: (f, b) for f in FAMILIES for b in f.BUGS}
HARMLESS: dict[str, tuple[ModuleType, Bug]] = {b.name: (f, b) for f in FAMILIES for b in f.HARMLESS}
RIGHT: dict[str, ModuleType] = {
    f"{f.__name__.rpartition('.')[2]}: {name}": f for f in FAMILIES for name in f.RIGHT
}
