"""Matching of collectives over workers: pure."""

from __future__ import annotations

from discolab.trace import Event
from discolab.trace.rounds import Matcher, match, waits_of


def call(begin: int, ordinal: int = 1, number: int = 0, **more: object) -> Event:
    facts = {"group": (0, 1), "end": begin + 5, "state": "done", **more}
    return Event(0, "collective", "all_reduce", begin, ordinal=ordinal, number=number, **facts)  # type: ignore[arg-type]


def test_the_last_to_come_is_the_slowest() -> None:
    (found,) = match([(1, call(70)), (0, call(30))])
    assert found.slowest == 1
    assert found.waits == {0: 40, 1: 0}
    assert found.waited == 40
    assert found.complete
    assert not found.failed


def test_what_differs_in_command_number_group_or_tag_is_apart() -> None:
    one = call(1)
    others = [call(2, ordinal=2), call(3, number=1), call(4, group=(1, 2)), call(5, tag="x")]
    found = match([(0, one), *((1, other) for other in others)])
    assert [r.complete for r in found] == [False] * 5
    assert [min(r.begins.values()) for r in found] == [1, 2, 3, 4, 5]
    assert all(r.slowest is None and not r.waits for r in found)


def test_messages_and_commands_are_no_rounds() -> None:
    assert match([(0, call(1, number=-1)), (0, Event(1, "command", "f", 1, 2, "done"))]) == ()


def test_a_failed_member_makes_a_failed_round() -> None:
    (found,) = match([(0, call(1)), (1, call(2, state="failed"))])
    assert found.failed


def test_a_matcher_says_when_all_have_come() -> None:
    matcher = Matcher()
    assert matcher.add(0, call(10, end=0, state="waiting")) is None
    members = matcher.add(1, call(25))
    assert members is not None
    assert waits_of(members) == {0: 15, 1: 0}
    assert matcher.add(0, call(10)) is not None  # its later state
    assert matcher.rounds()[0].ends == {0: 15, 1: 30}
    matcher.validate()


def test_a_matcher_forgets_the_oldest() -> None:
    matcher = Matcher(most=2)
    for ordinal in range(5):
        matcher.add(0, call(ordinal, ordinal=ordinal))
        matcher.validate()
    assert [r.ordinal for r in matcher.rounds()] == [3, 4]


def test_a_group_of_one_waits_for_nobody() -> None:
    (found,) = match([(0, call(3, group=(0,)))])
    assert found.complete
    assert found.slowest is None


def test_who_waits_for_somebody_who_has_not_come_waits_until_now() -> None:
    (found,) = match([(0, call(10, end=0, state="waiting"))])
    assert (found.waited, found.goes_on, found.failed) == (0, True, False)
    assert found.waits_until(40) == {0: 30}
    assert found.waits_until(5) == {0: 0}  # never less than nothing
    (stopped,) = match([(0, call(10, end=25, state="stopped"))])
    assert stopped.waits_until(1000) == {0: 15}


def test_who_goes_on_at_once_has_not_waited() -> None:
    (found,) = match([(0, call(70)), (1, call(30, asynchronous=True))])
    assert (found.waits, found.waited, found.slowest) == ({0: 0, 1: 0}, 0, 0)


def test_who_was_stopped_before_the_last_came_waited_until_then() -> None:
    (found,) = match([(0, call(10, end=20, state="stopped")), (1, call(90))])
    assert found.waits == {0: 10, 1: 0}
