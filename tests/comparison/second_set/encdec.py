"""An encoder-decoder of the T5 kind: a bias by distance in place of positions, cross attention.

By DTensor, by hand over heads, as a pipeline of four stages, in DDP and in FSDP.
"""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import relu
from torch.nn.parallel import DistributedDataParallel

from discolab import Session, compare, current_worker
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

WIDTH, HEADS, HIDDEN, WORDS, BUCKETS, LENGTH = 32, 8, 64, 40, 8, 6


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH) + torch.randn(WIDTH) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


def bucket(query: int, key: int, both: bool) -> Tensor:
    """Which row of the bias a query uses for a key: by their distance."""
    distance = torch.arange(query)[:, None] - torch.arange(key)
    if both:
        return distance.clamp(-BUCKETS // 2, BUCKETS // 2 - 1) + BUCKETS // 2
    return distance.clamp(0, BUCKETS - 1)


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        if kind != "cross":
            self.distance = nn.Embedding(BUCKETS, HEADS)

    def forward(self, x: Tensor, of: Tensor) -> Tensor:
        q, k, v = (self.split(t) for t in (self.q(x), self.k(of), self.v(of)))
        scores = q @ k.mT
        if self.kind != "cross":
            scores = scores + self.bias(x.shape[1])
        if self.kind == "causal":
            scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

    def bias(self, length: int) -> Tensor:
        rows = bucket(length, length, self.kind == "encoder")
        return self.distance(rows).permute(2, 0, 1)


class FeedForward(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(WIDTH, HIDDEN, bias=False),
            nn.Linear(HIDDEN, WIDTH, bias=False),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(relu(self.up(x))))


class EncoderLayer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn = Norm(), Attention("encoder")
        self.norm2, self.ff = Norm(), FeedForward(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attn(h, h)
        return x + self.ff(self.norm2(x))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = Norm(), Attention("causal")
        self.norm2, self.cross = Norm(), Attention("cross")
        self.norm3, self.ff = Norm(), FeedForward()

    def forward(self, y: Tensor, memory: Tensor) -> Tensor:
        h = self.norm1(y)
        y = y + self.attn(h, h)
        y = y + self.cross(self.norm2(y), memory)
        return y + self.ff(self.norm3(y))


class Translator(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(EncoderLayer(dropout) for _ in range(2))
        self.memory = Norm()
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self.embed(source), self.embed(target)
        for layer in self.encoder:
            x = layer(x)
        x = self.memory(x)
        for layer in self.decoder:
            y = layer(y, x)
        return self.head(self.norm(y) * WIDTH**-0.5)


# Over the workers


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


def part(x: Tensor, dim: int = 0) -> nn.Parameter:
    return nn.Parameter(x.detach().chunk(world(), dim)[me()].clone())


class SplitAttention(Attention):
    """Heads over the workers, by hand; the table of biases is whole on each."""

    def __init__(self, whole: Attention) -> None:
        super().__init__(whole.kind)
        self.load_state_dict(whole.state_dict())
        for layer in (self.q, self.k, self.v):
            layer.weight = part(layer.weight)
        self.o.weight = part(self.o.weight, 1)

    def forward(self, x: Tensor, of: Tensor) -> Tensor:
        x, of = dist_fn.copy_to_region(x), dist_fn.copy_to_region(of)
        return dist_fn.reduce_from_region(super().forward(x, of))

    def bias(self, length: int) -> Tensor:
        rows = bucket(length, length, self.kind == "encoder")
        every = dist_fn.copy_to_region(self.distance(rows)).permute(2, 0, 1)
        count = HEADS // world()
        return every[me() * count : (me() + 1) * count]


class SplitFeedForward(FeedForward):
    def __init__(self, whole: FeedForward) -> None:
        super().__init__(whole.dropout.p)
        self.up.weight, self.down.weight = part(whole.up.weight), part(whole.down.weight, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = relu(self.up(dist_fn.copy_to_region(x)))
        return self.dropout(dist_fn.reduce_from_region(self.down(hidden)))


def split(whole: Translator, dropout: float = 0.0) -> Translator:
    model = Translator(dropout)
    model.load_state_dict(whole.state_dict())
    for layer in model.encoder:
        layer.attn, layer.ff = SplitAttention(layer.attn), SplitFeedForward(layer.ff)
    for layer in model.decoder:
        layer.attn, layer.ff = SplitAttention(layer.attn), SplitFeedForward(layer.ff)
        layer.cross = SplitAttention(layer.cross)
    return model


class Mixed(nn.Module):
    """A feed-forward by DTensor that takes and gives plain tensors."""

    def __init__(self, whole: FeedForward) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(WIDTH, HIDDEN, bias=False),
            nn.Linear(HIDDEN, WIDTH, bias=False),
        )
        self.load_state_dict(whole.state_dict())
        mesh = init_device_mesh("cpu", (world(),))
        parallelize_module(self.up, mesh, ColwiseParallel(use_local_output=False))
        parallelize_module(
            self.down, mesh, RowwiseParallel(output_layouts=Partial(), use_local_output=False)
        )
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        x = DTensor.from_local(x, self.mesh, [Replicate()])
        hidden = relu(self.up(x))
        y = self.down(hidden)
        y = y.redistribute(placements=[Replicate()])
        return y.to_local()


def by_dtensor(whole: Translator) -> Translator:
    model = Translator()
    model.load_state_dict(whole.state_dict())
    for layer in [*model.encoder, *model.decoder]:
        layer.ff = Mixed(layer.ff)
    return model


# Programs


def seeded(dropout: float = 0.0, batch: int = 2) -> tuple[Translator, tuple[Tensor, Tensor]]:
    torch.manual_seed(11)
    inputs = torch.randint(WORDS, (batch, LENGTH)), torch.randint(WORDS, (batch, LENGTH - 1))
    return Translator(dropout), inputs


def over_heads(sess: Session, dropout: float = 0.0) -> Any:
    model, inputs = seeded(dropout)
    return compare(model, sess.call_packed(split, model, dropout), inputs)


def with_dropout(sess: Session) -> Any:
    return over_heads(sess, 0.2)


def dtensor(sess: Session) -> Any:
    model, inputs = seeded()
    return compare(model, sess.call_packed(by_dtensor, model), inputs)


def data_parallel(whole: Translator) -> nn.Module:
    model = Translator()
    model.load_state_dict(whole.state_dict())
    return DistributedDataParallel(model)


def ddp(sess: Session) -> Any:
    model, (source, _) = seeded(batch=8)
    sharded = sess.call_packed(data_parallel, model)
    run = sess.call_packed(partial, autoencode, sharded)
    layouts = {"input": Shard(0)}
    return compare(partial(autoencode, model), run, source, module=sharded, layouts=layouts)


def autoencode(model: nn.Module, source: Tensor) -> Tensor:
    return model(source, source)


def sharded_data_parallel(whole: Translator) -> Translator:
    model = Translator()
    model.load_state_dict(whole.state_dict())
    mesh = init_device_mesh("cpu", (world(),))
    policy = MixedPrecisionPolicy()
    for layer in [*model.encoder, *model.decoder]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    return model


def fsdp(sess: Session) -> Any:
    model, (source, _) = seeded(batch=8)
    sharded = sess.call_packed(sharded_data_parallel, model)
    run = sess.call_packed(partial, autoencode, sharded)
    layouts = {"input": Shard(0)}
    return compare(partial(autoencode, model), run, source, module=sharded, layouts=layouts)


# A pipeline: encoder, encoder, decoder, decoder; two micro-batches


class Stage(nn.Module):
    def __init__(self, whole: Translator) -> None:
        super().__init__()
        rank = me()
        if rank in (0, 2):
            self.embed = nn.Embedding(WORDS, WIDTH)
        if rank < 2:
            self.encoder = nn.ModuleDict({str(rank): EncoderLayer()})
        else:
            self.decoder = nn.ModuleDict({str(rank - 2): DecoderLayer()})
        if rank == 1:
            self.memory = Norm()
        if rank == 3:
            self.norm, self.head = Norm(), nn.Linear(WIDTH, WORDS, bias=False)
        self.load_state_dict(
            {k: v for k, v in whole.state_dict().items() if k in self.state_dict()}
        )

    def forward(self, source: Tensor, target: Tensor, x: Tensor, memory: Tensor) -> Any:
        rank = me()
        if rank == 0:
            return self.encoder["0"](self.embed(source))
        if rank == 1:
            return self.memory(self.encoder["1"](x))
        if rank == 2:
            return self.decoder["0"](self.embed(target), memory)
        y = self.decoder["1"](x, memory)
        return self.head(self.norm(y) * WIDTH**-0.5)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def whole_step(model: Translator, source: Tensor, target: Tensor) -> Tensor:
    loss = loss_of(model(source, target), target)
    loss.backward()
    return loss.detach()


def stage_step(stage: Stage, source: Tensor, target: Tensor) -> Tensor:
    """Forward of both micro-batches, then backward of both; the loss, on all."""
    rank, last = me(), world() - 1
    done: list[Any] = []
    loss = torch.zeros(())
    for s, t in zip(source.chunk(2), target.chunk(2), strict=True):
        x, memory = torch.zeros(*t.shape, WIDTH), torch.zeros(*s.shape, WIDTH)
        if rank == 1:
            x = torch.zeros(*s.shape, WIDTH)
        taken = {0: [], 1: [x], 2: [memory], 3: [x, memory]}[rank]
        for value in taken:
            dist.recv(value, rank - 1)
            value.requires_grad_()
        y = stage(s, t, x, memory)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        if rank == 2:
            dist.send(memory.detach(), 3)
        if rank == last:
            y = loss_of(y, t) / 2
            loss = loss + y.detach()
        done.append((y, taken))
    for y, taken in done:
        if rank == last:
            y.backward()
        else:
            grad = torch.empty_like(y)
            dist.recv(grad, rank + 1)
            y.backward(grad)
        if rank == 2:
            more = torch.empty_like(taken[0])
            dist.recv(more, 3)
            taken[0].grad += more
        for value in taken:
            dist.send(value.grad, rank - 1)
    dist.broadcast(loss, last)
    if rank in (0, 2):
        embeds = stage.embed.weight.grad
        dist.send(embeds.clone(), 2 - rank)
        other = torch.empty_like(embeds)
        dist.recv(other, 2 - rank)
        embeds += other
    return loss


def pipeline(sess: Session) -> Any:
    model, inputs = seeded(batch=4)
    stage = sess.call_packed(Stage, model)
    run = sess.call_packed(partial, stage_step, stage)
    return compare(partial(whole_step, model), run, inputs, module=stage)


RIGHT = ["over_heads", "with_dropout", "dtensor", "ddp", "fsdp", "pipeline"]

HARMLESS = [
    Bug(
        "FSDP keeps its parameters",
        "fsdp",
        "mp_policy=policy)",
        "mp_policy=policy, reshard_after_forward=False)",
    ),
    Bug(
        "DTensor's sum in two steps",
        "dtensor",
        "        y = y.redistribute(placements=[Replicate()])\n",
        "        y = y.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()])\n",
    ),
]

BUGS = [
    Bug(
        "each worker takes the biases of the first heads",
        "over_heads",
        "every[me() * count : (me() + 1) * count]",
        "every[:count]",
        "encoder.0.attn: input of o (operation: the slice), forward",
        (1, 2, 3),
        "workers 1-3 hold worker 0's part of the biases",
        found=r"encoder\.0\.attn\.o\.input",
    ),
    Bug(
        "table of biases in all heads' gradient is partial",
        "over_heads",
        "        every = dist_fn.copy_to_region(self.distance(rows)).permute(2, 0, 1)",
        "        every = self.distance(rows).permute(2, 0, 1)",
        "decoder.1.attn.distance: gradient of its output",
        "all",
        "each worker has the gradient of its own heads only: sum missing",
        found=r"decoder\.1\.attn\.distance(\.weight)?\.grad",
        accept="all-reduce of this gradient is missing",
    ),
    Bug(
        "decoder uses the encoder's distances",
        "over_heads",
        '        rows = bucket(length, length, self.kind == "encoder")\n        every',
        "        rows = bucket(length, length, True)\n        every",
        "decoder.0.attn.distance: output (or input), forward",
        "all",
        "buckets for both directions in a causal layer",
        found=r"decoder\.0\.attn\.distance(\.input)?",
    ),
    Bug(
        "replicated dropout draws differently on each worker",
        "with_dropout",
        "        return self.dropout(dist_fn.reduce_from_region(self.down(hidden)))",
        "        torch.manual_seed(me())\n        return self.dropout(dist_fn.reduce_from_region(self.down(hidden)))",
        "encoder.0.ff.dropout: output, forward",
        (1, 2, 3),
        "random states differ: each worker drops other elements",
        found=r"encoder\.0\.ff\.dropout",
    ),
    Bug(
        "a partial result is taken for its local value",
        "dtensor",
        "        y = y.redistribute(placements=[Replicate()])\n",
        "",
        "encoder.0.ff: output, forward",
        "all",
        "to_local() of a Partial: the sum is missing",
        found=r"encoder\.0\.ff",
        accept="an all-reduce is missing",
    ),
    Bug(
        "gradient of a replicated result said to be partial",
        "dtensor",
        "        return y.to_local()",
        "        return y.to_local(grad_placements=[Partial()])",
        "decoder.1.ff: gradient of down's output",
        "all",
        "a replicated gradient is summed: n times",
        found=r"decoder\.1\.ff\.down\.grad",
        accept="is 4 times",
    ),
    Bug(
        "DDP's forward goes round the wrapper",
        "ddp",
        "    return model(source, source)",
        "    return getattr(model, 'module', model)(source, source)",
        "gradient of a parameter (head.weight)",
        "all",
        "gradients are not synchronised",
        found=r"head\.weight\.grad",
        accept="all-reduce of this gradient is missing",
    ),
    Bug(
        "FSDP computes a part in bfloat16",
        "fsdp",
        "    policy = MixedPrecisionPolicy()",
        "    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)",
        "encoder.0.norm1 (or encoder.0.attn.q), forward",
        "all",
        "bfloat16 in the layers",
        found=r"encoder\.0(\.norm1|\.attn\.q)?",
        accept="bfloat16",
    ),
    Bug(
        "last layer of the memory left out by a stage",
        "pipeline",
        '            return self.memory(self.encoder["1"](x))',
        '            return self.encoder["1"](x)',
        "memory not run; or decoder.0.cross: input, forward",
        (2,),
        "worker 1 skips memory",
        found=r"memory|decoder\.0(\.cross)?\.input\.1",
        accept="did not run memory",
    ),
    Bug(
        "micro-batches aren't averaged",
        "pipeline",
        "            y = loss_of(y, t) / 2",
        "            y = loss_of(y, t)",
        "output of the program: the loss, forward",
        "all",
        "twice the reference: not divided by the number of micro-batches",
        found="output",
        accept="is 2 times",
    ),
    Bug(
        "gradients of the second micro-batch replace the first's",
        "pipeline",
        "            y.backward(grad)",
        "            stage.zero_grad()\n            y.backward(grad)",
        "gradient of a parameter of decoder.0",
        (2,),
        "zero_grad between micro-batches",
        found=r"decoder\.0\..*weight\.grad",
    ),
    Bug(
        "a tied embedding's copies aren't summed",
        "pipeline",
        "        embeds += other\n",
        "",
        "embed.weight: gradient",
        (0, 2),
        "each stage has its own part of the gradient: sum missing",
        found=r"embed\.weight\.grad",
        accept="all-reduce is missing, of this gradient",
    ),
]
