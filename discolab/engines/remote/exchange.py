"""The controller's side of all lines of one session: what is sent, and the thread that receives.

An `Exchange` knows no session, so that a session nobody holds can be collected. Who writes what:

- the session's lock guards sending of commands: `RemoteChannel`s, `_packed`, the numbers of
  tickets; the cork guards what is held back, which worker 0's thread may send on
- the reader thread alone writes `states`, `heard_at`, `lost`, `said`, and calls services
- `_tickets` is a dict of which single operations are used; `_changed` guards nothing but waiting

A service hears of worker 0, which is a thread of this process, on that thread.
"""

from __future__ import annotations

import atexit
import codecs
import itertools
import re
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ...runtime import serialize
from ...runtime.actions import Command, DiscoAction, function_text, site_text
from ...runtime.arguments import Register
from ...runtime.channel import ThreadChannel, Ticket
from ...runtime.failures import Failure
from ...runtime.link import SERVICES, Ears, Service, WorkerState
from ...runtime.probes import SERVICE as PROBES
from ...runtime.worker import Worker
from ...transport.frame import Frame, FrameError, bundle, unpack
from . import messages
from . import printed as _printed  # noqa: F401 - shows output where no notebook does
from .lines import END, JOINED, MESSAGE, TEXT, Event, Lines

_TICK = 0.05  # seconds between two looks when nothing comes in
_MOST_LINES = 60  # of what a worker has put out, kept: a crash alone may say forty
_OF_OURS = re.compile(r"^Extension modules: |/discolab/(runtime|engines|worker\.py)|<frozen runpy>")
_LAST_LINES = 12  # of what a worker has put out, kept for its obituary
_LONGEST_LINE = 500  # characters of a line that are kept
_MOST_HELD = 200  # commands held back for a worker
_RECENT = 64  # commands of a worker kept for the same
_running: weakref.WeakSet[Exchange] = weakref.WeakSet()
_CALL_PACKED = int(DiscoAction.CALL_PACKED)
_WORKER_0_ONLY = (DiscoAction.COPY_FROM_WORKER0, DiscoAction.COPY_TO_WORKER0)


class RemoteChannel:
    """The controller's end of the channel of one remote worker; see runtime/channel.py."""

    copies = True

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank = rank
        self.sent = 0
        self.done = 0  # as far as is known
        self._exact = False  # whether that is all of them
        self.forget: tuple[int, ...] = ()  # registers, with the next command
        self._exchange = exchange
        self._recent: deque[tuple[int, str, Any]] = deque(maxlen=_RECENT)

    def send(self, command: Command) -> None:
        """Queue a command; under the session's lock."""
        if command[0] in _WORKER_0_ONLY:
            return
        exchange = self._exchange
        if self.rank in exchange.lost:
            return
        forget = self.forget
        if forget:
            self.forget = ()
        frame, text, site = exchange.packed(command, self.rank, forget)
        self.note(text, site)
        with exchange.cork:
            exchange.flush_held()
            exchange.lines.send(self.rank, frame)

    def note(self, text: str, site: Any) -> None:
        """Count a command, and keep of a call what may be said of it later."""
        self.sent += 1
        if text:
            self._recent.append((self.sent, text, site))

    def take_forgotten(self) -> tuple[int, ...]:
        """What was to go with the next command."""
        forget, self.forget = self.forget, ()
        return forget

    def recv(self) -> Command:
        """Only the worker's end has it."""
        raise NotImplementedError

    def reply(self, ticket: Any, rank: int, value: Any) -> None:
        """Only the worker's end has it."""
        raise NotImplementedError

    def pending(self) -> int:
        """How many commands the worker has not done, as far as is known."""
        return self.sent - self.done

    def knows_done(self, count: int) -> None:
        """The worker is gone, and so many commands were done."""
        self.done, self._exact = count, True

    def last_command(self) -> str:
        """What the worker ran last, as far as is known; "" if nothing."""
        open_ones = [entry for entry in tuple(self._recent) if entry[0] > self.done]
        if not open_ones:
            return ""
        _, text, site = open_ones[0]
        where = site_text(site)
        words = f"{text} (called at {where})" if where else text
        later = len(open_ones) - 1
        return words if self._exact or not later else f"{words} or one of {later} later calls"


