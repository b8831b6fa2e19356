"""A small transformer, the same one tensor-parallel, and the bugs that people put into the latter.

`Reference` runs on one device. `make_sharded` is a worker function: it makes this worker's part of
the same model from the state dict, with one bug by name, or none. Column- and row-parallel linears,
attention by heads, embedding and output cut along the vocabulary, the second norm of each block
along the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import discolab
from discolab.ccl import autograd as dist_fn

DIM, HEADS, HIDDEN, VOCAB, LENGTH, BLOCKS = 32, 4, 64, 64, 12, 2
Tensors = dict[str, torch.Tensor]


class Core(nn.Module):
    """Attention of any number of heads, causal."""

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug = bug

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.mT
        if self.bug != "no scale":
            scores = scores / (DIM // HEADS) ** 0.5
        late = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(0 if self.bug == "mask" else 1)
        if self.bug == "mask":
            late[0, 0] = False
        scores = scores.masked_fill(late, -1e9)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "out"):
            setattr(self, name, nn.Linear(DIM, DIM))
        self.core: nn.Module = Core()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.core(self.q(x), self.k(x), self.v(x)))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up: nn.Module = nn.Linear(DIM, HIDDEN)
        self.act: nn.Module = nn.GELU()
        self.down: nn.Module = nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1: nn.Module = nn.LayerNorm(DIM)
        self.attn = Attention()
        self.drop = nn.Dropout(0.2)
        self.ln2: nn.Module = nn.LayerNorm(DIM)
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.mlp(self.ln2(x))


class Reference(nn.Module):
    """The whole model; gives the logarithms of probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.tok: nn.Module = nn.Embedding(VOCAB, DIM)
        self.pos: nn.Module = nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.ln = nn.LayerNorm(DIM)
        self.head: nn.Module = nn.Linear(DIM, VOCAB, bias=False)
        self.logp: nn.Module = nn.LogSoftmax(-1)

    def positions(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.arange(tokens.shape[1])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens) + self.pos(self.positions(tokens))
        for block in self.blocks:
            x = block(x)
        return self.logp(self.head(self.ln(x)))


def make_reference(dtype: torch.dtype = torch.float32) -> Reference:
    """With parameters that all matter: no bias is zero, no norm's weight one."""
    torch.manual_seed(1)
    model = Reference().eval()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, float(name.endswith("weight")), 0.1)
            elif "tok" in name or "pos" in name:
                nn.init.normal_(parameter, 0, 0.5)
    return model.to(dtype)


# -- on the workers --------------------------------------------------------------------------------


def place() -> tuple[int, int]:
    worker = discolab.current_worker()
    return worker.worker_id, worker.num_workers


def shard(tensor: torch.Tensor, dim: int, rank: int | None = None) -> nn.Parameter:
    me, n = place()
    return nn.Parameter(tensor.chunk(n, dim)[me if rank is None else rank].clone())


class Column(nn.Module):
    """Outputs are cut; the input is the same on all."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, bug: str = "") -> None:
        super().__init__()
        me, n = place()
        other = {2: 3, 3: 2}.get(me, me) if bug == "swapped" else me
        self.weight = shard(weight, 0, other)
        if bug == "wrong dim":
            self.weight = shard(weight.t(), 0)
        if bug == "interleaved":
            self.weight = nn.Parameter(weight[me::n].clone())
        self.bias = None
        if bias is not None:
            self.bias = shard(bias, 0, (me + 1) % n if bug == "wrong bias" else me)
        self.bug = bug

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bug != "no backward reduce":
            x = dist_fn.copy_to_region(x)
        y = F.linear(x, self.weight, self.bias)
        if self.bug == "downcast" and place()[0] == 3:
            y = y.bfloat16().to(x.dtype)
        if self.bug == "NaN" and place()[0] == 1:
            y = y.log()
        return y


class Row(nn.Module):
    """Inputs are cut; the output is a sum over the workers."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, bug: str = "") -> None:
        super().__init__()
        self.weight, self.bias, self.bug = shard(weight, 1), nn.Parameter(bias.clone()), bug
        if bug == "stale" and place()[0] == 1:
            with torch.no_grad():
                self.weight[5, 2] += 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight)
        if self.bug == "bias on each":
            return dist_fn.reduce_from_region(y + self.bias)
        if self.bug == "residual on each":  # the block adds it, and reduces
            return y + self.bias / place()[1]
        if self.bug not in ("no reduce", "bias and no reduce"):
            y = dist_fn.reduce_from_region(y)
        if self.bug == "reduced twice":
            y = dist_fn.reduce_from_region(y)
        if self.bug == "no reduce":
            return y + self.bias / place()[1]
        return y if self.bug == "no bias" else y + self.bias


