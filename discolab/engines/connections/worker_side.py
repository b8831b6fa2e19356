"""The worker's side of its connection to the controller: its channel and its link.

The process's main thread is the worker's; its *link thread* takes control messages, sends output
while the worker computes, and says from time to time that the process lives. Both send messages
under `WorkerLink._out`, so that all is in one order: what was printed comes before the reply.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import Any

from ...runtime import serialize
from ...runtime.actions import Command, DiscoAction
from ...runtime.failures import Failure
from ...runtime.interrupts import plain_lock, reentrant_lock
from ...runtime.services import SERVICE as PROBES
from ...runtime.services import Dispatcher
from ...runtime.services import answer as probe_answer
from ...runtime.worker import Worker, bind_thread
from ...transport.frame import BUNDLE, BufferPool, Frame, unbundle, unpack
from ..child_processes import CrashBuffer
from ..output import OutputBuffer
from . import command_encoding
from .interface import WorkerEnd

HEARTBEAT = 2.0  # seconds at most after which a worker that has said nothing says that it lives
_FLUSH_EVERY = 0.1  # seconds between two looks at output while a command runs
_STATE_EVERY = 512  # commands, so that the controller knows how far it is behind
_MOST_TEXT = 20_000  # characters of output in one message


class WorkerChannel:
    """The worker's end of its channel (see runtime/channel.py); its thread alone uses it."""

    copies = True  # what is replied is copied on its way

    def __init__(self, end: WorkerEnd, link: WorkerLink, crash_buffer: CrashBuffer | None) -> None:
        self._end, self._link, self._crash_buffer = end, link, crash_buffer
        self.received = 0
        self._interrupts = 0
        self._turn = 0  # of the last command that went to all workers
        self._frames: deque[tuple[Any, Sequence[int]]] = deque()  # received, not unpacked
        self._next: Command | None = None  # after the one that forgets the registers it names

    def recv(self) -> Command:
        """Wait for the next command."""
        if self._next is not None:
            command, self._next = self._next, None
            return command
        if self._crash_buffer is not None:
            self._crash_buffer.set_done(self.received)
        while True:
            data, fds = self._frames.popleft() if self._frames else self._receive()
            frame = unpack(data, fds[0] if fds else None)
            command, forget, turn = command_encoding.unpack_command(*frame)
            if not turn or turn > self._turn:  # else it was sent once more
                break
        self._turn = turn or self._turn
        if self.received % _STATE_EVERY == _STATE_EVERY - 1:
            self._link.tell_state()
        self.received += 1
        if command[0] == DiscoAction.END_INTERRUPT:  # it may have overtaken what it is the end of
            self._interrupts += 1
            self._link.await_interrupts(self._interrupts)
        if forget:
            self._next = command
            return DiscoAction.KILL_REG, 0, forget
        return command

    def _receive(self) -> tuple[Any, Sequence[int]]:
        """Wait for a frame, and keep the others of its bundle."""
        received = self._end.recv_command()
        if received is None:
            end_process()
        assert received is not None
        if len(received[0]) > 3 and received[0][3] == BUNDLE:
            self._frames.extend(zip(unbundle(received[0]), repeat(())))
            return self._frames.popleft()
        return received

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
            self._link.say(command_encoding.REPLY, ticket, self.received, failure)

    def pending(self) -> int:
        """Unknown here; the controller counts."""
        return 0


