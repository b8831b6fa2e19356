"""How long a worker's collectives wait for the others when a call does not say it.

`Worker.shared["discolab.ccl.timeout"]` maps ranks to seconds; each worker writes its own entry.
"""

from __future__ import annotations

from typing import Any

from ..runtime.errors import ArgumentError
from ..runtime.worker import Worker, current_worker

_TIMEOUTS = "discolab.ccl.timeout"


def set_timeout(seconds: float | None) -> None:
    """Set the calling worker's deadline for collectives and receptions without ``timeout=``.

    Parameters
    ----------
    seconds
        Above 0; None, as at the start, for no limit. What can be seen to be hopeless is told
        at once anyway; a deadline is for members that run and do not come.

    Raises
    ------
    ArgumentError
    """
    worker = current_worker()
    worker.shared.setdefault(_TIMEOUTS, {})[worker.worker_id] = check_timeout(
        "set_timeout", seconds
    )


def timeout_of(name: str, worker: Worker, given: Any) -> float | None:
    """The deadline of one call: `given`, or the worker's own.

    Raises
    ------
    ArgumentError
        If `given` is neither None nor a number above 0.
    """
    if given is not None:
        return check_timeout(name, given)
    defaults: dict[int, float | None] = worker.shared.get(_TIMEOUTS, _NONE)
    return defaults.get(worker.worker_id)


def check_timeout(name: str, value: Any) -> float | None:
    """`value`, if it is None or seconds above 0.

    Raises
    ------
    ArgumentError
    """
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not value > 0:
        raise ArgumentError(f"{name}: timeout must be seconds above 0, or None; got {value!r}")
    return float(value)


_NONE: dict[int, float | None] = {}
