"""What a call finds set is its callee's: what is set there last, whichever thread serves it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from discolab import Session, WorkerError, ccl, current_worker, rpc
from tests.rpc.functions import eventually

MATMUL = torch.set_float32_matmul_precision
PRECISION = torch.get_float32_matmul_precision


def made() -> torch.dtype:
    return torch.ones(2).dtype


def test_the_default_dtype_is_the_one_that_the_worker_has_set_last(sess: Session) -> None:
    def program() -> list[torch.dtype] | None:
        """Worker 1 serves a call, sets another default, and serves a call again."""
        rank, seen = current_worker().rank, []
        for dtype in (torch.float64, torch.float32):
            if rank == 1:
                torch.set_default_dtype(dtype)
            ccl.barrier()
            seen += [rpc.rpc_sync(1, made) for _ in range(3)] if rank == 0 else []
            ccl.barrier()
        return seen

    want = [torch.float64] * 3 + [torch.float32] * 3
    assert sess.call_packed(program).debug_get_from_remote(0) == want


def test_the_default_dtype_that_a_call_sets_holds_for_later_calls(sess: Session) -> None:
    def side_by_side(gate: int) -> torch.dtype:
        """On a thread of its own, each."""
        here = current_worker().namespace.setdefault("gate", threading.Barrier(gate))
        here.wait(20)
        return made()

    together = [sess.rpc.rpc_async(1, side_by_side, (3,)) for _ in range(3)]
    assert rpc.wait_all(together, 20) == [torch.float32] * 3
    sess.rpc.rpc_sync(1, torch.set_default_dtype, (torch.float64,))
    try:
        together = [sess.rpc.rpc_async(1, side_by_side, (3,)) for _ in range(3)]
        assert rpc.wait_all(together, 20) == [torch.float64] * 3
    finally:
        sess.rpc.rpc_sync(1, torch.set_default_dtype, (torch.float32,))


def test_switches_are_those_of_the_workers_where_none_runs_a_command(sess: Session) -> None:
    def inner(rank: int) -> str:
        found: str = rpc.rpc_sync(rank, PRECISION)
        return found

    sess.call_packed(MATMUL, "high")
    sess.sync_all()
    try:
        for rank in range(sess.num_workers):
            assert sess.rpc.rpc_sync(rank, PRECISION) == "high"
            assert sess.rpc.rpc_sync(rank, inner, (1,)) == "high"
            assert PRECISION() == "highest"
            with pytest.raises(ZeroDivisionError):
                sess.rpc.rpc_sync(rank, divmod, (1, 0))
            assert torch._C._get_float32_matmul_precision() == "highest"
    finally:
        sess.call_packed(MATMUL, "highest")
        sess.sync_all()


@pytest.mark.one_process
def test_the_notebook_changes_none_while_a_call_is_served(sess: Session, gate: Any) -> None:
    begun = threading.Event()

    def serve() -> list[str]:
        seen = [PRECISION()]
        begun.set()
        gate.wait(20)
        return [*seen, PRECISION()]

    future = sess.rpc.rpc_async(1, serve)
    assert begun.wait(20)
    MATMUL("medium")
    try:
        assert PRECISION() == "medium"
        gate.set()
        assert future.wait(20) == ["highest"] * 2
        assert torch._C._get_float32_matmul_precision() == "medium"
    finally:
        MATMUL("highest")


@pytest.mark.one_process
def test_a_call_is_refused_while_another_session_computes_with_other_switches(
    sess: Session, make: Callable[..., Session], gate: Any
) -> None:
    other = make(2)
    other.call_packed(MATMUL, "high")
    other.call_packed(gate.wait, 20)
    eventually(lambda: all(s.state != "idle" for s in other.statistics().workers))
    with pytest.raises(WorkerError, match="a worker of another session computes in this process"):
        sess.rpc.rpc_sync(1, PRECISION)
    gate.set()
    other.sync_all()
    assert sess.rpc.rpc_sync(1, PRECISION) == "highest"
    assert other.rpc.rpc_sync(1, PRECISION) == "high"
