"""Collectives of workers in several processes: what is special about them.

That all else is as in threads is checked by the tests marked ``any_engine``.
"""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import discolab
from discolab import ccl
from discolab.ccl.rendezvous import conductor
from discolab.engines import ProcessSession, ThreadedSession
from discolab.runtime import (
    ArgumentError,
    CollectiveError,
    DiscoError,
    Session,
    WorkerError,
    current_worker,
)

SIZES = [
    3,
    4_000,
    20_001,
    300_007,
]  # through the coordinator, at once over a process group, and in blocks
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.complex64, torch.bool]


@pytest.fixture
def begin() -> Any:
    """Start sessions of processes; they are shut down after the test."""
    made: list[Session] = []

    def start(num_workers: int, num_groups: int = 1, **options: Any) -> ProcessSession:
        session = ProcessSession(num_workers, num_groups, "cpu", timeout=20, **options)
        made.append(session)
        session.import_python_module(__name__)
        return session

    yield start
    for session in made:
        session.shutdown(cancel=True)


def rank() -> int:
    return current_worker().rank


def fine() -> float:
    return float(ccl.all_reduce(torch.ones(()), group="world"))


def large() -> float:
    return float(ccl.all_reduce(torch.ones(1 << 20), group="world").sum())


def numbers(of: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(size, generator=torch.Generator().manual_seed(of)) * 5
    return (made > 0) if dtype is torch.bool else made.to(dtype)


def results(world: int) -> list[torch.Tensor]:
    """What each collective gives, of several sizes and dtypes."""
    found = []
    for size, dtype in itertools.product(SIZES, DTYPES):
        x = numbers(rank(), size, dtype)
        op = "max" if dtype is torch.bool else "sum"
        found += [ccl.all_reduce(x, op), ccl.all_gather(x[:50]), ccl.broadcast(x, world - 1)]
        in_place = x.clone()
        ccl.all_reduce_(in_place, "prod" if dtype is torch.bool else "avg")
        parts = numbers(rank(), size // world * world, dtype)
        found += [
            in_place,
            ccl.reduce_scatter(parts, op),
            *ccl.all_to_all(list(parts.chunk(world))),
        ]
        at_root = ccl.reduce(x, 0, op)
        found += [x if at_root is None else at_root]
        strided = numbers(rank(), 2 * size, dtype)[::2]
        found.append(ccl.all_reduce(strided, op, out=strided.clone()))
        found += ccl.all_reduce_coalesced([x, x[:7]], op)
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_same_bits_as_in_threads(begin: Any, world: int) -> None:
    with ThreadedSession(world, devices="cpu", timeout=60) as threads:
        want = threads.call_packed(results, world).debug_get_from_all()
    got = begin(world).call_packed(results, world).debug_get_from_all()
    for mine, theirs in zip(got, want, strict=True):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            assert a.dtype is b.dtype
            assert torch.equal(a, b) or torch.equal(a.isnan(), b.isnan())


def test_what_init_ccl_says(begin: Any) -> None:
    sess = begin(3)
    assert sess.init_ccl() == "gloo: 3 workers in 3 processes on cpu"
    assert sess.call_packed(ccl.backend_name).debug_get_from_all() == ["gloo"] * 3
    with pytest.raises(ArgumentError, match="these have a process each; use 'gloo'"):
        sess.init_ccl("local")
    with pytest.raises(ArgumentError, match="needs a GPU for every worker"):
        sess.init_ccl("nccl")
    assert sess.call_packed(fine).debug_get_from_all() == [3.0] * 3

    def different() -> None:
        from discolab.ccl import choose

        choose.init("gloo" if rank() else "auto", ())

    with pytest.raises(WorkerError, match="members disagree on the operation"):
        sess.call_packed(different).debug_get_from_all()


def test_a_session_of_one(begin: Any) -> None:
    sess = begin(1)
    assert sess.call_packed(large).debug_get_from_all() == [float(1 << 20)]
    assert sess.init_ccl().startswith("local: 1 worker")


# -- a worker dies ------------------------------------------------------------------------------


def waits_for_one() -> None:
    if rank() == 2:
        time.sleep(60)
    ccl.all_reduce(torch.ones(4))


def receives() -> None:
    if rank() == 2:
        time.sleep(60)
    elif rank() == 1:
        ccl.recv(torch.zeros(4), 2)


def transfers() -> None:
    x = torch.ones(1 << 22)
    while True:
        ccl.all_reduce_(x, "avg")


@pytest.mark.parametrize(
    ("func", "waiting"), [(waits_for_one, [0, 1]), (receives, [1]), (transfers, [0, 1])]
)
def test_a_worker_dies(begin: Any, func: Callable[[], None], waiting: list[int]) -> None:
    sess = begin(3)
    sess.init_ccl()
    ref = sess.call_packed(func)
    time.sleep(0.4)
    os.kill(sess.processes()[2], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(DiscoError, match=r"worker 2 .*was killed by SIGKILL"):
        ref.debug_get_from_remote(2)
    doctor = discolab.doctor(sess)
    while any(status.state != "idle" for status in doctor.workers if status.rank in waiting):
        assert time.monotonic() - began < 5.0, doctor
        time.sleep(0.01)
        doctor = discolab.doctor(sess)
    for one in waiting:
        (_, failure) = next(iter(sess.services["ccl"].peers[one].failed_calls))
        assert failure.type_name == "CollectiveError"
        assert "has died" in failure.message or "died" in failure.message, failure.message
    assert "2" in repr(doctor)


def test_a_stopped_worker_keeps_nobody_from_an_answer(begin: Any) -> None:
    sess = begin(3)
    sess.init_ccl()
    pid = sess.processes()[2]
    os.kill(pid, signal.SIGSTOP)
    try:
        sess.call_packed(fine)
        time.sleep(0.2)
        began = time.monotonic()
        found = discolab.doctor(sess)
        assert time.monotonic() - began < 8
        assert {edge.rank: edge.whom for edge in found.waits} == {0: (2,), 1: (2,)}
    finally:
        os.kill(pid, signal.SIGCONT)
    assert sess.call_packed(fine).debug_get_from_all() == [3.0] * 3


# -- interrupts ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("drops_exceptions")
def test_interrupts_between_and_in_transfers(begin: Any) -> None:
    sess = begin(3)
    for turn in range(6):
        ref = sess.call_packed(transfers)
        time.sleep(0.05 + 0.03 * turn)
        began = time.monotonic()
        assert sess.interrupt() == []
        assert time.monotonic() - began < 8
        assert sess.call_packed(large).debug_get_from_all() == [3.0 * (1 << 20)] * 3
        del ref
    left = sess.call_packed(ccl.statistics).debug_get_from_remote(0)
    assert (left.collectives, left.messages, left.waiting) == (0, 0, ())


def test_a_deadline_in_the_middle_of_others_work(begin: Any) -> None:
    def late() -> str:
        if rank() == 1:
            time.sleep(0.4)
        try:
            ccl.all_reduce(torch.ones(1 << 16), timeout=0.1)
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"
        return ""

    sess = begin(2)
    sess.init_ccl()
    first, second = sess.call_packed(late).debug_get_from_all()
    assert first.startswith("WaitTimeoutError: gave up after 0.1 s waiting for all_reduce #1")
    assert "worker 1: has not come to it yet: waiting" in first
    assert "time.sleep(0.4)" in first
    assert second.startswith("CollectiveAborted")
    assert sess.call_packed(large).debug_get_from_all() == [2.0 * (1 << 20)] * 2


# -- messages and process groups -------------------------------------------------------------------


def test_large_messages(begin: Any) -> None:
    def ring(size: int) -> float:
        world = current_worker().num_workers
        for turn in range(3):
            ccl.send(torch.full((size,), float(rank() + turn)), (rank() + 1) % world)
        before = (rank() - 1) % world
        total = 0.0
        for turn in range(3):
            got = ccl.recv(torch.empty(size), before)
            assert torch.equal(got, torch.full((size,), float(before + turn)))
            total += float(got[0])
        return total

    def wrong_shape() -> str:
        if rank() == 0:
            ccl.send(torch.ones(100_000), 1)
        elif rank() == 1:
            with pytest.raises(CollectiveError) as caught:
                ccl.recv(torch.ones(100), 0)
            return str(caught.value)
        return ""

    def kept() -> int:
        from discolab.ccl.choose import backend_of

        return len(backend_of(current_worker())._p2p._kept)  # type: ignore[attr-defined]

    sess = begin(3)
    for size in (10, 5_000, 500_000):
        assert sess.call_packed(ring, size).debug_get_from_all() == [9.0, 3.0, 6.0]
    told = sess.call_packed(wrong_shape).debug_get_from_remote(1)
    assert "sent float32[100000]" in told
    sess.sync_all()
    time.sleep(0.1)
    assert sess.call_packed(kept).debug_get_from_all() == [0, 0, 0]


def test_lanes_are_shared_and_closed(begin: Any) -> None:
    def sockets() -> int:
        import gc

        gc.collect()
        names = [os.readlink(f"/dev/fd/{fd}") for fd in os.listdir("/dev/fd") if fd.isdigit()
                 and os.path.exists(f"/dev/fd/{fd}")]  # fmt: skip
        return sum(name.startswith("socket:") for name in names)

    def use() -> None:
        import torch.distributed as dist

        groups = [dist.new_group([0, 1, 2]) for _ in range(3)]
        for group in groups:
            dist.all_reduce(torch.ones(100_000), group=group)
        for group in groups[1:]:
            dist.destroy_process_group(group)

    def pairs() -> None:
        for a, b in ((0, 1), (1, 2), (0, 2)):
            if rank() in (a, b):
                ccl.all_reduce(torch.ones(100_000), group=[a, b])

    sess = begin(3)
    sess.init_ccl()
    before = sess.call_packed(sockets).debug_get_from_remote(1)
    for _ in range(5):
        sess.call_packed(use).debug_get_from_all()
        sess.call_packed(pairs).debug_get_from_all()
    after = sess.call_packed(sockets).debug_get_from_remote(1)
    assert after - before <= 2 * (2 + 2)  # of the group of three, and of two pairs
    assert len(sess.services["ccl"].handles) <= 4


# -- torch.distributed ----------------------------------------------------------------------------


def test_torch_distributed_over_processes(begin: Any) -> None:
    def program() -> tuple[Any, ...]:
        import torch.distributed as dist

        port = os.environ["MASTER_PORT"]
        mine = (dist.get_rank(), dist.get_world_size(), os.environ["RANK"], dist.get_backend())
        objects: list[Any] = [None] * 3
        dist.all_gather_object(objects, port)
        dist.barrier()
        return (*mine, len(set(objects)), os.environ["LOCAL_WORLD_SIZE"])

    found = begin(3).call_packed(program).debug_get_from_all()
    assert found == [(r, 3, str(r), "discolab", 1, "3") for r in range(3)]


def test_a_forked_child_takes_no_part(begin: Any, tmp_path: Path) -> None:
    def forks(where: str) -> str:
        folder = Path(where)
        pid = os.fork()
        if pid == 0:
            try:
                ccl.barrier()
            except BaseException as exc:
                (folder / str(os.getpid())).write_text(f"{type(exc).__name__}: {exc}")
            os._exit(0)
        os.waitpid(pid, 0)
        return (folder / str(pid)).read_text() if (folder / str(pid)).exists() else "nothing"

    sess = begin(2)
    sess.init_ccl()
    told = sess.call_packed(forks, str(tmp_path)).debug_get_from_remote(1)
    assert "Error" in told
    assert sess.call_packed(fine).debug_get_from_all() == [2.0, 2.0]


def test_nothing_is_left(begin: Any) -> None:
    before = threading.active_count()
    for _ in range(3):
        with ProcessSession(3, devices="cpu", timeout=20) as sess:
            assert sess.call_packed(large).debug_get_from_all() == [3.0 * (1 << 20)] * 3
            began = time.monotonic()
        took = time.monotonic() - began
        assert took < conductor.END_SECONDS, "a conductor had something to do that it can't finish"
    deadline = time.monotonic() + 5
    while threading.active_count() > before + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before + 1