class Exchange:
    """Lines, tickets, services and what is known of the workers of one session.

    Attributes
    ----------
    states
        The newest known state of each remote worker, by rank.
    heard_at
        When each of them last said anything, on the clock of `time.monotonic`.
    lost
        Why a worker's line ended, by rank; of one that ended as it was told, "".
    said
        The last lines that each worker has put out.
    joined
        The workers that have said that they are ready, with their process ids.
    failed
        What a worker has said that could not begin.
    """

    def __init__(self, num_workers: int, lines: Lines, why_ended: Callable[[int], str]) -> None:
        self.num_workers = num_workers
        self.lines = lines
        self.channels = {rank: RemoteChannel(rank, self) for rank in range(1, num_workers)}
        self.services: dict[str, Service] = {}
        self.states: dict[int, WorkerState] = {}
        self.heard_at: dict[int, float] = {}
        self.lost: dict[int, str] = {}
        self.said: dict[int, deque[str]] = {
            rank: deque(maxlen=_MOST_LINES) for rank in range(num_workers)
        }
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {rank: decoder("replace") for rank in range(num_workers)}
        self._tails: dict[int, str] = {}  # the line that each has begun
        self.joined: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        self._free: deque[tuple[int, int]] = deque()  # buffers to give back: rank, number
        self.on_join: Callable[[Event], None] | None = None
        self.closing = False
        self.hosts: list[str] = []  # equal for workers of one machine; empty: all are on one
        self._why_ended = why_ended
        self._here: dict[int, Worker] = {}
        self._ears = Ears()  # worker 0's
        self._tickets: dict[int, tuple[Ticket, list[None]]] = {}
        self._numbers = itertools.count(1)
        self._packed: tuple[Command, Frame, str, Any, tuple[int, ...]] | None = None
        self._last_number = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="discolab-reader", daemon=True)
        self.cork = threading.RLock()  # guards `_held`, and the sending of commands
        self._held: list[Frame] = []
        self._turn = 0
        self._flushing = False
        self._all = tuple(self.channels.values())
        self._droppers = {rank: partial(self._dropped, rank) for rank in self.channels}
        self.idle = False  # whether worker 0 waits for a command
        self._rest = 0.0  # seconds until a service wants to look
        self._stopped = False
        self._end: Callable[[], None] | None = None
        _running.add(self)

    # -- sending -----------------------------------------------------------------------------

    def send_all(self, command: Command) -> None:
        """Queue a command for all remote workers; under the session's lock.

        A call is held back for a moment, so that the question that often follows it goes with it:
        until there is one, or worker 0, which was idle and gets the call next, takes it.
        """
        if command[0] in _WORKER_0_ONLY or not self._all:
            return
        channels = self._all
        forget = channels[0].forget
        if self.lost or any(channel.forget is not forget for channel in channels):
            for channel in channels:
                channel.send(command)
            return
        self._turn += 1
        frame, text, site = self._pack(command, forget, self._number_of, self._turn)
        for channel in channels:
            channel.forget = ()
            channel.note(text, site)
        with self.cork:
            held = self._held
            held.append(frame)
            may_wait = command[0] == _CALL_PACKED and frame.buffer is None
            # worker 0 says that it is idle no more and then looks: one of us two sees the other
            if not (may_wait and self.idle and len(held) < _MOST_HELD):
                self.flush_held()

    def flush_held(self) -> None:
        """Send what was held back; under the cork."""
        held = self._held
        if held:
            send = self.lines.send
            try:
                self._flushing = True  # worker 0 need not wait for the cork just to find nothing
                for frame in held if len(held) == 1 else bundle(held):
                    for channel in self._all:
                        send(channel.rank, frame)
            finally:
                self._flushing = False
            # not before: after a Ctrl-C above all is sent again, and `turn` sorts it out
            held.clear()

    def _pack(
        self,
        command: Command,
        forget: tuple[int, ...],
        number_of: Callable[[Ticket], int],
        turn: int = 0,
    ) -> tuple[Frame, str, Any]:
        """A command as a frame, and of a call what it is in words, and where it was made."""
        frame = messages.pack_command(command, number_of, forget, self.lines.shared, turn)
        if command[0] != _CALL_PACKED:
            return frame, "", None
        func = command[2]
        return frame, "a call" if type(func) is Register else _words(func), command[6]

    def packed(
        self, command: Command, rank: int, forget: tuple[int, ...]
    ) -> tuple[Frame, str, Any]:
        """A command as a frame, and in words; packed once for all workers that get it."""
        known = self._packed
        if known is not None and known[0] is command and known[4] is forget:
            if rank == self.num_workers - 1:
                self._packed = None  # what it carries is not kept any longer
            return known[1], known[2], known[3]
        again = known is not None and known[0] is command  # the same question, to another worker
        number_of = self._same_number if again else self._number_of
        frame, text, site = self._pack(command, forget, number_of)
        if rank < self.num_workers - 1 and command[0] != DiscoAction.DEBUG_SET_REGISTER:
            self._packed = command, frame, text, site, forget
        return frame, text, site

    def _same_number(self, _ticket: Ticket) -> int:
        return self._last_number

    def _number_of(self, ticket: Ticket) -> int:
        number = next(self._numbers)
        remote = [None] * (len(ticket.asked) - (0 in ticket.asked))
        self._tickets[number] = ticket, remote
        self._last_number = number
        return number

    def control(self, rank: int, kind: int, *contents: Any) -> None:
        """Say something to a worker's link; any thread."""
        if rank not in self.lost and not self._stopped:
            self.lines.control(
                rank, messages.pack_message(kind, *contents, shared=self.lines.shared)
            )

    def tell(self, rank: int, service: str, value: Any) -> None:
        """Say something to a service's handler on a worker; any thread."""
        if rank in self._here:
            self._ears.hear(self._here[rank], service, value)
        else:
            self.control(rank, messages.SAY, service, value)

    def ask_states(self, ranks: Iterable[int]) -> None:
        """Ask workers what they do; the answers come as `states`, and to the services."""
        for rank in ranks:
            if rank in self.channels:
                self.control(rank, messages.ASK_STATE)
            else:
                self._own_state(rank)

    def _own_state(self, rank: int) -> None:
        worker = self._here.get(rank)
        if worker is not None:
            state = worker.state(worker.executed)
            self.states[rank] = state
            for service in tuple(self.services.values()):
                service.state(rank, state)

    @property
    def sent(self) -> dict[int, int]:
        """How many commands each remote worker was sent."""
        return {rank: channel.sent for rank, channel in self.channels.items()}

    # -- worker 0 ----------------------------------------------------------------------------

    def adopt(self, worker: Worker, channel: ThreadChannel) -> None:
        """Take in the worker that is a thread of this process, before it starts."""
        get = channel.recv

        def recv() -> Command:
            self.idle = True
            command = get()
            self.idle = False
            if self._held and not self._flushing:  # see `send_all`
                with self.cork:
                    self.flush_held()
            return command

        channel.recv = recv  # type: ignore[assignment]
        self._here[worker.worker_id] = worker
        worker.link = _LinkHere(worker.worker_id, self)

    def workers_here(self) -> dict[int, Worker]:
        """The workers of this process, by rank."""
        return dict(self._here)

    def listen(self, service: str, handler: Callable[[Any], None]) -> None:
        """Of worker 0: see `Link`."""
        self._ears.listen(service, handler)

    # -- receiving ---------------------------------------------------------------------------

    def start(self) -> None:
        """Make the services, and start the reader thread."""
        for name, make in SERVICES.items():
            self.services[name] = make(self)
        self._thread.start()

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
        """End the reader thread and let go of the lines."""
        self._stopped = True
        self.lines.wake()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(5)
        for service in self.services.values():
            service.close()
        self._tickets.clear()
        self.lines.close()

    def end_later(self, end: Callable[[], None]) -> None:
        """The session is gone: have the workers end when they are done, and then everything here.

        Takes no lock, so that a finalizer may call it. `end` ends what is left of the processes.
        """
        self._end = end
        self.lines.wake()

    def leave(self) -> None:
        """This process was forked from the one that has the lines: never touch them again."""
        self.closing = self._stopped = True
        self.lines = _NoLines()
        self._held = []

    def _run(self) -> None:
        """Body of the reader thread."""
        while not self._stopped:
            if self._end is not None:
                if not self.closing:
                    self.closing = True
                    for channel in self.channels.values():
                        channel.send((DiscoAction.SHUTDOWN, 0))
                if len(self.lost) == len(self.channels):
                    self._end()
                    self.stop()
                    return
            try:
                for event in self.lines.receive(self._rest):
                    self._take(event)
                if self._free:
                    self._give_back()
                self._look()
            except Exception:
                if self._stopped:
                    return
                traceback.print_exc()  # a fault of ours; the session goes on

    def _dropped(self, rank: int, number: int) -> None:
        """Nothing of a worker's buffer is held here any more; in a finalizer."""
        self._free.append((rank, number))
        self.lines.wake()

    def _give_back(self) -> None:
        numbers: dict[int, list[int]] = {}
        while self._free:
            rank, number = self._free.popleft()
            numbers.setdefault(rank, []).append(number)
        for rank, found in numbers.items():
            self.control(rank, messages.FREE, found)

    def _look(self) -> None:
        """Have services look whose time has come, and set `_rest` to when the next one does."""
        rest = _TICK
        for service in tuple(self.services.values()):
            due = service.next_look()
            if due is not None and due <= time.monotonic():
                service.look()
                due = service.next_look()
            if due is not None:
                rest = min(rest, max(0.0, due - time.monotonic()))
        self._rest = rest

    def _take(self, event: Event) -> None:
        rank = event.rank
        if event.kind == MESSAGE:
            self.heard_at[rank] = time.monotonic()
            done = messages.unpack_done(event.data)
            if done is not None:
                self.channels[rank].done = done[1]
                self._deliver(rank, done[0], [])
                return
            try:
                body, frames = unpack(event.data, event.fd, self._droppers[rank])
                message = serialize.decode(body, frames)
            except (FrameError, serialize.ProtocolError) as exc:
                self._lose(rank, f"said something that is no message of ours ({exc})")
                return
            self._hear(rank, message)
        elif event.kind == TEXT:
            self.put_out(rank, self._decoders[rank].decode(event.data))
        elif event.kind == JOINED and self.on_join is not None:
            self.on_join(event)
        elif event.kind == END:
            self._lose(rank, event.data)

    def _hear(self, rank: int, message: Any) -> None:
        kind = message[0]
        if kind == messages.REPLY:
            _, number, done, value = message
            self.channels[rank].done = done
            self._deliver(rank, number, value)
        elif kind == messages.TELL:
            service = self.services.get(message[1])
            if service is not None:
                service.receive(rank, serialize.open_all(message[2]))
                if message[1] == PROBES:
                    self._notify()
        elif kind == messages.OUTPUT:
            channel = self.channels[rank]
            channel.done = max(channel.done, message[2])
            self._put_out(rank, serialize.open_all(message[1]))
        elif kind == messages.STATE:
            state = WorkerState(*serialize.open_all(message[1]))
            self.states[rank] = state
            channel = self.channels[rank]
            channel.done = max(channel.done, state.received - state.busy)
            for service in tuple(self.services.values()):
                service.state(rank, state)
            self._notify()
        elif kind == messages.PROGRESS:
            channel = self.channels[rank]
            channel.done = max(channel.done, message[1] - 1)
        elif kind == messages.HELLO:
            self.joined[rank] = message[1]
            self._notify()
        elif kind == messages.FAILED:
            self.failed[rank] = message[1]
            self._notify()

    def _deliver(self, rank: int, number: int, value: Any) -> None:
        found = self._tickets.get(number)
        if found is None:
            return
        ticket, remote = found
        try:
            value = serialize.open_all(value)
        except BaseException as exc:
            value = Failure.from_exception(rank, "fetching a value", "", exc)
            value.message = f"what came can't be unpickled here: {value.message}"
            value.details = ()
        remote.pop()
        if not remote:
            del self._tickets[number]
        ticket.deliver(rank, value)

    def put_out(self, rank: int, text: str) -> None:
        """Show what a worker has printed; on the reader thread."""
        if text:
            self._put_out(rank, [("stdout", text)])

    def _put_out(self, rank: int, items: list[Any]) -> None:
        for item in items:
            if item[0] != "display":
                *lines, tail = (self._tails.get(rank, "") + item[1]).split("\n")
                # as a terminal would show it: what follows a carriage return is written over
                self.said[rank].extend(
                    line.rpartition("\r")[2][:_LONGEST_LINE] for line in lines[-_MOST_LINES:]
                )
                self._tails[rank] = tail.rpartition("\r")[2][-_LONGEST_LINE:]
        self.services["output"].receive(rank, items)

    def _lose(self, rank: int, why: str | None) -> None:
        if rank in self.lost:
            return
        if self.closing and not why:
            self.lost[rank] = ""
        else:
            self.lost[rank] = why or self._why_ended(rank)
        for service in tuple(self.services.values()):
            service.lost(rank)
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def obituary(self, rank: int) -> str:
        """Why a worker is gone, what it ran last, and what it said last."""
        text = f"worker {rank} {self.lost[rank] or 'has ended'}"
        last = self.channels[rank].last_command()
        if last:
            text += f" while it ran {last}"
        lines = [*self.said[rank], *filter(None, [self._tails.get(rank)])]
        lines = [line for line in lines if line and not _OF_OURS.search(line)][-_LAST_LINES:]
        if lines:
            text += "; its last output:\n" + "\n".join(f"    {line}" for line in lines)
        return text


