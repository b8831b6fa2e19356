"""Distributed reference counting, as pure state: when the value of an RRef may be dropped.

There is one `References` for each node (a process). The node reports each event to it and gets back
what is to be done: control messages to send, values to free. It has no thread and no
connection; the lock of the node guards it. It knows values by name only; `table` has them.

The protocol is that of PyTorch's RRef, and stricter where nodes die and messages come twice:

- The owner knows every *fork*: one reference on its way to a node, or held there. It frees the
  value when nobody on its own node holds it and no fork is left.
- A fork that comes to a node is registered with the owner. Until the owner has told the sender that
  this is done (``settled``) the sender keeps its own fork. So the owner always knows of somebody.
- On one node any number of handles hold a reference, by one fork. When the last is released, the
  fork is deleted; but never before the owner has confirmed it, or else ``delete`` could overtake
  ``register``.
- A fork from the owner is known to it from the start. A node that the owner knows of already needs
  no second fork, and settles it with the sender.
- A request to make a value carries the fork of its creator. The creator can use the reference at
  once. Forks that overtake the request wait at the owner till it comes; if its creator dies or
  withdraws it, they are refused.
- Control messages are numbered between each two nodes. They may be late, in any order and twice.
  Messages of users, which carry forks, must come at most once.
- After a death the owner keeps what the dead held until every living node has answered that all
  it got from the dead is registered. A node that sent something to the dead keeps its own fork
  until the owner says that this is so. What was lost with the dead is dropped then.
- When the owner dies its references are broken; there is nobody to send to.
- A node that takes the place of a dead one is a new node, of a new number. The others have heard of
  it before it sends anything, and it hears of all that have died before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from . import records
from .holder import Holder
from .owner import Owner
from .records import Action, Fork, Message, Peers, Ref, ref_of


class References:
    """The references of one node: to its own values, and to those of others.

    Parameters
    ----------
    node
        This node.
    nodes
        All that there are, this one among them.
    """

    def __init__(self, node: int, nodes: Iterable[int]) -> None:
        self.node = node
        self._peers = Peers(node, nodes)
        self._owner = Owner(self._peers)
        self._holder = Holder(self._peers)
        self._owned = self._owner.refs
        self._held = self._holder.refs
        self._forks = 0
        self._loops: set[Fork] = set()  # forks on their way from this node to itself
        owner, holder = self._owner, self._holder
        self._about_forks: dict[str, Callable[[Ref, Fork], None]] = {
            records.ACCEPTED: holder.accepted,
            records.REFUSED: holder.refused,
            records.SETTLED: holder.settled,
            records.DELETE: owner.deleted,
            records.WITHDRAWN: owner.withdrawn,
        }
        self._about_nodes: dict[str, Callable[[int, int], None]] = {
            records.ASK: holder.asked,
            records.ANSWER: owner.answered,
            records.DONE: holder.done,
        }

    # -- handles -----------------------------------------------------------------------------

    def own(self) -> Ref:
        """Make a reference to a value that is here; it is held once."""
        ref = self._owner.own()
        self._peers.note(ref, "own", self.node)
        return ref

    def create(self, owner: int) -> Fork:
        """Make a reference to a value that another node is asked to make; it is held once.

        The fork must travel with that request and be given to the owner's `adopted` even if the
        value can't be made: else no node that has the reference would ever know. If the request
        is not sent at all, `dropped` must be called.
        """
        if owner == self.node:
            raise ValueError(
                "create() is for values of other nodes; for one of this node use own()"
            )
        fork = self._holder.create(owner)
        self._peers.note(fork[:3], "create", self.node)
        return fork

    def hold(self, ref: Ref) -> None:
        """Hold a reference once more on this node.

        It must be held already; on the owner it is enough that somebody anywhere holds it.
        """
        owned = self._owned.get(ref)
        if owned is not None:
            owned.handles += 1
            return
        held = self._held.get(ref)
        if held is None or not held.handles:
            raise ValueError(f"node {self.node} holds no reference {ref}{self._so_far(ref)}")
        held.handles += 1

    def release(self, ref: Ref) -> list[Action]:
        """Hold a reference once less on this node."""
        if ref[0] == self.node:
            owned = self._owned.get(ref)
            if owned is not None and owned.handles:
                self._owner.release(ref, owned)
                return self._peers.take_actions()
        else:
            held = self._held.get(ref)
            if held is not None and held.handles:
                self._holder.release(ref, held)
                return self._peers.take_actions()
        raise ValueError(
            f"reference {ref} was released more often than held on node {self.node}"
            f"{self._so_far(ref)}"
        )

    # -- forks -------------------------------------------------------------------------------

    def fork(self, ref: Ref, to: int) -> Fork:
        """A fork to travel in a message of a user to a node; the reference must be held here.

        It must come to the other node's `arrived` or, if it is sure that it was never handed to
        that node, to this one's `dropped`. If the other node dies neither is needed.
        """
        mine = ref[0] == self.node
        record = self._owned.get(ref) if mine else self._held.get(ref)
        if record is None or not record.handles:
            raise ValueError(
                f"node {self.node} can't send reference {ref}, which it does not hold"
                f"{self._so_far(ref)}"
            )
        self._forks += 1
        fork = (*ref, self.node, self._forks)
        peers = self._peers
        peers.note(ref, "fork", to)
        if to == self.node:
            record.handles += 1
            self._loops.add(fork)
        elif to in peers.lost or ref[0] in peers.lost:
            pass  # no node will hold it, or there is no owner to count
        elif mine:
            self._owned[ref].forks[fork] = to
        else:
            self._held[ref].children[fork] = to
        return fork

    def arrived(self, fork: Fork, sender: int) -> list[Action]:
        """A message of a user has come with a fork; it holds the reference once."""
        ref = ref_of(fork)
        self._peers.note(ref, "arrived from", sender)
        if sender == self.node:
            self._loops.remove(fork)  # it has been held since it was sent
        elif ref[0] == self.node:
            self._owner.arrived(ref, fork, sender)
        else:
            self._holder.arrived(ref, fork, sender)
        return self._peers.take_actions()

    def dropped(self, fork: Fork) -> list[Action]:
        """The message that should have carried a fork, from here, was never sent."""
        ref = ref_of(fork)
        self._peers.note(ref, "dropped", self.node)
        if fork in self._loops:
            self._loops.remove(fork)
            return self.release(ref)
        if ref[0] == self.node:
            self._owner.deleted(ref, fork)
        else:
            self._holder.dropped(ref, fork)
        return self._peers.take_actions()

    def adopted(self, fork: Fork, sender: int) -> list[Action]:
        """On the owner: the request to make a value has come, with the fork of its creator.

        The value may be freed before it is made, if nobody holds it any more: hold it meanwhile,
        or drop it when it comes.
        """
        ref = ref_of(fork)
        self._peers.note(ref, "adopted from", sender)
        self._owner.adopted(ref, fork, sender)
        return self._peers.take_actions()

    # -- messages and deaths -----------------------------------------------------------------

    def received(self, message: Message, sender: int) -> list[Action]:
        """A control message has come from the `References` of another node."""
        what, number, subject = message
        if not self._peers.first(sender, number):
            return []
        if what in self._about_nodes:
            self._about_nodes[what](subject[0], sender)
        elif what in self._about_forks or what == records.REGISTER:
            fork = _fork(subject)
            ref = ref_of(fork)
            self._peers.note(ref, what, sender)
            if what == records.REGISTER:
                self._owner.registered(ref, fork, sender)
            else:
                self._about_forks[what](ref, fork)
        else:
            raise ValueError(f"no message of reference counting: {what!r}")
        return self._peers.take_actions()

    def met(self, node: int) -> None:
        """There is a new node, which has sent nothing yet; any thread."""
        self._peers.met(node)

    def lost(self, node: int) -> list[Action]:
        """Another node has died, and all that it had sent here and that was not lost has come."""
        if node in self._peers.lost:
            return []
        if node == self.node:
            raise ValueError(f"node {node} can't be told of its own death")
        self._peers.mark_dead(node)
        self._holder.lost(node)
        self._owner.lost(node)
        return self._peers.take_actions()

    # -- facts -------------------------------------------------------------------------------

    def confirmed(self, ref: Ref) -> bool:
        """Whether the owner knows that this node holds the reference."""
        if ref[0] == self.node:
            return ref in self._owned and self._owned[ref].adopted
        return ref in self._held and self._held[ref].kept is not None

    def being_confirmed(self, ref: Ref) -> bool:
        """Whether a fork that has come here is not confirmed yet.

        False of a reference that was made here: its value may be long in coming.
        """
        held = self._held.get(ref)
        return held is not None and held.kept is None and any(fork[4] for fork in held.waiting)

    def broken(self, ref: Ref) -> bool:
        """Whether the owner has died."""
        return ref[0] in self._peers.lost

    def refused(self, ref: Ref) -> bool:
        """Whether there is no value and there won't be one.

        On the owner this can be asked of any reference: False means that the value, or at least
        the request to make it, is here or may still come.
        """
        if ref[0] != self.node:
            return ref in self._held and self._held[ref].refused
        owned = self._owned.get(ref)
        return self._owner.gone(ref) if owned is None else owned.refused

    def handles(self, ref: Ref) -> int:
        """How many hold the reference on this node."""
        record = self._owned.get(ref) or self._held.get(ref)
        return 0 if record is None else record.handles

    def holders(self, ref: Ref) -> list[int]:
        """On the owner: the nodes that hold the reference, or to which it is on its way."""
        owned = self._owned.get(ref)
        if owned is None:
            return []
        nodes = {*owned.forks.values(), *owned.expected.values()}
        return sorted(nodes | ({self.node} if owned.handles else set()))

    def refs(self) -> list[Ref]:
        """All references of which this node knows."""
        return [*self._owned, *self._held]

    def story(self, ref: Ref) -> list[tuple[str, int]]:
        """What has happened to a reference on this node of late, with the node that did it."""
        return [(what, who) for about, what, who in self._peers.story if about == ref]

    def is_empty(self) -> bool:
        """Whether nothing is kept: no reference, no message that is waited for."""
        if self._loops or self._peers.late():
            return False
        return self._owner.is_empty() and self._holder.is_empty()

    def validate(self) -> None:
        """Check what must always hold; for tests.

        Raises
        ------
        AssertionError
        """
        self._owner.validate()
        self._holder.validate()
        for fork in self._loops:
            assert fork[3] == self.node and self.handles(fork[:3]), fork

    def _so_far(self, ref: Ref) -> str:
        last = [f"{what} {who}" for what, who in self.story(ref)[-8:]]
        return f"; what has happened to it here: {', '.join(last)}" if last else ""


def _fork(subject: tuple[int, ...]) -> Fork:
    owner, creator, number, sender, count = subject
    return owner, creator, number, sender, count
