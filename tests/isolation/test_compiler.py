"""torch.compile in worker threads: nothing of discolab's is compiled, nobody waits for himself."""

import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from discolab import ThreadedSession, WorkerError, ccl, current_worker
from discolab.runtime.worker import current_worker_or_none


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


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@pytest.mark.one_process
def test_a_reset_in_the_notebook_frees_nothing_that_a_worker_runs(pair: ThreadedSession) -> None:
    """It ended the process, where the worker looked for its compiled code at that moment."""
    compiled, begun, go_on = [], threading.Event(), threading.Event()

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(current_worker_or_none())
        return graph.forward

    def call() -> None:
        assert torch.compile(scale, backend=backend)(torch.ones(1)).item() == 3.0

    def run() -> None:
        call()
        if current_worker().rank:
            begun.set()
            assert go_on.wait(20)
            call()

    call()
    results = pair.call_packed(run)
    assert begun.wait(20)
    torch.compiler.reset()
    torch._dynamo.export(scale)(torch.ones(1))
    torch._dynamo.explain(scale)(torch.ones(1))
    go_on.set()
    results.debug_get_from_all()
    assert len(compiled) == 3, "the worker's code is still there"
    call()
    assert len(compiled) == 4, "the notebook's own is compiled anew"
    torch.compiler.reset()
    pair.call_packed(call)
    pair.sync_all()
    assert len(compiled) == 6, "all is freed while no worker runs anything"


@pytest.mark.one_process
def test_skipped_guards_are_refused_on_several_workers() -> None:
    def skip() -> None:
        torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)

    def twice() -> float:
        compiled = torch.compile(lambda x, number: x * number, backend="eager", dynamic=False)
        return [compiled(torch.ones(1), number).item() for number in (2, 3)][-1]

    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        with pytest.raises(WorkerError, match=r"skip_guard_eval_unsafe.*--engine processes"):
            sess.call_packed(skip).debug_get_from_all()
        assert sess.call_packed(twice).debug_get_from_all() == [3.0] * 2


