"""Which sessions of this user are served: a private file each, which ``discolab dap`` reads.

A file is named for its process and port, and goes with the server; what a process left behind that
was killed is removed by whoever looks.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ..engines.keys import default_file
from ..runtime.errors import DiscoError


class Served(NamedTuple):
    """A session that is served."""

    pid: int
    port: int
    token: str
    workers: int


def launch_configuration(port: int, token: str) -> dict[str, Any]:
    """What goes into the list ``configurations`` of VS Code's ``launch.json``."""
    return {
        "name": "discolab",
        "type": "discolab",
        "request": "attach",
        "debugServer": port,
        "token": token,
    }


def publish(port: int, token: str, workers: int) -> Path | None:
    """Write the file of a server; None if there is no place for it."""
    file = _folder() / f"{os.getpid()}-{port}.json"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w", encoding="utf-8") as out:
            json.dump(Served(os.getpid(), port, token, workers)._asdict(), out)
    except OSError:
        return None
    return file


def withdraw(file: Path | None) -> None:
    """Remove the file of a server of this process; a process forked from it leaves it alone."""
    if file is not None and file.name.startswith(f"{os.getpid()}-"):
        _remove(file)


def all_served() -> list[Served]:
    """The sessions that are served now, by port."""
    found = []
    for file in _folder().glob("*-*.json"):
        try:
            one = Served(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        if psutil.pid_exists(one.pid):
            found.append(one)
        else:
            _remove(file)
    return sorted(found, key=lambda one: one.port)


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError:
        pass


def told(port: int | None = None) -> str:
    """What a person is told of the sessions that are served, or of the one at a port.

    Raises
    ------
    DiscoError
        If there is none.
    """
    lines = []
    for one in chosen(port):
        lines.append(f"// {one.workers} workers of process {one.pid}")
        lines.append(json.dumps(launch_configuration(one.port, one.token), indent=2))
    return "\n".join(lines)


def chosen(port: int | None = None) -> list[Served]:
    """The sessions that are served, or the one at a port.

    Raises
    ------
    DiscoError
        If there is none.
    """
    known = all_served()
    found = [one for one in known if port in (None, one.port)]
    if not found:
        ports = ", ".join(str(one.port) for one in known)
        raise DiscoError(
            f"no session is served at port {port} (there are: {ports})"
            if known
            else "no session of yours is served on this machine: %disco_debug dap in its notebook, "
            "or discolab.dap.serve(session)"
        )
    return found


def _folder() -> Path:
    return default_file().parent / "dap"
