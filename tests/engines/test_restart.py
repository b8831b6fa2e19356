"""One worker started afresh: what is restored, what is lost and said, and that the others go on."""

import contextlib
import functools
import importlib.util
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

import discolab
from discolab import (
    ArgumentError,
    DiscoError,
    ProcessSession,
    Session,
    SessionError,
    WorkerError,
    ccl,
    current_worker,
    make_session,
    rpc,
)
from discolab.debugger import debugger_of
from discolab.engines import RaySession, SocketSession
from discolab.engines.remote_session import RemoteSession
from discolab.engines.threads import ThreadedSession
from discolab.runtime import restart
from discolab.runtime.channel import Ticket

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
HAVE_RAY = importlib.util.find_spec("ray") is not None
RAY: dict[str, Any] = {"devices": "cpu", "timeout": 60, "start_timeout": 300}


@pytest.fixture(params=["threads", "processes"])
def trio(request: pytest.FixtureRequest) -> Iterator[Session]:
    session = make_session(3, request.param, devices="cpu", timeout=20)
    yield session
    session.shutdown(cancel=True)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[SocketSession]:
    session = SocketSession(2, 2, devices="cpu", timeout=20, spawn_nodes=True, respawn=True)
    yield session
    session.shutdown(cancel=True)


@pytest.fixture
def respawning() -> Iterator[ProcessSession]:
    session = ProcessSession(3, devices="cpu", timeout=20, respawn=True)
    yield session
    session.shutdown(cancel=True)


def kill(session: Session, rank: int) -> None:
    """End a worker's process, and wait until the session knows; of a thread nothing can."""
    if isinstance(session, RemoteSession):
        lost = session._connections.lost
        os.kill(session.processes()[rank], signal.SIGKILL)
        session._connections.wait_until(lambda: rank in lost, 5)
        assert rank in lost


def my_rank() -> int:
    return current_worker().worker_id


def full() -> torch.Tensor:
    return torch.full((2, 3), float(my_rank()))


def lost(session: Session, result: discolab.RestartedWorker) -> dict[int, str]:
    return {shard.reg_id: shard.made_by for shard in result.lost}


def restored(result: discolab.RestartedWorker) -> dict[int, str]:
    return {shard.reg_id: shard.how for shard in result.restored}


# -- what is lost ------------------------------------------------------------------------------


def test_a_lost_value_says_what_it_was_and_who_made_it(trio: Session) -> None:
    ref = trio.call_packed(full)
    trio.sync_all()
    kill(trio, 2)
    result = trio.restart_worker(2)
    (shard,) = result.lost
    assert shard.reg_id == ref.reg_id
    assert shard.what == "float32[2, 3]"
    assert shard.made_by.startswith("call of 'full' at ")
    assert "test_restart.py:" in shard.made_by
    with pytest.raises(WorkerError, match=r"'full' .*test_restart\.py:\d+.*float32\[2, 3\] on the"):
        ref.debug_get_from_remote(2)
    assert torch.equal(ref.debug_get_from_remote(1), torch.full((2, 3), 1.0))


def test_what_needs_a_lost_value_fails_on_that_worker_alone(trio: Session) -> None:
    ref = trio.call_packed(full)
    trio.sync_all()
    kill(trio, 2)
    trio.restart_worker(2)
    more = ref + 1
    assert torch.equal(more.debug_get_from_remote(1), torch.full((2, 3), 2.0))
    with pytest.raises(WorkerError, match="was lost with it"):
        more.debug_get_from_remote(2)
    trio.sync_all()  # what was lost is no failure of a call


def test_a_lost_value_can_be_assigned(trio: Session) -> None:
    ref = trio.call_packed(full)
    trio.sync_all()
    kill(trio, 2)
    trio.restart_worker(2)
    ref.debug_copy_from(2, torch.full((2, 3), 9.0))
    assert torch.equal((ref + 1).debug_get_from_remote(2), torch.full((2, 3), 10.0))


def test_the_others_keep_registers_and_variables(trio: Session) -> None:
    ref = trio.call_packed(full)

    def keep() -> None:
        current_worker().namespace["mine"] = my_rank()

    trio.call_packed(keep)
    trio.sync_all()
    kill(trio, 1)
    result = trio.restart_worker(1)
    assert trio.pull("mine", [0, 2]) == [0, 2]
    assert [ref.debug_get_from_remote(rank)[0, 0].item() for rank in (0, 2)] == [0.0, 2.0]
    assert result.gone == ("mine",)
    with pytest.raises(WorkerError, match="no variable named 'mine'"):
        trio.pull("mine", [1])


# -- what is restored --------------------------------------------------------------------------


def test_what_was_broadcast_is_copied_from_another_worker(trio: Session) -> None:
    value = torch.randn(5, 7)
    ref = trio.broadcast(value)
    trio.sync_all()
    kill(trio, 2)
    result = trio.restart_worker(2)
    assert not result.lost
    assert "copied from worker 0" in restored(result)[ref.reg_id]
    assert torch.equal(ref.debug_get_from_remote(2), value)


