"""One client: its requests are answered in their order, events come between the answers.

Two threads a client. One reads and answers (`serve`); no request waits for the program, and what is
asked of workers has a limit, so each is answered. The other (`Teller`) watches the debugger and
tells what has changed. `turn` is held while a message is written, and from the moment in which a
request has workers go on until it is answered: the stop that follows is told after the answer.
Neither thread takes `turn` while it holds a lock of the debugger.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ..debugger.debugger import Debugger
from ..runtime.errors import ArgumentError, DiscoError
from ..runtime.failures import safe_str
from .arguments import Arguments
from .framing import BrokenStreamError, Reader, message_of
from .peer import Peer
from .requests import GOING_ON, REQUESTS, UNATTACHED
from .teller import Teller

_TO_ATTACH = 60.0  # seconds that a connection has to say who it is


class Client(Peer):
    """See the module.

    Attributes
    ----------
    teller
        Its events.
    """

    def __init__(
        self,
        debugger: Debugger,
        connection: socket.socket,
        admit: Callable[[Any, str], None],
        left: Callable[[Any], None],
    ) -> None:
        super().__init__(debugger, connection, admit, left)
        self.teller = Teller(self)
        self._until = time.monotonic() + _TO_ATTACH

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
            self._left(self)

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
            self.send({"type": "response", **answer, **more, "body": body})
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


def _head(message: dict[str, Any]) -> tuple[int, str]:
    """The number and the command of a request."""
    number, command = message.get("seq"), message.get("command")
    if message.get("type") != "request" or not isinstance(command, str) or not command:
        raise ArgumentError("a message is a request, with a command")
    if not isinstance(number, int) or isinstance(number, bool):
        raise ArgumentError(f"{command:.60}: seq is a number; got {number!r:.60}")
    return number, command
