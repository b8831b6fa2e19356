"""What a node owns for others, and what it refers to: values, and the counting of references.

The counting itself is pure state (references.py). The node's lock guards it and `values`; what it
asks for is done after the lock was let go, since a message that leaves late does no harm.
Handles, and what a message has brought, are objects; who holds one need not release it, even if an
interrupt cuts him short. Those that nobody holds any more come into `dropped`, by the callback of a
weak reference that is C code: it takes no lock, and no interrupt lands in it, as one may in a
`__del__`. The keeper, or the next call, sees to them. `_handles` holds those weak references;
single operations on it are atomic.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..runtime.errors import DiscoError
from . import messages
from .outcome import whole
from .reference_records import Brought, Fork, Free, Ref, Refused, Send
from .references import References
from .values import Value

if TYPE_CHECKING:
    from .node import Node


class Handle(weakref.ref[Any]):
    """Somebody's handle, and what is to be done without it: release references, or end a call."""

    __slots__ = ("meant",)

    meant: Sequence[Ref] | Callable[[], None]


class Holdings:
    """See the module.

    Attributes
    ----------
    values
        What is owned here, by its reference; a value that others refer to already may still be
        to come.
    dropped
        See the module.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = node.lock
        self._references = References(node.id, 1 if node.alone else node.num_workers)
        self.values: dict[Ref, Value] = {}
        self.dropped: deque[Handle] = deque()
        self._handles: dict[int, Handle] = {}

    # -- references --------------------------------------------------------------------------

    def own(self, value: Value) -> Ref:
        """A reference to a value that is made here; held once."""
        with self._lock:
            ref = self._references.own()
            self.values[ref] = value
        self._node.keeper.begin()
        return ref

    def create(self, owner: int) -> Fork:
        """A reference to a value that another node is asked to make; held once."""
        self._node.keeper.begin()
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
        with self._lock:
            actions = self._references.release(ref)
        self._do(actions)

    def fork(self, ref: Ref, to: int) -> Fork:
        """A fork that travels to another node."""
        with self._lock:
            return self._references.fork(ref, to)

    def undo(self, forks: Iterable[Fork]) -> None:
        """Forks that were not sent after all."""
        for fork in forks:
            with self._lock:
                actions = self._references.dropped(fork)
            self._do(actions)

    def arrived(self, fork: Fork, sender: int) -> None:
        """A fork has come from another node; it is held once."""
        with self._lock:
            actions = self._references.arrived(fork, sender)
        self._do(actions)

    def brought(self, forks: Sequence[Fork], sender: int) -> Brought | None:
        """Forks have come with a message; what is returned holds them, each once."""
        if not forks:
            return None
        self._node.keeper.begin()
        for fork in forks:
            self.arrived(fork, sender)
        brought = Brought()
        self.when_dropped(brought, [fork[:3] for fork in forks])
        return brought

    def adopted(self, fork: Fork, sender: int, owner: int) -> Value:
        """Another node asks for a value to be made here, and refers to it."""
        ref = fork[:3]
        with self._lock:
            value = self.values.setdefault(ref, Value(owner))
            actions = self._references.adopted(fork, sender)
        self._node.keeper.begin()
        self._do(actions)
        return value

    def heard(self, sender: int, message: Any) -> None:
        """A message of the counting has come."""
        with self._lock:
            actions = self._references.received(tuple(message), sender)
        self._do(actions)

    def lost(self, node: int) -> None:
        """Another node has died."""
        with self._lock:
            actions = self._references.lost(node)
        self._do(actions)
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
            found = self.values.get(ref)
            if found is None:
                if self._references.refused(ref):
                    raise DiscoError(_NO_VALUE)
                # the rank is that of the node: more is not known before the request for it comes
                found = self.values[ref] = Value(ref[0])
        return found

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

    def count_held(self) -> int:
        """How many references are known here."""
        with self._lock:
            return len(self._references.refs())

    # -- what follows ------------------------------------------------------------------------

    def drain(self) -> None:
        """See to what was dropped."""
        dropped = self.dropped
        with whole():
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

    def _do(self, actions: Sequence[Any]) -> None:
        if not actions:
            return
        node, freed = self._node, []
        for action in actions:
            if type(action) is Send:
                node.mail.say(action.to, (messages.REFERENCES, action.message))
            elif type(action) is Free:
                with self._lock:
                    freed.append(self.values.pop(action.ref, None))
            elif type(action) is Refused:
                with self._lock:
                    value = self.values.pop(action.ref, None)
                if value is not None:
                    value.settle(None, DiscoError(_NO_VALUE))
        del freed  # the values themselves, with no lock held

    def clear(self, error: DiscoError) -> None:
        """The session is over."""
        with self._lock:
            values = list(self.values.values())
            self.values.clear()
        self._handles.clear()
        self.dropped.clear()
        for value in values:
            value.settle(None, error)


_NO_VALUE = (
    "this reference has no value: who asked for it to be made has died before the request came to "
    "its owner"
)
