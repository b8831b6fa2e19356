"""`disco_assert`: say in a program how the workers' values go together, and have it checked.

Each check is a collective of the members of a group, entered in the ledger as ``disco_assert(...)``
with the arguments that the user gave; so members that assert other things are told of it, as of any
collective. They gather some hundred bytes from each: dtype, shape, a digest. So every member sees
the same table and takes the same way from there. Only where the assertion does not hold do they
exchange more, to say who holds what; then all of them stop in the debugger, if one is attached, and
raise the same error. No state.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from ..ccl import checks
from ..ccl.choose import backend_of
from ..ccl.groups import Group, resolve
from ..ccl.pattern import pattern_of
from ..runtime.errors import ArgumentError, DiscoAssertionError
from ..runtime.failures import name_ranks
from ..runtime.sources import lines_of
from ..runtime.worker import Worker
from ..views.facts.distances import distances
from ..views.formats import cut
from .assertion_facts import (
    EQUAL,
    KINDS,
    ODD,
    ROW,
    SHAPES,
    TRUE,
    VALUES,
    Told,
    parts_text,
    plain_tensor,
    told_from,
    told_of,
    verdict,
    where_differ,
    words_of,
)
from .frames import FUNCTIONS
from .tracer import stop_here


def disco_assert(
    value: Any,
    kind: str | None = None,
    *,
    dim: int | None = None,
    group: Any = None,
    rtol: float | None = None,
    atol: float | None = None,
    message: str = "",
    timeout: float | None = None,
) -> None:
    """Check how the values of the workers of a group go together; all of them call it.

    Parameters
    ----------
    value
        A tensor; of a DTensor its local shard is looked at. For ``replicated`` and ``distinct``
        also a module, a number, or a list, tuple or dict of such; for ``finite`` as well.
    kind
        - ``"replicated"``: all hold the same.
        - ``"sharded"``: the same dtype, and the same shape but for one dimension; not all equal.
        - ``"partial"``: the same dtype and shape; not all equal.
        - ``"distinct"``: no two hold the same.
        - ``"same shape"``: the same shape.
        - ``"finite"``: no NaN and no infinity on any of them.
        - None: `value` is a bool or a tensor of bools, and true on all of them.

        Shards and partial values in which every element is one number, as in zeros, are let pass
        though they be equal.
    dim
        Of ``sharded``: the dimension that is split; shapes may differ in it alone.
    group
        As for a collective: None is this worker's own group, ``"world"`` all workers.
    rtol, atol
        Of ``replicated``: how far an element may be from that of the group's first worker, as in
        `torch.isclose`; one that is not given is 0. Without both it must be the same number; NaN
        is the same as NaN. For tensors and numbers.
    message
        Comes first in the error.
    timeout
        Seconds to wait for the other members, as for a collective.

    Raises
    ------
    DiscoAssertionError
        On all members, if it does not hold. With a debugger attached the program stops here first;
        when it is told to go on, the error is raised.
    ArgumentError
        If `value` is nothing of which `kind` can be said, or has no dimension `dim`.
    CollectiveError, CollectiveAborted, WaitTimeoutError
        As of a collective: a member does not come, or calls something else.

    Examples
    --------
    >>> disco_assert(h, "replicated")  # doctest: +SKIP
    >>> disco_assert(w1, "sharded", dim=1, group="tp")  # doctest: +SKIP
    >>> disco_assert(loss < 10, message="the loss explodes")  # doctest: +SKIP
    """
    worker = checks.calling_worker(NAME)
    what = _checked(value, kind, dim, rtol, atol)
    if rtol is not None or atol is not None:
        value = _with_numbers(value)
    told = told_of(value, what)
    words = _arguments(kind, dim, rtol, atol)
    members = Members(worker, resolve(worker, group, NAME), words, timeout)
    table = members.facts(told)
    _check_dim(dim, table)
    reason = verdict(table, what, dim)
    if reason is None:
        return
    if reason == VALUES:
        found = members.differences(value, table, rtol, atol)
        if found is None:
            return
    else:
        found = members.account(table, reason, words_of(value, what), dim)
    frame = sys._getframe(1)
    _fail(f"{NAME}({', '.join(filter(None, (_first_argument(frame), words)))}): {found}", message)


FUNCTIONS["disco_assert"] = disco_assert


def _fail(text: str, message: str) -> None:
    text = f"{message}: {text}" if message else text
    stop_here("assert", text, frame=sys._getframe(2))
    raise DiscoAssertionError(text)


def _checked(
    value: Any, kind: str | None, dim: int | None, rtol: float | None, atol: float | None
) -> str:
    """The kind; all arguments but the value are looked at here."""
    if kind is not None and kind not in KINDS:
        known = ", ".join(repr(name) for name in KINDS if name != TRUE)
        raise ArgumentError(
            f"{NAME}: there is no kind {kind!r}; kinds are {known}; a condition has none: "
            f"{NAME}(loss < 10)"
        )
    if dim is not None and (kind != "sharded" or isinstance(dim, bool) or not _is_index(dim)):
        raise ArgumentError(
            f"{NAME}: dim={dim!r}; dim is the number of the dimension that is split, "
            f"as in {NAME}(w, 'sharded', dim=0)"
        )
    for name, number in (("rtol", rtol), ("atol", atol)):
        if number is None:
            continue
        if kind != "replicated":
            raise ArgumentError(f"{NAME}: {name} is for 'replicated' alone, got {kind!r}")
        if isinstance(number, bool) or not isinstance(number, int | float) or not number >= 0:
            raise ArgumentError(f"{NAME}: {name} is a number, 0 or more; got {number!r:.60}")
    return TRUE if kind is None else kind


def _check_dim(dim: int | None, table: Sequence[Told]) -> None:
    """The same on all members; where they have several numbers of dimensions, that is told."""
    dims = {told.dims for told in table}
    if dim is not None and len(dims) == 1 and not -(n := dims.pop()) <= dim < n:
        has = f"dimensions 0 to {n - 1}" if n else "no dimension"
        raise ArgumentError(f"{NAME}: dim={dim}, and the value has {has}")


def _with_numbers(value: Any) -> Any:
    """What is measured with a tolerance: a tensor."""
    if type(value) in (int, float, complex):
        return torch.tensor(
            value, dtype=torch.complex128 if type(value) is complex else torch.float64
        )
    if isinstance(plain_tensor(value), torch.Tensor):
        return value
    raise ArgumentError(
        f"{NAME}: rtol and atol are for a tensor or a number, got {type(value).__name__}; without "
        "them its parts must be the same numbers"
    )


def _is_index(value: Any) -> bool:
    return isinstance(value, int)


def _arguments(kind: str | None, dim: int | None, rtol: float | None, atol: float | None) -> str:
    """What comes after the value in the call: ``'sharded', dim=0``."""
    given = {"dim": dim, "rtol": rtol, "atol": atol}
    named = [f"{name}={number!r}" for name, number in given.items() if number is not None]
    return ", ".join(([repr(kind)] if kind is not None else []) + named)


def _first_argument(frame: FrameType) -> str:
    """How the value was written in the call that `frame` makes now; ``value`` if unknown."""
    try:
        code = frame.f_code
        places = list(code.co_positions())[frame.f_lasti // 2]
        first, last, begin, end = places
        if first is None or last is None or begin is None or end is None:
            return "value"
        lines = [line.encode() for line in lines_of(code.co_filename)[first - 1 : last]]
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][begin:]
        call = ast.parse(b"".join(lines).decode().strip(), mode="eval").body
        if isinstance(call, ast.Call) and call.args:
            return cut(ast.unparse(call.args[0]), 80)
    except (SyntaxError, ValueError, IndexError):
        pass  # what it said is gone, or has changed
    return "value"


# -- what the members exchange ---------------------------------------------------------------------


NAME = "disco_assert"
_CHUNK = 2**20  # elements of a value that are sent at once
_WORDS = 240  # bytes


class Members:
    """One assertion of one group, on one of its members."""

    def __init__(self, worker: Worker, group: Group, words: str, timeout: float | None) -> None:
        self.worker, self.group, self.timeout = worker, group, timeout
        self.op = f"{NAME}({words})"
        self._backend = backend_of(worker)
        self._device = worker.device if self._backend.devices_only else torch.device("cpu")

    def facts(self, told: Told) -> list[Told]:
        """What each member tells, in the group's order."""
        rows = self._gather(torch.tensor(told.row(), dtype=torch.int64), self.op)
        return [told_from(row) for row in rows.view(len(self.group), ROW).tolist()]

    def account(self, table: Sequence[Told], reason: str, words: str, dim: int | None) -> str:
        """Who holds what, where it does not hold for this reason; the same on all members."""
        if reason == EQUAL:
            return self._equal(table)
        said = self._words(words)
        chosen = [n for n, told in enumerate(table) if reason != ODD or told.odd]
        groups = self._folded({n: said[n] for n in chosen})
        if reason == ODD and said[chosen[0]].startswith("false"):
            return "; ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in groups)
        text = _sentence([(ranks, text) for text, ranks in groups])
        if reason == SHAPES and "sharded" in self.op:
            where = "one dimension" if dim is None else f"dimension {dim}"
            text += f"; the shapes of shards differ in {where} alone"
        return text

    def differences(
        self, value: Any, table: Sequence[Told], rtol: float | None, atol: float | None
    ) -> str | None:
        """How far values of one dtype and shape are apart; None if that is near enough."""
        classes = self._classes(table)
        if table[0].dims < 0:
            texts = self._texts(parts_text(value))
            return "; ".join(filter(None, [classes, where_differ(texts, self.group.ranks)]))
        if not table[0].numeric:
            return classes
        near = None if rtol is None and atol is None else (atol or 0.0, rtol or 0.0)
        mine = self._far(plain_tensor(value).detach(), near)
        rows = self._gather(torch.tensor(mine, dtype=torch.float64), f"{self.op}: differences")
        found = rows.view(len(self.group), len(mine)).tolist()
        far = [n for n, row in enumerate(found) if row[0]]
        if not far:
            return None
        worst = max(far, key=lambda n: found[n][1])
        count, gap, place, here, there = found[worst]
        if near is not None:
            odd = name_ranks(self.group.ranks[n] for n in far)
            classes = f"{odd} {'is' if len(far) == 1 else 'are'} too far from {self._name(0)}"
        one, other = _two_numbers(there, here)
        apart = f"largest difference {_digits(gap)}" if math.isfinite(gap) else "they differ"
        where = f" at {_index(int(place), table[0].shape)}" if table[0].shape else ""
        return (
            f"{classes}; {apart}{where} ({one} on {self._name(0)}, {other} on "
            f"{self._name(worst)}), {int(count)} of {math.prod(table[0].shape)} elements there"
        )

    # -- words -------------------------------------------------------------------------------

    def _classes(self, table: Sequence[Told]) -> str:
        """``workers 0-1 hold one value, workers 2-3 another``."""
        groups = self._folded({n: str(told.digest) for n, told in enumerate(table)})
        if len(groups) == len(table) > 2:
            return f"each of {self.group} holds another value"
        return _sentence([(ranks, "another" if n else "one value") for n, (_, ranks) in
                          enumerate(groups)])  # fmt: skip

    def _equal(self, table: Sequence[Told]) -> str:
        """Who holds the same."""
        keys = {n: f"{t.type} {t.shape} {t.digest}" for n, t in enumerate(table)}
        same = [ranks for _, ranks in self._folded(keys) if len(ranks) > 1]
        return "; ".join(f"{name_ranks(ranks)} hold the same value" for ranks in same)

    def _folded(self, said: dict[int, str]) -> list[tuple[str, list[int]]]:
        groups: dict[str, list[int]] = {}
        for n, text in said.items():
            groups.setdefault(text, []).append(self.group.ranks[n])
        return list(groups.items())

    def _name(self, n: int) -> str:
        return name_ranks([self.group.ranks[n]])

    # -- exchanges ---------------------------------------------------------------------------

    def _words(self, text: str) -> list[str]:
        """What each member says."""
        data = text.encode()[:_WORDS].ljust(_WORDS, b"\0")
        rows = self._gather(torch.frombuffer(bytearray(data), dtype=torch.uint8), f"{self.op}: who")
        found = rows.view(len(self.group), _WORDS)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in found]

    def _texts(self, text: str) -> list[str]:
        """What each member says at length."""
        data = text.encode()
        length = torch.tensor([len(data)], dtype=torch.int64)
        lengths = self._gather(length, f"{self.op}: how much").tolist()
        sent = torch.frombuffer(bytearray(data.ljust(max(lengths), b" ")), dtype=torch.uint8)
        rows = self._gather(sent, f"{self.op}: parts").view(len(self.group), max(lengths))
        return [
            rows[n, :size].numpy().tobytes().decode(errors="ignore")
            for n, size in enumerate(lengths)
        ]

    def _far(self, tensor: torch.Tensor, near: tuple[float, float] | None) -> list[float]:
        """How this member's numbers differ from those of the group's first.

        Returns
        -------
        list of float
            How many elements do, the largest difference, its place, and the two numbers there.
        """
        flat = tensor.contiguous().reshape(-1)
        found = [0.0, -1.0, 0.0, 0.0, 0.0]
        for start in range(0, flat.numel(), _CHUNK):
            mine = flat[start : start + _CHUNK]
            first = self._of_first(mine)
            same, _, gap = distances(mine, first)
            if near is not None:
                limit = near[0] + near[1] * first.abs().to(torch.float64)
                same |= gap <= limit
            odd = ~same
            count = int(odd.sum())
            if count:
                found[0] += count
                worst = int(gap.masked_fill(same, -1.0).argmax())
                if float(gap[worst]) > found[1]:
                    numbers = [float(one[worst].abs() if one.is_complex() else one[worst])
                               for one in (mine, first)]  # fmt: skip
                    found[1:] = [float(gap[worst]), float(start + worst), *numbers]
        return found

    def _of_first(self, mine: torch.Tensor) -> torch.Tensor:
        """The same part of the value on the group's first member."""
        root = self.group.ranks[0]
        here = self.worker.worker_id == root
        sent = mine.view(torch.uint8).to(self._device)
        out = torch.empty_like(sent)
        call = checks.make_call(
            NAME, self.worker, self.group, [sent],
            root=root, timeout=self.timeout, op=f"{self.op}: values",
        )  # fmt: skip
        srcs = [sent] if here else []
        pattern = pattern_of("broadcast", self.group, srcs, [out], root=root)
        self._backend.start(call, pattern, srcs, [out]).wait()
        return out.to(mine.device).view(mine.dtype)

    def _gather(self, mine: torch.Tensor, op: str) -> torch.Tensor:
        """What all members give, one after the other."""
        src = mine.to(self._device)
        out = torch.empty(len(self.group) * src.numel(), dtype=src.dtype, device=self._device)
        call = checks.make_call(
            NAME, self.worker, self.group, [src], timeout=self.timeout, op=op, kinds=()
        )
        pieces = list(out.split(src.numel()))
        pattern = pattern_of("all_gather", self.group, [src], pieces)
        self._backend.start(call, pattern, [src], pieces).wait()
        return out.cpu()


def _sentence(said: Sequence[tuple[Sequence[int], str]]) -> str:
    """``worker 0 holds float32[4], workers 1-3 float32[8]``: the verb once, at the first."""
    first, *rest = said
    verb = "holds" if len(first[0]) == 1 else "hold"
    parts = [f"{name_ranks(first[0])} {verb} {first[1]}"]
    return ", ".join(parts + [f"{name_ranks(ranks)} {text}" for ranks, text in rest])


def _two_numbers(one: float, other: float) -> tuple[str, str]:
    """Two numbers with as many digits as tell them apart."""
    texts = _digits(one), _digits(other)
    return texts if texts[0] != texts[1] else (repr(one), repr(other))


def _digits(number: float) -> str:
    return f"{number:.6g}"


def _index(place: int, shape: Sequence[int]) -> list[int]:
    index: list[int] = []
    for size in reversed(shape):
        place, last = divmod(place, size)
        index.insert(0, last)
    return index
