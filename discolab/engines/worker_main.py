"""A worker's process: what is set up there, and what runs on its main thread.

The fork server starts `run_forked` or `run_connected`, a Ray actor (ray_worker.py) calls `run`.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import re
import sys
import threading
from typing import Any

import torch

from ..runtime import sources
from ..runtime.interrupts import ignore_ctrl_c
from ..runtime.worker import Worker, own_process, prepare_thread
from ..transport.handshake import Keys
from ..transport.unix_sockets import local_socket
from . import hooks, output
from .child_processes import CrashBuffer
from .connections import command_encoding
from .connections.interface import WorkerEnd
from .connections.socket_pairs import LocalWorkerEnd
from .connections.worker_side import WorkerChannel, WorkerLink
from .worker_threads import leave_thread

_CELL = re.compile(r"Cell In\[\d+\](\.\d+)?")


def _cell_name(filename: str) -> str | None:
    """Name a cell of the notebook, which is compiled here under the name that people know."""
    match = _CELL.fullmatch(filename)
    return filename.removesuffix(match[1] or "") if match else None


def run(settings: dict[str, Any], end: WorkerEnd, crash_buffer: CrashBuffer | None = None) -> None:
    """Be a worker until the session ends.

    Parameters
    ----------
    settings
        ``rank``, ``local_rank``, ``num_workers``, ``num_groups``, ``device``, ``threads``,
        ``heartbeat``; and ``host``, where other workers are on other machines.
    end
        Of the connection to the session.
    crash_buffer
        For what is printed and not sent yet.
    """
    link = WorkerLink(end, settings["heartbeat"], settings.get("host", "127.0.0.1"))
    link.output_buffer.crash_buffer = crash_buffer
    channel = WorkerChannel(end, link, crash_buffer)
    output.install(link.output_buffer)
    sources.namers.append(_cell_name)
    try:
        worker = Worker(
            settings["rank"],
            settings["num_workers"],
            settings["num_groups"],
            torch.device(settings["device"]),
            channel,
            shared={},
            worker_zero_data={},
        )
        worker.local_worker_id = settings["local_rank"]
        worker.peers = {worker.worker_id: worker}
        worker.link = link
        link.attach(worker, channel)
        prepare_thread(worker, settings["threads"])
        own_process(worker)
        hooks.hold(None, [threading.current_thread()])
        hooks.enter(worker)
    except BaseException as exc:
        link.say(command_encoding.FAILED, command_encoding.text_of(exc))
        raise
    link.start()
    try:
        worker.run()
    finally:
        try:
            leave_thread(worker)
        finally:
            link.flush()


def run_forked(settings: dict[str, Any], commands: int, control: int, crash_buffer: int) -> int:
    """Be a worker of a `ProcessSession` in a process that was forked for it; the exit status."""
    prepare_process(settings)
    end = LocalWorkerEnd(local_socket(commands), local_socket(control))
    return _run_to_the_end(settings, end, CrashBuffer(crash_buffer))


def run_connected(settings: dict[str, Any], crash_buffer: int) -> int:
    """The same for a session that is reached at ``settings["connect"]``."""
    prepare_process(settings)
    try:
        end = connect(settings)
    except EOFError as exc:
        sys.stderr.write(f"worker {settings['rank']}: {exc}\n")
        return 1
    return _run_to_the_end(settings, end, CrashBuffer(crash_buffer))


def connect(settings: dict[str, Any]) -> WorkerEnd:
    """Connect to a session's port.

    Raises
    ------
    EOFError
        If the session does not take the worker in.
    """
    from .connections.tcp import TcpWorkerEnd  # it imports zmq, which most workers don't need

    keys, token = Keys.of(settings["keys"]), bytes.fromhex(settings["token"])
    return TcpWorkerEnd(settings["connect"], keys, token, settings["rank"])


def _run_to_the_end(settings: dict[str, Any], end: WorkerEnd, crash_buffer: CrashBuffer) -> int:
    run(settings, end, crash_buffer)
    atexit._run_exitfuncs()
    end.close()
    return 0


def prepare_process(settings: dict[str, Any]) -> None:
    """Make a forked process what the controller's is, as far as `settings` say it."""
    ignore_ctrl_c()
    faulthandler.enable(file=2, all_threads=False)  # where it was is said if C code crashes
    if "environ" in settings:
        os.environ.clear()
        os.environ.update(settings["environ"])
        sys.path[:] = settings["path"]
        sys.argv[:] = settings["argv"]
        os.chdir(settings["folder"])
