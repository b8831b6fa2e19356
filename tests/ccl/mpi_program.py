"""What `test_mpi.py` runs under mpirun: one worker a process, every operation against its meaning.

Each process can make the inputs of all the others. It prints ``ok`` at the end, or fails.
"""

import itertools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI

from discolab import ccl
from discolab.ccl import choose
from discolab.ccl.reductions import combine
from discolab.runtime import ArgumentError, CollectiveError, WaitTimeoutError, WorkerInterrupted
from discolab.runtime.channel import ThreadChannel
from discolab.runtime.worker import Worker, bind_thread

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16]
DTYPES += [torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint64, torch.bool]
DTYPES += [torch.complex64, torch.float8_e5m2]
if SIZE != 3:  # all of them once
    DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.bool]
OPS = ["sum", "prod", "min", "max", "avg", "band", "bor", "bxor"]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 4)]


def make_worker(num_groups: int) -> Worker:
    """The worker of this process, bound to this thread."""
    device = torch.device("cpu")
    channel = ThreadChannel()
    worker = Worker(RANK, SIZE, num_groups, device, channel, shared={}, worker_zero_data={})
    worker.peers = {RANK: worker}
    worker.thread_id = threading.get_ident()
    bind_thread(worker)
    return worker


def make(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-100, 101, shape, generator=generator)
    if dtype is torch.bool:
        return numbers > 0
    if dtype is torch.uint64:
        return numbers.view(dtype).clone()
    return (numbers / 16 if dtype.is_floating_point else numbers).to(dtype)


def defined(op: str, dtype: torch.dtype) -> bool:
    if op in ("band", "bor", "bxor"):
        return not (dtype.is_floating_point or dtype.is_complex)
    return not (
        (dtype.is_complex and op in ("min", "max")) or (dtype is torch.bool and op == "avg")
    )


def same(got: torch.Tensor, want: torch.Tensor, note: Any) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), note
    if got.dtype.is_floating_point or got.dtype.is_complex:
        got, want = got.to(torch.complex128), want.to(torch.complex128)
        assert torch.allclose(got, want, rtol=1e-2), (note, got, want)
    else:
        assert got.tolist() == want.tolist(), (note, got, want)


def check_reductions(ranks: list[int], group: Any) -> None:
    me, n = ranks.index(RANK), len(ranks)
    for dtype, op, shape in itertools.product(DTYPES, OPS, SHAPES):
        if not defined(op, dtype):
            continue
        note = (dtype, op, shape)
        inputs = [make(rank, shape, dtype) for rank in ranks]
        want = combine(inputs, op)
        same(ccl.all_reduce(inputs[me], op, group=group), want, note)
        at_root = ccl.reduce(inputs[me], n - 1, op, group=group)
        assert (at_root is None) == (me != n - 1)
        if at_root is not None:
            same(at_root, want, note)
        parts = [make(rank, (2 * n, *shape), dtype) for rank in ranks]
        want = combine(parts, op)[2 * me : 2 * me + 2]
        same(ccl.reduce_scatter(parts[me], op, group=group), want, note)


def check_moves(ranks: list[int], group: Any) -> None:
    me, n = ranks.index(RANK), len(ranks)
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        inputs = [make(rank, shape, dtype) for rank in ranks]
        whole = torch.cat([x.reshape(1) if x.dim() == 0 else x for x in inputs])
        same(ccl.all_gather(inputs[me], group=group), whole, dtype)
        at_root = ccl.gather(inputs[me], n - 1, group=group)
        assert (at_root is None) == (me != n - 1)
        if at_root is not None:
            same(at_root, whole, dtype)
        same(ccl.broadcast(inputs[me], n - 1, group=group), inputs[n - 1], dtype)
        source = make(7, (n, *shape), dtype)
        row = torch.zeros((1, *shape), dtype=dtype)
        ccl.scatter(source if me == 0 else None, group=group, out=row)
        same(row, source[me : me + 1], dtype)
        lists = [[make(9 * i + j, (1 + (i + j) % 3,), dtype) for j in range(n)] for i in range(n)]
        outs = [torch.zeros_like(lists[i][me]) for i in range(n)]
        for i, out in enumerate(ccl.all_to_all(lists[me], group=group, out=outs)):
            same(out, lists[i][me], dtype)


