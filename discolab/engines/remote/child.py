"""A worker in a process of its own: what runs there.

The process's main thread is the worker's; its *link thread* takes control messages, sends output
while the worker computes, and says from time to time that the process lives. Both say things on the
line under `WireLink._out`, so that all is in one order: what was printed comes before the reply.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ...runtime import serialize, sources
from ...runtime.actions import Command, DiscoAction
from ...runtime.failures import Failure
from ...runtime.link import Ears
from ...runtime.probes import SERVICE as PROBES
from ...runtime.probes import answer as probe_answer
from ...runtime.worker import Worker, bind_thread, own_process
from ...transport.frame import BufferPool, Frame, unbundle, unpack
from ...transport.local import local_socket
from .. import hooks
from ..local_workers import leave_thread, prepare_thread
from . import messages, streams
from .black_box import BlackBox
from .lines import Wire
from .local_lines import LocalWire

HEARTBEAT = 2.0  # seconds at most after which a worker that has said nothing says that it lives
_FLUSH_EVERY = 0.1  # seconds between two looks at output while a command runs
_PROGRESS_EVERY = 512  # commands
_MOST_TEXT = 20_000  # characters of output in one message
_CELL = re.compile(r"Cell In\[\d+\](\.\d+)?")


class WireChannel:
    """The worker's end of its channel (see runtime/channel.py); its thread alone uses it."""

    copies = True  # what is replied is copied on its way

    def __init__(self, wire: Wire, link: WireLink) -> None:
        self._wire, self._link = wire, link
        self.received = 0
        self.box: BlackBox | None = None
        self._interrupts = 0
        self._turn = 0  # of the last command that went to all workers
        self._come: deque[tuple[Any, int | None]] = deque()
        self._next: Command | None = None  # comes after what it has brought along

    def recv(self) -> Command:
        """Wait for the next command."""
        if self._next is not None:
            command, self._next = self._next, None
            return command
        if self.box is not None:
            self.box.set_done(self.received)
        while True:
            if not self._come:
                self._fetch()
            command, forget, turn = messages.unpack_command(*unpack(*self._come.popleft()))
            if not turn or turn > self._turn:  # else it was sent once more
                break
        self._turn = turn or self._turn
        self.received += 1
        if self.received % _PROGRESS_EVERY == 0:
            self._link.say(messages.PROGRESS, self.received)
        if command[0] == DiscoAction.END_INTERRUPT:  # it may have overtaken what it is the end of
            self._interrupts += 1
            self._link.announced_all(self._interrupts)
        if forget:
            self._next = command
            return DiscoAction.KILL_REG, 0, forget
        return command

    def _fetch(self) -> None:
        """Wait until there is something to receive."""
        found = self._wire.recv_command()
        if found is None:
            end_process()
            return
        data, fd = found
        if fd is None:
            for message in unbundle(data):
                self._come.append((message, None))
        else:
            self._come.append(found)

    def send(self, command: Command) -> None:
        """Only the controller's end has it."""
        raise NotImplementedError

    def reply(self, ticket: int, rank: int, value: Any) -> None:
        """Answer a command; a value that can't be sent is a failure."""
        try:
            self._link.reply(ticket, self.received, value)
        except EOFError:
            end_process()
        except Exception as exc:
            failure = Failure.from_exception(rank, "fetching a value", "", exc)
            failure.exception = None
            self._link.say(messages.REPLY, ticket, self.received, failure)

    def pending(self) -> int:
        """Unknown here; the controller counts."""
        return 0


