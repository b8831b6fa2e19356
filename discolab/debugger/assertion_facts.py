"""What members of a `disco_assert` tell of their values, and what follows from all. Pure.

One member tells `told_of` its value, and `words_of` it if the assertion fails; `verdict` is of the
table of what all have told. A row of the table is some integers, of one number whatever the value
is, so that it goes in one collective of fixed shape.

`where_differ` says in which parts of a container or a module the members differ. A part is a
tensor, a number or the like, by the path to it, as ``['w']`` or ``0.weight``. A member sends a text
that has for each a digest and some words.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.arguments import as_tensor
from ..runtime.errors import ArgumentError
from ..runtime.failures import name_ranks
from ..runtime.regions import array_of
from ..views.dref.contents import content_key
from ..views.facts.describe import describe, text_digest
from ..views.facts.tensors import describe_tensor, digest_of, why_no_data
from ..views.formats import cut
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


# -- parts of containers and modules ---------------------------------------------------------------


_MOST = 2_000
_PATH, _WORDS = 80, 40  # characters


class Piece(NamedTuple):
    """A part: a digest of its content, and what it is in words."""

    key: str
    words: str


def parts_text(value: Any) -> str:
    """The parts of a value, for `where_differ`; short, as the tensors themselves are not in it."""
    found: dict[str, Piece] = {}
    for path, piece in _parts(describe(value, True), ""):
        found.setdefault(cut(path, _PATH), piece)
        if len(found) == _MOST:
            break
    return json.dumps(found)


def _parts(record: Mapping[str, Any], path: str) -> Iterator[tuple[str, Piece]]:
    kind, rows = record.get("kind"), record.get("params")
    brief = [(name, Piece(str(key), words)) for name, words, key in record.get("brief", ())]
    if isinstance(rows, list):
        for row in rows:
            shape = ", ".join(map(str, row["shape"]))
            yield row["name"], Piece(str(row.get("digest")), f"{row['dtype']}[{shape}]")
        yield from brief
    elif kind in ("list", "tuple", "dict", "dataclass") and isinstance(record.get("items"), list):
        for item in record["items"]:
            yield from _parts(item["value"], _at(path, kind, item["key"]))
        yield from ((_at(path, kind, name), piece) for name, piece in brief)
    if path and not brief and "items" not in record:
        yield path, Piece(text_digest(repr(content_key(record))), summarize(record, _WORDS))


def _at(path: str, kind: object, key: str) -> str:
    return f"{path}.{key}" if kind == "dataclass" else f"{path}[{key}]"


def where_differ(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """The first part that is not the same, and how many more; "" if none is known.

    Parameters
    ----------
    texts
        Of each member, from `parts_text`.
    ranks
        The members.
    """
    held = [{path: Piece(*piece) for path, piece in json.loads(text).items()} for text in texts]
    paths = dict.fromkeys(path for parts in held for path in parts)
    odd = [path for path in paths if len({parts[path].key if path in parts else None
                                          for parts in held}) > 1]  # fmt: skip
    if not odd:
        return "the order of the items differs" if len({*map(tuple, held)}) > 1 else ""
    first = odd[0]
    words = _folded(ranks, lambda n: held[n][first].words if first in held[n] else "")
    without = words.pop("", None)
    if without:
        text = f"{name_ranks(without)} {'has' if len(without) == 1 else 'have'} no {first}"
    elif len(words) > 1:
        text = f"they differ at {first}: " + ", ".join(
            f"{told} on {name_ranks(members)}" for told, members in words.items()
        )
    else:
        text = f"they differ at {first}, {next(iter(words))}"
    more = len(odd) - 1
    return text + (f"; and at {more} more place{'s' if more > 1 else ''}" if more else "")


def _folded(ranks: Sequence[int], words_of: Callable[[int], str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for n, rank in enumerate(ranks):
        found.setdefault(words_of(n), []).append(rank)
    return found
