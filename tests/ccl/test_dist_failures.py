"""torch.distributed on worker threads when it goes wrong: told on every member, never a hang."""

import datetime
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from discolab import ThreadedSession, WorkerError
from discolab.ccl.distributed import bridge

from .conftest import Start


def fine() -> float:
    """The session and its groups are usable after what came before."""
    x = torch.ones(3)
    dist.all_reduce(x, group=dist.new_group(list(range(dist.get_world_size()))))
    dist.all_reduce(x)
    return x[0].item()


def told(sess: ThreadedSession, func: Callable[[], Any]) -> dict[int, str]:
    """What each worker says of a call that fails; the session is usable after it."""
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        sess.call_packed(func).debug_get_from_all()
    assert time.monotonic() - began < 15.0  # a first use of torch's modules imports a lot
    sess.sync_all()
    n = sess.num_workers
    assert sess.call_packed(fine).debug_get_from_all() == [float(n * n)] * n
    return {failure.rank: failure.message for failure in caught.value.failures}


# -- programs that can't complete ------------------------------------------------------------------


def other_shape() -> None:
    dist.all_reduce(torch.ones(4 + (dist.get_rank() == 2)))


def other_operation() -> None:
    if dist.get_rank() == 1:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(4))


def other_reduction() -> None:
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if dist.get_rank() == 0 else dist.ReduceOp.SUM)


def other_root() -> None:
    dist.broadcast(torch.ones(4), src=int(dist.get_rank() == 3))


def left_out() -> None:
    if dist.get_rank() != 3:
        dist.all_reduce(torch.ones(4))


def crossed() -> None:
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2])]
    rank = dist.get_rank()
    if rank == 0:
        dist.barrier(pair[2])
        dist.barrier(pair[0])
    elif rank == 2:
        dist.barrier(pair[1])
        dist.barrier(pair[2])
    elif rank == 1:
        dist.barrier(pair[0])


def never_sent() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.ones(2), src=1)


def in_a_group() -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(2), group=group)


def later() -> None:
    work = dist.all_reduce(torch.ones(4 + dist.get_rank()), async_op=True)
    work.wait()


