"""Disco's ShardLoader: a tensor-cache checkpoint, parameter by parameter, under Disco's names.

    create = sess.get_global_func("runtime.disco.ShardLoader")
    loader = create("weights/tensor-cache.json", text_of_it, shard_info, None)
    load = sess.get_global_func("runtime.disco.ShardLoaderLoad")
    weight = load(loader, [0])

The functions are registered in `disco`. A `ShardLoader` is an object in a register of each worker,
and only that worker's thread uses it.

As in Disco, `load` is a collective of *all* workers of the session, whatever groups they are in:
worker 0 reads the parameter; one with functions in `shard_info` is put through them and scattered,
any other is broadcast. So only worker 0 needs the files and the functions; those of TVM get TVM's
tensors, over the same memory. For presharded parameters nobody meets: each worker reads its own
part. If worker 0 fails, the others' commands fail with it.

Unlike in Disco, `i` is the number in the name where all names are ``param_N``: the order of the
records is not that of the parameters once a large one was given a file of its own. With other
names, `i` counts records. Part k of n of a presharded parameter is ``param_0_shard-k-of-n``, k from
1, or ``param_0_shard-k``, k from 0. `sess.load` is faster and says by name what it loads.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ... import ccl
from ...runtime.builtin import module_get_function
from ...runtime.errors import ArgumentError, UnknownFunctionError
from ...runtime.functions import find_func
from ...runtime.worker import current_worker
from ..catalog import Catalog, Entry
from ..errors import CheckpointError
from ..formats import tensor_cache
from ..presharded import is_presharded, part_of
from ..read import Files, read_entry
from . import shard_info
from .shard_info import Step

_Pipeline = list[tuple[Step, Callable[..., Any]]]


class ShardLoader:
    """The parameters of a checkpoint on one worker.

    Parameters
    ----------
    catalog
        What the checkpoint holds.
    info
        As `shard_info.parse` gives it; for parameters that it lacks, nothing is cut.
    module
        Where functions are looked up before the registry; may be None. With the older form of
        shard_info it may be a function: the one that cuts.

    Raises
    ------
    ArgumentError
        If `info` does not fit the parameters or the number of workers.
    UnknownFunctionError
        On worker 0, if it names a function that is not there.
    """

    def __init__(self, catalog: Catalog, info: shard_info.Info, module: Any = None) -> None:
        worker = current_worker()
        self.catalog = catalog
        self._workers, self._rank = worker.num_workers, worker.worker_id
        self._parts: dict[str, Entry] = {}
        self._pipelines: dict[str, _Pipeline] = {}
        for name, entry in catalog.entries.items():
            found = info.get(name, ())
            if found != ():
                self._pipelines[name] = self._pipeline(entry, found, module)
        if self._rank == 0 and not is_presharded(catalog):
            self._warn_of_strangers(set(info) - set(catalog.entries))

    def __repr__(self) -> str:
        cut = f", {len(self._pipelines)} of them cut" if self._pipelines else ""
        return f"<ShardLoader of {self.catalog.path}: {len(self.catalog.entries)} parameters{cut}>"

    # -- Disco's methods -----------------------------------------------------------------------

    def load(self, index: Any) -> torch.Tensor:
        """This worker's part of a parameter, or all of it if it has no functions.

        A collective of all workers.

        Parameters
        ----------
        index
            ``i`` or ``[i]``, or the parameter's name.
        """
        return self._load(self._entry("ShardLoaderLoad", index))

    def load_all(self) -> list[torch.Tensor]:
        """`load` of ``param_0``, ``param_1`` and so on. A collective of all workers."""
        names = numbered("ShardLoaderLoadAll", self.catalog, self.catalog.entries)
        return [self._load(self.catalog.entries[name]) for name in names]

    def load_param_on_worker0(self, index: Any) -> torch.Tensor:
        """A whole parameter on worker 0, and an uninitialised tensor like it elsewhere."""
        entry = self._entry("ShardLoaderLoadParamOnWorker0", index)
        return self._read(entry) if self._rank == 0 else self._empty(entry)

    def load_presharded(self, index: Any) -> torch.Tensor:
        """This worker's part of a parameter that is stored in parts."""
        name = "ShardLoaderLoadPresharded"
        mine = self._my_parts(name)
        return self._read(mine[pick(name, self.catalog.path, list(mine), index)])

    def load_all_presharded(self) -> list[torch.Tensor]:
        """`load_presharded` of ``param_0``, ``param_1`` and so on."""
        name = "ShardLoaderLoadAllPresharded"
        mine = self._my_parts(name)
        wanted = numbered(name, self.catalog, mine)
        device = current_worker().device
        found = {}
        with Files(self.catalog.files) as files:
            for key in sorted(wanted, key=lambda key: _place(mine[key])):
                found[key] = read_entry(files, mine[key], device=device)
        return [found[key] for key in wanted]

    # -- one parameter -------------------------------------------------------------------------

    def _entry(self, function: str, index: Any) -> Entry:
        names = list(self.catalog.entries)
        return self.catalog.entries[pick(function, self.catalog.path, names, index)]

    def _my_parts(self, function: str) -> dict[str, Entry]:
        if not self._parts:
            self._parts = parts(function, self.catalog, self._rank, self._workers)
        return self._parts

    def _load(self, entry: Entry) -> torch.Tensor:
        steps = self._pipelines.get(entry.name, [])
        tensor = None
        if self._rank == 0:
            tensor = self._read(entry)
            for step, function in steps:
                tensor = shard_info.apply(entry.name, step, tensor, function)
        if not steps:
            tensor = self._empty(entry) if tensor is None else tensor
            ccl.broadcast_(tensor, group="world")
            return tensor
        last = steps[-1][0]
        mine = torch.empty(last.shape[1:], dtype=last.dtype, device=current_worker().device)
        ccl.scatter(tensor, group="world", out=mine.unsqueeze(0))
        return mine

    def _read(self, entry: Entry) -> torch.Tensor:
        with Files(self.catalog.files) as files:  # on a GPU it is there once they are closed
            return read_entry(files, entry, device=current_worker().device)

    def _empty(self, entry: Entry) -> torch.Tensor:
        return torch.empty(entry.shape, dtype=entry.dtype, device=current_worker().device)

    # -- functions -----------------------------------------------------------------------------

    def _pipeline(self, entry: Entry, found: Sequence[Step] | int, module: Any) -> _Pipeline:
        """Steps with their functions; workers other than 0 call none, and look none up."""
        if isinstance(found, int):
            step = shard_info.old_form(entry.name, entry.shape, entry.dtype, found, self._workers)
            func = module if _is_function(module) else None
            return [(step, partial(_slices, found, func))]
        shard_info.check_workers(entry.name, found, self._workers)
        if self._rank != 0:
            return [(step, _not_here) for step in found]
        return [(step, _function(entry.name, step, module)) for step in found]

    def _warn_of_strangers(self, strangers: Collection[str]) -> None:
        if strangers:
            first = min(strangers)
            near = difflib.get_close_matches(first, list(self.catalog.entries), n=1)
            hint = f" (is {near[0]!r} meant?)" if near else ""
            more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
            warnings.warn(
                f"shard_info has {first!r}{hint}{more}, which {self.catalog.path} has not",
                stacklevel=4,
            )


