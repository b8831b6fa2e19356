"""tqdm's bars on workers: each worker counts its own.

tqdm gives every bar of a process a row of its own. Four workers' bars would be four rows, and
each worker's text full of moves between them. `tqdm._get_free_pos` is not public: where it is
missing nothing is changed.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ..runtime.worker import current_worker_or_none

_OWNER = "_discolab_worker"
_undo: list[tuple[Any, Any]] = []


def install() -> None:
    """Have tqdm count by worker, if it is installed."""
    if _undo or importlib.util.find_spec("tqdm") is None:
        return
    tqdm = importlib.import_module("tqdm").tqdm
    original = vars(tqdm).get("_get_free_pos")
    if not isinstance(original, classmethod):
        return

    def free_position(cls: Any, instance: Any = None) -> int:
        owner = current_worker_or_none()
        if instance is not None:
            setattr(instance, _OWNER, owner)
        others = [bar for bar in cls._instances if bar is not instance and hasattr(bar, "pos")]
        taken = {abs(bar.pos) for bar in others if getattr(bar, _OWNER, None) is owner}
        return min(set(range(len(taken) + 1)) - taken)

    _undo.append((tqdm, original))
    tqdm._get_free_pos = classmethod(free_position)


def uninstall() -> None:
    """Have tqdm count as before."""
    while _undo:
        tqdm, original = _undo.pop()
        tqdm._get_free_pos = original
