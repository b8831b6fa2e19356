"""torch's switches: settings of the process that decide how numbers are computed.

torch keeps each once, in C++, and reads it without asking whose thread it is. So all workers of a
session change one together: a worker that sets a switch to another value waits until the others set
it to the same one, as a program does that runs on all ranks, and only then it changes. Were it
changed before, another worker would go on computing with what it has not asked for. A worker for
which the others can't come (they set another value, have ended the command, or wait for it) gets
an error.

The notebook has values of its own, and so has each session: those of the workers are put in force
when the first of them begins a command, or to serve a call of RPC, and the notebook's when the last
one has ended its own.
What the notebook computes meanwhile is computed with the workers' values; workers of two sessions
whose values differ do not compute at once, but get an error.

While workers take turns, as in traces of programs, none can wait for the others. Switches that
choose between kernels of the same precision, which torch's tracing sets itself, are changed at
once there, for as long as the trace takes; any other is an error. What other workers compute
meanwhile is computed with those kernels, or fails if there is none left that can: torch has one
choice for the process, the trace needs its own, and nobody can hold the others back.

A worker that leaves a context because of an exception, and a script that ends, put the switches
back as well as they can: what can't be agreed upon then is put back when all workers are idle.
So is what contexts have set that a call has not left when it fails: an interrupt may cut off a
context's end, which sets one switch after the other. What a call has set otherwise, such as by
``torch.use_deterministic_algorithms(True)``, stays when it is interrupted later.

`_lock` guards `_values`, `_wishes`, `_open`, `_traced`, `_entered` and the changes of the switches
themselves. A worker sets its `current` itself; who changes `_values` looks at it after that, and a
worker looks at `_values` after it has set it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.backends

from ..runtime import contexts
from ..runtime.actions import Command
from ..runtime.errors import SessionError, WorkerInterrupted
from ..runtime.interrupts import reentrant_lock, shield, waiter_here
from ..runtime.worker import Worker, current_worker_or_none
from . import table
from .barriers import Barrier, obstacle
from .imports import is_importing
from .patches import Patches
from .table import Row, Treatment
from .turns import is_in_turn


@dataclass(frozen=True)
class Switch:
    """One of torch's switches, with torch's own functions.

    Attributes
    ----------
    name
        As a program calls it.
    get, set
        Of the process; what `get` gives is what `set` takes.
    setter
        Name of the function in ``torch._C`` that programs reach, by whatever way.
    key
        The setter's first arguments, by which it is told from others of one setter.
    getters
        Names of the functions in ``torch._C`` that programs read, which take `key`; of two each
        gives a part.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    setter: str
    key: tuple[Any, ...] = ()
    getters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def _plain(name: str, getter: str, setter: str) -> Iterator[Switch]:
    """A switch with a getter and a setter of one value, if this torch has it."""
    get, set_ = getattr(torch._C, getter, None), getattr(torch._C, setter, None)
    if get is not None and set_ is not None:
        yield Switch(name, get, set_, setter, getters=(getter,))


def _of_deterministic() -> Iterator[Switch]:
    set_ = torch._C._set_deterministic_algorithms
    get = torch._C._get_deterministic_algorithms
    get_warn_only = torch._C._get_deterministic_algorithms_warn_only
    yield Switch(
        "torch.use_deterministic_algorithms",
        lambda: (get(), get_warn_only()),
        lambda value: set_(value[0], warn_only=value[1]),
        "_set_deterministic_algorithms",
        getters=("_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only"),
    )


def _of_reduction(name: str) -> Iterator[Switch]:
    """Reduced precision of cuBLAS: whether, and whether with split K."""
    setter = f"_set_cublas_allow_{name}_reduced_precision_reduction"
    getter = setter.replace("_set", "_get", 1)
    get, set_ = getattr(torch._C, getter), getattr(torch._C, setter)
    yield Switch(
        f"torch.backends.cuda.matmul.allow_{name}_reduced_precision_reduction",
        get,
        lambda value: set_(*value),
        setter,
        getters=(getter,),
    )


