"""The runtime: a controller that broadcasts commands, workers that own registers.

Glossary (the words of TVM's Disco and of torch.distributed):

session     the controller; it broadcasts commands and never carries tensors between workers
worker      executes commands in order; its *rank* is its number, the *world size* how many
register    a numbered place on each worker; a *poisoned* one holds the failure of its command
DRef        the controller's handle on one register id, the same on all workers
worker 0    shares the controller's process: host tensors go to and come from it
channel     the controller's line to one worker: commands there, replies back
group       workers cut in equal parts; collectives may stay within one
mesh        the workers in a grid with named axes; each line along an axis is a group
"""

from . import builtin as _builtin  # registers runtime.disco.*
from .actions import DiscoAction
from .arguments import Pickled, parse_dtype, parse_shape
from .dref import DModule, DPackedFunc, DRef
from .errors import (
    ArgumentError,
    CollectiveAborted,
    CollectiveError,
    DiscoAssertionError,
    DiscoError,
    ForeignDRefError,
    SessionClosedError,
    SessionError,
    UnknownFunctionError,
    WaitTimeoutError,
    WorkerError,
    WorkerInterrupted,
)
from .failures import Failure
from .functions import list_funcs, register_func
from .mesh import Mesh
from .restart import RestartedWorker
from .serialize import ProtocolError, register_type
from .services import probe
from .session import Session
from .status import SessionStatistics, WorkerStatus
from .worker import Worker, current_worker, current_worker_or_none

__all__ = [
    "ArgumentError",
    "CollectiveAborted",
    "CollectiveError",
    "DModule",
    "DPackedFunc",
    "DRef",
    "DiscoAction",
    "DiscoAssertionError",
    "DiscoError",
    "Failure",
    "ForeignDRefError",
    "Mesh",
    "Pickled",
    "ProtocolError",
    "RestartedWorker",
    "Session",
    "SessionClosedError",
    "SessionError",
    "SessionStatistics",
    "UnknownFunctionError",
    "WaitTimeoutError",
    "Worker",
    "WorkerError",
    "WorkerInterrupted",
    "WorkerStatus",
    "current_worker",
    "current_worker_or_none",
    "list_funcs",
    "parse_dtype",
    "parse_shape",
    "probe",
    "register_func",
    "register_type",
]

del _builtin