def deprecated() -> None:
    """What torch wraps in a decorator of `typing_extensions`, with other shapes."""
    dist.reduce_scatter_tensor(
        torch.empty(1 + dist.get_rank() // 3), torch.ones(4 * (1 + dist.get_rank() // 3))
    )


HERE = Path(__file__).name


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("func", "ranks", "words"),
    [
        (other_shape, [0, 1, 2, 3], ["float32[5]", "worker 2: called all_reduce", HERE]),
        (other_operation, [0, 1, 2, 3], ["operation", "called barrier", "in other_operation"]),
        (other_reduction, [0, 1, 2, 3], ["reduction", "all_reduce(max)", "in other_reduction"]),
        (other_root, [0, 1, 2, 3], ["root", "in other_root"]),
        (left_out, [0, 1, 2], ["worker 3: finished the call without it"]),
        (crossed, [0, 1, 2], ["worker 3: finished the call without it"]),
        (never_sent, [0], ["recv", "worker 1", "without sending"]),
        (in_a_group, [1], ["workers 1-2", "worker 2: finished the call without it"]),
        (later, [0, 1, 2, 3], ["shape", "float32[7]"]),
        (deprecated, [0, 1, 2, 3], [": called reduce_scatter", "in deprecated"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_complete_is_told_with_the_users_lines(
    start: Start, func: Callable[[], None], ranks: list[int], words: list[str]
) -> None:
    with start(4) as sess:
        messages = told(sess, func)
    assert set(ranks) <= set(messages)
    text = "\n".join(messages.values())
    for word in words:
        assert word in text
    calls = re.findall(r"^ *workers? [-0-9, ]+: called .*$", text, re.MULTILINE)
    assert not any("distributed_c10d" in line for line in calls)  # the user's line, not torch's


@pytest.mark.any_engine
def test_an_exception_of_one_ends_the_others_collective(start: Start) -> None:
    def one_fails() -> None:
        if dist.get_rank() == 1:
            raise ValueError("mine")
        objects: list[Any] = [None] * 4
        dist.all_gather_object(objects, "x")

    with start(4) as sess:
        messages = told(sess, one_fails)
        assert messages[1] == "mine"
        assert all("worker 1: failed: ValueError: mine" in messages[r] for r in (0, 2, 3))


@pytest.mark.any_engine
def test_an_exception_among_coalesced_calls(start: Start) -> None:
    def coalesce(fail: bool) -> list[float]:
        x, y = torch.ones(1), torch.ones(2)
        for device in (None, torch.device("cpu")):
            with dist._coalescing_manager(device=device):
                dist.all_reduce(x)
                if fail and device is not None:
                    raise ValueError("here")
                dist.all_reduce(y)
            with dist._coalescing_manager():
                dist.all_reduce(x)
                if fail:
                    raise ValueError("here")
        return [x.item(), *y.tolist()]

    with start(2) as sess:
        for _ in range(2):
            assert told(sess, lambda: coalesce(True))[0] == "here"
            assert sess.call_packed(coalesce, False).debug_get_from_all() == [[16.0, 4.0, 4.0]] * 2


@pytest.mark.any_engine
def test_an_exception_within_backward(start: Start) -> None:
    import torch.distributed._functional_collectives as funcol

    def backward() -> None:
        x = torch.ones(2, requires_grad=True)
        y = gather(x, 0, dist.group.WORLD)
        if dist.get_rank() == 0:
            y = y * 2
            x.register_hook(lambda grad: 1 / 0)
        else:
            y.register_hook(lambda grad: dist.barrier())
        y.sum().backward()

    newer = getattr(funcol, "all_gather_single_autograd", None)
    gather = newer or funcol.all_gather_tensor_autograd
    with start(2) as sess:
        told(sess, backward)


@pytest.mark.any_engine
def test_a_timeout_is_kept(start: Start) -> None:
    def slow() -> None:
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.2))
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1), group=group)
        else:
            time.sleep(1.5)

    with start(2) as sess:
        assert "gave up after 0.2 s" in told(sess, slow)[0]


# -- Ctrl-C --------------------------------------------------------------------------------------


def wait_in_all_reduce() -> None:
    if dist.get_rank() == 0:
        while True:
            time.sleep(1)
    dist.all_reduce(torch.ones(4))


def wait_in_store() -> None:
    c10d._get_default_store().get(f"never {dist.get_rank()}")


def wait_in_backward() -> None:
    import torch.distributed.nn.functional as nn

    x = torch.ones(2, requires_grad=True)
    y = nn.all_reduce(x)
    if dist.get_rank() == 0:
        while True:
            time.sleep(1)
    y.sum().backward()


def wait_in_reducer() -> None:
    """The exception passes through C++ code of DDP and of autograd."""
    from torch.nn.parallel import DistributedDataParallel

    # kept: one that is collected within its own backward waits in C++ for a lock that it holds
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    if dist.get_rank() == 0:
        while True:
            time.sleep(1)
    loss.backward()


