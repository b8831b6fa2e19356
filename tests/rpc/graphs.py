"""What the tests of distributed autograd have workers do: imported by them by name."""

import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from discolab import rpc
from discolab.rpc import context

Op = Callable[[Tensor, Tensor], Tensor]

OPS: list[Op] = [
    lambda a, b: (a * b).tanh(),
    lambda a, b: a + b.sin(),
    lambda a, b: (a - b).tanh(),
    lambda a, b: a.sigmoid() + (b * b).cos(),
    lambda a, b: (clamped(a * 1.5) * b).sin(),
    lambda a, b: hooked(a + b).tanh() + a,
]


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clamp(-0.3, 0.3)


def clamped(x: Tensor) -> Tensor:
    """The same; its backward clamps, so it must see the whole gradient, once."""
    return _Clamped.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def hooked(x: Tensor) -> Tensor:
    """The same, with a hook that is not linear."""
    y = x * 1.0
    if y.requires_grad:
        y.register_hook(lambda grad: grad.clamp(-0.2, 0.4) * (1 + grad.tanh()))
    return y


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        seen.append(("node", *_who()))
        return grads[0] * torch.rand(grads[0].shape)


seen: list[tuple[Any, ...]] = []


def _who() -> tuple[Any, ...]:
    return rpc.get_worker_info().id, os.environ["RANK"], torch.ones(1).dtype


def noisy(x: Tensor) -> Tensor:
    """The same; what runs in its backward draws, and says in `seen` as whom."""
    y: Tensor = _Noisy.apply(x)  # type: ignore[no-untyped-call]
    y = torch.utils.checkpoint.checkpoint(_dropped, y, use_reentrant=False)
    y.register_hook(lambda grad: seen.append(("hook", *_who())))
    return y


def _dropped(x: Tensor) -> Tensor:
    return nn.functional.dropout(x * torch.ones(1), 0.5)  # in the default dtype: computed again


def drawn_there() -> tuple[list[tuple[Any, ...]], float]:
    """Whom `noisy` has noted here, and the next random number."""
    found = seen.copy()
    seen.clear()
    return found, torch.rand(1).item()


def square(x: Tensor) -> Tensor:
    """Of each element."""
    return x * x


def contexts_here() -> int:
    """How many contexts this node knows."""
    return len(context.current_node().autograd.contexts.table)


def close(got: Any, wanted: Any) -> None:
    """Equal up to rounding."""
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


# -- parameters and operations, by reference ------------------------------------------------------


def make_parameter(seed: int) -> Tensor:
    """Three numbers that require grad."""
    made = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


def operate(op: int, a: Any, b: Any) -> Tensor:
    """One of `OPS` on two values, wherever they are."""
    return OPS[op](fetched(a), fetched(b))


def fetched(value: Any) -> Any:
    """The value, if it is a reference."""
    return value.to_here() if isinstance(value, rpc.RRef) else value


def gradient_here(ctx: Any, parameter: Any) -> Any:
    """On its owner: the gradient of a parameter, None if it has none."""
    return rpc.autograd.get_gradients(ctx).get(parameter.local_value())


def dot_grad_here(parameter: Any) -> Any:
    """On its owner: what is in ``.grad``, which must be nothing."""
    return parameter.local_value().grad


def multiply(parameter: Any, x: Tensor) -> Tensor:
    """On the parameter's owner."""
    return parameter.local_value() * x


