"""`decimal.DefaultContext`: the precision and rounding with which contexts and threads begin.

C code reads the process's, so a worker that looks at it gets a copy of its own, which contexts that
the worker makes, and threads that it starts, are given from then on. On the worker's own thread it
holds until that computes with a context of its own, as in a process.
"""

from __future__ import annotations

import contextvars
import copyreg
import decimal
import functools
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Self

from ..runtime.worker import Worker, current_worker_or_none
from . import table
from .imports import worker_unless_importing
from .patches import ModuleWithProperties, Patches
from .table import Row, Treatment
from .worker_local import OF_SCRIPT

_KEY = f"{OF_SCRIPT}decimal.DefaultContext"
_FIELDS = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
_OF_PYTHON = decimal.Context


def _copy(source: decimal.Context, target: Any) -> Any:
    """What a context begins with; flags are not part of it."""
    for name in _FIELDS:
        _OF_PYTHON.__setattr__(target, name, getattr(source, name))
    _OF_PYTHON.__setattr__(target, "traps", dict(source.traps))
    return target


def _own() -> _Default | None:
    worker = current_worker_or_none()
    own: _Default | None = None if worker is None else worker.process_state.get(_KEY)
    return own


class _OfOurs(_OF_PYTHON):
    def __reduce__(self) -> Any:
        return decimal.Context, _OF_PYTHON.__reduce__(self)[1]


class _Following(_OfOurs):
    """The context of a thread that has not computed before its worker's default was set."""

    _chosen = False

    def __getattribute__(self, name: str) -> Any:
        if name == "traps":  # which may be set in what is given back
            vars(self)["_chosen"] = True
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["_chosen"] = True
        super().__setattr__(name, value)


class _Traps(dict[Any, bool]):
    """The traps of a worker's default as they are now; it is told when one is set.

    A dict, which contexts of C take as well as their own kind.
    """

    def __init__(self, default: _Default) -> None:
        self._default = default
        self._traps: Any = _OF_PYTHON.__getattribute__(default, "traps")
        super().__init__(self._traps)

    def __getitem__(self, signal: Any) -> bool:
        return bool(self._traps[signal])

    def __setitem__(self, signal: Any, value: Any) -> None:
        self._traps[signal] = value
        super().__setitem__(signal, bool(value))
        self._default.follow()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As of a dict."""
        for signal, value in dict(*args, **kwargs).items():
            self[signal] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __delitem__(self, signal: Any) -> None:
        del self._traps[signal]  # Python's own error


class _Default(_OfOurs):
    """A worker's default."""

    def __getattribute__(self, name: str) -> Any:
        return _Traps(self) if name == "traps" else super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.follow()

    def follow(self) -> None:
        """Have the calling thread begin with it, if that has not computed yet."""
        variables = contextvars.copy_context().items()
        now = next((value for key, value in variables if key.name == "decimal_context"), None)
        if now is None or (isinstance(now, _Following) and not now._chosen):
            decimal.setcontext(_copy(self, _Following()))


class _MakesPlain(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        if cls is _Context:
            return isinstance(instance, _OF_PYTHON)
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, kind: type) -> bool:
        if cls is _Context:
            return issubclass(kind, _OF_PYTHON)
        return super().__subclasscheck__(kind)


class _Context(_OF_PYTHON, metaclass=_MakesPlain):
    """`decimal.Context` on a worker: it begins as the worker's default."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        context = _OF_PYTHON.__new__(_OF_PYTHON if cls is _Context else cls)
        own = _own()
        if own is not None:
            _copy(own, context)
        if cls is _Context:
            _OF_PYTHON.__init__(context, *args, **kwargs)
        return context


_Context.__name__ = _Context.__qualname__ = "Context"
_Context.__module__ = "decimal"


def _set_over(set_: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(set_)
    def setcontext(ctx: Any, /) -> None:
        """Set a copy of a default, as Python does: what is set in it does not reach the default."""
        set_(_copy(ctx, _OF_PYTHON()) if isinstance(ctx, _Default) else ctx)

    return setcontext


class _Decimal(ModuleWithProperties):
    """The module `decimal`."""

    @property
    def DefaultContext(self) -> decimal.Context:  # noqa: N802
        """The worker's own, or the process's."""
        worker = worker_unless_importing()
        of_process: decimal.Context = vars(self)["DefaultContext"]
        if worker is None:
            return of_process
        own: decimal.Context | None = worker.process_state.get(_KEY)
        if own is None:
            own = worker.process_state.setdefault(_KEY, _Default())
        return own

    @DefaultContext.setter
    def DefaultContext(self, context: decimal.Context) -> None:  # noqa: N802
        if worker_unless_importing() is None:
            vars(self)["DefaultContext"] = context
        else:
            _copy(context, self.DefaultContext)

    @property
    def Context(self) -> type[decimal.Context]:  # noqa: N802
        """The class that looks who makes a context, or Python's."""
        return vars(self)["Context"] if worker_unless_importing() is None else _Context

    @Context.setter
    def Context(self, kind: type[decimal.Context]) -> None:  # noqa: N802
        vars(self)["Context"] = kind


def _start_over(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @functools.wraps(start)
    def start_with_default(self: threading.Thread) -> None:
        own = _own()
        if own is not None:
            run, context = self.run, _copy(own, _Following())

            def run_with_default() -> None:
                del self.run  # it holds this function, and this one the thread
                decimal.setcontext(context)
                run()

            self.run = run_with_default  # type: ignore[method-assign]
        start(self)

    return start_with_default


def _install(patches: Patches) -> None:
    module: ModuleType = sys.modules["decimal"]
    patches.change_class(module, _Decimal)
    patches.replace(threading.Thread, "start", _start_over)
    patches.replace(decimal, "setcontext", _set_over, everywhere=True)
    # under the name that its class has for who pickles it
    entries: dict[Any, Any] = copyreg.dispatch_table
    entries[_OF_PYTHON] = lambda context: (decimal.Context, _OF_PYTHON.__reduce__(context)[1])
    patches.at_undo(lambda: entries.pop(_OF_PYTHON, None))


def _in_child(worker: Worker) -> None:
    """The worker's default becomes the process's."""
    own = worker.process_state.get(_KEY)
    if own is not None:
        _copy(own, vars(decimal)["DefaultContext"])


table.add(
    Row(
        state="`decimal.DefaultContext`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker begins with the notebook's; what it sets, contexts that it makes and "
        "threads that it starts begin with, until its script ends.",
        test="tests/isolation/test_process_state.py::test_each_worker_has_a_default_of_decimals",
        install=_install,
        in_child=_in_child,
        library="Python",
    )
)
