"""A model in two parts on two workers, fed with micro-batches; and a part in a RemoteModule."""

import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn, optim
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer

SPLIT = 4


class Part(nn.Module):
    """Some layers; takes a reference to its input, and gives the output."""

    def __init__(self, seed, width_in, width_out) -> None:
        super().__init__()
        self.lock = threading.Lock()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(width_in, width_out), nn.Tanh())

    def forward(self, x_rref):
        """One micro-batch at a time."""
        x = x_rref.to_here()
        with self.lock:
            return self.layers(x)

    def parameter_rrefs(self):
        """References to its parameters."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Head(nn.Linear):
    """The last layer."""

    def __init__(self, width_in, width_out) -> None:
        torch.manual_seed(23)
        super().__init__(width_in, width_out)


class Pipeline(nn.Module):
    """On the master."""

    def __init__(self, workers) -> None:
        super().__init__()
        self.first = rpc.remote(workers[0], Part, args=(21, 6, 10))
        self.second = rpc.remote(
            workers[1], Part, args=(22,), kwargs={"width_in": 10, "width_out": 8}
        )
        self.head = RemoteModule(f"{workers[2]}/cpu", Head, args=(8, 1))

    def forward(self, xs):
        """All micro-batches at a time."""
        outputs = []
        for x in xs.split(SPLIT):
            hidden_rref = self.first.remote().forward(rpc.RRef(x))
            outputs.append(self.second.rpc_async().forward(hidden_rref))
        return self.head.forward(torch.cat(torch.futures.wait_all(outputs)))

    def parameter_rrefs(self):
        """Of all parts."""
        rrefs = self.first.remote().parameter_rrefs().to_here()
        rrefs += self.second.remote().parameter_rrefs().to_here()
        assert self.head.get_module_rref().owner_name() == "worker3"
        return rrefs + self.head.remote_parameters()


def train():
    """Losses of some steps."""
    model = Pipeline(["worker1", "worker2", "worker3"])
    optimizer = DistributedOptimizer(optim.Adam, model.parameter_rrefs(), lr=0.05)
    x = torch.randn(3 * SPLIT, 6, generator=torch.Generator().manual_seed(1))
    y = x.prod(dim=1, keepdim=True).tanh()
    numbers = []
    for _ in range(4):
        with dist_autograd.context() as context_id:
            loss = nn.functional.mse_loss(model(x), y)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        numbers.append(loss.item())
    return numbers


def run(rank, world_size):
    """One process."""
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    numbers = train() if rank == 0 else []
    rpc.shutdown()
    return numbers
