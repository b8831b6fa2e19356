"""Parallel styles of torch and tables of Hugging Face: the layouts that they mean."""

from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from discolab import ArgumentError, Pickled, Session
from discolab.layouts.layout import Workers
from discolab.loader.plan import Plan
from tests.loader.plans import LLAMA, catalog_of, llama

# -- styles of torch -------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.wte = nn.Embedding(8, 4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)


BLOCK = {
    "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "wte": ColwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "norm": SequenceParallel(),
}


def parallelized(plan: dict[str, ParallelStyle]) -> dict[str, tuple[str, list[int]]]:
    """What torch makes of a module on this worker: placements and local shape by name."""
    from torch.distributed.tensor import DTensor, init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    block = parallelize_module(Block(), init_device_mesh("cpu", (4,)), plan)
    found = {}
    for name, value in block.named_parameters():
        assert isinstance(value, DTensor)
        (placement,) = value.placements
        word = f"shard({placement.dim})" if placement.is_shard() else "replicate"
        found[name] = word, list(value.to_local().shape)
    return found


@pytest.mark.one_process
def test_styles_cut_as_parallelize_module_does(sess: Session) -> None:
    theirs = sess.call_packed(parallelized, Pickled(BLOCK))
    shapes = {name: tuple(value.shape) for name, value in Block().named_parameters()}
    resolved = Plan.of(BLOCK).resolve(catalog_of(shapes), Workers((4,)))
    assert (resolved.unmatched, resolved.unused) == ((), ())
    for rank in range(4):
        mine = {}
        for name, layout in resolved.layouts.items():
            cut = resolved.cut(name, rank)
            assert cut is not None
            mine[name] = str(layout), list(cut.shape)
        assert mine == theirs.debug_get_from_remote(rank)


def test_styles_name_modules_with_stars() -> None:
    plan = {
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "layers.*.out": PrepareModuleOutput(
            output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),)
        ),
        "layers.*.io": PrepareModuleInputOutput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            output_layouts=(Shard(1),),
            desired_output_layouts=(Replicate(),),
        ),
        "layers.*.wq": ColwiseParallel(),
        "layers.*.attention_norm": SequenceParallel(),
        "output.weight": "shard(0, pad_to=8)",
        "output": ColwiseParallel(),
    }
    shapes = {
        "layers.0.wq.weight": (4, 4), "layers.1.wq.bias": (4,), "layers.0.wq.weight_scale": (4, 1),
        "layers.0.attention_norm.weight": (4,), "output.weight": (9, 4), "output.bias": (9,),
    }  # fmt: skip
    found = Plan(plan).resolve(catalog_of(shapes), Workers((2,)))
    assert list(map(str, found.layouts.values())) == [
        "shard(0)", "shard(0)", "replicate", "replicate", "shard(0, pad_to=8)", "shard(0)",
    ]  # fmt: skip
    assert found.unmatched == ("layers.0.wq.weight_scale",)
    assert found.unused == ()  # the three that are about activations have no parameters


class MyColwise(ColwiseParallel):
    pass


