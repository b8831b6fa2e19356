"""Who runs, who stands and who goes on, without threads: events in, actions out."""

import random
from typing import Any

import pytest

from discolab.debugger.lockstep import (
    ABORTED,
    BLOCKED,
    DONE,
    HELD,
    PAUSED,
    RUNNING,
    Action,
    Blocking,
    Lockstep,
)
from discolab.debugger.records import Arrival, Spot


def at(line: int, reason: str = "step", *, loops: Any = (), fired: bool = True) -> Arrival:
    return Arrival((Spot("f.py", line, "f", loops),), reason, fired=fired)


def all_arrive(steps: Lockstep, line: int, ranks: Any = None) -> None:
    for rank in ranks if ranks is not None else steps.ranks(RUNNING):
        steps.arrive(rank, at(line))
        steps.validate()


def test_the_last_to_arrive_makes_it_a_stop():
    steps = Lockstep(range(3), 3)
    assert steps.arrive(0, at(1)) == []
    assert not steps.settled
    assert steps.arrive(1, at(1)) == []
    assert steps.state[0] is HELD
    steps.arrive(2, at(1))
    assert steps.settled
    assert steps.paused
    assert steps.groups() == ((0, 1, 2),)
    assert steps.stops == 1
    assert steps.stopped == (0, 1, 2)


def test_a_break_point_that_fires_nowhere_lets_all_go_on_together():
    steps = Lockstep(range(2), 2)
    assert steps.arrive(0, at(5, "break", fired=False)) == []
    actions = steps.arrive(1, at(5, "break", fired=False))
    assert sorted(actions) == [Action("go", 0, ("same", None)), Action("go", 1, ("same", None))]
    assert steps.ranks(RUNNING) == [0, 1]
    assert steps.stops == 0


def test_a_break_point_that_fires_on_one_worker_stops_all_of_them_there():
    steps = Lockstep(range(2), 2)
    steps.arrive(0, at(5, "break", fired=False))
    steps.arrive(1, at(5, "break"))
    assert steps.groups() == ((0, 1),)


def test_continue_n_passes_break_points():
    steps = Lockstep(range(2), 2)
    all_arrive(steps, 1)
    steps.command("continue", 1)
    for rank in (0, 1):
        steps.arrive(rank, at(5, "break"))
    assert not steps.settled, "the first one was passed"
    for rank in (0, 1):
        steps.arrive(rank, at(5, "break"))
    assert steps.paused


def test_workers_that_have_parted_in_a_branch_meet_after_it():
    steps = Lockstep(range(4), 4)
    for rank in (0, 1):
        steps.arrive(rank, at(3))
    for rank in (2, 3):
        steps.arrive(rank, at(5))
    assert steps.groups() == ((0, 1), (2, 3))
    moved = steps.command("next")
    assert [action.rank for action in moved] == [0, 1]
    for rank in (0, 1):
        steps.arrive(rank, at(6))
    assert steps.groups() == ((2, 3), (0, 1))
    steps.command("next")
    for rank in (2, 3):
        steps.arrive(rank, at(6))
    assert steps.groups() == ((0, 1, 2, 3),)


def test_of_two_workers_in_a_loop_the_one_with_fewer_trips_goes_first():
    steps = Lockstep(range(2), 2)
    steps.arrive(0, at(2, loops=((2, 5, 3),)))
    steps.arrive(1, at(4, loops=((2, 5, 2),)))
    assert steps.groups() == ((1,), (0,))


def test_who_has_left_a_loop_early_waits_for_those_in_it():
    steps = Lockstep(range(2), 2)
    steps.arrive(0, at(6))
    steps.arrive(1, at(3, loops=((2, 5, 7),)))
    assert steps.groups() == ((1,), (0,))


def test_a_caller_is_behind_what_it_calls():
    steps = Lockstep(range(2), 2)
    outer = Spot("f.py", 4, "f")
    steps.arrive(0, Arrival((outer, Spot("f.py", 1, "g")), "step"))
    steps.arrive(1, Arrival((outer,), "step"))
    assert steps.groups() == ((1,), (0,))


def test_who_waits_for_one_that_stands_is_blocked_and_never_called_a_deadlock():
    steps = Lockstep(range(3), 3)
    steps.arrive(2, at(7))
    actions = steps.blocked({0: Blocking((2,), words="waits for 2"), 1: Blocking((0,))})
    assert actions == []
    assert steps.state == {0: BLOCKED, 1: BLOCKED, 2: PAUSED}
    assert steps.waits[0].words == "waits for 2"
    steps.validate()