def _of_precision(backend: str, op: str) -> Iterator[Switch]:
    get = torch._C._get_fp32_precision_getter
    set_ = torch._C._set_fp32_precision_setter
    yield Switch(
        f"fp32_precision of {op} of {backend} (torch.backends)",
        functools.partial(get, backend, op),
        functools.partial(set_, backend, op),
        "_set_fp32_precision_setter",
        (backend, op),
        ("_get_fp32_precision_getter",),
    )


def _switches() -> Iterator[Switch]:
    """All of them; what sets others too comes before those."""
    cudnn, mkldnn, matmul = "torch.backends.cudnn", "torch.backends.mkldnn", "torch.backends.cuda"
    yield from _of_deterministic()
    fill = "deterministic_fill_uninitialized_memory"
    name = "torch.utils.deterministic.fill_uninitialized_memory"
    yield from _plain(name, f"_get_{fill}", f"_set_{fill}")
    for name, stem in (
        ("torch.set_float32_matmul_precision", "float32_matmul_precision"),
        (f"{matmul}.matmul.allow_tf32", "cublas_allow_tf32"),
        (f"{cudnn}.allow_tf32", "cudnn_allow_tf32"),
        (f"{mkldnn}.allow_tf32", "onednn_allow_tf32"),
    ):
        yield from _plain(name, f"_get_{stem}", f"_set_{stem}")
    yield from _of_precision("generic", "all")
    for backend in ("cuda", "mkldnn"):
        for op in ("all", "matmul", "conv", "rnn"):
            yield from _of_precision(backend, op)
    for kind in ("fp16", "bf16"):
        yield from _of_reduction(kind)
    for name, stem in (
        (f"{matmul}.matmul.allow_fp16_accumulation", "cublas_allow_fp16_accumulation"),
        ("fp16 reductions on the CPU", "cpu_allow_fp16_reduced_precision_reduction"),
        (f"{matmul}.preferred_blas_library", "blas_preferred_backend"),
        (f"{matmul}.preferred_linalg_library", "linalg_preferred_backend"),
        (f"{cudnn}.enabled", "cudnn_enabled"),
        (f"{cudnn}.benchmark", "cudnn_benchmark"),
        (f"{cudnn}.deterministic", "cudnn_deterministic"),
        (f"{cudnn}.depthwise_kernel", "cudnn_depthwise_kernel"),
        ("torch.backends.miopen.immediate", "miopen_immediate"),
        (f"{mkldnn}.enabled", "mkldnn_enabled"),
        (f"{mkldnn}.deterministic", "mkldnn_deterministic"),
        ("torch.backends.nnpack.enabled", "nnpack_enabled"),
        ("torch.backends.quantized.engine", "qengine"),
        (f"{matmul}.allow_fp16_bf16_reduction_math_sdp", "math_sdp_allow_fp16_bf16_reduction"),
        ("order of sdpa_kernel", "sdp_priority_order"),
    ):
        yield from _plain(name, f"_get_{stem}", f"_set_{stem}")
    limit = "cudnn_benchmark_limit"  # only a torch with CUDA has it
    yield from _plain(f"{cudnn}.benchmark_limit", f"_cuda_get_{limit}", f"_cuda_set_{limit}")
    for kind in ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3"):
        name = f"{kind} of scaled_dot_product_attention (sdpa_kernel)"
        yield from _plain(name, f"_get_{kind}_sdp_enabled", f"_set_sdp_use_{kind}")
    invariants = "check_sparse_tensor_invariants"
    name = f"torch.sparse.{invariants}"
    yield from _plain(name, f"_{invariants}", f"_set_{invariants}")


SWITCHES = tuple(_switches())
_KERNELS = {"_set_mkldnn_enabled", "_set_nnpack_enabled", "_set_cudnn_enabled",
            "_set_sdp_priority_order", *(switch.setter for switch in SWITCHES
                                         if switch.setter.startswith("_set_sdp_use_"))}  # fmt: skip
