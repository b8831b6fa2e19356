"""The controller's side of a session's worker processes: sends commands, and receives on a thread.

A `WorkerConnections` knows no session, so that a session nobody holds can be collected. What guards
or owns its state:

- the session's lock guards what is sent to one worker, and which commands are held back
- the cork guards the sending of commands, which worker 0's thread may do too: the `RemoteChannel`s,
  `to_forget`, the turn, the numbers of tickets
- the reader thread alone writes `states`, `heartbeats`, `lost`, `last_output`, and calls services
- `_tickets` is a dict of which single operations are used; `_changed` guards nothing but waiting

Worker 0 is a thread of this process, and services are called for it on that thread.
"""

from __future__ import annotations

import atexit
import re
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from ...runtime import serialize
from ...runtime.actions import Command, DiscoAction, site_text
from ...runtime.channel import ThreadChannel, Ticket
from ...runtime.failures import Failure
from ...runtime.interrupts import shield
from ...runtime.services import SERVICE as PROBES
from ...runtime.services import SERVICES, Dispatcher, Service, WorkerState
from ...runtime.worker import Worker
from ...transport.frame import Frame, FrameError, bundle, unpack
from .. import output
from ..heartbeat import Heartbeats, why_stopped
from . import command_encoding
from .interface import Transport

_WATCH_EVERY = 0.2  # seconds between two looks at what a silent worker's process does
_TICK = 0.05  # seconds after which services are asked whether something is due, at the latest
_OF_OURS = re.compile(r"^Extension modules: |/discolab/(runtime|engines)|<frozen runpy>")
_LAST_LINES = 12  # of what a worker has put out, in its exit reason
_MOST_HELD = 200  # commands held back
_RECENT = 64  # calls of a worker kept for its exit reason
_running: weakref.WeakSet[WorkerConnections] = weakref.WeakSet()
_CALL_PACKED = int(DiscoAction.CALL_PACKED)
_WORKER_0_ONLY = (DiscoAction.COPY_FROM_WORKER0, DiscoAction.COPY_TO_WORKER0)


class WorkerProcesses(Protocol):
    """The processes of a session's workers, as the engine that has started them knows them.

    It must not hold the session. `exit_reason`, `activity` and `cut_off` are called on the reader
    thread, `where`, `pid_here` and `end` on any.

    Attributes
    ----------
    connections
        Set by them.
    """

    connections: WorkerConnections

    def exit_reason(self, rank: int) -> str:
        """Why a worker's process has ended: ``was killed by SIGKILL``."""

    def where(self, rank: int) -> str:
        """Which process a worker is: ``(pid 123 on host)``."""

    def pid_here(self, rank: int) -> int | None:
        """The process of a worker on this machine; None if it is elsewhere, or not known."""

    def activity(self, rank: int) -> str:
        """What a worker's process does now (`process_state`); "" if that is unknown so far."""

    def cut_off(self, rank: int) -> str:
        """Why nothing can come from the machine of a silent worker; "" if nothing shows that."""

    def end(self, wait: bool = True) -> None:
        """End all processes that are left, with what they have started; may be called again."""


