"""Who compiles or exports a program does so alone: others compute meanwhile as they do alone."""

from __future__ import annotations

import builtins
import importlib
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import Session, current_worker

pytestmark = pytest.mark.one_process


def found() -> tuple[Any, ...]:
    """What the calling thread finds of torch and Python."""
    pair = torch.ones(2, requires_grad=True)
    max(pair[0], pair[1]).backward()
    return (
        torch.compiler.is_compiling(),
        torch.compiler.is_exporting(),
        math.pow(3, 40),
        tuple(pair.grad.tolist()),  # type: ignore[union-attr]
    )


ALONE = (False, False, 3.0**40, (1.0, 0.0))


class Asks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(10)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) if torch.compiler.is_compiling() else -x


def compiles() -> bool:
    module, asked = Asks(), []

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        asked.append(torch.compiler.is_compiling())
        return graph.forward

    x = torch.ones(1, 4)
    same = torch.equal(torch.compile(module, backend=backend)(x), module.layers(x))
    torch._dynamo.reset()
    return same and asked == [True]


def exports() -> bool:
    module, x = Asks(), torch.ones(1, 4)
    program = torch.export.export(module, (x,), strict=False)
    return torch.equal(program.module()(x), module.layers(x))


@pytest.mark.parametrize("trace", [compiles, exports])
@pytest.mark.parametrize("by_notebook", [False, True])
def test_who_compiles_does_so_alone(
    pair: Session, trace: Callable[[], bool], by_notebook: bool
) -> None:
    begun, over = threading.Event(), threading.Event()

    def work() -> Any:
        if current_worker().rank == 1 and not by_notebook:
            begun.wait(20)
            try:
                return [trace() for _ in range(3)]
            finally:
                over.set()
        seen = set()
        while not over.is_set():
            seen.add(found())
            begun.set()
        return seen

    results = pair.call_packed(work)
    if by_notebook:
        assert begun.wait(20)
        try:
            assert [trace() for _ in range(3)] == [True] * 3
        finally:
            over.set()
        assert results.debug_get_from_all() == [{ALONE}] * 2
    else:
        assert results.debug_get_from_all() == [{ALONE}, [True] * 3]
    assert found() == ALONE


class Layered(torch.nn.Module):
    """Its forward gives another thread time to begin, so that a trace takes as long."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.begun, self.other_begun = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.begun.set()
        self.other_begun.wait(0.4)
        return self.second(x)


@pytest.mark.parametrize("by_notebook", [False, True])
def test_nobody_compiles_while_another_traces(pair: Session, by_notebook: bool) -> None:
    """Each would see what the other has replaced, or take it away."""
    layered, x = Layered(), torch.ones(1, 2)
    call = torch.nn.Module.__call__
    torch.compile(torch.sin, backend="eager")(x)  # or the first time takes longer than the trace

    def compile_meanwhile() -> bool:
        def backend(graph: Any, _: Any) -> Callable[..., Any]:
            layered.other_begun.set()
            assert traced.wait(20)
            return graph.forward  # type: ignore[no-any-return]

        module = torch.nn.Sequential(torch.nn.Linear(2, 2))
        compiled = torch.compile(module, backend=backend, fullgraph=True)
        assert layered.begun.wait(20)
        return torch.equal(compiled(x), module(x))

    def trace() -> list[str]:
        try:
            graph = torch.fx.symbolic_trace(layered).graph
            return [f"{node.op} {node.target}" for node in graph.nodes]
        finally:
            traced.set()

    def run() -> Any:
        if current_worker().rank:
            return compile_meanwhile()
        return None if by_notebook else trace()

    traced = threading.Event()
    results = pair.call_packed(run)
    found = trace() if by_notebook else results.debug_get_from_remote(0)
    assert found == ["placeholder x", "call_module first", "call_module second", "output output"]
    assert results.debug_get_from_remote(1)
    assert torch.nn.Module.__call__ is call
    assert layered(x).shape == (1, 2)
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["compiles", "imports"])
@pytest.mark.parametrize("notebooks", [None, 0, 1])
def test_who_traces_may_import_while_another_one_waits_to_trace(
    pair: Session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    notebooks: int | None,
) -> None:
    """One has the turn to trace and wants the one to import, the other the other way round."""
    needed, traces = f"needed_to_trace_{how}_{notebooks}", f"traces_{how}_{notebooks}"
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{needed}.py").write_text("")
    (tmp_path / f"{traces}.py").write_text(
        "import builtins, torch\nbuiltins.in_the_middle()\n"
        "torch.fx.symbolic_trace(torch.nn.ReLU())\n"
    )
    begun = [threading.Event(), threading.Event()]

    def in_the_middle() -> None:
        begun[1].set()
        begun[0].wait(0.4)

    monkeypatch.setattr(builtins, "in_the_middle", in_the_middle, raising=False)

    class Importing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            begun[0].set()
            begun[1].wait(0.2)
            time.sleep(0.05)  # the other one waits for this trace by now
            importlib.import_module(needed)
            return x

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        in_the_middle()
        torch.fx.symbolic_trace(torch.nn.ReLU())
        return graph.forward  # type: ignore[no-any-return]

    def run(part: int) -> None:
        if part == 0:
            torch.fx.symbolic_trace(Importing())
        elif how == "imports":
            importlib.import_module(traces)
        else:
            torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))

    began = time.monotonic()
    results = pair.call_packed(
        lambda: run(current_worker().rank) if current_worker().rank != notebooks else None
    )
    if notebooks is not None:
        run(notebooks)
    results.debug_get_from_all()
    assert time.monotonic() - began < 8  # somebody would have waited for ten seconds, or for ever
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_script_asks_whether_it_is_compiled(pair: Session) -> None:
    """torch.jit compiles, with a program, the functions that it calls: also ours."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return x if torch.compiler.is_compiling() else -x

    def run() -> list[float]:
        return torch.jit.script(step)(torch.ones(2)).tolist()

    assert pair.call_packed(run).debug_get_from_all() == [[-1.0, -1.0]] * 2
    assert run() == [-1.0, -1.0]


