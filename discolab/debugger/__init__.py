"""Step through a sharded program, all workers in lockstep; compare it with its reference.

`debugger_of(session)` gives the session's `Debugger`; in a notebook ``%%disco --step`` and its kin
use it. What runs on workers, and what the controller knows of them, is in records.py and stops.py;
who may go on when is decided in lockstep.py.
"""

from . import picture as _picture  # noqa: F401 - gives a Stop its picture
from .controller import DebuggerError
from .debugger import Debugger, Program, debugger_of
from .stops import Evaluated, Stop, WorkerAt

__all__ = [
    "Debugger",
    "DebuggerError",
    "Evaluated",
    "Program",
    "Stop",
    "WorkerAt",
    "debugger_of",
]
