"""Keeps hostile values at bay: guarded calls, guarded reprs, and the cut to plain records.

Used on the worker by `describe`. A record holds None, bool, int (64 bits), float, str, list and
dict with string keys, and nothing else, so that any protocol can carry it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ...runtime.errors import WorkerInterrupted
from ...runtime.worker import current_worker_or_none
from ..formats import cut, strip_addresses

Record: TypeAlias = dict[str, object]

REPR_LIMIT = 200
_STRING_LIMIT = 2000
_ITEMS_LIMIT = 200
_DEPTH_LIMIT = 8

#: What user code may throw at us. KeyboardInterrupt passes: the stop button must work. A value may
#: raise it too: see `raise_stop`.
FAILURES = (Exception, SystemExit)
FAILURES_OR_STOP = (*FAILURES, KeyboardInterrupt)


def raise_stop(error: BaseException) -> None:
    """Raise a `KeyboardInterrupt` again by which a person stops this; not one that a value raised.

    What stops a worker is always a `WorkerInterrupted`.
    """
    if isinstance(error, KeyboardInterrupt) and (
        isinstance(error, WorkerInterrupted) or current_worker_or_none() is None
    ):
        raise error


def carriable(text: str) -> str:
    """Make a string that any encoder takes: lone surrogates become question marks."""
    return str.encode(text, "utf-8", "replace").decode("utf-8")


def error_text(error: BaseException) -> str:
    """Say an exception in one short string; its own ``__str__`` may fail."""
    name = type(error).__name__
    try:
        message = carriable(cut(strip_addresses(str(error)), REPR_LIMIT))
    except FAILURES_OR_STOP as failed:
        raise_stop(failed)
        return name
    return f"{name}: {message}" if message else name


def type_name(value: object) -> str:
    """Name the type of a value; never raises."""
    try:
        return carriable(cut(str(type(value).__name__), 100))
    except FAILURES:
        return "object"


def safe_repr(value: object, limit: int = REPR_LIMIT) -> tuple[str, bool]:
    """Take the repr of any value on one line, without addresses, at most `limit` characters.

    Long strings and bytes are cut before their repr is built. A repr that raises is shown as such.

    Returns
    -------
    tuple of str and bool
        The repr, and whether it is the whole of it.
    """
    try:
        whole = True
        if type(value) in (str, bytes, bytearray) and len(value) > limit:  # type: ignore[arg-type]
            value, whole = value[: limit + 1], False  # type: ignore[index]
        full = repr(value)
        one_line = " ".join(full[: 4 * limit].split()) if "\n" in full else full[: 4 * limit]
        text = cut(strip_addresses(one_line), limit)
        return carriable(text), whole and len(full) <= 4 * limit and not text.endswith("…")
    except FAILURES_OR_STOP as error:
        raise_stop(error)
        return f"<{type_name(value)}: repr raised {error_text(error)}>", False


def attempt(record: Record, what: str, action: Callable[[], Record]) -> None:
    """Add what `action` finds to `record`; if it fails, add a note under ``error`` instead."""
    try:
        record.update(action())
    except FAILURES as error:
        note = f"{what} failed: {error_text(error)}"
        before = record.get("error")
        record["error"] = f"{before}; {note}" if before else note


def plain(value: object, depth: int = 0) -> object:
    """Cut any value down to what a record may hold; unknown objects become their repr."""
    if value is None or type(value) in (bool, float):
        return value
    if type(value) is int:
        return value if -(2**63) <= value < 2**63 else safe_repr(value)[0]
    if type(value) is str:
        return carriable(cut(value, _STRING_LIMIT))
    if depth < _DEPTH_LIMIT and isinstance(value, dict):
        items = list(value.items())[:_ITEMS_LIMIT]
        return {
            carriable(cut(key, REPR_LIMIT)) if type(key) is str else safe_repr(key)[0]: plain(
                item, depth + 1
            )
            for key, item in items
        }
    if depth < _DEPTH_LIMIT and isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value[:_ITEMS_LIMIT]]
    return safe_repr(value)[0]
