"""What workers run for gpu_check.py: each program checks its own result, and raises if it is wrong.

Programs take their rank, group and device from `current_worker`. Inputs are small whole numbers
that every worker can compute for every rank, so the expected result needs no communication. No
state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpu_places import SIMULATED

from discolab import ccl, current_worker

REDUCTIONS = ("sum", "avg", "prod", "min", "max")
ROWS = 24  # of an input; any number of workers up to 4, and 6, 8, 12, divides it

Program = Callable[[torch.dtype], None]


def given(rank: int, dtype: torch.dtype, rows: int = 0) -> torch.Tensor:
    """The input of a rank, on the CPU: ``[rows, 5]`` of 1 to 4."""
    rows = rows or ROWS * size()
    return (torch.arange(rows * 5).view(rows, 5) % 3 + 1 + rank % 2).to(dtype)


def size() -> int:
    """The number of workers."""
    return current_worker().num_workers


def mine(dtype: torch.dtype, rows: int = 0) -> torch.Tensor:
    """This worker's input, on its device."""
    worker = current_worker()
    return given(worker.worker_id, dtype, rows).to(worker.device)


def reduced(dtype: torch.dtype, op: str) -> torch.Tensor:
    """All inputs reduced, rounded once."""
    exact = torch.float64 if dtype.is_floating_point else torch.int64
    inputs = torch.stack([given(rank, dtype).to(exact) for rank in range(size())])
    if op in ("sum", "avg"):
        total = inputs.sum(0)
        if op == "avg":
            rounding = None if dtype.is_floating_point else "trunc"
            total = total.div(size(), rounding_mode=rounding)
    elif op == "prod":
        total = inputs.prod(0)
    else:
        total = inputs.amin(0) if op == "min" else inputs.amax(0)
    return total.to(dtype)


def gathered(dtype: torch.dtype) -> torch.Tensor:
    """All inputs, one after the other."""
    return torch.cat([given(rank, dtype) for rank in range(size())])


def same(got: torch.Tensor | None, expected: torch.Tensor) -> None:
    """Raise unless the result is right and on this worker's device."""
    assert got is not None
    assert got.device == current_worker().device
    torch.testing.assert_close(got.cpu(), expected)


# -- each collective ---------------------------------------------------------------------------


def all_reduce(dtype: torch.dtype) -> None:
    """Every reduction; contiguous, strided, in place."""
    for op in REDUCTIONS:
        expected = reduced(dtype, op)
        same(ccl.all_reduce(mine(dtype), op), expected)
        same(ccl.all_reduce(mine(dtype).t(), op), expected.t())
        x = mine(dtype)
        ccl.all_reduce_(x, op)
        same(x, expected)


def reduce(dtype: torch.dtype) -> None:
    """To the last worker."""
    got = ccl.reduce(mine(dtype), size() - 1)
    if current_worker().worker_id == size() - 1:
        same(got, reduced(dtype, "sum"))


def all_gather(dtype: torch.dtype) -> None:
    """New and given result, and the list."""
    expected = gathered(dtype)
    same(ccl.all_gather(mine(dtype)), expected)
    out = torch.empty(expected.shape, dtype=dtype, device=current_worker().device)
    same(ccl.all_gather(mine(dtype), out=out), expected)
    for rank, piece in enumerate(ccl.all_gather_list(mine(dtype))):
        same(piece, given(rank, dtype))


def gather(dtype: torch.dtype) -> None:
    """To worker 0."""
    got = ccl.gather(mine(dtype), 0)
    if current_worker().worker_id == 0:
        same(got, gathered(dtype))


def reduce_scatter(dtype: torch.dtype) -> None:
    """Every reduction."""
    for op in REDUCTIONS:
        got = ccl.reduce_scatter(mine(dtype), op)
        same(got, reduced(dtype, op).chunk(size())[current_worker().worker_id])


def broadcast(dtype: torch.dtype) -> None:
    """From each worker in turn; new result and in place."""
    for root in range(size()):
        same(ccl.broadcast(mine(dtype), root), given(root, dtype))
        x = mine(dtype)
        ccl.broadcast_(x, root)
        same(x, given(root, dtype))


