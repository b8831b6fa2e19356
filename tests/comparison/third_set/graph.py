"""A graph network: nodes over the workers, or edges over the workers."""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from discolab import Session, ccl, compare, current_worker
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

NODES, EDGES, FEATURES, WIDTH, CLASSES = 32, 160, 8, 16, 3


class Sage(nn.Module):
    """What a node is, and the mean of what its neighbours send it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.neighbour = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, h: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        messages = self.neighbour(h)[src]
        total = torch.zeros_like(h).index_add(0, dst, messages)
        degree = torch.bincount(dst, minlength=NODES)
        return gelu(self.own(h) + total / degree[:, None])


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(Sage() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        h = self.encode(x)
        for layer in self.layers:
            h = h + layer(h, src, dst)
        return self.head(self.norm(h))


# Over the workers


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


def summed(parameter: nn.Parameter) -> None:
    """Its gradient is a part of the whole on each worker."""
    parameter.register_hook(lambda grad: ccl.all_reduce(grad))


class EdgeSage(Sage):
    """Each worker has all nodes and some of the edges."""

    def forward(self, h: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        mine, to = src.chunk(world())[me()], dst.chunk(world())[me()]
        messages = self.neighbour(dist_fn.copy_to_region(h))[mine]
        total = torch.zeros_like(h).index_add(0, to, messages)
        total = dist_fn.reduce_from_region(total)
        degree = torch.bincount(dst, minlength=NODES)
        return gelu(self.own(h) + total / degree[:, None])


class NodeSage(Sage):
    """Each worker has some of the nodes, and the edges that lead to them."""

    def forward(self, h: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        first = me() * len(h)
        here = (dst >= first) & (dst < first + len(h))
        sent = dist_fn.gather_from_sequence_region(self.neighbour(h), 0)
        total = torch.zeros_like(h).index_add(0, dst[here] - first, sent[src[here]])
        degree = torch.bincount(dst[here] - first, minlength=len(h))
        return gelu(self.own(h) + total / degree[:, None])


class ShardedGraphNet(GraphNet):
    def __init__(self, whole: GraphNet, how: str) -> None:
        super().__init__()
        self.how = how
        kind = {"edges": EdgeSage, "nodes": NodeSage}[how]
        self.layers = nn.ModuleList(kind() for _ in range(2))
        self.load_state_dict(whole.state_dict())
        for name, parameter in self.named_parameters():
            if how == "nodes" or "neighbour" in name:
                summed(parameter)

    def forward(self, x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        if self.how == "edges":
            return super().forward(x, src, dst)
        out = super().forward(dist_fn.scatter_to_region(x, 0), src, dst)
        return dist_fn.gather_from_region(out, 0)


# Programs


def run(sess: Session, how: str) -> Any:
    torch.manual_seed(5)
    model = GraphNet()
    loops = torch.arange(NODES)
    src, dst = (torch.cat([loops, torch.randint(NODES, (EDGES,))]) for _ in range(2))
    sharded = sess.call_packed(ShardedGraphNet, model, how)
    return compare(model, sharded, (torch.randn(NODES, FEATURES), src, dst))


def edges(sess: Session) -> Any:
    return run(sess, "edges")


def nodes(sess: Session) -> Any:
    return run(sess, "nodes")


RIGHT = ["edges", "nodes"]

HARMLESS = [
    Bug(
        "messages are made of the neighbours of the edges",
        "edges",
        "self.neighbour(dist_fn.copy_to_region(h))[mine]",
        "self.neighbour(dist_fn.copy_to_region(h)[mine])",
    ),
    Bug(
        "the mean before the sum over the workers",
        "edges",
        """        total = dist_fn.reduce_from_region(total)
        degree = torch.bincount(dst, minlength=NODES)
        return gelu(self.own(h) + total / degree[:, None])""",
        """        degree = torch.bincount(dst, minlength=NODES)
        return gelu(self.own(h) + dist_fn.reduce_from_region(total / degree[:, None]))""",
    ),
]

BUGS = [
    Bug(
        "messages of other workers' edges not summed",
        "edges",
        "        total = dist_fn.reduce_from_region(total)\n",
        "",
        "layers.0: output (operation: index_add), forward",
        "all",
        "the sum over the workers is missing",
        found=r"layers\.0",
        accept="an all-reduce is missing",
    ),
    Bug(
        "degrees of the worker's own edges",
        "edges",
        "degree = torch.bincount(dst, minlength=NODES)\n        return gelu(self.own(h) + total / degree[:, None])\n\n\nclass NodeSage",
        "degree = torch.bincount(to, minlength=NODES).clamp(min=1)\n        return gelu(self.own(h) + total / degree[:, None])\n\n\nclass NodeSage",
        "layers.0: output (operation: bincount), forward",
        "all",
        "each worker divides by its own count",
        found=r"layers\.0",
    ),
    Bug(
        "neighbours by the worker's own numbers",
        "nodes",
        "sent[src[here]]",
        "sent[src[here] % len(h)]",
        "layers.0: output (operation: index), forward",
        "all",
        "all workers take the features of worker 0's nodes",
        found=r"layers\.0",
    ),
    Bug(
        "gradient of gathered neighbours stays where it is",
        "nodes",
        "dist_fn.gather_from_sequence_region(self.neighbour(h), 0)",
        "dist_fn.gather_from_region(self.neighbour(h), 0)",
        "layers.1.neighbour: gradient of its output, backward",
        "all",
        "the adjoint of this gather is a reduce-scatter: each worker keeps the gradient of its own edges",
        found=r"layers\.1\.neighbour\.grad",
    ),
]
