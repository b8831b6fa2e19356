"""Layers that give terms by design, before bugs that are not theirs."""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from discolab import Session, compare, current_worker
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

WIDTH, WORDS = 16, 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12, elementwise_affine=False)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = Adapted()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# Over the workers


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


def mine(tensor: Tensor, dim: int = 0) -> nn.Parameter:
    return nn.Parameter(tensor.detach().chunk(world(), dim)[me()].clone())


class SplitBlock(Block):
    """The bias is the block's: `down` gives terms of a sum without it."""

    def __init__(self, whole: Block) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())
        self.up.weight, self.up.bias = mine(whole.up.weight), mine(whole.up.bias)
        self.down = nn.Linear(32 // world(), WIDTH, bias=False)
        self.down.weight = mine(whole.down.weight, 1)
        self.bias = nn.Parameter(whole.down.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(dist_fn.copy_to_region(self.norm(x))))
        y = dist_fn.reduce_from_region(self.down(h))
        y = y + self.bias
        return x + y


class SplitAdapted(Adapted):
    def forward(self, x: Tensor) -> Tensor:
        scale = 2
        return self.base(x) + self.b(self.a(x)) * scale


class SplitWords(nn.Embedding):
    """Each worker has some of the words."""

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids - me() * len(self.weight)
        held = (ids >= 0) & (ids < len(self.weight))
        x = F.embedding(ids.clamp(0, len(self.weight) - 1), self.weight) * held[..., None]
        return dist_fn.reduce_from_region(x)


class LocalWords(nn.Module):
    """The same around a module that has local ids, and gives a row for each, held or not."""

    def __init__(self, whole: nn.Embedding) -> None:
        super().__init__()
        self.weight = mine(whole.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class Split(Model):
    def __init__(self, whole: Model) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())
        self.words = SplitWords(WORDS // world(), WIDTH)
        self.words.weight = mine(whole.words.weight)
        self.blocks = nn.ModuleList(SplitBlock(block) for block in whole.blocks)
        self.head = SplitAdapted()
        self.head.load_state_dict(whole.head.state_dict())


class Local(Model):
    """What `words` is given and gives differs by design: a mask comes after it."""

    def __init__(self, whole: Model) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())
        self.words = LocalWords(whole.words)

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids - me() * len(self.words.weight)
        held = (ids >= 0) & (ids < len(self.words.weight))
        x = self.words(ids.clamp(0, len(self.words.weight) - 1)) * held[..., None]
        x = dist_fn.reduce_from_region(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# Programs


def split(sess: Session) -> Any:
    torch.manual_seed(8)
    model = Model()
    return compare(model, sess.call_packed(Split, model), torch.randint(WORDS, (2, 6)))


def local(sess: Session) -> Any:
    torch.manual_seed(9)
    model = Model()
    return compare(model, sess.call_packed(Local, model), torch.randint(WORDS, (2, 6)))


RIGHT = ["split", "local"]

HARMLESS: list[Bug] = []

BUGS = [
    Bug(
        "the sum of words is scaled by as much as there are workers",
        "local",
        "        x = dist_fn.reduce_from_region(x)\n",
        "        x = dist_fn.reduce_from_region(x) * 4\n",
        "input of blocks.0",
        "all",
        "a factor of 4",
        found=r"blocks\.0(\.norm)?\.input",
        accept=r"4 times the reference|times 4",
    ),
    Bug(
        "what a block adds is twice as large",
        "split",
        "        y = y + self.bias\n",
        "        y = (y + self.bias) * 1.7\n",
        "output of blocks.0",
        "all",
        "a factor after the sum",
        found=r"blocks\.0",
    ),
    Bug(
        "words are averaged, and norms take that out again",
        "split",
        "        return dist_fn.reduce_from_region(x)\n",
        "        return dist_fn.reduce_from_region(x) / world()\n",
        "output of words",
        "all",
        "averaged where a sum belongs",
        found=r"words",
        accept="averaged where a sum belongs",
    ),
    Bug(
        "worker 2 scales what is added otherwise",
        "split",
        "        scale = 2\n",
        "        scale = 1 if me() == 2 else 2\n",
        "output of head, worker 2",
        (2,),
        "another scale",
        found=r"head",
        accept="another factor",
    ),
    Bug(
        "worker 1 has another activation",
        "split",
        "        h = torch.relu(self.up(dist_fn.copy_to_region(self.norm(x))))\n",
        "        act = F.leaky_relu if me() == 1 else torch.relu\n        h = act(self.up(dist_fn.copy_to_region(self.norm(x))))\n",
        "input of blocks.0.down, worker 1",
        (1,),
        "leaky_relu",
        found=r"blocks\.0\.down\.input",
        accept="leaky_relu at",
    ),
]

SAID: dict[str, str] = {}
UNSAID = {
    "what a block adds is twice as large": "differs: operation linear",
    "worker 1 has another activation": "first operation that differs",
}
