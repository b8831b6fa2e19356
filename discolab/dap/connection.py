"""The client's end of a line to a server: requests, each with its answer; and events.

One thread a connection reads. Requests may be sent from any thread.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from ..runtime.errors import ArgumentError, DiscoError
from .framing import BrokenStreamError, Reader, framed, message_of

_TO_CONNECT = 10.0  # seconds
_ENDED = "the debug adapter has ended"

Message = dict[str, Any]


class Connection:
    """See the module.

    Parameters
    ----------
    host, port
        Where the server listens.
    on_event
        Called with each event, on the thread that reads: it must not wait.
    on_end
        Called once, on that thread, when the line has ended.

    Raises
    ------
    DiscoError
        If nobody listens there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        on_event: Callable[[Message], None],
        on_end: Callable[[], None],
    ) -> None:
        try:
            self._socket = socket.create_connection((host, port), timeout=_TO_CONNECT)
        except OSError as exc:
            raise DiscoError(f"the debug adapter at port {port} can't be reached: {exc}") from None
        self._socket.settimeout(None)
        self._on_event = on_event
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards `_waiting`, `_ended`, and what is written
        self._waiting: dict[int, Future[Message]] = {}
        self._ended = False
        threading.Thread(target=self._read, name="discolab-dap-connection", daemon=True).start()

    def ask(self, command: str, arguments: Mapping[str, Any] | None = None) -> Future[Message]:
        """Send a request; its answer, whether it was refused or not."""
        answer: Future[Message] = Future()
        with self._lock:
            if self._ended:
                answer.set_exception(DiscoError(_ENDED))
                return answer
            number = next(self._numbers)
            self._waiting[number] = answer
            message = {"seq": number, "type": "request", "command": command}
            try:
                self._socket.sendall(framed({**message, "arguments": dict(arguments or {})}))
            except OSError:  # the thread that reads sees that, too
                pass
        return answer

    def close(self) -> None:
        """End it, on any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _read(self) -> None:
        reader = Reader(self._socket.recv)
        try:
            while (content := reader.read()) is not None:
                message = message_of(content)
                if message.get("type") == "event":
                    self._on_event(message)
                    continue
                with self._lock:
                    answer = self._waiting.pop(message.get("request_seq", 0), None)
                if answer is not None and answer.set_running_or_notify_cancel():
                    answer.set_result(message)
        except (OSError, BrokenStreamError, ArgumentError):
            pass
        with self._lock:
            self._ended = True
            left = list(self._waiting.values())
            self._waiting.clear()
        for answer in left:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(DiscoError(_ENDED))
        self._socket.close()
        self._on_end()
