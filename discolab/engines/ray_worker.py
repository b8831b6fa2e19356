"""A worker of a `RaySession`: what runs in a Ray actor's process, on its main thread."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from typing import Any

from ..runtime.interrupts import ignore_ctrl_c
from ..runtime.services import PRELOAD
from ..transport.addresses import machine_id
from .forkserver import import_all
from .membership import versions
from .remote_session import follow_path
from .worker_main import connect, run

_END_WITHIN = 3.0  # seconds that the end of the process may take


def about() -> dict[str, Any]:
    """Describe the machine and what is installed there, for the session that places workers."""
    import ray

    context = ray.get_runtime_context()
    return {
        "versions": versions(),
        "machine": machine_id(),
        "name": socket.gethostname(),
        "address": ray.util.get_node_ip_address(),
        "node": context.get_node_id(),
        "gpus": [str(number) for number in ray.get_gpu_ids()],
        "pid": os.getpid(),
    }


def work(settings: dict[str, Any]) -> None:
    """Be a worker until the session ends.

    Parameters
    ----------
    settings
        As for `worker_main.run`; and ``connect``, ``keys``, ``token`` of the session, ``argv``,
        ``gpus`` (which are seen, None: as Ray has it), ``like`` (the process that this one
        resembles, None: it is elsewhere), ``text`` (a pipe of a process of this machine).

    Raises
    ------
    EOFError
        If the session does not take the worker in.
    """
    ignore_ctrl_c()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's handler would only end a command
    _prepare(settings)
    import_all(PRELOAD)
    end = connect(settings)
    run(settings, end)
    end.close()
    # what the program has left running must not keep the process
    timer = threading.Timer(_END_WITHIN, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _prepare(settings: dict[str, Any]) -> None:
    sys.argv[:] = settings["argv"]
    if os.environ.get("PYTHONBREAKPOINT", "").startswith("ray."):  # it would wait for `ray debug`
        del os.environ["PYTHONBREAKPOINT"]
    if settings["gpus"] is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings["gpus"]
    like = settings["like"]
    if like is not None:
        own = {name: value for name, value in os.environ.items() if _is_rays(name)}
        os.environ.clear()
        os.environ.update({**like["environ"], **own})
        follow_path(like["path"])
        os.chdir(like["folder"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # nobody types there
    os.close(nothing)
    if settings["text"] is not None:
        _lead_text(*settings["text"])


def _is_rays(name: str) -> bool:
    return name.startswith("RAY_") or name.endswith("_VISIBLE_DEVICES")


def _lead_text(path: str, device: int, inode: int) -> None:
    """Have descriptors 1 and 2 lead to the session; else what is written is in Ray's logs."""
    try:
        status = os.stat(path)
        if (status.st_dev, status.st_ino) != (device, inode):
            return  # the same number means another process where this one runs
        fd = os.open(path, os.O_WRONLY)
    except OSError:
        return
    for own in (1, 2):
        os.dup2(fd, own)
    os.close(fd)
