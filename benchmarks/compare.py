"""Measure what `discolab.compare` costs beside running the two programs without it.

A tensor-parallel MLP of some layers, forward and backward, on workers in threads or processes. The
peer is what people write by hand: forward hooks on both sides, the workers' outputs fetched and
joined by layouts that are known beforehand, `torch.testing.assert_close` on each; of gradients it
compares those of the parameters. Prints one JSON object.

    python benchmarks/compare.py
    python benchmarks/compare.py --engine processes --width 512
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from discolab import DRef, Session, compare, current_worker, make_session
from discolab.ccl import autograd as dist_fn


class Layer(nn.Module):
    """Up, down and back into the stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up: nn.Module = nn.Linear(width, 4 * width)
        self.down: nn.Module = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Up(nn.Module):
    """Column-parallel."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        me, n = current_worker().worker_id, current_worker().num_workers
        self.weight = nn.Parameter(whole.weight.detach().chunk(n)[me].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(n)[me].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(dist_fn.copy_to_region(x), self.weight, self.bias)


class Down(nn.Module):
    """Row-parallel."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        me, n = current_worker().worker_id, current_worker().num_workers
        self.weight = nn.Parameter(whole.weight.detach().chunk(n, 1)[me].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dist_fn.reduce_from_region(nn.functional.linear(x, self.weight)) + self.bias


def make_part(width: int, layers: int, state: dict[str, torch.Tensor]) -> nn.Module:
    """This worker's part of the model (a worker function)."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(Layer(width) for _ in range(layers)))
    model.load_state_dict(state)
    for layer in model:
        layer.up, layer.down = Up(layer.up), Down(layer.down)
    return model


def step(model: nn.Module, x: torch.Tensor) -> None:
    """Forward and backward."""
    model.zero_grad()
    model(x).square().mean().backward()


def hooked(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """As `step`, with the outputs of all modules and the gradients of parameters."""
    found: dict[str, torch.Tensor] = {}

    def taker(name: str) -> Callable[..., None]:
        def take(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            found[name] = output.detach()

        return take

    hooks = [m.register_forward_hook(taker(name)) for name, m in model.named_modules()]
    try:
        step(model, x)
    finally:
        for hook in hooks:
            hook.remove()
    found |= {f"{name}.grad": p.grad.detach() for name, p in model.named_parameters()}
    return found


def by_hand(session: Session, reference: nn.Module, model: DRef, x: torch.Tensor) -> None:
    """The loop that people write."""
    ours = hooked(reference, x)
    theirs = session.call_packed(hooked, model, x).debug_get_from_all()
    for name, value in ours.items():
        parts = [each[name] for each in theirs]
        if parts[0].shape == value.shape:
            joined = parts
        else:
            dim = next(d for d in range(value.dim()) if parts[0].shape[d] != value.shape[d])
            joined = [torch.cat(parts, dim)]
        for one in joined:
            torch.testing.assert_close(one, value, rtol=1e-4, atol=1e-4)


def median(measure: Callable[[], Any], rounds: int) -> float:
    """The median time of a call in milliseconds, after one that is not counted."""
    measure()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        measure()
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times) * 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="threads")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    reference = nn.Sequential(*(Layer(args.width) for _ in range(args.layers)))
    x = torch.randn(args.tokens, args.width)
    with make_session(args.workers, args.engine, devices="cpu") as session:
        model = session.call_packed(make_part, args.width, args.layers, reference.state_dict())

        def plain() -> None:
            step(reference, x)
            session.call_packed(step, model, x)
            session.sync_all()

        assert compare(reference, model, x)
        base = median(plain, args.rounds)
        ours = median(lambda: compare(reference, model, x), args.rounds)
        forward = median(lambda: compare(reference, model, x, backward=False), args.rounds)
        peer = median(lambda: by_hand(session, reference, model, x), args.rounds)
    print(
        json.dumps(
            {
                "engine": args.engine,
                "parameters, million": round(
                    sum(p.numel() for p in reference.parameters()) / 1e6, 2
                ),
                "both programs alone, ms": base,
                "compare, ms": ours,
                "compare / alone": round(ours / base, 2),
                "compare of forward only, ms": forward,
                "hooks and assert_close by hand, ms": peer,
                "by hand / alone": round(peer / base, 2),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
