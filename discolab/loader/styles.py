"""Parallel styles of torch and of Hugging Face, as layouts. Tables only.

A style is said of a module, and means its weight and its bias; how a weight is cut follows from its
number of dimensions. The features that a layer puts out are the last dimension but one of a weight
(of `nn.Linear`: 0; of experts stacked in three dimensions: 1), those that it takes in are the last.
An `nn.Embedding` is the other way round. A style does not say of which kind a module is, so only
the usual names of embeddings (`EMBEDDINGS`) are taken for one; for any other embedding, put a rule
for its weight before the style's. Nor does it know of heads: with fewer KV heads than workers put
``"*.k_proj.weight": "shard(0, heads=[2])"`` before it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..layouts.layout import REPLICATE, Layout
from ..runtime.errors import ArgumentError

OUT, IN, VOCAB, FIRST, LAST = "out", "in", "vocab", "first", "last"
WHOLE, HOOK = "whole", "hook"

EMBEDDINGS = frozenset(
    (
        "embed_tokens", "tok_embeddings", "token_embedding", "tok_embedding", "word_embeddings",
        "embed_positions", "position_embeddings", "token_type_embeddings", "embed_in", "wte", "wpe",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Style:
    """What a style does to the parameters of a module.

    Attributes
    ----------
    name
        As it is written in a table, or torch's class.
    cuts
        What is cut: ``"out"`` or ``"in"`` (features), ``"vocab"``, ``"first"`` (dimension 0, as
        experts), ``"last"`` (the last one), or nothing: ``"whole"``; ``"hook"`` for styles that
        are about activations only.
    packed
        How many equal parameters are fused along that dimension.
    torch
        Whether it is a class of torch; otherwise it is from a table of Hugging Face.
    """

    name: str
    cuts: str
    packed: int = 1
    torch: bool = False

    def layout(self, module: str, parameter: str, ndim: int) -> Layout:
        """The layout of a parameter with `ndim` dimensions of a module.

        Parameters
        ----------
        module, parameter
            Their own names, without what stands before the last dot: ``"q_proj"``, ``"weight"``.
        """
        if ndim == 0 or self.cuts in (WHOLE, HOOK):
            return REPLICATE
        bias = parameter.endswith("bias")
        out, into = max(ndim - 2, 0), ndim - 1
        if module in EMBEDDINGS and not bias and ndim == 2:
            out, into = into, out
        if self.cuts == OUT:
            dim: int | None = ndim - 1 if bias else out
        elif self.cuts == IN:
            # what each worker puts out is a part of the sum, and a bias is added to it once
            dim = None if bias else into
        else:
            dim = ndim - 1 if self.cuts == LAST else 0
        if dim is None:
            return REPLICATE
        return Layout((dim,), (self.packed,) if self.packed > 1 else ())

    def __str__(self) -> str:
        return self.name


def _styles(names: Iterable[str], cuts: str, packed: int = 1, torch: bool = False) -> list[Style]:
    return [Style(name, cuts, packed, torch) for name in names]


STYLES: Mapping[str, Style] = {
    style.name: style
    for style in (
        *_styles(("ColwiseParallel",), OUT, torch=True),
        *_styles(("RowwiseParallel",), IN, torch=True),
        *_styles(("SequenceParallel",), WHOLE, torch=True),
        *_styles(
            ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput"),
            HOOK, torch=True,
        ),
        *_styles(("colwise", "colwise_rep", "colwise_gather_output", "local_colwise"), OUT),
        *_styles(("packed_colwise", "local_packed_colwise", "moe_gate_up_colwise"), OUT, 2),
        *_styles(("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise",
                  "moe_down_rowwise"), IN),
        *_styles(("packed_rowwise", "local_packed_rowwise"), IN, 2),
        *_styles(("embedding_rowwise", "vocab_parallel_rowwise"), VOCAB),
        *_styles(("embedding_colwise",), LAST),
        *_styles(("grouped_gemm",), FIRST),
        *_styles(("sequence_parallel", "replicated_with_grad_allreduce", "mla_kv_a_proj",
                  "ep_router", "megamoe_router"), WHOLE),
        *_styles(("gather", "local", "local_params", "all_reduce", "moe_tp_experts",
                  "ep_dispatch_experts", "megamoe_experts", "moe_identity_expert"), HOOK),
    )
}  # fmt: skip

#: the word of tables for a module that is not cut; in a plan of layouts it is a layout
WHOLE_MODULE = Style("replicate", WHOLE)


def style_named(name: str) -> Style:
    """The style with this name.

    Raises
    ------
    ArgumentError
        If there is none; it lists those that there are.
    """
    try:
        return STYLES[name]
    except KeyError:
        pass
    near = difflib.get_close_matches(name, STYLES, 1, 0.75)
    mean = f"; did you mean {near[0]!r}?" if near else "."
    raise ArgumentError(
        f"{name!r} is no parallel style that discolab knows{mean} Known are "
        f"{', '.join(['replicate', *STYLES])}. For any other, give the layout of each of its "
        'parameters: {"*.q_proj.weight": "shard(0)"}'
    )


def style_of(value: Any) -> Style | None:
    """The style that a `ParallelStyle` of torch is; None if `value` is none.

    Raises
    ------
    ArgumentError
        If it is a `ParallelStyle` of a kind that is not known.
    """
    from torch.distributed.tensor.parallel import ParallelStyle

    if not isinstance(value, ParallelStyle):
        return None
    for kind in type(value).__mro__:
        found = STYLES.get(kind.__name__)
        if found is not None and found.torch and kind.__module__.startswith("torch."):
            return found
    return style_named(type(value).__name__)
