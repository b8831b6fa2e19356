"""Freeing a DRef's value on all workers before the DRef itself is gone.

Names that are bound to the DRef stay, but what they name is a `FreedDRef` from then on: each use is
one clear error. It keeps its register id until it dies, so that a command on its way at that
moment meets no other value there, but the failure that `put_failure` has left.
"""

from __future__ import annotations

from typing import Any, NoReturn

from .dref import DRef
from .errors import ArgumentError
from .failures import Failure
from .worker import current_worker


class FreedDRef(DRef):
    """What a DRef becomes when its value has been freed (`Session.free`)."""

    __slots__ = ()

    @property
    def reg_id(self) -> int:  # type: ignore[override]
        """There is none any more."""
        raise ArgumentError(freed_text(self))

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """As of a `DPackedFunc`, which it may have been."""
        raise ArgumentError(freed_text(self))

    def __dir__(self) -> list[str]:
        return ["name", "placements", "session"]

    def __repr__(self) -> str:
        return f"<DRef r{_id_of(self)}, freed>"


def _id_of(ref: DRef) -> int:
    """The register id, past `FreedDRef.reg_id`."""
    number: int = vars(DRef)["reg_id"].__get__(ref)
    return number


def freed_text(ref: DRef) -> str:
    """What to say when a freed DRef is used."""
    name = f"{ref.name!r}, " if ref.name else ""
    return (
        f"{name}register {_id_of(ref)}, was freed on all workers: its value is gone. "
        "Run the cell that makes it again"
    )


def put_failure(text: str) -> Failure:
    """What stands in the register afterwards (a worker function)."""
    rank = current_worker().worker_id
    return Failure(rank, "a value that was freed", "", ArgumentError.__name__, text, reported=True)


put_failure.disco_command = "freeing a value"  # type: ignore[attr-defined]  # for status
