"""What one node knows of the references to its own values, as pure state. `References` uses it."""

from __future__ import annotations

from .reference_records import (
    ACCEPTED,
    ASK,
    DONE,
    REFUSED,
    SETTLED,
    Action,
    Desk,
    Fork,
    Free,
    Owned,
    Ref,
    Refused,
    Window,
)


class Owning:
    """The side of the owner: it knows every fork of its values, or somebody who waits for it to."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.refs: dict[Ref, Owned] = {}
        self._made = 0
        # of each creator, the values whose requests have come or will never come
        self._requests = [Window() for _ in range(desk.num_nodes)]
        self._rounds: dict[int, set[int]] = {}  # of each dead node: those who have not answered

    # -- handles -----------------------------------------------------------------------------

    def own(self) -> Ref:
        """A reference, held once, to a value that is here."""
        self._made += 1
        me = self.desk.node
        ref = (me, me, self._made)
        owned = self.refs[ref] = Owned(adopted=True)
        owned.handles = 1
        return ref

    def release(self, ref: Ref, owned: Owned) -> list[Action]:
        """One handle is gone."""
        owned.handles -= 1
        out: list[Action] = []
        if not owned.handles:
            self._settle(ref, owned, out)
        return out

    def _settle(self, ref: Ref, owned: Owned, out: list[Action]) -> None:
        """Free the value, if nobody holds it."""
        if owned.handles or owned.forks or owned.expected:
            return
        del self.refs[ref]
        if owned.adopted:  # else there is nothing to free; the request may still come
            self.desk.note(ref, "freed", self.desk.node)
            out.append(Free(ref))

    # -- forks -------------------------------------------------------------------------------

    def adopted(self, ref: Ref, fork: Fork, sender: int) -> list[Action]:
        """The request to make a value has come."""
        out: list[Action] = []
        if not self._requests[sender].first(ref[2]):
            raise ValueError(f"the request for reference {ref} has come twice")
        owned = self.refs.get(ref)
        if owned is None:
            owned = self.refs[ref] = Owned(adopted=True)
        owned.adopted = True
        owned.forks[fork] = sender
        self.desk.send(out, sender, ACCEPTED, fork)
        for expected, holder in owned.expected.items():
            self._accept(owned, expected, holder, out)
        owned.expected.clear()
        return out

    def arrived(self, ref: Ref, fork: Fork, sender: int) -> list[Action]:
        """A reference has come home; the message holds it once."""
        out: list[Action] = []
        owned = self.refs.get(ref)
        if owned is None:
            owned = self.refs[ref] = Owned(adopted=False, refused=self.gone(ref))
            if owned.refused:
                out.append(Refused(ref))
        owned.handles += 1
        self.desk.send(out, sender, SETTLED, fork)
        return out

    def dropped(self, ref: Ref, fork: Fork) -> list[Action]:
        """A fork was never sent."""
        return self.deleted(ref, fork)

    # -- messages ----------------------------------------------------------------------------

    def registered(self, ref: Ref, fork: Fork, sender: int) -> list[Action]:
        """A fork has come to a node."""
        out: list[Action] = []
        owned = self.refs.get(ref)
        if owned is None and not self.gone(ref):
            owned = self.refs[ref] = Owned(adopted=False)
        if owned is None or owned.refused:
            self._refuse(fork, sender, out)
        elif owned.adopted:
            self._accept(owned, fork, sender, out)
        else:  # the fork has overtaken the request
            owned.expected[fork] = sender
        return out

    def deleted(self, ref: Ref, fork: Fork) -> list[Action]:
        """A node has let go of a fork."""
        out: list[Action] = []
        owned = self.refs.get(ref)
        if owned is not None and owned.forks.pop(fork, None) is not None:
            self._settle(ref, owned, out)
        return out

    def withdrawn(self, ref: Ref) -> list[Action]:
        """The request to make a value was never sent."""
        out: list[Action] = []
        self._requests[ref[1]].first(ref[2])
        if ref in self.refs:
            self._refuse_all(ref, self.refs[ref], out)
        return out

    def gone(self, ref: Ref) -> bool:
        """Whether there is no value and there won't be one; if nothing is known of it here."""
        creator = ref[1]
        return (
            creator == self.desk.node
            or creator in self.desk.lost
            or ref[2] in self._requests[creator]
        )

    def _accept(self, owned: Owned, fork: Fork, holder: int, out: list[Action]) -> None:
        owned.forks[fork] = holder
        self.desk.send(out, holder, ACCEPTED, fork)
        self.desk.send(out, fork[3], SETTLED, fork)

    def _refuse(self, fork: Fork, holder: int, out: list[Action]) -> None:
        self.desk.send(out, holder, REFUSED, fork)
        self.desk.send(out, fork[3], SETTLED, fork)

    def _refuse_all(self, ref: Ref, owned: Owned, out: list[Action]) -> None:
        """The value of a reference won't come.

        Nodes that have the reference from here take it for confirmed: they hear of it when they
        ask for the value.
        """
        owned.refused = True
        self.desk.note(ref, "refused", self.desk.node)
        out.append(Refused(ref))
        for fork, holder in owned.expected.items():
            self._refuse(fork, holder, out)
        owned.expected.clear()
        self._settle(ref, owned, out)

    # -- deaths ------------------------------------------------------------------------------

    def lost(self, node: int) -> list[Action]:
        """A node has died, and all that it sent here has come.

        What it held may be the only reason that a value lives whose forks it has sent on. So all
        nodes are asked first; and if one of them dies too, before it has answered, what it has sent
        on is waited for as well. Then, when no round is left, what the dead held is dropped.
        """
        out: list[Action] = []
        self._requests[node] = Window()
        for ref in [r for r, o in self.refs.items() if r[1] == node and not o.adopted]:
            if not self.refs[ref].refused:
                self._refuse_all(ref, self.refs[ref], out)
        for waits in self._rounds.values():
            waits.discard(node)
        self._rounds[node] = set(self.desk.others())
        for other in self.desk.others():
            self.desk.send(out, other, ASK, (node,))
        self._flush(out)
        return out

    def answered(self, dead: int, sender: int) -> list[Action]:
        """A node has no fork from a dead one that this node does not know of."""
        out: list[Action] = []
        if dead in self._rounds:
            self._rounds[dead].discard(sender)
            self._flush(out)
        return out

    def _flush(self, out: list[Action]) -> None:
        """End all rounds, if all are through."""
        if any(self._rounds.values()):
            return
        dead = set(self._rounds)
        self._rounds.clear()
        for ref, owned in list(self.refs.items()):
            for forks in (owned.forks, owned.expected):
                for fork in [fork for fork, holder in forks.items() if holder in dead]:
                    del forks[fork]
                    self.desk.note(ref, "flushed", fork[3])
            self._settle(ref, owned, out)
        for other in self.desk.others():
            for node in sorted(dead):
                self.desk.send(out, other, DONE, (node,))

    # -- facts -------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        late = any(window.above for window in self._requests)
        return not self.refs and not self._rounds and not late

    def validate(self) -> None:
        """Check what must always hold; for tests."""
        lost = self.desk.lost
        assert set(self._rounds) <= lost
        assert not self._rounds or any(self._rounds.values()), "a round is through, but runs"
        for waits in self._rounds.values():
            assert not waits & lost and self.desk.node not in waits
        for ref, owned in self.refs.items():
            assert ref[0] == self.desk.node, ref
            assert owned.handles >= 0, ref
            assert owned.handles or owned.forks or owned.expected, ("nothing holds it", ref)
            assert not (owned.adopted and owned.refused), ref
            assert not owned.expected or not (owned.adopted or owned.refused), ref
            assert owned.adopted or owned.refused or not self.gone(ref), ("waits in vain", ref)
            assert all(fork[:3] == ref for fork in [*owned.forks, *owned.expected]), ref
            for holder in [*owned.forks.values(), *owned.expected.values()]:
                assert holder != self.desk.node, ref
                assert holder not in lost or holder in self._rounds, ("held by the dead", ref)
