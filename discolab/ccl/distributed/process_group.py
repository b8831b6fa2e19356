"""The process group of torch.distributed in a worker: every operation goes to discolab's backend.

One `WorkerGroup` for each group and member; it belongs to that worker and is used on its thread.
Methods have the names and the arguments with which torch's Python and C++ code calls them: lists
of tensors and an options object. Their older names lead to them through torch's class. Ranks in
them are ranks within the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...runtime.errors import ArgumentError
from ..call import Kind
from ..work import Together
from .arguments import as_plain, check_pieces, cut, listed, pieces_of, reduction_of, root_of, scaled
from .dispatch import seen_by_torch
from .member import Member
from .works import DistWork, ReceptionWork, seconds

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]


@seen_by_torch
class WorkerGroup(Member):
    """Some workers of a session, for one of them; see `Member` for its parameters."""

    # -- reductions --------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> DistWork:
        """In place, each of `tensors`."""
        return self._all_reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> DistWork:
        """In place, all of `tensors` as one operation."""
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: Any, opts: Any) -> DistWork:
        self._check_thread(name)
        outs = as_plain(name, listed(tensors))
        reduction, factor = reduction_of(name, opts, outs)
        call = self._call(name, outs, opts, reduction=reduction)
        srcs = scaled(outs, factor)
        return self._begun(self._backend.all_reduce(call, srcs, outs, reduction), tensors)

    def reduce(self, tensors: Any, opts: Any) -> DistWork:
        """In place on the root."""
        name = "reduce"
        self._check_thread(name)
        outs = as_plain(name, listed(tensors))
        reduction, factor = reduction_of(name, opts, outs)
        root = self._member(name, root_of(opts))
        call = self._call(name, outs, opts, reduction=reduction, root=root)
        mine = outs if root == self._worker.worker_id else []
        work = self._backend.reduce(call, scaled(outs, factor), mine, reduction, root)
        return self._begun(work, tensors)

    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = None) -> DistWork:
        """Reduce lists of n tensors; each member keeps the one at its rank."""
        parts = [part for pieces in ins for part in self._by_rank(pieces)]
        return self._reduce_scatter("reduce_scatter", listed(outs), parts, opts)

    def reduce_scatter_single(self, out: Any, src: Any, opts: Any = None) -> DistWork:
        """Reduce a tensor; each member keeps one of n equal parts."""
        return self._reduce_scatter_tensors("reduce_scatter_tensor", [out], [src], opts)

    def reduce_scatter_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> DistWork:
        """As `reduce_scatter_single` for several tensors."""
        return self._reduce_scatter_tensors("reduce_scatter_tensor_coalesced", outs, ins, opts)

    def _reduce_scatter_tensors(
        self, name: str, outs: Tensors, ins: Tensors, opts: Any
    ) -> DistWork:
        parts = [
            part
            for src, out in zip(ins, outs, strict=True)
            for part in self._by_rank(pieces_of(name, src, out, len(self._ranks)))
        ]
        return self._reduce_scatter(name, outs, parts, opts)

    def _reduce_scatter(self, name: str, outs: Tensors, parts: Tensors, opts: Any) -> DistWork:
        self._check_thread(name)
        dsts, srcs = as_plain(name, outs), as_plain(name, parts, writable=False)
        check_pieces(name, srcs, dsts, len(self._ranks))
        reduction, factor = reduction_of(name, opts, dsts)
        call = self._call(name, dsts, opts, reduction=reduction, op="reduce_scatter")
        srcs = scaled(srcs, factor)
        return self._begun(self._backend.reduce_scatter(call, srcs, dsts, reduction), outs)

    # -- copies ------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any) -> DistWork:
        """From the root into the same tensors of the others."""
        name = "broadcast"
        self._check_thread(name)
        outs = as_plain(name, listed(tensors))
        root = self._member(name, root_of(opts))
        call = self._call(name, outs, opts, root=root)
        srcs = outs if root == self._worker.worker_id else []
        return self._begun(self._backend.broadcast(call, srcs, outs, root), tensors)

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> DistWork:
        """Everybody's tensor to everybody: a list of n for each input."""
        pieces = [piece for parts in outs for piece in self._by_rank(parts)]
        return self._all_gather("all_gather", pieces, listed(ins), opts)

    def allgather_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> DistWork:
        """As `allgather` of several; `outs` has a list for each member."""
        pieces = [piece for parts in zip(*outs, strict=True) for piece in self._by_rank(parts)]
        return self._all_gather("all_gather_coalesced", pieces, listed(ins), opts)

    def all_gather_single(self, out: Any, src: Any, opts: Any = None) -> DistWork:
        """Everybody's tensor, one after the other in `out`."""
        return self._all_gather_tensors("all_gather_into_tensor", [out], [src], opts)

    def all_gather_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> DistWork:
        """As `all_gather_single` of several."""
        return self._all_gather_tensors("all_gather_into_tensor_coalesced", outs, ins, opts)

    def _all_gather_tensors(self, name: str, outs: Tensors, ins: Tensors, opts: Any) -> DistWork:
        pieces = [
            piece
            for out, src in zip(outs, ins, strict=True)
            for piece in self._by_rank(pieces_of(name, out, src, len(self._ranks)))
        ]
        return self._all_gather(name, pieces, ins, opts, outs)

    def _all_gather(
        self, name: str, pieces: Tensors, ins: Tensors, opts: Any, outs: Tensors | None = None
    ) -> DistWork:
        self._check_thread(name)
        dsts, srcs = as_plain(name, pieces), as_plain(name, ins, writable=False)
        check_pieces(name, dsts, srcs, len(self._ranks))
        call = self._call(name, srcs, opts, op="all_gather")
        return self._begun(self._backend.all_gather(call, srcs, dsts), outs or pieces)

    def gather(self, outs: Any, ins: Any, opts: Any) -> DistWork:
        """Everybody's tensor to the root's list."""
        name = "gather"
        self._check_thread(name)
        srcs, root = as_plain(name, listed(ins), writable=False), self._member(name, root_of(opts))
        dsts: list[Tensor] = []
        if root == self._worker.worker_id:
            dsts = as_plain(name, self._by_rank(outs[0]))
            check_pieces(name, dsts, srcs, len(self._ranks))
        call = self._call(name, srcs, opts, root=root)
        return self._begun(self._backend.gather(call, srcs, dsts, root), dsts)

    def scatter(self, outs: Any, ins: Any, opts: Any) -> DistWork:
        """The root's list, one for each member."""
        name = "scatter"
        self._check_thread(name)
        dsts, root = as_plain(name, listed(outs)), self._member(name, root_of(opts))
        srcs: list[Tensor] = []
        if root == self._worker.worker_id:
            srcs = as_plain(name, self._by_rank(ins[0]), writable=False)
            check_pieces(name, srcs, dsts, len(self._ranks))
        call = self._call(name, dsts, opts, root=root)
        return self._begun(self._backend.scatter(call, srcs, dsts, root), outs)

    def alltoall(self, outs: Any, ins: Any, opts: Any = None) -> DistWork:
        """The i-th input to the i-th member; the i-th output from it."""
        return self._all_to_all("all_to_all", outs, self._by_rank(outs), self._by_rank(ins), opts)

    def all_to_all_single(
        self, out: Tensor, src: Tensor, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> DistWork:
        """As `alltoall` on parts of two tensors, cut along the first dimension."""
        name, n = "all_to_all_single", len(self._ranks)
        outs = self._by_rank(cut(name, "output", out, out_splits, n))
        ins = self._by_rank(cut(name, "input", src, in_splits, n))
        return self._all_to_all(name, [out], outs, ins, opts)

    def _all_to_all(
        self, name: str, whole: Tensors, outs: Tensors, ins: Tensors, opts: Any
    ) -> DistWork:
        self._check_thread(name)
        dsts, srcs = as_plain(name, outs), as_plain(name, ins, writable=False)
        for what, parts in (("outputs", dsts), ("inputs", srcs)):
            if len(parts) != len(self._ranks):
                raise ArgumentError(
                    f"{name}: {len(parts)} {what} for a group of {len(self._ranks)} workers"
                )
        kinds: tuple[Kind, ...] = ((srcs[0].dtype, None),)
        call = self._call(name, srcs, opts, op="all_to_all", kinds=kinds)
        return self._begun(self._backend.all_to_all(call, srcs, dsts), whole)

    def barrier(self, opts: Any = None) -> DistWork:
        """Over once every member has called it."""
        self._check_thread("barrier")
        return self._begun(self._backend.barrier(self._call("barrier", [], opts)), [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """As `barrier`: who does not come is told in any case."""
        self._check_thread("monitored_barrier")
        self._backend.barrier(self._call("monitored_barrier", [], None, op="barrier")).wait(
            seconds(timeout)
        )

    # -- point to point ------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> DistWork:
        """Send one tensor; copied at once."""
        self._check_thread("send")
        (src,) = as_plain("send", listed(tensors), writable=False)
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
        self._check_thread("recv")
        (out,) = as_plain("recv", listed(tensors))
        call = self._call("recv", [out], None, root=peer, asynchronous=True)
        work = self._backend.recv(call, out, peer, self._tag(tag))
        self._note(work)
        return ReceptionWork(work, out, peer, self._ranks)

    def _tag(self, tag: int) -> str:
        """Messages of different groups never meet."""
        if self._group.tag:
            return f"{tag} of group {self._group.tag} of {self._group}"
        return str(tag) if tag else ""

    # -- several operations as one -------------------------------------------------------------

    def _start_coalescing(self, device: Any = None) -> None:
        """Collect what is started from here on."""
        self._together = (self._worker.executed, [])

    def _end_coalescing(self, device: Any = None) -> DistWork:
        """All that was started since, as one."""
        (_, works), self._together = self._together, (-1, [])
        return DistWork(Together(works), [])
