"""Who compiles or exports a program does so alone: others compute meanwhile as they do alone."""

from __future__ import annotations

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


def test_a_trace_imports_while_another_compiles(
    pair: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for its turn to trace has not the turn to import, which a trace may need."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch.fx.experimental.proxy_tensor import make_fx

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "needed_in_a_trace.py").write_text("")
    traces, compiles = threading.Event(), threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        compiles.set()
        return aot_eager(graph, inputs)

    def imports(x: torch.Tensor) -> torch.Tensor:
        traces.set()
        compiles.wait(0.3)
        importlib.import_module("needed_in_a_trace")
        return x + 1

    def work() -> list[float]:
        if current_worker().rank:
            return make_fx(imports)(torch.zeros(1))(torch.zeros(1)).tolist()
        traces.wait(20)
        return torch.compile(lambda x: x + 2, backend=backend)(torch.zeros(1)).tolist()

    assert pair.call_packed(work).debug_get_from_all() == [[2.0], [1.0]]


TRACES = """
import torch
from tests.isolation import test_tracing as events

events.importing.set()
events.tracing.wait(20)
graph = torch.fx.symbolic_trace(torch.nn.Linear(1, 1))
"""

importing, tracing = threading.Event(), threading.Event()


def test_a_trace_imports_while_a_module_traces(
    pair: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who imports, and waits for its turn to trace, lets the one import that traces."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "module_that_traces.py").write_text(TRACES)
    (tmp_path / "needed_in_another_trace.py").write_text("value = 2")

    class Imports(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tracing.set()
            return x + importlib.import_module("needed_in_another_trace").value

    def work() -> list[str]:
        if current_worker().rank:
            importing.wait(20)
            graph = torch.fx.symbolic_trace(Imports()).graph
        else:
            graph = importlib.import_module("module_that_traces").graph.graph
        return [node.op for node in graph.nodes]

    assert pair.call_packed(work).debug_get_from_all() == [
        ["placeholder", "get_attr", "get_attr", "call_function", "output"],
        ["placeholder", "call_function", "output"],
    ]


def test_a_trace_is_whole_while_another_compiles(pair: Session) -> None:
    """torch puts back what the tracer has replaced, while it compiles."""
    compiling, looked = threading.Event(), threading.Event()

    class Waits(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            traces.set()
            compiling.wait(0.3)
            return self.layer(x)

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

    traces = threading.Event()

    def backend(graph: Any, _: Any) -> Any:
        compiling.set()
        looked.wait(0.3)
        return graph.forward

    def work() -> Any:
        if current_worker().rank:
            graph = torch.fx.symbolic_trace(Waits()).graph
            looked.set()
            return [node.op for node in graph.nodes]
        traces.wait(20)
        return torch.compile(lambda x: x + 2, backend=backend)(torch.zeros(1)).tolist()

    found = pair.call_packed(work).debug_get_from_all()
    assert found == [[2.0], ["placeholder", "call_module", "output"]]
