"""The process group of torch.distributed in a worker: every operation goes to discolab's backend.

One `WorkerGroup` for each group and member; it belongs to that worker and is used on its thread.
torch's Python and C++ code calls its methods by the names of torch's own class, with lists of
tensors and an options object. Their older names lead to them through that class, and what that
answers from backends of torch's own is answered here. Ranks are ranks within the group.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...runtime.errors import ArgumentError, SessionError
from ...runtime.failures import name_ranks
from ...runtime.worker import Worker
from .. import checks
from ..backend import Backend
from ..call import Call, Kind, of_script
from ..choose import backend_of
from ..groups import Group
from ..pattern import pattern_of
from ..reductions import check_reduction
from ..work import Together, Work
from .dispatch import seen_by_torch
from .works import DistWork, ReceptionWork, seconds

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]

NAME = "discolab"
_LONGEST = timedelta(minutes=30)  # torch's own default, which means: nobody has set one

# C++ code behind it calls any of several names and forms of each method
_ProcessGroup: Any = dist.ProcessGroup


@seen_by_torch
class WorkerGroup(_ProcessGroup):  # type: ignore[misc] # Any, see above
    """Some workers of a session, for one of them.

    Parameters
    ----------
    worker
        The member that this object is for.
    ranks
        Ranks among all workers, in the order of the ranks within the group.
    tag
        Tells groups of the same workers apart; the same on all members.
    timeout
        torch's limit for each operation; half an hour or more means none, for a group that can't
        complete is found without.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    options = None

    def __init__(
        self, worker: Worker, ranks: Sequence[int], tag: str, timeout: timedelta | None
    ) -> None:
        self._ranks = tuple(ranks)
        self._place = self._ranks.index(worker.worker_id)
        super().__init__(self._place, len(self._ranks))
        self._worker = worker
        self._group = Group(self._ranks, tag)
        # backends list the members by rank; a group of torch's may have another order
        self._sorted = self._group.ranks == self._ranks
        self._order = [self._ranks.index(rank) for rank in self._group.ranks]
        self._timeout = timeout
        self._name = self._desc = ""
        self._together: tuple[int, list[Work]] = (-1, [])  # of which command, what was started
        self.registered = False
        self.begun: Any = None  # keeps an operation while torch's dispatcher has it

    # -- what it is --------------------------------------------------------------------------

    def getRank(self) -> int:  # noqa: N802 - the name that torch calls
        """This worker's rank within the group."""
        return self._place

    def getSize(self) -> int:  # noqa: N802 - the name that torch calls
        """How many members there are."""
        return len(self._ranks)

    def getBackendName(self) -> str:  # noqa: N802 - the name that torch calls
        """``"discolab"``, whatever does the work."""
        return NAME

    def _get_backend_name(self) -> str:
        """What tells `ShardedTensor`, which asks on ranks without a shard, where tensors are."""
        return "gloo" if self._worker.device.type == "cpu" else NAME

    rank, size, name = getRank, getSize, getBackendName

    def setGroupName(self, name: str) -> None:  # noqa: N802 - the name that torch calls
        """Take the name under which torch registers it."""
        self._name = name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - the name that torch calls
        """Take a description."""
        self._desc = desc

    def getGroupName(self) -> str:  # noqa: N802 - the name that torch calls
        """The name under which torch has registered it."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - the name that torch calls
        """What `setGroupDesc` was given."""
        return self._desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices whose tensors it moves; none before torch has registered it."""
        if not self.registered:
            return []
        mine = self._worker.device.type
        kinds = (mine,) if self._backend.devices_only else ("cpu", mine)
        return [torch.device(kind) for kind in dict.fromkeys(kinds)]

    def _get_backend(self, device: Any) -> WorkerGroup:
        """Itself: there is one for all devices."""
        return self

    def supports_tensor_alloc(self, device: Any) -> bool:
        """That it has no memory of its own."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """The limit for operations that come with none."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Let go of the connection, if no other group of these workers has it."""
        backend_of(self._worker).forget(self._worker, self._group)

    abort = shutdown

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: discolab counts by itself."""

    def __repr__(self) -> str:
        return f"<process group of {self._group}, rank {self._place} of {len(self._ranks)}>"

    # -- the way to the backend ----------------------------------------------------------------

    @property
    def _backend(self) -> Backend:
        return backend_of(self._worker)

    def _call(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        opts: Any,
        *,
        reduction: str | None = None,
        root: int | None = None,
        op: str = "",
        kinds: tuple[Kind, ...] | None = None,
        asynchronous: bool | None = None,
    ) -> Call:
        limit = seconds(getattr(opts, "timeout", None))
        if limit is None and self._timeout is not None and self._timeout < _LONGEST:
            limit = seconds(self._timeout)
        if asynchronous is None:
            asynchronous = bool(getattr(opts, "asyncOp", True))
        return checks.make_call(
            name, self._worker, self._group, tensors, reduction=reduction, root=root,
            timeout=limit, async_op=asynchronous, op=op, kinds=kinds, any_shape=True,
        )  # fmt: skip

    def _check_thread(self, name: str) -> None:
        """Refuse another worker's thread: the group was kept where workers share it.

        Raises
        ------
        SessionError
        """
        if threading.get_ident() == self._worker.thread_id:
            return
        worker = checks.calling_worker(name)
        raise SessionError(
            f"{name}: this process group is the one of worker {self._worker.worker_id} of "
            f"{name_ranks(range(self._worker.num_workers))}, and worker {worker.worker_id} uses "
            "it. Workers share the global variables of modules: keep a process group in a "
            "variable of the cell or of an object, not in a module or a default argument"
        )

    def _member(self, name: str, place: int) -> int:
        """Which worker has this rank within the group.

        Raises
        ------
        ArgumentError
        """
        if not 0 <= place < len(self._ranks):
            role = {"send": "destination", "recv": "source"}.get(name, "root")
            raise ArgumentError(
                f"{name}: the {role} is rank {place} of the process group of "
                f"{name_ranks(self._ranks)}, whose ranks are 0 to {len(self._ranks) - 1}"
            )
        return self._ranks[place]

    def _begun(self, work: Work, tensors: Any) -> DistWork:
        self._note(work)
        return DistWork(work, _listed(tensors))

    def _note(self, work: Work) -> None:
        """Add it to what `_end_coalescing` gives as one, if that was begun in this command."""
        ordinal, works = self._together
        if ordinal == self._worker.executed:
            works.append(work)

    def _by_rank(self, parts: Sequence[Any]) -> Sequence[Any]:
        """One part for each member, in the backend's order instead of the group's."""
        if len(parts) != len(self._ranks):
            raise ArgumentError(
                f"a list of {len(parts)} tensors for a process group of {len(self._ranks)} "
                "workers; give one for each member"
            )
        return parts if self._sorted else [parts[place] for place in self._order]

    def _root(self, name: str, opts: Any) -> tuple[int, bool]:
        """The root's worker, given in options or by itself, and whether it is this one."""
        root = self._member(name, int(getattr(opts, "rootRank", opts)))
        return root, root == self._worker.worker_id

    def _cut(self, name: str, wholes: Tensors, likes: Tensors) -> list[Tensor]:
        """Each of `wholes` as a piece for each member, like the one of `likes`."""
        return [
            piece
            for whole, like in zip(wholes, likes, strict=True)
            for piece in self._by_rank(_pieces_of(name, whole, like, len(self._ranks)))
        ]

    def _plain(self, name: str, tensors: Any, *, writable: bool = True) -> list[Tensor]:
        """What this worker gives, or with `writable` gets, as plain tensors that can be moved."""
        self._check_thread(name)
        listed = _listed(tensors)
        plain = [checks.as_source(name, tensor) for tensor in listed]
        for tensor in listed if writable else ():
            checks.check_output(name, tensor)
        return plain

    def _start(
        self,
        name: str,
        srcs: Tensors,
        outs: Tensors,
        agreed: Tensors,
        opts: Any,
        result: Any,
        *,
        op: str = "",
        reduce: bool = False,
        root: int | None = None,
        kinds: tuple[Kind, ...] | None = None,
    ) -> DistWork:
        """Start a collective; its members must agree on what the tensors `agreed` are like."""
        reduction = None
        if reduce:
            reduction, factor = _reduction_of(name, opts, agreed)
            if factor is not None:
                srcs = [src * factor for src in srcs]
        call = self._call(name, agreed, opts, reduction=reduction, root=root, op=op, kinds=kinds)
        pattern = pattern_of(op or name, self._group, srcs, outs, reduction, root)
        return self._begun(self._backend.start(call, pattern, srcs, outs), result)

    # -- reductions --------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> DistWork:
        """In place, each of `tensors`."""
        outs = self._plain("all_reduce", tensors)
        return self._start("all_reduce", outs, outs, outs, opts, tensors, reduce=True)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> DistWork:
        """In place, all of `tensors` as one operation."""
        outs = self._plain("all_reduce_coalesced", tensors)
        return self._start("all_reduce_coalesced", outs, outs, outs, opts, tensors, reduce=True)

    def reduce(self, tensors: Any, opts: Any) -> DistWork:
        """In place on the root."""
        srcs, (root, here) = self._plain("reduce", tensors), self._root("reduce", opts)
        outs = srcs if here else []
        return self._start("reduce", srcs, outs, srcs, opts, tensors, reduce=True, root=root)

    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = None) -> DistWork:
        """Reduce lists of n tensors; each member keeps the one at its rank."""
        parts = [part for pieces in ins for part in self._by_rank(pieces)]
        return self._reduce_scatter("reduce_scatter", _listed(outs), parts, opts)

    def reduce_scatter_single(self, out: Any, src: Any, opts: Any = None) -> DistWork:
        """Reduce a tensor; each member keeps one of n equal parts."""
        name = "reduce_scatter_tensor"
        return self._reduce_scatter(name, [out], self._cut(name, [src], [out]), opts)

    def reduce_scatter_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> DistWork:
        """As `reduce_scatter_single` for several tensors."""
        name = "reduce_scatter_tensor_coalesced"
        return self._reduce_scatter(name, outs, self._cut(name, ins, outs), opts)

    def _reduce_scatter(self, name: str, outs: Tensors, parts: Tensors, opts: Any) -> DistWork:
        dsts, srcs = self._plain(name, outs), self._plain(name, parts, writable=False)
        _check_pieces(name, srcs, dsts, len(self._ranks))
        return self._start(name, srcs, dsts, dsts, opts, outs, op="reduce_scatter", reduce=True)

    # -- copies ------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any) -> DistWork:
        """From the root into the same tensors of the others."""
        outs, (root, here) = self._plain("broadcast", tensors), self._root("broadcast", opts)
        return self._start("broadcast", outs if here else [], outs, outs, opts, tensors, root=root)

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> DistWork:
        """Everybody's tensor to everybody: a list of n for each input."""
        pieces = [piece for parts in outs for piece in self._by_rank(parts)]
        return self._all_gather("all_gather", pieces, _listed(ins), opts)

    def allgather_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> DistWork:
        """As `allgather` of several; `outs` has a list for each member."""
        pieces = [piece for parts in zip(*outs, strict=True) for piece in self._by_rank(parts)]
        return self._all_gather("all_gather_coalesced", pieces, _listed(ins), opts)

    def all_gather_single(self, out: Any, src: Any, opts: Any = None) -> DistWork:
        """Everybody's tensor, one after the other in `out`."""
        name = "all_gather_into_tensor"
        return self._all_gather(name, self._cut(name, [out], [src]), [src], opts, [out])

    def all_gather_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> DistWork:
        """As `all_gather_single` of several."""
        name = "all_gather_into_tensor_coalesced"
        return self._all_gather(name, self._cut(name, outs, ins), ins, opts, outs)

    def _all_gather(
        self, name: str, pieces: Tensors, ins: Tensors, opts: Any, outs: Tensors | None = None
    ) -> DistWork:
        dsts, srcs = self._plain(name, pieces), self._plain(name, ins, writable=False)
        _check_pieces(name, dsts, srcs, len(self._ranks))
        return self._start(name, srcs, dsts, srcs, opts, outs or pieces, op="all_gather")

    def gather(self, outs: Any, ins: Any, opts: Any) -> DistWork:
        """Everybody's tensor to the root's list."""
        srcs = self._plain("gather", ins, writable=False)
        root, here = self._root("gather", opts)
        dsts: list[Tensor] = []
        if here:
            dsts = self._plain("gather", self._by_rank(outs[0]))
            _check_pieces("gather", dsts, srcs, len(self._ranks))
        return self._start("gather", srcs, dsts, srcs, opts, dsts, root=root)

    def scatter(self, outs: Any, ins: Any, opts: Any) -> DistWork:
        """The root's list, one for each member."""
        dsts, (root, here) = self._plain("scatter", outs), self._root("scatter", opts)
        srcs: list[Tensor] = []
        if here:
            srcs = self._plain("scatter", self._by_rank(ins[0]), writable=False)
            _check_pieces("scatter", srcs, dsts, len(self._ranks))
        return self._start("scatter", srcs, dsts, dsts, opts, outs, root=root)

    def alltoall(self, outs: Any, ins: Any, opts: Any = None) -> DistWork:
        """The i-th input to the i-th member; the i-th output from it."""
        return self._all_to_all("all_to_all", outs, self._by_rank(outs), self._by_rank(ins), opts)

    def all_to_all_single(
        self, out: Tensor, src: Tensor, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> DistWork:
        """As `alltoall` on parts of two tensors, cut along the first dimension."""
        name, n = "all_to_all_single", len(self._ranks)
        outs = self._by_rank(_parts(name, "output", out, out_splits, n))
        ins = self._by_rank(_parts(name, "input", src, in_splits, n))
        return self._all_to_all(name, [out], outs, ins, opts)

    def _all_to_all(
        self, name: str, whole: Tensors, outs: Tensors, ins: Tensors, opts: Any
    ) -> DistWork:
        dsts, srcs = self._plain(name, outs), self._plain(name, ins, writable=False)
        for what, parts in (("outputs", dsts), ("inputs", srcs)):
            if len(parts) != len(self._ranks):
                raise ArgumentError(
                    f"{name}: {len(parts)} {what} for a group of {len(self._ranks)} workers"
                )
        kinds: tuple[Kind, ...] = ((srcs[0].dtype, None),)
        return self._start(name, srcs, dsts, srcs, opts, whole, op="all_to_all", kinds=kinds)

    def barrier(self, opts: Any = None) -> DistWork:
        """Over once every member has called it."""
        self._check_thread("barrier")
        return self._begun(self._backend.barrier(self._call("barrier", [], opts)), [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """As `barrier`: the error names the ranks that did not come."""
        self._check_thread("monitored_barrier")
        self._backend.barrier(self._call("monitored_barrier", [], None, op="barrier")).wait(
            seconds(timeout)
        )

    # -- point to point ------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> DistWork:
        """Send one tensor; copied at once."""
        (src,) = self._plain("send", tensors, writable=False)
        peer = self._member("send", dst)
        call = self._call("send", [src], None, root=peer)
        return self._begun(self._backend.send(call, src, peer, self._tag(tag)), tensors)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> DistWork:
        """Receive the next tensor of one member."""
        return self._receive(tensors, self._member("recv", src), tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> DistWork:
        """Receive the next tensor of any member."""
        return self._receive(tensors, None, tag)

    recvAnysource = recv_anysource  # noqa: N815 - the name that torch calls

    def _receive(self, tensors: Any, peer: int | None, tag: int) -> DistWork:
        (out,) = self._plain("recv", tensors)
        call = self._call("recv", [out], None, root=peer, asynchronous=True)
        work = self._backend.recv(call, out, peer, self._tag(tag))
        self._note(work)
        return ReceptionWork(work, out, peer, self._ranks)

    def _tag(self, tag: int) -> str:
        """Messages of different groups never meet."""
        words = str(tag) if tag else ""
        if self._group.tag:
            words = f"{tag} of group {self._group.tag} of {self._group}"
        return of_script(self._worker, words)

    # -- several operations as one -------------------------------------------------------------

    def _start_coalescing(self, device: Any = None) -> None:
        """Collect what is started from here on."""
        self._together = (self._worker.executed, [])

    def _end_coalescing(self, device: Any = None) -> DistWork:
        """All that was started since, as one."""
        (_, works), self._together = self._together, (-1, [])
        return DistWork(Together(works), [])


_REDUCTIONS = {
    "SUM": "sum", "AVG": "avg", "PRODUCT": "prod", "MIN": "min", "MAX": "max",
    "BAND": "band", "BOR": "bor", "BXOR": "bxor", "PREMUL_SUM": "sum",
}  # fmt: skip


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _reduction_of(name: str, opts: Any, tensors: Tensors) -> tuple[str, Any]:
    """discolab's word for the reduction in `opts`, and what to multiply with before."""
    op: Any = getattr(opts, "reduceOp", dist.ReduceOp.SUM if opts is None else opts)
    kind = getattr(op, "op", op)
    word = _REDUCTIONS.get(getattr(kind, "name", ""))
    if word is None:
        raise ArgumentError(f"{name}: torch's {kind} is not known here")
    for tensor in tensors:
        check_reduction(name, word, tensor.dtype)
    factor = op.__getstate__()[1] if kind.name == "PREMUL_SUM" else None
    return word, factor


def _pieces_of(name: str, whole: Tensor, like: Tensor, n: int) -> list[Tensor]:
    """`whole` as n tensors in the shape of `like`, be it n of them in a row or stacked."""
    if whole.numel() != n * like.numel():
        raise ArgumentError(
            f"{name}: {whole.numel()} elements for {n} workers with {like.numel()} each"
        )
    if whole.is_contiguous():
        return list(whole.detach().view(n, *like.shape).unbind(0))
    if whole.dim() == like.dim() + 1:
        return list(whole.detach().unbind(0))
    if whole.dim() == like.dim() and like.dim() and whole.shape[1:] == like.shape[1:]:
        return list(whole.detach().unflatten(0, (n, -1)).unbind(0))
    raise ArgumentError(f"{name}: the tensor that is split must be contiguous; use .contiguous()")


def _check_pieces(name: str, pieces: Tensors, likes: Tensors, n: int) -> None:
    """n pieces for each of `likes`, of its dtype and size."""
    if len(pieces) != n * len(likes):
        raise ArgumentError(f"{name}: {len(pieces)} tensors for {len(likes)} in a group of {n}")
    for k, like in enumerate(likes):
        for piece in pieces[k * n : (k + 1) * n]:
            if piece.shape != like.shape or piece.dtype != like.dtype:
                raise ArgumentError(
                    f"{name}: {piece.dtype}{list(piece.shape)} stands opposite "
                    f"{like.dtype}{list(like.shape)}; shape and dtype must be the same"
                )


def _parts(name: str, what: str, tensor: Tensor, splits: Any, n: int) -> list[Tensor]:
    """Parts along the first dimension, equal ones without `splits`."""
    size = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if size % n:
            raise ArgumentError(
                f"{name}: the first dimension of the {what}, {size}, can't be split into {n} equal "
                f"parts; give {what}_split_sizes"
            )
        splits = [size // n] * n
    if len(splits) != n or sum(splits) != size:
        raise ArgumentError(
            f"{name}: {what}_split_sizes {list(splits)} must be {n} numbers that add up to {size}"
        )
    return list(checks.as_source(name, tensor).split(list(splits)))
