"""What workers compute for gil.py: programs of many small operations. Worker functions.

Each runs for about as many seconds as it is told, after all workers have come to its beginning, and
gives how much it has done a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from discolab import ccl

_WARM_UP = 20  # rounds before any are counted


def train(width: int, seconds: float) -> float:
    """Steps a second: two linear layers on 8 samples, forward, backward and SGD."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(8, width), torch.randn(8, width)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return _rate(step, seconds)


class Block(nn.Module):
    """A layer of a transformer that keeps the keys and values of the tokens before."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.keys = torch.zeros(1, heads, length, width // heads)
        self.values = torch.zeros(1, heads, length, width // heads)

    def forward(self, x: Tensor, at: int) -> Tensor:
        """The next hidden state of one token, at that place."""
        q, k, v = self.qkv(self.before_attention(x)).chunk(3, dim=-1)
        q, k, v = (part.view(1, 1, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        self.keys[:, :, at : at + 1], self.values[:, :, at : at + 1] = k, v
        keys, values = self.keys[:, :, : at + 1], self.values[:, :, : at + 1]
        seen = nn.functional.scaled_dot_product_attention(q, keys, values)
        x = x + self.out(seen.transpose(1, 2).reshape(1, 1, -1))
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))


def decode(seconds: float, width: int = 256, layers: int = 12, length: int = 128) -> float:
    """Tokens a second that an eager transformer gives, one at a time."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    blocks = [Block(width, 8, length) for _ in range(layers)]
    state, at = torch.randn(1, 1, width), 0

    def token() -> None:
        nonlocal state, at
        for block in blocks:
            state = block(state, at)
        state, at = state / state.norm(), (at + 1) % length

    with torch.inference_mode():
        return _rate(token, seconds)


class Lines(torch.utils.data.Dataset[Tensor]):
    """Samples that Python makes of text, as a data set does that was never tuned."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        line = " ".join(str((index * 7 + place) % 1000) for place in range(64))
        return torch.tensor([int(word) / 1000 for word in line.split()])


def load(seconds: float) -> float:
    """Batches of 32 a second, of a loader without processes, with a linear layer to use them."""
    torch.set_num_threads(1)
    batches = iter(torch.utils.data.DataLoader(Lines(), batch_size=32))
    layer = nn.Linear(64, 1)
    return _rate(lambda: layer(next(batches)).sum().backward(), seconds)


def all_reduce(size: int, seconds: float) -> float:
    """Sums a second of so many float32 over all workers."""
    torch.set_num_threads(1)
    tensor, count = torch.ones(size), 0
    for _ in range(_WARM_UP):
        ccl.all_reduce(tensor, out=tensor, op="max")
    begin, go_on = time.perf_counter(), torch.ones(1)
    while go_on.item():
        for _ in range(20):
            ccl.all_reduce(tensor, out=tensor, op="max")
        count += 20
        go_on.fill_(float(time.perf_counter() - begin < seconds))
        ccl.all_reduce(go_on, out=go_on, op="min")  # all end after the same
    return count / (time.perf_counter() - begin)


def _rate(work: Callable[[], None], seconds: float) -> float:
    for _ in range(_WARM_UP):
        work()
    ccl.barrier()
    count, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        work()
        count += 1
    return count / spent


def noop() -> None:
    """What the control plane is measured with."""
