"""How far rounding alone takes a reference from itself: the noise floor of a comparison.

The reference runs again on its own, with every operation rounded another way: products of matrices
are summed in pieces, as over workers, and each result is off by a last digit, up or down, at
random. Two such runs differ by what the program makes of rounding errors: where terms cancel that
is many digits, and through many layers it grows. A value of the workers that is off by no more
than a few times that is no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .sides import Side

LIKELY = 3  # times what two runs differ by: most values are off by less
TIMES = 8  # what two runs differ by: so much workers may be off
_PIECES = 4  # in which the sum of a product of matrices is cut
_SAME = 1e-4  # of a typical element: a run that is repeatable gives this again

# What moves or makes numbers rounds nothing.
_EXACT = {
    "_local_scalar_dense", "_to_copy", "abs", "alias", "arange", "as_strided", "bernoulli",
    "cat", "ceil", "clamp", "clone", "constant_pad_nd", "copy", "detach", "dropout",
    "embedding", "empty", "empty_like", "empty_strided", "expand", "eye", "fill", "flip",
    "floor", "full", "full_like", "gather", "index", "index_select", "lift_fresh", "linspace",
    "masked_fill", "max", "maximum", "min", "minimum", "native_dropout", "neg", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "normal", "ones", "ones_like",
    "rand", "rand_like", "randn", "randn_like", "relu", "repeat", "roll", "round",
    "scalar_tensor", "scatter", "select_backward", "sign", "slice_backward", "sort",
    "split_with_sizes_copy", "stack", "threshold_backward", "topk", "tril", "triu",
    "unfold_backward", "uniform", "where", "zeros", "zeros_like",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Noise:
    """What two runs of a reference differ by, in each of its values."""

    one: Side
    other: Side

    def values(self, key: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A value of both runs, as float64; a gradient with the factor of the reference's."""
        gradient = self.one.recorder.entries[key.removesuffix(".grad")].gradient
        factor = gradient.factor if key.endswith(".grad") else 1.0
        one, other = (side.value(key).to(torch.float64) for side in (self.one, self.other))
        return factor * one, factor * other

    def of(self, key: str, part: Callable[[torch.Tensor], Any]) -> tuple[float, float]:
        """The root of the mean square and the largest of the differences, in a part of a value.

        Both infinite where rounding alone decides how many elements there are, as of rows that are
        routed to an expert.
        """
        whole = self.values(key)
        if whole[0].shape != whole[1].shape:
            return math.inf, math.inf
        a, b = map(part, whole)
        gap = (a - b).abs().nan_to_num(0.0, 0.0, 0.0)
        if not gap.numel():
            return 0.0, 0.0
        return float(gap.square().mean().sqrt()), float(gap.max())


class _RoundedOtherwise(TorchDispatchMode):
    """Rounds what is computed on this thread another way, at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seed = seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = _in_pieces(name, args, kwargs or {})
        if result is None:
            result = func(*args, **(kwargs or {}))
        if name in _EXACT or name.endswith("_") or "out" in (kwargs or {}):
            return result
        if any(r.alias_info is not None for r in func._schema.returns):
            return result
        if isinstance(result, torch.Tensor):
            return self._nudged(result)
        if isinstance(result, tuple | list):
            kind = type(result)
            return kind([self._nudged(r) if isinstance(r, torch.Tensor) else r for r in result])
        return result

    def _nudged(self, tensor: torch.Tensor) -> torch.Tensor:
        """A result whose elements are off by up to a digit."""
        if not tensor.is_floating_point() or not tensor.numel() or type(tensor) is not torch.Tensor:
            return tensor
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = torch.Generator(tensor.device).manual_seed(self._seed)
            self._generators[tensor.device] = generator
        noise = torch.rand(tensor.shape, generator=generator, device=tensor.device)
        epsilon = torch.finfo(tensor.dtype).eps
        wide = torch.promote_types(tensor.dtype, torch.float32)
        scale = 1 + (2 * noise.to(wide) - 1) * epsilon
        return (tensor.to(wide) * scale).to(tensor.dtype)


def _in_pieces(name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
    """A product of matrices whose sum is made in pieces; None for other operations."""
    if kwargs:
        return None
    if name in ("mm", "bmm"):
        a, b = args
        plus: torch.Tensor | None = None
    elif name in ("addmm", "baddbmm") and len(args) == 3:
        plus, a, b = args
    else:
        return None
    if a.shape[-1] < 2 * _PIECES or not a.is_floating_point() or a.dtype != b.dtype:
        return None
    total: torch.Tensor | None = None
    for part, other in zip(a.chunk(_PIECES, -1), b.chunk(_PIECES, -2), strict=True):
        term = torch.matmul(part, other)
        total = term if total is None else total + term
    assert total is not None
    return total if plus is None else total + plus


def measure_noise(ours: Side, args: Any, kwargs: Any, seed: int, starts: Any) -> Noise | None:
    """Run a reference twice again, each time rounded otherwise.

    Parameters
    ----------
    ours
        The side that has run.
    args, kwargs, seed, starts
        With which it has.

    Returns
    -------
    Noise or None
        None if it can't run again: it writes into its parameters by itself, it gives other values
        the second time, or it fails when it is looked into. An optimizer's steps are taken back
        before each run; at the end all is as the first run has left it.
    """
    if ours.changed and not ours.steps:
        return None
    go_on = ours.rewind()

    def again(mode: _RoundedOtherwise | None) -> Side:
        side = ours.again()
        try:
            side.forward(args, kwargs, seed, around=mode)
            if starts is not None:
                side.backward(seed, starts, around=mode)
            elif ours.ran_backward:
                side.take_own_gradients()
        finally:
            side.restore()
            side.rewind()
        return side

    try:
        pure = isinstance(ours.program, torch.nn.Module) and not ours.steps
        if not pure and not _same(ours, again(None)):
            return None
        first, second = again(_RoundedOtherwise(1)), again(_RoundedOtherwise(2))
    except Exception:  # the reference itself has run: what fails is to look into it
        return None
    finally:
        go_on()
    for entry in ours.recorder.entries.values():
        theirs = first.recorder.entries.get(entry.key)
        if theirs is not None:
            theirs.gradient.factor = entry.gradient.factor
    if set(first.recorder.entries) != set(second.recorder.entries):
        return None
    return Noise(first, second)


def _same(ours: Side, again: Side) -> bool:
    """Whether a program that ran a second time has given the same."""
    for key, entry in ours.recorder.entries.items():
        other = again.recorder.entries.get(key)
        if other is None:
            return False
        a, b = entry.snapshot.value, other.snapshot.value
        if a.shape != b.shape:
            return False
        if a.is_floating_point() and a.numel():
            size = float(torch.linalg.vector_norm(a.double()))
            gap = float(torch.linalg.vector_norm((a.double() - b.double()).nan_to_num()))
            if gap > _SAME * size and not math.isnan(gap):
                return False
    return True
