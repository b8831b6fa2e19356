"""A vocabulary split over the workers: local ids, rows of zeros, and a loss over parts."""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from discolab import Session, ccl, compare, current_worker, note
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

VOCABULARY, WIDTH, LENGTH = 32, 16, 8


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tokens to logits, with the embedding and the loss in functions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.mlps = nn.ModuleList(MLP() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        return self.words(ids)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(LENGTH))
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.head(self.norm(x))


class Losing(Model):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.loss(note("logits", super().forward(ids)), targets)


# Over the workers


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


def part(weight: Tensor, dim: int = 0) -> nn.Parameter:
    return nn.Parameter(weight.detach().chunk(world(), dim)[me()].clone())


class SplitMLP(MLP):
    def __init__(self, whole: MLP) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())
        self.up.weight, self.up.bias = part(whole.up.weight), part(whole.up.bias)
        self.down.weight = part(whole.down.weight, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.up(dist_fn.copy_to_region(self.norm(x))))
        return dist_fn.reduce_from_region(F.linear(h, self.down.weight)) + self.down.bias


class Split:
    """What both models do over the workers."""

    def split(self: Any, whole: Model) -> None:
        self.load_state_dict(whole.state_dict())
        self.words.weight = part(whole.words.weight)
        self.head.weight = part(whole.head.weight)
        self.mlps = nn.ModuleList(SplitMLP(mlp) for mlp in whole.mlps)

    def embed(self: Any, ids: Tensor) -> Tensor:
        size = len(self.words.weight)
        local = ids - me() * size
        outside = (local < 0) | (local >= size)
        rows = self.words(local.masked_fill(outside, 0))
        rows = rows.masked_fill(outside[..., None], 0)
        return dist_fn.reduce_from_region(rows)


class SplitModel(Split, Model):
    def __init__(self, whole: Model) -> None:
        super().__init__()
        self.split(whole)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(LENGTH))
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.head(dist_fn.copy_to_region(self.norm(x)))


class SplitLosing(Split, Losing):
    def __init__(self, whole: Losing) -> None:
        super().__init__()
        self.split(whole)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits, targets = logits.flatten(0, 1), targets.flatten()
        most = ccl.all_reduce(logits.detach().amax(1), op="max")
        logits = logits - most[:, None]
        total = dist_fn.reduce_from_region(logits.exp().sum(1))
        size = logits.shape[1]
        local = targets - me() * size
        outside = (local < 0) | (local >= size)
        wanted = logits.gather(1, local.masked_fill(outside, 0)[:, None])[:, 0]
        wanted = dist_fn.reduce_from_region(wanted.masked_fill(outside, 0))
        return (total.log() - wanted).mean()

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(LENGTH))
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.loss(note("logits", self.head(dist_fn.copy_to_region(self.norm(x)))), targets)


# Programs


