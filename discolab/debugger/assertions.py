"""`disco_assert`: say in a program how the workers' values go together, and have it checked.

Each check is a collective of the members of a group. They gather some hundred bytes from each:
dtype, shape, a digest. So every member learns the outcome, and the same one. Only where it does
not hold do they exchange more, to say who holds what; then all of them stop in the debugger, if
one is attached, and raise the same error. No state.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from ..ccl import checks
from ..ccl.groups import resolve
from ..runtime.errors import ArgumentError, DiscoAssertionError
from ..views.formats import cut
from .asserted import KINDS, TRUE, VALUES, Told, plain_tensor, told_of, verdict, words_of
from .given import FUNCTIONS
from .members import NAME, Members
from .stopping import stop_here


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
        Of ``sharded``: the dimension that is cut; shapes may differ in it alone.
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
            f"{NAME}: dim={dim!r}; dim is the number of the dimension in which shards are cut, "
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
        lines = [linecache.getline(code.co_filename, n).encode() for n in range(first, last + 1)]
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][begin:]
        call = ast.parse(b"".join(lines).decode().strip(), mode="eval").body
        if isinstance(call, ast.Call) and call.args:
            return cut(ast.unparse(call.args[0]), 80)
    except (SyntaxError, ValueError, IndexError):
        pass  # what it said is gone, or has changed
    return "value"
