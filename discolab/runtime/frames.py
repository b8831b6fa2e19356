"""Where another thread stands. No state.

Before Python 3.12 the garbage collector may run whenever an object is made, such as the frame
object that somebody asks for, and what the collector calls may let go of the GIL. Two things happen
then. Before 3.11.9 ``sys._current_frames()`` can stop the whole process for ever: it makes frame
objects under a lock of the interpreter's, which a thread that gets the GIL wants (CPython's issue
106883). And to ask for ``f_back`` or ``f_locals`` of a thread that runs on meanwhile is to read,
and write, where its frames no longer are: the process crashes, or gets another object for a frame.
So the collector is off meanwhile (`quietly`).

Without the interpreter lock a thread runs on while somebody walks up its frames, which CPython is
not made for: to ask for ``f_back`` writes into frames that the thread may leave at that moment.
`faulthandler` stops all threads while it writes down where they stand, so that is read there.
"""

from __future__ import annotations

import faulthandler
import gc
import operator
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, repeat, takewhile
from types import FrameType
from typing import Any, NamedTuple

from . import interpreter_lock

_is_there = partial(operator.is_not, None)
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPED = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


class Place(NamedTuple):
    """Where a function stands."""

    file: str
    line: int
    function: str


def places_of(thread_id: int) -> list[Place]:
    """Where the functions of a thread stand, the innermost first; of deep stacks a hundred."""
    if not interpreter_lock.is_on():
        return _read_places(thread_id)
    return [
        Place(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)
        for frame in outwards(frame_of(thread_id))
    ]


def frame_of(thread_id: int) -> FrameType | None:
    """The innermost frame of a thread, None if it runs no Python code, or has ended.

    Without the interpreter lock, only for a thread that waits.
    """
    frame: FrameType | None = quietly(partial(next, frames_now(thread_id)))
    return frame


def frames_now(thread_id: int, default: FrameType | None = None) -> Iterator[FrameType | None]:
    """Gives one frame, as `frame_of` does, once it is asked, and in one call of C code.

    No variable holds all frames: one is of `quietly`, called from here, and that made a cycle which
    kept the variables of all threads for the collector.
    """
    frames = map(operator.call, [sys._current_frames])
    return map(operator.methodcaller("get", thread_id, default), frames)


def outwards(frame: FrameType | None) -> list[FrameType]:
    """A frame and those that have called it, as they are at one moment, the innermost first.

    Without the interpreter lock, only for a thread that waits.
    """
    if frame is None:
        return []
    found: list[FrameType] = quietly(
        partial(list, takewhile(_is_there, accumulate(repeat("f_back"), getattr, initial=frame)))
    )
    return found


def quietly(call: Callable[[], Any]) -> Any:
    """Call something in C that raises nothing, with the garbage collector off.

    No other thread runs meanwhile if `call` does not let go of the GIL, and no interrupt comes
    between: all is one call of C code.
    """
    if gc.isenabled():
        return tuple(map(operator.call, (gc.disable, call, gc.enable)))[1]
    return call()


def _read_places(thread_id: int) -> list[Place]:
    with tempfile.TemporaryFile("w+", encoding="ascii", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    of_thread = re.compile(rf"thread 0x0*{thread_id:x} .*\n((?:  File .*\n)*)", re.IGNORECASE)
    stack = of_thread.search(text)
    return [
        Place(_plain(file), int(line), _plain(function))
        for file, line, function in (_FRAME.findall(stack[1]) if stack else ())
    ]


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[0][2:], 16)), text)
