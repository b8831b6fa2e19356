"""A seventh set: bugs and right programs by somebody who knew what the documents promise, no more.

A program of a family has an argument for what is wrong with it. What should be found was written
down before the first run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from discolab.comparison import ProgramComparison

from . import context, conv, experts, llama, stages

ALL = (0, 1, 2, 3)
CLAIMS = (
    r"all-reduce|averaged where|divided twice|added twice|times the reference|holds the reference"
)
"""What would be false of a bug whose cause can't be known."""
OTHER_CLAIMS = CLAIMS.replace("all-reduce|", "")
"""The same, where a sum over the workers is what is missing."""


@dataclass(frozen=True)
class Bug:
    """The bug's program and what is to be found: places that are right, and the workers."""

    compared: Callable[..., ProgramComparison]
    places: tuple[str, ...]
    ranks: tuple[int, ...] = ALL
    said: str = ""
    """A pattern of what is said."""
    unsaid: str = CLAIMS
    """A pattern of what would be false."""


def told(compared: Callable[..., ProgramComparison], place: str, said: str, *ranks: int) -> Bug:
    """A bug whose cause is known, at the one place where it is."""
    return Bug(compared, (place,), ranks or ALL, said, r"(?!)")


# each gives a comparison that lacks only its session
_tp = partial(partial, llama.compared)
_ep = partial(partial, experts.compared)
_cp = partial(partial, context.compared)
_pp = partial(partial, stages.compared)

SUMMED = "equals the reference once summed over the workers: "
BFLOAT16 = torch.bfloat16

BUGS: dict[str, Bug] = {
    "tp: key heads repeated in another order": Bug(_tp(bug="repeat"), ("layers.0.attn.o.input",)),
    "tp: the sum of the last layer's terms is missing, bfloat16": told(
        _tp(bug="not reduced", dtype=BFLOAT16),
        "layers.1.mlp.down",
        SUMMED + "an all-reduce is missing",
    ),
    "tp: the range of words ends one too late": Bug(_tp(bug="range", edges=True), ("embed",)),
    "tp: another base of the rotary angles": Bug(_tp(bug="theta"), ("layers.0.attn.o.input",)),
    "tp: worker 2 has another layer's weight": told(
        _tp(bug="other layer"),
        "layers.1.mlp.down.weight",
        r"worker 2 holds the reference's layers\.0\.mlp\.down\.weight",
        2,
    ),
    "tp: another scale of the scores, bfloat16": Bug(
        _tp(bug="scale", dtype=BFLOAT16), ("layers.0.attn.o.input",)
    ),
    "tp: one of two projections without a copy to the region": told(
        _tp(bug="not copied"),
        "layers.1.mlp.up.input.grad",
        SUMMED + "an all-reduce is missing in backward",
    ),
    "tp: keys are rotated without gradients": Bug(
        _tp(bug="no grad"),
        ("layers.1.attn.k_norm.weight.grad", "layers.1.attn.k.weight.grad"),
        said="workers 0-3 have no gradient of it",
    ),
    "tp: the gradient of the queries' norm is not summed, bfloat16": told(
        _tp(bug="norm not summed", dtype=BFLOAT16),
        "layers.1.attn.q_norm.weight.grad",
        SUMMED + "the all-reduce of this gradient is missing",
    ),
    "sp: gathered, and not scattered in backward": told(
        _tp(bug="not scattered", sequence=True),
        "layers.1.mlp.up.input.grad",
        SUMMED + "an all-reduce is missing in backward",
    ),
    "ep: gates are not normalized": Bug(_ep(bug="not normalized"), ("moe",)),
    "ep: columns of gates without the worker's offset": Bug(
        _ep(bug="offset"),
        ("moe.experts.4.input", "moe.experts.2.input"),
        (2,),
        r"perhaps it begins at the input of moe\.experts\.2: ",
    ),
    "ep: rows over the capacity are dropped": Bug(
        _ep(bug="dropped"), ("moe",), (2, 3), r"perhaps it begins at the input of moe\.experts\.0: "
    ),
    "ep: worker 3 has its experts in the other order": told(
        _ep(bug="other expert"),
        "moe.experts.6.w1.weight",
        r"worker 3 holds the reference's moe\.experts\.7\.w1\.weight",
        3,
    ),
    "ep: averaged instead of summed, bfloat16": told(
        _ep(bug="average", dtype=BFLOAT16),
        "moe",
        "is the reference / 4: averaged where a sum belongs, or divided twice",
    ),
    "ep: gates gathered, and not scattered in backward": Bug(
        _ep(bug="gates not scattered"), ("moe.router.grad",), unsaid=OTHER_CLAIMS
    ),
    "cp: the largest score is the worker's own": Bug(
        _cp(bug="largest", program=context.in_parts), ("ctx",)
    ),
    "cp: the mask starts anew on each worker": Bug(_cp(bug="mask"), ("ctx",), (1, 2, 3)),
    "cp: positions in a row, a sequence in zigzag": Bug(_cp(bug="positions", zigzag=True), ("h0",)),
    "cp: keys gathered, and not scattered in backward": Bug(
        _cp(bug="not scattered"), ("k.grad",), (0, 1, 2), unsaid=OTHER_CLAIMS
    ),
    "cp: the gradient of the last weight is not summed": told(
        _cp(bug="not copied"), "w2.grad", SUMMED + "an all-reduce is missing"
    ),
    "pp: a stage adds its input once more": told(
        _pp(bug="residual"), "blocks.2.input", r"is off by 1 × the input of blocks\.1", 2
    ),
    "pp: targets of the other micro-batch": Bug(_pp(bug="targets"), ("output",)),
    "pp: the loss is not divided by the micro-batches": told(
        _pp(bug="not divided"), "head.grad", "is 2 times the reference", 3
    ),
    "dp: a batch norm of the worker's part": Bug(
        partial(conv.forward, bug="own statistics"), ("norm1",)
    ),
    "dp: a biased running variance": Bug(
        partial(conv.forward, bug="biased"), ("norm1.running_var",)
    ),
    "dp: one gradient is not averaged": told(
        partial(conv.backward, bug="not averaged"),
        "fc.bias.grad",
        "equals the reference once averaged over the workers: the all-reduce of this gradient",
    ),
    "dp: weight decay of norms and biases": told(
        partial(conv.stepped, bug="decay"), "norm1#2", "parameters differ since an optimizer's step"
    ),
    "dp: the schedule runs twice as fast": Bug(
        partial(conv.stepped, bug="schedule"), ("output.conv1.weight",)
    ),
    "dp: worker 1 skips its step": Bug(
        partial(conv.stepped, bug="skipped", steps=1), ("output.norm1.bias", "output.conv2.weight")
    ),
}

RIGHT: dict[str, Callable[..., ProgramComparison]] = {
    "tp": _tp(),
    "tp, bfloat16": _tp(dtype=BFLOAT16),
    "sp": _tp(sequence=True),
    "ep": _ep(),
    "ep, bfloat16": _ep(dtype=BFLOAT16),
    "cp: keys are gathered": _cp(),
    "cp: a softmax in parts": _cp(program=context.in_parts),
    "cp: zigzag": _cp(zigzag=True),
    "pp": _pp(),
    "dp: gradients are averaged": conv.backward,
    "dp: AdamW over flat shards": conv.stepped,
    "dp: batch norms of the whole batch": conv.forward,
}