@pytest.mark.parametrize("name", ["allreduce", "allgather", "broadcast_from_worker0"])
def test_what_a_collective_made_equal_is_copied(trio: Session, name: str) -> None:
    source = trio.call_packed(full)
    target = trio.empty((18,) if name == "allgather" else (2, 3), "float32")
    getattr(trio, name)(source, target)
    trio.sync_all()
    kill(trio, 1)
    result = trio.restart_worker(1)
    assert target.reg_id in restored(result)
    assert source.reg_id in lost(trio, result)
    first, mine, _ = target.debug_get_from_all()
    assert torch.equal(first, mine)


def test_within_groups_it_comes_from_the_same_group() -> None:
    with make_session(4, "threads", num_groups=2, devices="cpu", timeout=20) as session:
        target = session.empty((2, 3), "float32")
        session.broadcast_from_worker0(session.call_packed(full), target, in_group=True)
        session.sync_all()
        session.restart_worker(3)
        values = [value[0, 0].item() for value in target.debug_get_from_all()]
        assert values == [0.0, 0.0, 2.0, 2.0]


def test_a_part_of_what_was_scattered_is_scattered_again(trio: Session) -> None:
    source = trio.copy_to_worker_0(torch.arange(6.0).reshape(3, 2))
    target = trio.empty((2,), "float32")
    trio.scatter_from_worker0(source, target)
    trio.sync_all()
    kill(trio, 2)
    result = trio.restart_worker(2)
    assert "scattered again" in restored(result)[target.reg_id]
    assert torch.equal(target.debug_get_from_remote(2), torch.tensor([4.0, 5.0]))


