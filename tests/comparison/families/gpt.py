"""A GPT: fused qkv, blocks in a loop. Tensor, sequence and pipeline parallel, functional, FSDP.

`Blocks` works on hidden states [batch, sequence, DIM]; `GPT` adds an embedding and a head over the
vocabulary. The parallel classes are as people write them: the collective stands in the forward of
the layer, and a bug is one line of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from discolab import Session, ccl, compare
from discolab.ccl import autograd as dist_fn
from discolab.comparison import ProgramComparison

from .case import Bug, Right, State, place, process_group, shard_, uneven

DIM, HEADS, VOCAB, LENGTH, BATCH = 32, 4, 48, 8, 2
HEAD = DIM // HEADS


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float = HEAD**-0.5, first: int = 0
) -> torch.Tensor:
    """Causal attention of any number of heads; the first query stands at `first`."""
    q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.mT * scale
    late = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + first)
    return (scores.masked_fill(late, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj(attend(q, k, v))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.proj = nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.act(self.fc(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(DIM), Attention()
        self.norm2, self.mlp = nn.LayerNorm(DIM), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Blocks(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.body, self.norm = Blocks(1), nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.body(x)))


# -- tensor parallel -------------------------------------------------------------------------------


class TPAttention(Attention):
    bug = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = dist_fn.copy_to_region(x)
        q, k, v = self.qkv(x).chunk(3, -1)
        scale = (DIM if self.bug == "scale by the model" else HEAD) ** -0.5
        y = attend(q, k, v, scale)
        if self.bug == "bias before the sum":
            return dist_fn.reduce_from_region(self.proj(y))
        if self.bug == "bias before ccl.all_reduce":
            return ccl.all_reduce(self.proj(y))
        y = F.linear(y, self.proj.weight)
        if self.bug == "no all-reduce":
            return y + self.proj.bias
        if self.bug == "ccl.all_reduce":
            return ccl.all_reduce(y) + self.proj.bias
        if self.bug == "exact adjoint":
            return dist_fn.all_reduce(y) + self.proj.bias
        if self.bug == "average":
            return dist_fn.all_reduce(y, "avg") + self.proj.bias
        return dist_fn.reduce_from_region(y) + self.proj.bias


class TPMLP(MLP):
    bug = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bug != "no copy":
            x = dist_fn.copy_to_region(x)
        h = self.act(self.fc(x))
        if self.bug == "one worker rounds" and place()[0] == 1:
            h = h.bfloat16().to(x.dtype)
        if self.bug == "NaN on one" and place()[0] == 2:
            h = h.sqrt()
        y = F.linear(h, self.proj.weight)
        if self.bug == "no all-reduce":
            return y + self.proj.bias
        y = dist_fn.reduce_from_region(y)
        if self.bug == "reduced twice":
            y = dist_fn.reduce_from_region(y)
        if self.bug == "bias forgotten":
            return y
        return y + self.proj.bias


class ResidualInside(Block):
    """The residual goes into the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        h = self.mlp.act(self.mlp.fc(dist_fn.copy_to_region(self.norm2(x))))
        y = F.linear(h, self.mlp.proj.weight)
        return dist_fn.reduce_from_region(x + y) + self.mlp.proj.bias


