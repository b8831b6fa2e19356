"""RRef: a reference to a value that one rank owns, held by anybody.

An `RRef` is a handle: it holds its reference once on its node, which releases that when the handle
is dropped. It never changes, so any number of threads may use it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from ..runtime import serialize
from ..runtime.errors import ArgumentError, SessionError
from ..runtime.interrupts import shield
from . import node_protocol
from .autograd import backward_at
from .calls import Deferred, call_sync, start
from .context import place_here
from .futures import call_later
from .names import WorkerInfo, format_rank
from .node import Node, rank_on
from .outcome import Value, waiter
from .refs.records import Ref
from .streams import stream

_LOOK = 0.001  # seconds between two looks whether a reference is confirmed


class RRef:
    """A reference to a value on one worker, or on the controller.

    ``RRef(value)`` makes one to a value of the calling rank. Others come from `remote`. It may be
    an argument or a result of any call; the value lives as long as somebody refers to it.

    Attributes
    ----------
    node, ref, owner_rank
        Where the handle is, what it refers to, and whose value that is.
    """

    __slots__ = ("__weakref__", "node", "owner_rank", "ref")

    node: Node
    ref: Ref
    owner_rank: int

    def __new__(cls, value: Any, type_hint: Any = None) -> RRef:
        """Make a reference to a value of the calling rank.

        Parameters
        ----------
        type_hint
            Ignored; PyTorch's TorchScript wants it.

        Raises
        ------
        SessionError
            On the controller, unless exactly one session is open: use ``sess.rpc.RRef(value)``.
        """
        node, rank = place_here()
        return own(node, rank, value)

    __class_getitem__: Any = classmethod(types.GenericAlias)  # RRef[Tensor], in annotations

    @classmethod
    def _of(cls, node: Any, ref: Ref, owner_rank: int) -> RRef:
        """A handle that does not hold its reference yet."""
        made = object.__new__(cls)
        made.node, made.ref, made.owner_rank = node, ref, owner_rank
        return made

    def claim(self) -> None:
        """Hold the reference, on behalf of this handle."""
        with shield():
            self.node.references.hold(self.ref)
            self.node.references.when_dropped(self, (self.ref,))

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, _written(self)

    def __copy__(self) -> RRef:
        return self

    def __deepcopy__(self, _memo: Any) -> RRef:
        return self

    def __repr__(self) -> str:
        return f"<RRef to a value of {format_rank(self.owner_rank)}{self._state()}>"

    def _state(self) -> str:
        if self.node.closed:
            return ", session closed"
        if self.ref[0] in self.node.lost:
            return ", which has died"
        if self.ref[0] != self.node.id:
            return ""
        value = self.node.references.value_of(self.ref)
        if not value.settled:
            return ", being computed"
        if value.error is not None:
            return f": {str(value.error).splitlines()[0]}"
        return f": {_kind(value.value)}"

    # -- facts -------------------------------------------------------------------------------

    def owner(self) -> WorkerInfo:
        """Name and rank of the worker that has the value."""
        return self.node.info_of(self.owner_rank)

    def owner_name(self) -> str:
        """``worker2`` or ``controller``."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Whether the calling rank has the value."""
        return rank_on(self.node) == self.owner_rank and self.ref[0] == self.node.id

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows that this reference is held here.

        Of a reference that was given to the calling rank it is true: this waits for the owner's
        word if that is still on its way. Of one that `remote` has made here it becomes true soon.
        """
        references = self.node.references
        if references.being_confirmed(self.ref):
            what = f"{format_rank(self.owner_rank)} to confirm a reference"
            seconds = self.node.seconds(None, rank_on(self.node))
            waiter().wait_for(
                lambda: not references.being_confirmed(self.ref), what, seconds, lambda: _LOOK
            )
        return references.confirmed(self.ref)

    # -- the value ---------------------------------------------------------------------------

    def to_here(self, timeout: float | None = None) -> Any:
        """The value, copied to the calling rank; within one process it is the value itself.

        Parameters
        ----------
        timeout
            Seconds to wait; None takes the default, 0 or `math.inf` means no limit.

        Raises
        ------
        WorkerError
            If the value could not be computed.
        WorkerLostError
            If its owner has died.
        WaitTimeoutError, SessionClosedError
        """
        node, rank = self.node, rank_on(self.node)
        if self.ref[0] != node.id:
            options = {"timeout": timeout, "kind": node_protocol.FETCH, "at": self.ref[0]}
            return call_sync(node, rank, self.owner_rank, self.ref, **options)
        value = self._value(timeout)
        if rank != self.owner_rank:
            context = node.autograd.current()
            value, _ = node.autograd.leave(context, value, rank, node.id, self.owner_rank)
        return value

    def local_value(self, timeout: float | None = None) -> Any:
        """The value itself, on its owner; waits until it is there.

        Raises
        ------
        SessionError
            Elsewhere: use `to_here` there.
        """
        rank = rank_on(self.node)
        if rank != self.owner_rank:
            raise SessionError(
                f"local_value() of a reference to a value of {format_rank(self.owner_rank)} was "
                f"called on {format_rank(rank)}: use to_here() there"
            )
        return self._value(timeout)

    def _value(self, timeout: float | None) -> Any:
        """The value, on its node."""
        node = self.node
        node.check_open()
        if self.ref[0] != node.id:  # of the worker whose place this one has
            raise node.lost_error(self.ref[0])
        seconds = node.seconds(timeout, rank_on(node))
        value: Value = node.references.value_of(self.ref)
        if not value.settled:
            value.wait(value, seconds)
        return value.result()

    # -- calls on it -------------------------------------------------------------------------

    def rpc_sync(self, timeout: float | None = None) -> Any:
        """The value's methods, called on its owner: ``rref.rpc_sync().step(0.1)``."""
        return Proxy(self, "rpc_sync", call_sync, timeout)

    def rpc_async(self, timeout: float | None = None) -> Any:
        """The same; gives a `Future` of the result."""
        return Proxy(self, "rpc_async", call_later, timeout)

    def remote(self, timeout: float | None = None) -> Any:
        """The same; gives an `RRef` of the result, which stays there."""
        return Proxy(self, "remote", remote, timeout)

    def stream(self, timeout: float | None = None, buffer: int = 8) -> Any:
        """The same of methods that are generators; gives a `Stream` of what they yield."""
        return Proxy(self, "stream", stream, timeout, buffer)

    def backward(
        self, ctx: Any = None, retain_graph: bool = False, *, dist_autograd_ctx_id: Any = None
    ) -> None:
        """Run backward from the value, a scalar tensor, on its owner.

        Parameters
        ----------
        ctx
            The context that the gradients are kept in, or its id; None: the current one. -1:
            torch's own backward, on the owner alone, which adds to `Tensor.grad`.
        dist_autograd_ctx_id
            PyTorch's name of `ctx`.
        """
        context = dist_autograd_ctx_id if ctx is None else ctx
        if type(context) is int and context == -1:
            self.local_value().backward(retain_graph=retain_graph)
        else:
            backward_at(self, context, retain_graph)


