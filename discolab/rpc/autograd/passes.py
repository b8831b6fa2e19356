"""A backward at one node: its roots, level by level, each level one call of autograd.

The node that runs a backward has each node walk its graph first (`Run.walk_from`), and then gives
each a plan (`Run.begin`): the level of each of its sends that take part. The gradients of a send
come when those who used it have been through all levels in which they use it. Gradients come in
any order, levels are gone through in theirs, so what is summed is summed in the same order always.
No thread waits meanwhile: the gradient that completes a level has a callee run it.

The context's lock guards a `Run`; who has set `_busy` alone is in a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from ...runtime.errors import SessionError
from ...runtime.waiter import waiter_here
from ..pool import Callee
from .graph import Walk, differentiate, used_up, walk
from .records import Gradients, NodeContext, Recv

Tensor = torch.Tensor

ROOTS = 0  # stands for the roots of the backward where a send's number is expected


class Roots(NamedTuple):
    """What a backward starts from, on the node that runs it."""

    edges: list[GradientEdge]
    grads: list[Tensor]
    rank: int


class Run:
    """See the module.

    Parameters
    ----------
    context
        Of this node.
    key
        The node that runs the backward, and its number there.
    roots
        On that node.

    Attributes
    ----------
    done
        Completed once this node has nothing more to do.
    error
        Why it has failed, None if it has not.
    """

    def __init__(
        self, context: NodeContext, key: tuple[int, int], roots: Roots | None = None
    ) -> None:
        self.context = context
        self.key = key
        self.done: torch.futures.Future[None] = torch.futures.Future()
        self.error: BaseException | None = None
        self._roots = roots
        self._walks: dict[int, Walk] = {}
        self._arrived: dict[int, Tensor | None] = {ROOTS: None}
        self._levels: list[list[int]] | None = None  # numbers of sends that are still to be done
        self._users: dict[tuple[int, int], int] = {}  # a send elsewhere -> levels that lead to it
        self._for_others: dict[tuple[int, int], Tensor] = {}
        self._found: Gradients = {}
        self._used: set[int] = set()
        self._tasks: list[tuple[Any, Any]] = []  # callees that are in a pass, and their tasks
        self._retain = False
        self._busy = False
        self._over = False
        self._failed = False
        self._kept = False

    # -- discovery ---------------------------------------------------------------------------

    def walk_from(self, numbers: Iterable[int]) -> dict[int, list[tuple[int, int]]]:
        """For each of these sends the sends elsewhere, by node and number, that lie behind it."""
        context = self.context
        behind: dict[int, list[tuple[int, int]]] = {}
        for number in numbers:
            with context.lock:
                edges, rank = self._edges(number)
                recvs = dict(context.recvs)
            found = walk([(edge, rank) for edge in edges], recvs)
            with context.lock:
                self._walks[number] = found
            behind[number] = [(recv.node, recv.number) for recv in found.recvs.values()]
        return behind

    def _edges(self, number: int) -> tuple[list[GradientEdge], int]:
        """Where a send enters the graph, and its rank; under the lock."""
        if number == ROOTS and self._roots is not None:
            return self._roots.edges, self._roots.rank
        send = self.context.sends.get(number)
        if send is not None:
            return [send.edge], send.rank
        if number in self.context.used:
            raise used_up()
        raise SessionError(f"{self.context!r} is over on node {self.context.node.id}")

    # -- passes ------------------------------------------------------------------------------

    def begin(self, levels: Mapping[int, int], retain_graph: bool) -> None:
        """Go through the levels from now on, as gradients come.

        Parameters
        ----------
        levels
            Of each send that takes part; 0 for the roots.
        """
        ordered: dict[int, list[int]] = {}
        for number in sorted(levels, key=lambda n: (levels[n], n)):
            ordered.setdefault(levels[number], []).append(number)
        with self.context.lock:
            self._retain = retain_graph
            self._used = set(levels) - {ROOTS}
            for numbers in ordered.values():
                reached = {
                    (recv.node, recv.number)
                    for number in numbers
                    for recv in self._walks[number].recvs.values()
                }
                for send in reached:
                    self._users[send] = self._users.get(send, 0) + 1
            self._levels = list(ordered.values())
        if self._roots is None:
            self._go_on_as_task()
        else:
            self._go_on()

    def gradient_came(self, number: int, grad: Tensor | None) -> None:
        """For one of our sends, None if there is none; on the receiving thread."""
        with self.context.lock:
            self._arrived[number] = grad
            ready = self._is_ready()
        if ready:
            self.context.node.on_pool(self._go_on_as_task)

    def _is_ready(self) -> bool:
        """Whether there is something to do now; under the lock."""
        if self._busy or self._over or self._levels is None:
            return False
        return not self._levels or all(number in self._arrived for number in self._levels[0])

    def _go_on_as_task(self) -> None:
        """The same on a callee's thread, which `end` may interrupt: nothing else is its task."""
        me = waiter_here()
        task = me.task if isinstance(me, Callee) else None
        if task is not None:
            self._tasks.append((me, task))
        try:
            self._go_on()
        finally:
            if task is not None:
                self._tasks.remove((me, task))

    def _go_on(self) -> None:
        """Do all levels whose gradients are there; whatever is raised is this run's error."""
        lock = self.context.lock
        while True:
            with lock:
                if not self._is_ready():
                    return
                assert self._levels is not None
                last = not self._levels
                numbers = self._levels.pop(0) if not last else []
                self._busy = True
                self._over = last
            if last:
                self.done.set_result(None)
                return
            try:
                self._pass(numbers)
            except BaseException as exc:
                self._fail(exc)
                if not isinstance(exc, Exception):
                    raise
                return
            with lock:
                self._busy = False

    def _pass(self, numbers: Sequence[int]) -> None:
        """One level."""
        context = self.context
        edges: list[GradientEdge] = []
        grads: list[Tensor] = []
        ranks: list[int] = []
        with context.lock:
            reached = {
                (recv.node, recv.number): key
                for number in numbers
                for key, recv in self._walks[number].recvs.items()
            }
            for number in numbers:
                if number == ROOTS and self._roots is not None:
                    edges += self._roots.edges
                    grads += self._roots.grads
                    ranks += [self._roots.rank] * len(self._roots.edges)
                    continue
                grad = self._arrived.pop(number)
                send = context.sends.get(number)
                if send is None:
                    raise SessionError(f"{context!r} has ended, or another backward has used it up")
                if grad is not None:
                    edges.append(send.edge)
                    grads.append(grad.to(send.device))
                    ranks.append(send.rank)
            later = [n for level in self._levels or () for n in level]
            recvs: dict[int, Recv] = dict(context.recvs)
        found = self._walks[numbers[0]]
        if len(numbers) > 1:
            found = walk(zip(edges, ranks, strict=True), recvs)
        needed = self._retain or any(
            not found.nodes.keys().isdisjoint(self._walks[n].nodes.keys()) for n in later
        )
        gradients, came = differentiate(found, edges, grads, needed)
        with context.lock:
            if not later:
                self._walks = {}
            for rank, of_leaves in gradients.items():
                mine = self._found.setdefault(rank, {})
                for leaf, grad in of_leaves.items():
                    mine[leaf] = mine[leaf] + grad if leaf in mine else grad
        self._pass_on(reached, came)

    def _pass_on(self, reached: Mapping[tuple[int, int], int], came: Mapping[int, Tensor]) -> None:
        """Send the gradients that are complete now to where their tensors came from."""
        context = self.context
        for send, key in reached.items():
            grad, before = came.get(key), self._for_others.pop(send, None)
            if grad is not None and before is not None:
                grad = before + grad
            elif grad is None:
                grad = before
            self._users[send] -= 1
            if self._users[send]:
                if grad is not None:
                    self._for_others[send] = grad
                continue
            node, number = send
            context.node.post(node, "autograd.gradient", context.id, self.key, number, grad)

    # -- the end -----------------------------------------------------------------------------

    def keep(self) -> None:
        """Add what was found to the context's gradients, if all of it is here; under the lock."""
        if self._over and not self._failed and not self._kept:
            self._kept = True
            self.context.add(self._found)
            self._found = {}

    def end(self, why: str) -> None:
        """The backward is over everywhere: "", it is complete, or why it is not."""
        context = self.context
        with context.lock:
            if not why:
                self.keep()
                if not self._retain:
                    for number in self._used:
                        context.sends.pop(number, None)
                        context.used.add(number)
            context.runs.pop(self.key, None)
        if why:
            self._fail(SessionError(f"this backward was ended: {why}"))
            for callee, task in tuple(self._tasks):
                callee.interrupt_task(task)

    def _fail(self, error: BaseException) -> None:
        with self.context.lock:
            if self._over:
                return
            self._over, self._failed, self.error = True, True, error
            self._walks, self._arrived, self._for_others, self._found = {}, {}, {}, {}
        shown = error if isinstance(error, Exception) else SessionError("this backward was ended")
        self.done.set_exception(shown)  # type: ignore[arg-type]