class _NoLines(Lines):
    """Lines of which nothing is left."""

    def send(self, rank: int, frame: Frame) -> None:
        pass

    def control(self, rank: int, frame: Frame) -> None:
        pass

    def receive(self, timeout: float) -> list[Event]:
        return []

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


@atexit.register
def _at_exit() -> None:
    """This process ends, and its workers with it: that is not to be reported any more."""
    for exchange in list(_running):
        exchange.closing = True
        exchange._stopped = True
        exchange.lines.wake()


class _LinkHere:
    """The link of worker 0; see `runtime.link.Link`."""

    host = "127.0.0.1"

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self._rank, self._exchange = rank, exchange
        self._told_in = -1

    def tell(self, service: str, value: Any) -> None:
        self._told_in = self._exchange.workers_here()[self._rank].executed
        found = self._exchange.services.get(service)
        if found is not None:
            found.receive(self._rank, value)

    def call_failed(self, ordinal: int) -> None:
        if self._told_in == ordinal:
            self._exchange.ask_states([self._rank])

    def listen(self, service: str, handler: Callable[[Any], None]) -> None:
        self._exchange.listen(service, handler)

    def flush_waiting(self) -> None:
        pass  # it goes where the controller's own goes, at once


def _words(func: Any) -> str:
    return messages.own_words(func) or f"call of '{function_text(func)}'"
