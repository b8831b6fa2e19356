"""Step through a sharded program, all workers in lockstep; compare it with its reference.

`debugger_of(session)` gives the session's `Debugger`; in a notebook ``%%disco --step`` and its kin
use it.

On a worker a `Tracer` looks at each line, and a `DebugAgent` is where the worker stands. What it
says (records.py) goes to the session's `DebugController`; who may go on when is decided in
lockstep.py, as pure state. A `Debugger` is what a person asks, and gets a `Stop` from; `picture`
draws that. What has no need of stepping is beside it: assertions, post-mortem, NaN hunt, what was
recorded (recording.py on a worker, history.py here), and what went wrong last (explaining.py).
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
