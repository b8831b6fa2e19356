"""Where another thread stands. No state.

Before Python 3.11.9, ``sys._current_frames()`` can stop the whole process for ever: it makes frame
objects under a lock of the interpreter's, the garbage collector may run then, and what that calls
may let go of the GIL, which a thread that wants that lock takes (CPython's issue 106883). So the
collector is off meanwhile. The three calls are made by one of C code: no interrupt comes between.

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
from types import FrameType
from typing import Any, NamedTuple

from . import interpreter_lock

_QUIETLY: tuple[Any, ...] = (gc.disable, sys._current_frames, gc.enable)
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
    found, frame = [], frame_of(thread_id)
    try:
        while frame is not None:
            found.append(Place(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
            frame = frame.f_back
    except AttributeError:  # CPython 3.11 once gave a function as a frame of a running thread
        return []
    return found


def frame_of(thread_id: int) -> FrameType | None:
    """The innermost frame of a thread, None if it runs no Python code, or has ended.

    Without the interpreter lock, only for a thread that waits.
    """
    if gc.isenabled():
        _, frames, _ = tuple(map(operator.call, _QUIETLY))
    else:
        frames = sys._current_frames()
    found: FrameType | None = frames.get(thread_id)
    return found


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
