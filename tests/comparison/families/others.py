"""Right programs of other kinds: torch's and transformers' own parallelism, attention over parts.

`RIGHT` is a part of the table of right programs. Those that need transformers are left out where
it is not installed.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from discolab import Session, ccl, compare
from discolab.ccl import autograd as dist_fn
from discolab.comparison import ProgramComparison

from . import gpt
from .case import Right, State, place, process_group, shard_, uneven
from .conv import INPUT, TIME, Recurrent, RecurrentStages

WIDE, LONG = 384, 64  # of MiniLM
bf16 = torch.bfloat16


# -- an encoder of MiniLM's size -------------------------------------------------------------------


class WideLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("query", "key", "value", "dense"):
            setattr(self, name, nn.Linear(WIDE, WIDE))
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)
        self.norm1, self.norm2 = nn.LayerNorm(WIDE, eps=1e-12), nn.LayerNorm(WIDE, eps=1e-12)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, 32)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.dense(self.attend(x)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(WideLayer() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x)
        return F.normalize(x.mean(1), dim=-1)


class WideParallel(WideLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(self.attend(dist_fn.copy_to_region(x)), self.dense.weight)
        x = self.norm1(x + dist_fn.reduce_from_region(y) + self.dense.bias)
        y = F.linear(F.gelu(self.up(dist_fn.copy_to_region(x))), self.down.weight)
        return self.norm2(x + dist_fn.reduce_from_region(y) + self.down.bias)


COLUMNS, ROWS = ("query", "key", "value", "up"), ("dense", "down")


def outstanding(model: nn.Module) -> nn.Module:
    """A few features that stick out, as trained encoders have them."""
    with torch.no_grad():
        for name, parameter in uneven(model).named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter[::97] *= 8
    return model


def wide_by_hand(state: State, dtype: torch.dtype) -> nn.Module:
    model = Wide().to(dtype)
    model.load_state_dict(state)
    for layer in model.layer:
        layer.__class__ = WideParallel
        for name in COLUMNS:
            shard_(getattr(layer, name), "weight", 0)
            shard_(getattr(layer, name), "bias", 0)
        for name in ROWS:
            shard_(getattr(layer, name), "weight", 1)
    return model


def wide_by_dtensor(state: State, dtype: torch.dtype) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    process_group()
    model = Wide().to(dtype)
    model.load_state_dict(state)
    plan = {f"layer.*.{name}": ColwiseParallel() for name in COLUMNS}
    plan |= {f"layer.*.{name}": RowwiseParallel() for name in ROWS}
    return parallelize_module(model, init_device_mesh("cpu", (place()[1],)), plan)


def wide(make: Any, dtype: torch.dtype = torch.float32) -> Callable[[Session], ProgramComparison]:
    def run(session: Session) -> ProgramComparison:
        reference = outstanding(Wide()).to(dtype)
        x = torch.randn(2, LONG, WIDE, generator=torch.Generator().manual_seed(0)).to(dtype)
        return compare(reference, session.call_packed(make, reference.state_dict(), dtype), x)

    return run


# -- torch's own -----------------------------------------------------------------------------------


def sequence_by_dtensor(state: State) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    process_group()
    model = SeparateMLPs()
    model.load_state_dict(state)
    mesh = init_device_mesh("cpu", (place()[1],))
    plan: dict[str, Any] = {}
    for name in ("a", "b"):
        plan[f"{name}.norm"] = SequenceParallel()
        plan[f"{name}.fc"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"{name}.proj"] = RowwiseParallel(output_layouts=Shard(1))
    plan["a"] = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
    )
    return parallelize_module(model, mesh, plan)


class NormMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc, self.proj = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.fc(self.norm(x)).relu())


class SeparateMLPs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = NormMLP(), NormMLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def by_dtensor(session: Session) -> ProgramComparison:
    reference = uneven(SeparateMLPs())
    model = session.call_packed(sequence_by_dtensor, reference.state_dict())
    return compare(reference, model, gpt.hidden())


def compiled(session: Session) -> ProgramComparison:
    reference = uneven(gpt.Functional())

    def make(state: State) -> Any:
        return torch.compile(gpt.FunctionalParallel(state, ""), backend="eager")

    return compare(reference, session.call_packed(make, reference.state_dict()), gpt.hidden())


def ddp_bf16(session: Session) -> ProgramComparison:
    def make(state: State) -> nn.Module:
        process_group()
        model = gpt.Blocks().to(bf16)
        model.load_state_dict(state)
        return nn.parallel.DistributedDataParallel(model)

    reference = uneven(gpt.Blocks()).to(bf16)
    x = torch.randn(8, 4, gpt.DIM, generator=torch.Generator().manual_seed(1)).to(bf16)
    model = session.call_packed(make, reference.state_dict())
    return compare(reference, model, x, layouts={"input": "shard(0)"})


def checkpointed(session: Session) -> ProgramComparison:
    """Activations are computed again in backward."""
    from torch.utils.checkpoint import checkpoint

    class Again(gpt.Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    def make(state: State) -> nn.Module:
        model = gpt.tensor_parallel(state)
        model.__class__ = Again
        return model

    reference = uneven(gpt.Blocks())
    return compare(reference, session.call_packed(make, reference.state_dict()), gpt.hidden())


def two_axes(session: Session) -> ProgramComparison:
    """Half of the batch on each pair of workers, half of the features on each of a pair."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x).relu())

    class Parallel(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(dist_fn.copy_to_region(x, group="tp")).relu()
            y = dist_fn.reduce_from_region(F.linear(y, self.down.weight), group="tp")
            return y + self.down.bias

    def make(state: State) -> nn.Module:
        from discolab import current_worker

        tp = current_worker().mesh.rank("tp")
        model = Parallel()
        model.load_state_dict(state)
        model.up.weight = nn.Parameter(state["up.weight"].chunk(2)[tp].clone())
        model.up.bias = nn.Parameter(state["up.bias"].chunk(2)[tp].clone())
        model.down.weight = nn.Parameter(state["down.weight"].chunk(2, 1)[tp].clone())
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: ccl.all_reduce(grad, group="dp"))
        return model

    session.mesh(dp=2, tp=2)
    try:
        reference = uneven(Pair())
        model = session.call_packed(make, reference.state_dict())
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
        return compare(reference, model, x, layouts={"input": "[shard(0), replicate]"})
    finally:
        session._mesh = None