def test_what_is_imported_while_two_compile(
    pair: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who compiles has the turn to import before torch's lock: the notebook too."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for number in range(20):
        (tmp_path / f"needed_to_compile_{number}.py").write_text("import time\ntime.sleep(0.01)\n")

    def compile_some(numbers: list[int]) -> list[float]:
        def backend(graph: Any, _: Any) -> Callable[..., Any]:
            importlib.import_module(f"needed_to_compile_{numbers.pop()}")
            return graph.forward

        def add(x: torch.Tensor, number: int) -> torch.Tensor:
            return x + number

        compiled = torch.compile(add, backend=backend, dynamic=False)
        return [compiled(torch.zeros(1), number).item() for number in range(len(numbers))]

    began = time.monotonic()
    found = pair.call_packed(
        lambda: compile_some(list(range(6)) if current_worker().rank else list(range(6, 12)))
    )
    mine = compile_some(list(range(12, 18)))
    assert [mine, *found.debug_get_from_all()] == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 3
    assert time.monotonic() - began < 10


def test_workers_trace_what_branches_at_once(pair: Session) -> None:
    """`torch.cond` traces its branches with the tracer of its own thread."""
    from torch.fx.experimental.proxy_tensor import make_fx

    both = threading.Barrier(2)

    def trace() -> list[float]:
        rank = current_worker().rank

        def branches(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda y: y + rank, lambda y: y - rank, (x,))

        found = []
        for _ in range(3):
            both.wait(20)
            graph = make_fx(branches, tracing_mode="symbolic")(torch.ones(1))
            found += graph(torch.ones(1)).tolist()
        return found

    assert pair.call_packed(trace).debug_get_from_all() == [[1.0] * 3, [2.0] * 3]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("other", ["compiles", "imports what traces"])
def test_a_trace_imports_and_compiles_while_another(
    other: str, pair: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for its turn to trace keeps nothing that a trace may need."""
    from torch._dynamo.backends.debugging import aot_eager

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "needed_in_a_trace.py").write_text("")
    (tmp_path / "traces_when_imported.py").write_text(
        "import torch\ntorch.fx.symbolic_trace(torch.nn.Identity())\n"
    )
    traces, goes_on = threading.Event(), threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        goes_on.set()
        return aot_eager(graph, inputs)

    @torch.compile(backend="eager")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def imports(x: torch.Tensor) -> torch.Tensor:
        traces.set()
        goes_on.wait(0.3)
        importlib.import_module("needed_in_a_trace")
        return double(x)

    def work() -> list[float]:
        x = torch.ones(1)
        if current_worker().rank:
            return torch.func.jvp(imports, (x,), (x,))[1].tolist()
        traces.wait(20)
        if other != "compiles":
            importlib.import_module("traces_when_imported")
            return [3.0]
        return torch.compile(lambda x: x + 2, backend=backend)(x).tolist()

    assert pair.call_packed(work).debug_get_from_all() == [[3.0], [2.0]]
