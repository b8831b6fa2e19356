"""What is called to make calls: the functions of `discolab.rpc`, and the same of `Session.rpc`.

The functions act for the calling thread: a worker, a callee, or the controller of the one open
session. A `SessionRpc` acts for the controller of its session.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ..runtime.dref import DRef
from ..runtime.errors import session_closed
from ..runtime.session import Session
from . import drefs, futures, rref, streams
from .autograd import Bound
from .calls import PLAIN
from .futures import Future
from .here import place_here
from .looks import debug_info
from .modules import RemoteModule
from .names import CONTROLLER, WorkerInfo, info_of, rank_of
from .node import Node
from .nodes import node_of_session
from .optimizer import DistributedOptimizer
from .rref import RRef
from .streams import Stream

# within a class that has methods of these names
_RRef: TypeAlias = RRef
_RemoteModule: TypeAlias = RemoteModule
_DistributedOptimizer: TypeAlias = DistributedOptimizer

Func = Callable[..., Any] | str


def rpc_sync(
    to: int | str | WorkerInfo,
    fn: Func,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> Any:
    """Run a function on another worker, or on the controller, and wait for what it returns.

    It runs beside the callee's own commands, on a thread of its own.

    Parameters
    ----------
    to
        A rank, ``"worker2"``, ``"controller"`` (or -1), or a `WorkerInfo`.
    fn
        The function, or the name of one registered with `discolab.register_func`.
    args, kwargs
        Its arguments. Within one process they are passed as they are, between processes copied;
        tensors are never pickled.
    timeout
        Seconds, after which the call is ended at the callee too. None means 60, or on the
        controller what its session's `timeout` is, if it has one; 0 or `math.inf`: no limit.

    Raises
    ------
    WorkerError
        If `fn` raised; the error is of its exception's class too, where that can be.
    WorkerLostError
        If the callee has died.
    WaitTimeoutError, ArgumentError, SessionClosedError
    """
    node, rank = place_here()
    return node.start(PLAIN, rank, to, fn, args, kwargs, timeout).wait_and_take()


def rpc_async(
    to: int | str | WorkerInfo,
    fn: Func,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    lend: bool = False,
) -> Future:
    """As `rpc_sync`, without waiting: a future of what the function returns.

    Parameters
    ----------
    lend
        Between processes tensors are copied before this returns, so that they may be changed after
        it. With ``lend=True`` large ones are copied while the caller goes on; they must not be
        changed in place until the call is done. Where that is noticed, the call fails.
    """
    node, rank = place_here()
    return futures.call_later(node, rank, to, fn, args, kwargs, timeout, lend)


def remote(
    to: int | str | WorkerInfo,
    fn: Func,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    lend: bool = False,
) -> RRef:
    """As `rpc_async`, but what the function returns stays there: a reference to it, at once."""
    node, rank = place_here()
    return rref.remote(node, rank, to, fn, args, kwargs, timeout, lend)


def stream(
    to: int | str | WorkerInfo,
    fn: Func,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    buffer: int = 8,
) -> Stream:
    """Run a function that returns a generator or another iterable; iterate over it here.

    Parameters
    ----------
    timeout
        Seconds for each item.
    buffer
        How many items the callee may be ahead.
    """
    node, rank = place_here()
    return streams.stream(node, rank, to, fn, args, kwargs, timeout, buffer)


def get_worker_info(to: int | str | WorkerInfo | None = None) -> WorkerInfo:
    """Name and rank of somebody who can be called, None: of the caller."""
    node, rank = place_here()
    return info_of(rank if to is None else rank_of(to, node.num_workers))


class SessionRpc:
    """Calls from the controller of one session: the functions of `discolab.rpc`, and some more.

    Attributes
    ----------
    node
        The controller's.
    autograd
        As `discolab.rpc.autograd`, for the controller.
    """

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)
        self.node: Node = node_of_session(session)
        self.autograd = Bound(self.node)

    def rpc_sync(
        self,
        to: int | str | WorkerInfo,
        fn: Func,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """See `discolab.rpc.rpc_sync`."""
        call = self.node.start(PLAIN, CONTROLLER, to, fn, args, kwargs, timeout)
        return call.wait_and_take()

    def rpc_async(
        self,
        to: int | str | WorkerInfo,
        fn: Func,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        lend: bool = False,
    ) -> Future:
        """See `discolab.rpc.rpc_async`."""
        return futures.call_later(self.node, CONTROLLER, to, fn, args, kwargs, timeout, lend)

    def remote(
        self,
        to: int | str | WorkerInfo,
        fn: Func,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        lend: bool = False,
    ) -> RRef:
        """See `discolab.rpc.remote`."""
        return rref.remote(self.node, CONTROLLER, to, fn, args, kwargs, timeout, lend)

    def stream(
        self,
        to: int | str | WorkerInfo,
        fn: Func,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        buffer: int = 8,
    ) -> Stream:
        """See `discolab.rpc.stream`."""
        return streams.stream(self.node, CONTROLLER, to, fn, args, kwargs, timeout, buffer)

    def DistributedOptimizer(  # noqa: N802 - as the class
        self, optimizer_class: Any, params_rrefs: Sequence[_RRef], *args: Any, **kwargs: Any
    ) -> _DistributedOptimizer:
        """See `discolab.rpc.DistributedOptimizer`."""
        return DistributedOptimizer(optimizer_class, params_rrefs, *args, **kwargs)

    def RemoteModule(  # noqa: N802 - as the class
        self,
        to: int | str | WorkerInfo,
        module_cls: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> _RemoteModule:
        """See `discolab.rpc.RemoteModule`."""
        return RemoteModule(to, module_cls, args, kwargs, node=self.node)

    def RRef(self, value: Any) -> _RRef:  # noqa: N802 - as the class
        """A reference to a value of the controller."""
        return rref.own(self.node, CONTROLLER, value)

    def wait_all(self, wanted: Iterable[Any], timeout: float | None = None) -> list[Any]:
        """See `discolab.rpc.wait_all`."""
        return futures.wait_all(wanted, timeout)

    def get_worker_info(self, to: int | str | WorkerInfo | None = None) -> WorkerInfo:
        """See `discolab.rpc.get_worker_info`."""
        return info_of(CONTROLLER if to is None else rank_of(to, self.node.num_workers))

    def rref(self, dref: DRef, rank: int) -> _RRef:
        """A reference to the value that one worker holds of a DRef; the worker owns it.

        Raises
        ------
        ArgumentError, ForeignDRefError
            If there is no such worker; if the DRef is another session's.
        """
        return drefs.rref_of(self.session, self.node, dref, rank)

    def dref(self, rrefs: Sequence[_RRef], placements: Sequence[Any] | None = None) -> DRef:
        """One DRef of as many references as there are workers: the i-th value for worker i.

        What worker i owns is taken as it is; another value is fetched by it.

        Parameters
        ----------
        placements
            As of `DRef`.

        Raises
        ------
        ArgumentError
            If they are not as many, or no references of this session.
        """
        return drefs.dref_of(self.session, self.node, rrefs, placements)

    def debug_info(self, rank: int | None = None) -> dict[str, int]:
        """What is under way, seen from one rank (None: the controller); waits for its answer."""
        asked = CONTROLLER if rank is None else rank_of(rank, self.node.num_workers)
        return debug_info(self.node, asked)

    @property
    def session(self) -> Session:
        """Whose it is."""
        found = self._session()
        if found is None:
            raise session_closed()
        return found

    def __repr__(self) -> str:
        calls = len(self.node.calls)
        return f"<rpc of {self._session()!r}: {calls} calls under way>"


_of: weakref.WeakKeyDictionary[Session, SessionRpc] = weakref.WeakKeyDictionary()


def rpc_of(session: Session) -> SessionRpc:
    """`Session.rpc`."""
    found = _of.get(session)
    if found is None or found.node.closed:
        found = _of[session] = SessionRpc(session)
    return found