@pytest.mark.parametrize("on", ["all", "the lost one", "another"])
def test_what_was_written_to_since_is_lost(trio: Session, on: str) -> None:
    ref = trio.broadcast(torch.zeros(4))
    ranks = {"all": (0, 1, 2), "the lost one": (2,), "another": (1,)}[on]

    def write(tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        if my_rank() in ranks:
            tensor.add_(1)

    trio.call_packed(write, ref, ranks)
    trio.sync_all()
    kill(trio, 2)
    result = trio.restart_worker(2)
    assert list(lost(trio, result)) == [ref.reg_id]
    assert "written to" in result.lost[0].how
    with pytest.raises(WorkerError, match="was lost"):
        ref.debug_get_from_remote(2)


def test_what_was_set_on_one_worker_is_lost(trio: Session) -> None:
    ref = trio.broadcast(torch.zeros(4))
    ref.debug_copy_from(2, torch.ones(4))
    kill(trio, 2)
    assert "set on this worker alone" in trio.restart_worker(2).lost[0].how


def test_what_writes_to_it_through_another_name_is_noticed(trio: Session) -> None:
    ref = trio.broadcast(torch.zeros(4))
    view = ref[1:]

    def write(tensor: torch.Tensor) -> None:
        if my_rank() == 2:
            tensor.fill_(3)

    trio.call_packed(write, view)
    trio.sync_all()
    kill(trio, 2)
    assert ref.reg_id in lost(trio, trio.restart_worker(2))


def test_a_value_that_is_called_replicated_is_copied_if_the_others_are_equal(
    trio: Session,
) -> None:
    from torch.distributed.tensor import Replicate

    equal = trio.call_packed(torch.arange, 4)
    differs = trio.call_packed(full)
    equal.placements = differs.placements = (Replicate(),)
    trio.sync_all()
    kill(trio, 1)
    result = trio.restart_worker(1)
    assert list(restored(result)) == [equal.reg_id]
    assert torch.equal(equal.debug_get_from_remote(1), torch.arange(4))
    assert "different values" in result.lost[0].how


def test_equal_values_of_the_others_prove_nothing(trio: Session) -> None:
    def odd() -> torch.Tensor:
        return torch.full((2,), float(my_rank() == 2))

    ref = trio.call_packed(odd)
    trio.sync_all()
    kill(trio, 2)
    assert list(lost(trio, trio.restart_worker(2))) == [ref.reg_id]


def test_weights_are_read_again(trio: Session, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    weights = {"a.weight": torch.randn(6, 4), "b.weight": torch.randn(3)}
    safetensors.save_file(weights, tmp_path / "model.safetensors")
    loaded = trio.load(tmp_path, plan={"a.weight": "Shard(0)"}, progress=False)
    before = {name: ref.debug_get_from_remote(2) for name, ref in loaded.items()}
    kill(trio, 2)
    result = trio.restart_worker(2)
    assert not result.lost
    assert "read again from" in restored(result)[loaded["a.weight"].reg_id]
    for name, ref in loaded.items():
        assert torch.equal(ref.debug_get_from_remote(2), before[name])


def test_weights_whose_file_has_changed_are_lost(trio: Session, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    file = tmp_path / "model.safetensors"
    safetensors.save_file({"a": torch.zeros(6)}, file)
    loaded = trio.load(tmp_path, plan={"a": "Shard(0)"}, progress=False)
    trio.sync_all()
    safetensors.save_file({"a": torch.ones(6)}, file)
    kill(trio, 2)
    result = trio.restart_worker(2)
    assert "could not be read again" in result.lost[0].how
    with pytest.raises(WorkerError, match="could not be made again"):
        loaded["a"].debug_get_from_remote(2)


def test_pushed_variables_are_pushed_again_as_they_were(trio: Session) -> None:
    tensor = torch.ones(3)
    trio.push({"tensor": tensor, "config": {"lr": 0.1}, "module": torch.nn.Linear(2, 2)})
    trio["late"] = discolab.Pickled(range(3))
    tensor.zero_()
    trio.sync_all()
    kill(trio, 2)
    result = trio.restart_worker(2)
    assert result.pushed == ("config", "late", "module", "tensor")
    assert not result.gone
    assert torch.equal(trio.pull("tensor", [2])[0], torch.ones(3))
    assert trio.pull("config", [2]) == [{"lr": 0.1}]
    assert trio.pull("late", [2]) == [range(3)]
    weights = [module.weight for module in trio.pull("module")]
    assert torch.equal(weights[0], weights[2])


def test_pushed_variables_are_kept_up_to_a_size_in_all(
    trio: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("discolab.runtime.session.MOST_PUSHED", 1000)
    large = torch.ones(150)  # 600 bytes
    trio.push({"first": large, "second": large})
    trio.push({"first": large + 1})  # in the place of what was kept
    kill(trio, 2)
    result = trio.restart_worker(2)
    assert (result.pushed, result.gone) == (("first",), ("second",))
    assert torch.equal(trio.pull("first", [2])[0], large + 1)


def test_functions_modules_mesh_and_folder_are_there(trio: Session, tmp_path: Path) -> None:
    @discolab.register_func("test.restart.hello", override=True)
    def hello() -> str:
        return f"hello {my_rank()}"

    function = trio.get_global_func("test.restart.hello")
    trio.mesh(dp=3)
    trio.import_python_module("colorsys")
    trio.sync_all()
    kill(trio, 2)
    trio.restart_worker(2)
    assert function().debug_get_from_all() == ["hello 0", "hello 1", "hello 2"]
    assert trio["mesh"].debug_get_from_all()[2].axes == ("dp",)
    assert trio.call_packed(lambda: "colorsys" in sys.modules).debug_get_from_all()[2]
    assert trio.call_packed(os.getcwd).debug_get_from_all() == [os.getcwd()] * 3


def test_a_freed_value_stays_freed(trio: Session) -> None:
    ref = trio.call_packed(full)
    trio.free(ref)
    trio.sync_all()
    kill(trio, 2)
    assert not trio.restart_worker(2).lost


# -- that it goes on ---------------------------------------------------------------------------


def test_collectives_meet_again_small_and_large(trio: Session) -> None:
    trio.init_ccl()

    def total(size: int) -> float:
        return float(ccl.all_reduce(torch.full((size,), my_rank() + 1.0))[-1])

    for size in (2, 300_000):  # through the coordinator, and over a process group
        assert trio.call_packed(total, size).debug_get_from_all() == [6.0] * 3
    kill(trio, 2)
    trio.restart_worker(2)
    for size in (2, 300_000):
        assert trio.call_packed(total, size).debug_get_from_all() == [6.0] * 3
    assert trio.call_packed(ccl.statistics).debug_get_from_remote(0).collectives == 0


def test_messages_meet_again(trio: Session) -> None:
    def pass_on(size: int) -> float:
        right, left = (my_rank() + 1) % 3, (my_rank() - 1) % 3
        sent = ccl.send(torch.full((size,), float(my_rank())), right)
        out = torch.empty(size)
        ccl.recv(out, left)
        del sent
        return out[0].item()

    assert trio.call_packed(pass_on, 2).debug_get_from_all() == [2.0, 0.0, 1.0]
    kill(trio, 1)
    trio.restart_worker(1)
    for size in (2, 300_000):
        assert trio.call_packed(pass_on, size).debug_get_from_all() == [2.0, 0.0, 1.0]


@pytest.mark.parametrize("fails", [True, False])
def test_a_new_worker_receives_nothing_for_the_lost_one(trio: Session, fails: bool) -> None:
    """A reception that the lost one has started, and that was still in line."""

    def begin() -> None:
        if my_rank() == 1:
            ccl.irecv(torch.empty(2), 0)
        if fails:
            ccl.all_reduce(torch.empty(2 + my_rank()))

    def pass_on() -> list[float]:
        if my_rank() == 0:
            ccl.send(torch.full((2,), 7.0), 1)
        out = torch.zeros(2)
        if my_rank() == 1:
            ccl.recv(out, 0)
        return list(out.tolist())

    begun = trio.call_packed(begin)
    if fails:
        with pytest.raises(WorkerError, match="disagree"):
            begun.debug_get_from_all()
    trio.sync_all()
    trio.restart_worker(1)
    assert trio.call_packed(pass_on).debug_get_from_all() == [[0.0] * 2, [7.0] * 2, [0.0] * 2]


def test_an_interrupt_as_it_begins_leaves_a_worker_that_counts_as_the_others(
    trio: Session,
) -> None:
    def total() -> float:
        return ccl.all_reduce(torch.ones(1)).item()

    def busy() -> None:
        while my_rank() == 0:
            time.sleep(0.01)

    trio.call_packed(busy)
    found: list[Any] = []

    def restart() -> None:
        try:
            found.append(trio.restart_worker(1))
        except DiscoError as exc:
            found.append(exc)

    thread = threading.Thread(target=restart)
    thread.start()
    time.sleep(0.3)  # it waits for worker 0
    assert trio.interrupt(timeout=20) == []
    thread.join(20)
    assert found
    assert trio.call_packed(total).debug_get_from_all() == [3.0] * 3
    if isinstance(found[0], DiscoError):
        assert "Restart it once more" in str(found[0])
        trio.restart_worker(1)
    assert trio.call_packed(total).debug_get_from_all() == [3.0] * 3


def test_a_deadline_that_the_lost_one_has_set_is_not_the_new_ones(trio: Session) -> None:
    def begin() -> None:
        if my_rank() == 1:
            ccl.set_timeout(0.05)

    trio.call_packed(begin)
    trio.sync_all()
    trio.restart_worker(1)

    def one_is_late() -> None:
        if my_rank() == 0:
            time.sleep(0.2)
        if my_rank() < 2:
            ccl.barrier(group=[0, 1])

    assert trio.call_packed(one_is_late).debug_get_from_remote(1) is None


def test_the_default_dtype_is_that_of_the_others(trio: Session) -> None:
    trio.call_packed(torch.set_default_dtype, torch.float64)
    trio.sync_all()
    trio.restart_worker(1)
    made = trio.call_packed(lambda: str(torch.ones(1).dtype)).debug_get_from_all()
    assert made == ["torch.float64"] * 3


def test_calls_are_counted_as_on_the_others(trio: Session) -> None:
    for _ in range(7):
        trio.call_packed(my_rank)
    trio.sync_all()
    kill(trio, 2)
    trio.restart_worker(2)

    def count() -> int:
        return current_worker().executed

    assert len(set(trio.call_packed(count).debug_get_from_all())) == 1


def test_any_worker_may_be_restarted_many_times(trio: Session) -> None:
    ref = trio.broadcast(torch.arange(3))
    trio.sync_all()
    for turn in range(6):
        rank = 1 + turn % 2
        kill(trio, rank)
        trio.restart_worker(rank)
        assert torch.equal(ref.debug_get_from_remote(rank), torch.arange(3))
    assert trio.call_packed(my_rank).debug_get_from_all() == [0, 1, 2]
    assert len(trio.restarts) == 6


def test_a_worker_that_lives_is_restarted_too(trio: Session) -> None:
    before = trio.call_packed(os.getpid).debug_get_from_remote(2)
    result = trio.restart_worker(2)
    assert "was ended by restart_worker" in result.why
    after = trio.call_packed(os.getpid).debug_get_from_remote(2)
    assert (before == after) == isinstance(trio, ThreadedSession)


def test_a_wait_for_the_others_is_told_and_ends_with_ctrl_c(
    trio: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Pressed:
        """Whoever reads what is waited for, presses Ctrl-C."""

        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str) -> None:
            self.text += text
            os.kill(os.getpid(), signal.SIGINT)

    end, screen = tmp_path / "end", Pressed()

    def compute() -> None:
        while my_rank() == 0 and not end.exists():
            time.sleep(0.01)

    trio.call_packed(compute)
    monkeypatch.setattr(restart, "_SAY_AFTER", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", screen)
        with pytest.raises(KeyboardInterrupt):
            trio.restart_worker(1)
    assert re.match("the restart of worker 1 waits for workers? 0.*60 s at most", screen.text)
    assert trio.restarts[-1].rank == 1
    assert trio.call_packed(my_rank).debug_get_from_remote(1) == 1
    end.touch()
    assert trio.call_packed(my_rank).debug_get_from_all() == [0, 1, 2]


def test_a_restart_while_workers_stand_says_what_to_do(trio: Session) -> None:
    dbg = debugger_of(trio)
    dbg.run(my_rank, step=True)
    before = trio.status()[1].state
    with pytest.raises(SessionError, match=r"worker 1 can't be restarted now(.|\n)*%disco_abort"):
        trio.restart_worker(1)
    assert trio.status()[1].state == before
    dbg.abort()
    assert trio.restart_worker(1).rank == 1
    assert trio.call_packed(my_rank).debug_get_from_all() == [0, 1, 2]


def test_one_that_died_while_the_others_stand_can_be_looked_around_and_replaced() -> None:
    with ProcessSession(3, devices="cpu", timeout=20) as session:
        dbg = debugger_of(session)
        dbg.run(my_rank, step=True)
        kill(session, 1)
        with pytest.raises(SessionError, match=r"restarted now.*: %disco_abort first"):
            session.restart_worker(1)
        with pytest.raises(DiscoError, match="SIGKILL"):  # who asks first is told of it
            dbg.go("continue")
        assert dbg.eval("6 * 7", [0, 2]).values[2][0] != "error"
        assert dbg.where().workers[0].variables is not None
        dbg.abort()
        session.restart_worker(1)
        assert session.call_packed(my_rank).debug_get_from_all() == [0, 1, 2]


def test_true_is_no_rank(trio: Session) -> None:
    for call in (trio.restart_worker, trio.sync_worker):
        with pytest.raises(ArgumentError, match="a worker id is an integer, got True"):
            call(True)
    assert trio.restarts == ()


def test_interrupts_reach_a_new_worker(trio: Session) -> None:
    kill(trio, 2)
    trio.restart_worker(2)

    def spin() -> None:
        while True:
            pass

    trio.call_packed(spin)
    time.sleep(0.1)
    assert trio.interrupt() == []
    assert trio.call_packed(my_rank).debug_get_from_all() == [0, 1, 2]


def test_what_a_new_worker_prints_is_shown(
    trio: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    kill(trio, 2)
    trio.restart_worker(2)

    def say() -> None:
        if my_rank() == 2:
            print("here I am")

    trio.call_packed(say)
    trio.sync_all()
    deadline = time.monotonic() + 3
    text = ""
    while "here I am" not in text and time.monotonic() < deadline:
        text += capsys.readouterr().out
        time.sleep(0.02)
    assert "here I am" in text


def test_a_new_worker_draws_as_a_fresh_one(trio: Session) -> None:
    trio.manual_seed(3)
    trio.call_packed(torch.rand, 2)
    trio.sync_all()
    kill(trio, 2)
    trio.restart_worker(2)
    trio.manual_seed(3)
    first, _, third = trio.call_packed(torch.rand, 2).debug_get_from_all()
    assert torch.equal(first, third)


def test_a_member_that_died_ends_what_waits_for_it(trio: Session) -> None:
    if isinstance(trio, ThreadedSession):
        pytest.skip("a thread does not die")

    def wait() -> None:
        if my_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        ccl.barrier()

    ref = trio.call_packed(wait)
    later = trio.call_packed(ccl.barrier)  # sent before the new worker, reached after it
    _until(lambda: trio._dead() == [2])
    trio.restart_worker(2)
    for rank in (0, 1):
        with pytest.raises(WorkerError, match="has died"):
            ref.debug_get_from_remote(rank)
        with pytest.raises(WorkerError, match=r"has died|was lost"):
            later.debug_get_from_remote(rank)
    assert trio.call_packed(ccl.barrier).debug_get_from_all() == [None] * 3


# -- threads -----------------------------------------------------------------------------------


def test_a_thread_that_hangs_in_c_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ThreadedSession(3, devices="cpu", timeout=20)
    make_another = session._local.make_another

    def make_late(*args: Any) -> Any:
        time.sleep(0.2)  # the others look meanwhile what has become of it
        return make_another(*args)

    monkeypatch.setattr(session._local, "make_another", make_late)
    gate = threading.Lock()
    gate.acquire()
    value = torch.arange(4)
    ref = session.broadcast(value)
    session.sync_all()

    def hang() -> None:
        if my_rank() == 1:
            gate.acquire()
        ccl.barrier()

    hung = session.call_packed(hang)
    while session.status()[1].state != "running" or "hang" not in session.status()[1].detail:
        time.sleep(0.01)
    result = session.restart_worker(1)
    assert "hung in" in result.why
    assert "left behind" in result.why
    assert torch.equal(ref.debug_get_from_remote(1), value)
    assert session.call_packed(my_rank).debug_get_from_all() == [0, 1, 2]
    with pytest.raises(WorkerError, match=r"barrier(.|\n)*worker 1: was lost"):
        hung.debug_get_from_remote(0)
    gate.release()  # what was left behind ends, and does no harm
    deadline = time.monotonic() + 5
    while any(thread.is_alive() for thread in session._local.abandoned):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert session.call_packed(ccl.barrier).debug_get_from_all() == [None] * 3
    session.shutdown(cancel=True)


def leave_behind(
    session: ThreadedSession, rank: int, within: Callable[[], Any] = contextlib.nullcontext
) -> Callable[[], None]:
    """Restart a worker that hangs in C; gives what lets the one that was left behind go on."""
    gate = threading.Lock()
    gate.acquire()

    def hang() -> None:
        if my_rank() == rank:
            with within():
                hangs.set()
                gate.acquire()

    hangs = threading.Event()
    session.call_packed(hang)
    assert hangs.wait(20)
    assert "left behind" in session.restart_worker(rank).why
    return gate.release


def test_torch_distributed_begins_anew_after_a_thread_that_was_left_behind() -> None:
    def reduce() -> float:
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    def begin_again() -> float:
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        return reduce()

    with ThreadedSession(2, devices="cpu", timeout=20) as session:
        assert session.call_packed(reduce).debug_get_from_all() == [2.0] * 2
        release = leave_behind(session, 1)
        assert session.call_packed(reduce).debug_get_from_all() == [2.0] * 2
        assert session.call_packed(begin_again).debug_get_from_all() == [2.0] * 2
        release()
        session._local.abandoned[0].join(10)
        assert session.call_packed(reduce).debug_get_from_all() == [2.0] * 2


def test_a_thread_that_was_left_behind_as_it_profiled_holds_up_no_profile() -> None:
    profiling = functools.partial(torch.profiler.profile, activities=[ProfilerActivity.CPU])

    def profile(late: Callable[[], None]) -> bool:
        with profiling() as found:
            ccl.barrier()
            if my_rank() == 0:
                late()
            ccl.barrier()
            torch.ones(3).cos()
        return "aten::cos" in [event.name for event in found.events()]

    def it_comes_out() -> None:
        release()
        session._local.abandoned[0].join(10)
        assert not session._local.abandoned[0].is_alive()

    with ThreadedSession(2, devices="cpu", timeout=20) as session:
        release = leave_behind(session, 1, profiling)
        for late in (int, it_comes_out, int):
            assert session.call_packed(profile, late).debug_get_from_all() == [True] * 2


def test_a_thread_that_hangs_answers_what_it_was_asked() -> None:
    session = ThreadedSession(2, devices="cpu", timeout=20)
    gate = threading.Lock()
    gate.acquire()

    def hang() -> None:
        if my_rank() == 1:
            gate.acquire()

    session.call_packed(hang)
    ref = session.call_packed(my_rank)
    ticket = session.request(ref)
    time.sleep(0.1)
    session.restart_worker(1)
    answer = session.wait(ticket)[1]
    assert answer.type_name == "WorkerDied"
    assert "hung in" in answer.message
    gate.release()
    session.shutdown(cancel=True)


# -- processes ---------------------------------------------------------------------------------


def test_worker_0_of_processes_stays() -> None:
    with (
        ProcessSession(2, devices="cpu") as session,
        pytest.raises(SessionError, match="worker 0 is a thread of this process"),
    ):
        session.restart_worker(0)


def test_a_stopped_process_is_killed_and_replaced() -> None:
    with ProcessSession(2, devices="cpu", timeout=20) as session:
        os.kill(session.processes()[1], signal.SIGSTOP)
        result = session.restart_worker(1)
        assert "killed by restart_worker" in result.why
        assert session.call_packed(my_rank).debug_get_from_all() == [0, 1]


def test_two_that_died_are_replaced_one_after_the_other() -> None:
    with ProcessSession(3, devices="cpu", timeout=20) as session:
        ref = session.broadcast(torch.arange(3))
        session.sync_all()
        kill(session, 1)
        kill(session, 2)
        session.restart_worker(1)
        session.restart_worker(2)
        assert all(torch.equal(v, torch.arange(3)) for v in ref.debug_get_from_all())


def test_what_was_asked_of_the_dead_is_answered(respawning: ProcessSession) -> None:
    def die() -> None:
        if my_rank() == 2:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)

    respawning.call_packed(die)
    ref = respawning.call_packed(my_rank)
    assert ref.debug_get_from_remote(1) == 1
    with pytest.raises(WorkerError, match=r"worker 2 .*SIGKILL while it ran call of .*die"):
        ref.debug_get_from_remote(2)
    wait_for_restart(respawning)
    assert respawning.call_packed(my_rank).debug_get_from_all() == [0, 1, 2]


def wait_for_restart(session: Session, count: int = 1) -> None:
    deadline = time.monotonic() + (90 if session.engine == "ray" else 5)
    while session.restarts_made < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_death_that_nobody_saw_is_told_once(respawning: ProcessSession) -> None:
    respawning.sync_all()
    kill(respawning, 2)
    wait_for_restart(respawning)
    with pytest.raises(WorkerError, match=r"worker 2 .*SIGKILL.*a new worker takes its place"):
        respawning.sync_all()
    respawning.sync_all()
    assert respawning.call_packed(my_rank).debug_get_from_all() == [0, 1, 2]


def test_one_that_dies_again_and_again_is_given_up(
    respawning: ProcessSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise DiscoError("no room for another process")

    monkeypatch.setattr(respawning, "_start_another", broken)
    kill(respawning, 2)
    deadline = time.monotonic() + 5
    while 2 not in respawning._dead():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(DiscoError, match="SIGKILL"):
        respawning.sync_all()


def test_rpc_that_nobody_has_used_works_with_a_new_worker() -> None:
    with ProcessSession(3, devices="cpu", timeout=20) as session:
        kill(session, 2)
        assert not session.restart_worker(2).remarks

        def call() -> int:
            return rpc.rpc_sync((my_rank() + 1) % 3, my_rank)

        assert session.call_packed(call).debug_get_from_all() == [1, 2, 0]


def test_the_result_is_a_picture(trio: Session) -> None:
    ref = trio.call_packed(full)
    equal = trio.broadcast(torch.zeros(2))
    ref.name = "w"
    trio.push({"lr": 1})
    trio.sync_all()
    kill(trio, 2)
    result = trio.restart_worker(2)
    text = repr(result)
    for words in ("w ", "float32[2, 3]", "lost", "restored", "copied from worker 0", "lr"):
        assert words in text, text
    assert f"r{equal.reg_id}" in text
    assert "<table" in result._repr_mimebundle_()["text/html"]
    assert "1 restored and 1 lost" in str(result)


# -- sockets: a node starts the new one --------------------------------------------------------


def run_here() -> None:
    current_worker().namespace["ran"] = True


def expect_message(sender: int) -> None:
    if my_rank() == 0:
        ccl.recv(torch.zeros(2), sender)


@pytest.mark.parametrize("at", ["_start_another", "_prepare"])
def test_what_is_sent_meanwhile_is_not_for_the_new_worker(
    two_nodes: SocketSession, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """It would run it before it has anything, and would seem to have work for ever."""
    sess, rank = two_nodes, 3
    real = getattr(sess, at)

    def send_too(*args: Any) -> None:
        if at == "_start_another":  # the old one is gone, the new one not connected
            sess.call_packed(run_here).debug_get_from_remote(1)
        real(*args)
        if at == "_prepare":  # it is connected
            sess.call_without_result(run_here)

    sess.sync_all()
    with monkeypatch.context() as patch:
        patch.setattr(sess, at, send_too)
        sess.restart_worker(rank)
    ran = sess.call_packed(lambda: current_worker().namespace.pop("ran", False))
    assert ran.debug_get_from_all() == [True, True, True, False]
    with pytest.raises(WorkerError, match="worker 3 finished the call without sending"):
        sess.call_packed(expect_message, rank).debug_get_from_all(timeout=5)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_worker_of_a_node_is_replaced_by_its_node(two_nodes: SocketSession, rank: int) -> None:
    value, before = torch.arange(5.0), two_nodes.restarts_made
    ref, own = two_nodes.broadcast(value), two_nodes.call_packed(full)
    try:
        two_nodes.sync_all()
    except WorkerError:  # of the death before
        two_nodes.sync_all()
    os.kill(two_nodes.processes()[rank], signal.SIGKILL)
    wait_for_restart(two_nodes, before + 1)
    result = two_nodes.restarts[-1]
    assert "SIGKILL" in result.why
    assert list(restored(result)) == [ref.reg_id]
    with pytest.raises(WorkerError, match="SIGKILL"):
        two_nodes.sync_all()

    def total(size: int) -> float:
        return float(ccl.all_reduce(torch.full((size,), 1.0))[-1])

    for size in (2, 300_000):
        assert two_nodes.call_packed(total, size).debug_get_from_all() == [4.0] * 4
    assert torch.equal(ref.debug_get_from_remote(rank), value)
    with pytest.raises(WorkerError, match="was lost"):
        own.debug_get_from_remote(rank)


# -- Ray: another actor takes the place -------------------------------------------------------


@pytest.fixture(scope="module")
def actors() -> Iterator[Session]:
    if not HAVE_RAY:
        pytest.skip("needs Ray")
    with make_session(3, "ray", **RAY) as session:
        yield session


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        test_a_lost_value_says_what_it_was_and_who_made_it,
        test_what_was_broadcast_is_copied_from_another_worker,
        test_pushed_variables_are_pushed_again_as_they_were,
        test_collectives_meet_again_small_and_large,
        test_calls_are_counted_as_on_the_others,
        test_a_worker_that_lives_is_restarted_too,
        test_interrupts_reach_a_new_worker,
        test_a_member_that_died_ends_what_waits_for_it,
    ],
)
def test_the_same_with_actors(actors: Session, check: Callable[[Session], None]) -> None:
    check(actors)
    _settle(actors)


@pytest.mark.slow
def test_a_new_actor_is_as_the_one_before(
    actors: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One that is stopped is killed; what the new one writes comes here, it is where we are."""
    before, folder = actors.processes()[1], os.getcwd()
    os.kill(before, signal.SIGSTOP)
    os.chdir(tmp_path)
    try:
        result = actors.restart_worker(1)
    finally:
        os.chdir(folder)
    assert f"(pid {before} on " in result.why or "killed by restart_worker" in result.why
    assert not os.path.exists(f"/proc/{before}") or _state(before) == "Z"

    def facts() -> Any:
        if my_rank() == 1:
            os.write(1, b"written by C\n")
        worker = current_worker()
        return worker.local_worker_id, os.getpid(), worker.link.host  # type: ignore[union-attr]

    _, (place, pid, host), (_, _, other) = actors.call_packed(facts).debug_get_from_all()
    assert (place, host) == (1, other)
    assert pid == actors.processes()[1] == actors._actors.facts[1]["pid"] != before
    text = ""

    def written() -> bool:
        nonlocal text
        text += capsys.readouterr().out
        return "written by C" in text

    _until(written)
    assert actors.call_packed(os.getcwd).debug_get_from_all() == [folder] * 3
    assert len(actors._actors._actors) == 2  # nothing is kept of those before


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_an_actor_that_ray_ends_is_replaced_and_no_room_is_told(
    actors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    ray.kill(actors._actors._by_rank[2].handle)
    _until(lambda: 2 in actors._connections.lost)
    with monkeypatch.context() as patch:  # its slot is taken, as it were
        patch.setattr(actors, "_start_timeout", 0.5)
        with pytest.raises(DiscoError, match=r"another Ray actor, worker 2, did not start within"):
            actors.restart_worker(2)
    assert "was ended by ray.kill" in actors.restart_worker(2).why
    assert actors.call_packed(my_rank).debug_get_from_all() == [0, 1, 2]


# -- many deaths -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "seed", "deaths"),
    [
        ("processes", 1, 20),
        pytest.param("processes", 2, 100, marks=pytest.mark.slow),
        pytest.param("sockets", 3, 100, marks=pytest.mark.slow),
        pytest.param("ray", 4, 20, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(1200)
def test_deaths_at_random_moments_cost_one_worker_each(on: str, seed: int, deaths: int) -> None:
    """Whatever dies when: the session goes on, what is restored is equal, nothing is left."""
    chance = random.Random(seed)
    session: RemoteSession
    if on == "ray":
        pytest.importorskip("ray")
        session = RaySession(3, **RAY, respawn=True)
    elif on == "processes":
        session = ProcessSession(3, devices="cpu", timeout=20, respawn=True)
    else:
        session = SocketSession(2, 2, devices="cpu", timeout=20, spawn_nodes=True, respawn=True)
    ranks = range(session.num_workers)
    fds, threads = len(os.listdir("/dev/fd")), 0
    value = torch.randn(1000)
    slowest = 0.0
    try:
        equal = session.broadcast(value)
        session.sync_all()
        fds, threads = len(os.listdir("/dev/fd")), threading.active_count()
        registers = session.statistics().live_registers
        for death in range(deaths):
            rank = chance.choice(ranks[1:])
            pid = session.processes()[rank]
            timer = threading.Timer(chance.random() * 0.02, os.kill, (pid, signal.SIGKILL))
            timer.start()
            _use(session, chance)
            timer.join()
            began = time.monotonic()
            wait_for_restart(session, death + 1)
            _settle(session)
            slowest = max(slowest, time.monotonic() - began)
            assert session.call_packed(my_rank).debug_get_from_all() == [*ranks]
            assert all(torch.equal(held, value) for held in equal.debug_get_from_all())
            result = session.restarts[-1]
            assert result.rank == rank
            assert equal.reg_id in restored(result)
        print(f"the slowest restart took {slowest:.1f} s")
        assert slowest < 2 or deaths > 20 or on == "ray"
        assert session.statistics().live_registers <= registers + 1
        session._registers.validate()
        _until(lambda: len(os.listdir("/dev/fd")) <= fds + 2)
        _until(lambda: threading.active_count() <= threads)
        assert not session._connections._tickets
    finally:
        session.shutdown(cancel=True)


def _use(session: Session, chance: random.Random) -> None:
    """Whatever a program does, and is told that a worker has died."""
    source = session.call_packed(torch.ones, 2000)
    target = session.empty((2000,), "float32")
    for _ in range(chance.randrange(1, 30)):
        try:
            match chance.randrange(5):
                case 0:
                    session.allreduce(source, target)
                case 1:
                    source = source + 1
                case 2:
                    source.debug_get_from_remote(chance.randrange(3))
                case 3:
                    session.sync_all()
                case 4:
                    session.push({"x": 1})
        except WorkerError:
            pass


def _settle(session: Session) -> None:
    """Until nothing is left to be told."""
    for _ in range(20):
        try:
            session.sync_all()
        except WorkerError:
            continue
        return


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_late_reply_of_the_dead_is_taken_for_no_other(respawning: ProcessSession) -> None:
    """The next question may have the place in memory of one that was answered for the dead."""
    connections = respawning._connections
    for _ in range(20):
        first = Ticket([1], "something")
        number = connections.number_of(first)
        connections._deliver(1, number, [])
        del first
        second = Ticket([1], "something else")
        connections.number_of(second)
        connections._deliver(1, number, [])
        assert second.missing == [1]
        connections._deliver(1, connections.number_of(second), [])


@pytest.mark.one_process
def test_a_worker_that_is_replaced_while_it_computes_can_be_stepped() -> None:
    """The debugger took the one that was given up, and was interrupted, for the new one."""

    def spin() -> None:
        while current_worker().rank == 1 and not current_worker().process_state.get("enough"):
            time.sleep(0.01)

    def rank() -> int:
        number = current_worker().rank
        return number * 10

    with ThreadedSession(2, devices="cpu", timeout=20) as sess:
        debugger = debugger_of(sess)
        assert not debugger.run(rank).finished
        assert debugger.continue_().finished
        sess.call_without_result(spin)
        sess.restart_worker(1)
        assert not debugger.run(rank).finished
        assert debugger.continue_().finished
        assert debugger.program.result().debug_get_from_all() == [0, 10]