class WireLink:
    """See `runtime.link.Link`. `_out` guards the sending; `_heard` what was announced."""

    def __init__(self, wire: Wire) -> None:
        self.host = "127.0.0.1"
        self.beat = HEARTBEAT
        self._wire = wire
        self._out = threading.Lock()
        self._heard = threading.Condition()
        self._announced = 0
        self._told_in = -1  # the last call that has told something
        self._failed_since = False  # a call that has told nothing
        self._pool = BufferPool()
        self._ears = Ears()
        self._said_at = time.monotonic()
        self.outlet = streams.Outlet(wire.wake)
        self.worker: Worker | None = None
        self.channel: WireChannel | None = None

    # -- saying ------------------------------------------------------------------------------

    def say(self, kind: int, *contents: Any) -> None:
        """Send a message, after all that was put out before it."""
        self._send(messages.pack_message(kind, *contents, shared=self._wire.shared))

    def reply(self, ticket: int, received: int, value: Any) -> None:
        """Send a reply."""
        if type(value) is list and not value:
            self._send(messages.pack_done(ticket, received))
            return
        contents = (messages.REPLY, ticket, received, value)
        shared = self._wire.shared
        self._send(messages.pack_message(*contents, shared=shared, pool=self._pool))

    def _send(self, frame: Frame) -> None:
        with self._out:
            if self.outlet.waiting:
                self._send_output()
            self._wire.send(frame)
            self._said_at = time.monotonic()

    def tell(self, service: str, value: Any) -> None:
        """See `Link`."""
        if self.worker is not None:
            self._told_in = self.worker.executed
            if self._failed_since:  # what it says now may depend on that
                self.tell_state()
        self.say(messages.TELL, service, value)

    def answer_probe(self, question: Any) -> None:
        """Look at the worker as a session asks for it; see runtime/probes.py."""
        assert self.worker is not None
        self.say(messages.TELL, PROBES, probe_answer(self.worker, question))

    def listen(self, service: str, handler: Callable[[Any], None]) -> None:
        """See `Link`; what was said before is given to the handler now."""
        self._ears.listen(service, handler)

    def flush(self) -> None:
        """Send what was put out."""
        with self._out:
            self._send_output()

    def flush_waiting(self) -> None:
        """See `Link`."""
        if self.outlet.waiting:
            self.flush()

    def _send_output(self) -> None:
        items: list[Any] = []
        size = 0
        for item in self.outlet.take():
            texts = item[0] in ("stdout", "stderr")
            for part in _pieces(item) if texts else [item]:
                items.append(part)
                size += len(part[1]) if texts else _MOST_TEXT
                if size >= _MOST_TEXT:
                    self._send_items(items)
                    items, size = [], 0
        if items:
            self._send_items(items)

    def _send_items(self, items: list[Any]) -> None:
        shared = self._wire.shared
        done = 0
        if self.channel is not None and self.worker is not None:
            done = self.channel.received - (self.worker.current is not None)
        self._wire.send(messages.pack_message(messages.OUTPUT, items, done, shared=shared))

    def call_failed(self, ordinal: int) -> None:
        """See `Link`."""
        if self._told_in == ordinal:
            self.tell_state()
        else:
            self._failed_since = True

    def tell_state(self) -> None:
        """Say what the worker is now."""
        assert self.worker is not None and self.channel is not None
        self._failed_since = False
        with self._out:
            state = self.worker.state(self.channel.received)
            fields = messages.state_fields(state)
            frame = messages.pack_message(messages.STATE, fields, shared=self._wire.shared)
            self._wire.send(frame)
            self._said_at = time.monotonic()

    # -- hearing -----------------------------------------------------------------------------

    def announced_all(self, count: int) -> None:
        """Wait until so many interrupts were announced; they come by another way."""
        with self._heard:
            self._heard.wait_for(lambda: self._announced >= count, 10)

    def serve(self) -> None:
        """Body of the link thread, which is nobody's."""
        bind_thread(None)
        worker = self.worker
        assert worker is not None
        flushing = False
        try:
            while not worker.ended:
                idle = worker.current is None and not self.outlet.waiting
                found = self._wire.recv_control(self.beat / 2 if idle else _FLUSH_EVERY)
                if found is not None:
                    self._hear(serialize.open_all(serialize.decode(*unpack(*found))))
                elif flushing:
                    self.flush()
                flushing = self.outlet.waiting  # what has just begun may be a part of a line
                self._pool.tidy()
                if time.monotonic() - self._said_at > self.beat:
                    self.tell_state()
        except EOFError:
            end_process()

    def _hear(self, message: Any) -> None:
        worker = self.worker
        assert worker is not None
        kind = message[0]
        if kind == messages.ANNOUNCE:
            worker.announce_interrupt()
            with self._heard:
                self._announced += 1
                self._heard.notify_all()
        elif kind == messages.RETRY:
            worker.retry_interrupt()
        elif kind == messages.FREE:
            for number in message[1]:
                self._pool.free(number)
        elif kind == messages.ASK_STATE:
            self.tell_state()
        elif kind == messages.SAY:
            assert self.worker is not None
            self._ears.hear(self.worker, message[1], message[2])


