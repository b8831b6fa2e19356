"""Caller: the middle of a session. It calls functions on the workers and fetches values.

Arguments are checked and copied here, on the caller's thread; how commands are queued and
waited for is in controller.py, Disco's methods are in session.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import call
from time import monotonic
from types import FunctionType
from typing import Any
from weakref import ref as weakref

import numpy as np
import torch

from . import variables
from .actions import BIND_ARGUMENTS, BIND_FUNCTION, SIMPLE_TENSORS, DiscoAction
from .arguments import Copies, Pickled, Register, as_tensor, encode, is_atom
from .channel import Ticket
from .contexts import nothing_in_force, with_context
from .controller import Controller, call_site, check_timeout
from .dref import DPackedFunc, DRef
from .errors import ArgumentError, ForeignDRefError, WorkerError
from .failures import Failure
from .freed import FreedDRef, freed_text, put_failure

_NOT_PLAIN = (DRef, torch.nn.Module)  # callables that stand for something on the workers
_CALL_PACKED = int(DiscoAction.CALL_PACKED)  # an IntEnum as list index costs 3 x an int


class Caller(Controller):
    """Calls, worker variables and fetched values."""

    # -- calls -------------------------------------------------------------------------------

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
            if self._closed:
                self._check_open()
            registers = self._registers
            if len(registers.dropped) > 1:
                self._flush_dropped()
            reg = registers.take()
            ref = DRef(reg, self)  # type: ignore[arg-type]  # it is a Session
            command = (_CALL_PACKED, reg, what, given, named, bind, site)
            self._run_steps(map(call, self._to_all_as_call, repeat(command)))  # as `_broadcast`
            book = self._book
            if book is not None:
                book[reg] = (weakref(ref), site, monotonic(), book.cell, self.calls_sent)
        return ref

    def call_without_result(self, func: Any, /, *args: Any, **kwargs: Any) -> None:
        """As `call_packed`, for what is called for its effect.

        What fails is told by the next wait for that worker, be it a sync or a fetch.
        """
        command = self._encode_call(func, args, kwargs)
        if self._is_look_due():
            self._throttle()
        with self._lock:
            self._broadcast((_CALL_PACKED, 0, *command))

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

    # -- worker variables ----------------------------------------------------------------------

    def __getitem__(self, name: str) -> DRef:
        """The variable `name` of the workers' cells, as a DRef."""
        ref = self.call_packed(variables.get_variable, _variable_name(name))
        ref.name = name
        return ref

    def __setitem__(self, name: str, value: Any) -> None:
        """Give every worker a variable; a DRef gives each worker its own value."""
        self.push({name: value})

    def push(self, values: Mapping[str, Any]) -> None:
        """Set variables of the workers' cells; tensors are copied, one for each worker."""
        checked = {_variable_name(name): value for name, value in values.items()}
        self.call_without_result(variables.set_variables, checked)

    def pull(
        self, name: str, ranks: Sequence[int] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Fetch a variable from some workers or all, in rank order."""
        check_timeout(timeout)
        return self.fetch(self[name], ranks, timeout)

    # -- values ------------------------------------------------------------------------------

    def fetch(
        self, ref: DRef, ranks: Sequence[int] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Fetch copies of what some workers (None: all) hold, in the order of `ranks`.

        Raises
        ------
        WorkerError
            If the register is poisoned on one of them.
        ArgumentError, ForeignDRefError, SessionClosedError, WaitTimeoutError
        """
        values = self.peek(ref, ranks, timeout, tell=True)
        failures = [v for v in values.values() if isinstance(v, Failure)]
        if failures:
            raise self.told(failures)
        return [values[int(rank)] for rank in (range(self.num_workers) if ranks is None else ranks)]

    def peek(
        self,
        ref: DRef,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
        tell: bool = False,
    ) -> dict[int, Any]:
        """Fetch values by rank without raising for poisoned ones: those are `Failure`s.

        For views: with `tell` false nothing counts as told, so a later sync still raises it.
        """
        check_timeout(timeout)
        return self._interrupting(lambda: self._wait(self.request(ref, ranks, tell), timeout))

    def request(
        self,
        ref: DRef,
        ranks: Sequence[int] | None = None,
        tell: bool = False,
        what: str | None = None,
    ) -> Ticket:
        """Ask for values as `peek` does, without waiting: `wait` for the ticket when needed.

        `what` is said to be waited for; None: the register.
        """
        reg = self._register_of(ref)
        if reg is None:
            raise ArgumentError(f"a DRef is needed, got a {type(ref).__name__}")
        if ranks is None:
            ranks = range(self.num_workers)
        ranks = [self._check_rank(rank) for rank in ranks]
        what = what or f"register {int(reg)}"
        return self._ask(ranks, DiscoAction.DEBUG_GET_FROM_REMOTE, what, (reg, tell))

    def set_value(self, ref: DRef, worker_id: int, value: Any, timeout: float | None) -> None:
        """See `DRef.debug_copy_from`."""
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
        reply = self._interrupting(
            lambda: self._wait(self._ask([rank], action, "debug_copy_from", (reg, value)), timeout)
        )[rank]
        if self._book is not None:
            self._book.values_set += 1
        if isinstance(reply, Failure):
            raise WorkerError([reply])

    def told(self, failures: list[Failure]) -> WorkerError:
        """The error to raise; no later wait raises for these calls again, on whatever worker.

        What a wait that was given up has brought is told by the next one.
        """
        for failure in failures:
            failure.reported = True
        calls = {failure.call for failure in failures if failure.call >= 0}
        causes = {failure.call for failure in failures if failure.call >= 0 and not failure.victim}
        others = {(f.rank, f.number) for f in failures if f.call < 0 and f.number}
        with self._lock:
            if not self._closed:
                told = tuple(causes), tuple(calls - causes), tuple(others)
                self._broadcast((DiscoAction.TOLD, 0, told))
        return WorkerError(failures)

    def register_of(self, dref: DRef) -> int:
        """The number of a DRef's register.

        Raises
        ------
        ForeignDRefError
            If it belongs to another session.
        """
        found = self._register_of(dref)
        assert found is not None, "not a DRef"
        return int(found)

    # -- inside ------------------------------------------------------------------------------

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
        for arg in args:
            if not is_atom(arg):
                alone = len(args) == 1 and not kwargs and isinstance(arg, torch.Tensor)
                copies = None if alone else Copies((args, kwargs))
                args = tuple([encode(a, self._register_of, 0, copies) for a in args])
                bind |= BIND_ARGUMENTS
                break
        if kwargs:
            copies = copies or Copies(kwargs)
            kwargs = {k: encode(v, self._register_of, 0, copies) for k, v in kwargs.items()}
            bind |= BIND_ARGUMENTS
        if copies is not None and copies.simple:
            bind |= SIMPLE_TENSORS
        return func, args, kwargs, bind, call_site(3)


def _variable_name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ArgumentError(f'a worker variable has a Python name, as in sess["x"]; got {name!r}')
    return name