class LocalNorm(nn.LayerNorm):
    """The norm of this worker's part of the features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(dist_fn.scatter_to_region(x), (x.shape[-1] // place()[1],), eps=self.eps)
        return dist_fn.gather_from_region(h) * self.weight + self.bias


def tensor_parallel(
    state: State, bug: str = "", block: int = 0, dtype: torch.dtype = torch.float32
) -> Blocks:
    """`Blocks` over the workers, with a bug in one of them."""
    model = Blocks().to(dtype)
    model.load_state_dict(state)
    tensor_parallel_(model, bug, block)
    return model


def tensor_parallel_(model: Blocks, bug: str = "", block: int = 0) -> None:
    me, n = place()
    if bug == "other block's weights" and me == 3:
        model.blocks[0].mlp.fc.load_state_dict(model.blocks[1].mlp.fc.state_dict())
    for number, each in enumerate(model.blocks):
        here = bug if number == block else ""
        each.attn.__class__, each.mlp.__class__ = TPAttention, TPMLP
        each.attn.bug = each.mlp.bug = ""
        shard_(each.attn.qkv, "weight", 0, 1 if here == "qkv in one piece" else 3)
        shard_(each.attn.qkv, "bias", 0, 1 if here == "qkv in one piece" else 3)
        for module, name in ((each.mlp.fc, "weight"), (each.mlp.fc, "bias")):
            shard_(module, name, 0)
        shard_(each.attn.proj, "weight", 1)
        shard_(each.mlp.proj, "weight", 1)
        kind, _, rest = here.partition(": ")
        if kind in ("attn", "mlp"):
            getattr(each, kind).bug = rest
        if here == "residual in the sum":
            each.__class__ = ResidualInside
        if here == "norm of a part":
            each.norm2.__class__ = LocalNorm
        if here == "eps":
            each.norm2.eps = 1e-1
        if here == "tanh" and me == 2:
            each.mlp.act.approximate = "tanh"
        if here == "v swapped":  # of two workers
            with torch.no_grad():
                other = {0: 1, 1: 0}.get(me, me)
                whole = torch.cat(list(ccl.all_gather(each.attn.qkv.weight.data[-HEAD:])))
                each.attn.qkv.weight[-HEAD:] = whole.view(n, HEAD, DIM)[other]


def hidden(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What goes in."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(BATCH, LENGTH, DIM, generator=generator).to(dtype)


def tp(
    bug: str = "", block: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> Callable[[Session], ProgramComparison]:
    """Compare `Blocks`."""

    def run(session: Session) -> ProgramComparison:
        reference = uneven(Blocks()).to(dtype)
        model = session.call_packed(tensor_parallel, reference.state_dict(), bug, block, dtype)
        return compare(reference, model, hidden(dtype), **options)

    return run


# -- functional: no modules at all -----------------------------------------------------------------


class Functional(nn.Module):
    """One block whose forward is made of functions of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w_qkv, self.b_qkv = (
            nn.Parameter(torch.empty(3 * DIM, DIM)),
            nn.Parameter(torch.empty(3 * DIM)),
        )
        self.w_out, self.b_out = nn.Parameter(torch.empty(DIM, DIM)), nn.Parameter(torch.empty(DIM))
        self.w_up, self.w_down = (
            nn.Parameter(torch.empty(64, DIM)),
            nn.Parameter(torch.empty(DIM, 64)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(x, (DIM,))
        q, k, v = F.linear(h, self.w_qkv, self.b_qkv).chunk(3, -1)
        x = x + F.linear(attend(q, k, v), self.w_out) + self.b_out
        h = F.layer_norm(x, (DIM,))
        return x + F.linear(F.silu(F.linear(h, self.w_up)), self.w_down)


class FunctionalParallel(Functional):
    def __init__(self, state: State, bug: str) -> None:
        super().__init__()
        self.bug = bug
        self.load_state_dict(state)
        fused = 1 if bug == "qkv in one piece" else 3
        for name, dim, segments in (
            ("w_qkv", 0, fused), ("b_qkv", 0, fused), ("w_out", 1, 1), ("w_up", 0, 1),
            ("w_down", 1, 1),
        ):  # fmt: skip
            shard_(self, name, dim, segments)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bug, reduce = self.bug, dist_fn.reduce_from_region
        h = dist_fn.copy_to_region(F.layer_norm(x, (DIM,)))
        q, k, v = F.linear(h, self.w_qkv, self.b_qkv).chunk(3, -1)
        a = attend(q, k, v)
        if bug == "bias before the sum":
            y = reduce(F.linear(a, self.w_out, self.b_out))
        elif bug == "no all-reduce":
            y = F.linear(a, self.w_out) + self.b_out
        else:
            y = reduce(F.linear(a, self.w_out)) + self.b_out
        x = x + y
        h = F.layer_norm(x, (DIM,))
        if bug != "no copy":
            h = dist_fn.copy_to_region(h)
        up = F.linear(h, self.w_up)
        up = F.gelu(up) if bug == "other function" and place()[0] == 1 else F.silu(up)
        y = F.linear(up, self.w_down)
        if bug == "residual in the sum":
            return reduce(x + y)
        y = reduce(y)
        if bug == "reduced twice":
            y = reduce(y)
        return y if bug == "residual forgotten" else x + y


def functional(
    bug: str = "", dtype: torch.dtype = torch.float32
) -> Callable[[Session], ProgramComparison]:
    """Compare `Functional`."""

    def run(session: Session) -> ProgramComparison:
        reference = uneven(Functional()).to(dtype)
        model = session.call_packed(
            lambda state: FunctionalParallel(state, bug).to(dtype), reference.state_dict()
        )
        return compare(reference, model, hidden(dtype))

    return run


# -- sequence parallel -----------------------------------------------------------------------------


class SequenceBlock(Block):
    """Norms and residuals on a part of the sequence; gathered for attention and the MLP."""

    bug = ""

    def norm(self, layer: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        weight = (
            layer.weight if self.bug == "norm's gradient" else dist_fn.copy_to_region(layer.weight)
        )
        return F.layer_norm(x, (DIM,), weight, dist_fn.copy_to_region(layer.bias), layer.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gather = dist_fn.gather_from_sequence_region
        q, k, v = self.attn.qkv(gather(self.norm(self.norm1, x), 1)).chunk(3, -1)
        if self.bug == "mask":
            y = attend(q, k, v, first=1)
        else:
            y = attend(q, k, v)
        y = F.linear(y, self.attn.proj.weight)
        y = dist_fn.reduce_scatter_to_sequence_region(y, 1)
        x = x + y + dist_fn.copy_to_region(self.attn.proj.bias)
        h = self.norm(self.norm2, x)
        if self.bug == "gather's backward":
            h = dist_fn.gather_from_region(h, 1)
        else:
            h = gather(h, 1)
        y = F.linear(self.mlp.act(self.mlp.fc(h)), self.mlp.proj.weight)
        if self.bug == "piece of a term":
            y = dist_fn.scatter_to_region(y, 1)
        else:
            y = dist_fn.reduce_scatter_to_sequence_region(y, 1)
        if self.bug == "bias not synchronised":
            return x + y + self.mlp.proj.bias
        return x + y + dist_fn.copy_to_region(self.mlp.proj.bias)


class SequenceGPT(GPT):
    bug = ""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        me, n = place()
        length = tokens.shape[1] // n
        mine = tokens.chunk(n, 1)[me]
        first = 0 if self.bug == "positions" else me * length
        weight = [dist_fn.copy_to_region(w) for w in (self.tok.weight, self.pos.weight)]
        x = F.embedding(mine, weight[0]) + F.embedding(
            torch.arange(first, first + length), weight[1]
        )
        x = self.body(x)
        x = dist_fn.gather_from_region(x, 1)
        if self.bug == "gather order":
            x = x.roll(length, 1)
        return self.head(self.norm(x))


def sequence_parallel(state: State, bug: str) -> GPT:
    model = SequenceGPT()
    model.load_state_dict(state)
    model.bug = bug
    tensor_parallel_(model.body)
    for block in model.body.blocks:
        block.__class__ = SequenceBlock
        block.bug = bug
    return model


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def sp(bug: str = "") -> Callable[[Session], ProgramComparison]:
    def run(session: Session) -> ProgramComparison:
        reference = uneven(GPT())
        model = session.call_packed(sequence_parallel, reference.state_dict(), bug)
        return compare(reference, model, tokens())

    return run


# -- the vocabulary is cut -------------------------------------------------------------------------


class VocabularyGPT(GPT):
    bug = ""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        me, n = place()
        size = VOCAB // n
        first = me * size + (self.bug == "range" and me == 1)
        outside = (tokens < first) | (tokens >= first + size)
        x = F.embedding((tokens - first).masked_fill(outside, 0), self.tok.weight)
        if self.bug != "no mask":
            x = x.masked_fill(outside.unsqueeze(-1), 0)
        x = dist_fn.reduce_from_region(x) + self.pos(torch.arange(tokens.shape[1]))
        x = self.norm(self.body(x))
        y = self.head(dist_fn.copy_to_region(x))
        if self.bug == "gather order":
            return dist_fn.gather_from_region(y).unflatten(-1, (n, -1)).flip(-2).flatten(-2)
        return dist_fn.gather_from_region(y)


def vocabulary_parallel(state: State, bug: str) -> GPT:
    model = VocabularyGPT()
    model.load_state_dict(state)
    model.bug = bug
    shard_(model.tok, "weight", 0)
    shard_(model.head, "weight", 0)
    if bug == "stale row" and place()[0] == 2:
        with torch.no_grad():
            model.head.weight[3] *= 1.1
    return model


def vocabulary(bug: str = "") -> Callable[[Session], ProgramComparison]:
    def run(session: Session) -> ProgramComparison:
        reference = uneven(GPT())
        model = session.call_packed(vocabulary_parallel, reference.state_dict(), bug)
        return compare(reference, model, tokens())

    return run


# -- pipeline: a block on each worker --------------------------------------------------------------


class Stage(Blocks):
    """Two stages of two workers, which hold the same: blocks 0-1 on workers 0-1."""

    bug, micro = "", 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        me, _ = place()
        bug = self.bug
        blocks = [block for block in self.blocks if not isinstance(block, nn.Identity)]
        if bug == "skips a block" and me >= 2:
            blocks = blocks[1:]
        like = torch.empty(BATCH // self.micro, *x.shape[1:], dtype=x.dtype)
        if me < 2:
            tokens = []
            for piece in x.chunk(self.micro):
                for block in blocks:
                    piece = block(piece)
                if bug == "no gradient":
                    ccl.send(piece.detach(), me + 2)
                    tokens.append(piece.sum() * 0)
                else:
                    tokens.append(dist_fn.send(piece, me + 2))
            return torch.stack(tokens).sum()
        pieces = []
        for _ in range(self.micro):
            piece = ccl.recv(like, me - 2) if bug == "no gradient" else dist_fn.recv(like, me - 2)
            if bug == "rounded on the way":
                piece = piece.bfloat16().to(x.dtype)
            for block in blocks:
                piece = block(piece)
            pieces.append(piece)
        return torch.cat(pieces[::-1] if bug == "order of micro-batches" else pieces)


def stage(state: State, bug: str, micro: int) -> Stage:
    model = Stage(4)
    model.load_state_dict(state)
    model.bug, model.micro = bug, micro
    mine = (0, 1) if place()[0] < 2 else (2, 3)
    for number in set(range(4)) - set(mine):
        model.blocks[number] = nn.Identity()
    if bug == "wrong block's weights" and place()[0] == 3:
        model.blocks[3].load_state_dict(model.blocks[2].state_dict())
    return model


def pp(bug: str = "", micro: int = 1) -> Callable[[Session], ProgramComparison]:
    def run(session: Session) -> ProgramComparison:
        reference = uneven(Blocks(4))
        model = session.call_packed(stage, reference.state_dict(), bug, micro)
        return compare(reference, model, hidden())

    return run


# -- FSDP by hand, and torch's ---------------------------------------------------------------------


class Gathered(nn.Linear):
    """A linear whose weight is gathered for use; each worker has its part of the batch."""

    bug = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = dist_fn.gather_from_sequence_region(self.weight)
        if self.bug == "gathered in a wrong order":
            weight = weight.roll(self.weight.shape[0], 0)
        if self.bug == "gradient averaged":
            weight = weight / place()[1] + (weight - weight / place()[1]).detach()
        if self.bug == "gradient not reduced":
            whole = ccl.all_gather(self.weight.detach()).view(place()[1], -1, self.in_features)
            whole[place()[0]] = 0
            own = torch.zeros_like(whole).index_put((torch.tensor(place()[0]),), self.weight)
            weight = (whole + own).view(-1, self.in_features)
        return F.linear(x, weight, dist_fn.copy_to_region(self.bias))


def sharded_by_hand(state: State, bug: str, where: str) -> Blocks:
    model = Blocks()
    model.load_state_dict(state)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            shard_(module, "weight", 0)
            module.__class__ = Gathered
            module.bug = bug if name == where else ""
        if isinstance(module, nn.LayerNorm):
            for parameter in module.parameters():
                parameter.register_hook(ccl.all_reduce)
    return model


def fsdp(bug: str = "", where: str = "") -> Callable[[Session], ProgramComparison]:
    def run(session: Session) -> ProgramComparison:
        reference = uneven(Blocks())
        model = session.call_packed(sharded_by_hand, reference.state_dict(), bug, where)
        return compare(
            reference,
            model,
            torch.randn(8, 4, DIM, generator=torch.Generator().manual_seed(1)),
            layouts={"input": "shard(0)"},
        )

    return run


def fsdp2(
    bug: str = "", dtype: torch.dtype | None = None
) -> Callable[[Session], ProgramComparison]:
    """torch's own."""

    def make(state: State) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        process_group()
        model = Blocks()
        model.load_state_dict(state)
        if dtype is not None:
            model.to(dtype)
        mesh = init_device_mesh("cpu", (place()[1],))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if bug == "stale shard" and place()[0] == 1:
            with torch.no_grad():
                model.blocks[1].mlp.fc.weight.to_local().mul_(1.01)
        del MixedPrecisionPolicy
        return model

    def run(session: Session) -> ProgramComparison:
        reference = uneven(Blocks())
        if dtype is not None:
            reference.to(dtype)
        model = session.call_packed(make, reference.state_dict())
        x = torch.randn(8, 4, DIM, generator=torch.Generator().manual_seed(1))
        return compare(reference, model, x.to(dtype or x.dtype), layouts={"input": "shard(0)"})

    return run


# -- a step of the optimizer -----------------------------------------------------------------------


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, prepare: Callable[[nn.Module], Any]
) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
    """A training step; gives the norm of the gradients and the parameters after it."""

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.enable_grad():
            model(x).square().mean().backward()
        norm = prepare(model)
        optimizer.step()
        return {"norm": norm, **{n: p.detach().clone() for n, p in model.named_parameters()}}

    return step


def clip(model: nn.Module, limit: float = 0.1) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), limit)


def is_cut(name: str) -> bool:
    return "qkv" in name or "fc" in name or name.endswith("proj.weight")


def parallel_step(state: State, bug: str, kind: str) -> Callable[..., Any]:
    model = tensor_parallel(state)
    rate = 0.1 * (2 if bug == "learning rate on one" and place()[0] == 2 else 1)

    def prepare(_: nn.Module) -> torch.Tensor:
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        cut = sum((g.square().sum() for n, g in grads.items() if is_cut(n)), torch.zeros(()))
        same = sum((g.square().sum() for n, g in grads.items() if not is_cut(n)), torch.zeros(()))
        if bug != "norm of the part":
            cut = ccl.all_reduce(cut)
        if bug == "norm counts copies":
            same = ccl.all_reduce(same)
        norm = (cut + same).sqrt()
        for grad in grads.values():
            grad.mul_(min(0.1 / (float(norm) + 1e-6), 1.0))
        return norm

    decay = 0.0
    if kind == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
        if bug == "momentum of one" and place()[0] == 1:
            optimizer.state[model.blocks[0].mlp.fc.weight]["momentum_buffer"] = torch.ones(16, DIM)
    else:
        decay = 0.1
        optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=decay)
        if bug == "decay on one" and place()[0] == 3:
            optimizer.param_groups[0]["weight_decay"] = 0.0
    return step_of(model, optimizer, prepare)


def step(bug: str = "", kind: str = "sgd") -> Callable[[Session], ProgramComparison]:
    def run(session: Session) -> ProgramComparison:
        reference = uneven(Blocks())
        state = {k: v.clone() for k, v in reference.state_dict().items()}
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            reference.parameters(), 0.1, momentum=0.9
        )
        if kind == "adam":
            optimizer = torch.optim.AdamW(reference.parameters(), 0.1, weight_decay=0.1)
        program = session.call_packed(parallel_step, state, bug, kind)
        return compare(
            step_of(reference, optimizer, clip),
            program,
            hidden(),
            backward=False,
            layouts={"output.*qkv*": "shard(0, segments=3)"},
        )

    return run