_by_setter: dict[str, list[Switch]] = {}
for _switch in SWITCHES:
    _by_setter.setdefault(_switch.setter, []).append(_switch)

_MIXED = object()
_MIXED_TEXT = (
    "PyTorch is checking a precision that was set by a mix of the legacy and new APIs. We suggest "
    "only using the new API (fp32_precision)."
)
State = list[Any]  # the value of each switch


def _value(switch: Switch) -> Any:
    """What it is now; None: it is not there on this machine."""
    try:
        return switch.get()
    except RuntimeError:  # of float32_matmul_precision while its parts differ
        return _MIXED


def _state() -> State:
    return [_value(switch) for switch in SWITCHES]


def _put(state: State) -> None:
    """Set all as they were."""
    for switch, value in zip(SWITCHES, state, strict=True):
        if _differs(switch, value):
            _set_late(switch, value)


def _set_late(switch: Switch, value: Any) -> None:
    """Set what was asked for before: too late to say that torch refuses that, or warns of it."""
    with suppress(Exception):
        switch.set(value)


def _differs(switch: Switch, value: Any) -> bool:
    """Whether it is to be set to have a value that was found before."""
    return value is not None and value is not _MIXED and _value(switch) != value


_NOTEBOOK = 0  # in the place of a session


def _session_of(worker: Worker) -> int:
    """A number of the worker's session."""
    return id(worker.shared)


@dataclass
class _Values:
    """The values of each session, and of the notebook.

    Attributes
    ----------
    states
        By session; of that which is in force the process has the true ones.
    in_force
        Whose values the process has.
    later
        What the notebook has set since its values were in force: torch changes some together.
    """

    states: dict[int, State]
    in_force: int
    later: list[tuple[Switch, Any]] = field(default_factory=list)

    def use(self, session: int) -> None:
        """Put the values of a session in force; under the lock."""
        if session == self.in_force:
            return
        self.states[self.in_force] = _state()
        _put(self.states[session])
        self.in_force = session
        if session == _NOTEBOOK:
            for switch, value in self.later:
                _set_late(switch, value)
            self.later.clear()

    def note(self, switch: Switch, value: Any) -> None:
        """The notebook sets one while workers compute, who must not see it; under the lock.

        What torch changes along with it the notebook reads as it was, until the workers are idle.
        What torch refuses, such as a precision that it does not know, is refused in silence then.
        """
        self.states[_NOTEBOOK] = state = list(self.states[_NOTEBOOK])  # a session may have it too
        state[SWITCHES.index(switch)] = value
        self.later.append((switch, value))


_lock = reentrant_lock()
_values: _Values | None = None  # None: all have the same
_wishes: dict[Worker, dict[Switch, Any]] = {}
_open: dict[Worker, dict[Switch, Any]] = {}  # before the contexts that a worker's call is in
_traced: dict[Switch, tuple[Any, Any, Worker]] = {}
_entered: weakref.WeakSet[Worker] = weakref.WeakSet()


def _values_of_each(in_force: int) -> _Values:
    """What the process has is from now on that of one alone; under the lock."""
    global _values
    if _values is None:
        state = _state()
        _values = _Values({_session_of(worker): state for worker in _entered}, in_force)
        _values.states[_NOTEBOOK] = state
        contexts.usual_kernels = False
        _hook_calls()
    return _values


def _join() -> None:
    """If all have the same values, there need be one set only; under the lock."""
    global _values
    if _values is not None:
        _values.states[_values.in_force] = state = _state()
        if all(other == state for other in _values.states.values()):
            _values = None
            contexts.usual_kernels = not _traced and contexts.all_kernels()
            _hook_calls()


def _active() -> list[Worker]:
    """The workers that are in the middle of a command, or serve a call; under the lock."""
    at_work = (w for w in _entered if w.current is not None or w.serves)
    return [worker for worker in at_work if not worker.ended]