def scatter(dtype: torch.dtype) -> None:
    """From worker 0."""
    parts = given(0, dtype).chunk(size())
    rank = current_worker().worker_id
    out = torch.empty(parts[rank].shape, dtype=dtype, device=current_worker().device)
    same(ccl.scatter(mine(dtype) if rank == 0 else None, 0, out=out), parts[rank])


def all_to_all(dtype: torch.dtype) -> None:
    """One tensor cut in equal parts."""
    rank = current_worker().worker_id
    expected = torch.cat([given(r, dtype).chunk(size())[rank] for r in range(size())])
    same(ccl.all_to_all(mine(dtype)), expected)


def coalesced(dtype: torch.dtype) -> None:
    """Several tensors in one operation."""
    for got in ccl.all_reduce_coalesced([mine(dtype), mine(dtype)]):
        same(got, reduced(dtype, "sum"))
    for got in ccl.all_gather_coalesced([mine(dtype), mine(dtype)]):
        same(got, gathered(dtype))
    part = reduced(dtype, "sum").chunk(size())[current_worker().worker_id]
    for got in ccl.reduce_scatter_coalesced([mine(dtype), mine(dtype)]):
        same(got, part)


def asynchronous(dtype: torch.dtype) -> None:
    """Two collectives under way at once."""
    first = ccl.all_reduce(mine(dtype), async_op=True)
    second = ccl.all_gather(mine(dtype), async_op=True)
    same(first.wait(), reduced(dtype, "sum"))
    same(second.wait(), gathered(dtype))


def messages(dtype: torch.dtype) -> None:
    """Round a ring: send and recv, and the forms that do not wait."""
    rank, n = current_worker().worker_id, size()
    if n == 1:
        return
    out = torch.empty_like(mine(dtype))
    left, right = (rank - 1) % n, (rank + 1) % n
    if rank == 0:  # one must begin: a backend may let send wait for its recv
        ccl.send(mine(dtype), right)
        ccl.recv(out, left)
    else:
        ccl.recv(out, left)
        ccl.send(mine(dtype), right)
    same(out, given(left, dtype))
    source = mine(dtype)
    out.zero_()
    begin = [lambda: ccl.isend(source, right), lambda: ccl.irecv(out, left)]
    for work in [start() for start in (begin if rank % 2 else begin[::-1])]:
        work.wait()
    same(out, given(left, dtype))


def barrier(dtype: torch.dtype) -> None:
    """It returns."""
    ccl.barrier()


COLLECTIVES: dict[str, Program] = {
    program.__name__: program
    for program in (
        *(all_reduce, reduce, all_gather, gather, reduce_scatter, broadcast, scatter),
        *(all_to_all, coalesced, asynchronous, messages, barrier),
    )
}


# -- torch.distributed ---------------------------------------------------------------------------


def dist_collectives(dtype: torch.dtype) -> None:
    """Code written for torchrun, unchanged."""
    import torch.distributed as dist

    worker = current_worker()
    assert dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size()) == (worker.worker_id, size())
    x = mine(dtype)
    dist.all_reduce(x)
    same(x, reduced(dtype, "sum"))
    x = mine(dtype)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    same(x, reduced(dtype, "max"))
    whole = torch.empty(gathered(dtype).shape, dtype=dtype, device=worker.device)
    dist.all_gather_into_tensor(whole, mine(dtype))
    same(whole, gathered(dtype))
    part = mine(dtype).chunk(size())[0].clone()
    dist.reduce_scatter_tensor(part, mine(dtype))
    same(part, reduced(dtype, "sum").chunk(size())[worker.worker_id])
    x = mine(dtype)
    dist.broadcast(x, 0)
    same(x, given(0, dtype))
    dist.barrier()


