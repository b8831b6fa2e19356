"""``discolab dap --stdio``: the debug adapter that an editor starts, which passes messages on.

Two threads: what the editor says goes to the session's server, with the token in its ``attach``
request; what the server says comes back as it is. It ends when either side does.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

from ..runtime.errors import ArgumentError, DiscoError
from .framing import Reader, framed, message_of
from .served import Served, chosen

_AT_ONCE = 65536
_LAST_ANSWERS = 10.0  # seconds that they may take once the editor has ended


def the_one(port: int | None = None) -> Served:
    """The session to attach to.

    Raises
    ------
    DiscoError
        If there is none, or there are several.
    """
    found = chosen(port)
    if len(found) > 1:
        ports = ", ".join(str(one.port) for one in found)
        raise ArgumentError(f"several sessions are served: which --port? ({ports})")
    return found[0]


def run(served: Served) -> None:
    """Pass messages on until one side ends.

    Raises
    ------
    DiscoError
        If the session's server can't be reached, or the editor sends what is not the protocol.
    """
    try:
        server = socket.create_connection(("127.0.0.1", served.port), timeout=10.0)
    except OSError as exc:
        raise DiscoError(f"the session at port {served.port} can't be reached: {exc}") from None
    server.settimeout(None)
    back = threading.Thread(target=_back, args=(server,), daemon=True)
    back.start()
    reader = Reader(lambda size: os.read(sys.stdin.fileno(), size))
    while (content := reader.read()) is not None:
        message = message_of(content)
        if message.get("command") == "attach":
            given = message.get("arguments")
            arguments = given if isinstance(given, dict) else {}
            message["arguments"] = {"token": served.token, **arguments}
        try:
            server.sendall(framed(message))
        except OSError:
            break
    try:
        server.shutdown(socket.SHUT_WR)  # the editor says no more; the answers are still to come
    except OSError:
        return  # the server was the first to end
    back.join(_LAST_ANSWERS)


def _back(server: socket.socket) -> None:
    """What the server says, until it ends; then the editor is let go, too."""
    try:
        while data := server.recv(_AT_ONCE):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    except OSError:
        pass
    finally:
        os._exit(0)  # the other thread waits for the editor