def _others_active(worker: Worker) -> bool:
    """Whether a worker of another session runs a command; under the lock."""
    return any(_session_of(other) != _session_of(worker) for other in _active())


# -- a worker's commands ---------------------------------------------------------------------------


def _enter(worker: Worker) -> None:
    with _lock:
        _entered.add(worker)
        if _values is not None:
            _values.states[_values.in_force] = _state()
            _values.states.setdefault(_session_of(worker), _values.states[_NOTEBOOK])
        _hook_calls()


def _hook_calls() -> None:
    """Have workers look before and after each call, for as long as values differ; under the lock.

    A worker that begins a call at this moment either sees the hook or counts as active already.
    """
    needed = _values is not None or bool(_wishes or _open or _traced)
    for worker in _entered:
        worker.after_call = functools.partial(_end, worker) if needed else None
        worker.before_call = functools.partial(_begin, worker) if needed else None
        worker.after_serving = _idle if needed else None
        worker.before_serving = functools.partial(_begin_serving, worker) if needed else None


def _leave(worker: Worker) -> None:
    with _lock:
        _entered.discard(worker)
        _wishes.pop(worker, None)
        _open.pop(worker, None)
        session = _session_of(worker)
        if _values is not None and session not in map(_session_of, _entered):
            if _values.in_force == session:
                _values.use(_NOTEBOOK)
            _values.states.pop(session, None)
        worker.before_call = worker.after_call = None
        worker.before_serving = worker.after_serving = None
        _idle()


def _begin(worker: Worker, command: Command) -> Command:
    """The command that is run: an error in its place if another session's values are in force."""
    if _takes_effect(worker):
        return command
    return (*command[:2], _refuse_session, (), {}, 0, command[-1])


def _begin_serving(worker: Worker) -> None:
    if not _takes_effect(worker):
        _refuse_session()


def _takes_effect(worker: Worker) -> bool:
    """Put the values of the worker's session in force, if need be and if that can be."""
    with _lock:
        session, values = _session_of(worker), _values
        if values is not None and values.in_force != session:
            if not _others_active(worker):
                values.use(session)
            elif values.states[session] != _state():
                return False
    return True


def _refuse_session() -> None:
    raise SessionError(
        "a worker of another session computes in this process, and one of the sessions has set "
        "switches of torch (such as torch.use_deterministic_algorithms), which a process has once "
        "and workers share as threads: wait for the other session (sync_all) first"
    )


def _end(worker: Worker) -> None:
    """A worker has ended its command; if it has failed, what contexts have set is put back."""
    with _lock:
        before = _open.pop(worker, None)
        calls = worker.failed_calls
        if before and (worker.interrupts or (calls and calls[-1][0] == worker.executed - 1)):
            _wishes[worker] = _wishes.get(worker, {}) | before
        _idle()


def _idle() -> None:
    """A worker has ended its command: after the last one the notebook's values are in force."""
    with _lock:
        if _active():
            return
        for switch, (_, value, _) in _traced.items():  # of a trace that an interrupt has cut off
            _set_late(switch, value)
        _traced.clear()
        for worker, wishes in _wishes.copy().items():  # of those that could not agree
            for switch, value in wishes.items():
                _values_of_each(_NOTEBOOK).use(_session_of(worker))
                _set_late(switch, value)
        _wishes.clear()
        if _values is not None:
            _values.use(_NOTEBOOK)
            _join()
        if _values is None:
            _hook_calls()


# -- setting one -----------------------------------------------------------------------------------

_WAY_OUT = "start the session with engine='processes' (%disco_session --engine processes)"


