"""Running a backward: find what takes part, give each node its plan, wait until all are done.

No state but a counter. The node on which it is called runs it:

1. Discovery. The graph is walked from the roots to its leaves. Leaves that came from other nodes
   name sends there, from which these nodes walk on, and so forth. So sends that the roots do not
   depend on take no part.
2. Levels. A send is one level above the highest one of those that lead to it: of a node, what is of
   one level can be run at once, and its gradients are complete by then.
3. The pass. Each node differentiates its graph once, and takes gradients in level by level as they
   come (node_backward.py).

A backward that leaves no node is one call of `torch.autograd.grad`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ...runtime.errors import DiscoError, WaitTimeoutError
from ...runtime.interrupts import shield
from ..context import current_node
from ..futures import ask_node
from ..node import Node, rank_on
from ..outcome import copy_of
from .contexts import NodeContext, over, running_in
from .gradient_messages import send_over
from .graph import differentiate, walk
from .node_backward import ROOTS, Roots, Run

Tensor = torch.Tensor
Key = tuple[int, int]  # of a backward: node, number; of a send: the same

_END_SECONDS = 5.0  # for nodes to let go of a backward that has failed

_numbers = itertools.count(1)


def run_backward(
    node: Node, rank: int, context: NodeContext, roots: Sequence[Tensor], retain_graph: bool
) -> None:
    """See `autograd.backward`; `rank` is the caller's."""
    start = Roots(
        [get_gradient_edge(root) for root in roots],
        [torch.ones_like(root, memory_format=torch.contiguous_format) for root in roots],
        rank,
    )
    with context.lock:
        recvs = dict(context.recvs)
    graph = walk([(edge, rank) for edge in start.edges], recvs, context.id)
    if graph.recvs:
        Backward(node, context, start, retain_graph).run()
        return
    gradients = differentiate(graph, start.edges, start.grads, retain_graph, set(), node)
    with context.lock:
        if context.closed:
            raise over(context)
        context.add(gradients)


