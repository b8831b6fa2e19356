"""Load a checkpoint: each worker reads its own shards, once, into their final memory.

Where only worker 0 has the files, it reads, and the others get their shards from it (`share`).
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from .. import ccl
from ..layouts.layout import Cut, Workers
from ..runtime.arguments import Pickled
from ..runtime.controller import check_timeout
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError, WaitTimeoutError
from ..runtime.functions import worker_function
from ..runtime.restart import Again
from ..runtime.session import Session
from ..runtime.worker import Worker, current_worker
from .catalog import Catalog, Copy, Piece, copies
from .errors import CheckpointError
from .formats import open_checkpoint
from .formats.checks import cast_dtype
from .formats.opening import verify as verify_files
from .plan import Plan, Resolved
from .presharded import logical
from .progress import Board, Meter, Preparation
from .read import Files, fill, new_tensor, read_entry
from .weights import Weights

if TYPE_CHECKING:
    from .plan import Resolved


@dataclass(frozen=True)
class Job:
    """What workers are asked to do; the same for all."""

    resolved: Resolved
    dtype: torch.dtype | None
    board: int
    verify: bool
    check_nan: bool
    mmap: bool
    read_by: str

    def dtype_of(self, name: str) -> torch.dtype:
        """What a parameter is once it is loaded."""
        return self.resolved.catalog.entries[name].loaded_as(self.dtype)


def load(
    session: Session,
    path: str | os.PathLike[str] | Catalog,
    plan: Any = None,
    *,
    names: str | Sequence[str] | None = None,
    dtype: Any = None,
    into: Mapping[str, DRef] | None = None,
    verify: bool = False,
    check_nan: bool = False,
    mmap: bool = True,
    read_by: Literal["each", "first"] = "each",
    progress: bool = True,
    timeout: float | None = None,
) -> Weights:
    """Load a checkpoint into shards: every worker reads the bytes of its own, and no others.

    Parameters
    ----------
    path
        A file, a folder or an index file; see `open_checkpoint`.
    plan
        How parameters are laid out, see `Plan.of`; None: a whole copy on every worker.
    names
        Globs of the parameters to load; None: all.
    dtype
        What floating-point parameters are cast to on their way; None: as they are stored.
    into
        DRefs of tensors to load into, by name, instead of new ones: several times as fast.
    verify
        Compare the files with the checksums of the index, where it has them.
    check_nan
        Refuse parameters that have a NaN or an infinity.
    mmap
        False: never map a file; see `Files`.
    read_by
        ``"each"``: every worker reads its own shards, so that each machine must have the files at
        the same path. ``"first"``: worker 0 reads, and the others get theirs from it.
    progress
        Whether to show bars if it takes more than a second.
    timeout
        Seconds in which nothing lands after which to give up; None: the session's.

    Returns
    -------
    Weights
        Parameters by name, in the order of the checkpoint.

    Raises
    ------
    CheckpointError
        If the checkpoint is not whole. Nothing of it stays on the workers; what `into` holds is
        undefined then.
    ArgumentError
        If the plan does not fit the checkpoint or the workers.
    """
    wanted = cast_dtype(dtype)
    check_timeout(timeout)
    if read_by not in ("each", "first"):
        raise ArgumentError(f'read_by= is "each" or "first", got {read_by!r}')
    with Preparation("loading", progress):
        resolved = resolve(session, path, plan, names)
        targets = _targets(resolved, into)
        totals = [resolved.bytes_on(rank, wanted) for rank in range(session.num_workers)]
        if verify:
            for number, file in enumerate(resolved.catalog.files):
                totals[number % _readers(read_by, len(totals))] += file.size if file.md5 else 0
    with Board("loading", totals, progress) as board:
        job = Job(resolved, wanted, board.number, verify, check_nan, mmap, read_by)
        loaded = session.call_packed(_load_here, Pickled(job), targets)
        placements = _placements(session, resolved)  # torch's words for it take long to import
        try:
            run(session, loaded, board, f"the load of {resolved.catalog.path}", timeout)
        except BaseException:
            del loaded  # or a traceback that somebody keeps would keep the shards
            raise
    with Preparation("loading", progress):
        refs = _named(session, resolved, loaded, into, placements)
        session.call_without_result(_close_files, loaded)
        session.call_without_result(_watch, list(refs.values()))
        how = f"read again from {os.path.basename(str(resolved.catalog.path))}"
        for name, ref in refs.items():
            Preparation.count("noting the origin of tensor")
            session.remember(ref, Again(how, _load_one, (job, name)))
    return Weights(refs, resolved, wanted)


def _named(
    session: Session,
    resolved: Resolved,
    loaded: DRef,
    into: Mapping[str, DRef] | None,
    placements: Mapping[str, tuple[Any, ...] | None],
) -> dict[str, DRef]:
    """A DRef for each parameter of what was loaded."""
    refs = {}
    for name in resolved.layouts:
        Preparation.count("naming tensor")
        ref = into[name] if into else session.call_packed(operator.getitem, loaded, name)
        if not into:
            ref.placements = placements[name]
            ref.name = name
        refs[name] = ref
    return refs


def resolve(
    session: Session,
    path: str | os.PathLike[str] | Catalog,
    plan: Any = None,
    names: str | Sequence[str] | None = None,
) -> Resolved:
    """What a load would do on the workers of `session`; reads the index alone."""
    given = None if plan is None else Plan.of(plan)
    catalog = path if isinstance(path, Catalog) else open_checkpoint(path)
    catalog = logical(catalog, given)
    resolved = (given or Plan.of(None)).resolve(catalog, workers_of(session))
    return resolved if names is None else resolved.subset(names)


def workers_of(session: Session) -> Workers:
    """The workers of a session: on its mesh, or else in its groups."""
    mesh = session._mesh
    if mesh is not None:
        return Workers(mesh.sizes, session.num_groups)
    return Workers.of(session.num_workers, session.num_groups)


def run(session: Session, ref: DRef, board: Board, what: str, timeout: float | None) -> None:
    """Wait for a call that moves bytes for as long as any land.

    Raises
    ------
    CheckpointError, ArgumentError
        If that is what has failed on a worker, with its rank.
    WorkerError, WaitTimeoutError
    """
    limit = session.timeout if timeout is None else check_timeout(timeout)

    def look() -> None:
        board.look()
        if limit is not None and time.monotonic() - board.moved_at > limit:
            raise WaitTimeoutError(
                f"{what}: nothing has landed for {limit:g} s (timeout=); "
                + ", ".join(f"worker {rank}: {n:,} B" for rank, n in enumerate(board.landed)),
                {},
            )

    ticket = session.request(session.call_packed(_is_there, ref), tell=True, what=what)
    del ref  # see `load`
    try:
        values = session.wait(ticket, float("inf"), meanwhile=look)
    except WaitTimeoutError:
        session.interrupt()
        raise
    # in order of rank, so that the same mistake is told in the same words
    failures = [values[rank] for rank in sorted(values) if not isinstance(values[rank], bool)]
    if not failures:
        return
    error = session.report(failures)
    for failure in failures:
        found = failure.exception
        if isinstance(found, CheckpointError):
            raise CheckpointError(
                found.file, f"{found.text} (worker {failure.rank})", found.parameter
            ) from None
        if isinstance(found, ArgumentError):
            raise ArgumentError(f"{found} (worker {failure.rank})") from None
    raise error


def _targets(resolved: Resolved, into: Mapping[str, DRef] | None) -> dict[str, DRef] | None:
    if into is None:
        return None
    missing = [name for name in resolved.layouts if name not in into]
    if missing:
        raise ArgumentError(
            f"into= has no tensor for {', '.join(map(repr, missing[:5]))}"
            f"{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}; load a part of the "
            "checkpoint with names="
        )
    wrong = [name for name in resolved.layouts if not isinstance(into[name], DRef)]
    if wrong:
        raise ArgumentError(
            f"into[{wrong[0]!r}] is to be a DRef, got a {type(into[wrong[0]]).__name__}"
        )
    first: dict[int, str] = {}
    for name in resolved.layouts:
        other = first.setdefault(into[name].reg_id, name)
        if other != name:
            raise ArgumentError(f"into= has one DRef for both {other!r} and {name!r}")
    return {name: into[name] for name in resolved.layouts}


def _placements(session: Session, resolved: Resolved) -> dict[str, tuple[Any, ...] | None]:
    """For the DRefs: along the workers of a group, unless there is a mesh."""
    axes = len(resolved.workers.sizes)
    placed = {}
    for layout in set(resolved.layouts.values()):
        found = layout.placements(axes)
        if found and len(found) > 1 and session._mesh is None and found[0].is_replicate():
            found = found[1:]
        placed[layout] = found
    return {name: placed[layout] for name, layout in resolved.layouts.items()}


# -- on a worker -----------------------------------------------------------------------------


class _Loaded(dict[str, torch.Tensor | None]):
    """A worker's tensors, and the files that they come from.

    Those are closed by a command of its own: to take a large mapping apart takes a tenth of the
    time of a load, and nobody need wait for that.
    """

    def __init__(self, resolved: Resolved, files: Files) -> None:
        super().__init__(dict.fromkeys(resolved.layouts))
        self.files = files


@worker_function("closing a checkpoint")
def _close_files(loaded: _Loaded) -> None:
    loaded.files.close()


@worker_function("loading a checkpoint")
def _load_here(job: Job, targets: dict[str, Any] | None) -> _Loaded:
    """The worker's shards by name; None for those that another stage holds."""
    worker = current_worker()
    rank, resolved = worker.worker_id, job.resolved
    catalog = resolved.catalog
    meter = Meter(job.board, worker)
    if job.verify:
        readers = _readers(job.read_by, worker.num_workers)
        mine = range(rank, len(catalog.files), readers) if rank < readers else ()
        verify_files(catalog, mine, meter)
    files = Files(catalog.files, job.mmap, meter, fresh=targets is None)
    loaded = _Loaded(resolved, files)

    def make(name: str, cut: Cut) -> torch.Tensor:
        if targets is not None:
            return _checked(targets[name], cut.shape, job.dtype_of(name), name)
        entry = catalog.entries[name]
        return new_tensor(files, entry, cut.shape, job.dtype_of(name), worker.device)

    def keep(name: str, tensor: torch.Tensor) -> None:
        if job.check_nan:
            _check_finite(catalog, name, tensor)
        loaded[name] = tensor

    try:
        if job.read_by == "first":
            share(resolved, files, worker, job.dtype_of, make, keep)
        else:
            for name, cut in _in_file_order(resolved, rank):
                tensor = make(name, cut)
                fill(files, catalog.entries[name], cut, tensor)
                keep(name, tensor)
        files.finish()
    except BaseException:
        files.close()
        raise
    return loaded


