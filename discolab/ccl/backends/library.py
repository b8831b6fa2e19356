"""A backend whose collectives are done by a library: each is a program of steps (steps.py)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from ..backend import Backend, Tensors
from ..call import Call
from ..work import Work
from . import steps


class LibraryBackend(Backend):
    """Turns every collective into a program; a subclass has its library carry that out."""

    @abstractmethod
    def _start(
        self,
        method: str,
        program: steps.Program,
        call: Call,
        srcs: Tensors,
        outs: Tensors,
        *more: Any,
    ) -> Work:
        """Start one member's program: what `method` of a backend does with the arguments."""

    def all_reduce(self, call: Call, srcs: Tensors, outs: Tensors, reduction: str) -> Work:
        """See `Backend`."""
        program = steps.reduction(reduction)
        return self._start("all_reduce", program, call, srcs, outs, reduction)

    def reduce(self, call: Call, srcs: Tensors, outs: Tensors, reduction: str, root: int) -> Work:
        """See `Backend`."""
        program = steps.reduction(reduction, call.group.index(root))
        return self._start("reduce", program, call, srcs, outs, reduction, root)

    def all_gather(self, call: Call, srcs: Tensors, outs: Tensors) -> Work:
        """See `Backend`."""
        return self._start("all_gather", steps.all_gather, call, srcs, outs)

    def reduce_scatter(self, call: Call, srcs: Tensors, outs: Tensors, reduction: str) -> Work:
        """See `Backend`."""
        program = steps.reduce_scatter(reduction)
        return self._start("reduce_scatter", program, call, srcs, outs, reduction)

    def broadcast(self, call: Call, srcs: Tensors, outs: Tensors, root: int) -> Work:
        """See `Backend`."""
        program = steps.broadcast(call.group.index(root))
        return self._start("broadcast", program, call, srcs, outs, root)

    def scatter(self, call: Call, srcs: Tensors, outs: Tensors, root: int) -> Work:
        """See `Backend`."""
        program = steps.scatter(call.group.index(root))
        return self._start("scatter", program, call, srcs, outs, root)

    def gather(self, call: Call, srcs: Tensors, outs: Tensors, root: int) -> Work:
        """See `Backend`."""
        program = steps.gather(call.group.index(root))
        return self._start("gather", program, call, srcs, outs, root)

    def all_to_all(self, call: Call, srcs: Tensors, outs: Tensors) -> Work:
        """See `Backend`."""
        return self._start("all_to_all", steps.all_to_all, call, srcs, outs)
