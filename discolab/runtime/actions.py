"""The command set: nine actions of Disco, by its names and numbers, and our own from 64 on.

A command is a plain tuple whose first item is the action and whose second is a register id
(0 where none is meant); a tuple because a session makes hundreds of thousands a second.

    (SHUTDOWN, 0)                               or (SHUTDOWN, 0, True): another takes its place
    (KILL_REG, 0, ids)                          forget these registers
    (GET_GLOBAL_FUNC, reg, name, site)
    (CALL_PACKED, reg, func, args, kwargs, bind, site)
    (SYNC_WORKER, 0, ticket)                    reply with the failures that were never raised
    (COPY_FROM_WORKER0, reg, token, site)       worker 0 only does anything
    (COPY_TO_WORKER0, reg, token, site)
    (DEBUG_GET_FROM_REMOTE, reg, tell, ticket)  reply with the register's value
    (DEBUG_SET_REGISTER, reg, value, ticket)
    (END_INTERRUPT, 0, ticket)                  everything before this was cancelled
    (REPORTED, 0, reported)                     these failures were raised
    (BEGIN_AT, 0, calls, own)                   a new worker counts so many calls as done before its
                                                own first ones, which the others have not

`reported` is ``calls, victims, others, regs``: ordinals of calls; ordinals of calls of which only
those failures were raised that came of another worker's; ``(rank, number)`` of failures of what is
no call; and registers that hold a failure. A call that fails on several workers is one failure.
Register 0 means "no result". With `tell` an orphan failure (see errors.py) is the reply.
`func` is a `Register` or a callable; `bind` says, in bits, whether the function
(BIND_FUNCTION) or the arguments (BIND_ARGUMENTS) must be looked up or copied on the worker, and
whether all tensors among them are simple (SIMPLE_TENSORS, see `regions`);
`site` is ``(code object or file name, line)`` of the call on the controller.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from .sources import place

Command = tuple[Any, ...]

BIND_FUNCTION = 1
BIND_ARGUMENTS = 2
SIMPLE_TENSORS = 4


class DiscoAction(IntEnum):
    """What a command asks of a worker."""

    SHUTDOWN = 0
    KILL_REG = 1
    GET_GLOBAL_FUNC = 2
    CALL_PACKED = 3
    SYNC_WORKER = 4
    COPY_FROM_WORKER0 = 5
    COPY_TO_WORKER0 = 6
    DEBUG_GET_FROM_REMOTE = 7
    DEBUG_SET_REGISTER = 8
    END_INTERRUPT = 64
    REPORTED = 66
    BEGIN_AT = 67


def site_text(site: tuple[Any, int] | None) -> str:
    """Format a recorded call site; "" if there is none."""
    if not isinstance(site, tuple):
        return ""
    code, line = site
    filename = getattr(code, "co_filename", code)
    if "/IPython/core/" in filename.replace("\\", "/"):
        return ""  # a magic or a display called us: nothing that the user would know
    return place(filename, line)


def function_text(func: Any) -> str:
    """A short name for the callable of a command."""
    name = attribute(func, "__qualname__") or attribute(func, "__name__")
    if not isinstance(name, str):
        return type(func).__name__
    return name.removeprefix("_VariableFunctionsClass.")  # where torch keeps torch.relu


def attribute(value: Any, name: str) -> Any:
    """An attribute or None, whatever the `__getattr__` of a user's object does."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None
