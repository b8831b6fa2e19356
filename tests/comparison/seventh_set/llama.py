"""A Llama, tensor-parallel: grouped queries, norms of queries and keys, a cut vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from discolab import Session, compare, current_worker
from discolab.ccl import autograd as dist_fn
from discolab.comparison import ProgramComparison

WIDTH, HEADS, KEY_HEADS, HEAD, WORDS, INNER, DEPTH = 64, 16, 8, 4, 64, 96, 2


@dataclass(frozen=True)
class Cut:
    """How the model is cut over the workers, and what is wrong with it."""

    world: int = 1
    rank: int = 0
    sequence: bool = False
    bug: str = ""

    def copied(self, x: Tensor) -> Tensor:
        return dist_fn.copy_to_region(x) if self.world > 1 else x

    def entered(self, x: Tensor) -> Tensor:
        if self.world == 1:
            return x
        if self.sequence:
            return dist_fn.gather_from_sequence_region(x, 1)
        return dist_fn.copy_to_region(x)

    def left(self, x: Tensor) -> Tensor:
        if self.world == 1:
            return x
        if self.sequence:
            return dist_fn.reduce_scatter_to_sequence_region(x, 1)
        return dist_fn.reduce_from_region(x)


class Norm(nn.Module):
    """The weight's gradient is summed where `partial` is set: each worker norms a part alone."""

    def __init__(self, width: int, cut: Cut, partial: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.cut, self.partial = cut, partial

    def forward(self, x: Tensor) -> Tensor:
        weight = self.cut.copied(self.weight) if self.partial else self.weight
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x.float() * scale).to(x.dtype) * weight


def rotated(x: Tensor, theta: float) -> Tensor:
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(0, HEAD, 2) / HEAD)
    cos = angles.cos()[None, :, None].to(x.dtype)
    sin = angles.sin()[None, :, None].to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self.q = nn.Linear(WIDTH, HEADS * HEAD // cut.world, bias=False)
        self.k = nn.Linear(WIDTH, KEY_HEADS * HEAD // cut.world, bias=False)
        self.v = nn.Linear(WIDTH, KEY_HEADS * HEAD // cut.world, bias=False)
        self.o = nn.Linear(HEADS * HEAD // cut.world, WIDTH, bias=False)
        self.q_norm = Norm(HEAD, cut, cut.world > 1 and cut.bug != "norm not summed")
        self.k_norm = Norm(HEAD, cut, cut.world > 1)

    def forward(self, x: Tensor) -> Tensor:
        bug = self.cut.bug
        x = self.cut.entered(x)
        batch, length, _ = x.shape
        q = self.q_norm(self.q(x).view(batch, length, -1, HEAD))
        k = self.k_norm(self.k(x).view(batch, length, -1, HEAD))
        v = self.v(x).view(batch, length, -1, HEAD)
        theta = 500000.0 if bug == "theta" else 10000.0
        q = rotated(q, theta)
        with torch.set_grad_enabled(torch.is_grad_enabled() and bug != "no grad"):
            k = rotated(k, theta)
        group = q.shape[2] // k.shape[2]
        if bug == "repeat":
            k, v = k.repeat(1, 1, group, 1), v.repeat(1, 1, group, 1)
        else:
            k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        scale = 1 / math.sqrt(WIDTH // self.cut.world if bug == "scale" else HEAD)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale
        )
        return self.cut.left(self.o(y.transpose(1, 2).reshape(batch, length, -1)))


class Mlp(nn.Module):
    def __init__(self, cut: Cut, layer: int) -> None:
        super().__init__()
        self.cut, self.layer = cut, layer
        self.gate = nn.Linear(WIDTH, INNER // cut.world, bias=False)
        self.up = nn.Linear(WIDTH, INNER // cut.world, bias=False)
        self.down = nn.Linear(INNER // cut.world, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        bug = self.cut.bug
        if bug == "not copied":
            y = F.silu(self.gate(self.cut.entered(x))) * self.up(x)
        else:
            gathered = bug == "not scattered"
            x = dist_fn.gather_from_region(x, 1) if gathered else self.cut.entered(x)
            y = F.silu(self.gate(x)) * self.up(x)
        y = self.down(y)
        return y if bug == "not reduced" and self.layer == 1 else self.cut.left(y)


class Layer(nn.Module):
    def __init__(self, cut: Cut, layer: int) -> None:
        super().__init__()
        self.norm1 = Norm(WIDTH, cut, cut.sequence)
        self.attn = Attention(cut)
        self.norm2 = Norm(WIDTH, cut, cut.sequence)
        self.mlp = Mlp(cut, layer)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self.weight = nn.Parameter(torch.randn(WORDS // cut.world, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        if self.cut.world == 1:
            return F.embedding(ids, self.weight)
        rows = WORDS // self.cut.world
        first = self.cut.rank * rows
        after = first + rows + (self.cut.bug == "range")
        mine = (ids >= first) & (ids < after)
        words = F.embedding((ids - first).clamp(0, rows - 1), self.weight)
        return self.cut.left(words * mine[..., None])


class Llama(nn.Module):
    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self.embed = Embedding(cut)
        self.layers = nn.ModuleList(Layer(cut, layer) for layer in range(DEPTH))
        self.norm = Norm(WIDTH, cut, cut.sequence)
        self.head = nn.Linear(WIDTH, WORDS // cut.world, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.cut.entered(self.norm(x)))


def reference(dtype: torch.dtype) -> Llama:
    model = Llama(Cut())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype)


def sharded(state: dict[str, Tensor], sequence: bool, bug: str, dtype: torch.dtype) -> Llama:
    worker = current_worker()
    model = Llama(Cut(worker.world_size, worker.rank, sequence, bug)).to(dtype)
    mine = {}
    for name, own in model.state_dict().items():
        whole = state[name]
        if bug == "other layer" and worker.rank == 2 and name == "layers.1.mlp.down.weight":
            whole = state["layers.0.mlp.down.weight"]
        for dim in range(whole.ndim):
            if whole.shape[dim] != own.shape[dim]:
                whole = whole.chunk(worker.world_size, dim)[worker.rank]
        mine[name] = whole.clone()
    model.load_state_dict(mine)
    return model


def compared(
    session: Session,
    bug: str = "",
    *,
    dtype: torch.dtype = torch.float32,
    sequence: bool = False,
    edges: bool = False,
) -> ProgramComparison:
    """Compare on random words; `edges`: among them the first ones of two workers' rows."""
    torch.manual_seed(1)
    model = reference(dtype)
    ids = torch.randint(0, WORDS, (2, 16))
    if edges:
        ids[0, 3], ids[1, 7] = 32, 16
    workers = session.call_packed(sharded, model.state_dict(), sequence, bug, dtype)
    return compare(model, workers, ids)
