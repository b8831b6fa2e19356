"""References of one node to values of other nodes, as pure state. `References` uses it."""

from __future__ import annotations

from .reference_records import (
    ANSWER,
    DELETE,
    REGISTER,
    SETTLED,
    WITHDRAWN,
    Action,
    Broken,
    Confirmed,
    Desk,
    Fork,
    Held,
    Ref,
    Refused,
)


class Holding:
    """The side of those who hold references to values elsewhere."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.refs: dict[Ref, Held] = {}
        self._created = [0] * desk.num_nodes
        # (owner, dead node) of each round that this node has not answered: the forks that it waits
        # for, or None while it has not seen the death itself
        self._asked: dict[tuple[int, int], set[Fork] | None] = {}

    # -- handles -----------------------------------------------------------------------------

    def create(self, owner: int) -> Fork:
        """A reference, held once, to a value that is to be made on its owner."""
        self._created[owner] += 1
        number = self._created[owner]
        me = self.desk.node
        fork = (owner, me, number, me, 0)
        held = self.refs[(owner, me, number)] = Held()
        held.handles = 1
        if owner not in self.desk.lost:
            held.waiting.add(fork)
        return fork

    def release(self, ref: Ref, held: Held) -> list[Action]:
        """One handle is gone."""
        held.handles -= 1
        out: list[Action] = []
        if not held.handles:
            self._settle(ref, held, out)
        return out

    def _settle(self, ref: Ref, held: Held, out: list[Action]) -> None:
        """Let go, if nobody here holds it and nobody elsewhere needs this node's fork."""
        if held.handles or held.waiting or held.children:
            return
        del self.refs[ref]
        self.desk.note(ref, "let go", self.desk.node)
        if held.kept is not None:
            self.desk.send(out, ref[0], DELETE, held.kept)

    # -- forks -------------------------------------------------------------------------------

    def arrived(self, ref: Ref, fork: Fork, sender: int) -> list[Action]:
        """A fork has come; the message holds the reference once."""
        held = self.refs.get(ref)
        if held is None:
            held = self.refs[ref] = Held()
        held.handles += 1
        out: list[Action] = []
        owner = ref[0]
        if owner in self.desk.lost:
            return out
        if held.kept is not None:  # the owner knows this node already: the fork is not needed
            if sender == owner:
                self.desk.send(out, owner, DELETE, fork)
            else:
                self.desk.send(out, sender, SETTLED, fork)
        elif sender == owner:  # it has entered the fork as it sent it
            self._confirm(ref, held, fork, out)
        else:
            held.waiting.add(fork)
            self.desk.send(out, owner, REGISTER, fork)
        return out

    def dropped(self, ref: Ref, fork: Fork) -> list[Action]:
        """A fork was never sent."""
        out: list[Action] = []
        held = self.refs.get(ref)
        if held is None:
            return out
        if fork[4] == 0 and fork in held.waiting:
            self.desk.send(out, ref[0], WITHDRAWN, fork)
            self._refuse(ref, held, fork, out)
        else:
            held.children.pop(fork, None)
        self._settle(ref, held, out)
        return out

    # -- messages ----------------------------------------------------------------------------

    def accepted(self, ref: Ref, fork: Fork) -> list[Action]:
        """The owner knows of a fork."""
        out: list[Action] = []
        held = self.refs.get(ref)
        if held is None or fork not in held.waiting:
            return out
        held.waiting.remove(fork)
        if held.kept is None:
            self._confirm(ref, held, fork, out)
        else:
            self.desk.send(out, ref[0], DELETE, fork)
        self._answered_for(fork, out)
        self._settle(ref, held, out)
        return out

    def refused(self, ref: Ref, fork: Fork) -> list[Action]:
        """The owner has no value for a fork."""
        out: list[Action] = []
        held = self.refs.get(ref)
        if held is None or fork not in held.waiting:
            return out
        self._refuse(ref, held, fork, out)
        self._answered_for(fork, out)
        self._settle(ref, held, out)
        return out

    def settled(self, ref: Ref, fork: Fork) -> list[Action]:
        """A fork that was sent from here needs this node no more."""
        out: list[Action] = []
        held = self.refs.get(ref)
        if held is not None and held.children.pop(fork, None) is not None:
            self._settle(ref, held, out)
        return out

    def _confirm(self, ref: Ref, held: Held, fork: Fork, out: list[Action]) -> None:
        held.kept = fork
        held.refused = False
        self.desk.note(ref, "confirmed", self.desk.node)
        if held.handles:
            out.append(Confirmed(ref))

    def _refuse(self, ref: Ref, held: Held, fork: Fork, out: list[Action]) -> None:
        held.waiting.remove(fork)
        if held.kept is None and not held.waiting:
            held.refused = True
            self.desk.note(ref, "refused", self.desk.node)
            if held.handles:
                out.append(Refused(ref))

    # -- deaths ------------------------------------------------------------------------------

    def lost(self, node: int) -> list[Action]:
        """A node has died, and all that it sent here has come."""
        out: list[Action] = []
        for ref in [ref for ref in self.refs if ref[0] == node]:
            held = self.refs[ref]
            held.kept = None
            held.waiting.clear()
            held.children.clear()
            self.desk.note(ref, "broken", node)
            if held.handles:
                out.append(Broken(ref))
            else:
                del self.refs[ref]
        for owner, dead in list(self._asked):
            if owner == node:
                del self._asked[owner, dead]
            elif dead == node:
                self._look(owner, dead, out)
        return out

    def asked(self, owner: int, dead: int) -> list[Action]:
        """An owner waits until all that came from a dead node is known to it."""
        out: list[Action] = []
        self._asked[owner, dead] = None
        if dead in self.desk.lost:  # else something may come from it yet
            self._look(owner, dead, out)
        return out

    def _look(self, owner: int, dead: int, out: list[Action]) -> None:
        """Answer, or find out for which forks to wait before."""
        waits = {
            fork
            for ref, held in self.refs.items()
            if ref[0] == owner
            for fork in held.waiting
            if fork[3] == dead
        }
        self._asked[owner, dead] = waits
        self._answer(owner, dead, waits, out)

    def _answered_for(self, fork: Fork, out: list[Action]) -> None:
        waits = self._asked.get((fork[0], fork[3])) if self._asked else None
        if waits and fork in waits:
            waits.remove(fork)
            self._answer(fork[0], fork[3], waits, out)

    def _answer(self, owner: int, dead: int, waits: set[Fork], out: list[Action]) -> None:
        if not waits:
            del self._asked[owner, dead]
            self.desk.send(out, owner, ANSWER, (dead,))

    def done(self, owner: int, dead: int) -> list[Action]:
        """An owner knows of all that has come from a dead node: children there need no parent."""
        out: list[Action] = []
        for ref in [ref for ref in self.refs if ref[0] == owner]:
            held = self.refs[ref]
            gone = [fork for fork, to in held.children.items() if to == dead]
            for fork in gone:
                del held.children[fork]
            if gone:
                self.desk.note(ref, "flushed", dead)
                self._settle(ref, held, out)
        return out

    # -- facts -------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return not self.refs and not self._asked

    def validate(self) -> None:
        """Check what must always hold; for tests."""
        lost = self.desk.lost
        for ref, held in self.refs.items():
            assert ref[0] != self.desk.node, ref
            assert held.handles >= 0, ref
            assert held.handles or held.waiting or held.children, ("nothing holds it", ref)
            forks = [*held.waiting, *([] if held.kept is None else [held.kept])]
            assert all(fork[:3] == ref for fork in [*forks, *held.children]), ref
            assert len(set(forks)) == len(forks), ref
            assert all(fork[3] == self.desk.node for fork in held.children), ref
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
