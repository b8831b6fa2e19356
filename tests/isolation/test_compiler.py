"""torch.compile in worker threads: nothing of discolab's is compiled, nobody waits for himself."""

from typing import Any

import pytest
import torch

from discolab import ThreadedSession, WorkerError


def backward_while_compiling() -> float:
    """A step with compiled autograd; gives the gradient of each element."""
    torch._dynamo.config.compiled_autograd = True
    try:
        x = torch.ones(3, requires_grad=True)

        def step() -> None:
            (x.sin() * 2).sum().backward()

        torch.compile(step, backend="eager")()
    finally:
        torch._dynamo.config.compiled_autograd = False
    assert x.grad is not None
    return float(x.grad[0])


@pytest.mark.one_process
@pytest.mark.filterwarnings("ignore")
def test_compiled_autograd() -> None:
    with ThreadedSession(1, devices="cpu", timeout=60) as sess:
        gradient = sess.call_packed(backward_while_compiling).debug_get_from_remote(0)
    assert gradient == pytest.approx(1.0806, abs=1e-4)


@pytest.mark.one_process
def test_compiled_autograd_is_refused_on_several_workers() -> None:
    with (
        ThreadedSession(2, devices="cpu", timeout=60) as sess,
        pytest.raises(WorkerError, match=r"compiled autograd .*--engine processes"),
    ):
        sess.call_packed(backward_while_compiling).debug_get_from_all()


def compiled_calls() -> int:
    """How often a function is compiled that is called once."""
    from discolab import ccl, current_worker

    rank, compiled = current_worker().rank, []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    torch.compiler.set_stance("force_eager" if rank else "default")
    ccl.barrier()
    torch.compile(double, backend=backend)(torch.ones(2))
    ccl.barrier()
    return len(compiled)


@pytest.mark.one_process
@pytest.mark.filterwarnings("ignore")
def test_each_worker_has_a_stance() -> None:
    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        assert sess.call_packed(compiled_calls).debug_get_from_all() == [1, 0]
    assert torch._dynamo.eval_frame._stance.stance == "default"
