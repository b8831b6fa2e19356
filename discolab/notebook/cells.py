"""The notebook's own cells, told to workers of other processes.

A function that an ordinary cell defines has a code object with the file name that the kernel gave
that cell. A worker of another process, to which the function is sent, is told what the cell is
called (``Cell In[3]``) and what its lines are: for its tracebacks and its status, and for whoever
reads source code there (`inspect`, compilers of kernels).

`CellTeller` is the controller's side: one a lab, with a service in each session. `listen` is the
worker's.
"""

from __future__ import annotations

import linecache
import weakref
from typing import Any

from ..runtime import sources
from ..runtime.services import SERVICES, Service
from ..runtime.worker import Worker

SERVICE = "notebook.cells"
_DEFINE = ("def ", "class ", "lambda")

Entry = tuple[str, str]  # what a cell is called, and its source

_names: dict[str, str] = {}  # on a worker: file name -> what it is called


class CellTeller:
    """Tells workers of other processes about each new cell in which a function may be defined."""

    def __init__(self, shell: Any) -> None:
        self._compile = shell.compile
        self._services: weakref.WeakSet[_CellService] = weakref.WeakSet()
        self._cache: Any = None
        self._runs: dict[str, list[int]] = {}  # file name -> which cells have had that text

    def install(self) -> None:
        """Look at what the shell compiles."""
        self._cache = self._compile.cache

        def cache(*args: Any, **kwargs: Any) -> Any:
            filename = self._cache(*args, **kwargs)
            self._note(filename)
            self._tell(filename)
            return filename

        self._compile.cache = cache
        SERVICES[SERVICE] = self._make_service

    def uninstall(self) -> None:
        """Undo `install`."""
        self._compile.cache = self._cache
        del SERVICES[SERVICE]

    def name(self, filename: str) -> str | None:
        """What the notebook's cell of that file name is called; None if it is none."""
        number = getattr(self._compile, "_filename_map", {}).get(filename)
        return None if number is None else f"Cell In[{number}]"

    def name_at(self, filename: str, cell: int) -> str | None:
        """What it was called when cell number `cell` ran: a text that is run twice has one file."""
        runs = [number for number in self._runs.get(filename, ()) if number <= cell]
        return f"Cell In[{runs[-1]}]" if runs else None

    def known(self) -> dict[str, Entry]:
        """All of them so far, by file name."""
        files = list(getattr(self._compile, "_filename_map", {}))
        return {file: entry for file in files if (entry := self._entry(file)) is not None}

    def _entry(self, filename: str) -> Entry | None:
        name = self.name(filename)
        text = "".join(linecache.getlines(filename))
        return (name, text) if name and any(word in text for word in _DEFINE) else None

    def _note(self, filename: str) -> None:
        number = getattr(self._compile, "_filename_map", {}).get(filename)
        runs = self._runs.setdefault(filename, [])
        if number and number not in runs[-1:]:
            runs.append(number)

    def _tell(self, filename: str) -> None:
        entry = self._entry(filename) if self._services else None
        if entry is not None:
            for service in tuple(self._services):
                service.tell((filename, *entry))

    def _make_service(self, exchange: Any) -> Service:
        service = _CellService(exchange)
        self._services.add(service)
        return service


class _CellService(Service):
    """The way to the workers of one session; kept by the session."""

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange

    def tell(self, told: tuple[str, str, str]) -> None:
        here = self._exchange.workers_here()
        for rank in range(self._exchange.num_workers):
            if rank not in here:
                self._exchange.tell(rank, SERVICE, told)


# -- on the worker -------------------------------------------------------------------------


def listen(worker: Worker, known: dict[str, Entry]) -> None:
    """Remember the cells that there are, and those that come."""
    for filename, entry in known.items():
        _remember((filename, *entry))
    if _names.get not in sources.namers:
        sources.namers.append(_names.get)
    assert worker.link is not None
    worker.link.listen(SERVICE, _remember)


def _remember(told: tuple[str, str, str]) -> None:
    filename, name, text = told
    _names[filename] = name
    keep_source(filename, text)


def keep_source(filename: str, text: str) -> None:
    """Have tracebacks and `inspect` find the lines of a file that is none."""
    lines = [line + "\n" for line in text.splitlines()]
    linecache.cache[filename] = (len(text), None, lines, filename)