class Backward:
    """One that takes other nodes too."""

    def __init__(self, node: Node, context: NodeContext, roots: Roots, retain_graph: bool) -> None:
        self.node = node
        self.context = context
        self.retain_graph = retain_graph
        self.key = node.id, next(_numbers)
        self.mine = Run(context, self.key, roots)
        self.others: set[int] = set()  # nodes that have heard of it
        self.answers: list[Any] = []  # futures of what was asked
        self.errors: list[BaseException] = []
        self.timeout = node.seconds(None, rank_on(node))
        self.deadline = None if self.timeout is None else time.monotonic() + self.timeout

    def run(self) -> None:
        """All of it; the context's gradients are untouched if it fails."""
        with self.context.lock:
            if self.context.closed:
                raise over(self.context)
            self.context.runs[self.key] = self.mine
        try:
            with running_in(None):  # what follows is not part of any context
                self._passes(levels_of(self._discover()))
        except Exception as exc:
            self._end_failed(f"{type(exc).__name__}: {exc}"[:500])
            raise
        except BaseException:
            self._end("it was interrupted")
            raise
        else:
            self._end("")
        finally:  # an error has our frames, which have us: no cycles that keep graphs alive
            self.errors, self.answers, self.mine.error = [], [], None

    # -- discovery ---------------------------------------------------------------------------

    def _discover(self) -> dict[Key, list[Key]]:
        """For the roots and each send that takes part: the sends that it leads to."""
        me = self.node.id
        behind: dict[Key, list[Key]] = {}
        todo = {me: {ROOTS}}
        while todo:
            answers: dict[int, Any] = {
                node: self._ask(node, walk_here, sorted(numbers))
                for node, numbers in todo.items()
                if node != me
            }
            edges_of = {}
            if me in todo:
                edges_of[me] = self.mine.walk_from(sorted(todo[me]))
            for node, answer in answers.items():
                edges_of[node] = self._wait(answer)
            todo = {}
            for node, edges in edges_of.items():
                behind |= {(node, number): [(n, m) for n, m in to] for number, to in edges.items()}
            for edges in edges_of.values():
                for to in edges.values():
                    for n, m in to:
                        if (n, m) not in behind:
                            todo.setdefault(n, set()).add(m)
        return behind

    # -- passes ------------------------------------------------------------------------------

    def _passes(self, levels: Mapping[Key, int]) -> None:
        me = self.node.id
        plans: dict[int, dict[int, int]] = {me: {}}
        for (node, number), level in levels.items():
            plans.setdefault(node, {})[number] = level
        own = plans.pop(me)
        waits = [self._start_pass(node, plan) for node, plan in plans.items()]
        if len(own) > 1:  # a thread that can be stopped at the deadline
            waits.append(self._start_pass(me, own))
        elif not self.errors:
            try:
                self.mine.begin(own, self.retain_graph)
            except Exception:
                if self.errors:  # that is why it was ended here
                    raise copy_of(self.errors[0]) from None
                raise
        try:
            while waits:
                self._wait(waits.pop(0))
        except WaitTimeoutError:
            raise
        except Exception as exc:
            self.errors.append(exc)
        finally:  # torch's futures hold what Python's collector can't see, and our frame them
            waits.clear()
        if self.errors:
            raise copy_of(self.errors[0])

    def _start_pass(self, node: int, plan: dict[int, int]) -> Any:
        """Have a node run its pass; the first one that fails ends it for all nodes."""
        answer = self._ask(node, pass_here, plan, self.retain_graph)
        answer.add_done_callback(self._pass_ended)
        return answer

    def _pass_ended(self, answer: Any) -> None:
        try:
            answer.value()
        except BaseException as exc:
            self.errors.append(copy_of(exc))
            if len(self.errors) == 1:
                self._end("it failed on another node")

    # -- others ------------------------------------------------------------------------------

    def _ask(self, node: int, func: Any, *args: Any) -> Any:
        if node != self.node.id:
            self.others.add(node)
        answer = ask_node(self.node, node, func, self.context.id, self.key, *args)
        self.answers.append(answer)
        return answer

    def _wait(self, answer: Any) -> Any:
        left = None if self.deadline is None else max(0.001, self.deadline - time.monotonic())
        try:
            return answer.wait(left)
        except WaitTimeoutError:
            if self.deadline is None or time.monotonic() < self.deadline:
                raise
            raise WaitTimeoutError(
                f"backward gave up after {self.timeout:g} s (rpc.DEFAULT_TIMEOUT, or the session's "
                "timeout from the controller)"
            ) from None

    def _end(self, why: str) -> None:
        """Tell all nodes that the backward is over."""
        with shield():  # or some would never hear of it
            for node in tuple(self.others):
                if node not in self.node.lost:
                    try:
                        send_over(self.context, self.key, node, why)
                    except DiscoError:  # the session ends
                        pass
            self.mine.end(why)
            if why:
                for answer in tuple(self.answers):
                    answer.cancel()

    def _end_failed(self, why: str) -> None:
        """Tell all nodes, and wait until they have released what they had found."""
        self._end(why)
        try:
            with running_in(None):
                waits = [
                    ask_node(self.node, node, end_here, self.context.id, self.key, why)
                    for node in self.others
                    if node not in self.node.lost
                ]
                for wait in waits:
                    wait.wait(_END_SECONDS)
        except Exception:  # the caller is to see why it failed
            pass


def levels_of(behind: Mapping[Key, Sequence[Key]]) -> dict[Key, int]:
    """For each send the length of the longest path that leads to it."""
    leading = dict.fromkeys(behind, 0)
    for to in behind.values():
        for send in to:
            leading[send] += 1
    levels = {send: 0 for send, count in leading.items() if not count}
    ready = list(levels)
    for send in ready:  # grows
        for after in behind[send]:
            levels[after] = max(levels.get(after, 0), levels[send] + 1)
            leading[after] -= 1
            if not leading[after]:
                ready.append(after)
    assert len(ready) == len(behind), "a tensor depends on itself"
    return levels


# -- what runs on the nodes, asked by the one that runs the backward -----------------------------


def _run(id: int, key: Sequence[int]) -> Run:
    context: NodeContext = current_node().autograd.context_of(id)
    with context.lock:
        if context.closed:
            raise over(context)
        run = context.runs.get((key[0], key[1]))
        if run is None:
            run = context.runs[key[0], key[1]] = Run(context, (key[0], key[1]))
        assert isinstance(run, Run)
        return run


def walk_here(id: int, key: Sequence[int], numbers: Sequence[int]) -> dict[int, list[Key]]:
    """`Run.walk_from` on this node."""
    return _run(id, key).walk_from(numbers)


def pass_here(id: int, key: Sequence[int], levels: Mapping[int, int], retain_graph: bool) -> None:
    """`Run.begin` on this node; back when it is done."""
    _run(id, key).begin(levels, retain_graph)


def end_here(id: int, key: Sequence[int], why: str) -> None:
    """The backward has failed."""
    run = current_node().autograd.contexts.run(id, key)
    if run is not None:
        run.end(why)
