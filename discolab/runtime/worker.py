"""A worker: it owns a register file and executes commands in order.

One thread runs `Worker.run`; it alone writes `registers`, `namespace`, `current`,
`executed` and `unreported`. Other threads may read `current`, `executed`, `waiting_for`
(for status) and call `interrupt`, `retry_interrupt` and `wake`. `_guard` guards the
sending of asynchronous exceptions; `interrupts` changes under it.
Interrupting and waiting are in interrupts.py.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from . import accelerators, actions, arguments
from .actions import BIND_ARGUMENTS, BIND_FUNCTION, SIMPLE_TENSORS, Command, DiscoAction, site_text
from .channel import Channel
from .contexts import run_within
from .errors import (
    ArgumentError,
    DiscoError,
    SessionError,
    WorkerInterrupted,
)
from .failures import Failure, UnreportedFailures
from .frames import places_of
from .functions import find_func
from .interpreter_lock import copied
from .interrupts import Interruptible, bind_waiter
from .services import RESTART, ServiceChannel, WorkerState
from .sources import is_cell, is_own_file, place
from .watched import WatchedValues

if TYPE_CHECKING:  # a circle: a mesh asks which worker it is on
    from .mesh import Mesh

_CANCELLED = "cancelled before it began"
_MOST_FAILED_CALLS = 16

_now = time.monotonic
_local = threading.local()
_sole: Worker | None = None  # has this process for itself: threads that nobody has bound are its


def own_process(worker: Worker | None) -> None:
    """Say that a worker has this process for itself; set before its first command."""
    global _sole
    _sole = worker


def has_own_process(worker: Worker) -> bool:
    """Whether a worker has this process for itself."""
    return worker is _sole


def current_worker() -> Worker:
    """The worker on whose thread this runs.

    Raises
    ------
    SessionError
        Outside of a worker.
    """
    worker = current_worker_or_none()
    if worker is None:
        raise SessionError(
            "this runs on no worker: call it inside a %%disco cell or in a function "
            "given to Session.call_packed"
        )
    return worker


def current_worker_or_none() -> Worker | None:
    """The worker on whose thread this runs, None on the controller."""
    return getattr(_local, "worker", _sole)


at_bind: list[Callable[[Worker | None], None]] = []
"""Called on a thread with the worker that it belongs to from now on."""


at_leave: list[Callable[[Worker], None]] = []
"""Called on a worker's own thread, with the worker, when it ends."""


def bind_thread(worker: Worker | None) -> None:
    """Say that the calling thread belongs to `worker` (None: to the controller)."""
    _local.worker = worker
    for call in at_bind:
        call(worker)


def prepare_thread(worker: Worker, num_threads: int) -> None:
    """Give the calling thread torch's settings for code of `worker`, `num_threads` among them."""
    torch.set_num_threads(num_threads)
    # backward stays on this thread, on GPUs too: its collectives belong to the worker
    torch.autograd.set_multithreading_enabled(False)
    # and the device's default stream, as everybody's: what one thread has begun comes before
    # what another one begins, be it the notebook's, a remote call's or another worker's
    accelerators.set_current(worker.device)


