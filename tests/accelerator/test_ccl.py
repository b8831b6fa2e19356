"""Collectives and messages of `local` on device tensors, with nothing that waits but events.

Each program writes its input late, uses the result at once, and overwrites or frees the input right
after the call: on the worker's stream, on a stream of its own, and on two by turns; with a device
for each worker, two on each, and one for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from discolab import Session, ccl, current_worker, make_session
from tests.accelerator import sim

pytestmark = pytest.mark.accelerator

RANKS, TURNS, SIZE = 4, 6, 64
PLACES = {
    "a device each": [f"sim:{r}" for r in range(RANKS)],
    "two on a device": [f"sim:{r // 2}" for r in range(RANKS)],
    "one device": ["sim:0"] * RANKS,
}
STREAMS = ("default", "own", "turns")
SUM = sum(range(RANKS))


def mine(turn: int, size: int = SIZE) -> torch.Tensor:
    """This worker's input, written late by its current stream: its rank + 10 * turn."""
    worker = current_worker()
    x = torch.empty(size, device=worker.device)
    if turn % RANKS == worker.worker_id:
        sim.sleep(0.002)
    return x.fill_(float(worker.worker_id + 10 * turn))


def total(turn: int) -> float:
    """The sum of all inputs."""
    return float(SUM + 10 * turn * RANKS)


def each(turn: int, size: int = SIZE) -> torch.Tensor:
    """All inputs, one after the other."""
    device = current_worker().device
    return torch.arange(RANKS, device=device).add(10 * turn).float().repeat_interleave(size)


Seen = Iterator["tuple[torch.Tensor, torch.Tensor | float]"]


def all_reduce(turn: int) -> Seen:
    """Every worker has the sum."""
    yield ccl.all_reduce(mine(turn)), total(turn)
    out = torch.empty(SIZE, device=current_worker().device)
    x = mine(turn)
    ccl.all_reduce(x, out=out)
    x.fill_(-1)
    yield out, total(turn)
    x = mine(turn)
    ccl.all_reduce_(x, "max")
    yield x, float(RANKS - 1 + 10 * turn)


def reduce(turn: int) -> Seen:
    """One has the sum."""
    x = mine(turn)
    out = ccl.reduce(x, turn % RANKS)
    x.fill_(-1)
    if out is not None:
        yield out, total(turn)


def all_gather(turn: int) -> Seen:
    """Every worker has all."""
    x = mine(turn)
    out = ccl.all_gather(x)
    x.fill_(-1)
    yield out, each(turn)
    yield torch.cat(ccl.all_gather_list(mine(turn))), each(turn)


def gather(turn: int) -> Seen:
    """One has all."""
    x = mine(turn)
    out = ccl.gather(x, turn % RANKS)
    x.fill_(-1)
    if out is not None:
        yield out.reshape(-1), each(turn)


def reduce_scatter(turn: int) -> Seen:
    """Every worker has a part of the sum."""
    x = mine(turn)
    out = ccl.reduce_scatter(x)
    x.fill_(-1)
    yield out, total(turn)


def broadcast(turn: int) -> Seen:
    """Every worker has what one had."""
    root = turn % RANKS
    x = mine(turn)
    out = ccl.broadcast(x, root)
    x.fill_(-1)
    yield out, float(root + 10 * turn)
    x = mine(turn)
    ccl.broadcast_(x, root)
    yield x, float(root + 10 * turn)