class WorkerLink:
    """A `ServiceChannel`. `_out` guards sending, `_heard` the count of interrupts."""

    def __init__(self, end: WorkerEnd, heartbeat: float, host: str) -> None:
        self.host = host
        self._beat = min(HEARTBEAT, heartbeat / 4)
        self._end, self._shared = end, end.shared
        self._out = plain_lock()
        self._heard = threading.Condition(reentrant_lock())
        self._announced = 0
        self._told_in = -1  # the last call that has told something
        self._failed_since = False  # a call that has told nothing
        self._pool = BufferPool()
        self._dispatcher = Dispatcher()
        self.listen = self._dispatcher.listen
        self._said_at = time.monotonic()
        self.output_buffer = OutputBuffer(end.wake)
        self._worker: Worker  # from `attach`
        self._channel: WorkerChannel | None = None

    def attach(self, worker: Worker, channel: WorkerChannel) -> None:
        """Be a worker's link, before its first command."""
        self._worker, self._channel = worker, channel
        self.listen(PROBES, self._answer_probe)

    def start(self) -> None:
        """Start the link thread, and say that the worker is ready."""
        thread = threading.Thread(target=self._serve, name="discolab-link", daemon=True)
        thread.start()
        self.say(command_encoding.HELLO, os.getpid())
        self.tell_state()

    # -- saying ------------------------------------------------------------------------------

    def say(self, kind: int, *contents: Any) -> None:
        """Send a message, after all output that came before it."""
        self._send(command_encoding.pack_message(kind, *contents, shared=self._shared))

    def reply(self, ticket: int, received: int, value: Any) -> None:
        """Send a reply."""
        if type(value) is list and not value:
            self._send(command_encoding.pack_done(ticket, received))
            return
        contents = (command_encoding.REPLY, ticket, received, value)
        self._send(command_encoding.pack_message(*contents, shared=self._shared, pool=self._pool))

    def _send(self, frame: Frame) -> None:
        with self._out:
            if self.output_buffer.items:
                self._send_output()
            self._end.send(frame)
            self._said_at = time.monotonic()

    def tell(self, service: str, value: Any) -> None:
        """See `ServiceChannel`."""
        self._told_in = self._worker.executed
        if self._failed_since:  # what it says now may depend on that
            self.tell_state()
        self.say(command_encoding.TELL, service, value)

    def _answer_probe(self, question: Any) -> None:
        """Inspect the worker as a session asks for it; see runtime/services.py."""
        self.say(command_encoding.TELL, PROBES, probe_answer(self._worker, question))

    def flush(self) -> None:
        """Send the output that is waiting."""
        with self._out:
            self._send_output()

    def flush_waiting(self) -> None:
        """See `ServiceChannel`."""
        if self.output_buffer.items:
            self.flush()

    def _send_output(self) -> None:
        items: list[Any] = []
        size = 0
        for item in self.output_buffer.take():
            is_text = item[0] in ("stdout", "stderr")
            for part in _pieces(item) if is_text else [item]:
                items.append(part)
                size += len(part[1]) if is_text else _MOST_TEXT
                if size >= _MOST_TEXT:
                    self._send_items(items)
                    items, size = [], 0
        if items:
            self._send_items(items)

    def _send_items(self, items: list[Any]) -> None:
        done = 0
        if self._channel is not None:
            done = self._channel.received - (self._worker.current is not None)
        frame = command_encoding.pack_message(
            command_encoding.OUTPUT, items, done, shared=self._shared
        )
        self._end.send(frame)

    def call_failed(self, ordinal: int) -> None:
        """See `ServiceChannel`."""
        if self._told_in == ordinal:
            self.tell_state()
        else:
            self._failed_since = True

    def tell_state(self) -> None:
        """Send the worker's state."""
        assert self._channel is not None
        self._failed_since = False
        with self._out:
            state = self._worker.state(self._channel.received)
            self._end.send(
                command_encoding.pack_message(command_encoding.STATE, state, shared=self._shared)
            )
            self._said_at = time.monotonic()

    # -- receiving ---------------------------------------------------------------------------

    def await_interrupts(self, count: int) -> None:
        """Wait until so many interrupts were announced; they come by another way."""
        with self._heard:
            self._heard.wait_for(lambda: self._announced >= count, 10)

    def _serve(self) -> None:
        """Body of the link thread."""
        bind_thread(None)
        worker = self._worker
        flushing = False
        try:
            while not worker.ended:
                idle = worker.current is None and not self.output_buffer.items
                received = self._end.recv_control(self._beat / 2 if idle else _FLUSH_EVERY)
                if received is not None:
                    data, fds = received
                    message = serialize.decode(*unpack(data, fds[0] if fds else None))
                    self._take(serialize.open_all(message))
                elif flushing:
                    self.flush()
                # flushed at the next turn: what has just begun may be a part of a line
                flushing = bool(self.output_buffer.items)
                self._pool.tidy()
                if time.monotonic() - self._said_at > self._beat:
                    self.tell_state()
        except EOFError:
            end_process()

    def _take(self, message: Any) -> None:
        kind = message[0]
        if kind == command_encoding.ANNOUNCE:
            self._worker.announce_interrupt()
            with self._heard:
                self._announced += 1
                self._heard.notify_all()
        elif kind == command_encoding.RETRY:
            self._worker.retry_interrupt()
        elif kind == command_encoding.FREE:
            for number in message[1]:
                self._pool.free(number)
        elif kind == command_encoding.ASK_STATE:
            self.tell_state()
        elif kind == command_encoding.SAY:
            self._dispatcher.dispatch(self._worker, message[1], message[2])


def _pieces(item: tuple[str, str]) -> list[tuple[str, str]]:
    name, text = item
    return [(name, text[at : at + _MOST_TEXT]) for at in range(0, len(text), _MOST_TEXT)]


def end_process() -> Any:
    """End this process, with all that it has started: the controller is gone."""
    try:
        if os.getpgrp() == os.getpid():  # else the group is not ours
            os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(1)
