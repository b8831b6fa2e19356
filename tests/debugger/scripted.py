"""A port that tells a tracer what its script says, and notes where the worker stood."""

import linecache
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import torch

from discolab.debugger.breaks import Break, BreakTable
from discolab.debugger.records import Arrival, Order
from discolab.debugger.tracer import Tracer
from discolab.runtime.channel import ThreadChannel
from discolab.runtime.worker import Worker

Says = str | Order | Callable[[FrameType, Arrival], Any]

_files = count(1)


def make_worker(rank: int = 0, num_workers: int = 4) -> Worker:
    cpu = torch.device("cpu")
    return Worker(rank, num_workers, 1, cpu, ThreadChannel(), shared={}, worker_zero_data={})


class ScriptedPort:
    """`says`: for each arrival an order or its mode, or a function that may return one."""

    def __init__(self, says: Iterable[Says] = (), then: str = "continue") -> None:
        self.pause_wanted = False
        self.ahead = None
        self.breaks = BreakTable()
        self.arrivals: list[Arrival] = []
        self._says = list(says)
        self._then = then

    def arrive(self, frame: FrameType, arrival: Arrival) -> Order:
        self.arrivals.append(arrival)
        self.pause_wanted = False
        self.ahead = None
        says = self._says.pop(0) if self._says else self._then
        if callable(says):
            says = says(frame, arrival) or "continue"
        return (says, None) if isinstance(says, str) else says

    @property
    def lines(self) -> list[int]:
        return [arrival.here.line for arrival in self.arrivals]

    @property
    def places(self) -> list[str]:
        return [f"{a.here.function}:{a.here.line}" for a in self.arrivals]


class Program:
    """Source in a file of its own, its first line is 1; `namespace` is what it has made."""

    def __init__(self, source: str, file: str = "", rank: int = 0, flags: int = 0) -> None:
        self.source = textwrap.dedent(source).strip("\n") + "\n"
        self.file = file or f"Cell In[{next(_files)}]"
        self.worker = make_worker(rank)
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.port = ScriptedPort()
        lines = self.source.splitlines(keepends=True)
        linecache.cache[self.file] = (len(self.source), None, lines, self.file)
        self.code = compile(self.source, self.file, "exec", flags=flags)

    @property
    def execute(self) -> Callable[[], None]:
        return partial(exec, self.code, self.namespace)  # which is no frame of the tests'

    def run(
        self,
        *says: Says,
        mode: str = "step",
        then: str = "continue",
        breaks: Iterable[Break] = (),
        **hooks: Any,
    ) -> ScriptedPort:
        self.port = ScriptedPort(says, then)
        self.port.breaks.replace([one.packed() for one in breaks])
        self.tracer = Tracer(self.worker, self.port)
        vars(self.tracer).update(hooks)
        self.tracer.run(self.execute, mode)
        return self.port

    def stop(self, line: int, condition: str = "", number: int = 1, **more: Any) -> Break:
        return Break(number, self.file, line, condition, **more)
