"""Keeps the noise of C code that writes straight to this process's output out of a cell.

What is written to the descriptors meanwhile goes to a file; what of it is not known as noise is
passed on afterwards, so that nothing of anybody else is lost. Python's own output in a notebook, on
other threads too, does not go through descriptors.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

_DESCRIPTORS = (1, 2)


@contextmanager
def without_lines(noise: Sequence[bytes]) -> Iterator[None]:
    """Drop lines that have one of these words in them, of what this process writes meanwhile.

    One thread of a process at a time.
    """
    _flush()
    kept: list[tuple[int, int]] = []
    with tempfile.TemporaryFile() as file:
        try:
            for number in _DESCRIPTORS:
                with suppress(OSError):  # it is closed
                    kept.append((number, os.dup(number)))
                    os.dup2(file.fileno(), number)
            yield
        finally:
            _flush()
            for number, before in kept:
                os.dup2(before, number)
                os.close(before)
            file.seek(0)
            rest = b"".join(line for line in file if not any(word in line for word in noise))
            if rest and kept:
                with suppress(OSError):
                    os.write(kept[-1][0], rest)


def _flush() -> None:
    """What the C library has not written yet, out."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
