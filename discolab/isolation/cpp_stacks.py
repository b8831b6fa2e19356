"""Keeps torch from starting a program that is not there, to name the C++ functions of a stack.

torch asks `addr2line`, of binutils, which slim images of containers do not have. The process that
it forks for that then goes on, from an exception, as a second kernel or worker, and the thread that
waits for its answer may wait for ever.
"""

from __future__ import annotations

import os
import shutil

from . import table
from .patches import Patches
from .table import Row, Treatment

_MODE = "TORCH_SYMBOLIZE_MODE"
_PROGRAM = "TORCH_ADDR2LINE_BINARY"


def _install(patches: Patches) -> None:
    """Choose the way that needs no program; torch reads the variable at its first stack."""
    if _MODE in os.environ or shutil.which(os.environ.get(_PROGRAM, "addr2line")):
        return
    os.environ[_MODE] = "dladdr"
    patches.at_undo(_forget)


def _forget() -> None:
    os.environ.pop(_MODE, None)


table.add(
    Row(
        state="how torch names the C++ functions of a stack",
        treatment=Treatment.SHARED,
        meaning="Where there is no `addr2line`, torch looks in what is loaded (as with "
        "`TORCH_SYMBOLIZE_MODE=dladdr`), which gives functions but no lines. By itself it would "
        "go on in a copy of the process, as with `checkpoint(..., debug=True)` or snapshots of a "
        "GPU's memory, and a worker would hang.",
        test="tests/isolation/test_cpp_stacks.py::test_a_stack_is_read_where_there_is_no_addr2line",
        install=_install,
        in_own_process=True,
    )
)
