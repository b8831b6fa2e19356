"""A second set of bugs and right programs, by another author than the rules'; see planted.py."""

from __future__ import annotations

from types import ModuleType

from . import decoder, encdec, hybrid, unet
from .planted import Bug

FAMILIES: tuple[ModuleType, ...] = (decoder, encdec, hybrid, unet)

BUGS: dict[str, tuple[ModuleType, Bug]] = {b.name: (f, b) for f in FAMILIES for b in f.BUGS}
"""Each with its family."""

HARMLESS: dict[str, tuple[ModuleType, Bug]] = {b.name: (f, b) for f in FAMILIES for b in f.HARMLESS}
"""Changes that compute the same in another way."""

RIGHT: dict[str, ModuleType] = {
    f"{f.__name__.rpartition('.')[2]}: {name}": f for f in FAMILIES for name in f.RIGHT
}
