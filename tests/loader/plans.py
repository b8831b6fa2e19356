"""What the tests of layouts and plans share: parameters of a model, without a file."""

import math
from collections.abc import Sequence

import torch

from discolab.layouts.layout import Cut
from discolab.loader.catalog import Catalog, Entry

# base_model_tp_plan of Llama's configuration
LLAMA = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


def catalog_of(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Catalog:
    entries = {name: Entry(name, shape, dtype, dtype, ()) for name, shape in shapes.items()}
    return Catalog("/somewhere", "safetensors", (), entries)


def llama(layers: int = 2, prefix: str = "model.") -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (32, 8)}
    for i in range(layers):
        at = f"{prefix}layers.{i}."
        shapes |= {f"{at}self_attn.{one}_proj.weight": (8, 8) for one in "qkvo"}
        shapes |= {f"{at}mlp.{one}_proj.weight": (16, 8) for one in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (8, 16), f"{at}input_layernorm.weight": (8,)}
    return shapes | {f"{prefix}norm.weight": (8,), "lm_head.weight": (32, 8)}


def numbered(shape: Sequence[int]) -> torch.Tensor:
    """A parameter whose elements are 1, 2, 3, …: 0 is what nobody has written."""
    return torch.arange(1, math.prod(shape) + 1).reshape(tuple(shape))


def held(whole: torch.Tensor, found: Cut) -> torch.Tensor:
    """The tensor of a worker, and proof that its boxes don't overlap and stay inside."""
    local = torch.zeros(found.shape, dtype=whole.dtype)
    written = torch.zeros(found.shape, dtype=torch.int)
    for box in found.boxes:
        assert math.prod(box.shape) > 0
        for start, size, at, full, own in zip(
            box.start, box.shape, box.at, whole.shape, found.shape, strict=True
        ):
            assert 0 <= start <= start + size <= full
            assert 0 <= at <= at + size <= own
        there = tuple(map(slice, box.at, map(sum, zip(box.at, box.shape, strict=True))))
        here = tuple(map(slice, box.start, map(sum, zip(box.start, box.shape, strict=True))))
        local[there] = whole[here]
        written[there] += 1
    assert written.max().item() <= 1 if written.numel() else True
    assert found.padded == bool((written == 0).any())
    assert found.numel == local.numel()
    return local