def own(node: Node, rank: int, value: Any) -> RRef:
    """A reference to a value of `rank`, which lives on `node`."""
    node.check_open()
    owned = Value(rank)
    owned.settle(value)
    with shield():
        return held(node, node.references.own(owned), rank)


def held(node: Node, ref: Ref, owner_rank: int) -> RRef:
    """A handle for a reference that is held once already."""
    rref = RRef._of(node, ref, owner_rank)
    node.references.when_dropped(rref, (ref,))
    return rref


def remote(
    node: Node,
    rank: int,
    to: Any,
    func: Any,
    args: Any,
    kwargs: Any,
    timeout: Any,
    lend: bool = False,
    at: int | None = None,
) -> RRef:
    """Have a function run on another rank, which keeps the result; `at`, see `start`."""
    node.check_open()
    callee = node.rank_of(to)
    if at is None:
        at = node.node_of(callee)
    begin = functools.partial(
        start, node, rank, callee, func, args, kwargs, timeout, later=True, lend=lend, at=at
    )
    with shield():  # or it would not be known which node holds it, and whether the fork was sent
        if at == node.id:
            value = Value(callee)
            rref = held(node, node.references.own(value), callee)
            begin(target=value)
            return rref
        fork = node.references.create(at)
        rref = held(node, fork[:3], callee)
        try:
            begin(target_fork=fork)
        except BaseException:
            node.references.undo([fork])
            raise
        return rref


def _kind(value: Any) -> str:
    kind = type(value).__name__
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        return f"{kind} {tuple(shape)} {str(value.dtype).removeprefix('torch.')}"
    return kind


# -- methods of the value ------------------------------------------------------------------------


class Proxy:
    """Methods of a value, called where it is: ``rref.rpc_sync().method(...)`` and its kin."""

    __slots__ = ("_begin", "_how", "_options", "_rref")

    def __init__(self, rref: RRef, how: str, begin: Callable[..., Any], *options: Any) -> None:
        self._rref, self._how, self._begin, self._options = rref, how, begin, options

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
    rref = proxy._rref
    node, owner, given = rref.node, rref.owner_rank, (rref, name, args, kwargs)
    options = proxy._options
    return proxy._begin(node, rank_on(node), owner, _invoke, given, None, *options, at=rref.ref[0])


def _invoke(rref: RRef, name: str, args: Any, kwargs: Any) -> Any:
    """Call a method of a value, on its owner."""
    value = rref._value(0)
    method = value if name == "__call__" else getattr(value, name)
    result = method(*args, **kwargs)
    return Deferred(result) if getattr(method, "rpc_async_execution", False) else result


_invoke.rpc_description = (  # type: ignore[attr-defined]
    lambda rref, name, *_: f"rpc of '{name}' of a value of {format_rank(rref.owner_rank)}"
)


# -- in messages ---------------------------------------------------------------------------------


def _written(rref: RRef) -> tuple[Any, ...]:
    """The rank of the owner, and a fork for the node to which the message goes."""
    node, to, forks = node_protocol.outgoing()
    if rref.node is not node:
        raise ArgumentError("this RRef belongs to another session")
    fork = rref.node.references.fork(rref.ref, to)
    forks.append(fork)
    return rref.owner_rank, *fork


def _read(owner: int, *fork: Any) -> RRef:
    node, claims = node_protocol.arrived()
    rref = RRef._of(node, (fork[0], fork[1], fork[2]), owner)
    if claims is None:
        rref.claim()
    else:
        claims.append(rref)
    return rref


serialize.register_plain(RRef, _written, _read)
