"""A program in a process of its own, for what may stop a whole process: no timeout runs in that."""

from __future__ import annotations

import subprocess
import sys


def output_of(program: str, seconds: float = 60) -> str:
    """What a program prints; an error if it does not end."""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=seconds
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
