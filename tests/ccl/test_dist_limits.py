"""What torch has once in a process: refused, told of, or made to work on workers."""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from discolab import Session, WorkerError

from .conftest import Start


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_workers_profile_at_the_same_time(start: Start) -> None:
    def profile(ranks: list[int]) -> dict[str, int]:
        rank = dist.get_rank()
        if rank not in ranks:
            for _ in range(3):
                torch.ones(10).cos()
                dist.all_reduce(torch.ones(10))
            return {}
        with torch.profiler.profile() as found:
            for _ in range(3):
                (torch.ones(10).sin() if rank == 1 else torch.ones(10).exp()).sum()
                dist.all_reduce(torch.ones(10))
        return {event.key: event.count for event in found.key_averages()}

    def cycles() -> list[int]:
        seen: list[int] = []

        def ready(found: torch.profiler.profile) -> None:
            seen.append(sum(e.count for e in found.key_averages() if e.key == "aten::tan"))

        rank = dist.get_rank()
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
        with torch.profiler.profile(schedule=schedule, on_trace_ready=ready) as found:
            for _ in range(8):
                for _ in range(rank + 1):
                    torch.ones(3).tan()
                dist.barrier()
                found.step()
        return seen

    with start(3) as sess:
        for ranks in ([1], [0, 1, 2], [0, 2]):
            for rank, seen in enumerate(sess.call_packed(profile, ranks).debug_get_from_all()):
                if rank not in ranks:
                    assert seen == {}
                    continue
                assert seen["c10d::allreduce_"] == 3
                assert seen.get("aten::sin", 0) == (3 if rank == 1 else 0)
                assert seen.get("aten::exp", 0) == (0 if rank == 1 else 3)
                assert "aten::cos" not in seen
        assert sess.call_packed(cycles).debug_get_from_all() == [[2, 2], [4, 4], [6, 6]]


@pytest.mark.one_process
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_profile_has_nothing_of_another_session_or_the_notebook(
    make: Callable[..., Session],
) -> None:
    all_three, found = threading.Barrier(3), {}

    def profile(times: int) -> None:
        with torch.profiler.profile() as found[times]:
            all_three.wait(20)
            for _ in range(times):
                torch.ones(10).sin()
            all_three.wait(20)

    sessions = [make(1), make(1)]
    for times, sess in zip((3, 5), sessions, strict=True):
        sess.call_packed(profile, times)
    all_three.wait(20)
    torch.ones(10).sin()
    all_three.wait(20)
    for sess in sessions:
        sess.sync_all()
        sess.shutdown()
    for times, result in found.items():
        assert sum(e.count for e in result.key_averages() if e.key == "aten::sin") == times


def test_rpc_is_refused(start: Start) -> None:
    def init() -> None:
        import torch.distributed.rpc as rpc

        rpc.init_rpc(f"worker{dist.get_rank()}")

    with start(2) as sess, pytest.raises(WorkerError, match="rpc has one agent in a process"):
        sess.call_packed(init).debug_get_from_all()


def test_context_parallel_is_refused(start: Start) -> None:
    def attend() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel

        q = torch.ones(1, 2, 8, 4)
        mesh = init_device_mesh("cpu", (2,))
        with context_parallel(mesh, buffers=[q], buffer_seq_dims=[2]):
            raise AssertionError("not reached")

    with start(2) as sess, pytest.raises(WorkerError, match=r"context_parallel.*engine processes"):
        sess.call_packed(attend).debug_get_from_all()


@pytest.mark.any_engine
def test_a_loader_with_processes_and_a_sampler(start: Start) -> None:
    def load() -> list[float]:
        data = TensorDataset(torch.arange(16.0))
        sampler: Any = DistributedSampler(data, shuffle=False)
        loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=1)
        return [x for (batch,) in loader for x in batch.tolist()]

    with start(2) as sess:
        # where a fork server starts its processes, as on 3.14, each imports torch
        parts = sess.call_packed(load).debug_get_from_all(timeout=60)
    assert parts == [[float(2 * i) for i in range(8)], [float(2 * i + 1) for i in range(8)]]


class WhoLoads(IterableDataset[Any]):
    """Asks in the loader's process for its rank, as datasets that cut themselves do."""

    def __iter__(self) -> Iterator[Any]:
        yield dist.get_rank(), dist.get_world_size(), int(os.environ["RANK"])


@pytest.mark.any_engine
def test_a_loaders_processes_know_the_rank(start: Start) -> None:
    def load() -> list[Any]:
        # 3.14 would have a fork server start it, which knows of no group, here as under torchrun
        forked: Any = {"num_workers": 1, "multiprocessing_context": "fork"}
        return next(iter(DataLoader(WhoLoads(), batch_size=None, **forked)))

    with start(3) as sess:
        found = sess.call_packed(load).debug_get_from_all()
    assert [tuple(one) for one in found] == [(rank, 3, rank) for rank in range(3)]
    assert not dist.is_initialized()


