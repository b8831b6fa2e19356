"""Which call of those that wait for a thread is served next."""

from dataclasses import dataclass

import pytest

from discolab.rpc.queues import DEEPEST, MOST_AT_DEPTH, Queues


@dataclass(eq=False)
class Task:
    depth: int
    name: str = ""


def filled(*depths: int) -> Queues[Task]:
    queues: Queues[Task] = Queues()
    for number, depth in enumerate(depths):
        queues.put(Task(depth, f"{number}"))
    return queues


def full(depth: int) -> tuple[Queues[Task], list[Task]]:
    """As many served at a depth as there may be."""
    queues = filled(*[depth] * MOST_AT_DEPTH)
    served = [queues.take() for _ in range(MOST_AT_DEPTH)]
    return queues, [task for task in served if task is not None]


def test_nothing_waits() -> None:
    queues = filled()
    assert queues.first() is None
    assert queues.take() is None
    assert queues.ready() == 0
    assert not queues


def test_the_deepest_first_and_in_order() -> None:
    queues = filled(0, 2, 1, 2, 0, DEEPEST)
    assert queues
    assert queues.ready() == 6
    first = queues.first()
    assert first is not None
    assert first.depth == DEEPEST
    taken = [queues.take() for _ in range(6)]
    assert [(task.depth, task.name) for task in taken if task] == [
        (DEEPEST, "5"), (2, "1"), (2, "3"), (1, "2"), (0, "0"), (0, "4"),
    ]  # fmt: skip
    assert taken[0] is first
    assert not queues
    assert queues.take() is None


def test_at_most_so_many_of_one_depth() -> None:
    queues, served = full(1)
    assert len(served) == MOST_AT_DEPTH
    queues.put(Task(1, "next"))
    assert queues.first() is None
    assert queues.take() is None
    assert queues.ready() == 0
    assert queues, "it waits"
    queues.done(served.pop())
    assert queues.ready() == 1
    task = queues.take()
    assert task is not None
    assert task.name == "next"


def test_a_full_depth_holds_up_no_other() -> None:
    queues, _ = full(1)
    for depth in (1, 0, 2):
        queues.put(Task(depth))
    assert queues.ready() == 2
    taken = [queues.take() for _ in range(2)]
    assert [task.depth for task in taken if task] == [2, 0]
    assert queues.take() is None


def test_only_so_many_are_ready() -> None:
    queues = filled(*[0] * (MOST_AT_DEPTH + 5), *[3] * 7)
    assert queues.ready() == MOST_AT_DEPTH + 7
    for _ in range(7 + 10):
        queues.take()
    assert queues.ready() == MOST_AT_DEPTH - 10


def test_one_that_parks_makes_room_until_it_goes_on() -> None:
    queues, served = full(0)
    parked = served[0]
    queues.put(Task(0, "more"))
    queues.done(parked)
    more = queues.take()
    assert more is not None
    queues.again(parked)  # there is no room for it: it is served all the same
    queues.put(Task(0, "last"))
    assert queues.ready() == 0, "never less than none"
    queues.done(more)
    assert queues.take() is None, "as many as there may be"
    queues.done(parked)
    last = queues.take()
    assert last is not None
    assert last.name == "last"


def test_what_is_done_leaves_nothing() -> None:
    queues, served = full(4)
    for task in served:
        queues.done(task)
    with pytest.raises(KeyError):  # it was not served
        queues.done(served[0])
    queues.put(Task(4))
    assert queues.ready() == 1


def test_one_that_is_withdrawn() -> None:
    queues = filled(1, 1, 0)
    wanted = Task(1, "withdrawn")
    queues.put(wanted)
    queues.withdraw(wanted)
    taken = [queues.take() for _ in range(3)]
    assert [task.name for task in taken if task] == ["0", "1", "2"]
    only = Task(7)
    queues.put(only)
    queues.withdraw(only)
    assert not queues
    assert queues.ready() == 0


def test_all_are_taken_off() -> None:
    queues = filled(0, 1, 0)
    served = queues.take()
    assert served is not None
    assert {task.name for task in queues.clear()} == {"0", "2"}
    assert not queues
    queues.done(served)  # what is served is served still
