"""What workers share with the process: its own groups, its imports, its compiled code."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from discolab import ArgumentError, ThreadedSession, WorkerError, ccl, current_worker
from discolab.isolation import table
from discolab.runtime.interrupts import shield

from .conftest import Start

needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no Gloo here")


# -- a group of the process itself -----------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """The process is rank 0 of 1 for a while."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def begin() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def end() -> None:
    dist.destroy_process_group()
    assert not dist.is_initialized()


def use() -> None:
    """The process's own group does its work, by name too."""
    assert dist.get_world_size() == 1
    x = torch.ones(2)
    dist.all_reduce(x)
    total = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    assert x.tolist() == total.tolist() == [1.0, 1.0]


def by_both_ways() -> tuple[int, float, float]:
    x = torch.tensor([10.0 ** dist.get_rank()])
    total: Any = functional.all_reduce(x, "sum", dist.group.WORLD)
    dist.all_reduce(x)
    return dist.get_rank(), x.item(), total.item()


def check(sess: ThreadedSession) -> None:
    found = sess.call_packed(by_both_ways).debug_get_from_all()
    assert found == [(rank, 111.0, 111.0) for rank in range(3)]


@needs_gloo
def test_a_group_that_outlives_sessions(start: Start, alone: None) -> None:
    begin()
    for _ in range(3):
        with start(3) as sess:
            check(sess)
            use()
            check(sess)
        use()
    end()
    with start(3) as sess:
        check(sess)


@needs_gloo
def test_a_group_that_ends_in_a_session(start: Start, alone: None) -> None:
    begin()
    with start(3) as sess:
        check(sess)
        end()
        check(sess)
    begin()
    use()
    with start(3) as sess:
        check(sess)
    end()


@needs_gloo
def test_a_group_that_begins_in_a_session(start: Start, alone: None) -> None:
    for _ in range(2):
        with start(3) as sess:
            begin()
            use()
            check(sess)
        use()
        with start(3) as sess:
            check(sess)
            end()
            begin()
            use()
        use()
        end()


@needs_gloo
def test_a_session_on_another_thread_than_the_group(start: Start, alone: None) -> None:
    begin()
    errors: list[BaseException] = []
    there, done = threading.Event(), threading.Event()

    def elsewhere() -> None:
        try:
            with start(3) as sess:
                check(sess)
                there.set()
                assert done.wait(20)
                use()  # the group is the process's, not its maker's
                check(sess)
        except BaseException as exc:
            errors.append(exc)
        finally:
            there.set()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert there.wait(20)
    use()
    done.set()
    thread.join(20)
    assert not errors
    use()


# -- a session that can't be set up ----------------------------------------------------------------


def test_what_fails_at_the_start_leaves_nothing_in_place(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(patches: Any) -> None:
        raise RuntimeError("not today")

    row = table.Row("what fails", table.Treatment.SHARED, "", install=refuse)
    world, started = dist.distributed_c10d._world, threading.Thread.start
    with monkeypatch.context() as patch:
        patch.setitem(table._rows, row.state, row)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="not today"):
                ThreadedSession(3, devices="cpu", timeout=20)
            assert dist.distributed_c10d._world is world
            assert threading.Thread.start is started
    with start(3) as sess:
        check(sess)
    assert dist.distributed_c10d._world is world


# -- imports ---------------------------------------------------------------------------------------

IMPORT = """
import sys, time
import torch
from discolab import ThreadedSession, WorkerError

def first_import():
    from torch.distributed.fsdp import fully_shard
    layer = torch.nn.Linear(4, 4)
    fully_shard(layer)
    layer(torch.ones(2, 4)).sum().backward()

name = sys.argv[1]
with ThreadedSession(2, devices="cpu", timeout=60) as sess:
    called = sess.call_packed(first_import)
    began = time.monotonic()
    while name not in sys.modules:
        assert time.monotonic() < began + 60
    assert sess.interrupt(60) == []
    try:
        called.debug_get_from_all()
    except WorkerError as exc:
        assert all(failure.interrupted for failure in exc.failures), exc
    else:
        raise AssertionError("not interrupted")
    sess.call_packed(first_import).debug_get_from_all()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["torch.distributed.tensor._dtensor_spec", "torch.distributed.fsdp._fully_shard"]
)
def test_an_interrupt_leaves_no_module_half_imported(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT, name],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.one_process
def test_an_interrupt_waits_for_what_is_held_back(pair: ThreadedSession) -> None:
    inside = threading.Event()
    seen: list[str] = []

    def work() -> None:
        worker = current_worker()
        if worker.worker_id:
            return
        with shield(), shield():
            inside.set()
            while not worker.interrupts:
                pass
            for _ in range(100_000):  # an exception would come within a few steps
                pass
            seen.append("whole")
        seen.append("never")

    called = pair.call_packed(work)
    assert inside.wait(20)
    assert pair.interrupt(20) == []
    with pytest.raises(WorkerError, match="interrupted"):
        called.debug_get_from_all()
    assert seen == ["whole"]


# -- torch.compile ---------------------------------------------------------------------------------


def compile_again(reset_ranks: list[int]) -> list[int]:
    """How often one function was compiled after each of three calls, a reset before the last."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    found = []
    for number in range(3):
        if number == 2 and current_worker().worker_id in reset_ranks:
            torch.compiler.reset()
        ccl.barrier()  # what follows a reset, on all workers
        for _ in range(20):
            compiled = torch.compile(scale, backend=backend)
            assert torch.equal(compiled(torch.ones(2), 3), torch.full((2,), 3.0))
        found.append(len(graphs))
    return found