def set_switch(switch: Switch, value: Any, *, quietly: bool = False) -> None:
    """Set it for who calls: on a worker together with the others.

    Parameters
    ----------
    quietly
        To put back what was there: if the others don't, that is done when all are idle.

    Raises
    ------
    SessionError
        If the others can't come to do the same.
    """
    worker = current_worker_or_none()
    if worker is None:
        _set_in_notebook(switch, value)
        return
    if value == (_value(switch) if is_in_turn(worker) else _untraced(switch)):
        if worker in _wishes:  # of another context, which an exception has ended
            with _lock:
                _forget(worker, switch)
        return
    if is_importing():  # a module is imported once, for all workers
        _change(switch, value, worker)
        return
    if threading.get_ident() != worker.thread_id or waiter_here() is not worker:
        raise SessionError(
            _refusal(switch, value, worker, "this is a thread that the worker has started")
        )
    if is_in_turn(worker):
        if switch.setter in _KERNELS:
            _set_in_trace(switch, value, worker)
            return
        why = "code for which workers take turns, such as what torch.compile traces, can't wait"
        raise SessionError(_refusal(switch, value, worker, why))
    _agree(switch, value, worker, quietly or _is_left_by_exception(switch, value, worker))


def _set_in_trace(switch: Switch, value: Any, worker: Worker) -> None:
    """For a trace, which sets it back in the end; the others read what it was, and may change it.

    `_traced` has what it was before the trace, what it is for the others, and who traces.
    """
    with _lock:
        before = _traced.setdefault(switch, (_value(switch), _value(switch), worker))
        _hook_calls()
        switch.set(before[1] if value == before[0] else value)
        if value == before[0]:
            del _traced[switch]


def _untraced(switch: Switch) -> Any:
    """What it is for all but who traces at this moment."""
    traced = _traced.get(switch)
    return _value(switch) if traced is None else traced[1]


def _is_left_by_exception(switch: Switch, value: Any, worker: Worker) -> bool:
    """Whether a context that an exception ends puts back what was there, as far as one can tell."""
    if sys.exc_info()[0] is None:
        return False
    if worker.interrupts:
        return True
    values, before = _values, _open.get(worker, {}).get(switch, _MIXED)
    if before is not _MIXED:
        return bool(value == before)
    return values is not None and value == values.states[_NOTEBOOK][SWITCHES.index(switch)]


def _begins_context() -> bool:
    """Whether who sets a switch is the beginning of a context, which will put it back."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is None or frame.f_code.co_name in ("__enter__", "__aenter__"):
            break
        frame = frame.f_back
    else:
        return False
    return frame is not None


_NEAR = 16  # frames


def _refusal(switch: Switch, value: Any, worker: Worker, why: str) -> str:
    return (
        f"worker {worker.worker_id} sets {switch} to {value!r}, and {why}. torch keeps this once "
        "for the process, and workers are threads of it: set it on all workers alike, at the same "
        f"place of the program, or {_WAY_OUT}"
    )


def _agree(switch: Switch, value: Any, worker: Worker, quietly: bool) -> None:
    """Wait until all workers wish the same; the last one that comes changes the switch."""
    wait = _Wait(switch, value, worker)
    begins = _begins_context()
    try:
        with shield(), _lock:
            _wishes.setdefault(worker, {})[switch] = value
            before = _untraced(switch)
            if begins and before is not _MIXED:
                _open.setdefault(worker, {}).setdefault(switch, before)
            _hook_calls()
            if not any(map(wait.lacks, list(worker.peers.values()))):
                _change(switch, value, worker)
        worker.wait_for(wait.settled, wait, check=wait.check)
    except BaseException as exc:
        with _lock:
            if quietly and isinstance(exc, SessionError | WorkerInterrupted):
                return  # and the next one is put back; the next wait raises again
            if isinstance(exc, SessionError) and wait.settled():
                return
            if not quietly:
                _forget(worker, switch)
        raise


_AGREED = object()


def _forget(worker: Worker, switch: Switch) -> None:
    """A worker's wish is fulfilled, or given up; under the lock."""
    wishes = _wishes.get(worker, {})
    wishes.pop(switch, None)
    if not wishes:
        _wishes.pop(worker, None)


