"""What a node knows of its references to values of others; pure state, a part of `References`."""

from __future__ import annotations

from collections import Counter

from .records import (
    ANSWER,
    DELETE,
    REGISTER,
    SETTLED,
    WITHDRAWN,
    Broken,
    Confirmed,
    Fork,
    Held,
    Peers,
    Ref,
    Refused,
)


class Holder:
    """The side of a node that holds references to values elsewhere."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.refs: dict[Ref, Held] = {}
        self._created: Counter[int] = Counter()  # by owner
        # (owner, dead node) of each round that this node has not answered: the forks that it waits
        # for, or None while it has not seen the death itself
        self._asked: dict[tuple[int, int], set[Fork] | None] = {}

    # -- handles -----------------------------------------------------------------------------

    def create(self, owner: int) -> Fork:
        """Make a reference to a value that its owner is asked to make; it is held once."""
        self._created[owner] += 1
        number = self._created[owner]
        me = self.peers.node
        fork = (owner, me, number, me, 0)
        held = self.refs[(owner, me, number)] = Held()
        held.handles = 1
        if owner not in self.peers.lost:
            held.waiting.add(fork)
        return fork

    def release(self, ref: Ref, held: Held) -> None:
        """Count one handle less."""
        held.handles -= 1
        if not held.handles:
            self._settle(ref, held)

    def _settle(self, ref: Ref, held: Held) -> None:
        """Delete the fork if nobody here holds it and nobody elsewhere needs it."""
        if held.handles or held.waiting or held.children:
            return
        del self.refs[ref]
        self.peers.note(ref, "let go", self.peers.node)
        if held.kept is not None:
            self.peers.send(ref[0], DELETE, held.kept)

    # -- forks -------------------------------------------------------------------------------

    def arrived(self, ref: Ref, fork: Fork, sender: int) -> None:
        """A fork has arrived; its message holds the reference once."""
        held = self.refs.get(ref)
        if held is None:
            held = self.refs[ref] = Held()
        held.handles += 1
        owner = ref[0]
        if owner in self.peers.lost:
            return
        if held.kept is not None:  # the owner knows this node already: the fork is not needed
            if sender == owner:
                self.peers.send(owner, DELETE, fork)
            else:
                self.peers.send(sender, SETTLED, fork)
        elif sender == owner:  # it has entered the fork as it sent it
            self._confirm(ref, held, fork)
        else:
            held.waiting.add(fork)
            self.peers.send(owner, REGISTER, fork)

    def dropped(self, ref: Ref, fork: Fork) -> None:
        """A fork was never sent."""
        held = self.refs.get(ref)
        if held is None:
            return
        if fork[4] == 0 and fork in held.waiting:
            self.peers.send(ref[0], WITHDRAWN, fork)
            self._refuse(ref, held, fork)
        else:
            held.children.pop(fork, None)
        self._settle(ref, held)

    # -- messages ----------------------------------------------------------------------------

    def accepted(self, ref: Ref, fork: Fork) -> None:
        """The owner knows of a fork."""
        held = self.refs.get(ref)
        if held is None or fork not in held.waiting:
            return
        held.waiting.remove(fork)
        if held.kept is None:
            self._confirm(ref, held, fork)
        else:
            self.peers.send(ref[0], DELETE, fork)
        self._answered_for(fork)
        self._settle(ref, held)

    def refused(self, ref: Ref, fork: Fork) -> None:
        """The owner has no value for a fork."""
        held = self.refs.get(ref)
        if held is None or fork not in held.waiting:
            return
        self._refuse(ref, held, fork)
        self._answered_for(fork)
        self._settle(ref, held)

    def settled(self, ref: Ref, fork: Fork) -> None:
        """A fork that was sent from here needs this node no more."""
        held = self.refs.get(ref)
        if held is not None and held.children.pop(fork, None) is not None:
            self._settle(ref, held)

    def _confirm(self, ref: Ref, held: Held, fork: Fork) -> None:
        held.kept = fork
        held.refused = False
        self.peers.note(ref, "confirmed", self.peers.node)
        if held.handles:
            self.peers.act(Confirmed(ref))

    def _refuse(self, ref: Ref, held: Held, fork: Fork) -> None:
        held.waiting.remove(fork)
        if held.kept is None and not held.waiting:
            held.refused = True
            self.peers.note(ref, "refused", self.peers.node)
            if held.handles:
                self.peers.act(Refused(ref))

    # -- deaths ------------------------------------------------------------------------------

    def lost(self, node: int) -> None:
        """A node has died, and all that it sent here has come."""
        for ref in [ref for ref in self.refs if ref[0] == node]:
            held = self.refs[ref]
            held.kept = None
            held.waiting.clear()
            held.children.clear()
            self.peers.note(ref, "broken", node)
            if held.handles:
                self.peers.act(Broken(ref))
            else:
                del self.refs[ref]
        for owner, dead in list(self._asked):
            if owner == node:
                del self._asked[owner, dead]
            elif dead == node:
                self._look(owner, dead)

    def asked(self, dead: int, owner: int) -> None:
        """An owner waits until all that came from a dead node is known to it."""
        self._asked[owner, dead] = None
        if dead in self.peers.lost:  # else something may come from it yet
            self._look(owner, dead)

    def _look(self, owner: int, dead: int) -> None:
        """Answer an owner, or find out for which forks to wait before."""
        waits = {
            fork
            for ref, held in self.refs.items()
            if ref[0] == owner
            for fork in held.waiting
            if fork[3] == dead
        }
        self._asked[owner, dead] = waits
        self._answer(owner, dead, waits)

    def _answered_for(self, fork: Fork) -> None:
        waits = self._asked.get((fork[0], fork[3])) if self._asked else None
        if waits and fork in waits:
            waits.remove(fork)
            self._answer(fork[0], fork[3], waits)

    def _answer(self, owner: int, dead: int, waits: set[Fork]) -> None:
        if not waits:
            del self._asked[owner, dead]
            self.peers.send(owner, ANSWER, (dead,))

    def done(self, dead: int, owner: int) -> None:
        """An owner knows of all that has come from a dead node: children there need no parent."""
        for ref in [ref for ref in self.refs if ref[0] == owner]:
            held = self.refs[ref]
            gone = [fork for fork, to in held.children.items() if to == dead]
            for fork in gone:
                del held.children[fork]
            if gone:
                self.peers.note(ref, "flushed", dead)
                self._settle(ref, held)

    # -- facts -------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return not self.refs and not self._asked

    def validate(self) -> None:
        """Check what must always hold; for tests."""
        lost = self.peers.lost
        for ref, held in self.refs.items():
            assert ref[0] != self.peers.node, ref
            assert held.handles >= 0, ref
            assert held.handles or held.waiting or held.children, ("nothing holds it", ref)
            forks = [*held.waiting, *([] if held.kept is None else [held.kept])]
            assert all(fork[:3] == ref for fork in [*forks, *held.children]), ref
            assert len(set(forks)) == len(forks), ref
            assert all(fork[3] == self.peers.node for fork in held.children), ref
            if ref[0] in lost:
                assert not forks and not held.children, ("broken, but not clean", ref)
            else:
                assert forks or held.refused, ("held by no fork", ref)
                assert held.kept is None or not held.refused, ref
        for (owner, dead), waits in self._asked.items():
            assert owner not in lost and owner != dead
            assert (waits is None) == (dead not in lost), (owner, dead)
            for fork in waits or ():
                assert fork in self.refs[fork[:3]].waiting, ("waits in vain", fork)
