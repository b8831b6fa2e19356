"""The two sides of a comparison: the reference on the controller, the program on each worker.

A `Side` runs its program, forward and then backward, with the randomness of a seed, and leaves
the program as it was: gradients and random states are put back, hooks are gone; `restore` puts
buffers back. What lies here is asked for by key. Nothing in this file runs a collective: only the
program does.

The worker functions below it work on a `Side` that lies in a register, and `WorkerSides` is how
the controller calls them. What the reference has is taken from `SHELF` where the worker is in the
controller's process, without a copy; other workers are sent the part that they should hold.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import os
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..ccl.checks import noticing_lost_gradients
from ..layouts.layout import Shape, ShardLayout
from ..runtime import accelerators
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError
from ..runtime.functions import worker_function
from ..runtime.registers import OWN
from ..runtime.session import Session
from ..runtime.sources import is_own_file, place
from ..runtime.user_code import is_user
from ..runtime.worker import current_worker, current_worker_or_none
from ..views.facts.tensors import is_dtensor
from ..views.formats import format_shape
from .measure import MOST_SAMPLES, Row, Tolerance, difference, sample
from .operations import Operation, OperationRecorder
from .orders import marks_of
from .recorder import ActivationRecorder, Entry, Gradient, leaves, replaced

_OWNED = ("parameter|", "buffer|")
_MOST_CHARACTERS = 60  # of an argument's repr in an error

Fact: TypeAlias = tuple[Any, ...]
"""Of an entry: its key, shape, dtype, the number of the value, how it says that it lies."""


class Side:
    """A program and what its run left.

    Parameters
    ----------
    program
        What is called with the inputs.
    module
        Whose submodules are looked at; None: see `module_of`.
    """

    def __init__(
        self,
        program: Any,
        module: torch.nn.Module | None,
        backward: bool,
        loss: Callable[[Any], Any] | None,
        recorder: ActivationRecorder | None = None,
    ) -> None:
        if not callable(program):
            raise ArgumentError(
                f"compare: a module or a function is needed, got {type(program).__name__}"
            )
        if module is not None and not isinstance(module, torch.nn.Module):
            raise ArgumentError(
                f"compare: module= is the module to look into, got {type(module).__name__}"
            )
        if module is None:
            module = module_of(program)
        self.program, self.module, self.loss = program, module, loss
        self.backward_wanted = backward
        self.recorder = ActivationRecorder(backward) if recorder is None else recorder
        self.recorder.take_parameters(module)
        self.steps: dict[int, _Step] = {}  # by identity, the optimizers that have stepped in it
        self.before_step: set[str] = set()  # what was seen before an optimizer's first step
        self.changed = False  # it has written into its parameters
        self.ran_backward = False  # the program itself, as a step of training does
        self.lost: list[tuple[str, str]] = []  # where autograd ends at a collective: name, place
        self._result: Any = None
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # with what they held before
        self._grads: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        if self.module is not None:
            for tensor in self.module.parameters():
                return tensor.device
        worker = current_worker_or_none()
        return torch.device("cpu") if worker is None else worker.device

    @property
    def can_run_again(self) -> bool:
        """Whether a run has left the program as it was: it has written into no parameters."""
        return not (self.steps or self.changed)

    def rewind(self) -> Callable[[], None]:
        """Take back the steps of optimizers; the function that is given does them again."""
        after = [_Step(step.optimizer) for step in self.steps.values()]
        for step in self.steps.values():
            step.restore()

        def forward_again() -> None:
            for step in after:
                step.restore(with_gradients=True)

        return forward_again

    def again(self) -> Side:
        """A side of the same program that has not run; operations are recorded if they were."""
        if isinstance(self.recorder, OperationRecorder):
            return self.looking_into(self.recorder.window)
        return Side(self.program, self.module, self.backward_wanted, self.loss)

    def looking_into(self, window: str) -> Side:
        """A side of the same program that records the operations in a call of a module."""
        return Side(self.program, self.module, False, None, OperationRecorder(window))

    def putting(self, values: Mapping[str, torch.Tensor]) -> Side:
        """A side of the same program in which other values go on in place of what it computes."""
        side = Side(
            self.program, self.module, self.ran_backward, None, ActivationRecorder(gradients=False)
        )
        side.recorder.put = dict(values)
        return side

    # -- running -------------------------------------------------------------------------------

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        seed: int,
        cut: Any = None,
        around: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Run the program on inputs of its own; `cut` gives the part of an input that is ours.

        `around` is entered while it runs.
        """

        def made(name: str, tensor: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                own = tensor if cut is None else cut(name, tensor)
                own = own.detach().to(self.device, copy=True)
            if not (self.backward_wanted and (own.is_floating_point() or own.is_complex())):
                return own
            return own.requires_grad_().clone()  # no leaf: the program may write into it

        args = tuple(replaced(arg, f"{i}", made) for i, arg in enumerate(args))
        kwargs = {key: replaced(value, key, made) for key, value in kwargs.items()}
        if self.module is not None:
            self._buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
            self._grads = [
                (p, None if p.grad is None else p.grad.clone()) for p in self.module.parameters()
            ]
            if current_worker_or_none() is None:  # in the reference's order all is told
                self.recorder.note_parameter_order(self.module)
        before = self._versions()
        with (
            seeded(seed, self.device),
            torch.set_grad_enabled(self.backward_wanted),
            self._noticing_steps(),
            self.recorder.recording(self.module),
            noticing_lost_gradients() as self.lost,
            around or nullcontext(),
        ):
            self.recorder.take("argument", "", {**dict(enumerate(args)), **kwargs})
            self._result = self.program(*args, **kwargs)
            self.recorder.take("result", "", self._result)
        if self.module is not None and self._buffers:
            here = current_worker_or_none() is None  # a worker may lack a change
            self.recorder.take_states(self.module, self._buffers, changed_only=here)
        self.changed = before != self._versions()
        self.ran_backward = any(e.gradient.order > 0 for e in self.recorder.entries.values())

    def follows_step(self, key: str) -> bool:
        """Whether a module is given it, or gives it, after a step, or it is a stepped parameter."""
        entry = self.recorder.entries.get(key)
        if entry is None or not self.steps or self.module is None:
            return False
        if entry.kind != "result":
            return entry.kind in ("input", "output") and key not in self.before_step
        value = entry.snapshot.value
        return any(
            p.shape == value.shape and torch.equal(p, value) for p in self.module.parameters()
        )

    def _versions(self) -> list[int]:
        """How often each parameter was written to."""
        return [] if self.module is None else [p._version for p in self.module.parameters()]

    @contextmanager
    def _noticing_steps(self) -> Iterator[None]:
        thread = threading.get_ident()

        def stepping(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if threading.get_ident() == thread and id(optimizer) not in self.steps:
                self.before_step = self.before_step or set(self.recorder.entries)
                self.steps[id(optimizer)] = _Step(optimizer)

        hook = register_optimizer_step_pre_hook(stepping)
        try:
            yield
        finally:
            hook.remove()

    def restore(self) -> None:
        """Put buffers back; not before backward, which may need them as forward has left them."""
        with torch.no_grad():
            while self._buffers:
                buffer, before = self._buffers.pop()
                if buffer.layout is not torch.strided or not torch.equal(buffer, before):
                    buffer.copy_(before)
            while self._grads:
                parameter, grad = self._grads.pop()
                parameter.grad = grad
        self.recorder.forget_order()
        self._result = None

    def backward(
        self,
        seed: int,
        starts: Mapping[str, Any],
        around: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Run backward from the loss, or from the result with gradients that a seed gives.

        Parameters
        ----------
        starts
            For each tensor in the result, by its leaf: the shape of the whole, what lies here, and
            which one it is, `(shape, layout or None, number)`.
        """
        result, self._result = self._result, None
        kept = [(leaf, leaf.grad) for leaf in self._leaf_tensors(result)]
        for leaf, _ in kept:
            leaf.grad = None
        try:
            with seeded(seed, self.device), torch.enable_grad(), around or nullcontext():
                if self.loss is not None:
                    loss = self.loss(result)
                    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                        raise ArgumentError(
                            "compare: loss= gives a tensor with one element, "
                            f"got {type(loss).__name__}"
                            + (f"{list(loss.shape)}" if isinstance(loss, torch.Tensor) else "")
                        )
                    loss.backward()
                else:
                    self._from_result(result, seed, starts)
            self.recorder.take_parameter_gradients(self.module)
            self.recorder.join_gradients()
        finally:
            for leaf, grad in kept:
                leaf.grad = grad

    def take_own_gradients(self) -> None:
        """Take what the program's own backward has left.

        The gradient of what it is called with is nothing that a step of training has; each worker
        may use its part of it.
        """
        self._result = None
        for entry in self.recorder.entries.values():
            if entry.kind == "argument":
                entry.gradient = Gradient()
        self.recorder.take_parameter_gradients(self.module)
        self.recorder.join_gradients()

    def _from_result(self, result: Any, seed: int, starts: Mapping[str, Any]) -> None:
        tensors, grads = [], []
        for leaf, tensor in leaves(result):
            if not tensor.requires_grad:
                continue
            if leaf in starts and (tensor.dim() > 0 or tuple(starts[leaf][0]) == ()):
                shape, layout, number = starts[leaf]
            elif (
                tensor.dim() == 0 and current_worker_or_none() is not None
            ):  # what `send` gives: its backward waits for a gradient
                shape, layout, number = (), None, 0
            else:
                continue
            grad = start_of(tuple(shape), seed + number, layout)
            tensors.append(tensor)
            grads.append(_like(grad, tensor))
        if tensors:
            torch.autograd.backward(tensors, grads)

    def _leaf_tensors(self, result: Any) -> list[torch.Tensor]:
        """All whose ``.grad`` backward may touch."""
        found = {} if self.module is None else {id(p): p for p in self.module.parameters()}
        if self.module is None or self.module is not self.program:
            todo = [t.grad_fn for _, t in leaves(result) if t.grad_fn is not None]
            seen = set(todo)
            while todo:
                node = todo.pop()
                variable = getattr(node, "variable", None)
                if isinstance(variable, torch.Tensor):
                    found.setdefault(id(variable), variable)  # type: ignore[arg-type]
                for follower, _ in node.next_functions:
                    if follower is not None and follower not in seen:
                        seen.add(follower)
                        todo.append(follower)
        return list(found.values())

    def results(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the result, before backward."""
        return leaves(self._result)

    # -- what lies here ------------------------------------------------------------------------

    def facts(self, kinds: tuple[str, ...]) -> list[Fact]:
        """Of the entries of these kinds, without and then with ``.grad`` at the key's end."""
        facts: list[Fact] = []
        for entry in self.recorder.entries.values():
            if entry.kind in kinds:
                seen = entry.snapshot
                fact = _fact(entry.key, seen.value, seen.number, seen.sharding)
                facts.append((*fact[:2], entry.number or fact[2], *fact[3:]))
        return facts

    def gradient_facts(self) -> list[Fact]:
        """Of the gradients that have come, in the order in which they did."""
        entries = [e for e in self.recorder.entries.values() if e.gradient.value is not None]
        facts: list[Fact] = []
        for entry in in_order(entries):
            gradient = entry.gradient
            assert gradient.value is not None
            facts.append(
                _fact(f"{entry.key}.grad", gradient.value, id(gradient), gradient.sharding)
            )
        return facts

    def whole_sizes(self) -> dict[str, int]:
        """Of what goes through modules that are called once: the size along dim 0."""
        entries = self.recorder.entries
        again = {e.name.partition("#")[0] for e in entries.values() if "#" in e.name}
        return {
            key: len(entry.snapshot.value)
            for key, entry in entries.items()
            if entry.kind in ("input", "output") and entry.name not in again
            and entry.snapshot.value.dim()
        }  # fmt: skip

    def value(self, key: str) -> torch.Tensor:
        """The tensor of a fact."""
        if key.endswith(".grad"):
            value = self.recorder.entries[key.removesuffix(".grad")].gradient.value
            assert value is not None
            return value
        return self.recorder.entries[key].snapshot.value


def module_of(program: Any) -> torch.nn.Module | None:
    """The module into which to look: the program, or the one that it holds if it is a function.

    That is an argument of a `functools.partial`, the owner of a method, a variable of a closure or
    a global one that the function uses. None if there is none, or several of which none has the
    others in it.
    """
    found = {id(module): module for module in _held_modules(program)}
    outer = [
        module
        for module in found.values()
        if not any(o is not module and module in o.modules() for o in found.values())
    ]
    return outer[0] if len(outer) == 1 else None


def _held_modules(program: Any) -> Iterator[torch.nn.Module]:
    if isinstance(program, torch.nn.Module):
        yield program
    elif isinstance(program, functools.partial):
        for held in (program.func, *program.args, *program.keywords.values()):
            if isinstance(held, torch.nn.Module) or held is program.func:
                yield from _held_modules(held)
    elif isinstance(program, types.MethodType):
        if isinstance(program.__self__, torch.nn.Module):
            yield program.__self__
    elif isinstance(program, types.FunctionType):
        variables = inspect.getclosurevars(program)
        for held in (*variables.nonlocals.values(), *variables.globals.values()):
            if isinstance(held, torch.nn.Module):
                yield held


class _Step:
    """An optimizer and its parameters, as they are now."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._state = copy.deepcopy(optimizer.state_dict())
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._values = [(p, p.detach().clone(), p.grad) for p in parameters]

    def restore(self, with_gradients: bool = False) -> None:
        """Put all back; without gradients there are none, as before a backward."""
        with torch.no_grad():
            for parameter, value, gradient in self._values:
                parameter.copy_(value)
                parameter.grad = gradient if with_gradients else None
        self.optimizer.load_state_dict(copy.deepcopy(self._state))


def in_order(entries: list[Entry]) -> list[Entry]:
    """Gradients in the order of backward; those of a module's parameters after its own.

    That of a parameter which others use, too, comes once the last of them has given its part.
    """
    last: dict[str, int] = {}
    for entry in entries:
        if entry.kind != "parameter" and entry.gradient.order > 0:
            module = entry.name.split("#")[0]
            last[module] = max(last.get(module, 0), entry.gradient.order)
    end = max(last.values(), default=0) + 1

    def turn(entry: Entry) -> tuple[int, int]:
        if entry.kind != "parameter":
            return entry.gradient.order, 0
        return max(last.get(entry.name.rpartition(".")[0], end), entry.gradient.order), 1

    return sorted(entries, key=turn)


def _fact(key: str, value: torch.Tensor, number: int, sharding: Any) -> Fact:
    return key, tuple(value.shape), str(value.dtype).removeprefix("torch."), number, sharding


def start_of(shape: tuple[int, ...], seed: int, layout: ShardLayout | None) -> torch.Tensor:
    """The gradient that backward starts from: the same numbers on all sides, a worker's part."""
    if not shape:
        return torch.ones(())
    generator = torch.Generator().manual_seed(seed)
    whole = torch.empty(shape).normal_(generator=generator)
    worker = current_worker_or_none()
    return whole if layout is None or worker is None else layout.part_of(whole, worker.worker_id)


def _like(grad: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if not is_dtensor(tensor):
        return grad.to(tensor.device, tensor.dtype)
    from torch.distributed.tensor import DTensor, Partial, Replicate

    whole: Any = tensor
    places = [Replicate() if isinstance(p, Partial) else p for p in whole.placements]
    local = grad.to(whole.to_local().device, tensor.dtype).contiguous()
    return DTensor.from_local(
        local, whole.device_mesh, places, run_check=False, shape=whole.shape, stride=whole.stride()
    )


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from the random states of a seed; those of before are put back."""
    before = torch.get_rng_state()
    on_device = None
    if accelerators.on_accelerator(device):
        on_device = accelerators.module_of(device).get_rng_state(device)
    try:
        torch.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(before)
        if on_device is not None:
            accelerators.module_of(device).set_rng_state(on_device, device)


# -- on a worker: functions on its side ------------------------------------------------------------

SHELF: dict[str, Side] = {}
"""Sides of the controller of this process, by token."""

_tokens = itertools.count(1)


@contextmanager
def on_shelf(side: Side) -> Iterator[str]:
    """Let workers of this process see the controller's side."""
    token = f"{id(side)}.{next(_tokens)}"
    SHELF[token] = side
    try:
        yield token
    finally:
        del SHELF[token]


@worker_function("the start of a comparison")
def begin(program: Any, module: Any, backward: bool, loss: Any) -> Side:
    """Make this worker's side."""
    if isinstance(program, str):
        program = current_worker().namespace.get(program, program)
    return Side(program, module, backward, loss)


def shares_memory(token: str) -> bool:
    """Whether this worker sees the controller's side itself."""
    return token in SHELF


@worker_function("the inputs of a comparison")
def hold(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Have the inputs here."""
    return args, kwargs


@worker_function("the comparison's forward")
def run_forward(
    side: Side, given: tuple[Any, Any], seed: int, cuts: dict[str, Any], whole: dict[str, int]
) -> list[tuple[str, str, str, bool]]:
    """Run forward; gives of each module its path, type, settings and mode.

    `whole`: see `ActivationRecorder.join_calls`.
    """
    rank = current_worker().worker_id

    def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in cuts:
            return tensor
        return ShardLayout.of_plain(cuts[name]).part_of(tensor, rank)

    args, kwargs = given
    side.forward(args, kwargs, seed, cut)
    side.recorder.join_calls(whole)
    return [(path, *about) for path, about in side.recorder.modules.items()]


@worker_function("the comparison's backward")
def run_backward(side: Side, seed: int, starts: dict[str, Any]) -> list[Fact]:
    """Run backward; `starts` as `Side.backward`, with layouts as plain values."""
    known = {
        leaf: (shape, ShardLayout.of_plain(layout), number)
        for leaf, (shape, layout, number) in starts.items()
    }
    side.backward(seed, known)
    return side.gradient_facts()


@worker_function("a look at what was recorded")
def own_gradients(side: Side) -> list[Fact]:
    """What the program's own backward has left."""
    side.take_own_gradients()
    return side.gradient_facts()


@worker_function("a look at what was recorded")
def facts(side: Side, kinds: tuple[str, ...]) -> list[Fact]:
    """See `Side.facts`."""
    return side.facts(kinds)


@worker_function("a look at what was recorded")
def plain_values(side: Side) -> dict[str, tuple[str, str]]:
    """What the program gave that is neither tensor nor number."""
    return side.recorder.plain_values


@worker_function("a comparison")
def measure(
    side: Side,
    token: str,
    jobs: list[tuple[str, str, tuple[int, ...], list[Any], tuple[float, float, float]]],
    sent: Any,
) -> list[list[Row] | None]:
    """Compare values here with parts of the reference's.

    Parameters
    ----------
    jobs
        For each: the key here, the reference's key and its shape, layouts to try as
        plain values, the tolerance.
    sent
        Where the reference can't be seen: its tensors, one for each job; a part already if there
        is one layout to try.

    Returns
    -------
    list
        For each job a row for each layout; None where there is no such value here.
    """
    rank = current_worker().worker_id
    reference = SHELF.get(token)
    measured: list[list[Row] | None] = []
    for number, (key, other, shape, layouts, within) in enumerate(jobs):
        if not has(side, key):
            measured.append(None)
            continue
        local, tolerance = side.value(key), Tolerance(*within)
        rows: list[Row] = []
        for layout in map(ShardLayout.of_plain, layouts):
            if reference is not None:
                expected = layout.part_of(reference.value(other), rank)
            else:
                expected = sent[number]
                expected = expected if len(layouts) == 1 else layout.part_of(expected, rank)
            if expected is None or local.shape != expected.shape:  # see `Presence.without_tokens`
                break
            rows.append(_measured(local, expected, tuple(shape), layout, tolerance))
        measured.append(rows if len(rows) == len(layouts) else None)
    return measured


def _measured(
    local: torch.Tensor,
    expected: torch.Tensor,
    shape: tuple[int, ...],
    layout: ShardLayout,
    tolerance: Tolerance,
) -> Row:
    padding = layout.padding(shape, current_worker().worker_id)
    if padding is not None:  # what fills a dimension up may hold anything
        local = torch.where(padding.to(local.device), 0, local)
    return difference(local, expected, tolerance)


def has(side: Side, key: str) -> bool:
    """Whether there is such a value here."""
    entry = side.recorder.entries.get(key.removesuffix(".grad"))
    return entry is not None and (not key.endswith(".grad") or entry.gradient.value is not None)


@worker_function("a look at what was recorded")
def samples(side: Side, wanted: list[tuple[str, int]]) -> list[torch.Tensor | None]:
    """Some elements of values here, as float64: all, or as many as wanted at `places`."""
    return [sample(side.value(key), most) if has(side, key) else None for key, most in wanted]


@worker_function("a look at what was recorded")
def marks(side: Side, wanted: list[tuple[str, int]]) -> list[torch.Tensor | None]:
    """Of values here, a mark of each row along a dimension."""
    return [marks_of(side.value(key), dim) if has(side, key) else None for key, dim in wanted]


@worker_function("a second look of a comparison")
def run_operations(
    side: Side, window: str, given: tuple[Any, Any], seed: int, cuts: dict[str, Any]
) -> Side | None:
    """Run forward once more and record the operations in a call; None if that can't be."""
    if not side.can_run_again:
        return None
    side.restore()
    again = side.looking_into(window)
    try:
        run_forward(again, given, seed, cuts, {})
    finally:
        again.restore()
    return again


@worker_function("a proof of a comparison")
def run_put(
    side: Side,
    token: str,
    given: tuple[Any, Any],
    seed: int,
    cuts: dict[str, Any],
    whole: dict[str, int],
    jobs: list[tuple[str, str, Any, list[float]]],
    sent: Any,
) -> Side | None:
    """Run forward once more with the reference's values in place of some; None if that can't be.

    `jobs`: of each the key here, the reference's key, the layout as plain values, a factor for
    each worker.
    `sent`: see `measure`, a part already.
    """
    if not side.can_run_again:
        return None
    side.restore()
    rank, reference = current_worker().worker_id, SHELF.get(token)
    values = {}
    for number, (key, other, plain, factors) in enumerate(jobs):
        if not has(side, key):
            continue
        part = sent[number] if reference is None else reference.value(other)
        if reference is not None:
            part = ShardLayout.of_plain(plain).part_of(part, rank)
        values[key] = part if factors[rank] == 1 else part * factors[rank]
    again = side.putting(values)
    with _parameters_put(side, values):
        try:
            run_forward(again, given, seed, cuts, whole)
        finally:
            again.restore()
    return again


@contextmanager
def _parameters_put(side: Side, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Have other values in parameters and buffers for a while."""
    mine = [(side.value(key), value) for key, value in values.items() if key.startswith(_OWNED)]
    before = [here.clone() for here, _ in mine]
    with torch.no_grad():
        try:
            for here, value in mine:
                here.copy_(value)
            yield
        finally:
            for (here, _), old in zip(mine, before, strict=True):
                here.copy_(old)


@worker_function("a look at what was recorded")
def unchanged(side: Side) -> set[str]:
    """The keys of buffers that the run has left as they were."""
    return side.recorder.unchanged


@worker_function("a look at what was recorded")
def memory(side: Side, keys: list[str]) -> list[tuple[int, str, int]]:
    """Where values lie: in which process, on which device, at which address."""
    found = [side.value(key) for key in keys if has(side, key)]
    return [(os.getpid(), str(value.device), value.data_ptr()) for value in found]


@worker_function("a look at what was recorded")
def runs_again_on(side: Side) -> str:
    """The type of device on which the program can run again; empty if it can't."""
    return side.device.type if side.can_run_again else ""


@worker_function("a look at what was recorded")
def operations(
    side: Side | None,
) -> tuple[list[Operation], dict[str, list[str]], dict[str, tuple[str, ...]]] | None:
    """What was recorded of them, and of each what it is made of and the calls around it."""
    if side is None or not isinstance(side.recorder, OperationRecorder):
        return None
    return side.recorder.operations, side.recorder.parents, side.recorder.calls


@worker_function("a look at what was recorded")
def rename_operations(side: Side, names: list[dict[str, str]]) -> list[Fact]:
    """Give them the names of the reference's, `names` by rank; gives the facts."""
    assert isinstance(side.recorder, OperationRecorder)
    side.recorder.rename_operations(names[current_worker().worker_id])
    return side.facts(("operation",))


@worker_function("a look at what was recorded")
def lost_gradients(side: Side) -> list[tuple[str, str]]:
    """At which collectives autograd ends, though their input requires grad: name and place."""
    return side.lost


@worker_function("a look at what was recorded")
def ungraded(side: Side, keys: list[str]) -> list[bool]:
    """Which values are there and do not require grad."""
    entries = side.recorder.entries
    return [key in entries and not entries[key].requires_grad for key in keys]


@worker_function("the end of a comparison")
def end(side: Side) -> None:
    """Put back what the run has changed."""
    side.restore()


def _nothing() -> None:
    """Make a register."""


# -- on the controller -----------------------------------------------------------------------------


class WorkerSides:
    """The sides of all workers, as the controller's thread asks them.

    Every method is one worker function: it runs on all workers, and what fails there is the
    session's own `WorkerError`.

    Parameters
    ----------
    timeout
        Seconds to wait for the workers, for each step; None takes the session's.
    """

    def __init__(
        self,
        session: Session,
        program: Any,
        module: Any,
        backward: bool,
        loss: Any,
        timeout: float | None,
    ) -> None:
        self.session, self.timeout = session, timeout
        self._sides = self.call(begin, program, module, backward, loss)

    def call(self, func: Any, *args: Any) -> DRef:
        """Call a worker function; gives its register, which no table shows."""
        ref = self.session.call_packed(func, *args)
        ref.name = OWN
        return ref

    def _ask(self, func: Any, *args: Any) -> list[Any]:
        return self.session.fetch(self.call(func, self._sides, *args), None, self.timeout)

    def facts(self, kinds: tuple[str, ...]) -> list[list[Fact]]:
        """Of each worker, see `Side.facts`."""
        return self._ask(facts, kinds)

    def plain_values(self) -> list[dict[str, tuple[str, str]]]:
        """Of each worker what its program gave that is neither tensor nor number."""
        return self._ask(plain_values)

    def run_forward(
        self, inputs: DRef, seed: int, cuts: dict[str, ShardLayout], whole: Mapping[str, int]
    ) -> list[Any]:
        """Run forward; gives of each worker its modules: path, type, settings and mode."""
        plain = {name: layout.plain for name, layout in cuts.items()}
        return self._ask(run_forward, inputs, seed, plain, dict(whole))

    def run_backward(
        self, seed: int, starts: Mapping[str, tuple[Shape, ShardLayout, int]]
    ) -> list[list[Fact]]:
        """Run backward; gives the facts of each worker's gradients."""
        plain = {leaf: (shape, lay.plain, number) for leaf, (shape, lay, number) in starts.items()}
        return self._ask(run_backward, seed, plain)

    def own_gradients(self) -> list[list[Fact]]:
        """The facts of the gradients that each worker's program has left itself."""
        return self._ask(own_gradients)

    def without_reference(self, token: str) -> list[int]:
        """The workers that can't see the reference's side, as it is in another process."""
        near = self.session.fetch(self.call(shares_memory, token), None, self.timeout)
        return [rank for rank, here in enumerate(near) if not here]

    def measure(self, token: str, jobs: list[Any], sent: Any) -> list[list[Any]]:
        """Compare with the reference; of each worker what the worker function `measure` gives."""
        return self._ask(measure, token, jobs, sent)

    def send(self, parts: Mapping[int, list[torch.Tensor | None]]) -> DRef:
        """Give workers values of their own, by rank."""
        register = self.call(_nothing)
        for rank, values in parts.items():
            self.session.set_value(register, rank, values, self.timeout)
        return register

    def samples(self, keys: list[str], most: int = MOST_SAMPLES) -> list[dict[int, Any]]:
        """Elements of the workers' values; for each key by rank."""
        answers = self._ask(samples, [(key, most) for key in keys])
        return [
            {rank: answer[n] for rank, answer in enumerate(answers) if answer[n] is not None}
            for n in range(len(keys))
        ]

    def marks(self, wanted: list[tuple[str, int]]) -> list[dict[int, torch.Tensor]]:
        """A mark of each row of the workers' values along a dimension; for each key by rank."""
        answers = self._ask(marks, wanted)
        return [
            {rank: answer[n] for rank, answer in enumerate(answers) if answer[n] is not None}
            for n in range(len(wanted))
        ]

    def looking_into(
        self, window: str, inputs: DRef, seed: int, cuts: dict[str, ShardLayout]
    ) -> WorkerSides:
        """The workers' sides after a second run, which has recorded operations."""
        plain = {name: layout.plain for name, layout in cuts.items()}
        other = copy.copy(self)
        other._sides = self.call(run_operations, self._sides, window, inputs, seed, plain)
        return other

    def share(self, keys: list[str], here: list[torch.Tensor]) -> bool:
        """Whether workers have values in common, with each other or with this process."""
        places = [place for each in self._ask(memory, keys) for place in set(each)]
        places += {(os.getpid(), str(value.device), value.data_ptr()) for value in here}
        return len(set(places)) < len(places)

    def unchanged(self) -> set[str]:
        """The keys of buffers that the run has left as they were, on all workers."""
        return set.intersection(*self._ask(unchanged))

    def run_again_on(self) -> set[str]:
        """The types of devices on which the program can run again; an empty one if it can't."""
        return set(self._ask(runs_again_on))

    def putting(
        self,
        token: str,
        inputs: DRef,
        seed: int,
        cuts: Mapping[str, ShardLayout],
        whole: Mapping[str, int],
        jobs: list[tuple[str, str, Any, list[float]]],
        sent: Any,
    ) -> WorkerSides:
        """The workers' sides after a second run, with the reference's values in place of some."""
        plain = {name: layout.plain for name, layout in cuts.items()}
        other = copy.copy(self)
        other._sides = self.call(
            run_put, self._sides, token, inputs, seed, plain, dict(whole), jobs, sent
        )
        return other

    def operations(
        self,
    ) -> list[tuple[list[Operation], dict[str, list[str]], dict[str, tuple[str, ...]]] | None]:
        """Of each worker the operations that it has run; by key, their origins' and their calls."""
        return self._ask(operations)

    def rename_operations(self, names: list[dict[str, str]]) -> list[list[Fact]]:
        """Name them as the reference's; gives the facts of each worker."""
        return self._ask(rename_operations, names)

    def lost_gradients(self) -> dict[tuple[str, str], list[int]]:
        """By collective and place, the workers where autograd ends there."""
        found: dict[tuple[str, str], list[int]] = {}
        for rank, places in enumerate(self._ask(lost_gradients)):
            for name, place_ in places:
                found.setdefault((name, place_), []).append(rank)
        return found

    def ungraded(self, keys: list[str]) -> list[list[bool]]:
        """Of each worker which values do not require grad."""
        return self._ask(ungraded, keys)

    def end(self) -> None:
        """Put back what the runs have changed."""
        if not self.session.closed:
            self.call(end, self._sides)


# -- when the reference fails ----------------------------------------------------------------------


@contextmanager
def own_errors(
    name: str, part: str, given: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
) -> Iterator[None]:
    """Raise an `ArgumentError` where the reference raises; its own error is the cause.

    Parameters
    ----------
    name
        Of the reference.
    part
        ``forward`` or ``backward``.
    given
        What it is called with.
    """
    try:
        yield
    except ArgumentError as error:
        if "compare:" in str(error):
            raise
        raise _reference_error(error, name, part, given) from error
    except Exception as error:
        raise _reference_error(error, name, part, given) from error


def _reference_error(
    error: Exception, name: str, part: str, given: tuple[tuple[Any, ...], Mapping[str, Any]] | None
) -> ArgumentError:
    error.with_traceback(_without_own(error.__traceback__))
    call = ""
    if given is not None:
        args, kwargs = given
        words = [
            *map(_in_words, args),
            *(f"{key}={_in_words(value)}" for key, value in kwargs.items()),
        ]
        call = f", called as {name}({', '.join(words)})"
    message = str(error).strip().partition("\n")[0]
    reason = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return ArgumentError(
        f"compare: the reference failed in {part}{call}: {reason}{_user_line(error)}"
    )


def _without_own(trace: Any) -> Any:
    """A traceback from where discolab's own frames end."""
    last = trace
    while trace is not None:
        if not is_own_file(trace.tb_frame.f_code.co_filename):
            return trace
        trace = trace.tb_next
    return last


def _user_line(error: BaseException) -> str:
    """The innermost line of the user's."""
    frames = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_user(frame.f_code)
    ]
    if not frames:
        return ""
    code, line = frames[-1]
    return f" ({place(code.co_filename, line)}, in {code.co_name})"


def _in_words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.") + format_shape(list(value.shape))
    words = repr(value)
    if len(words) > _MOST_CHARACTERS:
        words = f"{words[:_MOST_CHARACTERS]}…"
    return words.replace("\n", " ")
