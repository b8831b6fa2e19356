"""Wait a little for what workers answer: for pictures, drawn without those that do not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...runtime.dref import DRef
from ...runtime.errors import DiscoError, WaitTimeoutError


def answers_of(ref: DRef, patience: float, ranks: Sequence[int] | None = None) -> dict[int, Any]:
    """What workers answer within `patience` seconds; of one that has died nothing.

    Parameters
    ----------
    ref
        The result of a call.
    patience
        Seconds to wait at most.
    ranks
        Whom to ask; None: all.
    """
    session = ref.session
    ticket = session.request(ref, ranks)
    deadline = time.monotonic() + patience
    try:
        return session.wait(ticket, patience)
    except WaitTimeoutError:
        pass
    except DiscoError:  # some have died: those that live answer all the same
        gone = {status.rank for status in session.status() if status.state == "dead"}
        if not gone:
            raise
        while not gone.issuperset(ticket.missing) and time.monotonic() < deadline:
            ticket.acquire(0.02)
    return dict(ticket.values)
