"""Two towers, for pictures and for texts, and a loss over all pairs of a batch."""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy, normalize

from discolab import Session, ccl, compare, current_worker
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

PIXELS, WORDS, HIDDEN, WIDTH, BATCH, LENGTH = 24, 30, 32, 8, 16, 5


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = (
            nn.EmbeddingBag(WORDS, HIDDEN, mode="mean"),
            nn.Linear(HIDDEN, WIDTH, bias=False),
        )

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(words)))


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(PIXELS, HIDDEN),
            nn.LayerNorm(HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(pictures))))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pictures, self.texts = Pictures(), Texts()
        self.sharpness = nn.Parameter(torch.tensor(0.7))

    def features(self, pictures: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.pictures(pictures), dim=-1), normalize(self.texts(words), dim=-1)

    def forward(self, pictures: Tensor, words: Tensor) -> Tensor:
        a, b = self.features(pictures, words)
        return self.loss(a, b, a, b, 0)

    def loss(self, a: Tensor, b: Tensor, every_a: Tensor, every_b: Tensor, first: int) -> Tensor:
        wanted = first + torch.arange(len(a))
        scale = self.sharpness.exp()
        rows, columns = scale * a @ every_b.T, scale * b @ every_a.T
        return (cross_entropy(rows, wanted) + cross_entropy(columns, wanted)) / 2


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, PIXELS), torch.randint(WORDS, (BATCH, LENGTH))


def step(model: Towers, pictures: Tensor, words: Tensor) -> None:
    model(pictures, words).backward()


# Over the workers


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


class Gathered(Towers):
    """Each worker has a part of the batch, and compares it with all features."""

    def __init__(self, whole: Towers) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())

    def forward(self, pictures: Tensor, words: Tensor) -> Tensor:
        a, b = self.features(pictures, words)
        every_a, every_b = dist_fn.all_gather(a), dist_fn.all_gather(b)
        return self.loss(a, b, every_a, every_b, me() * len(a))


def gathered_step(model: Towers, pictures: Tensor, words: Tensor) -> None:
    model(pictures, words).backward()
    for parameter in model.parameters():
        parameter.grad = ccl.all_reduce(parameter.grad, "avg")


class Narrow(Towers):
    """The hidden features of both towers over the workers."""

    def __init__(self, whole: Towers) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())
        up, down, texts = self.pictures.up, self.pictures.down, self.texts

        def mine(tensor: Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(tensor.detach().chunk(world(), dim)[me()].clone())

        up.weight, up.bias = mine(up.weight, 0), mine(up.bias, 0)
        down.weight = mine(down.weight, 1)
        texts.embed.weight, texts.out.weight = (
            mine(texts.embed.weight, 1),
            mine(texts.out.weight, 1),
        )
        self.pictures.forward = self.of_pictures
        self.texts.out.register_forward_hook(lambda *call: dist_fn.reduce_from_region(call[2]))

    def of_pictures(self, pictures: Tensor) -> Tensor:
        tower = self.pictures
        h = dist_fn.gather_from_region(tower.up(dist_fn.copy_to_region(pictures)))
        h = dist_fn.scatter_to_region(torch.relu(tower.norm(h)))
        return dist_fn.reduce_from_region(h @ tower.down.weight.T) + tower.down.bias


class Apart(Towers):
    """Workers 0 and 1 have the tower of pictures, 2 and 3 that of texts, each for half the batch."""

    def __init__(self, whole: Towers) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())


def apart_step(model: Towers, pictures: Tensor, words: Tensor) -> None:
    half, other = me() % 2, (me() + 2) % 4
    if me() < 2:
        mine = normalize(model.pictures(pictures.chunk(2)[half]), dim=-1)
    else:
        mine = normalize(model.texts(words.chunk(2)[half]), dim=-1)
    theirs = torch.empty_like(mine)
    sending = dist.isend(mine.detach(), other)
    dist.recv(theirs, other)
    sending.wait()
    every = [
        torch.cat(ccl.all_gather_list(t.contiguous(), group=[0, 1] if me() < 2 else [2, 3]))
        for t in (mine.detach(), theirs)
    ]
    every = [t.requires_grad_() for t in every]
    a, b = every if me() < 2 else every[::-1]
    model.loss(a, b, a, b, 0).backward()
    size = len(mine)
    mine.backward(every[0].grad[half * size : half * size + size])
    tower = model.pictures if me() < 2 else model.texts
    for parameter in tower.parameters():
        parameter.grad = ccl.all_reduce(parameter.grad, group=[0, 1] if me() < 2 else [2, 3])