class RemoteChannel:
    """The controller's end of the channel of one remote worker; see runtime/channel.py."""

    copies = True

    def __init__(self, rank: int, connections: WorkerConnections) -> None:
        self.rank = rank
        self.sent = 0
        self.done = 0  # as far as is known
        self._exact = False  # whether that is all of them
        self.write: Callable[[Frame], object] = _drop
        self._connections = connections
        self._forgotten: tuple[int, ...] = ()  # what the worker was told of `to_forget`
        self.recent: deque[tuple[int, str, Any]] = deque(maxlen=_RECENT)

    def begin(self, write: Callable[[Frame], object]) -> None:
        """Another worker is at the other end: count anew; under the session's lock."""
        self.sent = self.done = 0
        self._exact = False
        self._forgotten = ()
        self.recent.clear()
        self.write = write

    def send(self, command: Command) -> None:
        """Queue a command for this worker alone; under the session's lock."""
        connections = self._connections
        if command[0] in _WORKER_0_ONLY:
            return
        if self.rank in connections.lost:
            ticket = command_encoding.ticket_of(command)
            if self.rank in connections.answers and ticket and self.rank not in ticket.values:
                connections.number_of(ticket)
                connections.answer_for(self.rank)
            return
        with connections.cork:
            connections.flush_held()
            forget = connections.to_forget
            if forget is self._forgotten:
                forget = ()
            else:  # the next command to all says it again, before any of these is used again
                self._forgotten = forget
            frame = command_encoding.pack_command(
                command, connections.number_of, forget, connections.transport.shared
            )
            _note((self,), command)
            self.write(frame)

    def recv(self) -> Command:
        """Only the worker's end has it."""
        raise NotImplementedError

    def reply(self, ticket: Any, rank: int, value: Any) -> None:
        """Only the worker's end has it."""
        raise NotImplementedError

    def pending(self) -> int:
        """How many commands the worker has not done yet, as far as is known."""
        return self.sent - self.done

    def knows_done(self, count: int) -> None:
        """Record, of a worker that is gone, exactly how many commands it had done."""
        self.done, self._exact = count, True

    def last_command(self) -> str:
        """What the worker ran last, as far as is known; "" if nothing."""
        open_ones = [entry for entry in tuple(self.recent) if entry[0] > self.done]
        if not open_ones:
            return ""
        _, text, site = open_ones[0]
        where = site_text(site)
        text = f"{text} (called at {where})" if where else text
        later = len(open_ones) - 1
        if self._exact or not later:
            return text
        return f"{text} or {f'one of the {later} calls' if later > 1 else 'the call'} after it"


def _note(channels: Iterable[RemoteChannel], command: Command) -> None:
    """Count a command, and of a call keep what `last_command` may say of it."""
    if command[0] != _CALL_PACKED:
        for channel in channels:
            channel.sent += 1
        return
    text, site = command[3].text, command[6]
    for channel in channels:
        channel.sent += 1
        channel.recent.append((channel.sent, text, site))


def _drop(_frame: Frame) -> None:
    """Stands for the sender of a worker that is not there."""


