"""Where another thread stands. No state.

Before Python 3.11.9, ``sys._current_frames()`` can stop the whole process for ever: it makes frame
objects under a lock of the interpreter's, the garbage collector may run then, and what that calls
may let go of the GIL, which a thread that wants that lock takes (CPython's issue 106883). So the
collector is off meanwhile. The three calls are made by one of C code: no interrupt comes between.
"""

from __future__ import annotations

import gc
import operator
import sys
from types import FrameType
from typing import Any

_QUIETLY: tuple[Any, ...] = (gc.disable, sys._current_frames, gc.enable)


def frame_of(thread_id: int) -> FrameType | None:
    """The innermost frame of a thread, None if it runs no Python code, or has ended."""
    if gc.isenabled():
        _, frames, _ = tuple(map(operator.call, _QUIETLY))
    else:
        frames = sys._current_frames()
    found: FrameType | None = frames.get(thread_id)
    return found