def test_a_worker_resets_its_own_compiler(start: Start) -> None:
    with start(2) as sess:
        counts = sess.call_packed(compile_again, [0]).debug_get_from_all()
    assert counts == [[1, 1, 2], [1, 1, 1]]
    torch.compiler.reset()


def scale(x: torch.Tensor, factor: int) -> torch.Tensor:
    return x * factor


def test_each_worker_has_the_versions_that_a_process_has(start: Start) -> None:
    compiled: list[int] = []

    def count() -> int:
        def backend(graph: Any, _inputs: Any) -> Any:
            compiled.append(dist.get_rank())
            return graph

        scaled = torch.compile(scale, backend=backend, dynamic=False)
        return sum(int(scaled(torch.ones(1), factor).item()) for factor in range(6))

    with start(4) as sess:
        assert sess.call_packed(count).debug_get_from_all() == [15] * 4
    assert sorted(compiled) == sorted([*range(4)] * 6)


# -- futures, and who is addressed -----------------------------------------------------------------


def test_a_future_is_had_without_waiting(start: Start) -> None:
    def run() -> tuple[float, float, bool]:
        rank = dist.get_rank()
        x = torch.ones(1)
        if rank % 2:
            dist.recv(torch.empty(1), rank - 1)
        work: Any = dist.all_reduce(x, async_op=True)
        future = work.get_future()
        early = future.done()
        if rank % 2 == 0:  # the other one joins only after this
            dist.send(torch.ones(1), rank + 1)
        doubled = future.then(lambda done: done.value()[0] * 2)
        assert future.done()
        return future.wait()[0].item(), doubled.wait().item(), early and rank == 0

    with start(4) as sess:
        assert sess.call_packed(run).debug_get_from_all() == [(4.0, 8.0, False)] * 4


def test_a_future_tells_what_went_wrong(start: Start) -> None:
    def run() -> None:
        work: Any = dist.all_reduce(torch.ones(2 + dist.get_rank()), async_op=True)
        work.get_future().wait()

    with start(2) as sess, pytest.raises(WorkerError, match="shape"):
        sess.call_packed(run).debug_get_from_all()


def test_torchs_own_code_waits_for_futures(start: Start) -> None:
    def run() -> list[float]:
        works: list[Any] = [dist.all_reduce(torch.ones(1) * k, async_op=True) for k in range(3)]
        all_of_them = torch.futures.collect_all([work.get_future() for work in works]).wait()
        return [one.value()[0].item() for one in all_of_them]

    with start(3) as sess:
        assert sess.call_packed(run).debug_get_from_all() == [[0.0, 3.0, 6.0]] * 3


def test_a_hook_that_gives_the_future_itself(start: Start) -> None:
    """torch wants one with a tensor, and says so; it must not wait where no interrupt comes."""

    def hook(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        future: torch.futures.Future[torch.Tensor] = work.get_future()
        return future

    def run() -> None:
        layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        layer.register_comm_hook(None, hook)
        layer(torch.ones(1, 1)).sum().backward()

    with start(2) as sess, pytest.raises(WorkerError, match="Tensor"):
        sess.call_packed(run).debug_get_from_all()


@pytest.mark.parametrize("place", [9, -1])
def test_a_root_that_is_none_is_told(start: Start, place: int) -> None:
    x, many = torch.ones(1), [torch.ones(1)] * 3
    to_root = dist.ReduceOptions()
    to_root.rootRank = place
    calls: dict[str, Any] = {
        "broadcast": lambda group: group.broadcast(x, place),
        "reduce": lambda group: group.reduce(x, to_root),
        "gather": lambda group: group.gather([many], [x], place),
        "scatter": lambda group: group.scatter([x], [many], place),
        "send": lambda group: group.send([x], place),
        "recv": lambda group: group.recv([x], place),
    }

    def told() -> dict[str, str]:
        found = {}
        for name, call in calls.items():
            with pytest.raises(ArgumentError) as caught:
                call(dist.group.WORLD)
            found[name] = str(caught.value)
        return found

    with start(3) as sess:
        for found in sess.call_packed(told).debug_get_from_all():
            for name, text in found.items():
                assert text.startswith(f"{name}: the ")
                assert f"is rank {place} of the process group of workers 0-2" in text
        if place > 0:
            with pytest.raises(WorkerError, match="broadcast: the root is rank 9"):
                sess.call_packed(lambda: dist.broadcast(torch.ones(1), 9)).debug_get_from_all()
