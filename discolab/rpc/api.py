"""What is called to make calls: the functions of `discolab.rpc`, and the same of `Session.rpc`.

The functions act for the calling thread: a worker, a server thread, or the controller of the one
open session. They are the methods of one `Rpc`, as those of Python's `random` are of one `Random`.
A `SessionRpc` acts for the controller of its session.
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
from .calls import call_sync, start
from .context import node_of_session, place_here
from .futures import Future
from .names import CONTROLLER, WorkerInfo
from .node import Node, Place, rank_on
from .optimizer import DistributedOptimizer
from .remote_module import RemoteModule
from .rref import RRef
from .streams import Stream

# within a class that has methods of these names
_RRef: TypeAlias = RRef
_RemoteModule: TypeAlias = RemoteModule
_DistributedOptimizer: TypeAlias = DistributedOptimizer

To = int | str | WorkerInfo
Func = Callable[..., Any] | str


class Rpc:
    """Calls from where the calling thread is."""

    def _place(self) -> Place:
        """The node and rank that call."""
        return place_here()

    def rpc_sync(
        self,
        to: To,
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
            Its arguments. Within one process they are passed as they are, between processes
            copied; tensors are never pickled.
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
        node, rank = self._place()
        return start(node, rank, to, fn, args, kwargs, timeout).wait_and_take()

    def rpc_async(
        self,
        to: To,
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
            Between processes tensors are copied before this returns, so that they may be changed
            after it. With ``lend=True`` large ones are copied while the caller goes on; they must
            not be changed in place until the call is done. Where that is noticed, the call fails.
        """
        node, rank = self._place()
        return futures.call_later(node, rank, to, fn, args, kwargs, timeout, lend)

    def remote(
        self,
        to: To,
        fn: Func,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        lend: bool = False,
    ) -> _RRef:
        """As `rpc_async`, but the result stays there: returns a reference to it, at once."""
        node, rank = self._place()
        return rref.remote(node, rank, to, fn, args, kwargs, timeout, lend)

    def stream(
        self,
        to: To,
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
        node, rank = self._place()
        return streams.stream(node, rank, to, fn, args, kwargs, timeout, buffer)

    def get_worker_info(self, to: To | None = None) -> WorkerInfo:
        """Name and rank of a worker or the controller; None: of the caller."""
        node, rank = self._place()
        return node.info_of(rank if to is None else node.rank_of(to))

    def __reduce__(self) -> str:
        return "HERE"  # so that a function of these can be called by rpc itself


HERE = Rpc()
rpc_sync, rpc_async, remote = HERE.rpc_sync, HERE.rpc_async, HERE.remote
stream, get_worker_info = HERE.stream, HERE.get_worker_info


class SessionRpc(Rpc):
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
        self._controller = Place(self.node, CONTROLLER)

    def _place(self) -> Place:
        return self._controller

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
        """What is under way, seen from one rank (None: the controller); waits for its answer.

        Returns counts of calls, threads, values and references, without the call that asks.
        """
        node = self.node
        asked = CONTROLLER if rank is None else node.rank_of(rank)
        node.check_open()
        if node.is_here(asked):
            return node.debug_info(asked)
        counts: dict[str, int] = call_sync(node, rank_on(node), asked, _debug_info)
        return counts

    @property
    def session(self) -> Session:
        """The session."""
        session = self._session()
        if session is None:
            raise session_closed()
        return session

    def __repr__(self) -> str:
        calls = len(self.node.calls)
        return f"<rpc of {self._session()!r}: {calls} calls under way>"


def _debug_info() -> dict[str, int]:
    node, rank = place_here()
    counts = node.debug_info(rank)
    counts["calls_running"] -= 1
    return counts


_of: weakref.WeakKeyDictionary[Session, SessionRpc] = weakref.WeakKeyDictionary()


def rpc_of(session: Session) -> SessionRpc:
    """`Session.rpc`."""
    rpc = _of.get(session)
    if rpc is None or rpc.node.closed:
        rpc = _of[session] = SessionRpc(session)
    return rpc
