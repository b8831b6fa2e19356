"""A decoder of the Llama kind: grouped queries, rotary positions, SwiGLU, vocabulary over workers."""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from discolab import Session, ccl, compare, current_worker, note
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

WIDTH, HEADS, KV, VOCAB, HIDDEN, DEPTH, LENGTH = 64, 16, 8, 48, 96, 2, 8


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width) + torch.randn(width) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


def rotate(x: Tensor, start: int = 0) -> Tensor:
    """Turn the halves of each head by an angle that grows with the position."""
    half = x.shape[-1] // 2
    angle = torch.outer(
        torch.arange(start, start + x.shape[-2]), 10000.0 ** -(torch.arange(half) / half)
    )
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def heads(x: Tensor, dim: int = WIDTH // HEADS) -> Tensor:
    return x.unflatten(-1, (-1, dim)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH * KV // HEADS, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH * KV // HEADS, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rotate(heads(self.q(x))), rotate(heads(self.k(x))), heads(self.v(x))
        k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(silu(gate) * up)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = RMSNorm(WIDTH), Attention()
        self.norm2, self.mlp = RMSNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# The same over the workers: heads, hidden units and vocabulary are split


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


def part(x: Tensor, dim: int = 0) -> nn.Parameter:
    return nn.Parameter(x.chunk(world(), dim)[me()].clone())


class VocabEmbedding(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = part(weight)
        self.start = me() * len(self.weight)

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.start
        outside = (local < 0) | (local >= len(self.weight))
        rows = self.weight[local.masked_fill(outside, 0)]
        rows = rows.masked_fill(outside[..., None], 0)
        return dist_fn.reduce_from_region(rows)


class ShardedAttention(nn.Module):
    def __init__(self, whole: Attention, sequence: bool) -> None:
        super().__init__()
        self.sequence = sequence
        for name in "qkv":
            layer = nn.Linear(1, 1, bias=False)
            layer.weight = part(getattr(whole, name).weight)
            setattr(self, name, layer)
        self.o = nn.Linear(1, 1, bias=False)
        self.o.weight = part(whole.o.weight, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence:
            xq = xk = xv = dist_fn.gather_from_sequence_region(x, 1)
        else:
            xq = xk = xv = dist_fn.copy_to_region(x)
        q, k, v = rotate(heads(self.q(xq))), rotate(heads(self.k(xk))), heads(self.v(xv))
        k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.o(y.transpose(1, 2).flatten(2))
        if self.sequence:
            return dist_fn.reduce_scatter_to_sequence_region(y, 1)
        return dist_fn.reduce_from_region(y)


class ShardedMLP(nn.Module):
    def __init__(self, whole: MLP, sequence: bool) -> None:
        super().__init__()
        self.sequence = sequence
        self.gate_up, self.down = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        gate, up = whole.gate_up.weight.chunk(2)
        self.gate_up.weight = nn.Parameter(torch.cat([part(gate), part(up)]).detach())
        self.down.weight = part(whole.down.weight, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = (
            dist_fn.gather_from_sequence_region(x, 1)
            if self.sequence
            else dist_fn.copy_to_region(x)
        )
        gate, up = self.gate_up(x).chunk(2, -1)
        y = self.down(silu(gate) * up)
        if self.sequence:
            return dist_fn.reduce_scatter_to_sequence_region(y, 1)
        return dist_fn.reduce_from_region(y)


class VocabHead(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(dist_fn.copy_to_region(x), self.weight)


class ShardedDecoder(Decoder):
    def __init__(self, whole: Decoder, sequence: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.to(whole.norm.weight.dtype).load_state_dict(whole.state_dict())
        self.sequence = sequence
        self.embed = VocabEmbedding(whole.embed.weight)
        for block in self.blocks:
            block.attn = ShardedAttention(block.attn, sequence)
            block.mlp = ShardedMLP(block.mlp, sequence)
        self.head = VocabHead(self.embed.weight if tied else part(whole.head.weight))
        if sequence:
            norms = [norm for block in self.blocks for norm in (block.norm1, block.norm2)]
            for norm in [*norms, self.norm]:
                norm.weight.register_hook(lambda grad: ccl.all_reduce(grad))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.sequence:
            x = dist_fn.scatter_to_region(x, 1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.sequence:
            x = dist_fn.gather_from_region(x, 1)
        return self.head(x)


# Programs


def seeded(**options: Any) -> tuple[Decoder, Tensor]:
    torch.manual_seed(7)
    return Decoder(**options), torch.randint(VOCAB, (2, LENGTH))


def tensor_parallel(sess: Session, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model, ids = seeded()
    model.to(dtype)
    return compare(model, sess.call_packed(ShardedDecoder, model, **options), ids)


def half(sess: Session) -> Any:
    return tensor_parallel(sess, torch.bfloat16)


def sequence_parallel(sess: Session) -> Any:
    return tensor_parallel(sess, sequence=True)


def tied(sess: Session) -> Any:
    model, ids = seeded(tied=True)
    return compare(model, sess.call_packed(ShardedDecoder, model, tied=True), ids)


# Functions in place of modules: a block of a serving engine


def block_function(block: Block, x: Tensor) -> Tensor:
    h = block.norm1(x)
    attn = block.attn
    q, k, v = (heads(linear(h, getattr(attn, name).weight)) for name in "qkv")
    q, k = rotate(q), rotate(k)
    k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
    y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + linear(y, attn.o.weight)
    gate, up = linear(block.norm2(x), block.mlp.gate_up.weight).chunk(2, -1)
    return x + linear(silu(gate) * up, block.mlp.down.weight)


def sharded_block_function(block: Block, x: Tensor) -> Tensor:
    h = dist_fn.copy_to_region(block.norm1(x))
    attn = block.attn
    q, k, v = (heads(linear(h, getattr(attn, name).weight)) for name in "qkv")
    q, k = rotate(q), rotate(k)
    k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
    y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    out = linear(y, attn.o.weight)
    x = x + dist_fn.reduce_from_region(out)
    h = dist_fn.copy_to_region(block.norm2(x))
    gate, up = linear(h, block.mlp.gate_up.weight).chunk(2, -1)
    down = linear(silu(gate) * up, block.mlp.down.weight)
    return x + dist_fn.reduce_from_region(down)


def functional(sess: Session) -> Any:
    model, ids = seeded()
    sharded = sess.call_packed(ShardedDecoder, model)
    run = sess.call_packed(partial, run_sharded_blocks, sharded)
    return compare(partial(run_blocks, model), run, model.embed(ids).detach(), module=sharded)


def run_blocks(model: Decoder, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block_function(block, x)
    return model.norm(x)


def run_sharded_blocks(model: Decoder, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = sharded_block_function(block, x)
    return model.norm(x)


# Training: cross entropy over split logits, the norm of all gradients, AdamW


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    top = note("top", logits.detach().amax(-1, keepdim=True))
    total = note("total", (logits - top).exp().sum(-1))
    right = (logits - top).gather(-1, targets[..., None])[..., 0]
    return note("loss", (total.log() - right).mean())


def sharded_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    top = ccl.all_reduce(logits.detach().amax(-1, keepdim=True), "max")
    top = note("top", top)
    total = (logits - top).exp().sum(-1)
    total = note("total", dist_fn.reduce_from_region(total))
    local = targets - me() * logits.shape[-1]
    outside = (local < 0) | (local >= logits.shape[-1])
    right = (logits - top).gather(-1, local.masked_fill(outside, 0)[..., None])[..., 0]
    right = dist_fn.reduce_from_region(right.masked_fill(outside, 0))
    return note("loss", (total.log() - right).mean())


def loss_of(model: Decoder, sharded: bool, ids: Tensor, targets: Tensor) -> Tensor:
    return (sharded_cross_entropy if sharded else cross_entropy)(model(ids), targets)


def loss(sess: Session) -> Any:
    model, ids = seeded()
    sharded = sess.call_packed(ShardedDecoder, model)
    run = sess.call_packed(partial, loss_of, sharded, True)
    targets = torch.randint(VOCAB, ids.shape)
    return compare(partial(loss_of, model, False), run, (ids, targets), module=sharded)


def step(model: Decoder, sharded: bool, ids: Tensor, targets: Tensor) -> Tensor:
    """One step of training; the loss after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_of(model, sharded, ids, targets).backward()
    if sharded:
        split = {id(p) for name, p in model.named_parameters() if "norm" not in name}
        squares = sum(
            (p.grad.pow(2).sum() for p in model.parameters() if id(p) in split), torch.zeros(())
        )
        squares = ccl.all_reduce(squares)
        squares = squares + sum(
            p.grad.pow(2).sum() for p in model.parameters() if id(p) not in split
        )
    else:
        squares = sum((p.grad.pow(2).sum() for p in model.parameters()), torch.zeros(()))
    norm = note("norm", squares.sqrt())
    for p in model.parameters():
        p.grad.mul_(0.1 / norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss_of(model, sharded, ids, targets)


def training(sess: Session) -> Any:
    model, ids = seeded()
    sharded = sess.call_packed(ShardedDecoder, model)
    run = sess.call_packed(partial, step, sharded, True)
    targets = torch.randint(VOCAB, ids.shape)
    return compare(partial(step, model, False), run, (ids, targets), module=sharded)


RIGHT = ["tensor_parallel", "half", "sequence_parallel", "tied", "functional", "loss", "training"]

HARMLESS = [
    Bug(
        "the sum of down in float32",
        "half",
        "            return dist_fn.reduce_scatter_to_sequence_region(y, 1)\n        return dist_fn.reduce_from_region(y)\n\n\nclass VocabHead",
        "            return y\n        return dist_fn.reduce_from_region(y.float()).to(y.dtype)\n\n\nclass VocabHead",
    ),
    Bug(
        "attention written out",
        "tensor_parallel",
        "        y = scaled_dot_product_attention(q, k, v, is_causal=True)\n        y = self.o(y",
        """        y = q @ k.mT / q.shape[-1] ** 0.5 + torch.full((x.shape[1],) * 2, -torch.inf).triu(1)
        y = y.softmax(-1) @ v
        y = self.o(y""",
    ),
    Bug(
        "the bias-free sum by gathering the terms",
        "functional",
        "    x = x + dist_fn.reduce_from_region(out)",
        "    terms = dist_fn.gather_from_region(out[None], 0)\n    x = x + terms.flip(0).sum(0)",
    ),
]

BUGS = [
    Bug(
        "rows of other workers' words aren't zeroed",
        "tensor_parallel",
        "        rows = rows.masked_fill(outside[..., None], 0)\n",
        "",
        "embed, forward",
        "all",
        "each worker looks up its row 0 for words it has not; these are added into the sum",
        found="embed",
    ),
    Bug(
        "vocabulary starts one too late",
        "tensor_parallel",
        "        self.start = me() * len(self.weight)",
        "        self.start = me() * len(self.weight) + (me() > 0)",
        "embed, forward",
        "all",
        "a word's row is that of its neighbour, at the borders none or two",
        found="embed",
    ),
    Bug(
        "heads of keys repeated in the wrong order",
        "tensor_parallel",
        """        k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.o""",
        """        k, v = (t.repeat(1, HEADS // KV, 1, 1) for t in (k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.o""",
        "blocks.0.attn: input of o (operation: repeat), forward",
        "all",
        "queries look at the keys of another group: order of heads",
        found=r"blocks\.0\.attn\.o\.input",
    ),
    Bug(
        "fused gate and up cut in one piece",
        "half",
        "nn.Parameter(torch.cat([part(gate), part(up)]).detach())",
        "part(torch.cat([gate, up]))",
        "blocks.0.mlp.gate_up.weight, parameter",
        "all",
        "rows of gate and up are mixed: segments=2",
        found=r"blocks\.0\.mlp\.(down\.input|gate_up\.weight)",
        accept=r"gate_up\.weight is split in contiguous pieces.*segments=2",
    ),
    Bug(
        "silu on the other half",
        "half",
        "        y = self.down(silu(gate) * up)",
        "        y = self.down(gate * silu(up))",
        "blocks.0.mlp: input of down, forward",
        "all",
        "gate and up are swapped",
        found=r"blocks\.0\.mlp\.down\.input",
    ),
    Bug(
        "norms in the sequence-parallel region not summed",
        "sequence_parallel",
        "            for norm in [*norms, self.norm]:",
        "            for norm in [self.norm]:",
        "blocks.1.norm2.weight, gradient",
        "all",
        "each worker's gradient is of its part of the sequence: sum missing",
        found=r"blocks\.1\.norm2\.weight\.grad",
        accept="all-reduce of this gradient is missing",
    ),
    Bug(
        "gradient through the keys not summed",
        "tensor_parallel",
        "            xq = xk = xv = dist_fn.copy_to_region(x)",
        "            xq = xv = dist_fn.copy_to_region(x)\n            xk = x",
        "blocks.1.attn: gradient of the input (of k)",
        "all",
        "the gradient of the keys' path lacks its sum over the workers",
        found=r"blocks\.1\.attn(\.k)?\.input\.grad",
        accept="all-reduce is missing in backward",
    ),
    Bug(
        "largest logit of each worker alone",
        "loss",
        '        top = ccl.all_reduce(logits.detach().amax(-1, keepdim=True), "max")'.strip(),
        "top = logits.detach().amax(-1, keepdim=True)",
        "note top, forward",
        "all",
        "the maximum is not reduced over the workers",
        found="top",
        accept="largest over the workers",
    ),
    Bug(
        "targets of other workers counted",
        "loss",
        "    right = dist_fn.reduce_from_region(right.masked_fill(outside, 0))",
        "    right = dist_fn.reduce_from_region(right)",
        "note loss, forward",
        "all",
        "the sum has a wrong logit of each worker that hasn't the target",
        found="loss",
    ),
    Bug(
        "norm of gradients is local",
        "training",
        "        squares = ccl.all_reduce(squares)\n",
        "",
        "note norm, in the program",
        "all",
        "squares of split gradients aren't summed over the workers",
        found="norm",
    ),
    Bug(
        "norm counts replicated gradients on each worker",
        "training",
        'if "norm" not in name}',
        "}",
        "note norm, in the program",
        "all",
        "the gradients of norms are summed though all workers have the same",
        found="norm",
    ),
    Bug(
        "residual inside the sum, functional",
        "functional",
        "    return x + dist_fn.reduce_from_region(down)",
        "    return dist_fn.reduce_from_region(x + down)",
        "output of block 0 (operation: the last sum), forward",
        "all",
        "the residual is added by each worker before the sum: n times",
        found=r"blocks\.1\.norm1\.input",
        accept=r"3 × the input of blocks\.0\.norm2.*before the sum",
    ),
    Bug(
        "tied head trains its own copy",
        "tied",
        "self.embed.weight if tied else",
        "self.embed.weight.detach().clone().requires_grad_() if tied else",
        "embed.weight, gradient",
        "all",
        "the gradient through the head is missing: the weights aren't tied",
        found=r"embed\.weight\.grad",
    ),
]
