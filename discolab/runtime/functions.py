"""Functions known by name: what `get_global_func` finds on a worker.

One registry a process, guarded by the GIL (single dict operations only). Look-up order:
this registry, then `finders`, such as TVM's registry when `tvm_ffi` is installed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar, overload

from .errors import ArgumentError, UnknownFunctionError

F = TypeVar("F", bound=Callable[..., Any])

finders: list[Callable[[str], Callable[..., Any] | None]] = []
"""Asked for what is not in the registry, in turn."""
_registry: dict[str, Callable[..., Any]] = {}
_sent: dict[str, Callable[..., Any]] = {}  # of these, what the controller has sent


@overload
def register_func(name: str, func: None = None, *, override: bool = False) -> Callable[[F], F]: ...
@overload
def register_func(name: str, func: F, *, override: bool = False) -> F: ...
def register_func(name: str, func: Any = None, *, override: bool = False) -> Any:
    """Make a function callable on workers by name.

    Use it as a decorator, ``@register_func("my.add")``, or as a call.

    Raises
    ------
    ArgumentError
        If `name` is not a string, `func` is not callable, or the name is taken and
        `override` is false.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentError(
            f'register_func needs a name, got {name!r}: write @register_func("my.function")'
        )

    def add(function: F) -> F:
        if not callable(function):
            raise ArgumentError(f"register_func({name!r}) needs a callable, got {function!r}")
        if not override and _registry.get(name, function) is not function:
            raise ArgumentError(
                f"a function named {name!r} is registered already; pass override=True to replace it"
            )
        _registry[name] = function
        return function

    return add if func is None else add(func)


def worker_function(words: str) -> Callable[[F], F]:
    """Mark a function that the controller has workers call: what its command is called.

    Status, errors and traces say `words`, as ``saving a checkpoint``, in place of the function's
    name; they name no call site then.
    """

    def mark(function: F) -> F:
        function.disco_command = words  # type: ignore[attr-defined]  # see `Worker.command_text`
        return function

    return mark


def find_func(name: str) -> Callable[..., Any]:
    """Look `name` up as a worker does.

    Raises
    ------
    UnknownFunctionError
        With the nearest names.
    """
    found = _registry.get(name)
    if found is None:
        found = next(filter(None, (find(name) for find in finders)), None)
    if found is None:
        near = difflib.get_close_matches(name, list_funcs(), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise UnknownFunctionError(
            f"no function named {name!r} is registered on this worker{hint} "
            '(register one with @discolab.register_func("name"))'
        )
    return found


def registered(name: str) -> Callable[..., Any] | None:
    """What this process has registered as `name`."""
    return _registry.get(name)


def is_own(func: Callable[..., Any]) -> bool:
    """Whether a function is discolab's: every worker has those."""
    return str(getattr(func, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def register_there(name: str, func: Callable[..., Any]) -> None:
    """Register a function that the controller has sent, unless the worker has its own.

    What the controller has sent before and discolab's functions are not the worker's own.
    """
    known = _registry.get(name)
    if known is None or known is _sent.get(name) or is_own(known):
        _registry[name] = _sent[name] = func


def list_funcs() -> list[str]:
    """All names in discolab's registry, sorted."""
    return sorted(_registry)