def test_sparse_tensors_are_refused(start: Start) -> None:
    with start(2) as sess, pytest.raises(WorkerError, match="only dense ones can be moved"):
        sess.call_packed(lambda: dist.all_reduce(torch.eye(3).to_sparse())).debug_get_from_all()


@pytest.mark.any_engine
def test_a_thread_of_a_worker_is_told_that_it_takes_no_part(start: Start) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def on_a_thread() -> tuple[int, str]:
        with ThreadPoolExecutor(1) as pool:
            rank = pool.submit(dist.get_rank).result()
            error = pool.submit(dist.barrier).exception()
        return rank, str(error)

    with start(2) as sess:
        dist_rank = sess.call_packed(dist.get_rank).debug_get_from_all()
        found = sess.call_packed(on_a_thread).debug_get_from_all()
    assert [rank for rank, _ in found] == dist_rank == [0, 1]
    assert all("collectives run on the worker's own thread" in error for _, error in found)


def test_checkpointing_replays_the_workers_own_random_numbers(start: Start) -> None:
    from torch.utils.checkpoint import checkpoint

    def train() -> bool:
        layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
        x = torch.ones(4, 8, requires_grad=True)
        seed = random.Random(dist.get_rank()).randrange(100)
        for _ in range(20):
            torch.manual_seed(seed)
            layer(x).sum().backward()
            expected, x.grad = x.grad, None
            torch.manual_seed(seed)
            checkpoint(layer, x, use_reentrant=False).sum().backward()
            got, x.grad = x.grad, None
            if not torch.equal(got, expected):
                return False
        return True

    with start(4) as sess:
        assert all(sess.call_packed(train).debug_get_from_all())


def test_compiled_code_is_each_workers_own(start: Start) -> None:
    from discolab.notebook import cell

    source = """
weight, shift = torch.full((2,), 1.0 + rank), 10 * rank
@torch.compile(backend="aot_eager")
def step(x):
    return x * weight + shift + dist.get_rank()
[step(torch.ones(2)).tolist() for _ in range(3)]
"""
    for _ in range(4):  # one code object for all workers, and for all sessions
        with start(4) as sess:
            found = sess.call_packed(cell.run_cell, source, "<a cell>", None).debug_get_from_all()
            assert found == [[[12.0 * rank + 1] * 2] * 3 for rank in range(4)]


def test_workers_trace_programs_in_turn(start: Start) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def trace() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        x = torch.ones(2, 4)
        for _ in range(10):
            graph = torch.fx.symbolic_trace(model)
            assert [node.op for node in graph.graph.nodes] == [
                "placeholder", "call_module", "call_module", "output"
            ]  # fmt: skip
            assert torch.equal(graph(x), model(x))
            assert torch.equal(make_fx(model)(x)(x), model(x))
        exported = torch.export.export(model, (x,))
        assert torch.equal(exported.module()(x), model(x))

    methods = [torch.nn.Module.__call__, torch.nn.Module.__getattr__]
    with start(4) as sess:
        sess.call_packed(trace).debug_get_from_all()
    assert [torch.nn.Module.__call__, torch.nn.Module.__getattr__] == methods


def test_a_module_that_calls_collectives_while_it_is_imported(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "calls_barrier.py").write_text("import torch.distributed as dist\ndist.barrier()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with start(3) as sess:
        with pytest.raises(WorkerError, match="waits for its turn to import calls_barrier"):
            sess.call_packed(lambda: __import__("calls_barrier")).debug_get_from_all()
        assert sess.call_packed(dist.barrier).debug_get_from_all() == [None] * 3
    sys.modules.pop("calls_barrier", None)


@pytest.mark.any_engine
def test_some_ranks_only_pretend_to_communicate(start: Start) -> None:
    def pretend() -> list[Any]:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        found: list[Any] = []
        mine = dist.get_rank()
        for _ in range(2):
            if mine == 1:
                dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
                dist.all_reduce(torch.ones(1))
                part = dist.new_group([0, 3])
                found += [dist.get_rank(), dist.get_world_size(), part.size(), dist.get_backend()]
                dist.destroy_process_group()
            x = torch.ones(1)
            dist.all_reduce(x)
            found.append(x.item())
        return found

    with start(3) as sess:
        found = sess.call_packed(pretend).debug_get_from_all()
    assert found == [[3.0] * 2, [3, 8, 2, "fake", 3.0] * 2, [3.0] * 2]
