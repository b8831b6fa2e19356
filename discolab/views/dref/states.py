"""The records of workers that gave no value: failed, still busy, died, silent.

They stand beside those of `describe`, and `notes` puts them in words.
"""

from __future__ import annotations

from typing import Any

from ...runtime.failures import Failure, explain
from ...runtime.sources import place
from ...runtime.status import WorkerStatus
from ..formats import format_seconds


def failure_record(failure: Failure) -> dict[str, Any]:
    """The record of a poisoned register: the error, where it was raised, and its traceback."""
    words = [failure.headline.partition("\n")[0]]
    if failure.frames:
        filename, line, _ = failure.frames[-1]
        words.append(place(filename, line))
    words.append(failure.summary)
    record = {"kind": "failure", "message": " · ".join(words)}
    if failure.frames or "\n" in failure.headline:
        record["traceback"] = "\n".join(explain([failure])[1:])  # without the rank: they are joined
    return record


def state_record(status: WorkerStatus) -> dict[str, Any]:
    """The record of a worker that has not answered: what it does, and since when."""
    if status.state == "dead":
        return {"kind": "dead", "message": status.detail}
    if status.state == "idle":  # as far as is known: it may be stopped
        return {"kind": "missing", "message": status.detail}
    words = f"{status.state} {status.detail}".strip()
    if status.seconds:
        words += f", for {format_seconds(status.seconds)}"
    if status.queued:
        words += f", {status.queued} queued"
    return {"kind": "pending", "message": words}
