"""A node of a `SocketSession`: the process on another machine that runs some of its workers.

It connects to the session, says what it has, and forks workers as it is told; they connect by
themselves. It watches over them: says how one has ended and what the others do, ends them when the
session does or when the connection to it is gone. If it is killed itself, they end with it: the
process that has forked them sees it.

One thread. The process that forks is forked off before zmq is used here.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import zmq

from ..runtime import accelerators
from ..runtime.errors import ArgumentError, DiscoError
from ..runtime.rank_from_environment import SERVED_BEFORE, LauncherRank
from ..runtime.services import PRELOAD
from ..transport.addresses import (
    NO_SESSION,
    address_towards,
    endpoint_of,
    look_for_session,
    machine_id,
    split_endpoint,
)
from ..transport.handshake import WITHIN, Keys
from ..transport.tcp import ENDED, LINGER, event_of, milliseconds, set_options
from . import forkserver
from .child_processes import Children
from .membership import versions
from .placement import place_workers

WAIT = 120.0  # seconds that a session may take to be there
_BEAT = 1.0  # seconds between two signs of life
_ATTEMPTS = 2  # to be let in
_AGAIN = 0.5  # seconds between two looks whether there is a session

Say = Callable[[str], None]


class Refused(DiscoError):
    """The session does not take this node in."""


class Lost(DiscoError):
    """The session was there, and is gone."""


class Node:
    """One node, from its first attempt to connect to the end of its session.

    Parameters
    ----------
    endpoint
        Of the session: ``tcp://10.0.0.1:5555``.
    workers
        How many workers it brings; None: as many as the session has on each node.
    devices
        What they compute on; None: the GPUs of this machine in turn, or the CPU.
    rank
        The order among the nodes; None: the order in which they come.
    place
        What a launcher has given to this process.
    say
        Called with a line for people.

    Raises
    ------
    ArgumentError
        If a device is not there, or the endpoint is none.
    DiscoError
        If there is no session within `wait` seconds.
    """

    def __init__(
        self,
        endpoint: str,
        keys: Keys,
        *,
        workers: int | None = None,
        devices: Sequence[str] | str | None = None,
        rank: int | None = None,
        place: LauncherRank | None = None,
        wait: float = WAIT,
        say: Say = print,
    ) -> None:
        try:
            self._host, self._port = split_endpoint(endpoint)
        except ValueError as exc:
            raise ArgumentError(str(exc)) from None
        self._shown, self._keys, self._say, self._wait = endpoint, keys, say, wait
        kind, gpus = accelerators.kind() or "cuda", _count_gpus()
        self._hello = {
            "versions": versions(),
            "workers": workers,
            "rank": rank,
            "size": place.size if place else 0,
            "launcher": place.launcher if place else "",
            "local_rank": place.local_rank if place else 0,
            "machine": machine_id(),
            "name": socket.gethostname(),
            "pid": os.getpid(),
            "cores": torch.get_num_threads(),
            "accelerator": kind,
            "gpus": gpus,
            "devices": _checked(devices, kind, gpus),
        }
        forkserver.import_all(PRELOAD)
        self._await_session(wait)
        self._server = forkserver.ForkServer.forked()
        self._children = Children()
        self._fds: set[int] = set()  # readable once a worker has ended
        self._over = False  # whether the session has said that it ends

    def run(self) -> int:
        """Serve one session; the exit status: 0 if the session has ended as sessions do.

        Raises
        ------
        Refused
            If the session does not take this node in.
        Lost
            If it has gone otherwise than sessions do.
        """
        self._context = zmq.Context()
        linger = LINGER
        try:
            self._connect()
            self._hello["address"] = address_towards(self._host, self._port)
            self._hello["reached"] = split_endpoint(self._endpoint)[0]
            self._tell({"hello": self._hello})
            code = self._serve()
            linger = 0  # the session does not receive any more
            return code
        except (KeyboardInterrupt, SystemExit) as exc:
            why = "was stopped by SIGTERM" if isinstance(exc, SystemExit) else "was stopped"
            self._tell({"leaving": why})
            raise
        finally:
            self._children.end()
            self._context.destroy(linger)
            self._server.close()
            for fd in self._fds:
                os.close(fd)

    # -- the connection --------------------------------------------------------------------------

    def _await_session(self, wait: float) -> None:
        deadline = time.monotonic() + wait
        said = False
        while True:
            left = max(0.1, deadline - time.monotonic())
            why = look_for_session(self._host, self._port, min(left, WITHIN))
            if not why:
                return
            if why == NO_SESSION:
                raise Refused(f"{self._shown}: {why}")
            if time.monotonic() + _AGAIN > deadline:
                raise DiscoError(
                    f"no session at {self._shown} within {wait:g} s ({why}): is the address right, "
                    "and the port open in the firewall?"
                )
            if not said:
                said = True
                self._say(f"waiting for a session at {self._shown} ({why})")
            time.sleep(_AGAIN)

    def _connect(self) -> None:
        """Connect, and wait until the session has let us in.

        One that is about to end breaks off as one does that does not know our keys: look again.
        """
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_AGAIN)
                self._await_session(self._wait)
            if self._is_let_in():
                return
        raise Refused(
            f"the session at {self._shown} does not know this key file: copy the one of the "
            "session's machine here (`discolab keys` there says which it is)"
        )

    def _is_let_in(self) -> bool:
        self._endpoint = endpoint_of(self._host, self._port)
        self._socket = self._context.socket(zmq.DEALER)
        set_options(self._socket, self._endpoint, self._keys, server=False)
        self._monitor = self._socket.get_monitor_socket()
        began = time.monotonic()
        self._socket.connect(self._endpoint)
        while self._monitor.poll(milliseconds(2 * WITHIN)):
            event = event_of(self._monitor.recv_multipart())[0]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return True
            if event & ENDED:
                break
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        if time.monotonic() - began > WITHIN / 2:
            raise Lost(f"the session at {self._shown} does not answer; is it busy or stopped?")
        return False

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._socket.send(json.dumps(message).encode(), zmq.NOBLOCK)
        except (AttributeError, zmq.ZMQError):  # not connected yet
            pass

    # -- the session -----------------------------------------------------------------------------

    def _serve(self) -> int:
        self._poll = zmq.Poller()
        self._poll.register(self._socket, zmq.POLLIN)
        self._poll.register(self._monitor, zmq.POLLIN)
        beat_at = time.monotonic()
        while True:
            ready = dict(self._poll.poll(milliseconds(beat_at - time.monotonic())))
            if self._socket in ready:
                self._hear(json.loads(self._socket.recv()))
            elif self._monitor in ready:
                self._watch_connection()
            if self._over:
                self._children.end()
                self._say("the session has ended")
                return 0
            ended_fds = [fd for fd in ready if isinstance(fd, int)]
            for fd in ended_fds:
                self._poll.unregister(fd)
                self._fds.remove(fd)
                os.close(fd)
            beat = time.monotonic() >= beat_at
            if ended_fds or beat:
                ended = self._children.look()
                if ended:
                    unsent = {rank: self._children.last_output(rank) for rank in ended}
                    self._tell({"ended": ended, "unsent": unsent})
            if beat:
                beat_at = time.monotonic() + _BEAT
                self._tell({"beat": self._children.states()})

    def _hear(self, message: dict[str, Any]) -> None:
        if "refused" in message:
            raise Refused(f"refused by the session at {self._shown}: {message['refused']}")
        if "taken" in message:
            self._say(f"joined the session at {self._shown}")
        if "welcome" in message:
            self._start(message["welcome"])
        if "kill" in message:
            self._children.kill(int(message["kill"]))
        if "end" in message:
            self._over = True

    def _start(self, welcome: dict[str, Any]) -> None:
        for own in welcome["workers"]:
            settings = {
                **welcome["common"],
                **own,
                "connect": self._endpoint,
                "keys": self._keys.as_dict(),
            }
            fd = self._children.start(self._server, own["rank"], settings)
            if fd >= 0:
                self._fds.add(fd)
                self._poll.register(fd, zmq.POLLIN)

    def _watch_connection(self) -> None:
        if event_of(self._monitor.recv_multipart())[0] & ENDED:
            while not self._over and self._socket.poll(0):  # said before it ended, seen after
                self._hear(json.loads(self._socket.recv()))
            if self._over:
                return
            raise Lost(
                f"the session at {self._shown} is gone: it was ended, or the connection was cut"
            )


def _checked(devices: Sequence[str] | str | None, kind: str, gpus: int) -> list[str] | None:
    """Devices by name; which GPUs there are is known without asking torch, which would use them."""
    if devices is None:
        return None
    names = devices.split(",") if isinstance(devices, str) else list(devices)
    for name in names:
        device = place_workers(1, name)[0] if not str(name).startswith(("cuda", kind)) else None
        index = torch.device(name).index or 0 if device is None else -1
        if index >= gpus:
            raise ArgumentError(f"there is no {name}: torch sees {gpus} GPUs here")
    return [str(name).strip() for name in names]


def _count_gpus() -> int:
    """How many accelerators workers take; asked in a child: this process can still be forked."""
    if accelerators.kind() is None:
        return 0
    answer, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(end, str(accelerators.count() if accelerators.default_kind() else 0).encode())
        finally:
            os._exit(0)
    os.close(end)
    with os.fdopen(answer, "rb") as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return int(text or 0)


def run_nodes(
    endpoint: str, keys: Keys, *, stay: bool = False, wait: float | None = None, **options: Any
) -> int:
    """Serve one session, or with `stay` one after the other; see `Node`. The exit status.

    `wait` None is two minutes for the one, and any time for the others.

    Raises
    ------
    DiscoError
        If the session is not there, does not want this node, or is lost (but with `stay` the next
        one is waited for then).
    """
    if wait is None:
        wait = math.inf if stay else WAIT
    while True:
        try:
            code = Node(endpoint, keys, wait=wait, **options).run()
        except Lost as exc:
            if not stay:
                raise
            options.get("say", print)(str(exc))
            code = 1
        if not stay:
            return code
        os.environ[SERVED_BEFORE] = "1"  # workers to come inherit it


def run_forked(settings: dict[str, Any]) -> int:
    """Be a node in a process that a session has forked to try things out; the exit status."""
    from .worker_main import prepare_process

    prepare_process(settings)
    own = settings["node"]
    try:
        return run_nodes(
            own["connect"],
            Keys.of(own["keys"]),
            stay=own.get("stay", False),
            workers=own["workers"],
            rank=own["rank"],
            say=lambda _: None,
        )
    except DiscoError as exc:
        sys.stderr.write(f"discolab node: {exc}\n")
        return 1
