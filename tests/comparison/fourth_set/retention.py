"""A linear recurrence with a state for each head: heads over the workers, or the sequence."""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from discolab import Session, ccl, compare, current_worker
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

WIDTH, HEADS, WORDS, LENGTH = 16, 4, 20, 16
SIZE = WIDTH // HEADS


class TimeMix(nn.Module):
    """Each head keeps a matrix of what it has read, which fades."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(WIDTH))
        self.r, self.k, self.v, self.g = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.fade = nn.Parameter(torch.linspace(0.5, 2.0, HEADS))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def before(self, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)

    def begin(self, k: Tensor, v: Tensor, fade: Tensor) -> Tensor:
        return k.new_zeros(len(k), len(fade), SIZE, SIZE)

    def read(self, x: Tensor) -> Tensor:
        x = x + self.mix * (self.before(x) - x)
        r, k, v = (p(x).unflatten(-1, (-1, SIZE)) for p in (self.r, self.k, self.v))
        fade = torch.exp(-self.fade)
        state, found = self.begin(k, v, fade), []
        for t in range(x.shape[1]):
            state = fade[:, None, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
            found.append((r[:, t, :, None] @ state)[:, :, 0])
        y = torch.stack(found, 1).flatten(2)
        return y * torch.sigmoid(self.g(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.read(x))


class ChannelMix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)) ** 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.time, self.norm2, self.channels = (
            nn.LayerNorm(WIDTH),
            TimeMix(),
            nn.LayerNorm(WIDTH),
            ChannelMix(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.time(self.norm1(x))
        return x + self.channels(self.norm2(x))


class Retention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# Over the workers


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


def part(tensor: Tensor, dim: int = 0) -> nn.Parameter:
    return nn.Parameter(tensor.detach().chunk(world(), dim)[me()].clone())


class HeadMix(TimeMix):
    """Some of the heads."""

    def cut(self) -> None:
        for layer in (self.r, self.k, self.v, self.g):
            layer.weight = part(layer.weight)
        self.fade, self.out.weight = part(self.fade), part(self.out.weight, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.read(dist_fn.copy_to_region(x))
        return dist_fn.reduce_from_region(linear(y, self.out.weight))


class HeadRetention(Retention):
    def __init__(self, whole: Retention) -> None:
        super().__init__()
        for layer in self.layers:
            layer.time = HeadMix()
        self.to(whole.head.weight.dtype).load_state_dict(whole.state_dict())
        for layer in self.layers:
            layer.time.cut()
            layer.time.mix.register_hook(lambda grad: ccl.all_reduce(grad))


class PieceMix(TimeMix):
    """A piece of the sequence; states of the pieces before it come from their workers."""

    def before(self, x: Tensor) -> Tensor:
        ends = dist_fn.all_gather(x[:, -1:].contiguous(), dim=1)
        first = ends[:, me() - 1 : me()] if me() else torch.zeros_like(x[:, :1])
        return torch.cat([first + 0 * ends[:, :1], x[:, :-1]], 1)

    def begin(self, k: Tensor, v: Tensor, fade: Tensor) -> Tensor:
        length = k.shape[1]
        late = fade ** torch.arange(length - 1, -1, -1, dtype=fade.dtype)[:, None]
        mine = torch.einsum("blhi,blhj,lh->bhij", k, v, late)
        ends = dist_fn.all_gather(mine[None])
        state = torch.zeros_like(mine)
        for rank in range(world()):
            if rank < me():
                state = fade[:, None, None] ** length * state + ends[rank]
        return state + 0 * ends.sum(0)


class PieceRetention(Retention):
    def __init__(self, whole: Retention) -> None:
        super().__init__()
        for layer in self.layers:
            layer.time = PieceMix()
        self.load_state_dict(whole.state_dict())
        for parameter in self.parameters():
            parameter.register_hook(lambda grad: ccl.all_reduce(grad.contiguous()))

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words.chunk(world(), 1)[me()])


# Programs


def run(sess: Session, kind: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(55)
    model, words = Retention().to(dtype), torch.randint(WORDS, (2, LENGTH))
    return compare(model, sess.call_packed(kind, model), words)


def heads(sess: Session) -> Any:
    return run(sess, HeadRetention)


def half(sess: Session) -> Any:
    return run(sess, HeadRetention, torch.bfloat16)


def pieces(sess: Session) -> Any:
    return run(sess, PieceRetention)


RIGHT = ["heads", "half", "pieces"]

HARMLESS = [
    Bug(
        "states of all pieces are faded at once",
        "pieces",
        "                state = fade[:, None, None] ** length * state + ends[rank]\n",
        "                state = state + fade[:, None, None] ** (length * (me() - 1 - rank)) * ends[rank]\n",
    ),
]

BUGS = [
    Bug(
        "heads fade as the first ones do",
        "heads",
        "        self.fade, self.out.weight = part(self.fade), part(self.out.weight, 1)\n",
        "        self.fade, self.out.weight = nn.Parameter(self.fade.detach()[:1].clone()), part(self.out.weight, 1)\n",
        "parameter layers.0.time.fade",
        (1, 2, 3),
        "workers 1-3 hold worker 0's part",
        found=r"layers\.0\.time\.fade",
        accept="hold worker 0's part",
    ),
    Bug(
        "gradient of the mix is not summed",
        "heads",
        "            layer.time.mix.register_hook(lambda grad: ccl.all_reduce(grad))\n",
        "",
        "gradient of the parameter layers.1.time.mix",
        "all",
        "its all-reduce is missing",
        found=r"layers\.1\.time\.mix\.grad",
        accept="all-reduce( of this gradient)? is missing",
    ),
    Bug(
        "worker 2 reads one token late, in bfloat16",
        "half",
        "        y = self.read(dist_fn.copy_to_region(x))\n",
        "        y = self.read(dist_fn.copy_to_region(x))\n        y = y.roll(1, 1) if me() == 2 else y\n",
        "layers.0.time: output, forward (its out isn't called)",
        "all",
        "worker 2's heads are shifted by a token",
        found=r"layers\.0\.time",
    ),
    Bug(
        "states of the pieces before don't fade",
        "pieces",
        "                state = fade[:, None, None] ** length * state + ends[rank]\n",
        "                state = state + ends[rank]\n",
        "layers.0.time: input of out, forward",
        (2, 3),
        "the decay over a piece is missing",
        found=r"layers\.0\.time\.out\.input",
    ),
    Bug(
        "the token before a piece is worker 0's",
        "pieces",
        "        first = ends[:, me() - 1 : me()] if me() else torch.zeros_like(x[:, :1])\n",
        "        first = ends[:, :1] if me() else torch.zeros_like(x[:, :1])\n",
        "layers.0.time: input of r, forward",
        (2, 3),
        "wrong neighbour",
        found=r"layers\.0\.time\.r\.input",
    ),
    Bug(
        "the state comes without its gradient",
        "pieces",
        "        ends = dist_fn.all_gather(mine[None])\n",
        "        ends = torch.cat(ccl.all_gather_list(mine[None].detach()))\n",
        "layers.1.time: gradient of the output of k or v, backward",
        (0, 1, 2),
        "what later pieces read has no gradient here",
        found=r"layers\.1\.time\.(k|v)\.grad|layers\.1\.time\.fade\.grad",
    ),
    Bug(
        "worker 3 scales what its channels are mixed of",
        "heads",
        "            layer.time.cut()\n",
        "            layer.time.cut()\n            if me() == 3:\n                layer.channels.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))\n",
        "layers.0.channels: input of up, forward",
        (3,),
        "1.5 times",
        found=r"layers\.0\.channels\.up\.input",
        accept="is 1.5 times the reference",
    ),
]
