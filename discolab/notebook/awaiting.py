"""Top-level ``await`` in a cell: each worker has an event loop of its own.

A worker's loop is kept from cell to cell, so that a lock or a connection made in one cell can be
awaited in the next; it runs while a cell awaits, and stands still in between. An interrupt ends the
wait (see `isolation.waits`) and cancels what the cell awaited.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from contextlib import suppress
from types import CodeType, TracebackType
from typing import Any

from ..runtime.worker import current_worker

_kept = threading.local()


class _Loop:
    """The event loop of a worker's thread; it is closed when the thread ends."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def __del__(self) -> None:
        if self.loop.is_closed():
            return
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # the worker is gone
        self.loop.close()


def run_code(body: CodeType, last: CodeType | None, names: dict[str, Any]) -> Any:
    """Run the code of a cell, and the value of its last expression, with `names` for variables.

    Either may be compiled with `ast.PyCF_ALLOW_TOP_LEVEL_AWAIT`; if one awaits something, both
    run in the worker's event loop.
    """
    # one dict for globals and locals, so that functions see what the cell defines
    if not any(code and code.co_flags & inspect.CO_COROUTINE for code in (body, last)):
        exec(body, names)
        return None if last is None else eval(last, names)
    if not hasattr(_kept, "loop") or _kept.loop.loop.is_closed():  # a cell may close its loop
        _kept.loop = _Loop()
    loop: asyncio.AbstractEventLoop = _kept.loop.loop
    worker = current_worker()
    worker.awaits = _awaited(body, last, names)
    task = loop.create_task(worker.awaits)
    try:
        return loop.run_until_complete(task)
    except BaseException as error:  # the loop's own frames say nothing of where the cell was
        if task.done():
            if not task.cancelled():
                task.exception()  # raised here: else asyncio tells of it, as of one nobody has seen
            error.__traceback__ = _in_cell(error.__traceback__) or error.__traceback__
        elif isinstance(error, KeyboardInterrupt):
            error.__traceback__ = _where(task.get_coro())
        raise
    finally:
        worker.awaits = None
        if not task.done():  # interrupted: what it awaits must not go on in the next cell
            task.cancel()
            with suppress(BaseException):
                loop.run_until_complete(task)


def _in_cell(frames: TracebackType | None) -> TracebackType | None:
    """The frames from the one in which the cell awaits; None if it is not among them."""
    while frames is not None and frames.tb_frame.f_code is not _awaited.__code__:
        frames = frames.tb_next
    return frames


def _where(waits: Any) -> TracebackType | None:
    """The frames of a coroutine that waits, and of those that it awaits, as of an exception."""
    frame = getattr(waits, "cr_frame", None)
    if frame is None:
        return None
    return TracebackType(_where(waits.cr_await), frame, frame.f_lasti, frame.f_lineno)


async def _awaited(body: CodeType, last: CodeType | None, names: dict[str, Any]) -> Any:
    value = None
    for code in (body, last):
        if code is not None:
            value = eval(code, names)
            if code.co_flags & inspect.CO_COROUTINE:
                value = await value
    return None if last is None else value