@torch.compile(backend="eager", dynamic=False)
def times_and_rank(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Compiled when the module is imported, as functions of libraries are."""
    return x * factor + dist.get_rank()


@torch._dynamo.optimize("eager")
def plus_rank(x: torch.Tensor) -> torch.Tensor:
    return x + dist.get_rank()


@pytest.mark.one_process
def test_workers_run_their_own_code_of_one_function() -> None:
    """Rank is a constant in it: they all had that of the one who called first."""

    def run() -> list[float]:
        found = [times_and_rank(torch.ones(1), 3).item(), plus_rank(torch.ones(1)).item()]
        torch.compiler.reset()
        return [*found, times_and_rank(torch.ones(1), 3).item()]

    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        found = sess.call_packed(run).debug_get_from_all()
    assert found == [[3.0 + rank, 1.0 + rank, 3.0 + rank] for rank in range(2)]


@pytest.mark.one_process
def test_what_was_compiled_before_runs_while_another_worker_traces() -> None:
    """It was an error: "you are using FX to symbolically trace a dynamo-optimized function"."""
    inside, done = threading.Event(), threading.Event()

    class Waits(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert done.wait(20)
            return x + 1

    def run() -> float:
        found = times_and_rank(torch.ones(1), 3).item()
        ccl.barrier()
        if current_worker().rank:
            torch.fx.symbolic_trace(Waits())
        else:
            assert inside.wait(20)
            try:
                found = times_and_rank(torch.ones(1), 3).item()
            finally:
                done.set()
        return found

    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        assert sess.call_packed(run).debug_get_from_all() == [3.0, 4.0]


def versions(count: int) -> list[Any]:
    """Results of a function that is compiled anew for each number; the name of an error."""
    found: list[Any] = []
    compiled = torch.compile(scale_by, backend="eager", fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        try:
            for factor in range(count):
                found.append(compiled(torch.ones(1), factor).item())
        except Exception as exc:
            found.append(type(exc).__name__)
    return found


def scale_by(x: torch.Tensor, factor: int) -> torch.Tensor:
    return x * factor


@pytest.mark.one_process
@pytest.mark.filterwarnings("ignore")
def test_each_worker_reaches_the_recompile_limit_for_itself() -> None:
    with ThreadedSession(4, devices="cpu", timeout=60) as sess:
        found = sess.call_packed(lambda: versions(2 + current_worker().rank % 2))
        few, many = [0.0, 1.0], [0.0, 1.0, "FailOnRecompileLimitHit"]
        assert found.debug_get_from_all() == [few, many, few, many]


def tripled(x: torch.Tensor | None) -> Any:
    return None if x is None else x * 3


@pytest.mark.one_process
def test_what_torch_gives_up_to_compile_it_gives_up_for_one_worker() -> None:
    """For the others it was never compiled then, and with fullgraph=True an error."""

    def run() -> list[Any]:
        if current_worker().rank == 0:
            found = torch.compile(tripled, backend="eager")(None)
            ccl.barrier()
            return [found]
        ccl.barrier()
        compiled = torch.compile(tripled, backend="eager", fullgraph=True)
        return [compiled(torch.ones(1)).item() for _ in range(2)]

    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        assert sess.call_packed(run).debug_get_from_all() == [[None], [3.0, 3.0]]


@pytest.mark.one_process
def test_a_worker_compiles_for_the_shapes_that_it_has_seen() -> None:
    """For those of others too, sizes are variable: a custom operator may not take them."""

    def sizes() -> list[Any]:
        seen: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            seen.append([type(one) for one in inputs])
            return graph.forward

        compiled = torch.compile(scale, backend=backend)
        for size in (2, 2, *range(2, 5)):
            compiled(torch.ones(size + 4 * current_worker().rank))
        return seen

    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        found = sess.call_packed(sizes).debug_get_from_all()
    assert found == [[[torch.Tensor], [torch.SymInt, torch.Tensor]]] * 2


@pytest.mark.one_process
def test_compiled_code_draws_random_numbers() -> None:
    """What Python's `random` gave while it was compiled was a constant of it."""

    def draw() -> tuple[list[float], list[float]]:
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * random.random() + random.randrange(100)

        found = []
        for function in (torch.compile(scaled, backend="eager"), scaled):
            random.seed(current_worker().rank)
            found.append([round(function(torch.ones(1)).item(), 4) for _ in range(4)])
        return found[0], found[1]

    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        for compiled, plain in sess.call_packed(draw).debug_get_from_all():
            assert compiled == plain


@pytest.mark.one_process
@pytest.mark.filterwarnings("ignore")
def test_compiled_code_has_the_workers_generator() -> None:
    """torch does not compile what asks a generator, and it was an error of torch's own here."""

    def noise(x: torch.Tensor) -> torch.Tensor:
        state = torch.default_generator.get_state()
        drawn = torch.rand(1, generator=torch.default_generator)
        torch.default_generator.set_state(state)
        return x + (drawn - torch.rand(1))

    with ThreadedSession(1, devices="cpu", timeout=60) as sess:
        called = sess.call_packed(lambda: torch.compile(noise, backend="eager")(torch.ones(1)))
        assert called.debug_get_from_remote(0).item() == 1.0


def asks_torch(x: torch.Tensor) -> torch.Tensor:
    fast = torch.backends.mha.get_fastpath_enabled() + torch.is_autocast_cache_enabled()
    return x + fast + torch.get_default_dtype().itemsize * 10


@pytest.mark.one_process
def test_compiled_code_asks_torch_for_settings() -> None:
    """torch.compile finds them in tables that it makes once: there was an error before or after."""

    def compiled() -> float:
        return torch.compile(asks_torch, backend="eager", fullgraph=True)(torch.zeros(1)).item()

    def with_another_dtype() -> list[float]:
        found = [compiled()]
        torch.set_default_dtype(torch.float64)
        return [*found, compiled()]

    for _ in range(2):
        with ThreadedSession(1, devices="cpu", timeout=60) as sess:
            found = sess.call_packed(with_another_dtype).debug_get_from_remote(0)
            sess.call_packed(torch._dynamo.trace_rules.clear_lru_cache).debug_get_from_all()
            assert sess.call_packed(compiled).debug_get_from_remote(0) == 82.0
        assert found == [42.0, 82.0]
        assert compiled() == 42.0


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


class Draws(torch.nn.Module):
    """What it gives depends on random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True) + torch.rand_like(x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_each_worker_draws_in_code_of_aotinductor(tmp_path: Path) -> None:
    path = str(tmp_path / "draws.pt2")
    x = torch.ones(4, 5)
    torch._inductor.aoti_compile_and_package(torch.export.export(Draws(), (x,)), package_path=path)

    def draws(rank: int, meet: Callable[[], Any]) -> list[float]:
        model = torch._inductor.aoti_load_package(path)
        torch.manual_seed(rank)
        found = []
        for _ in range(5):
            meet()
            found.append(float(model(x).sum()))
        return [*found, float(torch.rand(()))]

    expected = [draws(rank, lambda: None) for rank in range(4)]
    state = torch.get_rng_state()
    with ThreadedSession(4, devices="cpu", timeout=60) as sess:
        seen = sess.call_packed(lambda: draws(current_worker().rank, ccl.barrier))
        assert seen.debug_get_from_all() == expected
        assert torch.equal(torch.get_rng_state(), state)
    assert draws(3, lambda: None) == expected[3]
