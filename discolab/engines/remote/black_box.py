"""What a worker runs, and has printed and not sent yet, where it survives the worker.

Memory that the controller's process shares with a worker's: u64 commands done, u32 bytes used, then
text. A process that crashes takes with it what is in its own memory; what it ran and printed last
is what people want to read. The worker writes, the controller reads when the worker is gone.
"""

from __future__ import annotations

import mmap
import os
import struct

from ...transport.frame import new_memory

SIZE = 1 << 16  # bytes
_DONE = struct.Struct("<Q")
_USED = struct.Struct("<I")
_USED_AT = _DONE.size
_TEXT_AT = _USED_AT + _USED.size
_ROOM = SIZE - _TEXT_AT


class BlackBox:
    """One process's end; takes the descriptor over."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, SIZE)
        os.close(fd)

    def note(self, text: str) -> None:
        """Add to it; what does not fit pushes out what was there."""
        data = text.encode("utf-8", "replace")[-_ROOM:]
        (used,) = _USED.unpack_from(self._memory, _USED_AT)
        if used + len(data) > _ROOM:
            used = 0
        self._memory[_TEXT_AT + used : _TEXT_AT + used + len(data)] = data
        _USED.pack_into(self._memory, _USED_AT, used + len(data))

    def clear(self) -> None:
        """What was noted has been sent."""
        _USED.pack_into(self._memory, _USED_AT, 0)

    def set_done(self, count: int) -> None:
        """So many commands are done."""
        _DONE.pack_into(self._memory, 0, count)

    def done(self) -> int:
        """How many commands were done."""
        found: int = _DONE.unpack_from(self._memory)[0]
        return found

    def read(self) -> str:
        """What is in it."""
        used = min(_USED.unpack_from(self._memory, _USED_AT)[0], _ROOM)
        return self._memory[_TEXT_AT : _TEXT_AT + used].decode("utf-8", "replace")


def new_box() -> tuple[BlackBox, int]:
    """A box, and a descriptor for the other process."""
    fd = new_memory()
    os.ftruncate(fd, SIZE)
    return BlackBox(os.dup(fd)), fd
