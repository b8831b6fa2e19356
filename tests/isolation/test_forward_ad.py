"""Forward-mode AD on several threads at once gives each what it gives in a process."""

import threading
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd

from discolab import Session, ThreadedSession, WorkerError, current_worker

pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]

ROUNDS = 20


def derive(seed: float) -> list[torch.Tensor]:
    """Derivatives that all use dual tensors, of the sum of ``sin(seed * x) * x``."""
    x = torch.linspace(0.1, 1, 5, dtype=torch.float64)
    f = lambda x: (torch.sin(seed * x) * x).sum()  # noqa: E731
    with fwd.dual_level():
        dual = fwd.make_dual(x, torch.ones_like(x))
        tangent = fwd.unpack_dual(torch.sin(seed * dual)).tangent
    assert tangent is not None
    _, along = torch.func.jvp(f, (x,), (torch.ones_like(x),))
    _, linear = torch.func.linearize(f, x)
    nested = torch.func.jvp(
        lambda y: torch.func.jvp(f, (y,), (torch.ones_like(x),))[1], (x,), (torch.ones_like(x),)
    )[1]
    jacobian = torch.func.jacfwd(lambda x: torch.sin(seed * x))(x)
    hessian = torch.func.hessian(f)(x)
    return [tangent, along, linear(torch.ones_like(x)), nested, jacobian, hessian]


def expected(seed: float) -> list[torch.Tensor]:
    x = torch.linspace(0.1, 1, 5, dtype=torch.float64)
    cos, sin = torch.cos(seed * x), torch.sin(seed * x)
    first = seed * cos * x + sin
    second = 2 * seed * cos - seed * seed * sin * x
    along, nested = first.sum(), second.sum()
    return [seed * cos, along, along, nested, torch.diag(seed * cos), torch.diag(second)]


def check(seed: float) -> None:
    for found, wanted in zip(derive(seed), expected(seed), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.one_process
def test_derivatives_are_right_on_all_workers(sess: Session) -> None:
    def work() -> int:
        for number in range(ROUNDS):
            check(1.0 + current_worker().rank + number / ROUNDS)
        return ROUNDS

    done = sess.call_packed(work)
    for number in range(ROUNDS):  # the notebook has its turn too
        check(9.0 + number / ROUNDS)
    assert done.debug_get_from_all() == [ROUNDS] * 4


@pytest.mark.one_process  # in a process of its own it's torch's business
def test_a_thread_that_a_worker_starts_takes_part(pair: Session) -> None:
    def work() -> list[str]:
        said: list[str] = []

        def other() -> None:
            for number in range(ROUNDS // 4):
                check(3.0 + number)
            said.append("done")

        thread = threading.Thread(target=other)
        thread.start()
        for number in range(ROUNDS // 4):
            check(5.0 + number)
        thread.join()
        return said

    assert pair.call_packed(work).debug_get_from_all() == [["done"]] * 2


def test_another_workers_level_is_none_of_mine() -> None:
    import torch._decomp.decompositions_for_jvp  # the first dual does, with torch.jit, in turn

    def work() -> str:
        x = torch.ones(2)
        if current_worker().rank == 0:
            with fwd.dual_level():
                torch.distributed.barrier()
                torch.distributed.barrier()
            return ""
        torch.distributed.barrier()
        try:
            with pytest.raises(RuntimeError, match="no level exists"):
                fwd.make_dual(x, x)
            return "refused"
        finally:
            torch.distributed.barrier()

    with ThreadedSession(2, devices="cpu", timeout=20) as sess:
        assert sess.call_packed(work).debug_get_from_all() == ["", "refused"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_another_workers_level_does_not_concern_what_i_print() -> None:
    def work() -> str:
        if current_worker().rank == 0:
            with fwd.dual_level():
                torch.distributed.barrier()
                torch.distributed.barrier()
            return ""
        torch.distributed.barrier()
        try:
            sparse = torch.eye(2).to_sparse_csr()  # which has no tangent to ask for
            assert fwd.unpack_dual(sparse).tangent is None
            return str(sparse)[:6]
        finally:
            torch.distributed.barrier()

    with ThreadedSession(2, devices="cpu", timeout=20) as sess:
        assert sess.call_packed(work).debug_get_from_all() == ["", "tensor"]


def test_a_collective_within_is_told_instead_of_hanging() -> None:
    def work() -> Any:
        x = torch.ones(2)

        def f(y: torch.Tensor) -> torch.Tensor:
            torch.distributed.barrier()
            return y * 2

        return torch.func.jvp(f, (x,), (x,))

    with ThreadedSession(2, devices="cpu", timeout=20) as sess:
        with pytest.raises(
            WorkerError, match="waits for its turn to trace a program by forward-mode AD"
        ):
            sess.call_packed(work).debug_get_from_all()
        sess.call_packed(check, 2.0).debug_get_from_all()  # nothing is left of it


def test_after_an_interrupt_others_have_their_turn() -> None:
    def forever() -> None:
        while True:
            check(2.0)

    with ThreadedSession(3, devices="cpu", timeout=20) as sess:
        for _ in range(5):
            running = sess.call_packed(forever)
            sess.interrupt()
            del running
            sess.call_packed(check, 3.0).debug_get_from_all()
        check(4.0)
