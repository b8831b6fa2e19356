"""What a node owns for others to refer to: each is an `Outcome`, as it may be still to come."""

from __future__ import annotations

from typing import Any, ClassVar

from .outcome import Outcome


class Value(Outcome):
    """One value that somebody may refer to; there as soon as it is computed.

    Attributes
    ----------
    owner
        The rank that owns it.
    """

    __slots__ = ("owner",)
    parks: ClassVar[bool] = True  # who waits for it waits for no call of his own; see pool.py

    def __init__(self, owner: int) -> None:
        super().__init__()
        self.owner = owner

    def __str__(self) -> str:
        return "the value of a reference, which is still being computed"


def ready(owner: int, value: Any) -> Value:
    """A value that is there already."""
    made = Value(owner)
    made.settle(value)
    return made
