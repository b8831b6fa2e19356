"""RRef: a reference to a value that one rank owns, held by anybody.

An `RRef` is a handle: it holds its reference once on its node, which is told when nobody holds the
handle any more. It never changes, so any number of threads may use it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from ..runtime.errors import SessionError
from .autograd import crossing
from .calls import PLAIN, REMOTE
from .here import place_here, rank_on
from .names import CONTROLLER, WorkerInfo, in_words, info_of, rank_of
from .outcome import whole
from .reference_records import Ref
from .values import Value, ready

if TYPE_CHECKING:
    from .node import Node


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
    on_reduce: ClassVar[Callable[[RRef], tuple[Any, ...]]]
    proxy: ClassVar[Callable[..., Any]]  # proxies.py sets it

    def __new__(cls, value: Any, ref: Ref | None = None, owner_rank: int = CONTROLLER) -> RRef:
        """Make a reference to a value of the calling rank.

        Raises
        ------
        SessionError
            On the controller, unless exactly one session is open: use ``sess.rpc.RRef(value)``.
        """
        if ref is None:
            node, rank = place_here()
            return own(node, rank, value)
        made = object.__new__(cls)
        made.node, made.ref, made.owner_rank = value, ref, owner_rank
        return made

    def _claim(self) -> None:
        """Hold the reference, on behalf of this handle."""
        with whole():
            self.node.holdings.hold(self.ref)
            self.node.holdings.when_dropped(self, (self.ref,))

    def __reduce__(self) -> tuple[Any, ...]:
        return RRef.on_reduce(self)

    def __copy__(self) -> RRef:
        return self

    def __deepcopy__(self, _memo: Any) -> RRef:
        return self

    def __repr__(self) -> str:
        return f"<RRef to a value of {in_words(self.owner_rank)}{self._state()}>"

    def _state(self) -> str:
        if self.node.closed:
            return ", session closed"
        if self.node.node_of(self.owner_rank) in self.node.lost:
            return ", which has died"
        if not self.node.is_here(self.owner_rank):
            return ""
        value = self.node.holdings.value_of(self.ref)
        if not value.settled:
            return ", being computed"
        if value.error is not None:
            return f": {str(value.error).splitlines()[0]}"
        return f": {_kind(value.value)}"

    # -- facts -------------------------------------------------------------------------------

    def owner(self) -> WorkerInfo:
        """Who has the value: name and rank."""
        return info_of(self.owner_rank)

    def owner_name(self) -> str:
        """``worker2`` or ``controller``."""
        return info_of(self.owner_rank).name

    def is_owner(self) -> bool:
        """Whether the calling rank has the value."""
        return place_here_of(self)[1] == self.owner_rank

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows that this reference is held here; soon it does."""
        return self.node.holdings.confirmed(self.ref)

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
        node, rank = place_here_of(self)
        if not node.is_here(self.owner_rank):
            call = node.start(PLAIN, rank, self.owner_rank, self.ref, timeout=timeout, fetches=True)
            return call.wait_and_take()
        value = self._value(timeout)
        if rank != self.owner_rank:
            context = crossing.current(node)
            found, _ = crossing.leave_from(node, context, value, self.owner_rank, rank, True)
            return found
        return value

    def local_value(self, timeout: float | None = None) -> Any:
        """The value itself, on its owner; waits until it is there.

        Raises
        ------
        SessionError
            Elsewhere: use `to_here` there.
        """
        rank = place_here_of(self)[1]
        if rank != self.owner_rank:
            raise SessionError(
                f"local_value() of a reference to a value of {in_words(self.owner_rank)} was "
                f"called on {in_words(rank)}: use to_here() there"
            )
        return self._value(timeout)

    def _value(self, timeout: float | None) -> Any:
        """The value, on its node."""
        node = self.node
        node.check_open()
        seconds = node.seconds(timeout, rank_on(node))
        value: Value = node.holdings.value_of(self.ref)
        if not value.settled:
            value.wait(value, seconds)
        return value.result()

    # -- calls on it -------------------------------------------------------------------------

    def rpc_sync(self, timeout: float | None = None) -> Any:
        """The value's methods, called on its owner: ``rref.rpc_sync().step(0.1)``."""
        return type(self).proxy(self, "rpc_sync", timeout)

    def rpc_async(self, timeout: float | None = None) -> Any:
        """The same; gives a `Future` of the result."""
        return type(self).proxy(self, "rpc_async", timeout)

    def remote(self, timeout: float | None = None) -> Any:
        """The same; gives an `RRef` of the result, which stays there."""
        return type(self).proxy(self, "remote", timeout)

    def stream(self, timeout: float | None = None, buffer: int = 8) -> Any:
        """The same of methods that are generators; gives a `Stream` of what they yield."""
        return type(self).proxy(self, "stream", timeout, buffer)

    def backward(self, ctx: Any = None, retain_graph: bool = False) -> None:
        """Run backward from the value, a scalar tensor, on its owner.

        Parameters
        ----------
        ctx
            The context that the gradients are kept in; None: the current one.
        """
        from .autograd import backward_at

        backward_at(self, ctx, retain_graph)


def place_here_of(rref: RRef) -> tuple[Node, int]:
    """The node of a reference, and the calling rank there."""
    return rref.node, rank_on(rref.node)


def own(node: Node, rank: int, value: Any) -> RRef:
    """A reference to a value of `rank`, which lives on `node`."""
    node.check_open()
    with whole():
        return held(node, node.holdings.own(ready(rank, value)), rank)


def held(node: Node, ref: Ref, owner_rank: int) -> RRef:
    """A handle for a reference that is held once already."""
    rref = RRef(node, ref, owner_rank)
    node.holdings.when_dropped(rref, (ref,))
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
) -> RRef:
    """Have a function run on another rank, which keeps the result."""
    node.check_open()
    callee = rank_of(to, node.num_workers)

    begin = functools.partial(
        node.start, REMOTE, rank, callee, func, args, kwargs, timeout, later=True, lend=lend
    )
    with whole():  # or it would not be known who holds it, and whether the fork was sent
        if node.is_here(callee):
            value = Value(callee)
            rref = held(node, node.holdings.own(value), callee)
            begin(target=value)
            return rref
        fork = node.holdings.create(node.node_of(callee))
        rref = held(node, fork[:3], callee)
        try:
            begin(target_fork=fork)
        except BaseException:
            node.holdings.undo([fork])
            raise
        return rref


def _kind(value: Any) -> str:
    kind = type(value).__name__
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        return f"{kind} {tuple(shape)} {str(value.dtype).removeprefix('torch.')}"
    return kind
