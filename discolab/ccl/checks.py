"""Checks of arguments that one worker can make alone, before it joins the others. No state."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..runtime import accelerators
from ..runtime.errors import ArgumentError, CollectiveError, SessionError
from ..runtime.sources import place
from ..runtime.worker import Worker, current_worker, current_worker_or_none
from .board.ledger import enter
from .call import Call, Kind, Signature, Site, call_site, kind, kind_of, timeout_of
from .groups import Group
from .reductions import MOVABLE


def calling_worker(name: str) -> Worker:
    """The worker whose thread this is.

    Raises
    ------
    SessionError
        Outside of a worker, or on another thread that a worker has started.
    """
    worker = current_worker_or_none()
    if worker is None or worker.thread_id != threading.get_ident():
        worker = current_worker()  # raises where there is none
        raise SessionError(
            f"{name} was called on a thread beside worker {worker.worker_id}'s own, which it has "
            "started or which serves a call of discolab.rpc; "
            "collectives run on the worker's own thread, in the order of its program"
        )
    return worker


def make_call(
    name: str,
    worker: Worker,
    group: Group,
    tensors: Sequence[torch.Tensor] = (),
    *,
    reduction: str | None = None,
    root: int | None = None,
    timeout: Any = None,
    async_op: bool = False,
    op: str = "",
    kinds: tuple[Kind, ...] | None = None,
    any_shape: bool = False,
) -> Call:
    """A checked call record, entered in the ledger.

    Parameters
    ----------
    tensors
        What the members must agree on in shape and dtype, unless `kinds` says otherwise.
    op
        The operation, if `name` is another one's name.
    any_shape
        Whether it is enough that the members have as many elements.

    Raises
    ------
    ArgumentError
        If `timeout` is not None or a number above 0.
    CollectiveError
        If the worker is alone at this moment.
    """
    if kinds is None:
        kinds = tuple(map(kind_of, tensors))
    device = tensors[0].device.type if tensors else None
    signature = Signature(op or name, reduction, root, kinds, device, any_shape)
    seconds = timeout_of(name, worker, timeout)
    if worker.alone:
        raise CollectiveError(
            f"{name} can't be called now: {worker.alone}, and the other workers don't take part"
        )
    call = Call(name, worker, group, signature, call_site(worker), seconds, bool(async_op))
    call.patient = timeout is not None
    if seconds is not None:
        call.due = worker.clock.now() + seconds
    enter(call)
    notice: Callable[[str, str], None] | None = getattr(_noticed, "notice", None)
    if notice is not None:
        notice(name, place(*_file_and_line(call.site)))
    if Call.watch is not None:
        Call.watch(call)
    return call


class GradientWarning(UserWarning):
    """A collective without a gradient was given a tensor that has one."""


_noticed = threading.local()
_warned: set[tuple[str, str, int]] = set()  # name, file and line; a place entered twice is no harm


def warn_of_gradient(name: str, worker: Worker) -> None:
    """Warn that autograd ends at a collective, once for each place that calls it.

    What this thread notices (`noticing_lost_gradients`) is told each time.
    """
    site = call_site(worker)
    filename, line = _file_and_line(site)
    places: list[tuple[str, str]] | None = getattr(_noticed, "places", None)
    if places is not None and (name, place(filename, line)) not in places:
        places.append((name, place(filename, line)))
    if (name, filename, line) in _warned:
        return
    _warned.add((name, filename, line))
    warnings.warn_explicit(
        f"ccl.{name} has no gradient: its result is detached from the tensor given, which requires "
        f"grad. discolab.ccl.autograd has collectives with a gradient (behind a row-parallel layer "
        f"reduce_from_region); where none is wanted, give x.detach()",
        GradientWarning,
        filename or "<unknown>",
        line,
    )


def _file_and_line(site: Site | None) -> tuple[str, int]:
    code, line = ("", 0) if site is None else site
    return str(getattr(code, "co_filename", code)), line


@contextmanager
def noticing_calls(notice: Callable[[str, str], None]) -> Iterator[None]:
    """Tell of each collective that this thread calls: its name and place."""
    before = getattr(_noticed, "notice", None)
    _noticed.notice = notice
    try:
        yield
    finally:
        _noticed.notice = before


@contextmanager
def noticing_lost_gradients() -> Iterator[list[tuple[str, str]]]:
    """Give the collectives of this thread at which autograd ends: name and place."""
    before = getattr(_noticed, "places", None)
    _noticed.places = []
    try:
        yield _noticed.places
    finally:
        _noticed.places = before


# To write their outputs does not raise the version counter that autograd looks at, as with Gloo:
# what a program has computed of a parameter before it distributes it can still be differentiated.
_UNCOUNTED = frozenset({
    "all_reduce", "reduce", "broadcast", "scatter", "all_to_all_single", "recv",
    "recv_from_worker", "recv_from_prev_group",
    "allreduce", "broadcast_from_worker0", "scatter_from_worker0", "recv_from_worker0",
})  # fmt: skip


def as_source(name: str, value: Any, what: str = "tensor") -> torch.Tensor:
    """`value` without its autograd history, if it is a tensor that can be moved.

    It has a version counter of its own; `check_output` says whether autograd learns of a write.

    Raises
    ------
    ArgumentError
        If it is no dense tensor on the CPU or a GPU, or of a dtype that can't be moved.
    """
    if not isinstance(value, torch.Tensor):
        got = "None" if value is None else f"a {type(value).__name__}"
        raise ArgumentError(f"{name}: {what} must be a tensor, got {got}")
    if value.layout is not torch.strided or value.is_nested:
        layout = "a nested" if value.is_nested else f"a {str(value.layout)[6:]}"
        raise ArgumentError(f"{name}: {what} is {layout} tensor; only dense ones can be moved")
    if not value.is_cpu and value.device.type != (accelerator := accelerators.kind()):
        others = "" if accelerator is None else f" or {accelerator!r}"
        raise ArgumentError(f"{name}: {what} is on {value.device}; use 'cpu'{others}")
    if value.dtype not in MOVABLE:
        raise ArgumentError(f"{name}: {what} is {_kind(value)}; this dtype can't be moved")
    return value.data


def as_output(
    name: str,
    out: Any,
    shape: tuple[int, ...],
    like: torch.Tensor,
    rule: str = "the same as the tensor",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result to return and the plain tensor to write to; made if `out` is None.

    Raises
    ------
    ArgumentError
        If `out` has another shape, dtype or device, or elements that share memory.
    """
    if out is None:
        made = torch.empty(shape, dtype=like.dtype, device=like.device)
        return made, made
    plain = as_source(name, out, "out")
    if tuple(out.shape) != shape or out.dtype != like.dtype:
        raise ArgumentError(
            f"{name}: out is {_kind(out)}; it must be {kind(like.dtype, shape)}, {rule}"
        )
    if out.device != like.device:
        raise ArgumentError(f"{name}: out is on {out.device}, the tensor on {like.device}")
    check_output(name, out)
    return out, plain