def _change(switch: Switch, value: Any, worker: Worker) -> None:
    """For all workers of a session."""
    session, peers = _session_of(worker), list(worker.peers.values())
    with _lock:
        values = _values_of_each(session)
        if _others_active(worker):
            why = "a worker of another session computes in this process"
            raise SessionError(_refusal(switch, value, worker, why))
        values.use(session)
        if switch in _traced:
            before_trace, _, tracer = _traced[switch]
            _traced[switch] = before_trace, value, tracer
        else:
            switch.set(value)
        for peer in peers:
            _forget(peer, switch)
            before = _open.get(peer, {})
            if switch in before and before[switch] == value:
                del before[switch]
    for peer in peers:
        peer.wake()


def _set_in_notebook(switch: Switch, value: Any) -> None:
    """The workers' values stay what they are."""
    with _lock:
        values = _values_of_each(_NOTEBOOK)
        active = next(iter(_active()), None)
        if active is None:
            values.use(_NOTEBOOK)
            switch.set(value)
        else:
            values.use(_session_of(active))
            values.note(switch, value)
        _join()


@dataclass(frozen=True)
class _Wait(Barrier):
    """What a worker waits for that has set a switch."""

    switch: Switch
    value: Any
    worker: Worker

    def __str__(self) -> str:
        return f"the other workers to set {self.switch} to {self.value!r} too"

    def settled(self) -> bool:
        """Whether it is set, and the worker has only to wake up."""
        return self.switch not in _wishes.get(self.worker, {})

    def check(self) -> None:
        """Raise if another worker can't come to do the same."""
        for peer in list(self.worker.peers.values()):
            why = self._obstacle(peer)
            if why and not self.worker.interrupts:  # else the others have ended by the interrupt
                raise SessionError(_refusal(self.switch, self.value, self.worker, why))

    def lacks(self, peer: Worker) -> bool:
        """Whether another worker must do the same yet."""
        wish = _wishes.get(peer, {}).get(self.switch, _AGREED)
        return not peer.ended and wish != self.value

    def _obstacle(self, peer: Worker) -> str:
        wait = peer.waiting_for
        if not self.lacks(peer):
            return ""
        if isinstance(wait, _Wait) and not wait.settled():
            return f"worker {peer.worker_id} sets {wait.switch} to {wait.value!r}"
        return obstacle(self.worker, peer)


# -- where programs set them -----------------------------------------------------------------------


