"""Serves the debugger of one session to clients of the Debug Adapter Protocol, one at a time.

It listens on the loopback interface alone. Every process of the machine can connect there, so
nothing is answered until the client has shown the token in its ``attach`` request; only then it
holds the seat. The server holds the session weakly: it ends with it.

Threads: one accepts, each client has two of its own (client.py). `_lock` guards who is connected.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import weakref
from pathlib import Path
from typing import Any

from ..debugger.debugger import Debugger, debugger_of
from ..runtime.errors import ArgumentError, DiscoError
from ..runtime.session import Session
from .client import Client
from .served import launch_configuration, publish, withdraw

_HOST = "127.0.0.1"
_MOST = 8  # connections at a time, attached or not
_TICK = 0.5  # seconds between two looks whether the session is there
_SHORTEST = 16  # characters of a token


class Server:
    """See the module; `serve` makes it.

    Attributes
    ----------
    host, port
        Where it listens.
    token
        What a client must show.
    file
        Where ``discolab dap`` finds it, readable by its owner alone; None if it can't be written.
    """

    def __init__(self, session: Session, port: int = 0, token: str | None = None) -> None:
        debugger = debugger_of(session)
        self.host = _HOST
        self.token = token or secrets.token_urlsafe(24)
        self._debugger = weakref.ref(debugger)
        self._lock = threading.Lock()
        self._clients: list[Client] = []
        self._attached: Client | None = None
        self._closed = False
        try:
            self._listener = socket.create_server((self.host, port))
        except (OSError, OverflowError) as exc:
            raise DiscoError(f"can't listen on port {port} of {self.host}: {exc}") from None
        self._listener.settimeout(_TICK)
        self.port: int = self._listener.getsockname()[1]
        self.file: Path | None = publish(self.port, self.token, session.num_workers)
        weakref.finalize(self, withdraw, self.file)  # also where the process ends first
        threading.Thread(target=self._accept, name="discolab-dap", daemon=True).start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.host}:{self.port}"
        return f"<debug adapter of discolab, {state}>"

    @property
    def closed(self) -> bool:
        """Whether it listens no more: it was closed, or the session was."""
        debugger = self._debugger()
        return self._closed or debugger is None or debugger.session.closed

    @property
    def client(self) -> str | None:
        """The name of the client that is attached, None if none is."""
        with self._lock:
            return self._attached.name if self._attached is not None else None

    @property
    def launch(self) -> dict[str, Any]:
        """The configuration for VS Code's ``launch.json``, with port and token."""
        return launch_configuration(self.port, self.token)

    def put_out(self, rank: int, category: str, text: str) -> None:
        """A worker has printed something (``stdout``, ``stderr``); quick, on any thread."""
        client = self._attached
        if client is not None:
            client.teller.put_out(rank, category, text)

    def close(self) -> None:
        """End it; who is attached is told that it has ended. Any number of times."""
        self._closed = True
        withdraw(self.file)
        self._listener.close()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            client.end("the debug adapter was closed")

    # -- clients ---------------------------------------------------------------------------------

    def seat(self, client: Client, token: str) -> None:
        """Let a client attach.

        Raises
        ------
        ArgumentError
            If the token is wrong, or another client is attached.
        """
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            raise ArgumentError(
                "attach: the token is not this session's; `discolab dap` prints the right one"
            )
        with self._lock:
            other = self._attached
            if other is not None and other is not client:
                raise ArgumentError(f"attach: {other.name} is attached to this session already")
            self._attached = client

    def left(self, client: Client) -> None:
        """A client is gone."""
        with self._lock:
            if client in self._clients:
                self._clients.remove(client)
            if self._attached is client:
                self._attached = None

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                connection = None
            except OSError:
                break
            debugger = self._debugger()
            if debugger is None or debugger.session.closed:
                if connection is not None:
                    connection.close()
                break
            if connection is not None:
                self._begin(debugger, connection)
            del debugger
        self.close()

    def _begin(self, debugger: Debugger, connection: socket.socket) -> None:
        client = Client(debugger, connection, self.seat, self.left)
        with self._lock:
            if self._closed or len(self._clients) >= _MOST:
                client.close()
                return
            self._clients.append(client)
        threading.Thread(target=client.serve, name="discolab-dap-client", daemon=True).start()


_servers: weakref.WeakKeyDictionary[Session, Server] = weakref.WeakKeyDictionary()


def serve(session: Session, port: int = 0, token: str | None = None) -> Server:
    """Serve a session's debugger to VS Code and other clients of the Debug Adapter Protocol.

    Parameters
    ----------
    session
    port
        On 127.0.0.1; 0: one that is free.
    token
        What a client must show, 16 characters or more; None: a random one.

    Returns
    -------
    Server
        The one that there is already, if the session is served.

    Raises
    ------
    ArgumentError
        If port or token are none, or the session is served with others.
    DiscoError
        If the port is taken.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
        raise ArgumentError(f"a port is a number from 0 to 65535; got {port!r}")
    if token is not None and (not isinstance(token, str) or len(token) < _SHORTEST):
        raise ArgumentError(f"a token is a string of {_SHORTEST} characters or more")
    debugger_of(session)  # which says so if it is no session
    known = _servers.get(session)
    if known is not None and not known.closed:
        if port not in (0, known.port) or token not in (None, known.token):
            raise ArgumentError(f"the session is served already, at port {known.port}: close that")
        return known
    session._check_open()
    _servers[session] = server = Server(session, port, token)
    return server