# -- the sequence cut: attention over parts --------------------------------------------------------


class Long(nn.Module):
    """Attention between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(gpt.attend(*self.qkv(x).chunk(3, -1)))


class Ulysses(Long):
    """Heads instead of the sequence during attention, by all-to-all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = dist_fn.scatter_to_region(x, 1)
        q, k, v = (dist_fn.all_to_all(t, 2, 1) for t in self.qkv(x).chunk(3, -1))
        y = self.out(dist_fn.all_to_all(gpt.attend(q, k, v), 1, 2))
        return dist_fn.gather_from_region(y, 1)


class Ring(Long):
    """Pieces of k and v one after the other, with a running softmax."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        me, n = place()
        x = dist_fn.scatter_to_region(x, 1)
        q, k, v = self.qkv(x).chunk(3, -1)
        length = x.shape[1]
        heads = [t.unflatten(-1, (-1, gpt.HEAD)).transpose(1, 2) for t in (q, k, v)]
        whole = [dist_fn.gather_from_sequence_region(t, 2) for t in heads[1:]]
        top = torch.full((*heads[0].shape[:-1], 1), -torch.inf)
        total, y = torch.zeros_like(top), torch.zeros_like(heads[0])
        for other in [(me - step) % n for step in range(n)]:
            if other > me:
                continue
            piece = [t[:, :, other * length : (other + 1) * length] for t in whole]
            scores = heads[0] @ piece[0].mT * gpt.HEAD**-0.5
            if other == me:
                scores = scores.masked_fill(torch.ones(length, length).bool().triu(1), -torch.inf)
            higher = torch.maximum(top, scores.amax(-1, keepdim=True).detach())
            weights = (scores - higher).exp()
            keep = (top - higher).exp()
            total = total * keep + weights.sum(-1, keepdim=True)
            y, top = y * keep + weights @ piece[1], higher
        y = self.out((y / total).transpose(1, 2).flatten(2))
        return dist_fn.gather_from_region(y, 1)


def long(kind: type[Long]) -> Callable[[Session], ProgramComparison]:
    def run(session: Session) -> ProgramComparison:
        def make(state: State) -> nn.Module:
            model = kind()
            model.load_state_dict(state)
            for parameter in model.parameters():
                parameter.register_hook(ccl.all_reduce)
            return model

        reference = uneven(Long())
        return compare(reference, session.call_packed(make, reference.state_dict()), gpt.hidden())

    return run


def recurrent_stages(session: Session) -> ProgramComparison:
    def make(state: State) -> nn.Module:
        model = RecurrentStages()
        model.load_state_dict(state)
        return model

    reference = uneven(Recurrent(), 7)
    x = torch.randn(5, TIME, INPUT, generator=torch.Generator().manual_seed(8))
    model = session.call_packed(make, reference.state_dict())
    return compare(reference, model, x, backward=False)


def chunked(session: Session) -> ProgramComparison:
    """Sums of many terms, in pieces: nothing but rounding differs."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ w) @ w.t()

    def pieces(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        parts = [F.gelu(x @ c) @ c.t() for c in w.chunk(16, 1)]
        return torch.stack(parts[::-1]).sum(0)

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32, 512, generator=generator), torch.randn(512, 1024, generator=generator)
    return compare(program, pieces, inputs, session=session)