class WorkerConnections:
    """The connections to the workers of one session, and what is known of these workers.

    Services are made with it, and may use `num_workers`, `hosts`, `sent`, `lost`, `tell`,
    `ask_states`, `workers_here` and `exit_text`.

    Attributes
    ----------
    states
        The newest known state of each remote worker, by rank.
    heartbeats
        How long each of them has said nothing, and why.
    cut_off
        Why nothing can come from their machines, by rank, of those for which that is known.
    lost
        Why a worker's connection ended, by rank; "" if the session has ended it.
    last_output
        The last lines that each worker has put out.
    joined
        The process ids of the workers that have said that they are ready, by rank.
    failed
        Why a worker could not begin, by rank.
    hosts
        By rank, equal for workers of one machine; empty: all are on one.
    answers
        What questions to a lost worker are answered with, while another is to take its place; None
        for the moment until that is known.
    when_lost
        Called with the rank of a worker that is lost, on the reader thread; None: nobody asks.
    """

    def __init__(
        self,
        num_workers: int,
        transport: Transport,
        processes: WorkerProcesses,
        heartbeat: float = 10.0,
    ) -> None:
        self.num_workers = num_workers
        self.transport = transport
        self.channels = {rank: RemoteChannel(rank, self) for rank in range(1, num_workers)}
        self.services: dict[str, Service] = {}
        self._looking: list[Service] = []  # those to which something can become due
        self.states: dict[int, WorkerState] = {}
        self.heartbeats = Heartbeats(heartbeat)
        self.cut_off: dict[int, str] = {}
        self.lost: dict[int, str] = {}
        self.last_output = {rank: output.LastOutput() for rank in range(num_workers)}
        self.joined: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        self.closing = False
        self.hosts: list[str] = []
        self.answers: dict[int, Failure | None] = {}
        self.when_lost: Callable[[int], None] | None = None
        self._kept: dict[int, list[Frame]] = {}  # of a worker that is admitted, for `let_in`
        self._processes = processes
        processes.connections = self
        self._here: dict[int, _LinkHere] = {}  # worker 0's link
        # with the workers that have not replied; the thread that takes one out of these delivers
        self._tickets: dict[int, tuple[Ticket, list[int]]] = {}
        self.to_forget: tuple[int, ...] = ()  # registers, with the next command
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="discolab-reader", daemon=True)
        self.cork = threading.RLock()  # guards the sending of commands; within a shield
        self._held: deque[Command] = deque()  # calls, and registers to forget, in this order
        self._frames: list[Frame] = []  # what of them was packed and not sent yet
        self.hold: Callable[[Command], None] = self._held.append
        self._turn = 0
        self._flushing = False
        self._all = tuple(self.channels.values())
        self._free: deque[tuple[int, int]] = deque()  # buffers to give back: rank, number
        self._droppers = {rank: partial(self._dropped, rank) for rank in self.channels}
        self.idle = False  # whether worker 0 waits for a command
        self._look_at = 0.0  # when services are asked next whether something is due
        self._watch_at = 0.0  # when silent workers are looked at next
        self._asked: set[int] = set()  # silent workers that were asked what they do
        self._frozen: set[int] = set()  # workers of which services know that they are
        self._stopped = False
        self._when_dropped: Callable[[], None] | None = None
        transport.receiver = self
        _running.add(self)

    # -- sending -----------------------------------------------------------------------------

    # A call is held back for a moment, so that the question that often follows it goes with it:
    # until there is one, or worker 0, which was idle and gets the call next, takes it. `hold` is C
    # code: with what gives the call to worker 0 no Ctrl-C comes between.

    def held_one(self) -> None:
        """Send what is held back, unless worker 0 does so in a moment; after `hold`."""
        # worker 0 says that it is idle no more and then looks: one of us two sees the other
        if not self.idle or len(self._held) >= _MOST_HELD:
            with shield(), self.cork:
                self.flush_held()

    def send_all(self, command: Command) -> None:
        """Queue a command for all remote workers; under the session's lock, in a shield."""
        if command[0] in _WORKER_0_ONLY or not self._all:
            return
        with self.cork:
            try:
                self._pack_held()
                self._pack(command)
            finally:
                self.flush_held()
        for rank in tuple(self.answers):
            self.answer_for(rank)

    def _pack(self, command: Command) -> None:
        """Pack a command for all, with the registers to forget before it; under the cork."""
        frame = command_encoding.pack_command(
            command, self.number_of, self.to_forget, self.transport.shared, self._turn + 1
        )
        self._turn += 1
        self._frames.append(frame)
        self.to_forget = ()
        _note(self._all, command)

    def _pack_held(self) -> None:
        held = self._held
        while held:
            command = held[0]
            if command[0] == _CALL_PACKED:
                self._pack(command)
            else:
                self.to_forget += command[2]
                if len(self.to_forget) > command_encoding.MOST_FORGOTTEN:
                    self._pack(self._forgetting())
            held.popleft()

    def flush_held(self) -> None:
        """Send what was held back; under the cork."""
        if not (self._held or self._frames):
            return
        self._flushing = True  # worker 0 need not wait for the cork just to find nothing
        try:
            self._pack_held()
            frames = self._frames
            for frame in frames if len(frames) < 2 else bundle(frames):
                for channel in self._all:
                    channel.write(frame)
            # not before: after a Ctrl-C above all is sent again, and `turn` sorts it out
            frames.clear()
        finally:
            self._flushing = False

    def _forgetting(self) -> Command:
        ids, self.to_forget = list(self.to_forget), ()
        return DiscoAction.KILL_REG, 0, ids

    def forget_now(self) -> None:
        """Have the workers forget registers without a command; under the lock, in a shield.

        The session's housekeeping does so now and then. With it goes a call that is still held
        back because Ctrl-C came before `held_one`.
        """
        with self.cork:
            self._pack_held()
            if self.to_forget:
                self._pack(self._forgetting())
            self.flush_held()

    def number_of(self, ticket: Ticket) -> int:
        """A ticket's number on its way; the ticket is kept here until all have replied."""
        number = ticket.number
        if number not in self._tickets:
            self._tickets[number] = ticket, [rank for rank in ticket.asked if rank]
        return number

    def control(self, rank: int, kind: int, *contents: Any) -> None:
        """Send a message to a worker's link; any thread."""
        if rank not in self.lost and not self._stopped:
            self.transport.control(
                rank, command_encoding.pack_message(kind, *contents, shared=self.transport.shared)
            )

    def tell(self, rank: int, service: str, value: Any) -> None:
        """Say something to a service's handler on a worker; any thread."""
        if rank in self._here:
            self._here[rank].take(service, value)
        else:
            self.control(rank, command_encoding.SAY, service, value)

    def ask_states(self, ranks: Iterable[int]) -> None:
        """Ask workers what they do; the answers come as `states`, and to the services."""
        for rank in ranks:
            if rank in self.channels:
                self.control(rank, command_encoding.ASK_STATE)
            elif rank in self._here:
                worker = self._here[rank].worker
                self._take_state(rank, worker.state(worker.executed))

    @property
    def sent(self) -> dict[int, int]:
        """How many commands each remote worker was sent, or is in a moment."""
        held = sum(command[0] == _CALL_PACKED for command in tuple(self._held))
        return {rank: channel.sent + held for rank, channel in self.channels.items()}

    # -- worker 0 ----------------------------------------------------------------------------

    def adopt(self, worker: Worker, channel: ThreadChannel) -> None:
        """Take in the worker that is a thread of this process, before it starts."""
        get = channel.recv

        def recv() -> Command:
            self.idle = True
            command = get()
            self.idle = False
            if (self._held or self._frames) and not self._flushing:  # see `held_one`
                with self.cork:
                    self.flush_held()
            return command

        channel.recv = recv  # type: ignore[assignment]
        worker.link = self._here[worker.worker_id] = _LinkHere(worker, self)

    def workers_here(self) -> dict[int, Worker]:
        """The workers of this process, by rank."""
        return {rank: link.worker for rank, link in self._here.items()}

    # -- receiving ---------------------------------------------------------------------------

    def start(self) -> None:
        """Make the services, and start the reader thread."""
        for name, make in SERVICES.items():
            self.services[name] = make(self)
        self._looking = [
            service
            for service in self.services.values()
            if type(service).next_look is not Service.next_look
        ]
        self._thread.start()

    def processes_started(self) -> None:
        """Begin to send: all processes are there, or will connect."""
        for channel in self._all:
            channel.write = self.transport.sender(channel.rank)

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Wait until something that comes in makes `ready()` true; Ctrl-C ends it."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not ready():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.05))
        return True

    def stop(self) -> None:
        """End the reader thread and close the connections."""
        self._stopped = True
        self.transport.loop.wake()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(5)
        for service in self.services.values():
            service.close()
        self._tickets.clear()
        self.transport.close()

    def end_later(self) -> None:
        """Have the workers end when they are done, then everything here: the session was dropped.

        Takes no lock, so that a finalizer may call it.
        """
        if not self.closing:
            self._when_dropped = partial(self._processes.end, wait=False)
            self.transport.loop.wake()

    def leave(self) -> None:
        """Never touch the connections again: this process was forked from the controller's."""
        self.closing = self._stopped = True
        for channel in self._all:
            channel.write = _drop
        self._held.clear()
        self._frames.clear()
        _running.discard(self)

    def look_soon(self) -> None:
        """Have services asked now whether something is due; any thread."""
        self._look_at = 0.0
        self.transport.loop.wake()

    def _run(self) -> None:
        """Body of the reader thread."""
        turn = self.transport.loop.turn
        while not self._stopped:
            if self._when_dropped is not None and self._end_dropped(self._when_dropped):
                return
            try:
                turn(max(0.0, self._look_at - time.monotonic()))
                self.heartbeats.turn(time.monotonic())
                if self._free:
                    self._give_back()
                if time.monotonic() >= self._look_at:
                    self._look()
            except Exception:
                if self._stopped:
                    return
                traceback.print_exc()  # a fault of ours; the session goes on

    def _end_dropped(self, end: Callable[[], None]) -> bool:
        """End what is done of a session that was dropped; whether that is everything."""
        if not self.closing:
            self.closing = True
            self.send_all((DiscoAction.SHUTDOWN, 0))
        if len(self.lost) < len(self.channels):
            return False
        end()
        self.stop()
        return True

    def _dropped(self, rank: int, number: int) -> None:
        """Note that nothing here uses a worker's buffer any more; in a finalizer."""
        if self._stopped:
            return
        self._free.append((rank, number))
        self.transport.loop.wake()

    def _give_back(self) -> None:
        numbers: dict[int, list[int]] = {}
        while self._free:
            rank, number = self._free.popleft()
            numbers.setdefault(rank, []).append(number)
        for rank, freed in numbers.items():
            self.control(rank, command_encoding.FREE, freed)

    def _look(self) -> None:
        """Have services look whose time has come, and set `_look_at` to when the next one does."""
        now = time.monotonic()
        look_at = now + _TICK
        for service in self._looking:
            due = service.next_look()
            if due is not None and due <= now:
                service.look()
                due = service.next_look()
            if due is not None:
                look_at = min(look_at, due)
        self._look_at = look_at
        if now >= self._watch_at:
            self._watch_at = now + _WATCH_EVERY
            self._watch()

    def heard(self, rank: int) -> None:
        """See `Receiver`."""
        self.heartbeats.heard(rank)
        self.cut_off.pop(rank, None)
        self._asked.discard(rank)
        if rank in self._frozen:
            self._frozen.discard(rank)
            for service in list(self.services.values()):
                service.frozen(rank, "")

    def received(self, rank: int, data: Any, fd: int | None) -> None:
        """See `Receiver`."""
        self.heard(rank)
        try:
            done = command_encoding.unpack_done(data)
            if done is not None:
                self.channels[rank].done = done[1]
                self._deliver(rank, done[0], [])
                return
            parts = unpack(data, fd, self._droppers[rank])
        except (FrameError, OSError, MemoryError) as exc:  # else what waits for it waits for ever
            self._lose(rank, f"sent something that can't be received ({exc})")
            return
        try:
            self._take(rank, serialize.decode(*parts))
        except serialize.ProtocolError as exc:
            self._lose(rank, f"said something that is no message of ours ({exc})")
        except Exception:
            if not self._stopped:
                traceback.print_exc()  # a fault of ours; the session goes on

    def written(self, rank: int, data: bytes) -> None:
        """See `Receiver`."""
        self.put_out(rank, self.last_output[rank].decode(data))

    def ended(self, rank: int) -> None:
        """See `Receiver`."""
        self._lose(rank)

    def _take(self, rank: int, message: Any) -> None:
        kind, channel = message[0], self.channels[rank]
        if kind == command_encoding.REPLY:
            _, number, channel.done, value = message
            self._deliver(rank, number, value)
            return
        if kind == command_encoding.TELL:
            service = self.services.get(message[1])
            if service is not None:
                service.receive(rank, serialize.open_all(message[2]))
                if message[1] == PROBES:
                    self.notify()
        elif kind == command_encoding.OUTPUT:
            channel.done = max(channel.done, message[2])
            self._put_out(rank, serialize.open_all(message[1]))
        elif kind == command_encoding.STATE:
            state: WorkerState = message[1]
            channel.done = max(channel.done, state.received - state.busy)
            self._take_state(rank, state)
            self.notify()
        elif kind == command_encoding.HELLO:
            self.joined[rank] = message[1]
            self.notify()
        elif kind == command_encoding.FAILED:
            self.failed[rank] = message[1]
            self.notify()
        self._look_at = 0.0  # a service may have something due now

    def _take_state(self, rank: int, state: WorkerState) -> None:
        self.states[rank] = state
        for service in list(self.services.values()):
            service.state(rank, state)

    def _deliver(self, rank: int, number: int, value: Any) -> None:
        """Give a reply to the thread that waits for it."""
        entry = self._tickets.get(number)
        if entry is None:
            return
        ticket, waiting = entry
        try:
            value = serialize.open_all(value)
        except BaseException as exc:
            value = Failure.from_exception(rank, "fetching a value", "", exc)
            value.message = f"what came can't be unpickled here: {value.message}"
            value.details = ()
        self._reply(rank, number, ticket, waiting, value)

    def _reply(
        self, rank: int, number: int, ticket: Ticket, waiting: list[int], value: Any
    ) -> None:
        """Deliver a worker's reply, unless it has one already."""
        try:
            waiting.remove(rank)
        except ValueError:
            return
        if not waiting:
            self._tickets.pop(number, None)
        ticket.deliver(rank, value)

    def notify(self) -> None:
        """Have `wait_until` look again; any thread."""
        with self._changed:
            self._changed.notify_all()

    def put_out(self, rank: int, text: str) -> None:
        """Show what a worker has printed; on the reader thread."""
        if text:
            self._put_out(rank, [("stdout", text)])
            self._look_at = 0.0

    def _put_out(self, rank: int, items: list[Any]) -> None:
        for item in items:
            if item[0] != "display":
                self.last_output[rank].add(item[1])
        self.services["output"].receive(rank, items)

    # -- health ------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look at the processes of workers that are silent; on the reader thread."""
        heartbeats = self.heartbeats
        for rank in heartbeats.ranks():
            if heartbeats.silent_for(rank) < heartbeats.limit / 2:
                return
            if rank not in self._asked:  # a worker that only slept is awake then
                self._asked.add(rank)
                self.control(rank, command_encoding.ASK_STATE)
            heartbeats.sample(rank, self._processes.activity(rank))
            why = self._processes.cut_off(rank)
            if why and heartbeats.is_overdue(rank):
                self.cut_off[rank] = why
            if rank not in self._frozen and (text := self.frozen(rank)):
                self._frozen.add(rank)
                for service in list(self.services.values()):
                    service.frozen(rank, text)

    def frozen(self, rank: int, unanswered: bool = False) -> str:
        """That a worker does not run, and how that is known; "" if nothing shows it; any thread.

        Of one that has just left a question `unanswered` it is looked whether its process is
        stopped; else that is known only where it is silent for longer than the heartbeat.
        """
        heartbeats = self.heartbeats
        cut_off, why = self.cut_off.get(rank, ""), heartbeats.why_frozen(rank)
        if unanswered and not (cut_off or why):
            why = why_stopped(self._processes.pid_here(rank))
        if not (cut_off or why):
            return ""
        where, seconds = self._processes.where(rank), heartbeats.silent_for(rank)
        since = f" for {seconds:.0f} s" if seconds >= 1 else ""
        silent = f"{where} has given no sign of life{since}"
        return f"{silent}, {cut_off}" if cut_off else f"{silent}: {why}"

    def late(self, rank: int) -> str:
        """That a worker is silent for long, and is waited for; "" if it is not; any thread."""
        heartbeats = self.heartbeats
        if not heartbeats.is_overdue(rank):
            return ""
        where, seconds = self._processes.where(rank), heartbeats.silent_for(rank)
        return f"{where} has not answered for {seconds:.0f} s: {heartbeats.why_late(rank)}"

    def _lose(self, rank: int, why: str = "") -> None:
        """Record that a worker is gone, and tell the services; on the reader thread."""
        if rank in self.lost:
            if rank in self.answers and not self.closing:  # it was to take the place of that one
                self.failed.setdefault(rank, why or self._processes.exit_reason(rank))
                self.notify()
            return
        why = why if self.closing or why else self._processes.exit_reason(rank)
        when_lost = None if self.closing else self.when_lost
        if when_lost:  # before anybody can see it lost, and take that for the end of the session
            self.answers[rank] = None
        self.lost[rank] = why
        self.heartbeats.forget(rank)
        for service in list(self.services.values()):
            service.lost(rank)
        self._look_at = 0.0
        if when_lost:
            when_lost(rank)
        self.notify()

    # -- another worker in the place of a lost one ----------------------------------------------

    def answer_for(self, rank: int) -> None:
        """Answer what a lost worker was asked; any thread."""
        failure = self.answers.get(rank)
        for number, (asked, waiting) in self._tickets.copy().items():
            while failure is not None and rank in waiting:
                self._reply(rank, number, asked, waiting, asked.of_lost(failure))

    def expect_another(self, rank: int, failure: Failure) -> None:
        """Answer all questions to a lost worker with a failure, until another one is admitted."""
        self.answers[rank] = failure
        self.answer_for(rank)

    def remove(self, rank: int) -> None:
        """Drop the connection of a lost worker, so that another process can be connected."""
        removed = threading.Event()

        def remove() -> None:
            self.transport.remove(rank)
            self.joined.pop(rank, None)
            self.failed.pop(rank, None)
            self.states.pop(rank, None)
            self.heartbeats.forget(rank)
            self.cut_off.pop(rank, None)
            self.last_output[rank] = output.LastOutput()
            removed.set()

        # what is sent from now on may not reach the new worker before it is admitted
        with shield(), self.cork:
            self.channels[rank].write = _drop
        self.transport.loop.soon(remove)
        while not removed.wait(_TICK) and not self._stopped:
            pass

    def admit(self, rank: int, executed: int) -> None:
        """Keep what is sent from now on for the new worker, too; under the session's lock."""
        channel = self.channels[rank]
        with shield(), self.cork:
            self.flush_held()
            self._kept[rank] = []
            channel.begin(self._kept[rank].append)
            for service in list(self.services.values()):
                service.replaced(rank, executed)
            self.lost.pop(rank, None)
            self.answers.pop(rank, None)
        self.transport.loop.soon(lambda: self._lose_again(rank))

    def _lose_again(self, rank: int) -> None:
        """Note that a new worker has ended before it was admitted, if so; on the reader thread."""
        if rank in self.failed and rank not in self.lost:
            self._lose(rank, self.failed[rank])

    def let_in(self, rank: int, first: Iterable[Command]) -> None:
        """Send a new worker some commands, then all that was kept; under the session's lock."""
        channel = self.channels[rank]
        with shield(), self.cork:
            self.flush_held()
            kept, write = self._kept.pop(rank), self.transport.sender(rank)
            channel.write = write
            for command in first:
                channel.send(command)
            for frame in kept:
                write(frame)

    def exit_text(self, rank: int) -> str:
        """Why a worker is gone, what it ran last, and what it said last."""
        text = f"worker {rank} {self.lost[rank] or 'has ended'}"
        last = self.channels[rank].last_command()
        if last:
            text += f" while it ran {last}"
        lines = [line for line in self.last_output[rank].lines() if not _OF_OURS.search(line)]
        if lines:
            text += "; its last output:\n" + "\n".join(
                f"    {line}" for line in lines[-_LAST_LINES:]
            )
        return text


@atexit.register
def report_no_deaths() -> None:
    """Stop reporting workers that end: this process ends, and they end with it."""
    for connections in list(_running):
        connections.closing = connections._stopped = True
        connections.transport.loop.wake()


class _LinkHere:
    """The link of worker 0; see `runtime.services.ServiceChannel`."""

    host = "127.0.0.1"

    def __init__(self, worker: Worker, connections: WorkerConnections) -> None:
        self.worker, self._connections = worker, connections
        self._dispatcher = Dispatcher()
        self.listen = self._dispatcher.listen
        self._told_in = -1  # the last call that has told something

    def take(self, service: str, value: Any) -> None:
        """Pass on what a service says to the worker."""
        self._dispatcher.dispatch(self.worker, service, value)

    def tell(self, service: str, value: Any) -> None:
        self._told_in = self.worker.executed
        receiver = self._connections.services.get(service)
        if receiver is not None:
            receiver.receive(self.worker.worker_id, value)

    def call_failed(self, ordinal: int) -> None:
        if self._told_in == ordinal:
            self._connections.ask_states([self.worker.worker_id])

    def flush_waiting(self) -> None:
        pass  # it goes where the controller's own goes, at once
