"""The line to one client, and what the debugger is to it: what requests and events are made of.

`turn` is held while a message is written, and for as long as nothing else may be told.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable
from typing import Any

from ..debugger.debugger import Debugger
from .breakpoints import Breakpoints
from .framing import framed
from .sources import Sources
from .values import Values

_TICK = 10.0  # seconds until a client that does not read is taken for dead


class Peer:
    """See the module.

    Attributes
    ----------
    debugger, sources, breakpoints, values
    name
        What it calls itself: ``Visual Studio Code``.
    features
        What it said of itself in ``initialize``.
    attached
        Whether it has shown the token and holds the session's seat.
    closing
        Whether its line is closed, or shall be.
    stepped
        The worker that it last had go on, where its editor looks; -1 before that.
    paused
        When it has last asked for a pause (on the clock of ``time.monotonic``) of which it was told
        nothing yet; None: it has not.

    Parameters
    ----------
    admit
        Called with the token that it shows; raises if it may not attach.
    left
        Called when it has left, once or twice.
    """

    def __init__(
        self,
        debugger: Debugger,
        connection: socket.socket,
        admit: Callable[[Any, str], None],
        left: Callable[[Any], None],
    ) -> None:
        self.debugger = debugger
        self.sources = Sources()
        self.breakpoints = Breakpoints(debugger, self.sources)
        self.values = Values(debugger)
        self.name = "a client"
        self.features: dict[str, Any] = {}
        self.attached = self.closing = False
        self.paused: float | None = None
        self.stepped = -1
        self.turn = threading.RLock()
        self._admit = admit
        self._left = left
        self._connection = connection
        self._numbers = itertools.count(1)
        connection.settimeout(_TICK)

    def admit(self, token: str) -> None:
        """Let it attach.

        Raises
        ------
        ArgumentError
            If the token is wrong, or another client is attached.
        """
        self._admit(self, token)
        self.attached = True

    # -- events ----------------------------------------------------------------------------------

    def tell(self, event: str, **body: Any) -> None:
        """Send an event.

        Raises
        ------
        OSError
            If the client is gone.
        """
        self.send({"type": "event", "event": event, "body": body})

    def say(self, text: str, category: str = "console") -> None:
        """Have the client show a line."""
        self.tell("output", category=category, output=f"{text}\n")

    def send(self, message: dict[str, Any]) -> None:
        """Write a message, with its number."""
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
            self._left(self)  # the next one may come at once

    def close(self) -> None:
        """End the connection; on any thread."""
        self.closing = True
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._connection.close()
