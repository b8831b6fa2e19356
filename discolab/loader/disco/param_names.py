"""Which record of a tensor-cache the functions of Disco's ShardLoader mean. Pure.

Whole parameters are ``param_0``, ``param_1`` and so on, or have names of their own. Part k of n of
a presharded one is ``param_0_shard-k-of-n``, k from 1, or ``param_0_shard-k``, k from 0.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from typing import Any

from ...runtime.errors import ArgumentError
from ..catalog import Catalog, Entry
from ..errors import CheckpointError
from ..presharded import part_of

_NUMBERED = re.compile(r"param_(0|[1-9][0-9]*)")


def pick(function: str, path: str, names: Sequence[str], index: Any) -> str:
    """The one of `names` that `index` means.

    Parameters
    ----------
    function, path
        Who asks and of which checkpoint, for messages.
    index
        A name; or ``i`` or ``[i]``: ``param_i`` if all names are such, else the i-th of `names`.

    Raises
    ------
    ArgumentError
        If there is none.
    """
    if isinstance(index, str):
        if index in names:
            return index
        near = difflib.get_close_matches(index, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ArgumentError(f"{function}: {path} has no parameter {index!r}{hint}")
    number = _as_index(function, index)
    if names and all(map(_NUMBERED.fullmatch, names)):
        name = f"param_{number}"
        if name in names:
            return name
        numbers = sorted(int(known.removeprefix("param_")) for known in names)
        raise ArgumentError(
            f"{function}: no {name!r} in {path}, which has {len(names)} parameters, "
            f"param_{numbers[0]} to param_{numbers[-1]}"
        )
    if number < len(names):
        return names[number]
    raise ArgumentError(f"{function}: no parameter {number} in {path}, which has {len(names)}")


def numbered(function: str, catalog: Catalog, names: Collection[str]) -> list[str]:
    """``param_0`` to ``param_{n-1}``, if these are the names.

    Raises
    ------
    CheckpointError
        If they are others.
    """
    wanted = [f"param_{i}" for i in range(len(names))]
    missing = [name for name in wanted if name not in names]
    if not missing:
        return wanted
    others = [name for name in names if not _NUMBERED.fullmatch(name)]
    what = f"has {others[0]!r}" if others else f"has no {missing[0]!r}"
    todo = "load one at a time, or all by name with sess.load"
    if others and part_of(others[0]):
        todo = f"its parameters are stored in parts: call {function}Presharded"
    raise CheckpointError(
        catalog.path, f"{what}, and {function} gives param_0, param_1 and so on as a list; {todo}"
    )


def parts(function: str, catalog: Catalog, rank: int, workers: int) -> dict[str, Entry]:
    """A worker's part of each presharded parameter, by the name of the whole.

    In the order of worker 0's records, so that it is the same on all workers. Parameters that are
    stored whole are everybody's.

    Raises
    ------
    CheckpointError
        If there are no parts, or not one for each worker; the same on all workers.
    """
    order: list[str] = []
    found: dict[str, dict[int, Entry]] = {}
    counts: dict[str, set[int]] = {}
    for name, entry in catalog.entries.items():
        base, part = name, 0
        shard = part_of(name)
        if shard is not None:
            base, part, count = shard
            counts.setdefault(base, set()).update([] if count is None else [count])
        if part == 0:
            order.append(base)
        if part in found.setdefault(base, {}):
            other = found[base][part].name
            raise CheckpointError(
                catalog.path, f"can't be told from {other!r}: both are worker {part}'s part", name
            )
        found[base][part] = entry
    if not counts:
        raise CheckpointError(
            catalog.path,
            f"has no parts such as 'param_0_shard-1-of-{workers}': for whole parameters call "
            f"{function.removesuffix('Presharded')}",
        )
    for base, named in counts.items():
        _check_parts(catalog.path, base, set(found[base]), named, workers)
    return {base: found[base][rank if base in counts else 0] for base in order}


def _check_parts(path: str, base: str, there: set[int], named: set[int], workers: int) -> None:
    """Whether a parameter has one part for each worker; `named`: what its names say it has."""
    count = max(named) if named else max(there) + 1
    if named - {workers} or (not named and count > workers):
        raise CheckpointError(
            path,
            f"is cut in {count} parts, and this session has {workers} workers; sess.load cuts it "
            "anew, and so does the command: discolab shard",
            base,
        )
    missing = sorted(set(range(workers)) - there)
    if missing or len(there) > workers:
        what = f"has no part for worker {missing[0]}" if missing else "has a part too many"
        numbers = ", ".join(str(part + bool(named)) for part in sorted(there))
        raise CheckpointError(path, f"{what}: it has parts {numbers}", base)


def _as_index(function: str, index: Any) -> int:
    """``i`` of ``i`` or ``[i]``."""
    given = index
    if isinstance(index, list | tuple) and len(index) == 1:
        (given,) = index
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ArgumentError(
            f"{function}: which parameter? Give its number, such as 3 or [3]; got {index!r}"
        )
    return given