def check_several() -> None:
    """Coalesced and asynchronous ones, barriers, and messages."""
    xs = [torch.full((3,), RANK + 1), torch.full((2,), RANK + 0.5)]
    integers, floats = ccl.all_reduce_coalesced(xs, group="world")
    assert integers.tolist() == [SIZE * (SIZE + 1) // 2] * 3
    assert floats.tolist() == [sum(r + 0.5 for r in range(SIZE))] * 2
    works = [ccl.all_reduce(torch.tensor(float(i)), group="world", async_op=True) for i in range(5)]
    assert [float(work.wait()) for work in reversed(works)] == [
        4.0 * SIZE - i * SIZE for i in range(5)
    ]
    ccl.barrier(group="world")
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    big = torch.arange(1 << 20)
    ccl.send(big + RANK, after)
    ccl.send(torch.ones(2) * RANK, after, tag=5)
    assert ccl.recv(torch.zeros(2), before, tag=5).tolist() == [before] * 2
    work = ccl.irecv(torch.zeros_like(big), before)
    assert torch.equal(work.wait(), big + before)
    ccl.send(torch.ones(3), after)
    raises(CollectiveError, "sent float32[3]", lambda: ccl.recv(torch.ones(4), before))
    statistics = ccl.statistics()
    assert (statistics.backend, statistics.collectives, statistics.messages) == ("mpi", 0, 0)


def raises(kind: type[Exception], words: str, func: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        func()
    assert words in str(caught.value)


def check_mistakes() -> None:
    last = RANK == SIZE - 1

    def other_shape() -> None:
        ccl.all_reduce(torch.ones(3 if last else 2), group="world")

    def other_operation() -> None:
        ccl.barrier(group="world") if last else ccl.all_reduce(torch.ones(2), group="world")

    def other_size() -> None:
        xs = [torch.ones(3 if last else 2) for _ in range(SIZE)]
        ccl.all_to_all(xs, group="world", out=[torch.ones(2) for _ in range(SIZE)])

    words = f"worker {SIZE - 1}: called all_reduce(sum) of float32[3]"
    raises(CollectiveError, words, other_shape)
    raises(CollectiveError, "members disagree", other_operation)
    raises(CollectiveError, "which has room for 8", other_size)
    assert float(ccl.all_reduce(torch.ones(()), group="world")) == SIZE


def check_absence(worker: Worker) -> None:
    """One does not come: a timeout, then an interrupt, and all go on together after each."""
    for kind in (WaitTimeoutError, WorkerInterrupted):
        if RANK:
            began = time.monotonic()
            limit = 0.2 if kind is WaitTimeoutError else None
            if limit is None:
                threading.Timer(0.2, worker.interrupt).start()
            with pytest.raises(kind):
                ccl.all_reduce(torch.ones(2), group="world", timeout=limit)
            assert 0.1 < time.monotonic() - began < 2.0
        MPI.COMM_WORLD.Barrier()
        worker.interrupts = 0
        worker.executed += 1  # as at the end of a command
        if kind is WorkerInterrupted:
            worker.resumed_at = worker.executed
        assert ccl.all_reduce(torch.ones(2), group="world").tolist() == [SIZE, SIZE]
        assert ccl.all_gather(torch.tensor([RANK]), group="world").tolist() == list(range(SIZE))


def main() -> None:
    worker = make_worker(2 if SIZE % 2 == 0 else 1)
    raises(ArgumentError, "one process each there is 'mpi'", lambda: choose.init("local", ()))
    assert choose.init("auto", ()) == f"mpi: {SIZE} workers, one a process"
    own = list(ccl.group().ranks)
    check_reductions(list(range(SIZE)), "world")
    check_reductions(own, None)
    check_moves(list(range(SIZE)), "world")
    check_moves(own, None)
    check_several()
    check_mistakes()
    check_absence(worker)
    ccl.barrier(group="world")
    sys.stdout.write(f"worker {RANK} ok\n")


if __name__ == "__main__":
    main()
