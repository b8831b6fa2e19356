"""A parameter server that waits for the gradients of all trainers, and answers them together."""

import copy
import threading

import torch
import torch.distributed.rpc as rpc
from torch import nn

ROUNDS = 4


class Server:
    """Has the model."""

    def __init__(self, trainers: int) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.trainers = trainers
        self.lock = threading.Lock()
        self.came = {}
        self.answer = torch.futures.Future()

    def get_model(self) -> nn.Module:
        """To begin with."""
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update(server_rref, number, grads):
        """Take a trainer's gradients; its answer is the new model, once all have come."""
        self = server_rref.local_value()
        with self.lock:
            self.came[number] = grads
            answer = self.answer
            if len(self.came) == self.trainers:
                for parameter, *parts in zip(
                    self.model.parameters(), *(self.came[n] for n in sorted(self.came)), strict=True
                ):
                    parameter.grad = sum(parts) / len(parts)
                self.came = {}
                self.answer = torch.futures.Future()
                self.optimizer.step()
                self.optimizer.zero_grad()
                answer.set_result([p.detach().clone() for p in self.model.parameters()])
        return answer


class Trainer:
    """Has data."""

    def __init__(self, server_rref) -> None:
        self.server = server_rref
        self.number = rpc.get_worker_info().id
        self.model = copy.deepcopy(server_rref.rpc_sync().get_model())
        generator = torch.Generator().manual_seed(self.number)
        self.x = torch.randn(16, 6, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True).sin()

    def train(self):
        """All rounds; the losses."""
        weights = [p.detach().clone() for p in self.model.parameters()]
        losses = []
        names = [name for name, _ in self.model.named_parameters()]
        for _ in range(ROUNDS):
            leaves = [w.requires_grad_() for w in weights]
            found = torch.func.functional_call(
                self.model, dict(zip(names, leaves, strict=True)), (self.x,)
            )
            loss = nn.functional.mse_loss(found, self.y)
            grads = torch.autograd.grad(loss, leaves)
            losses.append(loss.item())
            weights = rpc.rpc_sync(
                self.server.owner(), Server.update, args=(self.server, self.number, grads)
            )
        return losses


def train(server_rref):
    """What a trainer is asked for."""
    return Trainer(server_rref).train()


def run(rank, world_size):
    """One process."""
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=300)
    name = "ps" if rank == 0 else f"trainer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    numbers = []
    if rank == 0:
        server_rref = rpc.RRef(Server(world_size - 1))
        futures = [
            rpc.rpc_async(f"trainer{n}", train, args=(server_rref,)) for n in range(1, world_size)
        ]
        for losses in torch.futures.wait_all(futures):
            numbers += losses
        numbers += [p.sum().item() for p in server_rref.local_value().model.parameters()]
    rpc.shutdown()
    return numbers