@worker_function("loading a checkpoint")
def _watch(tensors: list[Any]) -> None:
    """See whether somebody writes to what was loaded; else it can be read again (restart.py)."""
    worker = current_worker()
    assert worker.current is not None
    for register, tensor in zip(worker.current[3][0], tensors, strict=True):
        worker.watched.watch(register, tensor)


def _load_one(job: Job, name: str) -> torch.Tensor | None:
    """One of the shards once more, on a worker that takes the place of a lost one."""
    worker, resolved = current_worker(), job.resolved
    cut, entry = resolved.cut(name, worker.worker_id), resolved.catalog.entries[name]
    if cut is None:
        return None
    files = Files(resolved.catalog.files, job.mmap, Meter(-1, worker), fresh=True)
    try:
        tensor = read_entry(files, entry, cut, job.dtype_of(name), worker.device)
        files.finish()
    finally:
        files.close()
    return tensor


def _readers(read_by: str, workers: int) -> int:
    return workers if read_by == "each" else 1


def _in_file_order(resolved: Resolved, rank: int) -> list[tuple[str, Cut]]:
    """What this worker holds, as it lies in the files; little is worked out before it reads."""
    held = []
    for name, entry in resolved.catalog.entries.items():
        cut = resolved.cut(name, rank)
        if cut is not None:
            first: Sequence[Piece | Copy] = entry.pieces
            if len(first) > 1:  # else no matter which part of it is this worker's
                first = copies(entry, cut)
            held.append(([(one.file, one.offset) for one in first[:1]], name, cut))
    held.sort(key=operator.itemgetter(0))
    return [(name, cut) for _, name, cut in held]


