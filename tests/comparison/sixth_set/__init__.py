"""A sixth set: right programs that alarmed, and bugs of which a reader was sent the wrong way.

The files are built as those of `second_set`, whose planted.py plants the bugs.
"""

from __future__ import annotations

from types import ModuleType

from tests.comparison.second_set.planted import Bug

from . import batches, blocks, recurrent

FAMILIES: tuple[ModuleType, ...] = (recurrent, batches, blocks)

BUGS: dict[str, tuple[ModuleType, Bug]] = {b.name: (f, b) for f in FAMILIES for b in f.BUGS}
RIGHT: dict[str, ModuleType] = {
    f"{f.__name__.rpartition('.')[2]}: {name}": f for f in FAMILIES for name in f.RIGHT
}
SAID: dict[str, str] = {name: words for f in FAMILIES for name, words in f.SAID.items()}
"""Patterns of what a comparison says of a bug, beside its cause."""
UNSAID: dict[str, str] = {name: words for f in FAMILIES for name, words in f.UNSAID.items()}
"""And of what it does not say."""
