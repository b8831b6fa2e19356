"""Session: the API of Disco, and what discolab adds to it.

Calls, worker variables and fetched values, modules, copies to and from worker 0, and the
collectives by name. Arguments are checked and copied here, on the caller's thread; controller.py
queues commands and waits. Where workers live is an engine's affair (engines/).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from sys import maxsize
from time import monotonic
from types import FunctionType
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakSet
from weakref import ref as weakref

import numpy as np
import torch

from . import accelerators, builtin
from .actions import BIND_ARGUMENTS, BIND_FUNCTION, SIMPLE_TENSORS, DiscoAction
from .arguments import (
    Copies,
    Pickled,
    Register,
    as_tensor,
    encode,
    kinds_to_encode,
    parse_device,
    parse_dtype,
    parse_shape,
)
from .channel import Ticket
from .contexts import nothing_in_force, with_context
from .controller import Controller, call_site, check_timeout
from .display import Drawn
from .dref import DModule, DPackedFunc, DRef, FreedDRef, freed_text, put_failure
from .errors import ArgumentError, ForeignDRefError, WorkerError
from .failures import Failure
from .functions import is_own
from .interrupts import ends_work
from .mesh import Mesh, make_mesh, set_mesh
from .registers import Site
from .restart import (
    MOST_PUSHED,
    Equal,
    Named,
    Origin,
    Part,
    Recipe,
    RestartedWorker,
    bytes_of,
    maker_of,
    restart_worker,
)
from .worker import current_worker

R = TypeVar("R", bound=DRef)

_DREFS_ONLY = {DRef}
_NOT_PLAIN = (DRef, torch.nn.Module)  # callables that stand for something on the workers
_CALL_PACKED = int(DiscoAction.CALL_PACKED)  # an IntEnum as list index costs 3 x an int
_RANDOM = {
    "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "normal", "poisson",
    "binomial", "dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d",
    "dropout3d", "rrelu", "gumbel_softmax",
}  # fmt: skip
REDUCE_OPS = ("sum", "prod", "min", "max", "avg")  # Disco's numbers 0..4


class Session(Drawn, Controller):
    """A single controller over `num_workers` workers; made by an engine, not directly.

    Use it in ``with``: leaving the block waits for the work, raises what failed in it, and
    shuts the session down.
    """

    _mesh: Mesh | None = None
    collectives = ""
    """What `init_ccl` has chosen, in a sentence that begins with the backend's name."""

    last_failures: tuple[Failure, ...] = ()
    """Of the last error of workers that was raised, without the exceptions themselves."""

    not_compiled: Failure | None = None
    """Why the last cell or script did not run: it could not be compiled; its `call` is the ordinal
    that it would have had. None if it was compiled."""

    above: ClassVar[dict[str, Callable[..., Any]]] = {}
    """What layers above do for `load`, `save`, `snapshot`, `restore`, `rpc`, `compare` and
    `explain`."""

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._closed:
            return
        try:
            if kind is None and not self._why_held_up() and not self._knows_dead():
                self.sync_all()
        finally:
            self.shutdown(cancel=kind is not None)

    # -- calls -----------------------------------------------------------------------------

    def call_packed(self, func: Any, /, *args: Any, **kwargs: Any) -> DRef:
        """Call a function on every worker; returns at once with the DRef of the results.

        Parameters
        ----------
        func
            A `DPackedFunc`, or any Python callable.
        args, kwargs
            See `runtime.arguments` for what they may be. A DRef stands for each worker's own
            value; each worker gets its own copy of a tensor.

        Notes
        -----
        A call that raises on a worker poisons the result there: reading it, or the next
        `sync_*`, raises a `WorkerError`. When workers are more than 16,384 commands behind,
        the call waits for them first.

        Raises
        ------
        ArgumentError
            If something here can't be carried to a worker.
        """
        # other names: `func`, `args` and `kwargs` hold DRefs whose registers this call reads
        what, given, named, bind, site = self._encode_call(func, args, kwargs)
        if self._is_look_due():
            self._throttle()
        with self._lock:
            if self._closed or self._lost:
                self._check_callable(func)
            registers = self._registers
            if len(registers.dropped) > 1:
                self._forget_dropped()
            reg = registers.take()
            ref = DRef(reg, self)
            command = (_CALL_PACKED, reg, what, given, named, bind, site)
            self._send_call(command)
            kind = type(what)
            if kind is FunctionType:
                what = what.__code__
            elif kind is not Register:
                what = maker_of(what)
            self._origins[reg] = what, site
            book = self._book
            if book is not None:
                calls = maxsize - self._calls.left()
                book[reg] = weakref(ref), site, monotonic(), book.cell, calls
        return ref

    def call_without_result(self, func: Any, /, *args: Any, **kwargs: Any) -> None:
        """As `call_packed`, for what is called for its effect.

        The next wait for that worker, be it a sync or a fetch, raises what fails.
        """
        command = self._encode_call(func, args, kwargs)
        if self._is_look_due():
            self._throttle()
        with self._lock:
            if self._closed or self._lost:
                self._check_callable(func)
            self._send_call((_CALL_PACKED, 0, *command))

    def free(self, ref: DRef) -> None:
        """Free a DRef's value on all workers, in turn with other commands; returns at once.

        Names that are bound to it stay, but using it is an `ArgumentError` from now on, as it is
        in calls that were given it and have not begun. A worker variable with the same value
        keeps it.

        Raises
        ------
        ArgumentError
            If it is none, or has been freed before.
        ForeignDRefError, SessionClosedError
        """
        reg = self._register_of(ref)
        if reg is None:
            raise ArgumentError(f"a DRef is needed, got a {type(ref).__name__}")
        command = self._encode_call(put_failure, (freed_text(ref),), {})
        with self._lock:
            if isinstance(ref, FreedDRef):
                raise ArgumentError(freed_text(ref))  # another thread was faster
            self._broadcast((_CALL_PACKED, reg, *command))
            ref.__class__ = FreedDRef
            if self._book is not None:
                self._book.pop(reg, None)

    def get_global_func(self, name: str) -> DPackedFunc:
        """The function registered as `name` on the workers.

        Raises
        ------
        UnknownFunctionError
            If the controller can see that there is none. On workers in other processes the
            error is found there, and the result is poisoned.
        """
        if not isinstance(name, str):
            raise ArgumentError(f"a function's name is a string, got {name!r}")
        site = call_site()
        with self._lock:
            ref = DPackedFunc(self._look_up(name, site), self)
            if self._book is not None:
                self._book.enter(ref, site, self.calls_sent)
        return ref

    def import_python_module(self, name: str) -> None:
        """Import a Python module on every worker."""
        self.call_without_result(self._function("runtime.disco._import_python_module"), name)
        if name not in self._imported:
            self._imported.append(name)

    def load_module(self, path: Any, device: Any = None) -> DModule:
        """Load a module on every worker: ``module["name"]`` is then a function of it.

        Parameters
        ----------
        path
            A ``.py`` file or the name of a Python module, a ``.pt2`` package of
            `torch.export`, or a shared library: what TVM's `relax` has compiled and exported, or
            of functions for `tvm_ffi`. Collectives in a program of TVM's are this session's.
        device
            Where to put its tensors; None: each worker's own device.
        """
        load = "runtime.disco.load_vm_module"
        return self._call_for(DModule, load, str(path), parse_device(device))

    load_vm_module = load_module

    def manual_seed(self, seed: int) -> None:
        """Seed torch's random numbers on every worker; `torch.manual_seed` seeds the notebook."""
        self._seed = None
        self.call_without_result(torch.manual_seed, seed)

    def empty(
        self,
        shape: Any,
        dtype: Any,
        device: Any = None,
        worker0_only: bool = False,
        in_group: bool = True,
    ) -> DRef:
        """An uninitialised tensor on every worker.

        Parameters
        ----------
        shape, dtype
            Of each worker's tensor; `dtype` may be a name such as ``"float32"``.
        device
            None: each worker's own.
        worker0_only
            Only on the first worker of each group (`in_group`) or on worker 0 of all; the
            other workers hold None.
        """
        return self._call(
            "runtime.disco.empty",
            parse_shape(shape),
            parse_dtype(dtype),
            parse_device(device),
            bool(worker0_only),
            bool(in_group),
        )

    # -- worker variables ----------------------------------------------------------------------

    def __getitem__(self, name: str) -> DRef:
        """The variable `name` of the workers' cells, as a DRef."""
        ref = self.call_packed(builtin.get_variable, _variable_name(name))
        ref.name = name
        return ref

    def __setitem__(self, name: str, value: Any) -> None:
        """Give every worker a variable; a DRef gives each worker its own value."""
        self.push({name: value})

    def push(self, values: Mapping[str, Any]) -> None:
        """Set variables of the workers' cells; tensors are copied, one for each worker."""
        checked = {_variable_name(name): value for name, value in values.items()}
        again = self._to_push_again(checked)
        self.call_without_result(builtin.set_variables, checked)
        self._pushed = again

    def _to_push_again(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What a worker that is restarted is pushed once `values` have been: copies, by name."""
        again = {name: kept for name, kept in self._pushed.items() if name not in values}
        room = MOST_PUSHED - sum(map(bytes_of, again.values()))
        for name, value in values.items():
            size = bytes_of(value)
            if size > room:
                continue
            try:
                again[name] = (encode(value, _no_dref),)
            except ArgumentError:  # a DRef, or what can't be sent anyway
                continue
            room -= size
        return again

    def pull(
        self, name: str, ranks: Sequence[int] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Fetch a variable from some workers or all, in rank order."""
        check_timeout(timeout)
        return self.fetch(self[name], ranks, timeout)

    # -- values ------------------------------------------------------------------------------

    @ends_work
    def fetch(
        self,
        ref: DRef,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Fetch copies of what some workers (None: all) hold, in the order of `ranks`.

        `meanwhile` is called every 50 ms of the wait.

        Raises
        ------
        WorkerError
            If the register is poisoned on one of them.
        ArgumentError, ForeignDRefError, SessionClosedError, WaitTimeoutError
        """
        values = self.peek(ref, ranks, timeout, tell=True, meanwhile=meanwhile)
        failures = [v for v in values.values() if isinstance(v, Failure)]
        if failures:
            raise self.report(failures)
        return [values[int(rank)] for rank in (range(self.num_workers) if ranks is None else ranks)]

    @ends_work
    def peek(
        self,
        ref: DRef,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
        tell: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[int, Any]:
        """Fetch values by rank without raising for poisoned ones: those are `Failure`s.

        For views: with `tell` false nothing counts as reported, so a later sync still raises it.
        """
        check_timeout(timeout)
        return self._wait(self.request(ref, ranks, tell), timeout, meanwhile)

    def request(
        self,
        ref: DRef,
        ranks: Sequence[int] | None = None,
        tell: bool = False,
        what: str | None = None,
    ) -> Ticket:
        """Ask for values as `peek` does, without waiting: `wait` for the ticket when needed.

        `what` names in errors what is waited for; None: the register.
        """
        reg = self._register_of(ref)
        if reg is None:
            raise ArgumentError(f"a DRef is needed, got a {type(ref).__name__}")
        if ranks is None:
            ranks = range(self.num_workers)
        ranks = [self._check_rank(rank) for rank in ranks]
        what = what or f"register {int(reg)}"
        return self._ask(ranks, DiscoAction.DEBUG_GET_FROM_REMOTE, what, (reg, tell), check=tell)

    @ends_work
    def set_value(self, ref: DRef, worker_id: int, value: Any, timeout: float | None) -> None:
        """Set the value of a DRef on one worker; see `DRef.debug_copy_from`."""
        check_timeout(timeout)
        rank = self._check_rank(worker_id)
        reg = self._register_of(ref)
        if isinstance(value, DRef):
            raise ArgumentError("debug_copy_from: give a value, not a DRef")
        value = encode(value, lambda _: None)
        if isinstance(value, Pickled):
            value = value.value
        elif isinstance(value, np.ndarray):
            value = as_tensor(value, "debug_copy_from: value")
        action = DiscoAction.DEBUG_SET_REGISTER
        ticket = self._ask([rank], action, "debug_copy_from", (reg, value))
        reply = self._wait(ticket, timeout)[rank]
        if self._book is not None:
            self._book.values_set += 1
        if isinstance(reply, Failure):
            raise WorkerError([reply])
        self._set_apart[ref.reg_id, rank] = weakref(ref)

    def report(self, failures: list[Failure]) -> WorkerError:
        """The error to raise; no later wait raises for these calls again, on whatever worker.

        What a wait that was given up has brought is raised by the next one.
        """
        for failure in failures:
            failure.reported = True
        self.last_failures = tuple(replace(failure, exception=None) for failure in failures)
        calls = {failure.call for failure in failures if failure.call >= 0}
        causes = {failure.call for failure in failures if failure.call >= 0 and not failure.victim}
        others = {(f.rank, f.number) for f in failures if f.call < 0 and f.number}
        with self._lock:
            if not self._closed:
                reported = tuple(causes), tuple(calls - causes), tuple(others), ()
                self._broadcast((DiscoAction.REPORTED, 0, reported))
        return WorkerError(failures)

    def mark_reported(self, ref: DRef) -> None:
        """A worker died in the call that fills `ref`, which was told: no wait raises it again.

        The others say how it failed there once that is done; nobody waits for this any more.
        """
        with self._lock:
            if not self._closed and self._dead():
                self._broadcast((DiscoAction.REPORTED, 0, ((), (), (), (int(ref.reg_id),))))

    def register_of(self, dref: DRef) -> int:
        """The number of a DRef's register.

        Raises
        ------
        ForeignDRefError
            If it belongs to another session.
        """
        register = self._register_of(dref)
        assert register is not None, "not a DRef"
        return int(register)

    # -- worker 0 and sync ---------------------------------------------------------------------

    def copy_from_worker_0(
        self, host_array: Any, remote: DRef, timeout: float | None = None
    ) -> None:
        """Copy worker 0's tensor into a tensor or numpy array here.

        Asynchronous as in Disco: the array is filled once `sync_worker_0` has returned.
        With `timeout` (seconds) the call waits for it.
        """
        self._copy_worker0(DiscoAction.COPY_FROM_WORKER0, host_array, remote, timeout)

    def copy_to_worker_0(
        self, host_array: Any, remote: DRef | None = None, timeout: float | None = None
    ) -> DRef:
        """Copy a tensor or numpy array here into worker 0's tensor, and return its DRef.

        Asynchronous as in Disco: leave the array alone until `sync_worker_0` has returned.
        Without `remote`, a tensor of that shape and dtype is made on worker 0 first.
        """
        check_timeout(timeout)
        host = as_tensor(host_array, "copy_to_worker_0: host_array")
        if remote is None:
            remote = self.empty(host.shape, host.dtype, worker0_only=True, in_group=False)
        self._copy_worker0(DiscoAction.COPY_TO_WORKER0, host, remote, timeout)
        return remote

    @ends_work
    def sync_worker_0(self, timeout: float | None = None) -> None:
        """Wait until worker 0 has done all that was asked so far, and raise what failed there."""
        self._sync([0], timeout)

    @ends_work
    def sync_worker(self, worker_id: int, timeout: float | None = None) -> None:
        """As `sync_worker_0`, for any worker."""
        self._sync([self._check_rank(worker_id)], timeout)

    @ends_work
    def sync_all(self, timeout: float | None = None) -> None:
        """As `sync_worker_0`, for all workers."""
        self._sync(range(self.num_workers), timeout)

    _sync_worker = sync_worker
    _sync_all = sync_all

    # -- one worker started afresh ---------------------------------------------------------------

    def restart_worker(self, worker_id: int) -> RestartedWorker:
        """Put a new worker in the place of one that has died, hangs, or is to begin afresh.

        The others keep what they hold, and DRefs stay what they are. On the new worker a value is
        *restored* if it can be made again as it was, or is known to be equal on another worker.
        Any other is *lost*: to read or use it there is a `WorkerError` that says what it was and
        which call made it, until it is assigned (`DRef.debug_copy_from`). Variables of its cells
        are gone, but for those that were pushed. See docs/restart.md.

        Parameters
        ----------
        worker_id
            The rank. It is ended first if it lives: what it runs is interrupted.

        Returns
        -------
        RestartedWorker
            What was restored and what is lost; shows itself.

        Raises
        ------
        SessionError
            If this worker can't be replaced, such as worker 0 where the others are processes.
        DiscoError
            If no new one could be started. The session can be restarted as a whole then.
        """
        return restart_worker(self, worker_id)

    def how_restored(self, ref: DRef) -> dict[int, str]:
        """Where the value of a DRef was restored on a worker that was restarted, and how: by rank.

        Examples
        --------
        >>> sess.how_restored(weight)  # doctest: +SKIP
        {2: 'copied from worker 0 (it was broadcast)'}
        """
        found = {}
        for rank in range(self.num_workers) if self._restored else ():
            entry = self._restored.get((ref.reg_id, rank))
            if entry is not None and entry[0]() is ref:
                found[rank] = entry[1]
        return found

    def remember(self, ref: DRef, recipe: Recipe) -> None:
        """Note how the value of a DRef can be made again on a worker that is restarted."""
        with self._lock:
            maker, site = self._origins.get(ref.reg_id, ("a call", None))[:2]
            self._origins[ref.reg_id] = Origin(maker, site, recipe, self.calls_sent - 1)

    # -- checkpoints ---------------------------------------------------------------------------

    def load(self, path: str | PathLike[str], plan: Any = None, **options: Any) -> dict[str, DRef]:
        """Load a checkpoint straight into its shards: see `discolab.loader.load`."""
        weights: dict[str, DRef] = self.above["load"](self, path, plan, **options)
        return weights

    def save(
        self,
        path: str | PathLike[str],
        weights: Mapping[str, DRef],
        plan: Any = None,
        **options: Any,
    ) -> Any:
        """Save sharded tensors as a checkpoint: see `discolab.loader.save`."""
        return self.above["save"](self, path, weights, plan, **options)

    def snapshot(
        self, path: str | PathLike[str], refs: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        """Save the workers' variables, and DRefs: see `discolab.snapshots.snapshot`."""
        return self.above["snapshot"](self, path, refs, **options)

    def restore(self, path: str | PathLike[str], **options: Any) -> dict[str, DRef]:
        """Give workers the variables of a snapshot: see `discolab.snapshots.restore`."""
        refs: dict[str, DRef] = self.above["restore"](self, path, **options)
        return refs

    # -- calling one worker ----------------------------------------------------------------------

    @property
    def rpc(self) -> Any:
        """Calls of single workers, and references to what they have: see `discolab.rpc`."""
        return self.above["rpc"](self)

    # -- comparing -------------------------------------------------------------------------------

    def explain(self) -> Any:
        """Say what went wrong last: what failed, on whom, and since when the workers differ.

        It is told from what is recorded, in about five lines, each with its place; nothing that the
        workers compute is waited for, so this works while they hang.

        Returns
        -------
        Explanation
            Shows itself.
        """
        return self.above["explain"](self)

    def compare(
        self,
        a: Any,
        b: Any,
        rtol: float | None = None,
        atol: float | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Compare two values on each worker, where they lie.

        Parameters
        ----------
        a, b
            DRefs to tensors, arrays, numbers, modules, or containers of these, matched by name;
            one of the two may be a value here, which is sent to the workers. Of a DTensor the
            local shard is compared.
        rtol, atol
            Two elements agree if ``|a - b| <= atol + rtol * |b|``, or both are NaN. None: as
            `torch.testing.assert_close` has them for the dtype. 0 for both: exactly.
        timeout
            Seconds to wait; None takes the session's.

        Returns
        -------
        Comparison
            Shows itself; has `equal`, `identical`, `ranks` (that differ) and `records`: see
            `discolab.views.Comparison`.

        Raises
        ------
        ArgumentError
            If the two can't be compared, or their shapes differ, on some worker.
        ForeignDRefError, WorkerError, WaitTimeoutError, SessionClosedError
        """
        return self.above["compare"](self, a, b, rtol, atol, timeout)

    # -- collectives -----------------------------------------------------------------------------

    def init_ccl(self, ccl: str = "auto", *device_ids: int) -> str:
        """Choose the collective backend and wait until every worker has it.

        Parameters
        ----------
        ccl
            ``"auto"``, ``"local"``, ``"gloo"``, ``"nccl"`` (``"rccl"`` is its name in ROCm) or
            ``"mpi"``.
        device_ids
            One GPU index for each worker, or none to keep the devices that they have.

        Returns
        -------
        str
            What was chosen: ``"local: 4 workers in one process on cpu"``.
        """
        if device_ids and len(device_ids) != self.num_workers:
            raise ArgumentError(
                f"init_ccl got {len(device_ids)} device ids for {self.num_workers} workers; "
                "give one for each, or none"
            )
        try:
            chosen = self._call("runtime.disco.init_ccl", ccl, *device_ids).debug_get_from_all()
        except WorkerError as exc:
            if isinstance(exc.__cause__, ArgumentError):  # all workers say the same
                raise ArgumentError(str(exc.__cause__)) from None
            raise
        if device_ids:
            kind = accelerators.kind() or "cpu"
            self._devices = tuple(torch.device(kind, index) for index in device_ids)
        self.collectives = str(chosen[0])
        return self.collectives

    def mesh(self, /, **axes: int) -> Mesh:
        """Arrange the workers in a grid with named axes: ``sess.mesh(dp=2, tp=2)``.

        Row by row: the last axis varies fastest. Waits until every worker has it; there it is
        the name ``mesh`` of the cells, and its axes name groups: ``group="tp"``. It stays the
        session's mesh (`current_mesh`) until another one is made.

        Parameters
        ----------
        axes
            The size of each axis; one of them may be -1, to be worked out.

        Raises
        ------
        ArgumentError
            If the sizes do not multiply to the number of workers.
        """
        before, made = self._mesh, make_mesh(axes, self.num_workers)
        try:
            self.call_packed(set_mesh, made).debug_get_from_all()
            self._mesh = made
        except BaseException:  # interrupted: no worker may keep it
            if not self._closed and not self._lost:
                self.call_without_result(set_mesh, before)
            raise
        return made

    @property
    def current_mesh(self) -> Mesh | None:
        """What `mesh` made last, None before that."""
        return self._mesh

    def broadcast(self, src: Any, dst: DRef | None = None, in_group: bool = True) -> DRef:
        """Send a host array to every worker.

        Every worker of every group receives `src`, whatever `in_group` says: there is only
        one source. Leave the array alone until a sync has returned.
        """
        host = as_tensor(src, "broadcast: src")
        source = self.copy_to_worker_0(host)
        if dst is None:
            name = "broadcast_from_worker0"
            ref = self._filled(name, source, False, host.shape, host.dtype)
            self.remember(ref, Equal("it was broadcast"))
            return ref
        return self.broadcast_from_worker0(source, dst, in_group=False)

    def broadcast_from_worker0(self, src: DRef, dst: DRef, in_group: bool = True) -> DRef:
        """Copy `src` of each group's first worker (or of worker 0) into `dst` of the others."""
        self._collective("broadcast_from_worker0", src, in_group, dst)
        self.remember(dst, Equal("it was broadcast", bool(in_group)))
        return dst

    def scatter(self, src: Any, dst: DRef | None = None, in_group: bool = True) -> DRef:
        """Split a host array along its first dimension, one piece for each worker.

        Parameters
        ----------
        src
            ``src.shape[0]`` is the number of workers: of a group if `in_group` (each group
            receives all of `src`), else of the session.
        dst
            Receives ``src.shape[1:]``; made if None.

        Leave the array alone until a sync has returned.
        """
        host = as_tensor(src, "scatter: src")
        within = in_group and self._num_groups > 1
        parts = self.num_workers // self._num_groups if within else self.num_workers
        if host.dim() == 0 or host.shape[0] != parts:
            raise ArgumentError(
                f"scatter: src has shape {list(host.shape)}; its first dimension must be "
                f"{parts}, the number of workers"
                + (" of a group (in_group=False scatters over all)" if within else "")
            )
        if within:  # every group's root needs the data first
            root = self.broadcast(host)
        else:
            root = self.copy_to_worker_0(host)
        if dst is None:
            shape = host.shape[1:]
            made = self._filled("scatter_from_worker0", root, in_group, shape, host.dtype)
            self.remember(made, Part(weakref(root), bool(in_group)))
            return made
        return self.scatter_from_worker0(root, dst, in_group)

    def scatter_from_worker0(self, src: DRef, dst: DRef, in_group: bool = True) -> DRef:
        """Split `src` of each group's first worker (or of worker 0) over the workers' `dst`."""
        self._collective("scatter_from_worker0", src, in_group, dst)
        self.remember(dst, Part(weakref(src), bool(in_group)))
        return dst

    def gather_to_worker0(self, src: DRef, dst: DRef, in_group: bool = True) -> DRef:
        """Collect `src` of all workers in `dst` of each group's first worker (or of worker 0)."""
        self._collective("gather_to_worker0", src, in_group, dst)
        return dst

    def allreduce(self, src: DRef, dst: DRef, op: str = "sum", in_group: bool = True) -> DRef:
        """Reduce `src` over the workers into everybody's `dst`.

        `op` is one of sum, prod, min, max, avg.
        """
        if op not in REDUCE_OPS:
            raise ArgumentError(f"allreduce: unknown op {op!r}; use one of {', '.join(REDUCE_OPS)}")
        self._collective("allreduce", src, REDUCE_OPS.index(op), in_group, dst)
        self.remember(dst, Equal("it was all-reduced", bool(in_group)))
        return dst

    def allgather(self, src: DRef, dst: DRef, in_group: bool = True) -> DRef:
        """Put the `src` of all workers one after the other into everybody's `dst`."""
        self._collective("allgather", src, in_group, dst)
        self.remember(dst, Equal("it was gathered by all", bool(in_group)))
        return dst

    # -- inside ------------------------------------------------------------------------------

    def _check_callable(self, func: Any) -> None:
        """Raise if the session is closed, or a worker has died and the function is the user's.

        Those of views go on: they show what the others hold, and which workers have died.
        """
        self._check_open()
        if not (type(func) is FunctionType and is_own(func)):
            self._check_alive()

    def _register_of(self, value: Any) -> Register | None:
        if not isinstance(value, DRef):
            return None
        if value.session is not self:
            state = "a closed" if value.session.closed else "another"
            raise ForeignDRefError(
                f"{value!r} belongs to {state} session; fetch its value with "
                "debug_get_from_remote and send that"
            )
        return Register(value.reg_id)

    def _encode_function(self, func: Any) -> Any:
        if isinstance(func, torch.nn.Module):
            return encode(func, self._register_of)
        if isinstance(func, Register):
            return func
        register = self._register_of(func)
        if register is None:
            raise ArgumentError(
                f"call_packed needs a function, got a {type(func).__name__}: give a Python "
                "callable, or a name through get_global_func(name)"
            )
        return register

    def _encode_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The payload of CALL_PACKED: ``func, args, kwargs, bind, site``."""
        bind = 0
        if not nothing_in_force():
            func, args = with_context(func, args)
        kind = type(func)
        if kind is DPackedFunc and func.session is self:
            func = func.reg_id if type(func.reg_id) is Register else Register(func.reg_id)
            bind = BIND_FUNCTION
        elif kind is not FunctionType and (not callable(func) or isinstance(func, _NOT_PLAIN)):
            func = self._encode_function(func)
            bind = BIND_FUNCTION
        copies = None
        others = kinds_to_encode(args) if args else None
        if others:
            bind |= BIND_ARGUMENTS
            if others == _DREFS_ONLY:
                args = tuple([self._register_of(a) if isinstance(a, DRef) else a for a in args])
            else:
                alone = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
                copies = None if alone else Copies((args, kwargs))
                args = tuple([encode(a, self._register_of, 0, copies) for a in args])
        if kwargs:
            copies = copies or Copies(kwargs)
            kwargs = {k: encode(v, self._register_of, 0, copies) for k, v in kwargs.items()}
            bind |= BIND_ARGUMENTS
        if copies is not None and copies.simple:
            bind |= SIMPLE_TENSORS
        return func, args, kwargs, bind, call_site(3)

    def _check_name(self, name: str) -> None:
        """Raise for an unknown function name where the registry of the workers is at hand."""

    def _look_up(self, name: str, site: Site) -> Register:
        """Have the workers look a function up; under the lock. The caller holds the register."""
        self._check_name(name)
        reg = Register(self._next_register())
        self._broadcast((DiscoAction.GET_GLOBAL_FUNC, reg, name, site))
        self._origins[reg] = Origin(f"get_global_func({name!r})", site, Named(name))
        return reg

    def _function(self, name: str) -> Register:
        """Where the workers hold a function; no DRef, which would keep the session alive."""
        reg = self._functions.get(name)
        if reg is None:
            with self._lock:
                self._check_open()
                reg = self._functions.get(name)
                if reg is None:
                    reg = self._look_up(name, call_site(3))
                    self._registers.keep(reg)
                    self._functions[name] = reg
        return reg

    def _call(self, name: str, *args: Any) -> DRef:
        """Call a worker function by its global name."""
        return self._call_for(DRef, name, *args)

    def _check_random(self, func: Any) -> None:
        """Tell once that a seed of the notebook is not the workers'."""
        if self._seed is None or getattr(func, "__name__", "") not in _RANDOM:
            return
        if torch.initial_seed() != self._seed:
            self._seed = None
            warnings.warn(
                "torch.manual_seed in the notebook seeds the notebook alone, and this function "
                "draws on the workers, each from a state of its own: seed those with "
                "sess.manual_seed(seed)",
                stacklevel=4,
            )

    def _call_for(self, kind: type[R], name: str, *args: Any) -> R:
        """As `_call`, with the result as a DRef of another kind."""
        ref = self.call_packed(self._function(name), *args)
        if kind is DRef:
            return ref  # type: ignore[return-value]
        ref.__class__ = kind  # a second DRef would give the register back twice
        return ref  # type: ignore[return-value]

    def _collective(self, name: str, *args: Any) -> None:
        for arg in args:
            if not isinstance(arg, DRef | bool | int):
                raise ArgumentError(f"{name}: a DRef is needed, got a {type(arg).__name__}")
        self.call_without_result(self._function("runtime.disco." + name), *args)

    def _filled(self, name: str, src: DRef, in_group: bool, shape: Any, dtype: Any) -> DRef:
        """A tensor of ours that a collective fills: poisoned where that fails, never raw memory."""
        dst = self.empty(shape, dtype)
        return self.call_packed(
            _FILLING[name], self._function("runtime.disco." + name), src, in_group, dst
        )

    def _copy_worker0(
        self, action: DiscoAction, host_array: Any, remote: DRef, timeout: float | None
    ) -> None:
        check_timeout(timeout)
        what = action.name.lower()
        host = as_tensor(host_array, f"{what}: host_array")
        if not isinstance(remote, DRef):
            raise ArgumentError(f"{what}: a DRef is needed, got a {type(remote).__name__}")
        if action == DiscoAction.COPY_FROM_WORKER0 and not _writeable(host_array):
            raise ArgumentError(f"{what}: host_array is read-only, nothing can be copied into it")
        reg = self._register_of(remote)
        site = call_site()
        with self._lock:
            self._check_open()
            if self._lost:
                self._check_alive([0])
            token = next(self._tokens)
            try:
                self._worker_zero_data[token] = host
                self._broadcast((action, reg, token, site))
            except BaseException:
                self._worker_zero_data.pop(token, None)
                raise
        if timeout is not None:
            self.sync_worker_0(timeout)

    def _sync(self, ranks: Sequence[int], timeout: float | None) -> None:
        check_timeout(timeout)
        replies = self._wait(self._ask(ranks, DiscoAction.SYNC_WORKER, "sync", (0,)), timeout)
        failures = [f for unreported in replies.values() for f in unreported]
        if failures:
            raise self.report(failures)


started_sessions: WeakSet[Session] = WeakSet()
"""The sessions of this process whose workers an engine has started. `engines/hooks.py` fills it."""


def open_sessions() -> list[Session]:
    """The started sessions of this process that were not shut down."""
    return [session for session in list(started_sessions) if not session.closed]


def _filling(name: str) -> Callable[..., Any]:
    """The collective `name` as a worker function that returns what it has filled."""

    def fill(collective: Callable[..., None], src: Any, in_group: bool, dst: Any) -> Any:
        collective(src, in_group, dst)
        worker = current_worker()
        if worker.current is not None:
            worker.watched.watch(worker.current[1], dst)
        return dst

    fill.__qualname__ = name
    fill.__code__ = fill.__code__.replace(co_qualname=name)  # what is kept of it, see `maker_of`
    return fill


_FILLING = {name: _filling(name) for name in ("broadcast_from_worker0", "scatter_from_worker0")}


def _no_dref(_value: Any) -> None:
    """Stands for `Session._register_of` where a DRef is a value that can't be taken."""


def _writeable(array: Any) -> bool:
    return not isinstance(array, np.ndarray) or bool(array.flags.writeable)


def _variable_name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ArgumentError(f'a worker variable has a Python name, as in sess["x"]; got {name!r}')
    return name