def _checked(tensor: Any, shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(
            f"into[{name!r}] holds a {type(tensor).__name__} here, not a tensor of {tuple(shape)}"
        )
    why = _why_not_filled(tensor)
    if why:
        raise ArgumentError(f"into[{name!r}] {why}")
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise ArgumentError(
            f"into[{name!r}] is {tuple(tensor.shape)} {tensor.dtype}, and the shard is "
            f"{tuple(shape)} {dtype}"
        )
    return tensor.detach()


def _why_not_filled(tensor: torch.Tensor) -> str:
    """Why bytes can't be read into a tensor's memory; "" if they can."""
    if hasattr(tensor, "to_local"):
        local = "into= takes each worker's own part: sess.call_packed(lambda t: t.to_local(), ref)"
        return f"is a {type(tensor).__name__}; {local}"
    if tensor.device.type == "meta":
        return "is on the meta device, without memory: make that first, module.to_empty(device=…)"
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not plain or tensor.layout != torch.strided:
        what = type(tensor).__name__ if not plain else f"tensor of layout {tensor.layout}"
        return f"is a {what}, whose elements are not its memory: give a dense tensor"
    if any(
        step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return "was expanded: several of its elements are one in memory; give a copy, t.clone()"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazy conj or neg view: give t.resolve_conj().resolve_neg()"
    return ""


def _check_finite(catalog: Catalog, name: str, tensor: torch.Tensor) -> None:
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return
    values = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    bad = tensor.numel() - int(torch.isfinite(values).sum())
    if bad:
        raise CheckpointError(
            catalog.file_of(catalog.entries[name]),
            f"{bad:,} of the {tensor.numel():,} values of this shard are NaN or infinite",
            name,
        )


@worker_function("loading a checkpoint")
def _is_there(_loaded: Any) -> bool:
    return True


# -- where only worker 0 has the files -------------------------------------------------------------


AHEAD = 64 << 20  # bytes that worker 0 may have sent before all have come as far


def share(
    resolved: Resolved,
    files: Files,
    worker: Worker,
    dtype_of: Callable[[str], torch.dtype],
    make: Callable[[str, Cut], torch.Tensor],
    keep: Callable[[str, torch.Tensor], None],
) -> None:
    """Fill the tensors of this worker from what worker 0 reads; all workers must call it.

    Parameters
    ----------
    files
        Of the catalog; only worker 0 opens them.
    dtype_of
        What a parameter is once it is loaded.
    make
        Gives this worker's tensor for a parameter.
    keep
        Takes it once it is filled.
    """
    first = worker.worker_id == 0
    ranks = range(worker.num_workers)
    sent = 0
    for name in resolved.layouts:
        entry = resolved.catalog.entries[name]
        cuts = [resolved.cut(name, rank) for rank in ranks]
        mine = cuts[worker.worker_id]
        tensor = None if mine is None else make(name, mine)
        if first and mine is not None and tensor is not None:
            fill(files, entry, mine, tensor)
        if all(cut == cuts[0] for cut in cuts) and tensor is not None:
            ccl.broadcast_(tensor, group="world")
        else:
            for rank in ranks[1:]:
                cut = cuts[rank]
                if cut is None or not cut.numel:
                    continue
                if first:
                    ccl.send(read_entry(files, entry, cut, dtype_of(name), worker.device), rank)
                elif rank == worker.worker_id and tensor is not None:
                    ccl.recv(tensor, 0)
                sent += cut.numel * entry.dtype.itemsize
            if sent > AHEAD:
                ccl.barrier(group="world")
                sent = 0
        if tensor is not None:
            keep(name, tensor)
