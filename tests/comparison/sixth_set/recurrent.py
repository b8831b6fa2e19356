"""A recurrent network whose gates are split over the workers, from a state of zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import discolab
from discolab import Session, compare, current_worker
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

WIDTH = 16


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.ih, self.hh = nn.Linear(8, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = c = torch.zeros(len(ids), WIDTH)
        for step in range(ids.shape[1]):
            i, f, g, o = (self.ih(self.words(ids[:, step])) + self.hh(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            discolab.note("h", h)
        return self.out(h)


# Over the workers


def mine(tensor: Tensor) -> Tensor:
    return tensor.chunk(current_worker().world_size)[current_worker().rank].clone()


def of_gates(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.cat([mine(gate) for gate in tensor.detach().chunk(4)]))


class Gates(Cell):
    """Each worker has its piece of each gate."""

    def __init__(self, whole: Cell) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())
        self.ih.weight, self.hh.weight = of_gates(self.ih.weight), of_gates(self.hh.weight)
        self.ih.bias = of_gates(self.ih.bias)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.zeros(len(ids), WIDTH)
        c = torch.zeros(len(ids), WIDTH // current_worker().world_size)
        for step in range(ids.shape[1]):
            x = dist_fn.copy_to_region(self.words(ids[:, step]))
            i, f, g, o = (self.ih(x) + self.hh(dist_fn.copy_to_region(h))).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = dist_fn.gather_from_region(o.sigmoid() * c.tanh())
            discolab.note("h", h)
        return self.out(h)


# Programs


def gates(sess: Session) -> Any:
    torch.manual_seed(4)
    model = Cell()
    return compare(model, sess.call_packed(Gates, model), torch.randint(11, (3, 4)))


RIGHT = ["gates"]

HARMLESS: list[Bug] = []

BUGS = [
    Bug(
        "two gates are exchanged",
        "gates",
        "            i, f, g, o = (self.ih(x) + self.hh(dist_fn.copy_to_region(h))).chunk(4, -1)",
        "            f, i, g, o = (self.ih(x) + self.hh(dist_fn.copy_to_region(h))).chunk(4, -1)",
        "note 'h': the workers do not use the value that `note` gives",
        "all",
        "the gates i and f are exchanged",
        found=r"h",
    ),
    Bug(
        "one bias is split in a row among gates",
        "gates",
        "self.ih.bias = of_gates(self.ih.bias)",
        "self.ih.bias = nn.Parameter(mine(self.ih.bias.detach()))",
        "parameter ih.bias",
        "all",
        "the bias lies otherwise than the weight",
        found=r"ih(\.bias)?|h",
    ),
]

SAID = {"one bias is split in a row among gates": "rows lie in two orders"}
UNSAID: dict[str, str] = {}
