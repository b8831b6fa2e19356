"""MPI between the workers of a socket session: one world of the session's process and mpirun's.

The session's process is no rank of mpirun's. It begins MPI by itself and opens a port; all that
mpirun has started connect to it, and the two sides merge. What MPI does meanwhile is done on a
thread of its own, for it can't be interrupted: a wait for it has a deadline, and a process where
one has passed can't use MPI any more. MPI is never ended (`MPI_Finalize` waits for every process
that was ever connected, gone or not): it ends with its processes.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...runtime.errors import DiscoError, WaitTimeoutError
from ...runtime.rank_from_environment import SERVED_BEFORE, launcher_rank
from ...runtime.worker import Worker
from .mpi import INSTALL, Communicator, MpiBackend

START_TIMEOUT = 60.0
"""Seconds in which all workers must have begun MPI, and then be connected."""

_stuck = ""  # why this process can't use MPI any more; written by its worker's thread alone


class Standing(NamedTuple):
    """What a worker tells of itself before anybody begins MPI."""

    why_not: str = ""
    launcher: str = ""
    rank: int = -1
    size: int = 0
    parent: str = ""  # workers of one process of mpirun's are forked from one parent


def standing(worker: Worker) -> Standing:
    """See `Standing`; does not import mpi4py."""
    if importlib.util.find_spec("mpi4py") is None:
        return Standing(f"mpi4py is not installed; {INSTALL}")
    if _stuck:
        return Standing(f"{_stuck}; restart the process")
    if worker.worker_id == 0:
        return Standing(_own_obstacle())
    own = dict(os.environ)
    own.pop("RANK", None)  # every worker has one, for torch.distributed
    place = launcher_rank(own)
    if place is None:
        return Standing("it was not started by mpirun")
    if SERVED_BEFORE in os.environ:
        return Standing(
            "its node has served a session before, and in what mpirun has started MPI begins once; "
            "end that mpirun and start it anew, without --stay"
        )
    return Standing("", place.launcher, place.rank, place.size, f"{os.uname()[1]}:{os.getppid()}")


def obstacle(standings: Sequence[Standing]) -> str:
    """Why the workers of a session can't use MPI, "" if they can; the same on all of them."""
    count = len(standings) - 1
    for rank, one in enumerate(standings):
        if one.why_not:
            return (
                f"'mpi' needs all workers but 0 to be started by one mpirun, each as a process, "
                f"and worker {rank} can't use it: {one.why_not}. In place of the session's nodes "
                f"run: mpirun -n {count} discolab node --connect ...; else use 'gloo'"
            )
    others = standings[1:]
    ranks = sorted(one.rank for one in others)
    if len({one.parent for one in others}) < count or ranks != list(range(count)):
        return (
            "'mpi' needs a process of mpirun's for every worker but 0, and one worker in each: "
            f"mpirun -n {count} discolab node --connect ... --workers 1; else use 'gloo'"
        )
    if {one.size for one in others} != {count}:
        return (
            f"mpirun has started {others[0].size} processes, of which the session has {count}; "
            f"'mpi' needs all: mpirun -n {count} discolab node --connect ...; else use 'gloo'"
        )
    return ""


def connect(worker: Worker, exchange: Callable[[str, str], list[str]]) -> MpiBackend:
    """The backend of a worker; all of them connect at once.

    Parameters
    ----------
    exchange
        Called with the name of a collective and a text: all workers' texts, by rank.

    Raises
    ------
    DiscoError
        If MPI can't begin on one of them, or they do not connect in time.
    """
    controller = worker.worker_id == 0
    told = exchange("begin MPI", json.dumps(_attempt(worker, "begin", _begin, controller)))
    port = _all_well(told)[0]
    told = exchange("connect MPI", json.dumps(_attempt(worker, "connect", _join, worker, port)))
    _all_well(told)
    return MpiBackend(_joined.pop())


_joined: list[Communicator] = []  # what `_join` has made, until `connect` takes it


def _begin(controller: bool) -> str:
    import mpi4py

    mpi4py.rc.finalize = False
    try:
        MPI = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as exc:
        raise DiscoError(f"mpi4py finds no MPI library ({exc}); {INSTALL}") from exc
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise DiscoError("this MPI library can't be used by several threads")
    return str(MPI.Open_port()) if controller else ""


def _join(worker: Worker, port: str) -> str:
    from mpi4py import MPI

    controller = worker.worker_id == 0
    if controller:
        sides = MPI.COMM_SELF.Accept(port)
        MPI.Close_port(port)
    else:
        sides = MPI.COMM_WORLD.Connect(port)
    both = sides.Merge(not controller)
    _joined[:] = [both.Split(0, worker.worker_id)]
    return ""


def _attempt(worker: Worker, what: str, function: Callable[..., str], *args: Any) -> list[str]:
    """What `function` gives, on a thread, and why it failed, "" if it has not."""
    global _stuck
    result: list[list[str]] = []

    def body() -> None:
        try:
            result.append([function(*args), ""])
        except BaseException as exc:
            result.append(["", f"{type(exc).__name__}: {exc}"])
        worker.wake()

    thread = threading.Thread(target=body, name="discolab-mpi", daemon=True)
    _stuck = f"MPI was asked to {what}, and has not answered"
    thread.start()
    try:
        worker.wait_for(lambda: bool(result), what, START_TIMEOUT)
    except WaitTimeoutError:
        return ["", f"{_stuck} within {START_TIMEOUT:g} s"]
    _stuck = ""
    return result[0]


def _all_well(told: Sequence[str]) -> list[str]:
    answers = [json.loads(one) for one in told]
    for rank, (_, error) in enumerate(answers):
        if error:
            raise DiscoError(f"init_ccl('mpi'): worker {rank}: {error}")
    return [answer for answer, _ in answers]


def _own_obstacle() -> str:
    """Of the session's own process: Python must not end MPI there, for that may never return."""
    if "mpi4py.MPI" not in sys.modules:
        return ""
    import mpi4py

    if mpi4py.rc.finalize is False:
        return ""
    return (
        "mpi4py.MPI was imported here before, and will wait for all workers when Python ends; "
        "import mpi4py; mpi4py.rc.finalize = False goes before that import"
    )