class Vocabulary(nn.Module):
    """The rows of an embedding are cut."""

    def __init__(self, weight: torch.Tensor, bug: str = "") -> None:
        super().__init__()
        self.weight, self.bug = shard(weight, 0), bug

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        size = len(self.weight)
        first = place()[0] * size + (self.bug == "offset")
        local = tokens - first
        outside = (local < 0) | (local >= size)
        found = F.embedding(local.masked_fill(outside, 0), self.weight)
        if self.bug != "no mask":
            found = found.masked_fill(outside.unsqueeze(-1), 0.0)
        return found if self.bug == "no reduce" else dist_fn.reduce_from_region(found)


class Head(nn.Module):
    """The output over the vocabulary, gathered."""

    def __init__(self, weight: torch.Tensor, bug: str) -> None:
        super().__init__()
        self.weight, self.bug = shard(weight, 0), bug

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(dist_fn.copy_to_region(x), self.weight)
        if self.bug == "local softmax":
            return y
        y = dist_fn.gather_from_region(y)
        return y.roll(VOCAB // place()[1], -1) if self.bug == "gather order" else y


class LocalSoftmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dist_fn.gather_from_region(x.log_softmax(-1))


class SequenceNorm(nn.Module):
    """Each worker has a part of the sequence; the weights are the same on all."""

    def __init__(self, norm: nn.LayerNorm, bug: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach().clone())
        self.bias = nn.Parameter(norm.bias.detach().clone())
        self.eps, self.bug = norm.eps, bug

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if self.bug == "local norm":
            part = dist_fn.scatter_to_region(x, 2)
            y = F.layer_norm(part, part.shape[-1:], eps=self.eps)
            return dist_fn.gather_from_region(y, 2) * weight + bias
        if self.bug != "gradient not summed":
            weight = dist_fn.copy_to_region(weight)
        if self.bug == "gradient summed twice":
            weight = dist_fn.copy_to_region(weight)
        part = dist_fn.scatter_to_region(x, 1)
        y = F.layer_norm(part, x.shape[-1:], weight, dist_fn.copy_to_region(bias), self.eps)
        return dist_fn.gather_from_region(y, 1)


class ResidualOnEach(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = dist_fn.reduce_from_region(x + self.drop(self.attn(self.ln1(x))))
        return x + self.mlp(self.ln2(x))


def draw_first(*_: Any) -> None:
    """A hook by which one worker is ahead in its random numbers."""
    if place()[0] == 2:
        torch.rand(1)


def make_sharded(state: Tensors, bug: str = "", where: str = "") -> Reference:
    """This worker's part of the model; `bug` is in the module `where` (a worker function)."""
    me, n = place()
    model = Reference().eval()
    model.load_state_dict(state)
    model.to(next(iter(state.values())).dtype)

    def here(path: str) -> str:
        return bug if path == where else ""

    model.tok = Vocabulary(state["tok.weight"], here("tok"))
    model.head = Head(state["head.weight"], bug if where in ("head", "logp") else "")
    if bug == "local softmax":
        model.logp = LocalSoftmax()
    for number, block in enumerate(model.blocks):
        path = f"blocks.{number}"
        for name, kind in {
            "attn.q": Column, "attn.k": Column, "attn.v": Column, "attn.out": Row,
            "mlp.up": Column, "mlp.down": Row,
        }.items():  # fmt: skip
            full = f"{path}.{name}"
            made = kind(state[f"{full}.weight"], state[f"{full}.bias"], here(full))
            parent, _, last = name.partition(".")
            setattr(getattr(block, parent), last, made)
        block.ln2 = SequenceNorm(block.ln2, here(f"{path}.ln2"))
        block.attn.core = Core(here(f"{path}.attn.core"))
        if bug == "residual on each" and where.startswith(path):
            block.__class__ = ResidualOnEach
    if bug == "eps":
        model.get_submodule(where).eps = 1e-2
    if bug == "gelu" and me == 1:
        model.get_submodule(where).approximate = "tanh"
    model.eval()
    if bug == "one in eval":
        model.train(me != 2)
    if bug == "dropout seed":
        model.train()
        model.blocks[0].ln1.register_forward_pre_hook(draw_first)
    if bug == "positions":
        shift = int(me == n - 1)
        model.positions = lambda tokens: torch.arange(tokens.shape[1]).add(shift) % LENGTH
    return model


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
