"""torch.distributed on worker threads: who am I, every collective, groups, point to point."""

import datetime
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from discolab import ThreadedSession, WorkerError, ccl

from .conftest import Start

N = 4

# names that torch 2.13 has renamed: programs use the old ones
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning"),
    pytest.mark.any_engine,
]


def run(sess: ThreadedSession, func: Callable[..., Any], *args: Any) -> list[Any]:
    """What each worker returns."""
    return sess.call_packed(func, *args).debug_get_from_all()


def piece(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that is different on each rank, small enough for exact sums and products."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + rank * 3) % 5 + rank % 2).reshape(shape).to(dtype)


# -- who am I ------------------------------------------------------------------------------------


def test_each_worker_has_its_own_world_and_the_notebook_has_none(start: Start) -> None:
    def who() -> tuple[Any, ...]:
        dist.init_process_group("nccl", init_method="env://")
        return (
            dist.is_initialized(),
            dist.get_rank(),
            dist.get_world_size(),
            int(os.environ["RANK"]),
            os.environ.get("WORLD_SIZE"),
            int(os.getenv("LOCAL_RANK", "-1")),
            dict(os.environ)["RANK"],
        )

    with start(N) as sess:
        assert run(sess, who) == [(True, r, N, r, "4", r, str(r)) for r in range(N)]
        assert not dist.is_initialized()
        assert "RANK" not in os.environ


def test_initializing_as_somebody_else_is_refused(start: Start) -> None:
    def wrong(**given: int) -> None:
        dist.init_process_group("gloo", **given)

    with start(2) as sess:
        run(sess, lambda: dist.init_process_group("gloo", rank=dist.get_rank(), world_size=2))
        for given in ({"world_size": 8}, {"rank": 3}):
            with pytest.raises(WorkerError, match=r"init_process_group: .* leave it out"):
                run(sess, lambda given=given: wrong(**given))


def test_environment_of_a_worker_is_its_own(start: Start) -> None:
    def write() -> tuple[str, bool]:
        os.environ["MASTER_ADDR"] = f"host{dist.get_rank()}"
        dist.barrier()
        del os.environ["RANK"]
        return os.environ["MASTER_ADDR"], "RANK" in os.environ

    with start(2) as sess:
        assert run(sess, write) == [("host0", False), ("host1", False)]
    assert "MASTER_ADDR" not in os.environ


def test_destroying_does_no_harm(start: Start) -> None:
    def again() -> tuple[bool, float]:
        dist.new_group([0, 1])
        dist.destroy_process_group()
        x = torch.ones(1)
        dist.all_reduce(x)
        return dist.is_initialized(), x.item()

    with start(2) as sess:
        for _ in range(3):
            assert run(sess, again) == [(True, 2.0)] * 2


# -- collectives -----------------------------------------------------------------------------------

REDUCTIONS: list[tuple[str, torch.dtype, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("SUM", torch.float32, lambda x: x.sum(0)),
    ("SUM", torch.bfloat16, lambda x: x.float().sum(0).bfloat16()),
    ("SUM", torch.complex64, lambda x: x.sum(0)),
    ("AVG", torch.float64, lambda x: x.mean(0)),
    ("PRODUCT", torch.int64, lambda x: x.prod(0)),
    ("MIN", torch.float32, lambda x: x.amin(0)),
    ("MAX", torch.int32, lambda x: x.amax(0)),
    ("BAND", torch.int32, lambda x: x[0] & x[1] & x[2] & x[3]),
    ("BOR", torch.uint8, lambda x: x[0] | x[1] | x[2] | x[3]),
    ("BXOR", torch.int64, lambda x: x[0] ^ x[1] ^ x[2] ^ x[3]),
]


def test_reductions(start: Start) -> None:
    def reduce_all(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        rank, op = dist.get_rank(), getattr(dist.ReduceOp, name)
        everywhere = piece(rank, 3, 5, dtype=dtype).t()  # strided
        dist.all_reduce(everywhere, op)
        later = piece(rank, 3, 5, dtype=dtype)
        work = dist.all_reduce(later, op, async_op=True)
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        on_one = piece(rank, 3, 5, dtype=dtype)
        dist.reduce(on_one, 2, op)
        part = torch.empty(2, dtype=dtype)
        dist.reduce_scatter_tensor(part, piece(rank, 8, dtype=dtype), op)
        listed = torch.empty(2, dtype=dtype)
        dist.reduce_scatter(listed, list(piece(rank, 8, dtype=dtype).chunk(N)), op)
        return [everywhere, later, on_one, part, listed]

    with start(N) as sess:
        for name, dtype, reference in REDUCTIONS:
            total = reference(torch.stack([piece(r, 3, 5, dtype=dtype) for r in range(N)]))
            parts = reference(torch.stack([piece(r, 8, dtype=dtype) for r in range(N)]))
            for rank, got in enumerate(run(sess, reduce_all, name, dtype)):
                assert torch.equal(got[0], total.t())
                assert torch.equal(got[1], total)
                if rank == 2:
                    assert torch.equal(got[2], total)
                assert torch.equal(got[3], parts[2 * rank : 2 * rank + 2])
                assert torch.equal(got[4], got[3])


def test_sum_of_scaled_inputs(start: Start) -> None:
    def scaled() -> torch.Tensor:
        x = torch.ones(3)
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
        return x

    with start(N) as sess:
        assert all(torch.equal(x, torch.full((3,), 2.0)) for x in run(sess, scaled))


def test_gathering_and_scattering(start: Start) -> None:
    def gather_all() -> None:
        rank = dist.get_rank()
        mine, all_of = piece(rank, 2, 3), [piece(r, 2, 3) for r in range(N)]

        listed = [torch.empty(2, 3) for _ in range(N)]
        dist.all_gather(listed, mine)
        assert all(map(torch.equal, listed, all_of))
        row, stack = torch.empty(8, 3), torch.empty(4, 2, 3)
        dist.all_gather_into_tensor(row, mine)
        dist.all_gather_into_tensor(stack, mine)
        assert torch.equal(row, torch.cat(all_of))
        assert torch.equal(stack, torch.stack(all_of))

        got = [torch.empty(2, 3) for _ in range(N)] if rank == 1 else None
        dist.gather(mine, got, dst=1)
        assert got is None or all(map(torch.equal, got, all_of))
        part = torch.empty(2, 3)
        dist.scatter(part, all_of if rank == 3 else None, src=3)
        assert torch.equal(part, mine)
        same = mine.clone()
        dist.broadcast(same, src=2)
        assert torch.equal(same, all_of[2])
        whole, inside = torch.zeros(8, 3), 2 * rank  # a part of the output as the input
        whole[inside : inside + 2] = mine
        dist.all_gather_into_tensor(whole, whole[inside : inside + 2])
        assert torch.equal(whole, torch.cat(all_of))

    with start(N) as sess:
        run(sess, gather_all)


def test_all_to_all(start: Start) -> None:
    def exchange() -> None:
        rank = dist.get_rank()
        even = torch.empty(8)
        dist.all_to_all_single(even, torch.arange(8.0) + 10 * rank)
        assert even.tolist() == [10 * r + 2 * rank + i for r in range(N) for i in range(2)]
        # rank r sends r + 1 elements to each
        uneven = torch.empty(10)
        sizes = [r + 1 for r in range(N)]
        mine = torch.full((N * (rank + 1),), 1.0 * rank)
        dist.all_to_all_single(uneven, mine, sizes, [rank + 1] * N)
        assert uneven.tolist() == [r for r in range(N) for _ in range(r + 1)]
        outs = [torch.empty(r + 1, 2) for r in range(N)]
        dist.all_to_all(outs, [torch.full((rank + 1, 2), 1.0 * rank) for _ in range(N)])
        assert all(torch.equal(out, torch.full((r + 1, 2), 1.0 * r)) for r, out in enumerate(outs))

    with start(N) as sess:
        run(sess, exchange)


def test_barriers_and_objects(start: Start) -> None:
    def objects() -> list[Any]:
        rank = dist.get_rank()
        dist.barrier()
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=5))
        everybody: list[Any] = [None] * N
        dist.all_gather_object(everybody, {"rank": rank, "text": "x" * rank})
        gathered: list[Any] | None = [None] * N if rank == 0 else None
        dist.gather_object(rank, gathered, dst=0)
        told = [rank, "mine"]
        dist.broadcast_object_list(told, src=1)
        one: list[Any] = [None]
        dist.scatter_object_list(one, [f"for {r}" for r in range(N)] if rank == 2 else None, src=2)
        return [everybody, gathered, told, one]

    with start(N) as sess:
        all_of = [{"rank": r, "text": "x" * r} for r in range(N)]
        for rank, got in enumerate(run(sess, objects)):
            gathered = list(range(N)) if rank == 0 else None
            assert got == [all_of, gathered, [1, "mine"], [f"for {rank}"]]


def test_several_tensors_as_one(start: Start) -> None:
    def coalesced() -> None:
        rank = dist.get_rank()
        xs = [piece(rank, 3), piece(rank, 2, 2)]
        totals = [torch.stack([piece(r, *x.shape) for r in range(N)]).sum(0) for x in xs]
        with dist._coalescing_manager():
            for x in xs:
                dist.all_reduce(x)
        assert all(map(torch.equal, xs, totals))
        outs = [torch.empty(4), torch.empty(8)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for i, out in enumerate(outs):
                dist.all_gather_into_tensor(out, torch.full((i + 1,), 1.0 * rank))
        manager.wait()
        assert outs[1].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        with dist._coalescing_manager(device=torch.device("cpu")):
            dist.broadcast(xs[0], 0)
            dist.all_reduce(xs[1])

    with start(N) as sess:
        run(sess, coalesced)


# -- groups ----------------------------------------------------------------------------------------


def test_groups(start: Start) -> None:
    def in_groups() -> list[Any]:
        rank = dist.get_rank()
        even, odd = dist.new_group([0, 2], backend="gloo"), dist.new_group([3, 1])
        mine, other = (even, odd) if rank % 2 == 0 else (odd, even)
        x = torch.tensor([1.0 * rank])
        dist.all_reduce(x, group=mine)
        y = torch.tensor([1.0 * rank])
        dist.broadcast(y, src=dist.get_process_group_ranks(mine)[1], group=mine)
        assert dist.get_rank(other) == -1
        dist.all_reduce(x, group=other)  # torch: not for me
        return [x.item(), y.item(), dist.get_rank(mine), dist.get_world_size(mine)]

    # without the interpreter lock this holds for threads that are started within it
    with pytest.warns(UserWarning, match="does not belong"), start(N) as sess:
        results = run(sess, in_groups)
    assert results == [[2, 2, 0, 2], [4, 3, 0, 2], [2, 2, 1, 2], [4, 3, 1, 2]]


def test_a_group_in_an_order_of_its_own(start: Start) -> None:
    def ordered() -> list[Any]:
        rank = dist.get_rank()
        group = dist.new_group([2, 0, 3, 1], sort_ranks=False)
        got = [torch.empty(1) for _ in range(N)]
        dist.all_gather(got, torch.tensor([1.0 * rank]), group=group)
        part = torch.empty(1)
        dist.scatter(part, [torch.tensor([1.0 * i]) for i in range(N)] if rank == 3 else None, 3,
                     group=group)  # fmt: skip
        out = torch.empty(N)
        dist.all_to_all_single(out, torch.arange(4.0) + 10 * rank, group=group)
        return [torch.cat(got).tolist(), part.item(), dist.get_rank(group), out.tolist()]

    with start(N) as sess:
        for rank, got in enumerate(run(sess, ordered)):
            place = [2, 0, 3, 1].index(rank)
            exchanged = [10 * r + place for r in (2, 0, 3, 1)]
            assert got == [[2, 0, 3, 1], place, place, exchanged]


def test_subgroups_and_splits(start: Start) -> None:
    def cut() -> list[Any]:
        mine, all_of = dist.new_subgroups(2)
        x = torch.tensor([1.0 * dist.get_rank()])
        dist.all_reduce(x, group=mine)
        half = dist.split_group(split_ranks=[[0, 3], [1, 2]])
        y = torch.tensor([1.0 * dist.get_rank()])
        dist.all_reduce(y, group=half)
        quarter = dist.split_group(half, [[1]])
        return [len(all_of), x.item(), y.item(), quarter is not None]

    with start(N) as sess:
        sums = [[2, 1, 3, False], [2, 1, 3, False], [2, 5, 3, True], [2, 5, 3, True]]
        assert run(sess, cut) == sums


def test_groups_stay_in_step_after_some_workers_failed(start: Start) -> None:
    def uneven() -> None:
        if dist.get_rank() == 0:
            dist.new_group([0, 1])
            dist.new_group([1, 0], use_local_synchronization=True)
        raise ValueError("here")

    def even() -> float:
        x = torch.ones(1)
        dist.all_reduce(x, group=dist.new_group([0, 1]))
        dist.all_reduce(x, group=dist.new_group([0, 1], use_local_synchronization=True))
        return x.item()

    with start(2) as sess:
        with pytest.raises(WorkerError, match="here"):
            run(sess, uneven)
        assert run(sess, even) == [4.0, 4.0]


def test_groups_of_the_same_workers_do_not_mix(start: Start) -> None:
    def cross() -> list[float]:
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        order = [first, second] if dist.get_rank() == 0 else [second, first]
        x, y = torch.tensor([1.0]), torch.tensor([10.0])
        tensors = {first: x, second: y}
        works = [dist.all_reduce(tensors[g], group=g, async_op=True) for g in order]
        for work in works:
            work.wait()
        return [x.item(), y.item()]

    with start(2) as sess:
        assert run(sess, cross) == [[2.0, 20.0]] * 2


# -- point to point --------------------------------------------------------------------------------


def test_sending_and_receiving(start: Start) -> None:
    def ring() -> list[Any]:
        rank = dist.get_rank()
        after, before = (rank + 1) % N, (rank - 1) % N
        got, other = torch.empty(2), torch.empty(2)
        dist.send(piece(rank, 2), after, tag=1)
        dist.isend(piece(rank + 4, 2), after, tag=2).wait()
        second = dist.irecv(other, before, tag=2)
        dist.recv(got, before, tag=1)
        second.wait()
        assert torch.equal(got, piece(before, 2))
        assert torch.equal(other, piece(before + 4, 2))

        ops = [dist.P2POp(dist.irecv, got, before), dist.P2POp(dist.isend, piece(rank, 2), after)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(got, piece(before, 2))

        senders = []
        if rank == 0:
            for _ in range(N - 1):
                source = dist.recv(other)
                assert torch.equal(other, torch.full((2,), 1.0 * source))
                senders.append(source)
        else:
            dist.send(torch.full((2,), 1.0 * rank), 0)
        return sorted(senders)

    with start(N) as sess:
        assert run(sess, ring)[0] == [1, 2, 3]


def test_point_to_point_within_a_group(start: Start) -> None:
    def in_group() -> list[Any]:
        rank, group = dist.get_rank(), dist.new_group([1, 3])
        got: list[Any] = [torch.tensor([7])]
        if rank == 1:
            dist.send(torch.tensor([5]), 3, group=group)
            dist.send_object_list(["an object"], dst=3, group=group)
        elif rank == 3:
            assert dist.recv(got[0], group=group) == 1
            objects: list[Any] = [None]
            dist.recv_object_list(objects, src=1, group=group)
            got += objects
        return got

    with start(N) as sess:
        assert run(sess, in_group)[3] == [torch.tensor([5]), "an object"]


def test_the_store_is_shared(start: Start) -> None:
    def use() -> tuple[bytes, int]:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.set("key", b"\x00value")
        got = store.get("key")
        count = store.add("count", 1)
        dist.barrier()
        store.wait(["key", "count"], datetime.timedelta(seconds=1))
        assert store.check(["key"])
        assert not store.check(["other"])
        return got, count

    with start(N) as sess:
        got = run(sess, use)
        assert {value for value, _ in got} == {b"\x00value"}
        assert sorted(count for _, count in got) == [1, 2, 3, 4]


# -- other backends --------------------------------------------------------------------------------


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without Gloo")
def test_the_sessions_backend_does_the_work(start: Start) -> None:
    def use() -> list[Any]:
        rank = dist.get_rank()
        x = torch.tensor([1.0 * rank])
        dist.all_reduce(x, group=dist.new_group([0, 1, 2]))
        out = torch.empty(3)
        dist.all_gather_into_tensor(out, torch.tensor([1.0 * rank]))
        everybody: list[Any] = [None] * 3
        dist.all_gather_object(everybody, rank)
        if rank == 0:
            dist.send(x, 2)
        elif rank == 2:
            dist.recv(x, 0)
        return [ccl.backend_name(), dist.get_backend(), x.item(), out.tolist(), everybody]

    with start(3) as sess:
        sess.init_ccl("gloo")
        assert run(sess, use) == [["gloo", "discolab", 3.0, [0, 1, 2], [0, 1, 2]]] * 3
