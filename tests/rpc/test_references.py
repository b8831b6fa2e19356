"""Reference counting, step by step: the races that it is there for, and what it says of itself."""

import itertools
from collections.abc import Sequence

import pytest

from discolab.rpc.refs.counting import References
from discolab.rpc.refs.records import (
    Action,
    Fork,
    Message,
    Ref,
    Send,
    Window,
    ref_of,
)


class Net:
    """Some nodes; control messages come when and in which order the test says."""

    def __init__(self, num_nodes: int = 4) -> None:
        self.nodes = [References(node, range(num_nodes)) for node in range(num_nodes)]
        self.sent: list[tuple[int, int, Message]] = []
        self.done: list[tuple[int, str, Ref]] = []  # on which node, what but messages

    def act(self, node: int, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.sent.append((node, action.to, action.message))
            else:
                self.done.append((node, type(action).__name__, action.ref))

    def take(self, what: str, sender: int, to: int) -> Message:
        """A message that is on its way, for the test to deliver."""
        for letter in self.sent:
            if letter[:2] == (sender, to) and letter[2][0] == what:
                self.sent.remove(letter)
                return letter[2]
        raise AssertionError(f"no {what} from {sender} to {to}: {self.sent}")

    def give(self, message: Message, sender: int, to: int) -> None:
        self.act(to, self.nodes[to].received(message, sender))

    def deliver(self, what: str, sender: int, to: int) -> Message:
        message = self.take(what, sender, to)
        self.give(message, sender, to)
        return message

    def flow(self) -> None:
        """All messages come, the last first."""
        while self.sent:
            sender, to, message = self.sent.pop()
            self.give(message, sender, to)

    def arrive(self, fork: Fork, to: int) -> Ref:
        self.act(to, self.nodes[to].arrived(fork, fork[3]))
        return ref_of(fork)

    def release(self, ref: Ref, node: int) -> None:
        self.act(node, self.nodes[node].release(ref))

    def die(self, node: int, *, hears: Sequence[int]) -> None:
        """What is on its way to the node or from it is lost."""
        self.sent = [letter for letter in self.sent if node not in letter[:2]]
        for other in hears:
            self.act(other, self.nodes[other].lost(node))

    def freed(self, ref: Ref) -> bool:
        return (ref[0], "Free", ref) in self.done

    def all_is_gone(self, *living: int) -> None:
        assert not self.sent
        for node in living or range(len(self.nodes)):
            self.nodes[node].validate()
            assert self.nodes[node].is_empty(), self.nodes[node].refs()


def made(net: Net, creator: int, owner: int) -> Ref:
    """A value on `owner` that `creator` has had made, and all knows of it."""
    fork = net.nodes[creator].create(owner)
    net.act(owner, net.nodes[owner].adopted(fork, creator))
    net.flow()
    return ref_of(fork)


def sent_on(net: Net, ref: Ref, way: Sequence[int]) -> None:
    """The reference goes from node to node and is let go of by each but the last."""
    for node, to in itertools.pairwise(way):
        net.arrive(net.nodes[node].fork(ref, to), to)
        net.release(ref, node)


def test_a_value_at_home_is_freed_with_its_last_handle() -> None:
    net = Net()
    ref = net.nodes[1].own()
    net.nodes[1].hold(ref)
    net.release(ref, 1)
    assert not net.freed(ref)
    net.release(ref, 1)
    assert net.freed(ref)
    net.all_is_gone()


def test_a_creator_is_confirmed_and_deletes_its_fork() -> None:
    net = Net()
    fork = net.nodes[0].create(2)
    ref = ref_of(fork)
    assert not net.nodes[0].confirmed(ref)
    net.act(2, net.nodes[2].adopted(fork, 0))
    assert net.nodes[2].confirmed(ref)
    assert net.nodes[2].holders(ref) == [0]
    net.flow()
    assert net.nodes[0].confirmed(ref)
    assert net.done == [(0, "Confirmed", ref)]
    net.release(ref, 0)
    net.flow()
    assert net.freed(ref)
    net.all_is_gone()


def test_a_creator_that_lets_go_before_it_is_confirmed_deletes_afterwards() -> None:
    net = Net()
    fork = net.nodes[0].create(2)
    net.release(ref_of(fork), 0)
    assert not net.sent  # the delete would overtake the request
    net.act(2, net.nodes[2].adopted(fork, 0))
    net.flow()
    assert net.freed(ref_of(fork))
    assert (0, "Confirmed", ref_of(fork)) not in net.done  # nobody there asks any more
    net.all_is_gone()


def test_a_parent_stays_until_the_owner_knows_its_child() -> None:
    net = Net()
    ref = made(net, 0, 1)
    sent_on(net, ref, (0, 2))
    assert [what for _, _, (what, *_) in net.sent] == ["register"]  # and no delete of node 0
    assert net.nodes[1].holders(ref) == [0]
    net.deliver("register", 2, 1)
    assert net.nodes[1].holders(ref) == [0, 2]
    net.flow()
    assert net.nodes[1].holders(ref) == [2]
    net.release(ref, 2)
    net.flow()
    assert net.freed(ref)
    net.all_is_gone()


def test_a_reference_goes_around_before_the_owner_hears_of_anybody() -> None:
    net = Net()
    fork = net.nodes[0].create(1)
    ref = ref_of(fork)
    sent_on(net, ref, (0, 2, 3, 0, 2))
    net.flow()  # all of it overtakes the request
    assert not net.nodes[2].confirmed(ref)
    net.act(1, net.nodes[1].adopted(fork, 0))
    net.flow()
    assert net.nodes[2].confirmed(ref)
    assert net.nodes[1].holders(ref) == [2]
    net.release(ref, 2)
    net.flow()
    assert net.freed(ref)
    net.all_is_gone()


def test_a_reference_that_comes_home_is_held_there() -> None:
    net = Net()
    ref = made(net, 0, 1)
    sent_on(net, ref, (0, 1))
    net.flow()
    assert net.nodes[1].holders(ref) == [1]
    assert net.nodes[1].handles(ref) == 1
    net.release(ref, 1)
    assert net.freed(ref)
    net.all_is_gone()


def test_a_fork_from_the_owner_is_confirmed_on_arrival() -> None:
    net = Net()
    ref = net.nodes[0].own()
    fork = net.nodes[0].fork(ref, 3)
    net.release(ref, 0)
    assert net.nodes[0].holders(ref) == [3]  # already: it is on its way
    net.arrive(fork, 3)
    assert net.nodes[3].confirmed(ref)
    assert not net.sent
    net.release(ref, 3)
    net.flow()
    assert net.freed(ref)
    net.all_is_gone()


def test_a_node_that_is_known_needs_no_second_fork() -> None:
    net = Net()
    ref = net.nodes[0].own()
    for _ in range(100):
        net.arrive(net.nodes[0].fork(ref, 3), 3)
    net.arrive(net.nodes[0].fork(ref, 2), 2)
    net.arrive(net.nodes[2].fork(ref, 3), 3)
    assert {letter[2][0] for letter in net.sent} == {"delete", "settled"}
    net.flow()
    assert net.nodes[3].handles(ref) == 101
    assert net.nodes[0].holders(ref) == [0, 2, 3]
    net.release(ref, 0)
    net.release(ref, 2)
    for left in reversed(range(101)):
        net.release(ref, 3)
        assert net.nodes[3].handles(ref) == left
    net.flow()
    assert net.freed(ref)
    net.all_is_gone()


def test_a_late_copy_of_a_registration_does_not_bring_a_reference_back() -> None:
    net = Net()
    ref = made(net, 0, 1)
    sent_on(net, ref, (0, 2))
    copy = net.deliver("register", 2, 1)
    net.flow()
    net.release(ref, 2)
    net.flow()
    assert net.freed(ref)
    net.give(copy, 2, 1)
    assert not net.sent
    net.all_is_gone()


def test_a_fork_to_the_own_node_is_held_on_its_way() -> None:
    net = Net()
    ref = made(net, 0, 1)
    fork, never_sent = (net.nodes[0].fork(ref, 0) for _ in range(2))
    net.release(ref, 0)
    net.act(0, net.nodes[0].dropped(never_sent))
    assert not net.sent
    net.arrive(fork, 0)
    net.release(ref, 0)
    net.flow()
    assert net.freed(ref)
    net.all_is_gone()


def test_a_fork_that_is_never_sent_is_undone() -> None:
    net = Net()
    mine, other = net.nodes[0].own(), made(net, 0, 1)
    forks = [net.nodes[0].fork(ref, 2) for ref in (mine, other)]
    for ref in (mine, other):
        net.release(ref, 0)
    net.flow()
    assert not net.freed(mine)
    assert not net.freed(other)
    for fork in forks:
        net.act(0, net.nodes[0].dropped(fork))
    net.flow()
    assert net.freed(mine)
    assert net.freed(other)
    net.all_is_gone()


@pytest.mark.parametrize("register_first", [True, False])
def test_forks_of_a_value_that_is_never_asked_for_are_refused(*, register_first: bool) -> None:
    net = Net()
    fork = net.nodes[0].create(1)
    ref = ref_of(fork)
    net.arrive(net.nodes[0].fork(ref, 2), 2)
    if register_first:
        net.deliver("register", 2, 1)
    net.act(0, net.nodes[0].dropped(fork))
    net.deliver("withdrawn", 0, 1)
    net.flow()
    assert net.nodes[0].refused(ref)
    assert net.nodes[2].refused(ref)
    assert (2, "Refused", ref) in net.done
    net.release(ref, 0)
    net.release(ref, 2)
    net.flow()
    assert not net.freed(ref)
    net.all_is_gone()


def test_the_owner_knows_which_values_may_still_come() -> None:
    net = Net()
    owner = net.nodes[1]
    fork = net.nodes[0].create(1)
    assert not owner.refused(ref_of(fork))
    net.act(1, owner.adopted(fork, 0))
    assert not owner.refused(ref_of(fork))
    net.release(ref_of(fork), 0)
    net.flow()
    assert owner.refused(ref_of(fork))  # it has come and gone
    assert not owner.refused((1, 0, 2))  # the next one
    assert owner.refused((1, 1, 1))  # it has made none itself
    net.die(3, hears=(1,))
    assert owner.refused((1, 3, 1))


# -- deaths ----------------------------------------------------------------------------------


def test_what_only_the_dead_held_is_freed_when_all_have_answered() -> None:
    net = Net()
    ref = net.nodes[0].own()
    sent_on(net, ref, (0, 3))
    net.die(3, hears=(0, 1))
    net.flow()
    assert not net.freed(ref)  # node 2 may have something from the dead yet
    net.act(2, net.nodes[2].lost(3))
    net.flow()
    assert net.freed(ref)
    net.all_is_gone(0, 1, 2)


def test_a_fork_on_its_way_from_the_dead_keeps_the_value() -> None:
    net = Net()
    ref = net.nodes[0].own()
    net.arrive(net.nodes[0].fork(ref, 3), 3)
    net.release(ref, 0)
    fork = net.nodes[3].fork(ref, 2)
    net.die(3, hears=(0, 1))
    net.flow()
    net.arrive(fork, 2)
    register = net.take("register", 2, 0)
    net.act(2, net.nodes[2].lost(3))
    net.flow()
    assert not net.freed(ref)  # node 2 does not answer while the owner doesn't know of the fork
    net.give(register, 2, 0)
    net.flow()
    assert net.nodes[0].holders(ref) == [2]
    net.release(ref, 2)
    net.flow()
    assert net.freed(ref)
    net.all_is_gone(0, 1, 2)


def test_the_parent_of_the_dead_stays_for_its_grandchildren() -> None:
    net = Net()
    ref = made(net, 1, 0)
    net.arrive(net.nodes[1].fork(ref, 3), 3)
    net.release(ref, 1)
    fork = net.nodes[3].fork(ref, 2)
    net.die(3, hears=(0, 1))  # and its registration is lost
    net.flow()
    assert net.nodes[0].holders(ref) == [1]
    net.arrive(fork, 2)
    net.act(2, net.nodes[2].lost(3))
    net.flow()
    assert net.nodes[0].holders(ref) == [2]
    net.release(ref, 2)
    net.flow()
    assert net.freed(ref)
    net.all_is_gone(0, 1, 2)


def test_two_deaths_in_a_row_keep_what_both_have_passed_on() -> None:
    net = Net()
    ref = net.nodes[0].own()
    net.arrive(net.nodes[0].fork(ref, 3), 3)
    net.release(ref, 0)
    net.arrive(net.nodes[3].fork(ref, 2), 2)
    fork = net.nodes[2].fork(ref, 1)
    net.die(3, hears=(0, 1))
    net.die(2, hears=(0,))  # before it has answered, and its registration is lost
    net.flow()
    assert not net.freed(ref)
    net.arrive(fork, 1)
    net.act(1, net.nodes[1].lost(2))
    net.flow()
    assert net.nodes[0].holders(ref) == [1]
    net.release(ref, 1)
    net.flow()
    assert net.freed(ref)
    net.all_is_gone(0, 1)


def test_a_request_that_is_lost_with_its_creator_is_refused_to_those_who_wait() -> None:
    net = Net()
    ref = ref_of(net.nodes[3].create(1))
    net.arrive(net.nodes[3].fork(ref, 0), 0)
    net.arrive(net.nodes[0].fork(ref, 2), 2)
    net.deliver("register", 0, 1)  # one before the owner hears of the death, one after
    net.die(3, hears=(0, 1, 2))
    net.flow()
    for node in (0, 2):
        assert net.nodes[node].refused(ref)
        assert not net.nodes[node].broken(ref)
        assert (node, "Refused", ref) in net.done
        net.release(ref, node)
    net.flow()
    assert not net.freed(ref)
    net.all_is_gone(0, 1, 2)


def test_when_the_owner_dies_its_references_are_broken() -> None:
    net = Net()
    ref = made(net, 0, 3)
    fork = net.nodes[0].fork(ref, 2)
    net.arrive(net.nodes[0].fork(ref, 1), 1)
    net.die(3, hears=(0, 1, 2))
    assert (0, "Broken", ref) in net.done
    assert (1, "Broken", ref) in net.done
    net.arrive(fork, 2)
    net.arrive(net.nodes[0].fork(ref, 1), 1)
    for node, times in ((0, 1), (1, 2), (2, 1)):
        assert net.nodes[node].broken(ref)
        assert not net.nodes[node].confirmed(ref)
        for _ in range(times):
            net.release(ref, node)
    assert not any(3 in letter[:2] for letter in net.sent)
    net.flow()
    net.all_is_gone(0, 1, 2)


def test_what_is_sent_to_the_dead_is_not_waited_for() -> None:
    net = Net()
    mine, other = net.nodes[0].own(), made(net, 0, 1)
    net.die(3, hears=(0, 1, 2))
    net.flow()
    forks = [net.nodes[0].fork(ref, 3) for ref in (mine, other)]
    for ref in (mine, other):
        net.release(ref, 0)
    net.flow()
    assert net.freed(mine)
    assert net.freed(other)
    for fork in forks:  # whoever could not send it may say so
        assert not net.nodes[0].dropped(fork)
    net.all_is_gone(0, 1, 2)


# -- what it says ----------------------------------------------------------------------------


def test_the_story_of_a_reference() -> None:
    net = Net()
    ref = made(net, 0, 1)
    sent_on(net, ref, (0, 2))
    net.flow()
    assert net.nodes[0].story(ref) == [
        ("create", 0),
        ("accepted", 1),
        ("confirmed", 0),
        ("fork", 2),
        ("settled", 1),
        ("let go", 0),
    ]
    assert net.nodes[1].story(ref) == [("adopted from", 0), ("register", 2), ("delete", 0)]
    assert net.nodes[2].story(ref)[0] == ("arrived from", 0)


def test_misuse_is_said_and_changes_nothing() -> None:
    net = Net()
    ref = made(net, 0, 1)
    net.release(ref, 0)
    with pytest.raises(ValueError, match=r"released more often than held on node 0.*let go 0"):
        net.nodes[0].release(ref)
    with pytest.raises(ValueError, match="can't send reference"):
        net.nodes[0].fork(ref, 2)
    with pytest.raises(ValueError, match="holds no reference"):
        net.nodes[0].hold(ref)
    with pytest.raises(ValueError, match="use own"):
        net.nodes[0].create(0)
    with pytest.raises(ValueError, match="no message of reference counting"):
        net.nodes[0].received(("nonsense", 99, (1,)), 1)
    with pytest.raises(ValueError, match="its own death"):
        net.nodes[0].lost(0)


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3, 4])))
def test_a_window_takes_each_number_once_and_keeps_none(order: tuple[int, ...]) -> None:
    window = Window()
    for number in order:
        assert number not in window
        assert window.first(number)
        assert not window.first(number)
        assert number in window
    assert window.low == 4
    assert not window.above