@functools.cache
def _setting(setter: str) -> Callable[[Any], Any]:
    """Over one of torch's setters."""
    switches = {switch.key: switch for switch in _by_setter[setter]}
    key_length = len(next(iter(switches)))

    @functools.cache
    def over(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def set_for_caller(*args: Any, **kwargs: Any) -> Any:
            switch = switches.get(args[:key_length])
            now = None if switch is None else _value(switch)
            value = _given(now, args[key_length:], kwargs)
            if switch is None or now is None or value is None:
                return original(*args, **kwargs)  # none of ours, or an error of torch's
            return set_switch(switch, value)

        return set_for_caller

    return over


def _given(now: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is given to a setter, as the getter gives it; None for what torch refuses."""
    if isinstance(now, tuple):  # of two bools
        pair = (*args, kwargs.get("warn_only", False))[:2]
        return pair if all(isinstance(item, bool) for item in pair) else None
    value = args[0] if len(args) == 1 else None
    return value if now is _MIXED or isinstance(value, type(now)) else None


@functools.cache
def _reading(getter: str) -> Callable[[Any], Any]:
    """Over one of torch's getters: the notebook reads its own value also while workers run."""
    indices = {
        switch.key: index for index, switch in enumerate(SWITCHES) if getter in switch.getters
    }

    @functools.cache
    def over(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read_for_caller(*args: Any, **kwargs: Any) -> Any:
            if (_values is None and not _traced) or args not in indices:
                value = original(*args, **kwargs)
                # asked again: who changes one has `_values` or `_traced` say so before
                if (_values is None and not _traced) or args not in indices:
                    return value
            index = indices[args]
            value = _value_for_caller(index)
            if value is _MIXED:
                raise RuntimeError(_MIXED_TEXT)
            getters = SWITCHES[index].getters
            return value if len(getters) == 1 else value[getters.index(getter)]

        return read_for_caller

    return over


def _value_for_caller(index: int) -> Any:
    """What a switch is for who asks, while it may be another for somebody else."""
    worker, switch = current_worker_or_none(), SWITCHES[index]
    if worker is not None:
        value, traced = _value(switch), _traced.get(switch)
        if traced is None or (traced[2] is worker and is_in_turn(worker)):
            return value
    with _lock:
        if worker is None and _values is not None and _values.in_force:
            return _values.states[_NOTEBOOK][index]
        return _untraced(switch)


def _install(patches: Patches) -> None:
    new = {}
    for setter in _by_setter:
        original = getattr(torch._C, setter)
        new[original] = patches.replace(torch._C, setter, _setting(setter))
    for getter in dict.fromkeys(name for switch in SWITCHES for name in switch.getters):
        original = getattr(torch._C, getter)
        new[original] = patches.replace(torch._C, getter, _reading(getter))
    for module in tuple(vars(torch.backends).values()):
        if isinstance(module, ModuleType):
            for prop in vars(type(module)).values():
                if isinstance(prop, torch.backends.ContextProp) and prop.setter in new:
                    patches.replace(prop, "setter", new.__getitem__)
                    patches.replace(prop, "getter", lambda get: new.get(get, get))
    contexts.usual_kernels = contexts.all_kernels()
    patches.at_undo(_put_back)


def _put_back() -> None:
    """The last worker has ended: the notebook's values are the process's."""
    global _values
    with _lock:
        if _values is not None:
            _values.use(_NOTEBOOK)
        _values = None
        contexts.usual_kernels = False
        _wishes.clear()
        _open.clear()
        _traced.clear()
        _hook_calls()


@contextmanager
def as_before() -> Iterator[None]:
    """At its end the switches are for this worker as they were, as if a process had ended."""
    before = _state()
    try:
        yield
    finally:
        with shield():  # an interrupt must not leave the rest of them
            worker = current_worker_or_none()
            if worker is not None:
                with _lock:
                    _open.pop(worker, None)
            for switch, value in zip(SWITCHES, before, strict=True):
                if _differs(switch, value):
                    if _entered:
                        set_switch(switch, value, quietly=True)
                    else:
                        switch.set(value)


def _after_fork() -> None:
    """A child must not wait for a thread that only its parent has."""
    global _lock
    _lock = reentrant_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


table.add(
    Row(
        state="deterministic algorithms, precision of products, `torch.backends`, `sdpa_kernel`",
        treatment=Treatment.IN_TURNS,
        meaning="A worker that changes such a switch waits until all workers change it to the "
        "same value, so that none computes with what another has asked for; an error if they "
        "don't. `%disco_run` puts them back at the script's end, and so does an interrupt what "
        "contexts (`with sdpa_kernel`) have set; what was set for good before it stays. The "
        "notebook has values of its own, in force while no worker runs a command or serves a "
        "remote call. A trace (`torch.export`, `torch.jit.trace`, `torch.compile`) can't wait: a "
        "choice of kernels in it (`sdpa_kernel`, `torch.backends.mkldnn.enabled`) is in force "
        "for all until it ends it, so what others compute meanwhile may differ in the last bits, "
        "or fail for want of a kernel. `torch.export.export` always chooses so: oneDNN, NNPACK and "
        "cuDNN are off while it runs, also for others' convolutions and recurrent layers. Export "
        "where nobody trains, or use `--engine processes`.",
        test="tests/isolation/test_switches.py::test_workers_change_a_switch_together",
        install=_install,
        enter=_enter,
        leave=_leave,
    )
)