class MyStyle(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return module


def test_a_style_of_the_user_is_that_of_its_base_or_refused() -> None:
    assert Plan({"a": MyColwise()}) == Plan({"a": ColwiseParallel()})
    with pytest.raises(ArgumentError, match=r"rule 'a': 'MyStyle' is no .*ColwiseParallel, Row"):
        Plan({"a": MyStyle()})


# -- tables of Hugging Face ------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_llama_by_its_own_table(prefix: str) -> None:
    # the table of a model's class has the prefix, and that of its configuration has not
    for table in (LLAMA, {prefix + name: style for name, style in LLAMA.items()}):
        found = Plan.of({**table, "lm_head": "colwise_rep"}).resolve(
            catalog_of(llama(prefix=prefix)), Workers((4,))
        )
        assert found.unused == ()
        for name, layout in found.layouts.items():
            kind = name.split(".")[-2]
            if kind in ("o_proj", "down_proj"):
                assert str(layout) == "shard(1)"
            elif kind.endswith("_proj") or kind == "lm_head":
                assert str(layout) == "shard(0)"
            else:
                assert str(layout) == "replicate"
                assert name in found.unmatched


@pytest.mark.parametrize(
    ("style", "name", "shape", "expected"),
    [
        ("colwise", "m.weight", (8, 4), "shard(0)"),
        ("colwise", "m.bias", (8,), "shard(0)"),
        ("colwise_gather_output", "m.weight", (8, 4), "shard(0)"),
        ("local_colwise", "m", (2, 8, 4), "shard(1)"),
        ("colwise", "m.weight", (8,), "shard(0)"),
        ("packed_colwise", "m.weight", (8, 4), "shard(0, segments=2)"),
        ("packed_colwise", "m.bias", (8,), "shard(0, segments=2)"),
        ("packed_colwise", "m", (2, 8, 4), "shard(1, segments=2)"),
        ("rowwise", "m.weight", (8, 4), "shard(1)"),
        ("rowwise", "m.bias", (8,), "replicate"),
        ("rowwise", "m.weight", (8,), "shard(0)"),
        ("rowwise", "experts.down_bias", (2, 8), "replicate"),
        ("rowwise_rep", "m", (2, 8, 4), "shard(2)"),
        ("local_packed_rowwise", "m", (2, 8, 4), "shard(2, segments=2)"),
        ("embedding_rowwise", "m.weight", (8, 4), "shard(0)"),
        ("embedding_colwise", "m.weight", (8, 4), "shard(1)"),
        ("embedding_colwise", "embed_tokens.weight", (8, 4), "shard(1)"),
        ("rowwise", "embed_tokens.weight", (8, 4), "shard(0)"),
        ("colwise", "embed_tokens.weight", (8, 4), "shard(1)"),
        ("grouped_gemm", "experts.m", (8, 4, 4), "shard(0)"),
        ("grouped_gemm", "experts.m_bias", (8, 4), "shard(0)"),
        ("colwise", "experts.up_bias", (8, 4), "shard(1)"),
        ("sequence_parallel", "m.weight", (8,), "replicate"),
        ("ep_router", "m.weight", (8, 4), "replicate"),
        ("replicate", "m.weight", (8, 4), "replicate"),
        ("moe_tp_experts", "m", (8, 4), "replicate"),
        ("ep_dispatch_experts", "m", (8, 4), "replicate"),
        ("local_params", "m", (8, 4), "replicate"),
        ("colwise", "m.weight", (), "replicate"),
    ],
)
def test_what_a_style_does_to_a_parameter(
    style: str, name: str, shape: tuple[int, ...], expected: str
) -> None:
    module = name.removesuffix(".weight").removesuffix(".bias")
    plan = Plan({module: style, "other": "colwise"}, default="shard(-1)")
    assert str(plan.layout(name, shape)) == expected


def test_experts_and_what_is_only_about_activations() -> None:
    plan = {
        "layers.*.mlp.gate": "replicate",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.shared": "local",
    }
    shapes = {
        "model.layers.0.mlp.gate.weight": (4, 8),
        "model.layers.0.mlp.experts.gate_up_proj": (4, 12, 8),
        "model.layers.0.mlp.experts.down_proj": (4, 8, 6),
    }
    found = Plan(plan).resolve(catalog_of(shapes), Workers((2,)))
    assert list(map(str, found.layouts.values())) == [
        "replicate", "shard(1, segments=2)", "shard(2)",
    ]  # fmt: skip
    assert (found.unmatched, found.unused) == ((), ())


def test_a_rule_before_a_table_comes_first() -> None:
    # two KV heads for four workers: a table knows nothing of heads
    plan = {"*.[kv]_proj.weight": "shard(0, heads=[2])"} | LLAMA
    found = Plan(plan).resolve(catalog_of(llama()), Workers((4,)))
    k = found.cut("model.layers.0.self_attn.k_proj.weight", 1)
    q = found.cut("model.layers.0.self_attn.q_proj.weight", 1)
    assert k is not None and q is not None  # noqa: PT018 both are held
    assert (k.shape, q.shape) == ((4, 8), (2, 8))
    assert k.boxes[0].start == (0, 0)


def test_an_unknown_style_lists_the_known_ones() -> None:
    with pytest.raises(ArgumentError) as caught:
        Plan(LLAMA | {"lm_head": "column"})
    for word in ("'lm_head'", "'column'", "replicate, ", "colwise_rep", "packed_rowwise"):
        assert word in str(caught.value)