def scatter(turn: int) -> Seen:
    """Every worker has a part of what one had."""
    root = turn % RANKS
    if current_worker().worker_id == root:
        x = mine(turn)
        out = ccl.scatter(x, root)
        x.fill_(-1)
    else:
        out = ccl.scatter(None, root, out=mine(turn, SIZE // RANKS))
    yield out, float(root + 10 * turn)


def all_to_all(turn: int) -> Seen:
    """Every worker has a part of each."""
    x = mine(turn)
    out = ccl.all_to_all(x)
    x.fill_(-1)
    yield out, each(turn, SIZE // RANKS)


def coalesced(turn: int) -> Seen:
    """Several at once."""
    xs = [mine(turn), mine(turn, 12)]
    outs = ccl.all_reduce_coalesced(xs)
    for x in xs:
        x.fill_(-1)
    for out in outs:
        yield out, total(turn)


def asynchronous(turn: int) -> Seen:
    """Two on their way; the results are whole after `wait`."""
    x, y = mine(turn), mine(turn)
    first = ccl.all_reduce(x, async_op=True)
    second = ccl.all_gather(y, async_op=True)
    out = second.wait()
    y.fill_(-1)
    yield out, each(turn)
    out = first.wait()
    x.fill_(-1)
    yield out, total(turn)


def messages(turn: int) -> Seen:
    """Round a ring; the sender may overwrite at once."""
    rank = current_worker().worker_id
    left, right = (rank - 1) % RANKS, (rank + 1) % RANKS
    x = mine(turn)
    ccl.send(x, right)
    x.fill_(-1)
    out = torch.full((SIZE,), -2.0, device=x.device)
    ccl.recv(out, left)
    yield out, float(left + 10 * turn)
    x = mine(turn)
    works = [ccl.irecv(torch.empty(SIZE, device=x.device), left), ccl.isend(x, right)]
    got = works[0].wait()
    works[1].wait()
    del x
    yield got, float(left + 10 * turn)


def disco(turn: int) -> Seen:
    """The functions under Disco's names, on a receiver that is not contiguous."""
    from discolab.ccl import disco as functions

    device = current_worker().device
    x = mine(turn)
    out = torch.empty(SIZE, 2, device=device)[:, 0]
    functions.allreduce(x, 0, True, out)
    x.fill_(-1)
    yield out, total(turn)
    whole = torch.empty(SIZE * RANKS, device=device)
    functions.allgather(mine(turn), False, whole)
    yield whole, each(turn)


def barrier(turn: int) -> Seen:
    """It orders nothing on devices, and needs nothing."""
    ccl.barrier()
    yield mine(turn), float(current_worker().worker_id + 10 * turn)


PROGRAMS: dict[str, Callable[[int], Seen]] = {
    program.__name__: program
    for program in (
        *(all_reduce, reduce, all_gather, gather, reduce_scatter, broadcast, scatter),
        *(all_to_all, coalesced, asynchronous, messages, disco, barrier),
    )
}


def run(name: str, streams: str, turns: int = TURNS) -> int:
    """How many results were wrong, which is known at the end: nothing waits before."""
    device = current_worker().device
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    before = last = sim.current_stream(device)
    own = [torch.Stream(device) for _ in range({"default": 0, "own": 1, "turns": 2}[streams])]
    for turn in range(turns):
        if own:
            stream = own[turn % len(own)]
            stream.wait_stream(last)
            wrong.record_stream(stream)
            sim.set_stream(stream)
            last = stream
        for out, expected in PROGRAMS[name](turn):
            wrong += (out != expected).any()
    result = int(wrong.item())
    sim.set_stream(before)
    before.wait_stream(last)
    return result


@pytest.fixture(scope="module", params=PLACES)
def sess(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Four workers on some devices."""
    with make_session(RANKS, "threads", devices=PLACES[request.param], timeout=30) as session:
        assert session.init_ccl("local").startswith("local")
        yield session


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_collectives(sess: Session, name: str, streams: str, delays: int) -> None:
    """The values of all are right, whatever runs late."""
    assert sess.call_packed(run, name, streams).debug_get_from_all() == [0] * RANKS


def never_waited(own: bool) -> float:
    """Worker 0 begins a sum, lets go of it and of its input, and goes on; the others wait."""
    worker = current_worker()
    before = sim.current_stream(worker.device)
    if own:
        sim.set_stream(torch.Stream(worker.device))
        sim.current_stream(worker.device).wait_stream(before)
    x = mine(0)
    if worker.worker_id:
        sim.sleep(0.02)
    work = ccl.all_reduce(x, async_op=True)
    ccl.barrier()  # all have begun, so the sum has been given to a stream
    out = work.wait() if worker.worker_id else x
    del work, x
    ccl.barrier()  # nobody has the work any more
    if worker.worker_id == 0:
        del out
        out = torch.full((SIZE,), total(0), device=worker.device)
    ccl.barrier()
    result = float(out[0])
    sim.set_stream(before)
    return result


@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
def test_an_input_is_kept_until_it_has_been_read(sess: Session, own: bool) -> None:
    """Though its owner never waits, and has given its memory back."""
    assert sess.call_packed(never_waited, own).debug_get_from_all() == [total(0)] * RANKS


def polled(own: bool) -> float:
    """A result that is used once `done` says so, without `wait`."""
    worker = current_worker()
    before = sim.current_stream(worker.device)
    if own:
        sim.set_stream(torch.Stream(worker.device))
    sim.sleep(0.01)
    x = torch.ones(SIZE, device=worker.device)
    work = ccl.all_reduce_(x, async_op=True)
    while not work.done():
        time.sleep(0.001)
    result = float((x + 0)[0])
    sim.set_stream(before)
    return result


@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
def test_what_is_done_may_be_used(sess: Session, own: bool) -> None:
    """As under NCCL: done is what the device has done."""
    assert sess.call_packed(polled, own).debug_get_from_all() == [float(RANKS)] * RANKS
