"""A session whose workers, all but worker 0, live in other processes.

What engines of this kind have in common. An engine says how its processes come to be
(`_start_processes`), and has a `WorkerProcesses` that knows what became of them and ends them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import call
from typing import Any

import torch

from ..isolation.own_process_modules import path_of_notebook
from ..runtime import functions, restart
from ..runtime.actions import Command, DiscoAction
from ..runtime.arguments import Register
from ..runtime.channel import Channel, ThreadChannel
from ..runtime.controller import check_timeout
from ..runtime.errors import ArgumentError, DiscoError, SessionClosedError, SessionError
from ..runtime.failures import Failure, name_ranks
from ..runtime.interrupts import run_steps, shield
from ..runtime.registers import Site
from ..runtime.services import SERVICE as PROBES
from ..runtime.services import Probes, Service, name_of
from ..runtime.session import Session
from ..runtime.status import WorkerStatus
from ..runtime.worker import Worker, current_worker, current_worker_or_none, has_own_process
from .connections import command_encoding
from .connections.controller_side import WorkerConnections, WorkerProcesses
from .connections.interface import Transport
from .forkserver import ForkServer, the_fork_server
from .worker_threads import LocalWorkers

HEARTBEAT = 10.0  # seconds without a message after which it is looked whether a worker is frozen
START_TIMEOUT = 120.0  # seconds that worker processes may take to be there
_SILENT = 3.5  # seconds without a message after which `status` says so; one comes every 2
_ANSWER = 0.3  # seconds that probes are given
_LOOK = 0.1  # seconds that `status` waits for what workers say of themselves
_LOOK_AT_START = 0.2  # seconds between two looks at what is not there yet
_KILL_GRACE = 10.0  # seconds until a process that was killed has ended
_TICK = 0.05  # seconds between two looks at whether the session was closed
_MOST_RESPAWNS = 100  # deaths, of all workers; more of them
_RESPAWNS_WITHIN = 60.0  # in so many seconds have a cause that a new worker does not mend
_END_GRACE = 1.0  # seconds that interrupted workers are given when a session ends
_PROGRESS_AFTER = 1.0  # seconds of starting before it is said
_of_sys = vars(sys)  # where workers are threads, the module itself looks which of them asks

Progress = Callable[[str], None]


class RemoteSession(Session):
    """See the module; made by an engine.

    Parameters
    ----------
    heartbeat
        Seconds of silence after which a wait fails for a worker that is shown not to run.
    start_timeout
        Seconds that the worker processes may take to start.
    progress
        Called with a line of text when starting takes longer than a second; None: nothing is said.
    respawn
        Whether a worker that dies is replaced at once (runtime/restart.py).
    """

    def __init__(
        self,
        num_workers: int,
        num_groups: int,
        devices: Sequence[torch.device],
        transport: Transport,
        processes: WorkerProcesses,
        *,
        timeout: float | None,
        heartbeat: float,
        start_timeout: float,
        progress: Progress | None,
        respawn: bool = False,
    ) -> None:
        self.heartbeat = positive_seconds(heartbeat, "heartbeat")
        self._start_timeout = positive_seconds(start_timeout, "start_timeout")
        self._progress, self._said = progress, ""
        self._processes = processes
        self._connections = WorkerConnections(num_workers, transport, processes, self.heartbeat)
        channel = ThreadChannel()
        channels: list[Channel] = [channel, *self._connections.channels.values()]
        host_data: dict[int, torch.Tensor] = {}
        super().__init__(channels, num_groups, devices, host_data, timeout)
        self._lost = self._connections.lost
        # worker 0 last: it sends what was held back for the others (connections/controller_side.py)
        self._send_by((self._connections.send_all, self._sends[0]), in_c=False)
        self._to_hold = self._connections.hold, self._sends[0], self._calls.add
        self._local = LocalWorkers([channel], num_workers, num_groups, devices, host_data)
        self._connections.adopt(self._local.workers[0], channel)
        self._registered: dict[str, Any] = {}
        self._dtype = torch.get_default_dtype()
        self.respawn = bool(respawn)
        self._respawned: deque[float] = deque(maxlen=_MOST_RESPAWNS)  # when; worker by worker
        self._owner = os.getpid()
        _sessions.add(self)
        self._path, self._folder = list(sys.path), _folder()
        self._path_told = self._folder_told = False  # whether workers have followed to another one

    def _begin(self) -> None:
        """Start all workers, and wait until they are there; on any failure end them all."""
        connections = self._connections
        try:
            # the workers of a dropped session do what is queued, and end
            weakref.finalize(self, connections.end_later)
            connections.start()
            self._start_processes()
            connections.processes_started()
            self._local.start(self, max(1, torch.get_num_threads() // self._workers_here()))
            self._await_workers()
            if self._dtype is not torch.float32:  # a fresh process's; threads begin with it too
                self.call_without_result(torch.set_default_dtype, self._dtype)
            if self.respawn:
                connections.when_lost = partial(_respawn, weakref.ref(self))
        except BaseException as exc:
            self._closed = connections.closing = True
            for worker in self._local.workers:
                worker.interrupt()
                worker.channel.send((DiscoAction.SHUTDOWN, 0))
            self._local.join(_END_GRACE)
            self._processes.end()
            connections.stop()
            if isinstance(exc, OSError) and exc.errno == errno.EMFILE:
                raise DiscoError(
                    f"{self.num_workers} workers need more open files than this process may have: "
                    "raise the limit (ulimit -n 4096), or take fewer workers, or threads"
                ) from exc
            raise

    def _await_workers(self) -> None:
        connections, began = self._connections, time.monotonic()
        wanted = set(connections.channels)
        deadline, shown = began + self._start_timeout, False
        while wanted - set(connections.joined):
            connections.wait_until(
                lambda: (
                    bool(connections.failed or connections.lost)
                    or wanted <= set(connections.joined)
                ),
                0.2,
            )
            if connections.failed:
                rank, why = next(iter(connections.failed.items()))
                raise DiscoError(f"worker {rank} could not start: {why}")
            if connections.lost:
                rank = next(iter(connections.lost))
                raise DiscoError(f"{connections.exit_text(rank)}\nno worker was left running")
            now = time.monotonic()
            missing = wanted - set(connections.joined)
            if missing and now > deadline:
                raise DiscoError(
                    f"{name_ranks(missing)} did not start within {self._start_timeout:g} s "
                    "(start_timeout=)"
                )
            if missing and now - began > _PROGRESS_AFTER:
                shown = True
                self._say(self._starting(missing, now - began))
        if shown:
            self._say("")

    def _say(self, text: str) -> None:
        if self._progress is not None and text != self._said:
            self._said = text
            self._progress(text)

    def _starting(self, missing: set[int], seconds: float) -> str:
        """Say in a line which workers are ready and which are missing."""
        ready = self.num_workers - len(missing)
        return (
            f"starting {self.num_workers} workers: {ready} ready, waiting for "
            f"{name_ranks(missing)} ({seconds:.0f} s)"
        )

    # -- what an engine of this kind provides ------------------------------------------------------

    def _start_processes(self) -> None:
        """Have the worker processes started; they say HELLO on their connections."""
        raise NotImplementedError

    def _start_another(self, rank: int) -> None:
        """Have one process started in the place of one that has ended; it says HELLO."""
        raise NotImplementedError

    def _kill_process(self, rank: int) -> None:
        """End a worker's process now, with what it has started."""
        raise NotImplementedError

    def _workers_here(self) -> int:
        """How many workers share this machine."""
        return self.num_workers

    def _ready_fork_server(self) -> ForkServer:
        """The process to fork workers from, once it has imported what they need."""
        server, waited = the_fork_server(), 0.0
        while not server.ready(_LOOK_AT_START):
            waited += _LOOK_AT_START
            if waited > self._start_timeout:
                raise DiscoError(
                    f"no worker process was there after {self._start_timeout:g} s (start_timeout=)"
                )
            if waited > 1:
                self._say(f"starting {self.num_workers} workers: importing torch ({waited:.0f} s)")
        return server

    def _settings(self, **own: Any) -> dict[str, Any]:
        """Settings of a worker (worker_main.py): the session's, and its own."""
        return {
            "num_workers": self.num_workers,
            "num_groups": self.num_groups,
            "heartbeat": self.heartbeat,
            **own,
        }

    # -- facts -----------------------------------------------------------------------------

    def status(self) -> list[WorkerStatus]:
        """What each worker does now; waits a tenth of a second at most."""
        connections = self._connections
        remote = [rank for rank in connections.channels if rank not in connections.lost]
        before = {rank: connections.states.get(rank) for rank in remote}
        unanswered: set[int] = set()
        if not self._closed:
            connections.ask_states(remote)
            connections.wait_until(
                lambda: all(
                    connections.states.get(rank) is not before[rank] or rank in connections.lost
                    for rank in remote
                ),
                _LOOK,
            )
            unanswered = {r for r in remote if connections.states.get(r) is before[r]}
        statuses = [self._status_of(rank, rank in unanswered) for rank in connections.channels]
        return [*self._local.status(), *statuses]

    def look(
        self,
        func: Callable[..., Any],
        /,
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout: float = _ANSWER,
    ) -> dict[int, Any]:
        name, connections = name_of(func), self._connections
        if self._closed:
            return super().look(func, *args, ranks=ranks)
        asked = [
            rank
            for rank in self._looked_at(connections.channels, ranks)
            if rank not in connections.lost
        ]
        probes = connections.services[PROBES]
        assert isinstance(probes, Probes)
        number = probes.open()
        for rank in asked:
            connections.tell(rank, PROBES, (number, name, args))
        values = super().look(func, *args, ranks=ranks)
        connections.wait_until(
            lambda: all(probes.has(number, rank) or rank in connections.lost for rank in asked),
            timeout,
        )
        return dict(sorted({**values, **probes.take(number)}.items()))

    def _status_of(self, rank: int, unanswered: bool) -> WorkerStatus:
        connections, device = self._connections, str(self._devices[rank])
        channel, state = connections.channels[rank], connections.states.get(rank)
        if self._closed:
            return WorkerStatus(rank, device, "ended", "", 0.0, 0)
        if rank in connections.lost:
            return WorkerStatus(rank, device, "dead", connections.lost[rank], 0.0, 0)
        silent = connections.heartbeats.silent_for(rank)
        why = connections.frozen(rank, unanswered)
        if not why and silent > _SILENT:
            why = f"{state.detail if state else ''} (no answer for {silent:.0f} s)".strip()
        if state is None:
            return WorkerStatus(rank, device, "starting", why, 0.0, 0)
        queued = max(0, channel.sent - state.received)
        seconds = state.seconds + (silent if why else 0.0)  # it was so when it told that last
        return WorkerStatus(rank, device, state.state, why or state.detail, seconds, queued)

    def workers_here(self) -> Mapping[int, Worker]:
        """Worker 0."""
        return self._connections.workers_here()

    @property
    def services(self) -> Mapping[str, Service]:
        """The services of layers above, by name (runtime/services.py)."""
        return self._connections.services

    def processes(self) -> dict[int, int]:
        """The process id of each remote worker, by rank."""
        return dict(self._connections.joined)

    # -- calls -----------------------------------------------------------------------------

    def _encode_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = _of_sys["path"] if current_worker_or_none() is None else sys.path
        if path != self._path:  # a folder was added since: modules may come from it
            before, self._path, self._path_told = self._path, list(path), True
            self.call_without_result(follow_path, self._path, before)
        if (folder := _folder()) != self._folder:
            self._folder, self._folder_told = folder, True
            self.call_without_result(follow_to, folder)
        what, given, named, bind, site = super()._encode_call(func, args, kwargs)
        # encoded here: what can't be sent is an error before anything is sent
        return what, command_encoding.encode_call(what, given, named, site), named, bind, site

    def _look_up(self, name: str, site: Site) -> Register:
        """As in `Session`; what is registered here only is sent along."""
        function = functions.registered(name)
        if function is not None and self._registered.get(name) is not function:
            there = name.startswith("runtime.") and functions.is_own(function)
            if not there or name in self._registered:
                self.call_without_result(functions.register_there, name, function)
                self._registered[name] = function
        return super()._look_up(name, site)

    def _send_call(self, command: Command) -> None:
        """As in `Controller`; a call with tensors is sent now, for they may change."""
        if command[3].message.frames:
            super()._send_call(command)
        else:
            run_steps(map(call, self._to_hold, repeat(command)))
            self._connections.held_one()

    def _forget(self, ids: tuple[int, ...]) -> None:
        """Have remote workers forget with the next command that goes to them; under the lock."""
        if not self._closed:
            run_steps(map(call, self._to_hold[:2], repeat((DiscoAction.KILL_REG, 0, ids))))

    def forget_dropped(self) -> None:
        """As in `Session`."""
        super().forget_dropped()
        with self._lock, shield():
            if not self._closed:
                self._connections.forget_now()

    def _check_open(self) -> None:
        if self._owner != os.getpid():
            raise SessionClosedError(
                f"this session belongs to process {self._owner}, from which this one was forked: "
                "make a session of its own here"
            )
        super()._check_open()

    # -- the end -----------------------------------------------------------------------------

    def _interrupt_workers(self) -> None:
        connections = self._connections
        for rank in connections.channels:
            connections.control(rank, command_encoding.ANNOUNCE)
        for worker in self._local.workers:
            worker.announce_interrupt()
        self._retry_interrupt(range(self.num_workers))

    def _retry_interrupt(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank:
                self._connections.control(rank, command_encoding.RETRY)
            else:
                self._local.workers[0].retry_interrupt()

    def _dead(self) -> list[int]:
        return [*self._local.dead(), *self._lost_for_good()]

    def _lost_for_good(self) -> list[int]:
        """The workers that have died and that no other one is to replace."""
        connections = self._connections
        lost = tuple(connections.lost.copy().items())
        return sorted(rank for rank, why in lost if why and rank not in connections.answers)

    def _check_alive(self, ranks: Iterable[int] | None = None) -> None:
        super()._check_alive(ranks)
        connections = self._connections
        for rank in connections.heartbeats.ranks():
            if not connections.heartbeats.is_overdue(rank):
                return
            why = connections.frozen(rank)
            if why:
                last = connections.channels[rank].last_command()
                raise DiscoError(
                    f"worker {rank} {why}{f' while it ran {last}' if last else ''}. If it "
                    "comes back the session goes on; else replace this worker with "
                    f"sess.restart_worker({rank}) (in a notebook: %disco_restart -t {rank}), or "
                    "make a new session (%disco_restart)"
                )
            late = connections.late(rank)
            if late and connections.heartbeats.first_told(rank):
                sys.stderr.write(f"worker {rank} {late}. It is waited for.\n")

    def _deaths(self, dead: Sequence[int]) -> str:
        connections = self._connections
        here = [rank for rank in dead if rank not in connections.lost]
        texts = [connections.exit_text(rank) for rank in sorted(set(dead) - set(here))[:4]]
        if here:
            texts.append(super()._deaths(here))
            return "\n".join(texts)
        texts.append(self._way_on(dead))
        return "\n".join(texts)

    @staticmethod
    def _way_on(lost: Sequence[int]) -> str:
        return (
            f"The session can't go on without {name_ranks(lost)}: replace it with "
            f"sess.restart_worker({lost[0]}) (in a notebook: %disco_restart -t {lost[0]}), or make "
            "a new one (%disco_restart)"
        )

    # -- one worker started afresh; see runtime/restart.py -------------------------------------

    def _check_replaceable(self, rank: int) -> None:
        if not rank:
            raise SessionError(
                "worker 0 is a thread of this process, which can't be replaced alone: make a new "
                "session (in a notebook: %disco_restart)"
            )

    def _take_down(self, rank: int) -> str:
        connections = self._connections
        if rank in connections.lost:
            return connections.exit_text(rank).removeprefix(f"worker {rank} ")
        connections.control(rank, command_encoding.ANNOUNCE)
        connections.control(rank, command_encoding.RETRY)
        with self._lock:
            connections.channels[rank].send((DiscoAction.SHUTDOWN, 0, True))
        if connections.wait_until(lambda: rank in connections.lost, _END_GRACE):
            return "was ended by restart_worker"
        self._kill_process(rank)
        if not connections.wait_until(lambda: rank in connections.lost, _KILL_GRACE):
            raise DiscoError(
                f"worker {rank} could not be ended: make a new session (in a notebook: "
                "%disco_restart)"
            )
        return "did not end by itself, and was killed by restart_worker"

    def _answer_for(self, rank: int, failure: Failure) -> None:
        self._connections.expect_another(rank, failure)

    def _prepare(self, rank: int) -> None:
        connections = self._connections
        connections.remove(rank)
        self._start_another(rank)
        deadline = time.monotonic() + self._start_timeout
        while not connections.wait_until(
            lambda: rank in connections.joined or rank in connections.failed, _TICK
        ):
            self._check_open()
            if time.monotonic() > deadline:
                raise DiscoError(
                    f"no new worker {rank} was there after {self._start_timeout:g} s "
                    "(start_timeout=)"
                )
        if rank in connections.failed:
            raise DiscoError(f"a new worker {rank} could not start: {connections.failed[rank]}")

    def _not_replaced(self, rank: int) -> None:
        self._connections.answers.pop(rank, None)
        self._connections.notify()

    def _admit(self, rank: int, position: int) -> None:
        self._connections.admit(rank, position)

    def _let_in(self, rank: int, first: Sequence[Command]) -> None:
        self._connections.let_in(rank, first)

    def _for_new_worker(self) -> list[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
        first: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = []
        if self._dtype is not torch.float32:
            first.append(("the default dtype", torch.set_default_dtype, (self._dtype,)))
        if self._path_told:
            first.append(("to look for modules", follow_path, (self._path,)))
        if self._folder_told:
            first.append(("to work in the folder", follow_to, (self._folder,)))
        for name, function in self._registered.items():
            what = f"to register {name!r}"
            first.append((what, functions.register_there, (name, function)))
        return first

    def _may_respawn(self, rank: int) -> bool:
        """Whether a worker that has just died is to be replaced; on the reader thread."""
        if not self.respawn or self._closed or self._restarting == rank:
            return False
        now, limit = time.monotonic(), self._respawned.maxlen
        if len(self._respawned) == limit and now - self._respawned[0] < _RESPAWNS_WITHIN:
            return False
        self._respawned.append(now)
        return True

    def _join(self, timeout: float) -> list[int]:
        connections = self._connections
        connections.closing = True
        # one that is under way sees that the session is closed
        replacing = self._restarts_one.acquire(timeout=_KILL_GRACE)
        deadline = time.monotonic() + min(timeout, 1e9)
        remote = set(connections.channels)
        try:
            self._local_late(deadline)
            connections.wait_until(
                lambda: remote <= set(connections.lost), deadline - time.monotonic()
            )
            late = remote - set(connections.lost)
            if late:
                for rank in late:
                    connections.control(rank, command_encoding.ANNOUNCE)
                    connections.control(rank, command_encoding.RETRY)
                connections.wait_until(lambda: remote <= set(connections.lost), _END_GRACE)
            return self._local.join(max(0.0, deadline - time.monotonic()))
        finally:  # after Ctrl-C too
            self._processes.end()
            connections.stop()
            if replacing:
                self._restarts_one.release()

    def _local_late(self, deadline: float) -> None:
        """Wait for worker 0, with the others: it may wait for them in a collective."""
        thread = self._local.threads[0]
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.01)
            if all(rank in self._connections.lost for rank in self._connections.channels):
                break


def _respawn(session_ref: weakref.ref[RemoteSession], rank: int) -> None:
    """Replace a worker that has just died, on a thread of its own; on the reader thread."""
    session = session_ref()
    if session is None:
        return
    connections = session._connections
    if not session._may_respawn(rank):
        connections.answers.pop(rank, None)
        return
    why = connections.exit_text(rank).removeprefix(f"worker {rank} ")
    death = restart.death_of(rank, why)
    connections.expect_another(rank, death)

    def replace() -> None:
        session = session_ref()
        if session is None:
            return
        try:
            result = restart.restart_worker(session, rank, death)
        except SessionClosedError:
            return
        except Exception as exc:
            session._not_replaced(rank)
            sys.stderr.write(f"worker {rank} could not be replaced: {exc}\n")
        else:
            sys.stderr.write(f"{result!s}\n")

    threading.Thread(target=replace, name="discolab-respawn", daemon=True).start()


_sessions: weakref.WeakSet[RemoteSession] = weakref.WeakSet()


def _in_child() -> None:
    """Leave the connections in a forked child: what it sends would pass for its parent's."""
    for session in list(_sessions):
        session._closed = True
        session._connections.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def follow_path(path: list[str], before: list[str] | None = None) -> None:
    """Look for modules where the controller does (a worker function).

    Parameters
    ----------
    before
        Where it did until now. None: the caller has not followed it yet.
    """
    if before is None:
        sys.path[:] = [*path, *(own for own in sys.path if own not in path)]
    elif has_own_process(current_worker()):  # a thread follows by itself
        path_of_notebook(before, path)


_LONGEST_PATH = 4096


def _portable_folder() -> bytes | None:
    try:
        return os.getcwdb()
    except OSError:
        return None


_folder: Callable[[], bytes | None] = _portable_folder
"""The working folder; None if it is gone. Each call asks for it."""

if os.name == "posix":  # unlike Python's it keeps the GIL, which a busy thread would take
    _getcwd = ctypes.PyDLL(None).getcwd
    _getcwd.restype = ctypes.c_char_p
    _room = ctypes.create_string_buffer(_LONGEST_PATH)
    _folder = partial(_getcwd, _room, ctypes.c_size_t(_LONGEST_PATH))


def follow_to(folder: bytes | None) -> None:
    """Work in the folder in which the notebook does, where it is there (a worker function)."""
    if folder and os.path.isdir(folder):
        os.chdir(folder)


def positive_seconds(value: Any, name: str) -> float:
    """A time above 0, or an error that names the argument."""
    seconds = check_timeout(value)
    if not seconds:
        raise ArgumentError(f"{name} is a number of seconds above 0, got {value!r}")
    return seconds
