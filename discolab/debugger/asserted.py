"""What one worker tells of a value that a `disco_assert` is about, and what follows from all.

Pure functions: of one value on its worker (`told_of`, `words_of`), and of the table of what all
members have told (`verdict`). A row of the table is some integers, of one number whatever the
value is, so that it goes in one collective of fixed shape.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.arguments import as_tensor
from ..runtime.errors import ArgumentError
from ..runtime.regions import array_of
from ..views.dref.contents import content_key
from ..views.facts.describe import describe
from ..views.facts.tensors import describe_tensor, digest_of, why_no_data
from ..views.summary import summarize

TRUE = "true"  # of a condition, which is given without a kind
KINDS = ("replicated", "sharded", "partial", "distinct", "same shape", "finite", TRUE)
TYPES, SHAPES, EQUAL, VALUES, ODD = "types", "shapes", "equal", "values", "odd"
MOST_DIMS = 12
_COMPARED = ("replicated", "sharded", "partial", "distinct")
_PASSING = ("sharded", "partial")


class Told(NamedTuple):
    """One member's row.

    Attributes
    ----------
    type
        A number for the dtype of a tensor, or for the type of something else.
    dims, shape
        Of a tensor, the shape with -1 behind it; -1 and no shape of something else.
    digest
        Of the content, where the kind asks for it.
    uniform
        1 if every element is one number.
    odd
        How many elements are not finite, or false.
    numeric
        1 if it is a tensor whose numbers can be compared one by one.
    """

    type: int
    dims: int
    shape: tuple[int, ...]
    digest: int
    uniform: int
    odd: int
    numeric: int

    def row(self) -> list[int]:
        """As integers; `told_from` undoes it."""
        shape = [*self.shape, *([-1] * (MOST_DIMS - len(self.shape)))]
        return [self.type, self.dims, self.digest, self.uniform, self.odd, self.numeric, *shape]


ROW = 6 + MOST_DIMS


def told_from(row: Sequence[int]) -> Told:
    """What `Told.row` has made."""
    kind, dims, digest, uniform, odd, numeric, *shape = row
    return Told(kind, dims, tuple(shape[: max(dims, 0)]), digest, uniform, odd, numeric)


def told_of(value: Any, kind: str) -> Told:
    """What this worker tells of its value.

    Raises
    ------
    ArgumentError
        If nothing of this kind can be said of it.
    """
    value = plain_tensor(value)
    if kind == TRUE:
        _check_condition(value)
    if not isinstance(value, torch.Tensor):
        return _told_of_other(value, kind)
    if value.dim() > MOST_DIMS:
        raise ArgumentError(
            f"disco_assert: a tensor of {value.dim()} dimensions; up to {MOST_DIMS} can be told"
        )
    why = why_no_data(value)
    if why and kind != "same shape":
        raise ArgumentError(f"disco_assert: {_called(value)} can't be compared: {why}")
    dense = value.layout is torch.strided and not value.is_quantized and not value.is_nested
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        value = value.detach()
        return Told(
            _number(f"{value.dtype} {value.layout}"),
            value.dim(),
            tuple(value.shape),
            _digest(value, dense) if kind in _COMPARED else 0,
            int(kind in _PASSING and dense and _is_uniform(value)),
            _odd_in(value, kind),
            int(dense and _has_numbers(value)),
        )


def verdict(table: Sequence[Told], kind: str, dim: int | None) -> str | None:
    """Why it does not hold; None if it does.

    Returns
    -------
    str or None
        ``TYPES``, ``SHAPES``: these differ. ``EQUAL``: values are equal that must not be. ``ODD``:
        a member has false or nonfinite elements. ``VALUES``: tensors of one dtype and shape have
        other digests, so that their numbers must be looked at.
    """
    if kind in (TRUE, "finite"):
        return ODD if any(told.odd for told in table) else None
    digests = [told.digest for told in table]
    if kind == "distinct":
        contents = {(told.type, told.shape, told.digest) for told in table}
        return EQUAL if len(contents) < len(table) else None
    if kind != "same shape" and len({(told.type, told.numeric) for told in table}) > 1:
        return TYPES
    if _misfit([told.shape for told in table], kind, dim):
        return SHAPES
    if kind == "replicated":
        return VALUES if len(set(digests)) > 1 else None
    if kind in _PASSING and len(table) > 1 and len(set(digests)) == 1:
        return None if all(told.uniform for told in table) else EQUAL
    return None


def _misfit(shapes: Sequence[tuple[int, ...]], kind: str, dim: int | None) -> bool:
    """Whether shapes differ where they must not."""
    if len(set(map(len, shapes))) > 1:
        return True
    odd = [n for n, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    if kind != "sharded":
        return bool(odd)
    allowed = None if dim is None else dim % max(len(shapes[0]), 1)
    return len(odd) > 1 or (allowed is not None and any(n != allowed for n in odd))


def words_of(value: Any, kind: str) -> str:
    """What this worker has, in words, for the account of a failure."""
    value = plain_tensor(value)
    if kind not in (TRUE, "finite"):
        return _called(value)
    if kind == TRUE:
        if not isinstance(value, torch.Tensor) or value.numel() == 1:
            return "false"
        return f"false in {_odd_in(value, kind)} of {value.numel()} elements"
    for leaf in _leaves(value):
        found = describe_tensor(leaf, True)
        places = found.get("places")
        if isinstance(places, list) and places:
            return f"{count_words(leaf)} in {summarize(found)}, the first at {places[0][1]}"
    return f"a value that is not finite: {_called(value)}"


def count_words(tensor: torch.Tensor) -> str:
    """``3 NaN and 1 -inf``: how many elements are not finite."""
    nan, odd = int(tensor.isnan().sum()), tensor.isinf()
    inf = int(odd.sum())
    minus = 0 if not inf or tensor.is_complex() else int((odd & tensor.float().signbit()).sum())
    counts = {"NaN": nan, "inf": inf - minus, "-inf": minus}
    *others, last = [f"{n} {name}" for name, n in counts.items() if n] or ["none"]
    return f"{', '.join(others)} and {last}" if others else last


def plain_tensor(value: Any) -> Any:
    """The local shard of a DTensor, the tensor of a numpy array; else `value`."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return as_tensor(numpy.ascontiguousarray(value), "disco_assert: value")
    if type(value).__name__ == "AsyncCollectiveTensor" and hasattr(value, "trigger_wait"):
        return value.trigger_wait()
    return getattr(value, "_local_tensor", value) if isinstance(value, torch.Tensor) else value