# -- transformers' tp_plan -------------------------------------------------------------------------


def planned(
    kind: str, dtype: torch.dtype = torch.float32
) -> Callable[[Session], ProgramComparison]:
    """A causal language model, cut by the plan that comes with it."""

    def run(session: Session) -> ProgramComparison:
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            kind, hidden_size=128, intermediate_size=256, num_hidden_layers=2, head_dim=16,
            num_attention_heads=8, num_key_value_heads=4, vocab_size=512,
        )  # fmt: skip
        reference = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
        with tempfile.TemporaryDirectory() as folder:
            reference.save_pretrained(folder)

            def make() -> nn.Module:
                process_group()
                return transformers.AutoModelForCausalLM.from_pretrained(
                    folder, tp_plan="auto", dtype=dtype
                ).eval()

            model = session.call_packed(make)
            session.fetch(session.call_packed(lambda m: None, model))
        tokens = torch.randint(512, (2, 48), generator=torch.Generator().manual_seed(1))
        return compare(reference, model, {"input_ids": tokens, "use_cache": False})

    return run


RIGHT = (
    Right("an encoder of MiniLM's size by hand", "tp", wide(wide_by_hand), slow=True),
    Right("the encoder by hand, bfloat16", "tp", wide(wide_by_hand, bf16), slow=True),
    Right("the encoder by DTensor", "tp", wide(wide_by_dtensor), slow=True),
    Right("sequence parallel by DTensor", "sp", by_dtensor),
    Right("compiled", "tp", compiled, slow=True),
    Right("DDP, bfloat16", "dp", ddp_bf16),
    Right("activations computed again", "tp", checkpointed),
    Right("two axes: batch and features", "dp", two_axes),
    Right("attention by all-to-all", "sp", long(Ulysses)),
    Right("attention by a ring", "sp", long(Ring)),
    Right("time steps as stages", "pp", recurrent_stages),
    Right("sums in pieces", "tp", chunked),
)
if importlib.util.find_spec("transformers"):
    RIGHT += (
        Right("a Llama by transformers' tp_plan", "tp", planned("llama"), slow=True),
        Right("a Llama by tp_plan, bfloat16", "tp", planned("llama", bf16), slow=True),
        Right("a Qwen3 by transformers' tp_plan", "tp", planned("qwen3"), slow=True),
    )