def _function(name: str, step: Step, module: Any) -> Callable[..., Any]:
    """A function by name: of the module, else of the registry."""
    if module is not None:
        try:
            found: Callable[..., Any] = module_get_function(module, step.name, True)
            return found
        except (ArgumentError, AttributeError):
            pass
    try:
        return find_func(step.name)
    except UnknownFunctionError as exc:
        where = "" if module is None else ", nor has the module one"
        raise UnknownFunctionError(f"shard_info: {name!r}: {exc}{where}") from None


def _place(entry: Entry) -> tuple[int, int]:
    """Where it lies, for reading in the order of the files."""
    return min(((piece.file, piece.offset) for piece in entry.pieces), default=(0, 0))


def _is_function(module: Any) -> bool:
    whole = isinstance(module, torch.nn.Module) or hasattr(module, "get_function")
    return callable(module) and not whole


def _slices(dim: int, func: Any, source: torch.Tensor, workers: int, out: torch.Tensor) -> None:
    shard_info.slices(source, dim, workers, out, func)


def _not_here(*_: Any) -> None:
    raise AssertionError("shard functions run on worker 0 only")


def create(path: str, text: str = "", info: Any = "", module: Any = None) -> ShardLoader:
    """A loader of the tensor-cache checkpoint at `path`.

    Parameters
    ----------
    path
        Of the index; the data files are in its folder. With `text` the index itself need not be
        there, and the data files only on the workers that read them.
    text
        The index's JSON; "": it is read from `path`.
    info
        shard_info as JSON; "" with a module that has ``get_shard_info``: what that gives.
    module
        Where shard functions are looked up first; None: only in the registry.

    Raises
    ------
    CheckpointError
        If the index is not sound, or does not fit the files that are there.
    ArgumentError, UnknownFunctionError
        As `ShardLoader`.
    """
    if not text:
        text = _read_text(Path(path))
    if not info and module is not None and not _is_function(module):
        try:
            get_shard_info = module_get_function(module, "get_shard_info")
        except (ArgumentError, AttributeError):
            pass
        else:
            given = get_shard_info()
            info = given if isinstance(given, Mapping) else str(given)  # TVM has its own str
    catalog = tensor_cache.read_text(path, text, missing_ok=True)
    if current_worker().worker_id == 0 and not is_presharded(catalog):
        _check_files(catalog)
    return ShardLoader(catalog, shard_info.parse(info), module)


def _check_files(catalog: Catalog) -> None:
    """Worker 0 reads whole parameters, so it must have their files; parts may be elsewhere."""
    for file in catalog.files:
        if not Path(file.path).exists():
            raise CheckpointError(file.path, "is not there; it holds parameters of the index")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise CheckpointError(path, f"can't be read: {reason}") from None


# -- which record is meant -------------------------------------------------------------------------

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
            f"is split in {count} parts, and this session has {workers} workers; sess.load cuts it "
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