def program(seed: int, ranks: list[int], steps: int) -> tuple[list[Any], list[Any], list[int]]:
    """A random one: ranks of parameters; ``(rank, op, a, b)`` of each step; values that count."""
    choose = random.Random(seed)
    homes = [rank for rank in ranks for _ in range(2)]
    done = []
    for n in range(len(homes), len(homes) + steps):
        a = choose.randrange(n)
        b = choose.randrange(max(0, n - 4), n) if choose.random() < 0.7 else choose.randrange(n)
        done.append((choose.choice(ranks), choose.randrange(len(OPS)), a, b))
    last = len(homes) + steps
    return homes, done, [choose.randrange(last // 2, last) for _ in range(2)]


def run_here(seed: int, ranks: list[int], steps: int) -> list[Any]:
    """The gradients of a random program, by torch alone."""
    homes, done, picked = program(seed, ranks, steps)
    parameters = [make_parameter(seed * 100 + n) for n in range(len(homes))]
    values = list(parameters)
    for _, op, a, b in done:
        values.append(OPS[op](values[a], values[b]))
    losses = [values[n].sum() for n in picked]
    return list(torch.autograd.grad(losses, parameters, allow_unused=True))


def run_there(rpc: Any, seed: int, ranks: list[int], steps: int) -> list[Any]:
    """The same with each step on its rank."""
    homes, done, picked = program(seed, ranks, steps)
    parameters = [
        rpc.remote(rank, make_parameter, (seed * 100 + n,)) for n, rank in enumerate(homes)
    ]
    with rpc.autograd.context() as ctx:
        values = list(parameters)
        for rank, op, a, b in done:
            values.append(rpc.remote(rank, operate, (op, values[a], values[b])))
        losses = [values[n].to_here().sum() for n in picked]
        rpc.autograd.backward(ctx, losses)
        return [
            rpc.rpc_sync(rank, gradient_here, (ctx, parameter))
            for rank, parameter in zip(homes, parameters, strict=True)
        ]


# -- modules -----------------------------------------------------------------------------------


class Stage(nn.Module):
    """One of the layers of an MLP."""

    def __init__(self, number: int, width: int = 5, *, bias: bool = True) -> None:
        super().__init__()
        before = torch.random.get_rng_state()
        torch.manual_seed(number)
        self.linear = nn.Linear(width, width, bias=bias, dtype=torch.float64)
        torch.random.set_rng_state(before)
        self.scale = nn.Parameter(torch.full((width,), 1.5, dtype=torch.float64))

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        """Of a batch."""
        return torch.tanh(self.linear(x)) * self.scale + shift


def bad_stage(number: int) -> nn.Module:
    """Can't be made."""
    raise KeyError(f"no stage {number}")


def through(stages: list[Any], x: Tensor) -> Tensor:
    """On the rank of the first stage: through it and on to the next one's rank."""
    h = fetched(stages[0])(x)
    rest = stages[1:]
    return rpc.rpc_sync(rest[0].owner(), through, (rest, h)) if rest else h


def gradients_of(ctx: Any, module: Any) -> list[Any]:
    """On its owner: of its parameters, in their order."""
    found = rpc.autograd.get_gradients(ctx)
    return [found.get(parameter) for parameter in module.local_value().parameters()]


def values_of(module: Any) -> list[Tensor]:
    """On its owner: its parameters."""
    return [parameter.detach() for parameter in module.local_value().parameters()]


# -- programs that go back and forth -----------------------------------------------------------


def zigzag(parameters: list[Any], x: Tensor) -> Tensor:
    """On the first parameter's owner, then on the second's, and so forth."""
    h = torch.tanh(parameters[0].local_value() * x)
    rest = parameters[1:]
    return rpc.rpc_sync(rest[0].owner(), zigzag, (rest, h)) + h if rest else h


def twice(x: Tensor) -> Tensor:
    """Changes what it was given, as one's own."""
    return x.mul_(2)


def pair_of(x: Tensor) -> Any:
    """Nested containers, with the same tensor twice, and one that goes nowhere."""
    y = x * 2
    return {"a": [y, y], "b": (x + 1, None), "c": 3}


# -- trouble -----------------------------------------------------------------------------------


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise LookupError("no gradient here")


def raises_backward(x: Tensor) -> Tensor:
    """Its backward raises."""
    return _Raises.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _Stuck(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, started: Any) -> Tensor:
        ctx.started = started
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.started.set()
        until = time.monotonic() + 30
        while time.monotonic() < until:
            time.sleep(0.005)
        return grads[0], None


def stuck_backward(x: Tensor, started: Any) -> Tensor:
    """Its backward takes half a minute; sets `started`."""
    return _Stuck.apply(x, started)  # type: ignore[no-any-return, no-untyped-call]


class _Dies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        os._exit(3)


def dies_backward(x: Tensor) -> Tensor:
    """Its backward ends the process."""
    return _Dies.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def dies() -> None:
    """Ends the process."""
    os._exit(3)
