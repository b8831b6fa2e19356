"""A backward at one node: its graph, differentiated by one call of autograd.

The node that runs a backward has each node walk its graph first (`Run.walk_from`), and then gives
each a plan (`Run.begin`): the level of each of its sends that take part. Gradients come in any
order and enter the graph level by level, each level when it is complete and nothing else can be
done (gates.py); so what is summed is summed in the same order always. The gradient of a tensor that
came from another node goes there as soon as it is there. It needs levels below only, and the send
there is of a level above; so nodes do not wait for each other in circles.

The context's lock guards a `Run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...runtime.errors import SessionError
from ...runtime.interrupts import waiter_here
from ..outcome import Outcome
from ..pool import ServerThread
from .contexts import Gradients, NodeContext, Recv, Send
from .gates import gates, giving
from .gradient_messages import send_gradient
from .graph import differentiate, memory, used_up, walk

Tensor = torch.Tensor

ROOTS = 0  # stands for the roots of the backward where a send's number is expected


class Roots(NamedTuple):
    """What a backward starts from, on the node that runs it."""

    edges: list[GradientEdge]
    grads: list[Tensor]
    rank: int


class _Level:
    """Sends whose gradients enter the graph together."""

    __slots__ = ("complete", "missing", "sends")

    def __init__(self, sends: Sequence[Send], missing: set[int]) -> None:
        self.sends = sends
        self.missing = missing
        self.complete = Outcome()


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
    error
        Why it has failed, None if it has not.
    """

    def __init__(
        self, context: NodeContext, key: tuple[int, int], roots: Roots | None = None
    ) -> None:
        self.context = context
        self.key = key
        self.error: BaseException | None = None
        self._roots = roots
        self._arrived: dict[int, Tensor | None] = {}
        self._levels: dict[int, _Level] = {}  # by the numbers of their sends
        self._leaves: dict[tuple[int, int], int] = {}  # a send elsewhere -> leaves to be done
        self._for_others: dict[tuple[int, int], Tensor] = {}
        self._found: Gradients = {}
        self._used: set[int] = set()
        self._task: tuple[ServerThread, Any] | None = None  # the thread that is at it, and as what
        self._retain = False
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
            graph = walk([(edge, rank) for edge in edges], recvs, context.id)
            behind[number] = [(recv.node, recv.number) for recv in graph.recvs.values()]
        return behind

    def _edges(self, number: int) -> tuple[list[GradientEdge], int]:
        """Where a send enters the graph, and its rank; under the lock."""
        if number == ROOTS and self._roots is not None:
            return self._roots.edges, self._roots.rank
        send = self._send(number)
        return [get_gradient_edge(send.entry)], send.rank

    def _send(self, number: int) -> Send:
        send = self.context.sends.get(number)
        if send is not None:
            return send
        if number in self.context.used:
            raise used_up()
        raise SessionError(f"{self.context!r} is over on node {self.context.node.id}")

    # -- the pass ----------------------------------------------------------------------------

    def begin(self, levels: Mapping[int, int], retain_graph: bool) -> None:
        """Differentiate the graph, as gradients come; back when all is done.

        Parameters
        ----------
        levels
            Of each send that takes part; 0 for the roots.
        """
        me = waiter_here()
        task = me.task if isinstance(me, ServerThread) else None
        try:
            with self.context.lock:
                if self._over:
                    raise self.error or SessionError("this backward has ended")
                if isinstance(me, ServerThread) and task is not None:
                    self._task = me, task
            self._differentiate(levels, retain_graph)
        except BaseException as exc:
            self._fail(exc)
            raise
        finally:
            with self.context.lock:
                self._task = None

    def _differentiate(self, levels: Mapping[int, int], retain_graph: bool) -> None:
        context = self.context
        roots = self._roots if ROOTS in levels else None
        edges = [] if roots is None else list(roots.edges)
        grads = [] if roots is None else list(roots.grads)
        starts = [(edge, roots.rank) for edge in edges] if roots is not None else []
        ordered: dict[int, list[int]] = {}
        for number in sorted(levels.keys() - {ROOTS}, key=lambda n: (levels[n], n)):
            ordered.setdefault(levels[number], []).append(number)
        planned: list[_Level] = []
        with context.lock:
            self._retain = retain_graph
            self._used = set(levels) - {ROOTS}
            for numbers in ordered.values():
                sends = [self._send(number) for number in numbers]
                level = _Level(sends, {n for n in numbers if n not in self._arrived})
                planned.append(level)
                starts += [(get_gradient_edge(send.entry), send.rank) for send in sends]
                self._levels |= dict.fromkeys(numbers, level)
            recvs: dict[int, Recv] = dict(context.recvs)
        graph = walk(starts, recvs, context.id)
        for recv in graph.recvs.values():
            send_there = recv.node, recv.number
            self._leaves[send_there] = self._leaves.get(send_there, 0) + 1
        taken: set[int] = set()

        def wait_for(level: _Level) -> None:
            if level.missing:
                level.complete.wait("gradients from other nodes", None)
            level.complete.result()
            with context.lock:
                self._check()
                arrived = [self._arrived.get(n) for n, of in self._levels.items() if of is level]
            taken.update(memory(grad) for grad in arrived if grad is not None)

        def send_on(key: int, grad: Tensor | None) -> None:
            if grad is not None:
                taken.add(memory(grad))
            self._send_on(graph.recvs[key], grad)

        gate = gates(
            [(partial(wait_for, level), [s.entry for s in level.sends]) for level in planned]
        )
        if gate is not None:
            edges.append(gate)
            grads.append(torch.ones(()))
        with giving(self._arrived):
            gradients = differentiate(
                graph, edges, grads, retain_graph, taken, context.node, send_on
            )
        with context.lock:
            self._check()
            self._found = gradients
            self._over = True
            self._arrived, self._levels = {}, {}

    def _check(self) -> None:
        if self._failed:
            raise self.error or SessionError("this backward has ended")

    def gradient_received(self, number: int, grad: Tensor | None) -> None:
        """For one of our sends, None if there is none; on the receiving thread."""
        with self.context.lock:
            if self._over:
                return
            self._arrived[number] = grad
            level = self._levels.get(number)
            if level is None:
                return
            level.missing.discard(number)
            complete = not level.missing
        if complete:
            level.complete.settle(None)

    def _send_on(self, recv: Recv, grad: Tensor | None) -> None:
        """Add up the gradients of a tensor from another node, and send the whole one there."""
        context = self.context
        send = recv.node, recv.number
        before = self._for_others.pop(send, None)
        if grad is not None and before is not None:
            grad = before + grad
        elif grad is None:
            grad = before
        self._leaves[send] -= 1
        if not self._leaves[send]:
            send_gradient(context, self.key, recv, grad)
        elif grad is not None:
            self._for_others[send] = grad

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
            with context.lock:
                if self._task is not None:
                    thread, task = self._task
                    thread.interrupt_task(task)

    def _fail(self, error: BaseException) -> None:
        with self.context.lock:
            if self._over:
                return
            self._over, self._failed, self.error = True, True, error
            levels = set(self._levels.values())
            self._arrived, self._levels, self._for_others, self._found = {}, {}, {}, {}
        for level in levels:
            level.complete.settle(None, SessionError("this backward was ended"))
