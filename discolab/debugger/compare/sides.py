"""One side of a comparison: the reference on the controller, or the sharded program of a worker.

A `Side` runs its program, forward and then backward, with the randomness of a seed, and leaves
the program as it was: gradients and random states are put back, hooks are gone; `restore` puts
buffers back. What lies here is asked for by key. Nothing in this file runs a collective: only the
program does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from ...layouts.layout import ShardLayout
from ...runtime.errors import ArgumentError
from ...runtime.worker import current_worker_or_none
from ...views.facts.tensors import is_dtensor
from .contents import leaves, replaced
from .tape import Entry, Tape

Fact: TypeAlias = tuple[Any, ...]
"""Of an entry: its key, its shape, its dtype, the number of the value, how it says that it lies."""


class Side:
    """A program and what its run left.

    Parameters
    ----------
    program
        What is called with the inputs.
    module
        Whose submodules are looked at; None: those of the program, if it is a module.
    """

    def __init__(
        self,
        program: Any,
        module: torch.nn.Module | None,
        backward: bool,
        loss: Callable[[Any], Any] | None,
    ) -> None:
        if not callable(program):
            raise ArgumentError(
                f"compare: a module or a function is needed, got {type(program).__name__}"
            )
        if module is not None and not isinstance(module, torch.nn.Module):
            raise ArgumentError(
                f"compare: module= is the module to look into, got {type(module).__name__}"
            )
        if module is None and isinstance(program, torch.nn.Module):
            module = program
        self.program, self.module, self.loss = program, module, loss
        self.backward_wanted = backward
        self.tape = Tape(backward)
        self.tape.take_parameters(module)
        self._result: Any = None
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # with what they held before

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        if self.module is not None:
            for tensor in self.module.parameters():
                return tensor.device
        worker = current_worker_or_none()
        return torch.device("cpu") if worker is None else worker.device

    # -- running -------------------------------------------------------------------------------

    def forward(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int, cut: Any = None
    ) -> None:
        """Run the program on inputs of its own; `cut` gives the part of an input that is ours."""

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
        with (
            seeded(seed, self.device),
            torch.set_grad_enabled(self.backward_wanted),
            self.tape.recording(self.module),
        ):
            self.tape.take("argument", "", {**dict(enumerate(args)), **kwargs})
            self._result = self.program(*args, **kwargs)
            self.tape.take("result", "", self._result)

    def restore(self) -> None:
        """Put buffers back; not before backward, which may need them as forward has left them."""
        with torch.no_grad():
            while self._buffers:
                buffer, before = self._buffers.pop()
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        self._result = None

    def backward(self, seed: int, starts: Mapping[str, Any]) -> None:
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
            with seeded(seed, self.device), torch.enable_grad():
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
            self.tape.take_parameter_gradients(self.module)
        finally:
            for leaf, grad in kept:
                leaf.grad = grad

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
        found: list[Fact] = []
        for entry in self.tape.entries.values():
            if entry.kind in kinds:
                held = entry.held
                fact = _fact(entry.key, held.value, held.number, held.said)
                found.append((*fact[:2], entry.number or fact[2], *fact[3:]))
        return found

    def gradient_facts(self) -> list[Fact]:
        """Of the gradients that have come, in the order in which they did."""
        entries = [e for e in self.tape.entries.values() if e.gradient.value is not None]
        found: list[Fact] = []
        for entry in in_order(entries):
            gradient = entry.gradient
            assert gradient.value is not None
            found.append(_fact(f"{entry.key}.grad", gradient.value, id(gradient), gradient.said))
        return found

    def value(self, key: str) -> torch.Tensor:
        """The tensor of a fact."""
        if key.endswith(".grad"):
            value = self.tape.entries[key.removesuffix(".grad")].gradient.value
            assert value is not None
            return value
        return self.tape.entries[key].held.value


def in_order(entries: list[Entry]) -> list[Entry]:
    """Gradients in the order of backward; those of a module's parameters after its own."""
    last: dict[str, int] = {}
    for entry in entries:
        if entry.gradient.order > 0:
            module = entry.name.split("#")[0]
            last[module] = max(last.get(module, 0), entry.gradient.order)
    end = max(last.values(), default=0) + 1

    def turn(entry: Entry) -> tuple[int, int]:
        if entry.kind != "parameter":
            return entry.gradient.order, 0
        return last.get(entry.name.rpartition(".")[0], end), 1

    return sorted(entries, key=turn)


def _fact(key: str, value: torch.Tensor, number: int, said: Any) -> Fact:
    return key, tuple(value.shape), str(value.dtype).removeprefix("torch."), number, said


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
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        torch.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(before)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
