"""What reference counting is made of: names of references and forks, messages, actions, records.

All that travels is a plain tuple of ints and strings. The records are plain state, guarded by
whatever guards the `References` that they are in.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

# (owner, creator, number): the value lives on `owner`; `creator` has counted it, by owner.
Ref: TypeAlias = tuple[int, int, int]
# A reference, the node that has sent the fork, and its count of forks; the fork that travels with
# the request to make the value has the count 0.
Fork: TypeAlias = tuple[int, int, int, int, int]
# (what, number between these two nodes, a fork or a node)
Message: TypeAlias = tuple[str, int, tuple[int, ...]]

# to the owner
REGISTER = "register"  # this fork has come to me
DELETE = "delete"  # I have let go of this fork
WITHDRAWN = "withdrawn"  # the request with this fork was never sent
ANSWER = "answer"  # of all that has come from the dead node nothing is unknown to you any more
# from the owner
ACCEPTED = "accepted"  # I know of your fork
REFUSED = "refused"  # there is no value for your fork, and there won't be
ASK = "ask"  # this node is dead: answer when all forks that you have from it are settled
DONE = "done"  # all have answered: nobody holds anything by a fork that you sent to the dead node
# to the node that has sent a fork
SETTLED = "settled"  # the fork needs you no more

_STORY = 4_096


class Send(NamedTuple):
    """Send a control message to a node."""

    to: int
    message: Message


class Free(NamedTuple):
    """On the owner: drop the value. Nobody holds it, and nobody will."""

    ref: Ref


class Confirmed(NamedTuple):
    """The owner knows of this node's reference."""

    ref: Ref


class Refused(NamedTuple):
    """There is no value for the reference, and there won't be: its request was lost."""

    ref: Ref


class Broken(NamedTuple):
    """The owner has died with the value."""

    ref: Ref


Action: TypeAlias = Send | Free | Confirmed | Refused | Broken


def ref_of(fork: Fork) -> Ref:
    """The reference that a fork is of."""
    return fork[:3]


class Window:
    """Which of the numbers 1, 2, 3 … have come, in whatever order: all up to `low`, and `above`."""

    __slots__ = ("above", "low")

    def __init__(self) -> None:
        self.low = 0
        self.above: set[int] = set()

    def first(self, number: int) -> bool:
        """Enter a number; whether it is new."""
        if number <= self.low or number in self.above:
            return False
        if number != self.low + 1:
            self.above.add(number)
            return True
        self.low = number
        while self.above and self.low + 1 in self.above:
            self.low += 1
            self.above.remove(self.low)
        return True

    def __contains__(self, number: int) -> bool:
        return number <= self.low or number in self.above


@dataclass(slots=True, eq=False)
class Owned:
    """What the owner knows of a value.

    Attributes
    ----------
    adopted
        Whether the request has come.
    refused
        Whether it can't come any more.
    handles
        How many hold it here.
    forks
        The forks that are out, each with the node that holds it or that it is on its way to.
    expected
        Forks whose nodes wait to hear that the value is there: its request has not come yet.
    """

    adopted: bool
    refused: bool = False
    handles: int = 0
    forks: dict[Fork, int] = field(default_factory=dict)
    expected: dict[Fork, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Held:
    """What a node knows of a reference to a value of another node.

    Attributes
    ----------
    handles
        How many hold it here.
    kept
        The fork by which the owner knows of this node. One is enough.
    waiting
        Forks of which the owner has not said yet that it knows them.
    children
        Forks sent from here that need this node's own fork still, each with where it went.
    refused
        Whether the owner has refused all forks.
    """

    handles: int = 0
    kept: Fork | None = None
    waiting: set[Fork] = field(default_factory=set)
    children: dict[Fork, int] = field(default_factory=dict)
    refused: bool = False


class Peers:
    """What both sides of a node's reference counting share.

    That is: which nodes live, the sequence numbers of messages, what is to be done, and the story.
    """

    def __init__(self, node: int, nodes: Iterable[int]) -> None:
        self.node = node
        self.nodes = frozenset(nodes)
        self.lost: set[int] = set()
        self.story: deque[tuple[Any, ...]] = deque(maxlen=_STORY)
        self._actions: list[Action] = []
        self._sent: Counter[int] = Counter()
        self._received: defaultdict[int, Window] = defaultdict(Window)

    def others(self) -> Iterable[int]:
        """The other nodes that live."""
        return (n for n in sorted(self.nodes - self.lost) if n != self.node)

    def met(self, node: int) -> None:
        """There is a new node; any thread."""
        self.nodes |= {node}

    def act(self, action: Action) -> None:
        """Ask for something to be done."""
        self._actions.append(action)

    def send(self, to: int, what: str, subject: tuple[int, ...]) -> None:
        """Ask for a message to be sent, unless its receiver has died."""
        if to not in self.lost:
            self._sent[to] += 1
            self._actions.append(Send(to, (what, self._sent[to], subject)))

    def take_actions(self) -> list[Action]:
        """All that is to be done, in order; the caller does it."""
        actions, self._actions = self._actions, []
        return actions

    def first(self, sender: int, number: int) -> bool:
        """Whether a message is to be read: it is no duplicate, and not from the dead."""
        return sender not in self.lost and self._received[sender].first(number)

    def mark_dead(self, node: int) -> None:
        """Forget the sequence numbers between this node and one that has died."""
        self.lost.add(node)
        self._sent.pop(node, None)
        self._received.pop(node, None)

    def late(self) -> int:
        """How many messages have overtaken others that are still to come."""
        return sum(len(window.above) for window in self._received.values())

    def note(self, ref: Ref, what: str, who: int) -> None:
        """Add to the story."""
        self.story.append((ref, what, who))


class Keepalive:
    """Holds the references that a message has brought, for as long as the object lives."""

    __slots__ = ("__weakref__",)