def dist_dtensor(dtype: torch.dtype) -> None:
    """A DTensor, and a product of two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    worker = current_worker()
    mesh = init_device_mesh(worker.device.type, (size(),))
    rows = DTensor.from_local(mine(dtype), mesh, [Shard(0)])
    same(rows.full_tensor(), gathered(dtype))
    if not dtype.is_floating_point:
        return  # CUDA multiplies no matrices of integers
    right = torch.eye(5, dtype=dtype, device=worker.device)
    product = rows @ DTensor.from_local(right, mesh, [Replicate()])
    same(product.full_tensor(), gathered(dtype))


DISTRIBUTED: dict[str, Program] = {
    "dist.all_reduce and others": dist_collectives,
    "DTensor": dist_dtensor,
}


# -- streams -----------------------------------------------------------------------------------


class Lanes:
    """The streams that a program queues its work on: the worker's own, or two others by turns.

    On the CPU there are none and everything is done at once.
    """

    def __init__(self, device: torch.device, others: bool) -> None:
        self._device = device
        self._streams: list[torch.Stream] = []
        if device.type != "cpu":
            own = torch.accelerator.current_stream(device)
            self._streams = [torch.Stream(device) for _ in range(2)] if others else [own]
            self._last = own
            edge = 256 if device.type == SIMULATED else 2048
            self._a = torch.ones(edge, edge, device=device)
            self._b = torch.empty_like(self._a)

    def next(self) -> torch.Stream | None:
        """Make the next stream the current one; what was queued on the last comes first."""
        if not self._streams:
            return None
        stream = self._streams[0]
        self._streams.append(self._streams.pop(0))
        stream.wait_stream(self._last)
        self._last = stream
        return stream

    def delay(self) -> None:
        """Keep the current stream busy for some milliseconds; returns at once."""
        if self._streams:
            for _ in range(10):
                torch.mm(self._a, self._a, out=self._b)


def stream_program(op: str, others: bool, times: int) -> int:
    """Queue: late input, `op`, a use of the result, and the next input over the old; no sync.

    One worker is later than the others, another one each time. Returns how many results were
    wrong.
    """
    worker, n = current_worker(), size()
    rank = worker.worker_id
    numel = n << 16
    lanes = Lanes(worker.device, others)
    source = torch.empty(numel, device=worker.device)
    shapes = {"all_gather": n * numel, "reduce_scatter": numel // n}
    out = torch.empty(shapes.get(op, numel), device=worker.device)
    wrong = torch.zeros((), dtype=torch.int64, device=worker.device)
    for turn in range(times):
        context = lanes.next()
        if context is not None:
            context.__enter__()
        try:
            if turn % n == rank:
                lanes.delay()
            source.fill_(turn + rank)
            expected = _start(op, source, out, turn)
            source.fill_(-1)  # the others must have had it by then
            seen = out.clone()
            if (turn + 1) % n == rank:
                lanes.delay()
            wrong += (seen.view(len(expected), -1) != expected[:, None]).any()
        finally:
            if context is not None:
                context.__exit__(None, None, None)
    if worker.device.type != "cpu":
        torch.accelerator.synchronize(worker.device)
    return int(wrong)


def _start(op: str, source: torch.Tensor, out: torch.Tensor, turn: int) -> torch.Tensor:
    """Do `op` from `source` to `out`; what must be in each of the equal pieces of `out`."""
    rank, n = current_worker().worker_id, size()
    total = float(sum(turn + r for r in range(n)))
    if op == "all_reduce":
        ccl.all_reduce(source, out=out)
    elif op == "asynchronous":
        ccl.all_reduce(source, out=out, async_op=True).wait()
    elif op == "reduce_scatter":
        ccl.reduce_scatter(source, out=out)
    elif op == "all_gather":
        ccl.all_gather(source, out=out)
        return torch.arange(turn, turn + n, dtype=torch.float32, device=out.device)
    elif op == "broadcast":
        ccl.broadcast(source, turn % n, out=out)
        total = float(turn + turn % n)
    else:
        ccl.send(source, (rank + 1) % n)
        ccl.recv(out, (rank - 1) % n)
        total = float(turn + (rank - 1) % n)
    return torch.full((1,), total, device=out.device)


STREAM_OPS = ("all_reduce", "asynchronous", "reduce_scatter", "all_gather", "broadcast", "messages")