BIAS = r"(counts|added).*(each|every)|off by 3 × the bias"
MISSING = r"all-reduce is missing$|all-reduce is missing \(but for the bias"
OF_GRADIENT = r"all-reduce of this gradient is missing"
BACKWARD = r"missing in backward"
FUSED = r"segments=3"
bf16 = torch.bfloat16
BUGS = (
    Bug(
        "bias in the row-parallel linear, then the sum",
        "tp",
        "forward",
        tp("attn: bias before the sum"),
        (r"blocks\.0\.attn(\.proj)?",),
        (BIAS,),
    ),
    Bug(
        "the same with `ccl.all_reduce`",
        "tp",
        "forward",
        tp("attn: bias before ccl.all_reduce", 1),
        (r"blocks\.1\.attn(\.proj)?",),
        (BIAS,),
    ),
    Bug(
        "the same in bfloat16",
        "tp",
        "forward",
        tp("attn: bias before the sum", 1, bf16),
        (r"blocks\.1\.attn(\.proj)?",),
        (BIAS,),
    ),
    Bug(
        "no all-reduce behind attention",
        "tp",
        "forward",
        tp("attn: no all-reduce"),
        (r"blocks\.0\.attn",),
        (MISSING,),
    ),
    Bug(
        "no all-reduce behind the MLP, bfloat16",
        "tp",
        "forward",
        tp("mlp: no all-reduce", 1, bf16),
        (r"blocks\.1\.mlp",),
        (MISSING,),
    ),
    Bug(
        "averaged instead of summed",
        "tp",
        "forward",
        tp("attn: average"),
        (r"blocks\.0\.attn",),
        (r"reference / 4",),
    ),
    Bug(
        "summed twice",
        "tp",
        "forward",
        tp("mlp: reduced twice", 1),
        (r"blocks\.1\.mlp",),
        (r"4 times the reference",),
    ),
    Bug(
        "bias forgotten",
        "tp",
        "forward",
        tp("mlp: bias forgotten"),
        (r"blocks\.0\.mlp",),
        (r"-1 × the bias blocks\.0\.mlp\.proj\.bias",),
    ),
    Bug(
        "residual inside the sum",
        "tp",
        "forward",
        tp("residual in the sum", 1),
        (r"blocks\.1",),
        (r"off by 3 × the (input of blocks\.1\.norm2|output of blocks\.0)",),
    ),
    Bug(
        "fused qkv cut in one piece",
        "tp",
        "weights",
        tp("qkv in one piece"),
        (r"blocks\.0\.attn\.(qkv\.(weight|bias)|qkv|proj\.input)", r"blocks\.0\.attn"),
        (FUSED,),
    ),
    Bug(
        "scores scaled by the model's size",
        "tp",
        "forward",
        tp("attn: scale by the model"),
        (r"blocks\.0\.attn",),
        (r"mul.*0\.5 times the reference",),
    ),
    Bug(
        "v of two workers swapped",
        "tp",
        "weights",
        tp("v swapped"),
        (r"blocks\.0\.attn\.qkv\.weight",),
        (r"worker", r"segments"),
        (0, 1),
    ),
    Bug(
        "another block's weights on one worker",
        "tp",
        "weights",
        tp("other block's weights"),
        (r"blocks\.0\.mlp\.fc\.(weight|bias)",),
        (r"worker 3 holds the reference's blocks\.1\.mlp\.fc",),
        (3,),
    ),
    Bug(
        "norm over a part of the features",
        "tp",
        "forward",
        tp("norm of a part", 1),
        (r"blocks\.1\.norm2",),
        (),
    ),
    Bug("another eps", "tp", "forward", tp("eps"), (r"blocks\.0\.norm2",), (r"eps=0\.1",)),
    Bug(
        "GELU by tanh on one worker",
        "tp",
        "forward",
        tp("tanh", 1),
        (r"blocks\.1\.mlp\.act",),
        (r"worker 2: GELU",),
        (2,),
    ),
    Bug(
        "one worker rounds to bfloat16",
        "tp",
        "forward",
        tp("mlp: one worker rounds"),
        (r"blocks\.0\.mlp",),
        (r"worker 1",),
    ),
    Bug(
        "NaN on one worker",
        "tp",
        "forward",
        tp("mlp: NaN on one", 1),
        (r"blocks\.1\.mlp",),
        (r"NaN",),
    ),
    Bug(
        "no copy_to_region",
        "tp",
        "backward",
        tp("mlp: no copy", 1),
        (r"blocks\.1\.(mlp|norm2|mlp\.fc)(\.input)?\.grad",),
        (BACKWARD,),
    ),
    Bug(
        "exact adjoint where one loss is alike",
        "tp",
        "backward",
        tp("attn: exact adjoint"),
        (r"blocks\.0\.attn(\.qkv|\.proj)?(\.input|\.weight)?\.grad",),
        (r"4 times the reference",),
    ),
    Bug(
        "`ccl.all_reduce` in a model that trains",
        "tp",
        "backward",
        tp("attn: ccl.all_reduce", 1),
        (r"blocks\.1\.attn.*\.grad", r"blocks\.1\.attn"),
        (r"ccl\.all_reduce", r"no gradient"),
    ),
    Bug(
        "functional: no all-reduce",
        "tp",
        "forward",
        functional("no all-reduce"),
        (r"output", r"linear.*", r"add.*"),
        (MISSING,),
    ),
    Bug(
        "functional: bias before the sum",
        "tp",
        "forward",
        functional("bias before the sum"),
        (r"output", r"linear.*", r"add.*"),
        (BIAS,),
    ),
    Bug(
        "functional: residual in the sum",
        "tp",
        "forward",
        functional("residual in the sum"),
        (r"output", r"linear.*", r"add.*"),
        (r"off by 3 × ",),
    ),
    Bug(
        "functional: residual forgotten",
        "tp",
        "forward",
        functional("residual forgotten"),
        (r"output", r"linear.*", r"add.*"),
        (r"-1 × the",),
    ),
    Bug(
        "functional: summed twice, bfloat16",
        "tp",
        "forward",
        functional("reduced twice", bf16),
        (r"output", r"linear.*", r"add.*"),
        (r"4 times the reference|twice|off by 3 × the",),
    ),
    Bug(
        "functional: qkv cut in one piece",
        "tp",
        "weights",
        functional("qkv in one piece"),
        (r"w_qkv", r"b_qkv", r"output", r"(linear|chunk).*"),
        (FUSED,),
    ),
    Bug(
        "functional: another activation on one worker",
        "tp",
        "forward",
        functional("other function"),
        (r"output", r"(gelu|silu|linear).*"),
        (r"worker 1.*gelu",),
        None,
    ),
    Bug(
        "functional: no copy_to_region",
        "tp",
        "backward",
        functional("no copy"),
        (r"(w_\w+|b_\w+|output|input)\.grad",),
        (BACKWARD, OF_GRADIENT, r"once summed"),
    ),
    Bug(
        "embedding over the vocabulary without mask",
        "tp",
        "forward",
        vocabulary("no mask"),
        (r"tok", r"body\.input", r"body\.blocks\.0(\.norm1)?\.input"),
        (),
    ),
    Bug(
        "embedding's range off by one on one worker",
        "tp",
        "forward",
        vocabulary("range"),
        (r"tok", r"body\.input", r"body\.blocks\.0(\.norm1)?\.input"),
        (r"off by one",),
    ),
    Bug(
        "logits gathered in reversed order",
        "tp",
        "forward",
        vocabulary("gather order"),
        (r"output",),
        (r"in the order 3, 2, 1, 0",),
    ),
    Bug(
        "one row of the head is stale on one worker",
        "tp",
        "weights",
        vocabulary("stale row"),
        (r"head\.weight",),
        (),
        (2,),
    ),
    Bug(
        "positions start at 0 on each part of the sequence",
        "sp",
        "forward",
        sp("positions"),
        (r"body\.input", r"pos", r"body\.blocks\.0(\.norm1)?\.input"),
        (r"embedding.*workers 1-3 hold worker 0's part",),
        (1, 2, 3),
    ),
    Bug(
        "mask off by one",
        "sp",
        "forward",
        sp("mask"),
        (
            r"body\.blocks\.0(\.attn(\.proj\.input)?)?",
            r"body\.blocks\.0\.(mlp\.fc|norm2|attn|mlp).*",
        ),
        (),
    ),
    Bug(
        "gathered along the sequence in another order",
        "sp",
        "forward",
        sp("gather order"),
        (r"norm\.input",),
        (r"in the order 3, 0, 1, 2",),
    ),
    Bug(
        "norm's gradient of the part",
        "sp",
        "backward",
        sp("norm's gradient"),
        (r"body\.blocks\.0\.norm[12]\.weight\.grad",),
        (OF_GRADIENT,),
    ),
    Bug(
        "a bias' gradient of the part",
        "sp",
        "backward",
        sp("bias not synchronised"),
        (r"body\.blocks\.0\.mlp\.proj\.bias\.grad",),
        (OF_GRADIENT,),
    ),
    Bug(
        "gather with the other backward",
        "sp",
        "backward",
        sp("gather's backward"),
        (r"body\.blocks\.0\..*\.grad",),
        (BACKWARD, r"missing"),
    ),
    Bug(
        "a piece of a term instead of reduce-scatter",
        "sp",
        "forward",
        sp("piece of a term"),
        (r"body\.blocks\.0", r"body\.blocks\.0\.mlp.*"),
        (r"reduce",),
    ),
    Bug(
        "a stage skips its first block",
        "pp",
        "forward",
        pp("skips a block"),
        (r"blocks\.3(\.norm1|\.attn)?\.input", r"blocks\.2.*"),
        (r"did not run blocks\.2",),
        None,
    ),
    Bug(
        "micro-batches joined in reversed order",
        "pp",
        "forward",
        pp("order of micro-batches", 2),
        (r"output",),
        (r"order",),
        (2, 3),
    ),
    Bug(
        "sent without a gradient",
        "pp",
        "backward",
        pp("no gradient"),
        (r"blocks\.[01].*\.grad",),
        (r"grad|all zeros",),
        None,
    ),
    Bug(
        "rounded to bfloat16 on the way",
        "pp",
        "forward",
        pp("rounded on the way"),
        (r"blocks\.2(\.norm1)?\.input",),
        (r"bfloat16",),
        (2, 3),
    ),
    Bug(
        "a worker of a stage has another block's weights",
        "pp",
        "weights",
        pp("wrong block's weights"),
        (r"blocks\.3\..*(weight|bias)",),
        (r"worker 3 holds the reference's blocks\.2\.",),
        (3,),
    ),
    Bug(
        "weight gathered in another order",
        "fsdp",
        "forward",
        fsdp("gathered in a wrong order", "blocks.0.mlp.fc"),
        (r"blocks\.0\.mlp\.fc",),
        (r"order",),
    ),
    Bug(
        "one weight's gradient averaged, others summed",
        "fsdp",
        "backward",
        fsdp("gradient averaged", "blocks.1.attn.proj"),
        (r"blocks\.1\.attn\.proj\.weight\.grad",),
        (r"reference / 4",),
    ),
    Bug(
        "one weight's gradient is of the worker's own batch",
        "fsdp",
        "backward",
        fsdp("gradient not reduced", "blocks.1.mlp.proj"),
        (r"blocks\.1\.mlp\.proj\.weight\.grad",),
        (r"of this gradient",),
    ),
    Bug(
        "FSDP2: a stale shard",
        "fsdp",
        "weights",
        fsdp2("stale shard"),
        (r"blocks\.1\.mlp\.fc\.weight",),
        (r"1\.01 times",),
        (1,),
    ),
    Bug(
        "gradients clipped by the norm of the part",
        "tp",
        "optimizer",
        step("norm of the part"),
        (r"output\.norm",),
        (),
    ),
    Bug(
        "norm counts replicated gradients four times",
        "tp",
        "optimizer",
        step("norm counts copies"),
        (r"output\.norm",),
        (),
    ),
    Bug(
        "another learning rate on one worker",
        "tp",
        "optimizer",
        step("learning rate on one"),
        (r"output\.blocks.*",),
        (),
        (2,),
    ),
    Bug(
        "momentum of an old run on one worker",
        "tp",
        "optimizer",
        step("momentum of one"),
        (r"output\.blocks\.0\.mlp\.fc\.weight",),
        (r"off by",),
        (1,),
    ),
    Bug(
        "no weight decay on one worker",
        "tp",
        "optimizer",
        step("decay on one", "adam"),
        (r"output\.blocks.*",),
        (),
        (3,),
    ),
)

RIGHT = (
    Right("tensor parallel by hand", "tp", tp()),
    Right("the same, float64", "tp", tp(dtype=torch.float64)),
    Right("the same, bfloat16", "tp", tp(dtype=bf16)),
    Right("the same, functional", "tp", functional()),
    Right("functional, bfloat16", "tp", functional(dtype=bf16)),
    Right("vocabulary cut", "tp", vocabulary()),
    Right("sequence parallel", "sp", sp()),
    Right("a pipeline of two stages", "pp", pp()),
    Right("with micro-batches", "pp", pp(micro=2)),
    Right("FSDP by hand", "fsdp", fsdp()),
    Right("FSDP2", "fsdp", fsdp2()),
    Right("FSDP2, bfloat16", "fsdp", fsdp2(dtype=bf16)),
    Right("a step of SGD", "tp", step()),
    Right("a step of AdamW", "tp", step(kind="adam")),
    Right("rtol=1e-3", "tp", tp(rtol=1e-3)),
)
