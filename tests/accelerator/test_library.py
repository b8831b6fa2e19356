"""The collective library of the simulated accelerator itself: whether it behaves as NCCL does."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from tests.accelerator import sim

pytestmark = pytest.mark.accelerator

RANKS = 3
Program = Callable[[int, Any, torch.device], Any]


def run(program: Program, devices: list[int] | None = None, seconds: float = 20) -> list[Any]:
    """What it gives, or raises, on each rank: a thread with its end of a process group."""
    store = dist.HashStore()
    found: list[Any] = [None] * RANKS

    def member(rank: int) -> None:
        device = torch.device("sim", rank if devices is None else devices[rank])
        sim.set_device(device)
        plugin: Any = dist.Backend._plugins[sim.COLLECTIVES.upper()]
        end = plugin.creator_fn(store, rank, RANKS, timedelta(seconds=seconds))
        try:
            found[rank] = program(rank, end, device)
        except Exception as exc:
            found[rank] = exc
        end.abort()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def all_reduce(end: Any, x: torch.Tensor, *, asynchronous: bool = True) -> Any:
    """Begin a sum."""
    options: Any = c10d.AllreduceOptions()
    options.asyncOp = asynchronous
    return end.allreduce([x], options)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_stream_waits_and_not_the_host(asynchronous: bool) -> None:
    """The result is there when the stream comes to it."""

    def program(rank: int, end: Any, device: torch.device) -> Any:
        x = torch.full((40_000,), float(rank), device=device)
        all_reduce(end, torch.ones(1, device=device)).wait()  # connects
        sim.sleep(0.3 if rank == 1 else 0)
        began = time.perf_counter()
        work = all_reduce(end, x, asynchronous=asynchronous)
        early = work.is_completed()
        work.wait()
        given = time.perf_counter() - began
        return early, given < 0.2, float(x.min() + x.max()), work.is_completed()

    assert run(program) == [(False, True, 6.0, True)] * RANKS


def test_who_does_not_wait_has_a_race() -> None:
    """Always, and on whichever machine."""

    def program(rank: int, end: Any, device: torch.device) -> str:
        x = torch.ones(4, device=device)
        work = all_reduce(end, x)
        with pytest.raises(RuntimeError, match=r"race: aten::add .* all_reduce .* writes"):
            x.add(1)
        work.wait()
        return str((x + 1).tolist())

    assert run(program) == ["[4.0, 4.0, 4.0, 4.0]"] * RANKS
    assert len(sim.faults()) == RANKS


def test_a_group_of_messages_goes_round_a_ring() -> None:
    """One after the other these would wait for each other for ever."""

    def program(rank: int, end: Any, device: torch.device) -> float:
        x, out = torch.full((100_000,), float(rank), device=device), torch.empty(100_000).to(device)
        end._start_coalescing()
        end.send([x], (rank + 1) % RANKS, 0)
        end.recv([out], (rank - 1) % RANKS, 0)
        end._end_coalescing().wait()
        return float(out.sum())

    assert run(program) == [200_000.0, 0.0, 100_000.0]


def test_two_ranks_on_one_device_are_refused() -> None:
    """By all."""

    def program(rank: int, end: Any, device: torch.device) -> None:
        all_reduce(end, torch.ones(1, device=device))

    for error in run(program, [1, 2, 1]):
        assert "duplicate device: rank 0 and rank 2 are both on sim:1" in str(error)


def test_an_abort_ends_this_members_kernel_alone() -> None:
    """The others' run on, up to an abort of their own."""
    aborted = threading.Event()

    def program(rank: int, end: Any, device: torch.device) -> Any:
        x = torch.ones(4, device=device)
        all_reduce(end, x).wait()
        if rank == 2:
            return aborted.wait(20)
        work = all_reduce(end, x)
        time.sleep(0.1)
        if rank == 1:
            aborted.wait(20)
            time.sleep(0.1)
            assert not work.is_completed()
        end.abort()
        sim.synchronize(device)  # comes back
        aborted.set()
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(dist.DistBackendError, match="all_reduce was ended: it was aborted"):
            work.wait()
        with pytest.raises(dist.DistBackendError, match="it was aborted"):
            all_reduce(end, x)
        return True

    assert run(program) == [True] * RANKS


def test_members_that_disagree_are_a_fault() -> None:
    """Where NCCL hangs, or gives wrong numbers."""

    def program(rank: int, end: Any, device: torch.device) -> Any:
        work = all_reduce(end, torch.ones(4 if rank else 5, device=device))
        sim.sleep(0.01)
        time.sleep(0.2)
        return work.is_success()

    assert not all(run(program))
    assert "waits for 16 bytes of all_reduce sum Float from rank 0, which gives 20" in " ".join(
        sim.faults()
    )


def test_the_watchdog_ends_a_kernel_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """And spares the process if it was told to."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")

    def program(rank: int, end: Any, device: torch.device) -> Any:
        x = torch.ones(4, device=device)
        all_reduce(end, x).wait()
        if rank == 2:
            time.sleep(1)
            return True
        work = all_reduce(end, x)
        sim.synchronize(device)
        return str(work.exception())

    first, second, _ = run(program, seconds=0.5)
    for text in (first, second):
        assert "all_reduce on rank" in text
        assert "took longer than 500 ms" in text


def test_the_watchdog_ends_the_process_unasked() -> None:
    """As NCCL's does."""
    text = (
        "from tests.accelerator import sim; sim.load()\n"
        "import tests.accelerator.test_library as own\n"
        "def program(rank, end, device):\n"
        "    x = own.torch.ones(4, device=device)\n"
        "    if rank: own.all_reduce(end, x)\n"
        "    else: own.all_reduce(end, x).wait(); own.time.sleep(5)\n"
        "    own.all_reduce(end, x) if rank else None\n"
        "    own.time.sleep(5)\n"
        "own.run(program, seconds=0.3)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode < 0
    assert "the process is ended" in done.stderr
