"""Calls of methods of a referenced value: ``rref.rpc_sync().method(...)`` and its kin.

Such a call goes to the value's owner, in one of the ways in which functions are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .calls import PLAIN, Deferred
from .futures import Future, call_later
from .names import in_words
from .rref import RRef, place_here_of, remote
from .streams import stream


class Proxy:
    """Methods of a value, called where it is."""

    __slots__ = ("_buffer", "_how", "_rref", "_timeout")

    def __init__(self, rref: RRef, how: str, timeout: float | None, buffer: int = 8) -> None:
        self._rref, self._how, self._timeout, self._buffer = rref, how, timeout, buffer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _NOT_CALLED or name.startswith(("_repr_", "__array", "__torch", "_ipython_")):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return _call_method(self, name, args, kwargs)

        call.__name__ = call.__qualname__ = name
        return call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value itself."""
        return _call_method(self, "__call__", args, kwargs)

    def __repr__(self) -> str:
        return f"<{self._how} on {self._rref!r}>"


# what Python and notebooks ask of any object
_NOT_CALLED = {"__copy__", "__deepcopy__", "__getstate__", "__setstate__", "__wrapped__", "__all__"}


def _call_method(proxy: Proxy, name: str, args: Any, kwargs: Any) -> Any:
    rref, how, timeout = proxy._rref, proxy._how, proxy._timeout
    node, rank = place_here_of(rref)
    given = (rref, name, args, kwargs)
    if how == "rpc_sync":
        call = node.start(PLAIN, rank, rref.owner_rank, _invoke, given, None, timeout)
        return call.wait_and_take()
    if how == "rpc_async":
        future: Future = call_later(node, rank, rref.owner_rank, _invoke, given, None, timeout)
        return future
    if how == "stream":
        return stream(node, rank, rref.owner_rank, _invoke, given, None, timeout, proxy._buffer)
    return remote(node, rank, rref.owner_rank, _invoke, given, None, timeout)


def _invoke(rref: RRef, name: str, args: Any, kwargs: Any) -> Any:
    """Call a method of a value, on its owner."""
    value = rref._value(0)
    method = value if name == "__call__" else getattr(value, name)
    found = method(*args, **kwargs)
    return Deferred(found) if getattr(method, "rpc_async_execution", False) else found


_invoke.rpc_words = (  # type: ignore[attr-defined]
    lambda rref, name, *_: f"rpc of '{name}' of a value of {in_words(rref.owner_rank)}"
)


RRef.proxy = Proxy
