"""Controller: the lower half of a session. It queues commands and waits for replies.

Any thread may call it. `_lock` makes the total order of commands: the thread that holds it takes a
register id and appends one command to each channel. Nothing waits under it.
`_registers.dropped` needs no lock (see registers.py).

A broadcast is one call of C code (`_run_steps`): it puts a command in each channel and counts it.
Ctrl-C comes before it or after it, so that no worker misses a command that others have, and the
count of calls is the workers' own. Where sending takes Python code, it runs in a shield.

Every wait goes through `wait` (or `_throttle`): it ticks (50 ms) to look whether workers
live, can be interrupted by Ctrl-C, and has a deadline if `timeout` was given to the call or
the session. Ctrl-C in a wait also ends what the workers run: after it they are ready again.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from numbers import Real
from operator import call
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from .actions import Command, DiscoAction
from .arguments import Register
from .channel import Channel, Ticket
from .errors import (
    ArgumentError,
    DiscoError,
    SessionClosedError,
    SessionError,
    WaitTimeoutError,
    WorkerError,
    session_closed,
)
from .failures import Failure, fold, name_ranks
from .interpreter_lock import is_on
from .interrupts import TICK, Count, reentrant_lock, run_steps, shield, waiting_threads
from .registers import DRefBook, RegisterFile
from .services import look_here, name_of
from .status import SessionStatistics, WorkerStatus
from .worker import Worker, current_worker_or_none

if TYPE_CHECKING:
    from .restart import RestartedWorker

R = TypeVar("R")

_OWN_MODULES = __name__.partition(".")[0] + "."
_MOST_QUEUED = 16_384  # commands a worker may be behind before calls wait for it
_RETRY = 0.2  # seconds for what cleans up, before an interrupt is sent again: it may be swallowed
_SYNC = DiscoAction.SYNC_WORKER
_ENDED_WORK = "_discolab_ended_work"  # attribute of a KeyboardInterrupt
_LOOK_EVERY = 512  # calls between two looks at that


class Controller:
    """Channels to the workers, register ids, and the one place where a thread waits.

    Parameters
    ----------
    channels
        One for each worker, in rank order.
    num_groups
        Cuts the workers in this many equal groups.
    devices
        The workers' devices.
    worker_zero_data
        Shared with worker 0: host tensors on their way, by token.
    timeout
        Seconds that any wait may take; None: as long as it takes (Ctrl-C ends it).
    """

    engine: ClassVar[str] = "none"

    def __init__(
        self,
        channels: Sequence[Channel],
        num_groups: int,
        devices: Sequence[torch.device],
        worker_zero_data: dict[int, torch.Tensor],
        timeout: float | None = None,
    ) -> None:
        self.timeout = check_timeout(timeout)
        self.name: str | None = None
        self._channels = tuple(channels)
        self._sends: tuple[Callable[[Command], None], ...]
        self._sends = tuple(channel.send for channel in channels)
        self._calls, self._others = Count(), Count()  # commands that all workers were sent
        self._send_by(self._sends)
        self._num_groups = num_groups
        self._devices = tuple(devices)
        self._worker_zero_data = worker_zero_data
        self._tokens = itertools.count()
        self._registers = RegisterFile()
        self._functions: dict[str, Register] = {}
        self._lock = reentrant_lock()
        self._closed = False
        self._seed: int | None = torch.initial_seed()  # None: no warning needed
        self._book: DRefBook | None = None
        self._reported_dead: set[int] = set()
        self._lost: Mapping[int, str] = {}  # workers that are gone, and why; an engine's own dict
        self._origins: dict[int, Any] = {}  # register -> what made it; see restart.py
        self._set_apart: dict[tuple[int, int], Any] = {}  # register and rank -> a DRef set there
        self._pushed: dict[str, Any] = {}  # variables that are pushed again after a restart
        self._imported: list[str] = []  # modules that all workers were told to import
        self._restarts_one = threading.Lock()  # a restart of a worker is under way
        self._restarting: int | None = None
        self.restarts: tuple[RestartedWorker, ...] = ()  # the last ones
        self.restarts_made = 0
        self._restored: dict[tuple[int, int], tuple[Any, str]] = {}  # register, rank: DRef, how
        self._is_look_due = _every(_LOOK_EVERY)
        self.held_up: Callable[[], str] | None = None  # why no worker goes on; "" if they do

    def _send_by(self, sends: Iterable[Callable[[Command], object]], *, in_c: bool = True) -> None:
        """Say what sends a command to all workers, in this order, and whether that is C code."""
        self._to_all = tuple(sends)
        self._to_all_as_call = (*self._to_all, self._calls.add)
        self._run_steps = run_steps if in_c else _run_steps_shielded

    # -- facts -----------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """The world size."""
        return len(self._channels)

    @property
    def num_groups(self) -> int:
        """In how many equal groups the workers are cut."""
        return self._num_groups

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each worker."""
        return self._devices

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._closed

    @property
    def calls_sent(self) -> int:
        """How many calls all workers were sent; a worker that is done has executed as many."""
        return self._calls.value

    @property
    def commands_sent(self) -> int:
        """How many commands all workers were sent, calls among them."""
        return self._calls.value + self._others.value

    def status(self) -> list[WorkerStatus]:
        """What each worker does now; never waits."""
        raise NotImplementedError

    def workers_here(self) -> Mapping[int, Worker]:
        """The workers that live in this process, by rank: to be looked at, even if they are stuck.

        All of them where workers are threads; at most worker 0 where they have processes of
        their own.
        """
        return {}

    def look(
        self,
        func: Callable[..., Any],
        /,
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout: float = 0.3,
    ) -> dict[int, Any]:
        """Run a probe beside workers, also while they compute; see services.py.

        Parameters
        ----------
        func
            A function marked with `discolab.runtime.probe`; it is given the worker and `args`.
        ranks
            The workers to look at; None: all.
        timeout
            Seconds that workers in other processes are given.

        Returns
        -------
        dict
            By rank what has come in time; a worker that is dead or stuck in C code is not in it.

        Raises
        ------
        DiscoError
            If the probe failed.
        """
        name_of(func)
        return look_here(func, args, self._looked_at(self.workers_here(), ranks))

    def _looked_at(self, found: Mapping[int, R], ranks: Iterable[int] | None) -> dict[int, R]:
        """What of `found`, by rank, is of `ranks`."""
        chosen = found if ranks is None else {self._check_rank(rank) for rank in ranks}
        return {rank: value for rank, value in found.items() if rank in chosen}

    def track_registers(self) -> DRefBook:
        """Keep a book of all DRefs made from now on; the same one if asked again."""
        with self._lock:
            if self._book is None:
                self._book = DRefBook()
            return self._book

    def statistics(self) -> SessionStatistics:
        """Counts for tests and displays; never waits."""
        return SessionStatistics(self._registers.live, self.commands_sent, tuple(self.status()))

    def __repr__(self) -> str:
        kind = type(self).__name__
        if self._closed:
            return f"<{kind}, closed>"
        groups = f", {self._num_groups} groups" if self._num_groups > 1 else ""
        kinds = sorted({str(device) for device in self._devices})
        return f"<{kind}: {self.num_workers} workers{groups} on {', '.join(kinds)}>"

    # -- the end -----------------------------------------------------------------------------

    def interrupt(self, timeout: float = 2.0) -> list[int]:
        """End what the workers run and drop what is queued; the session goes on.

        Harmless when they are idle.

        Returns
        -------
        list of int
            The workers that have not stopped, or not said so, within `timeout` seconds; empty
            when all are ready again. They are inside a call that Python can't interrupt, or
            late on a busy machine: `status` tells. One that has died is not among them.
        """
        limit = check_timeout(timeout)
        self._check_caller()
        ticket = Ticket(range(self.num_workers), "the end of an interrupt")
        with self._lock:
            if self._closed:
                return []
            try:
                self._interrupt_workers()
            finally:  # after a second Ctrl-C too, or they would cancel all that comes
                self._broadcast((DiscoAction.END_INTERRUPT, 0, ticket))
        deadline = math.inf if limit is None else time.monotonic() + limit
        while not ticket.acquire(max(0.0, min(_RETRY, deadline - time.monotonic()))):
            dead = self._dead()
            late = [rank for rank in ticket.missing if rank not in dead]
            if not late or time.monotonic() > deadline:
                return late
            self._retry_interrupt(late)
        return []

    def shutdown(self, timeout: float = 5.0, cancel: bool = False) -> list[int]:
        """Stop the workers. Calling it again does nothing.

        Parameters
        ----------
        timeout
            Seconds that queued work may take; then it is interrupted. A worker that does not
            stop even then is left behind and ends with the process.
        cancel
            Do not wait for queued work.

        Returns
        -------
        list of int
            The workers that were left behind, as a rule none.

        Warns
        -----
        RuntimeWarning
            If calls have failed, and no wait or fetch has raised that.
        """
        limit = check_timeout(timeout)
        self._check_caller()
        last = Ticket(range(self.num_workers), "the end", _in_list)
        with self._lock:
            if self._closed:
                return []
            try:
                if cancel:
                    self._interrupt_workers()
                else:
                    self._broadcast((DiscoAction.SYNC_WORKER, 0, last))
                self._broadcast((DiscoAction.SHUTDOWN, 0))
            finally:
                self._closed = True
        self._functions.clear()
        if self._why_held_up():
            cancel = True  # nothing will let them go on
        left = self._join(0.0 if cancel else math.inf if limit is None else limit)
        unreported = [failure for values in tuple(last.values.values()) for failure in values]
        if unreported:
            warnings.warn(
                f"the session ends with failures that were never raised: {WorkerError(unreported)}",
                RuntimeWarning,
                stacklevel=2,
            )
        return left

    # -- what an engine provides ------------------------------------------------------------------

    def _interrupt_workers(self) -> None:
        """Begin an interrupt on each worker; END_INTERRUPT follows on the channels."""
        raise NotImplementedError

    def _retry_interrupt(self, ranks: Sequence[int]) -> None:
        """Remind workers that have not ended their command yet."""
        raise NotImplementedError

    def _join(self, timeout: float) -> list[int]:
        """Wait for the workers to end after SHUTDOWN; interrupt them at the deadline.

        Returns those that did not end even then.
        """
        raise NotImplementedError

    def _dead(self) -> list[int]:
        """The workers that have died: they answer nothing any more. Asked every tick of a wait."""
        raise NotImplementedError

    # -- a worker in the place of a lost one; see restart.py ---------------------------------------

    def _check_replaceable(self, rank: int) -> None:
        """Raise a `SessionError` if no other worker can take the place of this one."""
        raise SessionError(f"workers of the engine {self.engine!r} can't be restarted one by one")

    def _take_down(self, rank: int) -> str:
        """End a worker if it has not ended; what has become of it."""
        raise NotImplementedError

    def _answer_for(self, rank: int, failure: Failure) -> None:
        """Answer what a worker that is gone was asked, and is asked until another has its place."""
        raise NotImplementedError

    def _prepare(self, rank: int) -> None:
        """Have a new worker ready, which gets no command yet."""
        raise NotImplementedError

    def _not_replaced(self, rank: int) -> None:
        """No other worker could take its place."""
        raise NotImplementedError

    def _admit(self, rank: int, position: int) -> None:
        """Keep what is sent from now on for the new worker, too; under the lock."""
        raise NotImplementedError

    def _let_in(self, rank: int, first: Sequence[Command]) -> None:
        """Send it these commands, then all that was kept, then what comes; under the lock."""
        raise NotImplementedError

    def _for_new_worker(self) -> list[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
        """What a new worker does first to be as the others: what for, a function, arguments."""
        raise NotImplementedError

    # -- commands ----------------------------------------------------------------------------

    def _next_register(self) -> int:
        """A register id; under the lock. Dropped ids beyond the one reused are killed."""
        registers = self._registers
        if len(registers.dropped) > 1:
            self._forget_dropped()
        return registers.take()

    def _forget_dropped(self) -> None:
        """Tell the workers to forget what no DRef holds any more; under the lock."""
        self._registers.collect(self._forget)

    def _forget(self, ids: tuple[int, ...]) -> None:
        if not self._closed:
            self._run_steps(map(call, self._to_all, repeat((DiscoAction.KILL_REG, 0, ids))))

    def forget_dropped(self) -> None:
        """Have the workers forget what no DRef holds any more, without waiting for a command."""
        if self._registers.dropped:
            with self._lock:
                self._forget_dropped()

    def _send_call(self, command: Command) -> None:
        """Append a call to every channel, and count it; under the lock."""
        self._run_steps(map(call, self._to_all_as_call, repeat(command)))

    def _broadcast(self, command: tuple[Any, ...]) -> None:
        """Append a command to every channel, and count it; under the lock."""
        self._check_open()
        count = self._calls if command[0] == DiscoAction.CALL_PACKED else self._others
        self._run_steps(map(call, (*self._to_all, count.add), repeat(command)))

    def _knows_dead(self) -> bool:
        """Whether workers have died, and the user has seen an error for each."""
        dead = self._dead()
        return bool(dead) and self._reported_dead.issuperset(dead)

    def _check_alive(self, ranks: Iterable[int] | None = None) -> None:
        """Raise if a worker has died that is among `ranks`, or whose death no caller was told of.

        `ranks` None: all workers. So no death stays unsaid, and what living workers hold can be
        fetched afterwards.
        """
        dead = self._dead()
        if dead and ranks is not None:
            asked = set(ranks)
            dead = [rank for rank in dead if rank in asked or rank not in self._reported_dead]
        if dead:
            self._reported_dead.update(dead)
            raise DiscoError(self._deaths(dead))

    def _deaths(self, dead: Sequence[int]) -> str:
        """Say that workers have died, and what to do."""
        have = "has" if len(dead) == 1 else "have"
        return f"{name_ranks(dead)} {have} died: make a new session (in a notebook: %disco_restart)"

    def _check_open(self) -> None:
        if self._closed:
            raise session_closed()

    def _check_rank(self, worker_id: Any) -> int:
        try:
            rank = worker_id.__index__()
        except (AttributeError, TypeError):
            rank = None
        if rank is None or isinstance(worker_id, bool):
            raise ArgumentError(f"a worker id is an integer, got {worker_id!r}")
        if not 0 <= rank < self.num_workers:
            raise ArgumentError(
                f"worker id {rank} is out of range: this session has workers "
                f"0 to {self.num_workers - 1}"
            )
        return int(rank)

    # -- waiting -----------------------------------------------------------------------------

    def _ask(
        self,
        ranks: Sequence[int],
        action: DiscoAction,
        what: str,
        head: tuple[Any, ...],
        check: bool = True,
    ) -> Ticket:
        """Send a command with a ticket to some workers; `wait` for it collects the replies.

        With `check` a death that nobody was told of is raised first.
        """
        self._check_caller()
        if check and self._lost and not self._closed:
            self._check_alive(ranks)
        ticket = Ticket(ranks, what, _in_list) if action == _SYNC else Ticket(ranks, what)
        with self._lock:
            self._check_open()
            if self._registers.dropped:
                self._forget_dropped()
            command = (int(action), *head, ticket)
            if len(ranks) == len(self._channels):
                sends = self._to_all
            else:  # worker 0 last: its thread would take the GIL from us
                sends = tuple([self._sends[rank] for rank in reversed(ranks)])
            self._run_steps(map(call, sends, repeat(command)))
        return ticket

    def _check_caller(self) -> None:
        worker = current_worker_or_none()
        if worker is not None and worker.channel in self._channels:
            raise SessionError(
                f"worker {worker.worker_id} can't wait for its own session: it would wait for "
                "itself. Read the value directly in the worker, or use a collective"
            )

    def wait(
        self,
        ticket: Ticket,
        timeout: float | None = None,
        interrupt: bool = True,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[int, Any]:
        """Wait for all replies; the one place where a controller thread blocks.

        With `interrupt` false, Ctrl-C ends the wait and leaves the workers to their work.
        `meanwhile` is called every 50 ms, as `tick`; what it raises ends the wait.
        """
        try:
            return self._wait(ticket, timeout, meanwhile)
        except KeyboardInterrupt as stop:
            if interrupt:
                self._after_ctrl_c(stop)
            raise

    def _wait(
        self,
        ticket: Ticket,
        timeout: float | None,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[int, Any]:
        timeout = self.timeout if timeout is None else check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        thread = threading.get_ident()
        waiting_threads.add(thread)
        try:
            while not ticket.acquire(TICK if timeout is None else max(0.0, min(TICK, timeout))):
                self.tick()
                if meanwhile is not None:
                    meanwhile()
                self._check_alive(ticket.missing)
                self._check_not_held_up(ticket)
                if self._closed and not ticket.acquire(1.0):
                    raise SessionClosedError(
                        f"the session was shut down during the wait for {ticket.what}"
                    )
                if deadline is not None and time.monotonic() > deadline:
                    assert timeout is not None
                    raise WaitTimeoutError(self._timeout_text(ticket, timeout), ticket.values)
        finally:
            waiting_threads.discard(thread)
        return ticket.values

    def _why_held_up(self) -> str:
        return self.held_up() if self.held_up is not None else ""

    def _check_not_held_up(self, ticket: Ticket) -> None:
        why = self._why_held_up()
        if why and not ticket.acquire(0):
            raise SessionError(f"{ticket.what} can't be had now: {why}")

    def tick(self) -> None:
        """Called every 50 ms on a thread that waits; a notebook shows live output from here."""

    def _after_ctrl_c(self, stop: KeyboardInterrupt) -> None:
        """End what the workers run: once, however many callers `stop` passes on its way."""
        if _ENDED_WORK in vars(stop):
            return
        vars(stop)[_ENDED_WORK] = True
        stuck = self.interrupt()
        if stuck:
            sys.stderr.write(self._stuck_text(stuck))

    def _stuck_text(self, stuck: list[int]) -> str:
        states = [status for status in self.status() if status.rank in stuck]
        idle = [status.rank for status in states if status.state == "idle"]
        busy = [status.rank for status in states if status.state != "idle"]
        lines = []
        if busy:
            lines.append(
                f"{name_ranks(busy)} did not stop: inside a call that Python can't interrupt; "
                "it stops when that returns, or is replaced with %disco_restart -t "
                f"{','.join(map(str, busy))}"
            )
        if idle:
            lines.append(
                f"{name_ranks(idle)} did nothing when last heard, and has not confirmed the stop "
                "yet, as happens on a busy machine; calls go on when it does"
            )
        return "\n  ".join([*lines, *map(str, states)]) + "\n"

    def _timeout_text(self, ticket: Ticket, timeout: float | None) -> str:
        lines = [
            f"gave up after {timeout:g} s waiting for {ticket.what} of "
            f"{name_ranks(ticket.missing or ticket.asked)}; the workers now:"
        ]
        lines += [f"  {status}" for status in self.status()]
        answers = ticket.values.copy().values()
        failed = [one for one in answers if isinstance(one, Failure) and not one.victim]
        for group in fold(failed):  # who has failed is just idle
            what = group[0].headline.splitlines()[0]
            ranks = name_ranks(one.rank for one in group)
            lines.append(f"{ranks} failed in {group[0].summary}: {what}")
        lines.append(
            "The work goes on: wait again, or end it with sess.interrupt() or the stop button"
        )
        return "\n".join(lines)

    def _throttle(self) -> None:
        """Wait while a worker is too far behind, so that memory stays bounded.

        The deadline counts anew while the workers get on.
        """
        worker = current_worker_or_none()
        if worker is not None and worker.channel in self._channels:
            return  # a worker that feeds its own session must not wait for itself
        if all(channel.pending() < _MOST_QUEUED for channel in self._channels):
            return
        patience = math.inf if self.timeout is None else self.timeout
        deadline, least = math.inf, math.inf
        try:
            while not self._closed:
                pending = [channel.pending() for channel in self._channels]
                behind = [rank for rank, count in enumerate(pending) if count > _MOST_QUEUED // 2]
                if not behind:
                    return
                if (total := sum(pending)) < least:
                    least, deadline = total, time.monotonic() + patience
                self.tick()
                self._check_alive()
                if time.monotonic() > deadline:
                    ticket = Ticket(behind, "room in the queue")
                    raise WaitTimeoutError(self._timeout_text(ticket, self.timeout))
                time.sleep(0.002)
        except KeyboardInterrupt as stop:
            self._after_ctrl_c(stop)
            raise


def _in_list(failure: Failure) -> list[Failure]:
    """The reply to a sync: all failures that were not raised."""
    return [failure]


def _every(count: int) -> Callable[[], bool]:
    """What is true each `count` times that it is called, from any thread."""
    if is_on():
        return itertools.cycle([False] * (count - 1) + [True]).__next__
    # two threads in one `cycle` could read beyond its end
    number = itertools.count(1).__next__
    return lambda: not number() % count


def _run_steps_shielded(steps: Iterable[object]) -> None:
    with shield():
        run_steps(steps)


def check_timeout(timeout: Any) -> float | None:
    """A number of seconds, or None, which is no limit of its own. Check it before anything is sent.

    Raises
    ------
    ArgumentError
        If it is anything else.
    """
    if timeout is None:
        return None
    try:
        seconds = float(timeout) if isinstance(timeout, Real) else math.nan
    except OverflowError:
        seconds = math.nan
    if isinstance(timeout, bool) or not seconds >= 0:
        raise ArgumentError(
            f"timeout is a number of seconds, 0 or more, or None: got {timeout!r:.60}"
        )
    return seconds


# where a user's code has called last: its code, the place in it, and both with the line, which is
# counted from the beginning of the code
_last_call: tuple[CodeType | None, int, tuple[CodeType, int] | None] = None, 0, None


def call_site(above: int = 2) -> tuple[Any, int] | None:
    """Where the user's code called discolab: the nearest frame outside of the package.

    `above` is the first frame that may be the user's, counted from here.
    """
    global _last_call
    frame = sys._getframe(above)
    code, place, site = _last_call
    while frame is not None:
        if frame.f_code is code and frame.f_lasti == place:
            return site
        if not frame.f_globals.get("__name__", "").startswith(_OWN_MODULES):
            site = frame.f_code, frame.f_lineno
            _last_call = frame.f_code, frame.f_lasti, site
            return site
        frame = frame.f_back  # type: ignore[assignment]
    return None
