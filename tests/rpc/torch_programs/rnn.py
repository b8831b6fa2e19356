"""A language model whose embedding and decoder are on other workers; distributed autograd."""

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer

TOKENS, WIDTH, BATCH, LENGTH = 20, 8, 4, 5


class EmbeddingTable(nn.Module):
    """On one worker."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.table = nn.Embedding(TOKENS, WIDTH)

    def forward(self, tokens):
        """Look up."""
        return self.table(tokens)


class Decoder(nn.Module):
    """On another worker."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.linear = nn.Linear(WIDTH, TOKENS)

    def forward(self, hidden):
        """Scores of tokens."""
        return self.linear(hidden)


def parameter_rrefs(module_rref):
    """References to the parameters of a module, on its owner."""
    return [rpc.RRef(parameter) for parameter in module_rref.local_value().parameters()]


class Model(nn.Module):
    """On the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_rref = rpc.remote("encoder", EmbeddingTable)
        self.decoder_rref = rpc.remote("decoder", Decoder)
        torch.manual_seed(13)
        self.rnn = nn.LSTM(WIDTH, WIDTH)

    def forward(self, tokens, hidden):
        """Forward through three workers."""
        embedded = self.embedding_rref.rpc_sync().forward(tokens)
        output, hidden = self.rnn(embedded, hidden)
        return self.decoder_rref.rpc_sync().forward(output), hidden

    def all_parameter_rrefs(self):
        """Of all workers."""
        rrefs = []
        for module_rref in (self.embedding_rref, self.decoder_rref):
            rrefs += rpc.rpc_sync(module_rref.owner(), parameter_rrefs, args=(module_rref,))
        return rrefs + [rpc.RRef(parameter) for parameter in self.rnn.parameters()]


def train():
    """Losses of some steps."""
    model = Model()
    optimizer = DistributedOptimizer(optim.SGD, model.all_parameter_rrefs(), lr=0.5)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.zeros(1, BATCH, WIDTH), torch.zeros(1, BATCH, WIDTH)
    numbers = []
    for _ in range(4):
        tokens = torch.randint(TOKENS, (LENGTH + 1, BATCH), generator=generator)
        with dist_autograd.context() as context_id:
            assert isinstance(context_id, int)
            hidden = tuple(h.detach() for h in hidden)
            scores, hidden = model(tokens[:-1], hidden)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[1:].flatten())
            dist_autograd.backward(context_id, [loss])
            grads = dist_autograd.get_gradients(context_id)
            numbers += [loss.item(), grads[model.rnn.weight_hh_l0].abs().sum().item()]
            optimizer.step(context_id)
    table = model.embedding_rref.to_here()
    return [*numbers, sum(p.abs().sum().item() for p in table.parameters())]


def run(rank, world_size):
    """One process."""
    names = ["trainer", "encoder", "decoder", "idle"]
    rpc.init_rpc(names[rank], rank=rank, world_size=world_size, backend=rpc.BackendType.TENSORPIPE)
    numbers = train() if rank == 0 else []
    rpc.shutdown()
    return numbers
