"""A recommender: embedding tables over the workers, the dense part over the batch."""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from discolab import Session, ccl, compare, current_worker, note
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

TABLES, ROWS, WIDTH, BATCH, DENSE, HIDDEN = 8, 20, 8, 16, 6, 16


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {str(i): nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for i in range(TABLES)}
        )
        self.bottom = nn.Sequential(nn.Linear(DENSE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
        pairs = TABLES * (TABLES + 1) // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def features(self, ids: Tensor) -> Tensor:
        return torch.stack([self.tables[str(i)](ids[:, i]) for i in range(TABLES)], 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        d, features = self.bottom(dense), note("features", self.features(ids))
        z = torch.cat([d[:, None], features], 1)
        first, second = torch.triu_indices(TABLES + 1, TABLES + 1, 1)
        return self.top(torch.cat([d, (z @ z.mT)[:, first, second]], -1))[:, 0]


# Over the workers


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


class ShardedRecommender(Recommender):
    def __init__(self, whole: Recommender) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())
        held = TABLES // world()
        mine = range(me() * held, me() * held + held)
        self.tables = nn.ModuleDict({str(i): self.tables[str(i)] for i in mine})
        for layer in (self.bottom, self.top):
            for parameter in layer.parameters():
                parameter.register_hook(lambda grad: ccl.all_reduce(grad))

    def features(self, ids: Tensor) -> Tensor:
        """Looked up for all of the batch in the worker's tables, sent to whom the rows belong."""
        mine = torch.stack([table(ids[:, int(i)]) for i, table in self.tables.items()], 1)
        come = dist_fn.all_to_all(mine)
        return come.unflatten(0, (world(), -1)).transpose(0, 1).flatten(1, 2)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        out = super().forward(dist_fn.scatter_to_region(dense, 0), ids)
        return dist_fn.gather_from_region(out, 0)


# Programs


def seeded() -> tuple[Recommender, Tensor, Tensor]:
    torch.manual_seed(11)
    return Recommender(), torch.randn(BATCH, DENSE), torch.randint(ROWS, (BATCH, TABLES, 3))


def tables(sess: Session) -> Any:
    model, dense, ids = seeded()
    return compare(model, sess.call_packed(ShardedRecommender, model), (dense, ids))


def step(model: Recommender, dense: Tensor, ids: Tensor, clicks: Tensor) -> Tensor:
    """Two steps of Adagrad; the loss after them."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = note("loss", bce(model(dense, ids), clicks))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return bce(model(dense, ids), clicks)


def training(sess: Session) -> Any:
    model, dense, ids = seeded()
    sharded = sess.call_packed(ShardedRecommender, model)
    clicks = torch.randint(2, (BATCH,)).float()
    run = sess.call_packed(partial, step, sharded)
    return compare(partial(step, model), run, (dense, ids, clicks), module=sharded)


RIGHT = ["tables", "training"]

HARMLESS = [
    Bug(
        "tables are looked up in another order",
        "tables",
        "for i, table in self.tables.items()], 1)",
        "for i, table in reversed(self.tables.items())][::-1], 1)",
    ),
]

BUGS = [
    Bug(
        "features in the order of arrival",
        "tables",
        "come.unflatten(0, (world(), -1)).transpose(0, 1).flatten(1, 2)",
        "come.reshape(-1, TABLES, WIDTH)",
        "note features, forward",
        "all",
        "what comes from a worker lies behind what comes from the one before: rows and tables are mixed",
        found="features",
    ),
    Bug(
        "bags are averaged on worker 1",
        "tables",
        "        held = TABLES // world()\n",
        "        held = TABLES // world()\n        if me() == 1:\n            for table in self.tables.values():\n                table.mode = 'mean'\n",
        "tables.2: output, forward",
        (1,),
        "mode='mean' on worker 1",
        found=r"tables\.2",
        accept=r"mode|is 0\.3333 times the reference$",
    ),
    Bug(
        "gradient of the bottom not summed",
        "tables",
        "        for layer in (self.bottom, self.top):",
        "        for layer in (self.top,):",
        "gradient of a parameter of bottom",
        "all",
        "each worker has the gradient of its part of the batch",
        found=r"bottom\.\d\.(weight|bias)\.grad",
        accept="the all-reduce of this gradient is missing",
    ),
    Bug(
        "dense gradients are averaged, the tables' are not",
        "tables",
        "lambda grad: ccl.all_reduce(grad))",
        "lambda grad: ccl.all_reduce(grad, 'avg'))",
        "gradient of a parameter of top or bottom (or, if the dense ones count as right, of a table)",
        "all",
        "averaged where a sum belongs",
        found=r"(top|bottom)\.\d\.(weight|bias)\.grad",
        accept="the reference / 4",
    ),
]