def _told_of_other(value: Any, kind: str) -> Told:
    """Of something that is no tensor."""
    if kind in ("sharded", "partial", "same shape"):
        raise ArgumentError(f"disco_assert: {kind!r} is said of a tensor, got {_called(value)}")
    number, digest, odd = _number(type(value).__qualname__), 0, 0
    if kind == "finite":
        leaves = list(_leaves(value))
        if not leaves:
            raise ArgumentError(f"disco_assert: {_called(value)} has no numbers to be finite")
        odd = sum(_odd_in(leaf, kind) for leaf in leaves)
    elif kind == TRUE:
        odd = int(not value)
    else:
        key = content_key(describe(value, True))
        if key is None:
            raise ArgumentError(
                f"disco_assert: {_called(value)} can't be compared between workers: it is no "
                "tensor, module, number or string, nor made of such"
            )
        digest = _number(repr(key))
    return Told(number, -1, (), digest, 0, odd, 0)


def _check_condition(value: Any) -> None:
    numpy = sys.modules.get("numpy")
    if isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_)):
        return
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.bool:
        names = ", ".join(repr(kind) for kind in KINDS if kind != TRUE)
        raise ArgumentError(
            f"disco_assert: without a kind the value is a condition, a bool or a tensor of bools; "
            f"got {_called(value)}. Kinds are {names}"
        )


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    """The tensors and numbers in a value, as tensors."""
    value = plain_tensor(value)
    if isinstance(value, torch.Tensor):
        yield value.detach()
    elif isinstance(value, torch.nn.Module):
        for one in itertools.chain(value.parameters(), value.buffers()):
            yield from _leaves(one)
    elif isinstance(value, dict):
        yield from (leaf for one in value.values() for leaf in _leaves(one))
    elif isinstance(value, list | tuple):
        yield from (leaf for one in value for leaf in _leaves(one))
    elif isinstance(value, float | complex):
        yield torch.tensor(value)
    elif isinstance(value, int):
        yield torch.tensor(0)


def _odd_in(tensor: torch.Tensor, kind: str) -> int:
    """How many elements are not as a condition or ``finite`` wants them."""
    if kind == TRUE:
        return tensor.numel() - int(tensor.sum())
    if kind != "finite" or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    values = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor
    return values.numel() - int(values.isfinite().sum())


def _is_uniform(tensor: torch.Tensor) -> bool:
    """Whether every element is one number."""
    if tensor.numel() < 2:
        return True
    first = tensor[(0,) * tensor.dim()]
    last = tensor[(-1,) * tensor.dim()]
    return bool(first == last) and bool((tensor == first).all())


def _has_numbers(tensor: torch.Tensor) -> bool:
    kind = tensor.dtype
    return kind.is_floating_point or kind.is_complex or kind in _WHOLE


_WHOLE = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
}


def _digest(tensor: torch.Tensor, dense: bool) -> int:
    """A number of 64 bits for the content.

    On the CPU by a hash that lets other workers run meanwhile; those of a GPU are not comparable
    with it, so that the values are compared then.
    """
    if not dense or tensor.device.type != "cpu":
        return int(digest_of(tensor), 16) - 2**63
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return _hashed(array_of(flat.view(torch.uint8)))


def _number(text: str) -> int:
    """A number of 64 bits for a text, the same in every process."""
    return _hashed(text.encode())


def _hashed(data: Any) -> int:
    return int.from_bytes(hashlib.sha1(data, usedforsecurity=False).digest()[:8], signed=True)


def _called(value: Any) -> str:
    return summarize(describe(value, False), 160)
