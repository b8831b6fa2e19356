"""What a node knows of the references to its own values; pure state, a part of `References`."""

from __future__ import annotations

from collections import defaultdict

from .records import (
    ACCEPTED,
    ASK,
    DONE,
    REFUSED,
    SETTLED,
    Fork,
    Free,
    Owned,
    Peers,
    Ref,
    Refused,
    Window,
)


class Owner:
    """The owner's side: it knows every fork of its values, or a node that waits until it does."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.refs: dict[Ref, Owned] = {}
        self._made = 0
        # of each creator, the values whose requests have come or will never come
        self._requests: defaultdict[int, Window] = defaultdict(Window)
        self._rounds: dict[int, set[int]] = {}  # of each dead node: nodes that have not answered

    # -- handles -----------------------------------------------------------------------------

    def own(self) -> Ref:
        """Make a reference to a value that is here; it is held once."""
        self._made += 1
        me = self.peers.node
        ref = (me, me, self._made)
        owned = self.refs[ref] = Owned(adopted=True)
        owned.handles = 1
        return ref

    def release(self, ref: Ref, owned: Owned) -> None:
        """Count one handle less."""
        owned.handles -= 1
        if not owned.handles:
            self._settle(ref, owned)

    def _settle(self, ref: Ref, owned: Owned) -> None:
        """Free the value if nobody holds it."""
        if owned.handles or owned.forks or owned.expected:
            return
        del self.refs[ref]
        if owned.adopted:  # else there is nothing to free; the request may still come
            self.peers.note(ref, "freed", self.peers.node)
            self.peers.act(Free(ref))

    # -- forks -------------------------------------------------------------------------------

    def adopted(self, ref: Ref, fork: Fork, sender: int) -> None:
        """The request to make a value has arrived."""
        if not self._requests[sender].first(ref[2]):
            raise ValueError(f"the request for reference {ref} has come twice")
        owned = self.refs.get(ref)
        if owned is None:
            owned = self.refs[ref] = Owned(adopted=True)
        owned.adopted = True
        owned.forks[fork] = sender
        self.peers.send(sender, ACCEPTED, fork)
        for expected, holder in owned.expected.items():
            self._accept(owned, expected, holder)
        owned.expected.clear()

    def arrived(self, ref: Ref, fork: Fork, sender: int) -> None:
        """A reference has come home; the message holds it once."""
        owned = self.refs.get(ref)
        if owned is None:
            owned = self.refs[ref] = Owned(adopted=False, refused=self.gone(ref))
            if owned.refused:
                self.peers.act(Refused(ref))
        owned.handles += 1
        self.peers.send(sender, SETTLED, fork)

    # -- messages ----------------------------------------------------------------------------

    def registered(self, ref: Ref, fork: Fork, sender: int) -> None:
        """A fork has arrived at a node."""
        owned = self.refs.get(ref)
        if owned is None and not self.gone(ref):
            owned = self.refs[ref] = Owned(adopted=False)
        if owned is None or owned.refused:
            self._refuse(fork, sender)
        elif owned.adopted:
            self._accept(owned, fork, sender)
        else:  # the fork has overtaken the request
            owned.expected[fork] = sender

    def deleted(self, ref: Ref, fork: Fork) -> None:
        """A node has let go of a fork, or it was never sent."""
        owned = self.refs.get(ref)
        if owned is not None and owned.forks.pop(fork, None) is not None:
            self._settle(ref, owned)

    def withdrawn(self, ref: Ref, _: Fork) -> None:
        """The request to make a value was never sent."""
        self._requests[ref[1]].first(ref[2])
        if ref in self.refs:
            self._refuse_all(ref, self.refs[ref])

    def gone(self, ref: Ref) -> bool:
        """Whether there is no value and there won't be one; if nothing is known of it here."""
        creator = ref[1]
        return (
            creator == self.peers.node
            or creator in self.peers.lost
            or ref[2] in self._requests[creator]
        )

    def _accept(self, owned: Owned, fork: Fork, holder: int) -> None:
        owned.forks[fork] = holder
        self.peers.send(holder, ACCEPTED, fork)
        self.peers.send(fork[3], SETTLED, fork)

    def _refuse(self, fork: Fork, holder: int) -> None:
        self.peers.send(holder, REFUSED, fork)
        self.peers.send(fork[3], SETTLED, fork)

    def _refuse_all(self, ref: Ref, owned: Owned) -> None:
        """The value of a reference won't come.

        Nodes that have the reference from here take it for confirmed: they hear of it when they
        ask for the value.
        """
        owned.refused = True
        self.peers.note(ref, "refused", self.peers.node)
        self.peers.act(Refused(ref))
        for fork, holder in owned.expected.items():
            self._refuse(fork, holder)
        owned.expected.clear()
        self._settle(ref, owned)

    # -- deaths ------------------------------------------------------------------------------

    def lost(self, node: int) -> None:
        """A node has died, and all that it sent here has come.

        What it held may be the only reason that a value lives whose forks it has sent on. So all
        nodes are asked first; and if one of them dies too, before it has answered, what it has sent
        on is waited for as well. Then, when no round is left, what the dead held is dropped.
        """
        self._requests.pop(node, None)
        for ref in [r for r, o in self.refs.items() if r[1] == node and not o.adopted]:
            if not self.refs[ref].refused:
                self._refuse_all(ref, self.refs[ref])
        for waits in self._rounds.values():
            waits.discard(node)
        self._rounds[node] = set(self.peers.others())
        for other in self.peers.others():
            self.peers.send(other, ASK, (node,))
        self._flush()

    def answered(self, dead: int, sender: int) -> None:
        """A node has no fork from a dead one that this node does not know of."""
        if dead in self._rounds:
            self._rounds[dead].discard(sender)
            self._flush()

    def _flush(self) -> None:
        """End all rounds, if all are through."""
        if any(self._rounds.values()):
            return
        dead = set(self._rounds)
        self._rounds.clear()
        for ref, owned in self.refs.copy().items():
            for forks in (owned.forks, owned.expected):
                for fork in [fork for fork, holder in forks.items() if holder in dead]:
                    del forks[fork]
                    self.peers.note(ref, "flushed", fork[3])
            self._settle(ref, owned)
        for other in self.peers.others():
            for node in sorted(dead):
                self.peers.send(other, DONE, (node,))

    # -- facts -------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        late = any(window.above for window in self._requests.values())
        return not self.refs and not self._rounds and not late

    def validate(self) -> None:
        """Check what must always hold; for tests."""
        lost = self.peers.lost
        assert set(self._rounds) <= lost
        assert not self._rounds or any(self._rounds.values()), "a round is through, but runs"
        for waits in self._rounds.values():
            assert not waits & lost and self.peers.node not in waits
        for ref, owned in self.refs.items():
            assert ref[0] == self.peers.node, ref
            assert owned.handles >= 0, ref
            assert owned.handles or owned.forks or owned.expected, ("nothing holds it", ref)
            assert not (owned.adopted and owned.refused), ref
            assert not owned.expected or not (owned.adopted or owned.refused), ref
            assert owned.adopted or owned.refused or not self.gone(ref), ("waits in vain", ref)
            assert all(fork[:3] == ref for fork in [*owned.forks, *owned.expected]), ref
            for holder in [*owned.forks.values(), *owned.expected.values()]:
                assert holder != self.peers.node, ref
                assert holder not in lost or holder in self._rounds, ("held by the dead", ref)