class _Poisoned(Exception):
    """An argument's register is poisoned; carries the failure on to the result."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.headline)
        self.failure = failure


class Worker(Interruptible):
    """One worker: rank, place in the groups, device, registers, and the command loop.

    Attributes
    ----------
    worker_id, local_worker_id
        Rank among all workers, and among those of this process.
    num_workers, num_groups
        The world size, and in how many equal groups it is cut.
    device
        Where this worker computes.
    registers
        Register id -> value; a `Failure` there is a poisoned register.
    namespace
        Global variables of the cells that this worker runs.
    mesh
        The session's current mesh, None before there is one.
    program
        Global variables of the script that runs as ``__main__``; None while cells do.
    default_dtype
        torch's default dtype here; starts as that of the thread that makes the worker.
    process_state
        What a process keeps once and this worker has for itself, by its name; see `isolation`.
    generator
        This worker's CPU random state.
    random_states
        Its other random states, of Python and numpy, by library; made at the first draw.
    peers
        The workers of this address space by rank, this one included.
    shared
        One dict for all workers of this address space; use `setdefault` to add to it.
    worker_zero_data
        Host tensors on their way to and from worker 0, by token.
    link
        To the session's services where workers are in several processes, else None.
    executed
        How many calls have ended here: the same number on all workers for the same call.
    joined_at
        The first call since this worker took the place of one that was lost, 0 if it did not.
    watched
        Which values have been written to since they were made; see `watched`.
    sat_out
        The last call that this worker was not asked to take part in, by its ordinal; -1: none.
    failed_calls
        The last calls that failed here, by their ordinal (`executed` when they ran).
    resumed_at
        `executed` at the end of the last interrupt, the same on all workers: what earlier calls
        left unfinished is void.
    died
        Set if the thread ended without being asked to.
    gives_way
        Set if this worker is asked to end, and a new one takes its place.
    alone
        Why the others can't be met now, so that collectives are refused; "" while they can.
    dispatch
        What is done for a command, by its action; a layer above may put itself in between, on this
        worker's thread.
    serves
        What other threads do as this worker at the moment beside its commands: calls of RPC.
    before_serving, after_serving
        None, or called on such a thread as it begins and has ended one; the first may refuse it.
    """

    def __init__(
        self,
        worker_id: int,
        num_workers: int,
        num_groups: int,
        device: torch.device,
        channel: Channel,
        *,
        shared: dict[str, Any],
        worker_zero_data: dict[int, torch.Tensor],
    ) -> None:
        super().__init__()
        self.worker_id = worker_id
        self.local_worker_id = worker_id
        self.num_workers = num_workers
        self.num_groups = num_groups
        self.device = device
        self.channel = channel
        self.shared = shared
        self.worker_zero_data = worker_zero_data
        self.peers: dict[int, Worker] = {}
        self.link: ServiceChannel | None = None
        self.registers: dict[int, Any] = {}
        self.namespace: dict[str, Any] = {}
        self.program: dict[str, Any] | None = None
        self.mesh: Mesh | None = None
        self.default_dtype = torch.get_default_dtype()
        self.process_state: dict[str, Any] = {}
        self.generator = torch.Generator()
        self.random_states: dict[str, Any] = {}
        self.unreported = UnreportedFailures(worker_id)
        self.executed = 0
        self.joined_at = 0
        self.watched = WatchedValues()
        self.sat_out = -1
        self.awaits: Any = None  # the coroutine for which an event loop runs on its thread
        self.current: Command | None = None
        self.resumed_at = 0
        self.failed_calls: deque[tuple[int, Failure]] = deque(maxlen=_MOST_FAILED_CALLS)
        self.died = self.gives_way = False
        self.alone = ""
        self.dispatch = self._table()
        self.before_call: Callable[[Command], Command] | None = None
        self.after_call: Callable[[], None] | None = None
        self.serves: set[object] = set()
        self.before_serving: Callable[[], None] | None = None
        self.after_serving: Callable[[], None] | None = None
        self._numbers = itertools.count(1)  # of failures
        self._began = time.monotonic()
        self._pid = os.getpid()

    # -- facts -----------------------------------------------------------------------------

    def work(self) -> object:
        return self.current

    @property
    def rank(self) -> int:
        """The field's word for `worker_id`."""
        return self.worker_id

    @property
    def world_size(self) -> int:
        """The field's word for `num_workers`."""
        return self.num_workers

    @property
    def group_size(self) -> int:
        """Workers in each group."""
        return self.num_workers // self.num_groups

    @property
    def group_id(self) -> int:
        """Which group this worker is in."""
        return self.worker_id // self.group_size

    @property
    def is_root(self) -> bool:
        """Whether this worker is the first of its group."""
        return self.worker_id % self.group_size == 0

    def __repr__(self) -> str:
        return f"<worker {self.worker_id} of {self.num_workers} on {self.device}>"

    def flush_output(self) -> None:
        """Send what was printed here, before something else is said on another way."""
        if self.link is not None:
            self.link.flush_waiting()

    # -- the command loop --------------------------------------------------------------------

    def run(self) -> None:
        """Execute commands until SHUTDOWN. Returns; never raises for a failed command.

        However it ends, the engine calls `leave` then.
        """
        self.thread_id = threading.get_ident()
        bind_thread(self)
        bind_waiter(self)
        self.serve_on(self._serve)
        if os.getpid() != self._pid:  # the command forked, and has come back in the child too
            _end_child(None)

    def leave(self) -> None:
        """The thread ends; were it by an error of ours, nobody may wait for this worker."""
        self.died = not self.ended
        self.ended = True
        for peer in list(self.peers.values()):
            peer.wake()
        self.registers.clear()
        self.watched.tensors.clear()  # what has changed is still asked for, see restart.py
        # names with two underscores are Python's, or torch.compile's, which deletes them itself
        for name in [name for name in self.namespace if not name.startswith("__")]:
            del self.namespace[name]
        bind_thread(None)
        bind_waiter(None)

    def _serve(self) -> None:
        failed_with, self._cut_off = self._cut_off, None
        if self.current is not None:
            self._finish_interrupted(failed_with)
        del failed_with
        recv, do = self.channel.recv, self.dispatch
        while not self.ended:
            command = recv()
            do[command[0]](command)
            # an idle worker must not keep the last command's values alive
            del command

    def _table(self) -> list[Callable[[Command], None]]:
        """What is done for each action."""
        do: list[Callable[[Command], None]] = [self._not_an_action] * 128
        do[DiscoAction.SHUTDOWN] = self._shutdown
        do[DiscoAction.KILL_REG] = self._kill_reg
        do[DiscoAction.GET_GLOBAL_FUNC] = self._get_global_func
        do[DiscoAction.CALL_PACKED] = self._call_packed
        do[DiscoAction.SYNC_WORKER] = self._sync_worker
        do[DiscoAction.COPY_FROM_WORKER0] = self._copy_from_worker0
        do[DiscoAction.COPY_TO_WORKER0] = self._copy_to_worker0
        do[DiscoAction.DEBUG_GET_FROM_REMOTE] = self._debug_get_from_remote
        do[DiscoAction.DEBUG_SET_REGISTER] = self._debug_set_register
        do[DiscoAction.END_INTERRUPT] = self._end_interrupt
        do[DiscoAction.REPORTED] = self._reported
        do[DiscoAction.BEGIN_AT] = self._begin_at
        return do

    def _call_packed(self, command: Command) -> None:
        self._began = _now()
        self.current = command
        self.running = True
        if self.before_call is not None:
            command = self.before_call(command)
        _, reg, func, args, kwargs, bind, _ = command
        try:
            if reg:
                old = self.registers.pop(reg, None)  # a reused id: free the old value first
                if type(old) is Failure:
                    self._dropped(old)
                del old
            if self.interrupts:
                raise WorkerInterrupted(_CANCELLED)
            # a `DPackedFunc` without arguments: as `_bind` does, without three calls
            if bind == BIND_FUNCTION and type(func) is arguments.Register:
                func = self.registers.get(func)
                if not callable(func):
                    self._refuse_to_call(func)
            elif bind:
                func, args, kwargs = self._bind(bind, func, args, kwargs)
            value = func(*args, **kwargs) if kwargs else func(*args)
            self.running = False
            if self._async_sent:
                self._absorb()
            if reg:
                self.registers[reg] = value
        except BaseException as exc:
            if os.getpid() != self._pid:
                _end_child(exc)
            self._absorb(exc)
            self._poison(reg, command, exc)
            self._end_failed_call()
            return
        if self.watched.tensors:
            self.look_at_watched()
        self.executed += 1
        self.current = None
        if self.after_call is not None:
            self.after_call()

    def look_at_watched(self) -> None:
        """Say which of the values that can be made again have been written to; on its thread."""
        changed = self.watched.look(self.registers, self.executed)
        if changed and self.link is not None:
            self.link.tell(RESTART, (self.executed, changed))

    def _end_failed_call(self) -> None:
        if self.watched.tensors:
            self.look_at_watched()
        self.executed += 1
        self.current = None
        if self.after_call is not None:
            self.after_call()
        if self.link is not None:
            self.link.call_failed(self.executed - 1)

    def _finish_interrupted(self, failed_with: BaseException | None) -> None:
        """Close the command that an interrupt tore out of: it may have failed by itself before."""
        self._absorb(failed_with)
        command = self.current
        assert command is not None
        self._poison(command[1], command, failed_with or WorkerInterrupted("interrupted"))
        self._end_failed_call()

    def _bind(self, bind: int, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """The callable and the arguments that registers and copies stand for."""
        if bind & BIND_FUNCTION:
            func = self._bind_function(func)
        if bind & BIND_ARGUMENTS:
            alone = len(args) == 1 and not kwargs
            simple = bool(bind & SIMPLE_TENSORS)
            copies = (
                arguments.Copies((args, kwargs), simple or None) if simple or not alone else None
            )
            args = [arguments.bind(arg, self._lookup, copies) for arg in args]
            if kwargs:
                kwargs = {k: arguments.bind(v, self._lookup, copies) for k, v in kwargs.items()}
        return func, args, kwargs

    def _bind_function(self, func: Any) -> Any:
        if type(func) is arguments.Register:
            found = self.registers.get(func)
        else:
            found = arguments.bind(func, self._lookup)
        if not callable(found):
            self._refuse_to_call(found)
        return found

    def _refuse_to_call(self, found: Any) -> NoReturn:
        if type(found) is Failure:
            raise _Poisoned(found)
        raise ArgumentError(f"the register to call holds {_kind(found)}, not a function")

    def _lookup(self, reg: int) -> Any:
        value = self.registers.get(reg)
        if type(value) is Failure:
            raise _Poisoned(value)
        return value

    def _poison(self, reg: int, command: Command, exc: BaseException) -> None:
        """Store what went wrong in the register; a poisoned argument's failure is passed on.

        Without a register (0) the failure is an orphan: the next wait for this worker raises it.
        """
        self.waiting_for = None  # an interrupt can hit the `finally` of a wait
        if type(exc) is _Poisoned:
            failure = exc.failure
            known = failure.reported or failure.interrupted
            if not reg and known and not self.interrupts:  # or what was not done stays unsaid
                self.unreported.add(self._passed_on(failure, command))
        else:
            failure = self._describe(exc, command)
            failure.orphan = reg == 0
            if not failure.interrupted:  # the caller of `interrupt` knows of it
                self.unreported.add(failure)
        if reg:
            self.registers[reg] = failure
        if command[0] == DiscoAction.CALL_PACKED:
            self.failed_calls.append((self.executed, failure))

    def _describe(self, exc: BaseException, command: Command, text: str = "") -> Failure:
        """Describe a failed command, named by `text` or as usual; never raises."""
        kind = type(exc)
        text, site = (text, "") if text else self._name_of(command)
        try:
            if kind is WorkerInterrupted and exc.args == (_CANCELLED,):  # there may be thousands
                failure = Failure.of_text(self.worker_id, text, site, exc)
            else:
                failure = Failure.from_exception(self.worker_id, text, site, exc)
        except BaseException:
            message = "<an exception that can't be described>"
            failure = Failure(self.worker_id, text, site, kind.__name__, message)
        # interrupts are sent one by one: another worker may have ended because of it already
        victim = failure.victim and any(peer.interrupts for peer in list(self.peers.values()))
        failure.interrupted = victim or issubclass(kind, WorkerInterrupted)
        failure.number = next(self._numbers)
        if command[0] == DiscoAction.CALL_PACKED:
            failure.call = self.executed
        return failure

    def _name_of(self, command: Command) -> tuple[str, str]:
        try:
            return self.command_text(command)
        except BaseException:  # of a callable object's own attributes
            return "a command", ""

    def _passed_on(self, failure: Failure, command: Command) -> Failure:
        """The failure of a command without a result whose argument is poisoned."""
        text, site = self._name_of(command)
        return replace(
            failure,
            command=f"{text} [argument poisoned by {failure.summary}]",
            call_site=site,
            orphan=True,
            reported=False,
            interrupted=False,
            number=next(self._numbers),
        )

    def _shutdown(self, command: Command) -> None:
        self.gives_way |= len(command) > 2
        self.ended = True

    def _kill_reg(self, command: Command) -> None:
        for reg in command[2]:
            value = self.registers.pop(reg, None)
            if type(value) is Failure:
                self._dropped(value)

    def _dropped(self, failure: Failure) -> None:
        """A register no longer holds a failure, which must not be lost if it was never raised."""
        if not failure.orphan and self.unreported.keeps(failure):
            failure.orphan = not any(value is failure for value in self.registers.values())

    def _get_global_func(self, command: Command) -> None:
        try:
            self.registers[command[1]] = find_func(command[2])
        except BaseException as exc:
            self._poison(command[1], command, exc)

    def _sync_worker(self, command: Command) -> None:
        try:
            accelerators.synchronize(self.device)
        except Exception as exc:
            self._poison(0, (*command, None), exc)
        self.channel.reply(command[2], self.worker_id, self.unreported.all())

    def _copy_from_worker0(self, command: Command) -> None:
        self._copy_worker0(command, "copy_from_worker_0", to_host=True)

    def _copy_to_worker0(self, command: Command) -> None:
        self._copy_worker0(command, "copy_to_worker_0", to_host=False)

    def _copy_worker0(self, command: Command, what: str, *, to_host: bool) -> None:
        if self.worker_id != 0:
            return
        _, reg, token, _ = command
        host = self.worker_zero_data.pop(token, None)
        if host is None:
            return  # Ctrl-C came as it was sent, and the session took it back
        try:
            mine = self._lookup(reg)
            if not isinstance(mine, torch.Tensor):
                raise ArgumentError(
                    f"{what}: register {reg} of worker 0 holds {_kind(mine)}, not a tensor"
                )
            _check_same(what, host, mine)
            with torch.no_grad():
                if to_host:
                    host.copy_(_in_shape(mine, host))
                else:
                    mine.copy_(_in_shape(host, mine))
        except BaseException as exc:
            self._poison(0, command, exc)

    def _debug_get_from_remote(self, command: Command) -> None:
        _, reg, tell, ticket = command
        value = self.registers.get(reg)
        if tell:
            value = self.unreported.orphan() or value
        if type(value) is not Failure and not self.channel.copies:
            try:
                value = arguments.private_copy(value)
            except BaseException as exc:
                value = self._describe(exc, command, "fetching a value")
        self.channel.reply(ticket, self.worker_id, value)

    def _debug_set_register(self, command: Command) -> None:
        _, reg, value, ticket = command
        current = self.registers.get(reg)
        failure = None
        try:
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                _check_same("debug_copy_from", value, current)
                with torch.no_grad():
                    current.copy_(_in_shape(value, current))
            else:
                self.registers[reg] = arguments.private_copy(value)
        except BaseException as exc:
            failure = self._describe(exc, command, "debug_copy_from")
            failure.reported = True
        self.channel.reply(ticket, self.worker_id, failure)

    def _end_interrupt(self, command: Command) -> None:
        with self._guard:  # nothing runs now, so that no exception comes
            self.interrupts = max(0, self.interrupts - 1)
            self._async_sent = self._async_sent and self.interrupts > 0
        self.resumed_at = self.executed
        self.channel.reply(command[2], self.worker_id, None)

    def _begin_at(self, command: Command) -> None:
        _, _, self.joined_at, own = command
        self.executed = self.joined_at - own

    def _reported(self, command: Command) -> None:
        calls, victims, others, regs = command[2]
        for value in map(self.registers.get, regs):
            if type(value) is Failure:
                value.reported = True
        for value in (*self.registers.values(), *self.unreported.kept()):
            if type(value) is Failure and (
                value.call in calls
                or (value.victim and value.call in victims)
                or (value.rank, value.number) in others
            ):
                value.reported = True

    def _not_an_action(self, command: Command) -> None:
        self._poison(0, (*command, None), DiscoError(f"unknown action {command[0]}"))

    # -- for status --------------------------------------------------------------------------

    def command_text(self, command: Command) -> tuple[str, str]:
        """Describe a command, and say where the controller gave it.

        A function may have a description of its own as `disco_command`; it needs no call site.
        """
        action = command[0]
        if action == DiscoAction.CALL_PACKED:
            func = command[2]
            if actions.function_text(func) == run_within.__name__:
                name = command[3][0][-1]  # of what it runs
                return f"call of '{name}'", site_text(command[-1])
            if type(func) is arguments.Register:
                func = self.registers.get(func)
            description = actions.attribute(func, "disco_command")
            if isinstance(description, str):
                return description, ""
            return f"call of '{actions.function_text(func)}'", site_text(command[-1])
        if action == DiscoAction.GET_GLOBAL_FUNC:
            return f"get_global_func({command[2]!r})", site_text(command[-1])
        known = action in DiscoAction.__members__.values()
        text = DiscoAction(action).name.lower() if known else f"action {action}"
        return text, site_text(command[-1])

    def state(self, received: int) -> WorkerState:
        """What it is now, with how many commands were received; from any thread.

        What it says was so before what the worker is asked next.
        """
        executed = self.executed  # first: what follows is then true of all calls up to it
        failed = tuple(copied(self.failed_calls))
        busy = self.current is not None
        state, detail, seconds = self.doing()
        return WorkerState(
            self.worker_id,
            executed,
            self.sat_out,
            self.resumed_at,
            self.ended,
            self.interrupts,
            received,
            busy,
            state,
            detail,
            seconds,
            failed,
        )

    def doing(self) -> tuple[str, str, float]:
        """``(state, detail, seconds)``: idle, running or waiting, in what, since its call began."""
        now = time.monotonic()
        command, waiting = self.current, self.waiting_for
        seconds = now - self._began
        if self.died:
            return "dead", "", seconds
        if self.ended:
            return "ended", "", seconds
        if command is None:
            return "idle", "", seconds
        text, site = self.command_text(command)
        where = f"{text} (called at {site})" if site else text
        if waiting is not None:
            what = str(waiting)  # of a collective the place of its call is told with it
            at = "" if hasattr(waiting, "call_of") else self._place_now()
            return "waiting", f"for {what} in {where}{'' if what.endswith(at) else at}", seconds
        return "running", where + self._place_now(), seconds

    def _place_now(self) -> str:
        """`` at file:line`` of the user's code that runs on this thread at this moment."""
        nearest = ""
        for file, line, function in places_of(self.thread_id):
            if function == _CALL_PACKED.co_name and file == _CALL_PACKED.co_filename:
                break
            if not is_own_file(file):
                here = place(file, line)
                if is_cell(file):
                    return f" at {here}"
                nearest = nearest or here
        waits, awaited = self.awaits, ""
        while (frame := getattr(waits, "cr_frame", None)) is not None:
            if is_cell(frame.f_code.co_filename):
                awaited = place(frame.f_code.co_filename, frame.f_lineno)
            waits = waits.cr_await
        nearest = awaited or nearest
        return f" at {nearest}" if nearest else ""


_CALL_PACKED = Worker._call_packed.__code__


def _end_child(exc: BaseException | None) -> NoReturn:
    """End a process that was forked inside a worker: it is none, and has no controller."""
    code: Any = 0
    if isinstance(exc, SystemExit):
        code = exc.code or 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    elif exc is not None:
        traceback.print_exception(exc)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


def _check_same(what: str, host: torch.Tensor, mine: torch.Tensor) -> None:
    if host.numel() != mine.numel() or host.dtype != mine.dtype:
        raise ArgumentError(
            f"{what}: the host array is {_kind(host)}, the register holds {_kind(mine)}; "
            "dtype and number of elements must be the same"
        )


def _in_shape(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return source if source.shape == target.shape else source.reshape(target.shape)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "nothing" if value is None else f"a {type(value).__name__}"