def wrapped(whole: Towers) -> Towers:
    if not dist.is_initialized():
        dist.init_process_group()
    mesh = init_device_mesh("cpu", (world(),))
    model = Gathered(whole)
    for tower in (model.pictures, model.texts):
        fully_shard(tower, mesh=mesh)
    model.sharpness.register_hook(lambda grad: ccl.all_reduce(grad, "avg"))
    return model


# Programs


def seeded() -> tuple[Towers, tuple[Tensor, Tensor]]:
    torch.manual_seed(33)
    return Towers(), inputs()


def gathered(sess: Session) -> Any:
    model, given = seeded()
    held = sess.call_packed(Gathered, model)
    run = sess.call_packed(partial, gathered_step, held)
    return compare(partial(step, model), run, given, module=held, layouts={"input": Shard(0)})


def narrow(sess: Session) -> Any:
    model, given = seeded()
    return compare(model, sess.call_packed(Narrow, model), given)


def apart(sess: Session) -> Any:
    model, given = seeded()
    held = sess.call_packed(Apart, model)
    return compare(
        partial(step, model), sess.call_packed(partial, apart_step, held), given, module=held
    )


def fsdp(sess: Session) -> Any:
    model, given = seeded()
    held = sess.call_packed(wrapped, copy.deepcopy(model))
    run = sess.call_packed(partial, step, held)
    return compare(partial(step, model), run, given, module=held, layouts={"input": Shard(0)})


RIGHT = ["gathered", "narrow", "apart", "fsdp"]

HARMLESS = [
    Bug(
        "the sharpness behind the product",
        "gathered",
        "        rows, columns = scale * a @ every_b.T, scale * b @ every_a.T\n        return",
        "        rows, columns = scale * (a @ every_b.T), scale * (b @ every_a.T)\n        return",
    ),
]

BUGS = [
    Bug(
        "pairs are numbered from zero on each worker",
        "gathered",
        "        return self.loss(a, b, every_a, every_b, me() * len(a))\n",
        "        return self.loss(a, b, every_a, every_b, 0)\n",
        "the output of the whole model, forward",
        "all",
        "targets of worker 0",
        found=r"output|texts\.grad",
    ),
    Bug(
        "gathered texts have no gradient",
        "gathered",
        "        every_a, every_b = dist_fn.all_gather(a), dist_fn.all_gather(b)\n",
        "        every_a, every_b = dist_fn.all_gather(a), torch.cat(ccl.all_gather_list(b.detach()))\n",
        "texts: gradient of its output",
        "all",
        "the gradient through the other workers' rows is missing",
        found=r"texts(\.out)?\.grad",
    ),
    Bug(
        "the sharpness is trained on each worker alone",
        "gathered",
        '    for parameter in model.parameters():\n        parameter.grad = ccl.all_reduce(parameter.grad, "avg")\n',
        '    for name, parameter in model.named_parameters():\n        if name != "sharpness":\n            parameter.grad = ccl.all_reduce(parameter.grad, "avg")\n',
        "gradient of the parameter sharpness",
        "all",
        "its all-reduce is missing",
        found=r"sharpness\.grad",
        accept="the all-reduce of this gradient is missing",
    ),
    Bug(
        "the norm sees a part of the hidden features",
        "narrow",
        "        h = dist_fn.gather_from_region(tower.up(dist_fn.copy_to_region(pictures)))\n        h = dist_fn.scatter_to_region(torch.relu(tower.norm(h)))\n",
        "        h = tower.up(dist_fn.copy_to_region(pictures))\n        size = HIDDEN // world()\n        h = torch.relu(nn.functional.layer_norm(h, (size,), tower.norm.weight.chunk(world())[me()], tower.norm.bias.chunk(world())[me()]))\n",
        "pictures: output (its norm isn't called), forward",
        "all",
        "norm over a part",
        found=r"pictures",
    ),
    Bug(
        "features of the other tower come in the wrong order",
        "apart",
        "    half, other = me() % 2, (me() + 2) % 4\n",
        "    half, other = me() % 2, 3 - me()\n",
        "the first gradients that differ: of the tower of texts",
        (2, 3),
        "halves of the batch swapped",
        found=r"(texts|pictures)(\.out|\.down)?(\.weight|\.bias)?(\.input)?\.grad",
    ),
    Bug(
        "the sharpness is summed where the others are averaged",
        "fsdp",
        '    model.sharpness.register_hook(lambda grad: ccl.all_reduce(grad, "avg"))\n',
        "    model.sharpness.register_hook(lambda grad: ccl.all_reduce(grad))\n",
        "gradient of the parameter sharpness",
        "all",
        "four times the average",
        found=r"sharpness\.grad",
        accept="is 4 times the reference",
    ),
]