def _pieces(item: tuple[str, str]) -> list[tuple[str, str]]:
    name, text = item
    return [(name, text[at : at + _MOST_TEXT]) for at in range(0, len(text), _MOST_TEXT)]


def _cell_name(filename: str) -> str | None:
    """The cells of the notebook are compiled here under the names that people know."""
    match = _CELL.fullmatch(filename)
    return filename.removesuffix(match[1] or "") if match else None


def run(settings: dict[str, Any], wire: Wire, box: BlackBox | None = None) -> None:
    """Be a worker until the session ends.

    Parameters
    ----------
    settings
        ``rank``, ``local_rank``, ``num_workers``, ``num_groups``, ``device``, ``threads``; and
        ``host``, where other workers are on other machines.
    box
        For what is printed and not sent yet.
    """
    link = WireLink(wire)
    link.outlet.box = box
    link.host = settings.get("host", link.host)
    link.beat = min(HEARTBEAT, settings.get("heartbeat", HEARTBEAT) / 4)
    channel = WireChannel(wire, link)
    channel.box = box
    streams.install(link.outlet)
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
        link.worker, link.channel = worker, channel
        link.listen(PROBES, link.answer_probe)
        prepare_thread(worker, settings["threads"])
        own_process(worker)
        hooks.hold(None, [threading.current_thread()])
        hooks.enter(worker)
    except BaseException as exc:
        link.say(messages.FAILED, messages.text_of(exc))
        raise
    thread = threading.Thread(target=link.serve, name="discolab-link", daemon=True)
    thread.start()
    link.say(messages.HELLO, os.getpid())
    link.tell_state()
    try:
        worker.run()
    finally:
        try:
            leave_thread(worker)
        finally:
            link.flush()


def run_forked(settings: dict[str, Any], cmd: int, ctl: int, box: int) -> int:
    """Be a worker of a `ProcessSession` in a process that was forked for it; the exit status."""
    prepare_process(settings)
    wire = LocalWire(local_socket(cmd), local_socket(ctl))
    run(settings, wire, BlackBox(box))
    atexit._run_exitfuncs()
    wire.close()
    return 0


def run_connected(settings: dict[str, Any], box: int = -1) -> int:
    """The same for a session that is reached at ``settings["connect"]``."""
    from ...transport.handshake import Keys
    from .zmq_lines import ZmqWire

    prepare_process(settings)
    keys, token = Keys.of(settings["keys"]), bytes.fromhex(settings["token"])
    try:
        wire = ZmqWire(settings["connect"], keys, token, settings["rank"])
    except EOFError as exc:
        sys.stderr.write(f"worker {settings['rank']}: {exc}\n")
        return 1
    run(settings, wire, BlackBox(box) if box >= 0 else None)
    atexit._run_exitfuncs()
    wire.close()
    return 0


def prepare_process(settings: dict[str, Any]) -> None:
    """Make a forked process what the controller's is, as far as `settings` say it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session interrupts, not the terminal
    faulthandler.enable(file=2, all_threads=False)  # where it was is said if C code crashes
    if "environ" in settings:
        os.environ.clear()
        os.environ.update(settings["environ"])
        sys.path[:] = settings["path"]
        sys.argv[:] = settings["argv"]
        os.chdir(settings["folder"])


def end_process() -> Any:
    """The controller is gone: end, with all that was started from here."""
    try:
        if os.getpgrp() == os.getpid():  # else the group is not ours
            os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(1)
