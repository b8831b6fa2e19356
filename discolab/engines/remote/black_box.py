"""What a worker has printed and not sent yet, where it survives the worker.

Memory that the controller's process shares with a worker's: u32 bytes used, then text. A process
that crashes takes with it what is in its own memory; what it printed last is what people want to
read. The worker writes, the controller reads when the worker is gone.
"""

from __future__ import annotations

import mmap
import os
import struct

SIZE = 1 << 16  # bytes
_USED = struct.Struct("<I")
_ROOM = SIZE - _USED.size


class BlackBox:
    """One process's end; takes the descriptor over."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, SIZE)
        os.close(fd)

    def note(self, text: str) -> None:
        """Add to it; what does not fit pushes out what was there."""
        data = text.encode("utf-8", "replace")[-_ROOM:]
        (used,) = _USED.unpack_from(self._memory)
        if used + len(data) > _ROOM:
            used = 0
        self._memory[_USED.size + used : _USED.size + used + len(data)] = data
        _USED.pack_into(self._memory, 0, used + len(data))

    def clear(self) -> None:
        """What was noted has been sent."""
        _USED.pack_into(self._memory, 0, 0)

    def read(self) -> str:
        """What is in it."""
        used = min(_USED.unpack_from(self._memory)[0], _ROOM)
        return self._memory[_USED.size : _USED.size + used].decode("utf-8", "replace")


def new_box() -> tuple[BlackBox, int]:
    """A box, and a descriptor for the other process."""
    fd = os.memfd_create("discolab-box", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    return BlackBox(os.dup(fd)), fd