def as_sources(name: str, values: Any, count: int | None = None) -> list[torch.Tensor]:
    """A list of tensors on one device without their autograd history; of `count` if given.

    Raises
    ------
    ArgumentError
        If it is none, empty, or one of another length; and as for `as_source`.
    """
    if isinstance(values, torch.Tensor) or not isinstance(values, Sequence):
        raise ArgumentError(f"{name}: give a list of tensors, got {type(values).__name__}")
    if count is not None and len(values) != count:
        raise ArgumentError(
            f"{name}: got a list of {len(values)} tensors for a group of {count} workers; give one "
            "for each member"
        )
    if not values:
        raise ArgumentError(f"{name}: the list of tensors is empty")
    sources = [as_source(name, value, f"tensor {i}") for i, value in enumerate(values)]
    devices = {source.device for source in sources}
    if len(devices) > 1:
        raise ArgumentError(f"{name}: the tensors are on {', '.join(sorted(map(str, devices)))}")
    return sources


def as_outputs(
    name: str, outs: Any, shapes: Sequence[tuple[int, ...]], likes: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """`as_output` for each of a list.

    Raises
    ------
    ArgumentError
        As `as_output`; or if `outs` is a list of another length.
    """
    given: Sequence[Any] = [None] * len(likes) if outs is None else outs
    if len(given) != len(likes):
        raise ArgumentError(f"{name}: got {len(given)} outs for {len(likes)} tensors")
    made = [
        as_output(name, out, shape, like)
        for out, shape, like in zip(given, shapes, likes, strict=True)
    ]
    return [result for result, _ in made], [plain for _, plain in made]


def as_parts(
    name: str, outs: Any, sources: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The list to return and the plain tensors to write to, of any shapes, for as many parts.

    Raises
    ------
    ArgumentError
        If there is no `outs` and the sources differ in shape, or the dtypes or devices differ.
    """
    first = sources[0]
    if len({source.dtype for source in sources}) > 1:
        raise ArgumentError(f"{name}: the tensors must be of one dtype")
    if outs is None:
        if len({source.shape for source in sources}) > 1:
            raise ArgumentError(
                f"{name}: the tensors differ in shape, so only the others know the shapes of what "
                "comes from them; give out=[torch.empty(…), …]"
            )
        outs = [torch.empty(first.shape, dtype=first.dtype, device=first.device) for _ in sources]
    plain = as_sources(name, outs, len(sources))
    for out, given in zip(plain, outs, strict=True):
        if out.dtype != first.dtype or out.device != first.device:
            raise ArgumentError(
                f"{name}: out is {_kind(out)} on {out.device}, the tensors are {first.dtype} on "
                f"{first.device}"
            )
        check_output(name, given)
    return list(outs), plain


def check_output(name: str, out: torch.Tensor) -> None:
    """Refuse a tensor that overlaps itself, such as an expanded one; autograd learns of the write.

    Raises
    ------
    ArgumentError
        If several elements of `out` share memory.
    """
    if name not in _UNCOUNTED:
        torch.autograd.graph.increment_version(out)
    if out.is_contiguous() or not out.numel():
        return
    reach = 0  # elements from the first to the last, over the dimensions seen so far
    dims = sorted((s, n) for n, s in zip(out.shape, out.stride(), strict=True) if n > 1)
    for stride, size in dims:
        if stride <= reach:
            raise ArgumentError(
                f"{name}: several elements of out share memory (it is {_kind(out)} with strides "
                f"{list(out.stride())}); use out.clone()"
            )
        reach += (size - 1) * stride


def as_root(name: str, value: Any, members: Group, what: str) -> int:
    """The rank of the member that the index `value` means.

    Raises
    ------
    ArgumentError
        If it is no index into the group.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{name}: {what} must be an integer, got {value!r}")
    index = int(value.__index__())
    if not 0 <= index < len(members):
        raise ArgumentError(
            f"{name}: {what}={index} is out of range: it is an index into the group of {members}, "
            f"from 0 to {len(members) - 1}"
        )
    return members.ranks[index]


def as_peer(name: str, value: Any, worker: Worker, what: str) -> int:
    """A rank other than the worker's own.

    Raises
    ------
    ArgumentError
        If it is none.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{name}: {what} must be a rank, got {value!r}")
    rank = int(value.__index__())
    if not 0 <= rank < worker.num_workers:
        raise ArgumentError(
            f"{name}: {what}={rank} is out of range: this session has workers 0 to "
            f"{worker.num_workers - 1}"
        )
    if rank == worker.worker_id:
        raise ArgumentError(f"{name}: {what}={rank} is this worker itself; copy the tensor instead")
    return rank


def check_divides(name: str, tensor: torch.Tensor, members: Group) -> tuple[int, ...]:
    """The shape of one of the equal parts of `tensor` along its first dimension.

    Raises
    ------
    ArgumentError
        If it has no dimension, or its first size can't be divided.
    """
    n = len(members)
    if tensor.dim() == 0 or tensor.shape[0] % n:
        raise ArgumentError(
            f"{name}: the first dimension of {_kind(tensor)} can't be split into {n} equal parts, "
            f"one for each member of the group of {members}"
        )
    return (tensor.shape[0] // n, *tensor.shape[1:])


def _kind(tensor: torch.Tensor) -> str:
    return kind(tensor.dtype, tensor.shape)
