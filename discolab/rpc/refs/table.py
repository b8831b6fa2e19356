"""The reference table of a node: the values that it owns, and what it refers to.

The counting itself is pure state (counting.py). The node's lock guards it and `values`; the table
does what the counting asks for after it has let go of the lock, since a message that leaves late
does no harm.

A handle, and what keeps the references in a message alive, is an object that need not be released,
even where an interrupt cuts a function short. When the last reference to it goes, the callback of a
weak reference appends it to `dropped`; that is C code, which takes no lock, and in which no
interrupt lands, as one may in a `__del__`. The housekeeping thread, or the next call, does the
rest. `_handles` holds those weak references; single operations on it are atomic.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ...runtime.errors import DiscoError
from ...runtime.interrupts import shield
from ..outcome import Value
from .counting import References
from .records import Action, Fork, Free, Keepalive, Message, Ref, Refused, Send


class Handle(weakref.ref[Any]):
    """A weak reference to a handle, and what to do when that goes: release references, or call."""

    __slots__ = ("meant",)

    meant: Sequence[Ref] | Callable[[], None]


class ReferenceTable:
    """See the module.

    Parameters
    ----------
    node, nodes
        This node, and all that there are.
    lock
        The node's.
    send
        ``send(node, message)`` sends a message of the counting to another node.
    needed
        Called when something is entered that the housekeeping thread has to see to.

    Attributes
    ----------
    values
        What is owned here, by its reference; a value that others refer to already may still be
        to come.
    dropped
        See the module.
    """

    def __init__(
        self,
        node: int,
        nodes: Iterable[int],
        lock: AbstractContextManager[Any],
        send: Callable[[int, Message], None],
        needed: Callable[[], None],
    ) -> None:
        self._lock, self._send, self._needed = lock, send, needed
        self._references = References(node, nodes)
        self.values: dict[Ref, Value] = {}
        self.dropped: deque[Handle] = deque()
        self._handles: dict[int, Handle] = {}

    # -- references --------------------------------------------------------------------------

    def own(self, value: Value) -> Ref:
        """A reference to a value that is made here; held once."""
        with self._lock:
            ref = self._references.own()
            self.values[ref] = value
        self._needed()
        return ref

    def create(self, owner: int) -> Fork:
        """A reference to a value that another node is asked to make; held once."""
        self._needed()
        with self._lock:
            return self._references.create(owner)

    def hold(self, ref: Ref) -> None:
        """Hold a reference once more."""
        with self._lock:
            self._references.hold(ref)

    def when_dropped(self, handle: Any, meant: Sequence[Ref] | Callable[[], None]) -> None:
        """Release references, or call a function, once nobody holds a handle any more."""
        noted = Handle(handle, self.dropped.append)
        noted.meant = meant
        self._handles[id(noted)] = noted

    def release(self, ref: Ref) -> None:
        """Hold it once less."""
        self._count(self._references.release, ref)

    def fork(self, ref: Ref, to: int) -> Fork:
        """A fork that travels to another node."""
        with self._lock:
            return self._references.fork(ref, to)

    def undo(self, forks: Iterable[Fork]) -> None:
        """Forks that were not sent after all."""
        for fork in forks:
            self._count(self._references.dropped, fork)

    def arrived(self, fork: Fork, sender: int) -> None:
        """A fork has come from another node; it is held once."""
        self._count(self._references.arrived, fork, sender)

    def received(self, forks: Sequence[Fork], sender: int) -> Keepalive | None:
        """Forks have come with a message; what is returned holds them, each once."""
        if not forks:
            return None
        self._needed()
        for fork in forks:
            self.arrived(fork, sender)
        keepalive = Keepalive()
        self.when_dropped(keepalive, [fork[:3] for fork in forks])
        return keepalive

    def adopted(self, fork: Fork, sender: int, owner: int) -> Value:
        """Another node asks for a value to be made here, and refers to it."""
        with self._lock:
            value = self.values.setdefault(fork[:3], Value(owner))
        self._needed()
        self._count(self._references.adopted, fork, sender)
        return value

    def message_received(self, sender: int, message: Sequence[Any]) -> None:
        """A message of the counting has come."""
        what, number, subject = message
        self._count(self._references.received, (what, number, subject), sender)

    def met(self, node: int) -> None:
        """There is a new node; any thread."""
        self._references.met(node)

    def lost(self, node: int) -> None:
        """Another node has died."""
        self._count(self._references.lost, node)
        self._refuse_unmade()

    # -- values ------------------------------------------------------------------------------

    def value_of(self, ref: Ref) -> Value:
        """A value that is owned here, or is to come.

        Raises
        ------
        DiscoError
            If there is none, and there won't be.
        """
        with self._lock:
            value = self.values.get(ref)
            if value is None:
                if self._references.refused(ref):
                    raise DiscoError(_NO_VALUE)
                # the rank is that of the node: more is not known before the request for it comes
                value = self.values[ref] = Value(ref[0])
        return value

    def _refuse_unmade(self) -> None:
        """Say of values that were to come, and can't any more, that it is so."""
        with self._lock:
            gone = [ref for ref in self.values if self._references.refused(ref)]
            values = [self.values.pop(ref) for ref in gone]
        for value in values:
            value.settle(None, DiscoError(_NO_VALUE))

    def confirmed(self, ref: Ref) -> bool:
        """Whether the owner knows of this node's reference."""
        with self._lock:
            return self._references.confirmed(ref)

    def being_confirmed(self, ref: Ref) -> bool:
        """Whether the owner is just being told of a reference that was given to this node."""
        with self._lock:
            return self._references.being_confirmed(ref)

    def count_held(self) -> int:
        """How many references are known here."""
        with self._lock:
            return len(self._references.refs())

    # -- what follows ------------------------------------------------------------------------

    def drain(self) -> None:
        """See to what was dropped."""
        dropped = self.dropped
        with shield():
            while dropped:
                try:
                    handle = dropped.popleft()
                except IndexError:  # another thread was faster
                    return
                self._handles.pop(id(handle), None)  # the session may end meanwhile
                if callable(handle.meant):
                    handle.meant()
                else:
                    for ref in handle.meant:
                        self.release(ref)

    def _count(self, step: Callable[..., list[Action]], *args: Any) -> None:
        """Take a step of the counting, and do what follows from it."""
        with self._lock:
            actions = step(*args)
        freed = []  # the values themselves go with no lock held
        for action in actions:
            if isinstance(action, Send):
                self._send(action.to, action.message)
            elif isinstance(action, Free | Refused):
                with self._lock:
                    value = self.values.pop(action.ref, None)
                if value is not None and isinstance(action, Refused):
                    value.settle(None, DiscoError(_NO_VALUE))
                elif value is not None:
                    value.free()
                freed.append(value)

    def clear(self, error: DiscoError) -> None:
        """The session is over."""
        with self._lock:
            values = list(self.values.values())
            self.values.clear()
        self._handles.clear()
        self.dropped.clear()
        for value in values:
            value.settle(None, error)
            value.log_unheard()


_NO_VALUE = (
    "this reference has no value: who asked for it to be made has died before the request came to "
    "its owner"
)
