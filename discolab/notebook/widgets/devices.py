"""``%disco_devices``: what each worker does, for whom it waits, what it uses; live.

The facts are in device_looks.py, the words in views/devices_view.py. The pump's thread and the
notebook's look at the workers in turn, under `_lock`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...runtime.session import Session
from ...views import Part, rank_colour
from ...views import devices_view as words
from .base import LiveWidget, source
from .device_looks import DeviceLooks, Row

_BETWEEN = 0.1  # seconds between two looks, so that the first picture can say who computes
_MIB = 2**20


class Devices(LiveWidget):
    """The workers of a session of the notebook, by name; after a restart those of the new one.

    Parameters
    ----------
    name
        What the session is called in the notebook.
    find
        Gives the session that has the name now.
    """

    _esm = source("devices.js")
    _css = source("devices.css")

    def __init__(self, name: str, find: Callable[[str], Session]) -> None:
        super().__init__()
        self._name, self._find = name, find
        self._lock = threading.Lock()
        self._looks = DeviceLooks(find(name))
        self._looks.look(at_once=True)
        time.sleep(_BETWEEN)
        self._looks.look(at_once=True)

    @property
    def rows(self) -> list[Row]:
        """One record a worker, as of now; see views/devices_view.py for what is in it."""
        with self._lock:
            looks = self._current()
            looks.look(at_once=True)
            return [dict(row) for row in looks.rows]

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            looks = self._current()
            looks.look()
            rows, history = looks.rows, looks.history()
            return {
                "title": _title(self._name, looks.session),
                "notice": _notice(looks.session),
                "dead": words.format_dead(rows),
                "shared": words.format_shared_memory(rows),
                "rows": [_frame_row(row, rows, history.get(row["rank"], ())) for row in rows],
            }

    def essence(self) -> Any:
        """See `LiveWidget`: neither how much of what is used, nor for how long."""
        frame = self.frame
        seen = ("rank", "state", "doing", "held", "queued")
        return (
            [[row[key] for key in seen] for row in frame.get("rows", ())],
            [frame.get(key) for key in ("title", "notice", "dead")],
        )

    def static(self) -> Part:
        with self._lock:
            looks = self._current()
            looks.look(at_once=True)
            shares = {
                rank: [None if seen is None else seen[0] for seen in past]
                for rank, past in looks.history().items()
            }
            title = _title(self._name, looks.session)
            return words.devices_parts(title, looks.rows, shares, _notice(looks.session))

    def _current(self) -> DeviceLooks:
        """The looks at the session that has the name now."""
        session = self._find(self._name)
        if session is not self._looks.session:
            self._looks = DeviceLooks(session)
        return self._looks


def _title(name: str, session: Session) -> str:
    count = session.num_workers
    return f"{name}: {count} worker{'' if count == 1 else 's'} ({session.engine})"


def _notice(session: Session) -> str:
    return "shut down: %disco_restart starts it again" if session.closed else ""


def _frame_row(
    row: Row, rows: Sequence[Row], past: Sequence[tuple[float, int] | None]
) -> dict[str, Any]:
    """A row as the front end shows it: words, and numbers for what is drawn."""
    gpu, alone = row["memory"] is not None, not words.is_shared(row, rows)
    return {
        "rank": row["rank"],
        "colour": rank_colour(row["rank"]),
        "device": row["device"],
        "name": row["device_name"],
        "state": row["state"],
        "symbol": words.SYMBOLS.get(row["state"], "•"),
        "age": words.format_age(row["seconds"]),
        "doing": words.doing_pieces(row),
        "held": words.held_pieces(row),
        "stuck": bool(row["waits_for"]),
        "queued": row["queued"],
        "cpu": words.format_cpu(row),
        "cores": [None if seen is None else round(100 * seen[0]) for seen in past],
        "memory": words.format_used_memory(row) if gpu or alone else "",
        "more": words.format_memory(row),
        "bytes": [None if seen is None else seen[1] // _MIB for seen in past]
        if gpu or alone
        else [],
        "gpu": words.format_gpu(row),
    }
