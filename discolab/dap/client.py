"""One client: its requests are answered in their order, events come between the answers.

Two threads a client. One reads and answers (`serve`); no request waits for the program, and what is
asked of workers has a limit, so each is answered. The other (`Teller`) watches the debugger and
tells what has changed. `turn` is held while a message is written, and from the moment in which a
request has workers go on until it is answered: the stop that follows is told after the answer.
Neither thread takes `turn` while it holds a lock of the debugger.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..debugger.debugger import Debugger
from ..runtime.errors import ArgumentError, DiscoError
from ..runtime.failures import safe_str
from .arguments import Arguments
from .breakpoints import Breakpoints
from .framing import BrokenStreamError, Reader, framed, message_of
from .requests import GOING_ON, REQUESTS, UNATTACHED
from .sources import Sources
from .teller import Teller
from .values import Values

if TYPE_CHECKING:
    from .server import Server

_TICK = 10.0  # seconds until a client that does not read is taken for dead
_TO_ATTACH = 60.0  # seconds that a connection has to say who it is


class Client:
    """See the module.

    Attributes
    ----------
    debugger, sources, breakpoints, values
    server
    name
        What it calls itself: ``Visual Studio Code``.
    features
        What it said of itself in ``initialize``.
    attached
        Whether it has shown the token and holds the session's seat.
    first_line
        What it adds to a line to have it count as the protocol does: lines from 1, or from 0.
    """

    def __init__(self, server: Server, debugger: Debugger, connection: socket.socket) -> None:
        self.server = server
        self.debugger = debugger
        self.sources = Sources()
        self.breakpoints = Breakpoints(debugger, self.sources)
        self.values = Values(debugger)
        self.teller = Teller(self)
        self.name = "a client"
        self.features: dict[str, Any] = {}
        self.attached = self.closing = False
        self.turn = threading.RLock()
        self._connection = connection
        self._numbers = itertools.count(1)
        self._until = time.monotonic() + _TO_ATTACH
        connection.settimeout(_TICK)

    # -- requests --------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer until the client goes, or sends what is not the protocol; on its own thread."""
        reader = Reader(self._receive)
        try:
            while not self.closing:
                content = reader.read()
                if content is None:
                    break
                self._answer(content)
        except (BrokenStreamError, OSError):
            pass
        finally:
            self.close()
            self.teller.stop()
            if self.attached:
                self.leave()
            self.server.left(self)

    def _receive(self, size: int) -> bytes:
        while True:
            try:
                return self._connection.recv(size)
            except TimeoutError:
                if not self.attached and time.monotonic() > self._until:
                    return b""

    def _answer(self, content: bytes) -> None:
        number, command = 0, ""
        message: dict[str, Any] = {}
        refused = ""
        try:
            message = message_of(content)
            number, command = _head(message)
        except ArgumentError as exc:
            refused = str(exc)
        with self.turn if command in GOING_ON else nullcontext():
            body: dict[str, Any] = {}
            if not refused:
                try:
                    body = self._do(command, message.get("arguments")) or {}
                except Exception as exc:  # whatever it is, the client has an answer
                    refused = safe_str(exc) or type(exc).__name__
                    if not isinstance(exc, DiscoError):
                        refused = f"{command}: {type(exc).__name__}: {refused}"
            if refused:
                words = refused.replace("{", "(").replace("}", ")")  # braces are for variables
                body = {"error": {"id": 1, "format": words, "showUser": True}}
            answer = {"request_seq": number, "success": not refused, "command": command}
            more = {"message": refused} if refused else {}
            self._send({"type": "response", **answer, **more, "body": body})
        if command == "attach":
            self.closing = self.closing or not self.attached  # no second guess on one connection
        if not refused:
            self._after(command)

    def _do(self, command: str, arguments: Any) -> dict[str, Any] | None:
        if not self.attached and command not in UNATTACHED:
            raise ArgumentError(f"{command}: attach with the token of the session first")
        handler = REQUESTS.get(command)
        if handler is None:
            raise ArgumentError(f"the debugger of discolab has no request {command!r:.60}")
        return handler(self, Arguments(command, arguments))

    def _after(self, command: str) -> None:
        """What comes after the answer."""
        if command == "attach":
            self.tell("initialized")
        elif command == "configurationDone":
            self.teller.start()
        elif command == "terminate":
            self.tell("terminated")
        elif command == "disconnect":
            self.closing = True

    # -- events ----------------------------------------------------------------------------------

    def tell(self, event: str, **body: Any) -> None:
        """Send an event.

        Raises
        ------
        OSError
            If the client is gone.
        """
        self._send({"type": "event", "event": event, "body": body})

    def say(self, text: str, category: str = "console") -> None:
        """Have the client show a line."""
        self.tell("output", category=category, output=f"{text}\n")

    def _send(self, message: dict[str, Any]) -> None:
        with self.turn:
            self._connection.sendall(framed({"seq": next(self._numbers), **message}))

    # -- the end ---------------------------------------------------------------------------------

    def end(self, words: str) -> None:
        """Tell the client that there is nothing to debug any more, and close; on any thread."""
        try:
            with self.turn:
                if self.attached and not self.closing:
                    self.say(words)
                    self.tell("terminated")
        except OSError:
            pass
        self.close()

    def leave(self) -> None:
        """Take back what the client has set; the program stays as it is. Any number of times."""
        if self.attached:
            self.attached = False
            self.debugger.stops_all, self.debugger.stops_on = False, frozenset()
            self.breakpoints.leave()
            self.server.left(self)  # the next one may come at once

    def close(self) -> None:
        """End the connection; on any thread."""
        self.closing = True
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._connection.close()


def _head(message: dict[str, Any]) -> tuple[int, str]:
    """The number and the command of a request."""
    number, command = message.get("seq"), message.get("command")
    if message.get("type") != "request" or not isinstance(command, str) or not command:
        raise ArgumentError("a message is a request, with a command")
    if not isinstance(number, int) or isinstance(number, bool):
        raise ArgumentError(f"{command:.60}: seq is a number; got {number!r:.60}")
    return number, command
