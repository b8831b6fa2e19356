"""A worker's calls as the hub has them."""

from __future__ import annotations

import time
from typing import Any

from ..call import Call
from ..groups import Group
from . import letters
from .lanes import Lane

Data = bytes | tuple[bytes, ...] | None
"""What a member gives, small enough to go through the hub: the same for all, or a part for each."""


class HubCall(Call):
    """One call; see `Call`.

    Attributes
    ----------
    seq
        The number that its worker has given to it.
    data
        What it gives; None: too much to go through the hub.
    waits_since
        When its worker began to wait for it; 0.0: it does not.
    over
        Whether the worker has done its part.
    """

    __slots__ = ("data", "lane", "over", "seq", "told_missing", "waits_since")

    def __init__(
        self,
        worker: Any,
        seq: int,
        ordinal: int,
        name: str,
        group: Group,
        signature: letters.WireSignature,
        site: letters.WireSite,
        timeout: float | None,
        flags: int,
    ) -> None:
        asynchronous = bool(flags & letters.ASYNCHRONOUS)
        super().__init__(
            name, worker, group, letters.signature_in(signature), letters.site_in(site), timeout,
            asynchronous,
        )  # fmt: skip
        self.ordinal, self.seq = ordinal, seq
        self.patient = bool(flags & letters.PATIENT)
        self.data: Data = None
        self.lane: Lane | None = None
        self.over = False
        self.told_missing: tuple[int, ...] = ()
        self.waits_since = 0.0

    def wait(self) -> None:
        """Its worker waits for it from now on."""
        self.waits_since = time.monotonic()
