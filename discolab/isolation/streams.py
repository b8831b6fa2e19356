"""What a worker puts in place of ``sys.stdout`` and ``sys.stderr`` is its own.

The module gets another class, whose properties look who calls. C code and `print` read the module's
dict: what a worker puts in place of ``sys.stdout`` is reached from there by a `_Router`. `_lock`
guards the placing of routers; a worker's own values are in its `process_state`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from ..runtime.interrupts import plain_lock
from ..runtime.worker import current_worker_or_none
from . import table
from .patches import ModuleWithProperties, Patches
from .table import OF_SCRIPT, Row, Treatment

_lock = plain_lock()
_dict = vars(sys)


def _stream(name: str) -> property:
    key = f"{OF_SCRIPT}sys.{name}"

    def get(module: ModuleType) -> Any:
        worker = current_worker_or_none()
        if worker is not None and key in worker.process_state:
            return worker.process_state[key]
        return _of_process(name)

    def set_(module: ModuleType, value: Any) -> None:
        worker = current_worker_or_none()
        if worker is None:
            _dict[name] = value
            return
        with _lock:
            current = _dict[name]
            router = type(current) is _Router
            if value is current or (router and value is current.original):
                worker.process_state.pop(key, None)  # as it was before
                return
            if not router:
                _dict[name] = _Router(key, current)
            worker.process_state[key] = value

    return property(get, set_)


def _of_process(name: str) -> Any:
    try:
        return _dict[name]
    except KeyError:
        raise AttributeError(f"module 'sys' has no attribute {name!r}") from None


class _Router:
    """In the dict of `sys` for a stream: what a worker has put there instead gets its text."""

    def __init__(self, key: str, original: Any) -> None:
        self._key = key
        self.original = original

    def _here(self) -> Any:
        worker = current_worker_or_none()
        if worker is None:
            return self.original
        return worker.process_state.get(self._key, self.original)

    def write(self, text: str) -> Any:
        """Write to the calling worker's stream."""
        return self._here().write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each line there."""
        self._here().writelines(lines)

    def flush(self) -> None:
        """Flush the calling worker's stream."""
        self._here().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here(), name)


class _StreamsOfWorkers(ModuleWithProperties):
    """`sys` with streams that look who calls."""

    stdout = _stream("stdout")
    stderr = _stream("stderr")


def _install(patches: Patches) -> None:
    patches.change_class(sys, type("SysOfWorkers", (_StreamsOfWorkers, type(sys)), {}))

    def put_back() -> None:
        for name in ("stdout", "stderr"):
            if type(_dict[name]) is _Router:
                _dict[name] = _dict[name].original

    patches.at_undo(put_back)


table.add(
    Row(
        state="`sys.stdout` and `sys.stderr`",
        treatment=Treatment.PER_WORKER,
        meaning="What a worker sets there is its own: `contextlib.redirect_stdout` takes that "
        "worker's text alone. A script's end puts back what was there.",
        test="tests/isolation/test_process_state.py::test_each_worker_redirects_its_own_output",
        install=_install,
        library="Python",
    )
)
