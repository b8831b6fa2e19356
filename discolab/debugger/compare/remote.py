"""What the workers do for a comparison: worker functions on a `Side` that lies in a register.

None of them runs a collective but through the user's program. What the reference has is taken
from `SHELF` where the worker is in the controller's process, without a copy; other workers are
sent the part that they should hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...layouts.layout import ShardLayout
from ...runtime.worker import current_worker
from .measuring import Row, Tolerance, difference
from .sides import Fact, Side

SHELF: dict[str, Side] = {}
"""Sides of the controller of this process, by token."""

MOST_SAMPLES = 65_536  # elements of a worker's tensor that are looked at by the controller

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


def begin(program: Any, module: Any, backward: bool, loss: Any) -> Side:
    """Make this worker's side."""
    if isinstance(program, str):
        program = current_worker().namespace.get(program, program)
    return Side(program, module, backward, loss)


def shares_memory(token: str) -> bool:
    """Whether this worker sees the controller's side itself."""
    return token in SHELF


def hold(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Have the inputs here."""
    return args, kwargs


def run_forward(
    side: Side, given: tuple[Any, Any], seed: int, cuts: dict[str, Any]
) -> list[tuple[str, str, str, bool]]:
    """Run forward; gives of each module its path, type, settings and mode."""
    rank = current_worker().worker_id

    def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in cuts:
            return tensor
        return ShardLayout.of_plain(cuts[name]).part_of(tensor, rank)

    args, kwargs = given
    side.forward(args, kwargs, seed, cut)
    return [(path, *about) for path, about in side.tape.modules.items()]


def run_backward(side: Side, seed: int, starts: dict[str, Any]) -> list[Fact]:
    """Run backward; `starts` as `Side.backward`, with layouts as plain values."""
    known = {
        leaf: (shape, ShardLayout.of_plain(layout), number)
        for leaf, (shape, layout, number) in starts.items()
    }
    side.backward(seed, known)
    return side.gradient_facts()


def facts(side: Side, kinds: tuple[str, ...]) -> list[Fact]:
    """See `Side.facts`."""
    return side.facts(kinds)


def told(side: Side) -> dict[str, tuple[str, str]]:
    """What the program gave that is neither tensor nor number."""
    return side.tape.told


def measure(
    side: Side,
    token: str,
    jobs: list[tuple[str, str, tuple[int, ...], list[Any], float, float]],
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
    found: list[list[Row] | None] = []
    for number, (key, other, shape, layouts, rtol, atol) in enumerate(jobs):
        if not has(side, key):
            found.append(None)
            continue
        local, tolerance = side.value(key), Tolerance(rtol, atol)
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
        found.append(rows if len(rows) == len(layouts) else None)
    return found


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
    entry = side.tape.entries.get(key.removesuffix(".grad"))
    return entry is not None and (not key.endswith(".grad") or entry.gradient.value is not None)


def samples(side: Side, wanted: list[tuple[str, int]]) -> list[torch.Tensor | None]:
    """Some elements of values here, as float64: all, or as many as wanted at `places`."""
    found: list[torch.Tensor | None] = []
    for key, most in wanted:
        found.append(sample(side.value(key), most) if has(side, key) else None)
    return found


def sample(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Elements of a tensor at the places that `places` gives, as float64 on the CPU."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() > most:
        flat = flat[places(flat.numel(), most).to(flat.device)]
    kind = torch.complex128 if flat.is_complex() else torch.float64
    return flat.to("cpu", kind)


def places(size: int, most: int) -> torch.Tensor:
    """Where samples are taken: layout evenly, each at a random place of its stretch."""
    generator = torch.Generator().manual_seed(0)
    step = size / most
    jitter = torch.empty(most, dtype=torch.float64).uniform_(generator=generator)
    return ((torch.arange(most, dtype=torch.float64) + jitter) * step).long().clamp_(max=size - 1)


def end(side: Side) -> None:
    """Put back what the run has changed."""
    side.restore()


_COMMANDS: dict[Any, str] = {  # what status calls them
    begin: "the start of a comparison",
    facts: "a look at what was recorded",
    told: "a look at what was recorded",
    hold: "the inputs of a comparison",
    run_forward: "the comparison's forward",
    run_backward: "the comparison's backward",
    measure: "a comparison",
    samples: "a look at what was recorded",
    end: "the end of a comparison",
}
for _function, _words in _COMMANDS.items():
    _function.disco_command = _words
