"""What a call finds set is its callee's: what is set there last, whichever thread serves it."""

import threading

import torch

from discolab import Session, ccl, current_worker, rpc


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
