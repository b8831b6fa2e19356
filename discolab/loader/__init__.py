"""Checkpoints, straight into their shards, and back.

A *catalog* says what a checkpoint holds and where, a *plan* how each parameter is laid out over the
workers; `load` has every worker read the bytes of its own shards and no others, `save` has each
write them. What `import discolab` brings in is small; the rest is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..runtime.session import Session
from . import progress as _progress  # noqa: F401 - a service: known before a session starts
from .disco import functions as _disco  # noqa: F401 - registers Disco's functions
from .errors import CheckpointError

if TYPE_CHECKING:
    from ..layouts.layout import Layout, Workers
    from .catalog import Catalog, Entry, File, Piece
    from .convert import shard
    from .formats import open_checkpoint
    from .loading import load
    from .plan import Plan, Resolved
    from .saving import save
    from .showing import show
    from .weights import Weights

_LATER = {
    "Catalog": "catalog",
    "Entry": "catalog",
    "File": "catalog",
    "Layout": ".layouts.layout",
    "Piece": "catalog",
    "Plan": "plan",
    "Resolved": "plan",
    "Weights": "weights",
    "Workers": ".layouts.layout",
    "load": "loading",
    "open_checkpoint": "formats",
    "save": "saving",
    "shard": "convert",
    "show": "showing",
}


def __getattr__(name: str) -> Any:
    """What few sessions use is imported when it is first used."""
    if name in _LATER:
        found = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
        globals()[name] = found  # the import has left the module of that name there
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _later(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(__name__), name)(*args, **kwargs)

    return call


Session.above.update(load=_later("load"), save=_later("save"))

__all__ = [
    "Catalog",
    "CheckpointError",
    "Entry",
    "File",
    "Layout",
    "Piece",
    "Plan",
    "Resolved",
    "Weights",
    "Workers",
    "load",
    "open_checkpoint",
    "save",
    "shard",
    "show",
]