def test_who_waits_for_one_that_runs_is_not():
    steps = Lockstep(range(3), 3)
    steps.arrive(2, at(7))
    steps.blocked({0: Blocking((1,))})
    assert steps.state[0] is RUNNING
    assert not steps.settled


def test_of_several_senders_all_must_stand():
    steps = Lockstep(range(3), 3)
    steps.arrive(2, at(7))
    steps.blocked({0: Blocking((1, 2), any_of=True)})
    assert steps.state[0] is RUNNING
    steps.arrive(1, at(7))
    steps.blocked({0: Blocking((1, 2), any_of=True)})
    assert steps.state[0] is BLOCKED
    assert steps.paused


def test_who_comes_free_of_a_collective_stops_at_its_next_line():
    steps = Lockstep(range(2), 2)
    steps.arrive(1, at(7))
    steps.blocked({0: Blocking((1,))})
    assert Action("pause", 0) in steps.command("next")
    assert steps.state[0] is RUNNING
    all_arrive(steps, 8)
    assert steps.groups() == ((0, 1),)


def test_chosen_ranks_go_on_alone():
    steps = Lockstep(range(3), 3)
    all_arrive(steps, 1)
    assert [a.rank for a in steps.command("next", ranks=[1])] == [1]
    steps.arrive(1, at(2))
    assert steps.groups() == ((0, 2), (1,))


def test_a_failure_freezes_the_others_where_they_are():
    steps = Lockstep(range(3), 3)
    assert steps.arrive(1, at(4, "raised")) == [Action("pause", 0), Action("pause", 2)]


def test_who_is_no_part_of_the_program_is_let_go():
    steps = Lockstep([0], 2)
    assert steps.arrive(1, at(4)) == [Action("go", 1, ("continue", None))]


def test_all_ends_are_known_and_the_first_stays():
    steps = Lockstep(range(2), 2)
    all_arrive(steps, 1)
    steps.end(0, ABORTED)
    steps.end(0, DONE)
    assert not steps.finished
    steps.end(1, DONE)
    assert steps.finished
    assert steps.ends == {0: "", 1: ""}
    assert steps.state[0] is ABORTED
    steps.validate()


def test_the_story_of_a_worker_replays_what_happened_to_it():
    steps = Lockstep(range(2), 2)
    all_arrive(steps, 1)
    steps.command("next")
    assert [entry[0] for entry in steps.story(1)] == ["arrive", "stop", "go"]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_order_of_events_it_always_comes_to_a_stop_or_an_end(seed):
    """A schedule made at random: each worker has lines to come to and meetings to wait in."""
    choose = random.Random(seed)
    size = choose.randint(1, 4)
    line = [0] * size
    meeting: dict[int, int] = {}  # worker -> the number of the meeting it waits in
    steps = Lockstep(range(size), size)
    for _ in range(400):
        if steps.finished:
            return
        if steps.paused:
            mode = choose.choice(["next", "step", "out", "continue"])
            some = choose.sample(steps.ranks(PAUSED), 1) if choose.random() < 0.2 else None
            steps.command(mode, None, some)
            steps.validate()
        free = [rank for rank in steps.ranks(RUNNING) if rank not in meeting]
        if not free:
            waiting = {
                rank: Blocking(tuple(r for r in range(size) if meeting.get(r, line[r]) < number))
                for rank, number in meeting.items()
            }
            steps.blocked({r: w for r, w in waiting.items() if w.whom})
            steps.validate()
            assert steps.settled or set(steps.ranks(RUNNING)) - set(meeting), steps.story()
            continue
        rank = choose.choice(free)
        line[rank] += 1
        if line[rank] > 12:
            steps.end(rank, DONE)
        elif line[rank] % 5 == 0:
            meeting[rank] = line[rank]
            if all(meeting.get(r, line[r]) >= line[rank] for r in range(size)):
                for one in [r for r, number in meeting.items() if number == line[rank]]:
                    del meeting[one]
        else:
            fired = choose.random() < 0.7
            steps.arrive(rank, at(line[rank], "break" if not fired else "step", fired=fired))
        steps.validate()
    raise AssertionError("it never ended")
