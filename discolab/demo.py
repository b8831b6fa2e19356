"""The demonstration: a tensor-parallel MLP on handwritten digits, beside the same on one device.

The program of ``notebooks/02_tensor_parallel.ipynb`` without a notebook. Two layers in the
manner of Megatron-LM (Shoeybi et al., 2019): the first weight is cut by rows of its output
(column-parallel), the second along its input (row-parallel), so that one all-reduce in the
forward pass and one in the backward pass are all that the workers exchange.

The data are scikit-learn's bundled digits: 1,797 images of 8 x 8 grey values; a fifth is held
out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from . import ccl
from .engines import ThreadedSession
from .runtime import ArgumentError, current_worker
from .views import draw_dref, render_text

HIDDEN = 256
CLASSES = 10
PIXELS = 64


@dataclass(frozen=True)
class Digits:
    """Images as float32 [n, 64] in 0..1, labels as int64 [n]; `test` is the held-out fifth."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load_digits() -> Digits:
    """Read scikit-learn's digits and split them, always in the same way.

    Raises
    ------
    ArgumentError
        If scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        raise ArgumentError(
            "the demo reads its images from scikit-learn: pip install 'discolab[lab]'"
        ) from None
    images, labels = load(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels, dtype=torch.int64)[order]
    held_out = len(y) // 5
    return Digits(x[held_out:], y[held_out:], x[:held_out], y[:held_out])


def initial_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """The whole model's weights, float32: scale and shift [64], w1 [256, 64], w2 [10, 256] …"""
    g = torch.Generator().manual_seed(seed)
    return {
        "scale": torch.ones(PIXELS),
        "shift": torch.zeros(PIXELS),
        "w1": torch.randn(HIDDEN, PIXELS, generator=g) / PIXELS**0.5,
        "b1": torch.zeros(HIDDEN),
        "w2": torch.randn(CLASSES, HIDDEN, generator=g) / HIDDEN**0.5,
        "b2": torch.zeros(CLASSES),
    }


class CopyToWorkers(torch.autograd.Function):
    """Before a column-parallel layer: nothing forward, all-reduce of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = ccl.all_reduce(grads[0])
        return total


class ReduceFromWorkers(torch.autograd.Function):
    """After a row-parallel layer: all-reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = ccl.all_reduce(x)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def forward(w: dict[str, torch.Tensor], x: torch.Tensor, parallel: bool) -> torch.Tensor:
    """Logits [n, 10] of images [n, 64]; with `parallel`, `w` holds this worker's shards."""
    x = F.layer_norm(x, (PIXELS,), w["scale"], w["shift"])
    if parallel:
        x = CopyToWorkers.apply(x)  # type: ignore[no-untyped-call]
    hidden = F.relu(F.linear(x, w["w1"], w["b1"]))
    partial = F.linear(hidden, w["w2"])
    if parallel:
        partial = ReduceFromWorkers.apply(partial)  # type: ignore[no-untyped-call]
    return partial + w["b2"]


def train(
    weights: dict[str, torch.Tensor], digits: Digits, steps: int, parallel: bool
) -> dict[str, Any]:
    """Full-batch gradient descent with momentum; returns losses, accuracy and the weights."""
    w = {name: value.clone().requires_grad_() for name, value in weights.items()}
    optimizer = torch.optim.SGD(w.values(), lr=0.2, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(w, digits.train_images, parallel), digits.train_labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        guesses = forward(w, digits.test_images, parallel).argmax(1)
    accuracy = (guesses == digits.test_labels).float().mean().item()
    return {"losses": losses, "accuracy": accuracy, "w1": w["w1"].detach()}


def train_on_worker(
    weights: dict[str, torch.Tensor], data: dict[str, torch.Tensor], steps: int
) -> dict[str, Any]:
    """Cut this worker's shards out of the whole weights and train them (a worker function)."""
    worker = current_worker()

    def shard(value: torch.Tensor, dim: int) -> torch.Tensor:
        return value.chunk(worker.num_workers, dim)[worker.rank].to(worker.device)

    shards = {name: value.to(worker.device) for name, value in weights.items()}
    shards["w1"], shards["b1"] = shard(weights["w1"], 0), shard(weights["b1"], 0)
    shards["w2"] = shard(weights["w2"], 1)
    digits = Digits(**{name: value.to(worker.device) for name, value in data.items()})
    return train(shards, digits, steps, parallel=True)


def run(num_workers: int = 4, steps: int = 150) -> bool:
    """Run the demonstration and print what comes out; true if the two runs agree."""
    from torch.distributed.tensor import Shard

    digits = load_digits()
    print(f"{len(digits.train_labels)} images to learn from, {len(digits.test_labels)} held out")
    weights = initial_weights()
    alone = train(weights, digits, steps, parallel=False)
    with ThreadedSession(num_workers) as sess:
        print(f"{sess!r}: each holds 1/{num_workers} of both layers\n")
        result = sess.call_packed(train_on_worker, weights, vars(digits), steps)
        sess.sync_all()
        losses, accuracies = result["losses"].debug_get_from_all(), result["accuracy"]
        w1 = result["w1"]
        w1.name, w1.placements = "w1", [Shard(0)]
        print(render_text(draw_dref(w1)), end="\n\n")
        accuracy = accuracies.debug_get_from_remote(0)
    print(
        f"{'step':>5}  {'loss, one device':>16}  {f'loss, {num_workers} workers':>16}  difference"
    )
    for step in sorted({0, 1, 2, 5, 10, 20, 50, 100, steps - 1}):
        if step < steps:
            a, b = alone["losses"][step], losses[0][step]
            print(f"{step:>5}  {a:>16.7f}  {b:>16.7f}  {abs(a - b):.1e}")
    worst = max(abs(a - b) for a, b in zip(alone["losses"], losses[0], strict=True))
    agree = worst < 1e-4 and all(curve == losses[0] for curve in losses)
    print(f"\nlargest difference over {steps} steps: {worst:.1e} (float32 rounding)")
    print(
        f"held-out accuracy: {alone['accuracy']:.1%} on one device, {accuracy:.1%} on {num_workers}"
    )
    if not (agree and accuracy >= 0.95):
        print("error: the two runs should agree, at 95 % or more", file=sys.stderr)
        return False
    return True
