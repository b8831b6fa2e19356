"""Reference counting against what is true: nothing is freed that is held, and in the end all is.

Four nodes and a network at its worst. Control messages come in any order and more than once;
messages of users come at any time; nodes die, and any part of what they had sent is lost. A new
node may take the place of a dead one, even before the others have heard of the death.
"""

import random
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from discolab.rpc.refs.counting import References
from discolab.rpc.refs.records import (
    Action,
    Broken,
    Confirmed,
    Fork,
    Free,
    Message,
    Ref,
    Refused,
    Send,
)

NODES = 4  # node 0 never dies: the session ends with it
PICK = st.integers(0, 9_999)
MOST = 8  # with those that take the place of others


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.nodes = {node: References(node, range(NODES)) for node in range(NODES)}
        self.bag: list[tuple[int, int, Message]] = []  # control messages: from, to, what
        self.late: list[tuple[int, int, Message]] = []  # what all others overtake
        self.copies: list[tuple[int, int, Message]] = []  # of those that have come already
        self.mail: list[tuple[int, int, Fork]] = []  # messages of users
        self.returned: list[tuple[int, Fork]] = []  # mail to the dead, back at its sender
        self.held: Counter[tuple[int, Ref]] = Counter()
        self.valued: set[Ref] = set()  # the owner has the value, or had it
        self.void: set[Ref] = set()  # the request was lost or withdrawn
        self.freed: set[Ref] = set()
        self.dead: set[int] = set()
        self.unheard: list[tuple[int, int]] = []  # who is to hear of whose death

    # -- the network -------------------------------------------------------------------------

    def act(self, node: int, actions: "list[Action] | tuple[Action, ...]") -> None:
        for action in actions:
            if isinstance(action, Send):
                assert action.to != node
                if action.to not in self.dead:
                    self.bag.append((node, action.to, action.message))
                continue
            ref = action.ref
            if isinstance(action, Free):
                assert ref[0] == node
                assert ref in self.valued
                assert ref not in self.freed, "freed twice"
                self.freed.add(ref)
            elif isinstance(action, Confirmed):
                assert self.nodes[node].confirmed(ref)
                assert ref[0] in self.dead or node in self.nodes[ref[0]].holders(ref)
            elif isinstance(action, Refused):
                assert ref in self.void, self.nodes[node].story(ref)
                assert self.nodes[node].refused(ref)
            else:
                assert isinstance(action, Broken)
                assert ref[0] in self.dead
                assert self.nodes[node].broken(ref)

    def deliver(self, index: int, *, keep: bool = False) -> None:
        sender, to, message = self.bag.pop(index)
        if keep:
            self.copies.append((sender, to, message))
        self.act(to, self.nodes[to].received(message, sender))

    def hand_over(self, index: int) -> None:
        sender, to, fork = self.mail.pop(index)
        ref = fork[:3]
        if fork[4] == 0:
            self.valued.add(ref)
            self.act(to, self.nodes[to].adopted(fork, sender))
        else:
            self.held[to, ref] += 1
            self.act(to, self.nodes[to].arrived(fork, sender))

    def hear(self, to: int, dead: int, rng: random.Random) -> None:
        """All that has come from the dead is delivered, and then its death."""
        self.bag += [letter for letter in self.late if letter[:2] == (dead, to)]
        self.late = [letter for letter in self.late if letter[:2] != (dead, to)]
        while True:
            letters = [i for i, (s, t, _) in enumerate(self.bag) if (s, t) == (dead, to)]
            calls = [i for i, (s, t, _) in enumerate(self.mail) if (s, t) == (dead, to)]
            if not letters and not calls:
                break
            if letters and (not calls or rng.random() < 0.5):
                self.deliver(rng.choice(letters))
            else:
                self.hand_over(rng.choice(calls))
        self.act(to, self.nodes[to].lost(dead))

    def let_go(self, node: int, ref: Ref) -> None:
        self.held[node, ref] -= 1
        if not self.held[node, ref]:
            del self.held[node, ref]
        self.act(node, self.nodes[node].release(ref))

    def living(self) -> list[int]:
        return [node for node in self.nodes if node not in self.dead]

    def any_node(self, pick: int) -> int:
        return list(self.nodes)[pick % len(self.nodes)]

    def live(self, pick: int) -> int:
        alive = self.living()
        return alive[pick % len(alive)]

    # -- what users do -----------------------------------------------------------------------

    @precondition(lambda self: len(self.held) < 4)
    @rule(node=PICK)
    def own(self, node: int) -> None:
        node = self.live(node)
        ref = self.nodes[node].own()
        self.valued.add(ref)
        self.held[node, ref] += 1

    @precondition(lambda self: len(self.held) < 4)
    @rule(node=PICK, owner=PICK)
    def create(self, node: int, owner: int) -> None:
        node, owner = self.live(node), self.any_node(owner)
        if owner == node:
            return
        fork = self.nodes[node].create(owner)
        self.held[node, fork[:3]] += 1
        if owner not in self.dead:
            self.mail.append((node, owner, fork))
        else:
            self.returned.append((node, fork))

    @precondition(lambda self: self.held)
    @rule(pick=PICK, to=PICK)
    def fork(self, pick: int, to: int) -> None:
        to = self.any_node(to)
        node, ref = list(self.held)[pick % len(self.held)]
        fork = self.nodes[node].fork(ref, to)
        if to not in self.dead:
            self.mail.append((node, to, fork))
        else:
            self.returned.append((node, fork))

    @precondition(lambda self: self.held)
    @rule(pick=PICK, to=PICK)
    def pass_on(self, pick: int, to: int) -> None:
        """The reference goes to another node, and nothing of it is left."""
        self.fork(pick, to)
        node, ref = list(self.held)[pick % len(self.held)]
        while (node, ref) in self.held:
            self.let_go(node, ref)

    @precondition(lambda self: self.held)
    @rule(pick=PICK, rng=st.randoms(use_true_random=False))
    def goes_around(self, pick: int, rng: random.Random) -> None:
        """So fast that the owner has heard of nobody; the last message is on its way."""
        node, ref = list(self.held)[pick % len(self.held)]
        for to in rng.sample(list(self.nodes), len(self.nodes)):
            if to in (node, ref[0]) or to in self.dead:
                continue
            if (node, ref) not in self.held:
                self.hand_over(len(self.mail) - 1)
            self.fork(list(self.held).index((node, ref)), list(self.nodes).index(to))
            while (node, ref) in self.held:
                self.let_go(node, ref)
            node = to

    @precondition(lambda self: 0 < sum(self.held.values()) < 8)
    @rule(pick=PICK)
    def hold(self, pick: int) -> None:
        node, ref = list(self.held)[pick % len(self.held)]
        self.nodes[node].hold(ref)
        self.held[node, ref] += 1

    @precondition(lambda self: self.held)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        self.let_go(*list(self.held)[pick % len(self.held)])

    @precondition(lambda self: self.mail)
    @rule(pick=PICK)
    def call_arrives(self, pick: int) -> None:
        self.hand_over(pick % len(self.mail))

    @precondition(lambda self: any(sender not in self.dead for sender, _, _ in self.mail))
    @rule(pick=PICK)
    def call_is_never_sent(self, pick: int) -> None:
        mine = [i for i, (sender, _, _) in enumerate(self.mail) if sender not in self.dead]
        sender, _, fork = self.mail.pop(mine[pick % len(mine)])
        if fork[4] == 0:
            self.void.add(fork[:3])
        self.act(sender, self.nodes[sender].dropped(fork))

    @precondition(lambda self: self.returned)
    @rule(pick=PICK)
    def call_comes_back_from_the_dead(self, pick: int) -> None:
        sender, fork = self.returned.pop(pick % len(self.returned))
        if sender not in self.dead:
            if fork[4] == 0:
                self.void.add(fork[:3])
            self.act(sender, self.nodes[sender].dropped(fork))

    # -- what the network does ---------------------------------------------------------------

    @precondition(lambda self: self.bag)
    @rule(pick=PICK, keep=st.booleans())
    def letter_arrives(self, pick: int, keep: bool) -> None:
        self.deliver(pick % len(self.bag), keep=keep)

    @precondition(lambda self: self.copies)
    @rule(pick=PICK)
    def letter_arrives_again(self, pick: int) -> None:
        sender, to, message = self.copies[pick % len(self.copies)]
        if to not in self.dead:
            self.act(to, self.nodes[to].received(message, sender))

    @precondition(lambda self: self.bag)
    @rule(pick=PICK, rng=st.randoms(use_true_random=False))
    def letters_of_two_arrive(self, pick: int, rng: random.Random) -> None:
        """All between two nodes, in one direction."""
        ends = self.bag[pick % len(self.bag)][:2]
        while letters := [i for i, letter in enumerate(self.bag) if letter[:2] == ends]:
            self.deliver(rng.choice(letters))

    @precondition(lambda self: self.bag)
    @rule(pick=PICK)
    def letter_is_late(self, pick: int) -> None:
        self.late.append(self.bag.pop(pick % len(self.bag)))

    @precondition(lambda self: self.late)
    @rule(pick=PICK)
    def late_letter_arrives(self, pick: int) -> None:
        self.bag.append(self.late.pop(pick % len(self.late)))
        self.deliver(len(self.bag) - 1)

    @precondition(lambda self: self.bag)
    @rule(rng=st.randoms(use_true_random=False))
    def all_letters_arrive_but_the_late(self, rng: random.Random) -> None:
        while self.bag:
            self.deliver(rng.randrange(len(self.bag)))

    def may_die(self) -> list[int]:
        """Those whose death matters: they have sent something that is still on its way."""
        senders = {sender for sender, *_ in [*self.mail, *self.bag, *self.late]}
        senders |= {fork[3] for _, _, (_, _, fork) in self.late if len(fork) == 5}
        return sorted(senders - self.dead - {0})

    @precondition(lambda self: self.may_die())
    @rule(pick=PICK, rng=st.randoms(use_true_random=False), rate=st.sampled_from([0.0, 0.5, 1.0]))
    def die(self, pick: int, rng: random.Random, rate: float) -> None:
        dead = self.may_die()[pick % len(self.may_die())]
        self.dead.add(dead)
        self.unheard = [(to, whom) for to, whom in self.unheard if to != dead]
        self.unheard += [(to, dead) for to in self.living()]
        for letters in (self.bag, self.late):
            letters[:] = [
                letter
                for letter in letters
                if letter[1] != dead and (letter[0] != dead or rng.random() >= rate)
            ]
        mail, self.mail = self.mail, []
        for sender, to, fork in mail:
            if to == dead and sender != dead:
                self.returned.append((sender, fork))
            elif to != dead and (sender != dead or rng.random() >= rate):
                self.mail.append((sender, to, fork))
            elif fork[4] == 0:
                self.void.add(fork[:3])
        for node, ref in list(self.held):
            if node == dead:
                del self.held[node, ref]

    @precondition(lambda self: self.replaceable())
    @rule(pick=PICK)
    def be_replaced(self, pick: int) -> None:
        """All who live know of the new node before it does anything, and it hears of all deaths."""
        rank = self.replaceable()[pick % len(self.replaceable())]
        latest = max(node for node in self.nodes if node % NODES == rank)
        new = latest + NODES
        current = {max(n for n in self.nodes if n % NODES == r) for r in range(NODES)} - {latest}
        for node in self.living():
            self.nodes[node].met(new)
        self.nodes[new] = References(new, current | {new})
        self.unheard += [(new, dead) for dead in self.dead]

    def replaceable(self) -> list[int]:
        if len(self.nodes) >= MOST:
            return []
        alive = {node % NODES for node in self.living()}
        return [rank for rank in range(NODES) if rank not in alive]

    @precondition(lambda self: self.unheard)
    @rule(pick=PICK, rng=st.randoms(use_true_random=False))
    def death_is_heard_of(self, pick: int, rng: random.Random) -> None:
        self.hear(*self.unheard.pop(pick % len(self.unheard)), rng)

    @precondition(lambda self: self.unheard)
    @rule(rng=st.randoms(use_true_random=False))
    def all_deaths_are_heard_of(self, rng: random.Random) -> None:
        while self.unheard:
            self.hear(*self.unheard.pop(rng.randrange(len(self.unheard))), rng)

    # -- what must hold ----------------------------------------------------------------------

    @invariant()
    def nothing_is_freed_that_is_held(self) -> None:
        for node, ref in self.held:
            assert ref not in self.freed, (node, ref, self.nodes[ref[0]].story(ref))
        for _, to, fork in self.mail:
            assert fork[:3] not in self.freed, (to, fork, self.nodes[fork[0]].story(fork[:3]))

    @invariant()
    def is_valid(self) -> None:
        for node, references in self.nodes.items():
            if node not in self.dead:
                references.validate()
        for (node, ref), handles in self.held.items():
            references = self.nodes[node]
            loops = sum(s == t == node and fork[:3] == ref for s, t, fork in self.mail)
            assert references.handles(ref) == handles + loops
            assert not references.refused(ref) or ref in self.void
            if ref[0] not in self.dead and references.confirmed(ref):
                assert node in self.nodes[ref[0]].holders(ref)

    # -- the end -----------------------------------------------------------------------------

    def quiet(self, rng: random.Random) -> None:
        """All that is on its way comes, in any order."""
        self.bag += self.late
        self.late.clear()
        while self.bag or self.mail or self.unheard:
            chosen = rng.choice([self.bag, self.mail, self.unheard])
            if not chosen:
                continue
            index = rng.randrange(len(chosen))
            if chosen is self.bag:
                self.deliver(index)
            elif chosen is self.mail:
                self.hand_over(index)
            else:
                self.hear(*self.unheard.pop(index), rng)
            self.nothing_is_freed_that_is_held()

    def teardown(self) -> None:
        rng = random.Random(len(self.bag) * 100 + len(self.mail) * 10 + len(self.late))
        self.quiet(rng)
        self.is_valid()
        for node, ref in self.held:
            references = self.nodes[node]
            assert references.broken(ref) == (ref[0] in self.dead)
            if not references.broken(ref):
                there = self.nodes[ref[0]]
                assert (references.refused(ref) or there.refused(ref)) == (ref in self.void)
                assert references.confirmed(ref) or references.refused(ref)
        while self.held:
            self.let_go(*rng.choice(list(self.held)))
            if rng.random() < 0.5:
                self.quiet(rng)
                self.is_valid()
        self.quiet(rng)
        for sender, to, message in self.copies:
            if to not in self.dead:
                assert not self.nodes[to].received(message, sender)
        for node, references in self.nodes.items():
            if node not in self.dead:
                references.validate()
                assert references.is_empty(), (node, references.refs())
        for ref in self.valued:
            assert ref[0] in self.dead or ref in self.freed, ("leaked", ref)


Model.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # where others keep the machine busy
)
TestReferences = Model.TestCase