def logits(sess: Session, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    model = Model().to(dtype)
    return compare(
        model, sess.call_packed(SplitModel, model), torch.randint(VOCABULARY, (2, LENGTH))
    )


def coarse(sess: Session) -> Any:
    torch.manual_seed(3)
    model = Model().bfloat16()
    sharded = sess.call_packed(coarse_model, model)
    return compare(model, sharded, torch.randint(VOCABULARY, (2, LENGTH)))


def coarse_model(whole: Model) -> nn.Module:
    return SplitModel(whole).bfloat16()


def loss(sess: Session) -> Any:
    torch.manual_seed(3)
    model = Losing()
    ids, targets = torch.randint(VOCABULARY, (2, 2, LENGTH))
    return compare(model, sess.call_packed(SplitLosing, model), (ids, targets))


RIGHT = ["logits", "coarse", "loss"]

HARMLESS = [
    Bug(
        "rows are made zero by a product",
        "logits",
        "rows = rows.masked_fill(outside[..., None], 0)",
        "rows = rows * (~outside)[..., None]",
    ),
]

BIAS = "the bias is added on every worker before the sum"
BUGS = [
    Bug(
        "bias before the sum, after a split vocabulary",
        "logits",
        "return dist_fn.reduce_from_region(F.linear(h, self.down.weight)) + self.down.bias",
        "return dist_fn.reduce_from_region(F.linear(h, self.down.weight, self.down.bias))",
        "mlps.0: output, forward",
        "all",
        BIAS,
        found=r"mlps\.0",
        accept=r"off by 3 × the bias mlps\.0\.down\.bias",
    ),
    Bug(
        "bias before the sum, after a split vocabulary, module",
        "logits",
        "return dist_fn.reduce_from_region(F.linear(h, self.down.weight)) + self.down.bias",
        "return dist_fn.reduce_from_region(self.down(h))",
        "mlps.0.down: output, forward",
        "all",
        BIAS,
        found=r"mlps\.0(\.down)?",
        accept=r"off by 3 × the bias mlps\.0\.down\.bias",
    ),
    Bug(
        "rows of other words are not zero",
        "logits",
        "        rows = rows.masked_fill(outside[..., None], 0)\n",
        "",
        "after words, before mlps.0, forward",
        "all",
        "each worker adds its first row for words that it has not",
        found=r"words|mlps\.0(\.norm)?\.input",
    ),
    Bug(
        "rows of a split vocabulary are not summed",
        "logits",
        "return dist_fn.reduce_from_region(rows)",
        "return rows",
        "after words, before mlps.0, forward",
        "all",
        "the sum over the workers is missing",
        found=r"mlps\.0(\.norm)?\.input",
    ),
    Bug(
        "places begin at one",
        "logits",
        "self.split(whole)\n\n    def forward(self, ids: Tensor) -> Tensor:\n        x = self.embed(ids) + self.places(torch.arange(LENGTH))",
        "self.split(whole)\n\n    def forward(self, ids: Tensor) -> Tensor:\n        x = self.embed(ids) + self.places((torch.arange(LENGTH) + 1) % LENGTH)",
        "input of places, forward",
        "all",
        "positions are off by one",
        found=r"places(\.input)?",
        accept="one place later|in the order|off by|shifted",
    ),
    Bug(
        "a norm is left out behind a split vocabulary",
        "logits",
        "return self.head(dist_fn.copy_to_region(self.norm(x)))\n\n\nclass SplitLosing",
        "return self.head(dist_fn.copy_to_region(F.rms_norm(x, (WIDTH,))))\n\n\nclass SplitLosing",
        "input of head, forward",
        "all",
        "the norm is another",
        found=r"head\.input",
    ),
    Bug(
        "gelu for silu on worker 1, behind a split vocabulary",
        "logits",
        "h = F.silu(self.up(dist_fn.copy_to_region(self.norm(x))))",
        "h = (F.gelu if me() == 1 else F.silu)(self.up(dist_fn.copy_to_region(self.norm(x))))",
        "mlps.0: output, forward",
        "all",
        "worker 1 has another activation",
        found=r"mlps\.0",
        accept="worker 1: gelu",
    ),
    Bug(
        "the largest logit is each worker's",
        "loss",
        'most = ccl.all_reduce(logits.detach().amax(1), op="max")',
        "most = logits.detach().amax(1)",
        "the loss, forward",
        "all",
        "terms of the sum are scaled by other numbers",
        found=r"output",
    ),
    Bug(
        "the target's logit is not zero elsewhere",
        "loss",
        "wanted = dist_fn.reduce_from_region(wanted.masked_fill(outside, 0))",
        "wanted = dist_fn.reduce_from_region(wanted)",
        "the loss, forward",
        "all",
        "logits of other words are added",
        found=r"output",
    ),
    Bug(
        "bfloat16: no sum behind a split vocabulary",
        "coarse",
        "return dist_fn.reduce_from_region(F.linear(h, self.down.weight)) + self.down.bias",
        "return F.linear(h, self.down.weight) + self.down.bias",
        "mlps.0: output, forward",
        "all",
        "the sum over the workers is missing",
        found=r"mlps\.0",
        accept="an all-reduce is missing",
    ),
]