def wait_in_fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    loss = fully_shard(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum()
    if dist.get_rank() == 0:
        while True:
            time.sleep(1)
    loss.backward()


# the interrupt may land in the callback of a weak reference, which only prints it; it is sent again
may_print = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

WAITS = [
    wait_in_all_reduce, wait_in_store, wait_in_backward, wait_in_reducer, wait_in_fully_sharded,
]  # fmt: skip


def spin() -> None:
    while True:
        group = dist.new_group([0, 1, 2])
        work = dist.all_reduce(torch.ones(16), group=group, async_op=True)
        dist.all_gather([torch.empty(2) for _ in range(3)], torch.ones(2))
        work.wait()
        after, before = (dist.get_rank() + 1) % 3, (dist.get_rank() - 1) % 3
        dist.send(torch.ones(1), after)
        dist.recv(torch.ones(1), before)


@may_print
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.any_engine
@pytest.mark.parametrize("func", WAITS)
def test_interrupt_ends_a_wait(start: Start, func: Callable[[], None]) -> None:
    with start(3) as sess:
        for _ in range(3):
            ref = sess.call_packed(func)
            while not any(status.state == "waiting" for status in sess.status()):
                time.sleep(0.005)
            began = time.monotonic()
            threading.Thread(target=sess.interrupt).start()
            with pytest.raises(WorkerError):
                ref.debug_get_from_all()
            assert time.monotonic() - began < 8
            assert sess.call_packed(fine).debug_get_from_all() == [9.0] * 3


@pytest.mark.any_engine
@pytest.mark.usefixtures("drops_exceptions")
@may_print
def test_interrupt_lands_anywhere(start: Start) -> None:
    with start(3) as sess:
        for turn in range(25):
            ref = sess.call_packed(spin)
            time.sleep(0.002 + 0.0007 * (turn % 7))
            assert sess.interrupt() == []
            assert sess.call_packed(fine).debug_get_from_all() == [9.0] * 3
            del ref


@pytest.mark.any_engine
def test_a_key_that_nobody_can_store_any_more(start: Start) -> None:
    def alone() -> None:
        if dist.get_rank() == 0:
            c10d._get_default_store().get("absent")

    with start(2) as sess:
        assert "absent in the store" in told(sess, alone)[0]


@pytest.mark.any_engine
def test_keys_that_two_wait_for_and_the_third_has_not_stored(start: Start) -> None:
    def all_meet() -> None:
        store = c10d._get_default_store()
        if dist.get_rank() == 1:
            raise ValueError("before it stores")
        store.set(f"here {dist.get_rank()}", "")
        store.wait([f"here {rank}" for rank in range(3)])

    with start(3) as sess:
        failed = told(sess, all_meet)
        for rank in (0, 2):
            assert "here 1" in failed[rank]
            assert "wait in the store themselves" in failed[rank]


# -- what threads share --------------------------------------------------------------------------


@pytest.mark.any_engine
def test_two_sessions_at_once_and_one_after_another(start: Start) -> None:
    def total() -> tuple[int, float]:
        x = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(x)
        return dist.get_world_size(), x.item()

    for _ in range(3):
        with start(2) as two, start(3) as three:
            refs = [(sess, sess.call_packed(total)) for _ in range(10) for sess in (two, three)]
            for sess, ref in refs:
                expected = (2, 3.0) if sess is two else (3, 6.0)
                assert set(ref.debug_get_from_all()) == {expected}


def test_dtensors_in_two_sessions_at_once(start: Start) -> None:
    def multiply(sizes: range) -> int:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for size in sizes:  # new shapes: torch works out how to shard each of them
            x = torch.arange(float(size * 6)).reshape(size, 6)
            product = distribute_tensor(x, mesh, [Shard(0)]) @ distribute_tensor(
                x.t().contiguous(), mesh, [Replicate()]
            )
            assert torch.equal(product.full_tensor(), x @ x.t())
        return dist.get_world_size()

    with start(2) as two, start(3) as three:
        refs = [sess.call_packed(multiply, range(3, 13)) for sess in (two, three)]
        assert [ref.debug_get_from_all() for ref in refs] == [[2] * 2, [3] * 3]


@pytest.mark.any_engine
def test_the_notebooks_own_process_group_goes_on(start: Start) -> None:
    import torch.distributed._functional_collectives as funcol

    def total() -> list[float]:
        x = torch.full((1,), 2.0)
        dist.all_reduce(x)
        return [x.item(), funcol.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item()]

    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert total() == [2.0, 1.0]
        with start(2) as sess:
            ref = sess.call_packed(total)
            assert total() == [2.0, 1.0]
            assert ref.debug_get_from_all() == [[4.0, 2.0]] * 2
            assert dist.get_backend() == "gloo"
        assert total() == [2.0, 1.0]
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@pytest.mark.any_engine
def test_all_is_put_back_at_the_end(start: Start) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import _random, _sharding_prop

    names = [
        (c10d, "_world"), (c10d, "init_process_group"), (dist, "init_process_group"),
        (dist, "split_group"), (c10d, "_new_process_group_helper"), (sys, "excepthook"),
        (sys.modules["_frozen_importlib"], "_find_and_load"), (c10d, "_backend"),
        (_sharding_prop.ShardingPropagator, "_fake_mode_lock"), (_random, "__class__"),
    ]  # fmt: skip
    before = [getattr(owner, name) for owner, name in names]
    backends = list(dist.Backend.backend_list)
    with start(2) as sess:
        sess.call_packed(fine).debug_get_from_all()
        assert c10d._world is not before[0]
    assert [getattr(owner, name) for owner, name in names] == before
    assert dist.Backend.backend_list == backends
    assert "_thread_id" not in vars(DeviceMesh)
    assert not hasattr(dist.Backend, "DISCOLAB")
    assert not dist.is_initialized()


def test_a_process_group_of_another_worker_is_refused(start: Start) -> None:
    kept: list[Any] = []

    def share() -> None:
        if dist.get_rank() == 0:
            kept.append(dist.group.WORLD)
        dist.barrier()
        if dist.get_rank() == 1:
            kept[0].allreduce([torch.ones(1)])

    with start(2) as sess:
        assert "this process group is the one of worker 0" in told(sess, share)[1]


def test_a_default_argument_of_a_module_means_the_callers_group(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "captures_world.py").write_text(
        "import torch.distributed as dist\n"
        "def total(x, group=dist.group.WORLD):\n"
        "    dist.all_reduce(x, group=group)\n"
        "    return x.item()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def use() -> float:
        import captures_world

        return float(captures_world.total(torch.ones(1)))

    try:
        with start(3) as sess:
            assert sess.call_packed(use).debug_get_from_all() == [3.0] * 3
        with start(2) as sess:
            assert sess.call_packed(use).debug_get_from_all() == [2.0] * 2
    finally:
        sys.modules.pop("captures_world", None)


@pytest.mark.any_engine
def test_workers_import_in_turn(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # circles of imports, entered at another place by each worker
    for i in range(4):
        (tmp_path / f"circle_{i}.py").write_text(
            f"import time\ntime.sleep(0.02)\nimport circle_{(i + 1) % 4}\nvalue = {i}\n"
        )
    monkeypatch.syspath_prepend(tmp_path)

    def enter() -> int:
        rank = dist.get_rank()
        module = __import__(f"circle_{rank}")
        after = __import__(f"circle_{(rank + 1) % 4}")
        return int(module.value + after.value)

    try:
        with start(4) as sess:
            assert sess.call_packed(enter).debug_get_from_all() == [1, 3, 5, 3]
    finally:
        for i in range(4):
            sys.modules.pop(f"circle_{i}", None)


@may_print
def test_an_import_that_takes_long_can_be_interrupted(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "takes_long.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with start(3) as sess:
        ref = sess.call_packed(lambda: __import__("takes_long"))
        while not any("its turn to import" in str(status) for status in sess.status()):
            time.sleep(0.005)
        assert sess.interrupt() == []
        with pytest.raises(WorkerError):
            ref.debug_get_from_all()
        assert sess.call_packed(fine).debug_get_from_all() == [9.0] * 3
        assert sess.call_packed(lambda: __import__("colorsys").__name__).debug_get_from_all()


def test_a_torch_without_a_needed_name_is_told(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "_NEEDED", ((c10d, "_world"), (c10d, "_has_never_been")))
    with start(2) as sess:
        with pytest.raises(WorkerError, match=r"it has no torch.*_has_never_been"):
            sess.call_packed(dist.get_rank).debug_get_from_all()
        assert not dist.is_initialized()
