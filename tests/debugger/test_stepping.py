"""Stepping through a program, all workers in lockstep."""

import gc
import threading
import time
import weakref

import pytest
import torch

from discolab import ArgumentError, SessionError, WaitTimeoutError, WorkerError
from discolab.debugger import DebuggerError
from discolab.runtime.worker import current_worker

from .conftest import lines_of, load, states_of

STRAIGHT = """\
    import torch
    from discolab import ccl, current_worker
    def program():
        rank = current_worker().rank
        x = torch.full((2,), float(rank))
        y = x * 2
        s = ccl.all_reduce(y)
        return s.sum().item()
"""

BRANCH = """\
    from discolab import ccl, current_worker
    def program():
        rank = current_worker().rank
        if rank < 2:
            a = 1
            a += 1
        else:
            a = 10
        b = a * 2
        return b
"""

LOOP = """\
    from discolab import current_worker
    def program(n=3):
        rank = current_worker().rank
        total = 0
        for i in range(n):
            total += i
            total += rank
        return total
"""

PARTED = """\
    import torch
    from discolab import ccl, current_worker
    def program():
        rank = current_worker().rank
        x = torch.ones(4)
        if rank == 2:
            x = x * 2
            x = x + 1
        x = ccl.all_reduce(x)
        return x.sum().item()
"""


def test_a_program_stops_at_its_first_line_on_all_workers(dbg):
    stop = dbg.run(load(STRAIGHT))
    assert lines_of(stop) == dict.fromkeys(range(4), 4)
    assert (stop.groups == ((0, 1, 2, 3),) and "line" in stop.reason) or "4" in stop.reason


def test_next_takes_all_of_them_through_a_collective(dbg):
    stop = dbg.run(load(STRAIGHT))
    seen = [4]
    while not stop.finished:
        stop = dbg.next()
        seen.append(lines_of(stop)[0])
    assert seen == [4, 5, 6, 7, 8, None]
    assert dbg.program.result().debug_get_from_all() == [24.0] * 4


def test_workers_that_part_are_groups_and_meet_again(dbg):
    stop = dbg.run(load(BRANCH))
    while len(stop.groups) < 2:
        stop = dbg.next()
    assert stop.groups == ((0, 1), (2, 3))
    assert lines_of(stop) == {0: 5, 1: 5, 2: 8, 3: 8}
    while len(stop.groups) > 1:
        stop = dbg.next()
    assert lines_of(stop) == dict.fromkeys(range(4), 9)


def test_workers_with_other_trip_counts_meet_after_the_loop(dbg):
    source = LOOP.replace("range(n)", "range(rank)")
    stop = dbg.run(load(source))
    for _ in range(60):
        if lines_of(stop) == dict.fromkeys(range(4), 8):
            return
        stop = dbg.next()
    raise AssertionError(stop)


def test_who_waits_in_a_collective_is_shown_with_for_whom(dbg):
    dbg.run(load(PARTED), breaks=["7"])
    stop = dbg.stop
    assert states_of(stop) == ["collective", "collective", "paused", "collective"]
    words = stop.workers[0].words
    assert "all_reduce" in words
    assert "worker 2 (paused)" in words
    assert "deadlock" not in repr(stop)
    stop = dbg.next()
    assert lines_of(stop)[2] == 8
    stop = dbg.next()
    assert lines_of(stop)[2] == 9
    stop = dbg.next()
    assert stop.groups == ((0, 1, 2, 3),), "those who came free stop at their next line"
    assert dbg.continue_().finished
    assert dbg.program.result().debug_get_from_remote(0) == 4 * 3 + 3 * 4


def test_who_waits_in_a_collective_is_seen_after_others_have_left_the_program(dbg):
    left = "x = torch.ones(4)\n        if rank > 2:\n            return None\n"
    source = PARTED.replace("x = torch.ones(4)\n", left).replace("(x)\n", "(x, group=[0, 1, 2])\n")
    dbg.run(load(source), breaks=["9"])
    stop = dbg.next()
    assert states_of(stop) == ["collective", "collective", "paused", "done"]
    stop = dbg.next()
    assert (lines_of(stop)[2], states_of(stop)[0]) == (11, "collective")
    assert dbg.continue_().finished


def test_who_was_blocked_in_a_step_goes_on_with_the_others(dbg):
    dbg.run(load(PARTED), breaks=["6"])
    dbg.next(ranks=[0, 1, 3])
    stop = dbg.next(ranks=[0, 1, 3])
    assert states_of(stop) == ["collective", "collective", "paused", "collective"]
    assert dbg.continue_().finished


def test_a_conditional_break_point_gathers_all_workers(dbg):
    stop = dbg.run(load(LOOP), breaks=["6 if rank == 1 and i == 2"])
    assert lines_of(stop) == dict.fromkeys(range(4), 6)
    assert dbg.eval("i").values[3][1]["repr"] == "2" or "2" in repr(dbg.eval("i"))
    assert dbg.continue_().finished


def test_a_condition_that_fails_stops_there_and_shows_its_error(dbg):
    stop = dbg.run(load(LOOP), breaks=["6 if nosuch > 1"])
    assert "NameError" in stop.workers[0].error
    dbg.clear()
    assert dbg.continue_().finished
    assert dbg.program.result().debug_get_from_all() == [3, 6, 9, 12]


def test_continue_n_until_and_out(dbg):
    stop = dbg.run(load(LOOP), breaks=["6"])
    stop = dbg.continue_(2)
    assert "2" in repr(dbg.eval("i"))
    dbg.clear()
    stop = dbg.until(8)
    assert lines_of(stop) == dict.fromkeys(range(4), 8)
    assert dbg.out().finished


def test_step_goes_into_functions_and_next_past_them(dbg):
    source = """\
        def double(x):
            y = x + x
            return y
        def program():
            a = 1
            a = double(a)
            return a
    """
    dbg.run(load(source))
    assert lines_of(dbg.next())[0] == 6
    stop = dbg.step()
    assert [s.function for s in stop.workers[0].stack] == ["program", "double"]
    assert lines_of(dbg.out())[0] == 7
    assert dbg.continue_().finished


def test_chosen_ranks_go_on_alone(dbg):
    dbg.run(load(LOOP))
    stop = dbg.next(ranks="1,3")
    assert lines_of(stop) == {0: 3, 1: 4, 2: 3, 3: 4}


def test_variables_side_by_side_and_what_has_changed(dbg):
    dbg.run(load(LOOP), breaks=["7"])
    first = dbg.where()
    assert list(first.workers[0].variables) == ["n", "rank", "total", "i"] or set(
        first.workers[0].variables
    ) == {"n", "rank", "total", "i"}
    dbg.continue_()
    second = dbg.where()
    assert second.workers[1].changed == {"total", "i"}
    assert dbg.where().workers[1].changed == {"total", "i"}, "a second look tells the same"


NAN = """
import torch

def program():
    lost, number = torch.tensor([1.0, float("nan")]), float("nan")
    pair = [torch.full((3,), float("nan")), 1]
    n = 0
    n = 1
    return n
"""


def test_a_nan_that_stays_has_not_changed(dbg):
    dbg.run(load(NAN), breaks=["8"])
    dbg.where()
    dbg.next()
    assert dbg.where().workers[0].changed == {"n"}


def test_a_variable_can_be_set_on_some_workers(dbg):
    dbg.run(load(LOOP), breaks=["8"])
    dbg.set("total", "total + 100", ranks=[2])
    assert dbg.continue_().finished
    assert dbg.program.result().debug_get_from_all() == [3, 6, 109, 12]


def test_an_evaluation_that_raises_or_would_meet_the_others_is_an_error_in_its_place(dbg):
    dbg.run(load(STRAIGHT), breaks=["7"])
    failed = dbg.eval("1 / rank")
    assert list(failed.errors) == [0]
    assert "ZeroDivisionError" in failed.errors[0]
    met = dbg.eval("ccl.all_reduce(y)")
    assert len(met.errors) == 4
    assert "other workers" in met.errors[0]
    assert dbg.continue_().finished
    assert dbg.program.result().debug_get_from_remote(1) == 24.0


def test_an_evaluation_without_end_is_stopped(dbg):
    dbg.run(load(LOOP))
    found = dbg.eval("[0 for _ in iter(int, 1)]", ranks=[0], timeout=0.3)
    assert "stopped" in found.errors[0]
    assert "1" in repr(dbg.eval("1", ranks=[0])), "the worker answers again"
    assert dbg.continue_().finished


def test_who_is_late_with_a_value_does_not_cost_the_others_theirs(dbg):
    dbg.run(load(LOOP))
    found = dbg.eval("[0 for _ in iter(int, 1)] if rank == 0 else rank", timeout=0.5)
    assert sorted(found.values) == [0, 1, 2, 3]
    assert list(found.errors) == [0]
    assert [found.values[rank][1]["repr"] for rank in (1, 2, 3)] == ["1", "2", "3"]
    assert dbg.continue_().finished


def test_breakpoint_in_a_program_that_nobody_steps(dbg, sess):
    source = """\
        from discolab.debugger.tracer import stop_here
        def program():
            a = 1
            stop_here("breakpoint()")
            a = 2
            return a
    """
    ref = sess.call_packed(load(source))
    while not dbg.is_active:
        time.sleep(0.001)
    stop = dbg.wait()
    assert stop.groups == ((0, 1, 2, 3),)
    assert lines_of(dbg.next())[0] in (5, 6)
    assert dbg.continue_().finished
    assert ref.debug_get_from_all() == [2] * 4


def test_abort_lets_go_of_everything(dbg, sess):
    source = """\
        import torch, weakref
        def program(book):
            kept = torch.ones(1000)
            book.append(weakref.ref(kept))
            del book
            x = 1
            return x
    """
    book: list[weakref.ref[torch.Tensor]] = []
    dbg.start(load(source), _Holder(book), step=False, breaks=["6"])
    assert dbg.wait().groups
    assert len(book) == 4
    assert all(ref() is not None for ref in book)
    assert dbg.abort() == []
    dbg.program = None
    gc.collect()
    assert [ref() for ref in book] == [None] * 4
    assert not dbg.is_active
    assert sess.call_packed(_rank).debug_get_from_all() == [0, 1, 2, 3]


class _Holder:
    """A list that all workers of the process share."""

    def __init__(self, items):
        self.items = items

    def __call__(self):
        return self.items

    def append(self, item):
        self.items.append(item)


def _rank() -> int:
    return current_worker().rank


def test_while_it_is_paused_other_calls_are_refused_not_hung(dbg, sess):
    dbg.run(load(LOOP))
    with pytest.raises(SessionError, match=r"paused at program.py:3.*%disco_continue"):
        sess.call_packed(_rank).debug_get_from_all()
    with pytest.raises(DebuggerError, match="paused"):
        dbg.run(load(LOOP))
    assert dbg.continue_().finished


def test_without_a_program_everything_says_so(dbg, sess):
    for ask in (dbg.step, dbg.next, dbg.continue_, dbg.pause, lambda: dbg.eval("1")):
        with pytest.raises(DebuggerError, match="%%disco --step"):
            ask()


def test_bad_lines_and_conditions_are_refused_and_nothing_begins(dbg):
    for text, words in (("99", "99"), ("6 if (", "condition"), ("six", "six")):
        with pytest.raises(ArgumentError, match=words):
            dbg.run(load(LOOP), breaks=[text])
    assert not dbg.is_active


def test_an_error_ends_the_program_and_is_told_as_ever(dbg):
    source = LOOP.replace("return total", "return 1 // rank")
    stop = dbg.run(load(source), breaks=["8"])
    stop = dbg.next()
    assert stop.finished
    assert "ZeroDivisionError" in stop.workers[0].error
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        dbg.program.result()


def test_a_failed_worker_can_be_looked_at_where_it_failed(dbg):
    source = PARTED.replace("x = x + 1", "x = x / 0 / nosuch")
    stop = dbg.run(load(source), step=False, pm=True)
    assert states_of(stop)[2] == "paused"
    assert set(states_of(stop)) <= {"paused", "collective"}
    assert "NameError" in stop.workers[2].note
    assert "2" in repr(dbg.eval("rank"))
    with pytest.raises(DebuggerError, match="failed"):
        dbg.next()
    assert dbg.continue_().finished
    with pytest.raises(WorkerError, match="nosuch"):
        dbg.program.result()


def test_deadlines_of_collectives_stand_still_while_it_is_paused(dbg):
    source = PARTED.replace("ccl.all_reduce(x)", "ccl.all_reduce(x, timeout=0.3)")
    dbg.run(load(source), breaks=["7"])
    time.sleep(0.6)
    assert states_of(dbg.wait())[0] == "collective"
    assert dbg.continue_().finished
    assert dbg.program.result().debug_get_from_remote(0) == 24


def test_pause_stops_a_loop_where_it_is(dbg):
    source = """\
        import time
        def program():
            go = True
            while go:
                time.sleep(0.001)
            return go
    """
    dbg.start(load(source), step=False)
    with pytest.raises(WaitTimeoutError, match="it goes on"):
        dbg.wait(timeout=0.1)
    stop = dbg.pause()
    assert set(states_of(stop)) == {"paused"}
    dbg.set("go", "False")
    assert dbg.continue_().finished


def test_it_can_be_stepped_from_another_thread(dbg):
    dbg.run(load(LOOP))
    found = []
    thread = threading.Thread(target=lambda: found.append(dbg.next()))
    thread.start()
    thread.join(5)
    assert lines_of(found[0])[0] == 4


NAMED = """\
    import torch
    from torch import nn
    class Block(nn.Module):
        def forward(self, x):
            return x + 1
    def wrapped(f):
        return f
    @wrapped
    def helper(
        a,
        b=2,
    ):
        "With words."
        c = a + b
        return c
    def program():
        block = Block()
        x = block(torch.ones(2))
        return helper(1)
"""


@pytest.mark.parametrize(
    ("text", "line"), [("Block", 5), ("Block.forward", 5), ("helper if b == 2", 14)]
)
def test_a_function_can_be_named_as_a_break_point(dbg, text, line):
    stop = dbg.run(load(NAMED), breaks=[text])
    assert lines_of(stop) == dict.fromkeys(range(4), line)


def test_a_function_is_stopped_in_before_any_of_its_lines_has_run(dbg):
    """Of what it returns over several lines the first is the last to run."""
    source = """\
    ran = []
    def total(x):
        return (
            ran.append(1)
            or x + 1
        )
    def program():
        return total(2)
    """
    program = load(source)
    stop = dbg.run(program, breaks=["total"])
    assert stop.workers[0].stack[-1].function == "total"
    assert program.__globals__["ran"] == []


def test_a_name_is_looked_for_where_the_program_stands(dbg):
    dbg.run(load(NAMED), breaks=["18"])
    assert dbg.break_at("block").line == 5
    assert dbg.break_at("helper").line == 14
    assert lines_of(dbg.continue_())[0] == 5
    for text, words in (("nosuch", "nosuch"), ("torch.ones", "no lines of Python")):
        with pytest.raises(ArgumentError, match=words):
            dbg.break_at(text)


def test_a_name_that_no_worker_has_is_refused(dbg):
    with pytest.raises(ArgumentError, match="no function nosuch"):
        dbg.break_at("nosuch if True")


RETURNS = """\
    import torch
    from discolab import current_worker
    def inner(x):
        y = x + 1
        return y * 2
    def outer(x):
        return inner(x)
    def fails(x):
        raise ValueError(x)
    def numbers():
        yield 1
        yield 2
    def program():
        rank = current_worker().rank
        a = outer(torch.full((2,), float(rank // 2)))
        try:
            b = fails(1)
        except ValueError:
            b = 0
        for c in numbers():
            b += c
        return a
"""


def returned(stop):
    """Rank -> what functions have returned that were stepped out of."""
    return {
        worker.rank: {name: record for name, record in worker.variables.items() if name[0] == "("}
        for worker in stop.workers
    }


@pytest.mark.parametrize("how", ["out", "next", "step"])
def test_stepping_out_shows_what_the_function_returns(dbg, how):
    dbg.run(load(RETURNS), breaks=["program.py:5"])
    assert returned(dbg.where()) == {rank: {} for rank in range(4)}
    getattr(dbg, how)()
    stop = dbg.where()
    assert set(lines_of(stop).values()) == {16}
    for rank, values in returned(stop).items():
        assert set(values) == {"(return) inner", "(return) outer"}
        assert values["(return) inner"]["head"] == [2.0 + 2 * (rank // 2)] * 2
    (row,) = [line for line in str(stop).splitlines() if "(return) inner" in line]
    assert "float32[2]" in row
    assert "0,1: [2, 2]" in row
    assert "2,3: [4, 4]" in row
    assert returned(dbg.where(frame=0)) == returned(stop)  # as long as they stand
    dbg.next()
    assert returned(dbg.where()) == {rank: {} for rank in range(4)}
    assert "(return)" not in str(dbg.where())


def test_what_raises_or_yields_has_returned_nothing(dbg):
    dbg.run(load(RETURNS), breaks=["program.py:9", "program.py:11"])
    dbg.out()
    stop = dbg.where()
    assert set(lines_of(stop).values()) == {18}
    assert returned(stop) == {rank: {} for rank in range(4)}
    dbg.continue_()
    dbg.out()  # it has yielded, and goes on later
    assert returned(dbg.where()) == {rank: {} for rank in range(4)}


@pytest.mark.parametrize("line", [5, 10])
def test_what_an_exception_leaves_after_it_was_seen_has_returned_nothing(dbg, line):
    """By `finally`, or by `except` that raises it again: that line is no raising one."""
    source = """\
    def cleans():
        try:
            1 / 0
        finally:
            x = 1
    def logs():
        try:
            1 / 0
        except ZeroDivisionError:
            x = 1
            raise
    def program():
        for function in (cleans, logs):
            try:
                function()
            except ZeroDivisionError:
                x = 2
    """
    dbg.run(load(source), breaks=[f"program.py:{line}"])
    dbg.out()
    assert set(lines_of(dbg.stop).values()) == {16}
    assert returned(dbg.where()) == {rank: {} for rank in range(4)}


HOLDS = """\
    class Big: pass
    made = []
    def make():
        import weakref
        big = Big()
        made.append(weakref.ref(big))
        return big
    def program():
        make()
        a = 1
        b = 2
        return [one() is None for one in made]
"""


def test_what_was_returned_is_held_while_it_is_shown_only(dbg):
    program = load(HOLDS)
    dbg.run(program, breaks=["program.py:7"])
    dbg.out()
    assert all(len(values) == 1 for values in returned(dbg.where()).values())
    dbg.next()
    gc.collect()
    assert [one() for one in program.__globals__["made"]] == [None] * 4


def test_a_hit_condition_counts_the_times_that_a_worker_would_stop(dbg):
    dbg.break_at("6 if rank != 1", "program.py", hits="% 2")
    seen = []
    stop = dbg.run(load(LOOP), 6)
    while not stop.finished:
        seen.append(dbg.eval("i", ranks=[0]).values[0][1]["repr"])
        assert stop.workers[1].reason == ""
        assert stop.workers[0].reason == "break"
        stop = dbg.continue_()
    assert seen == ["1", "3", "5"]
    for wrong in ("x", "% 0", ">="):
        with pytest.raises(ArgumentError, match="hit condition"):
            dbg.break_at("6", "program.py", hits=wrong)


def test_a_logpoint_prints_on_each_worker_and_stops_nobody(dbg, capsys):
    dbg.break_at("6 if i > 0", "program.py", hits=">= 2", log="i={i} of {rank}, {nosuch}")
    assert dbg.run(load(LOOP), 4, step=False).finished
    lines = capsys.readouterr().out.splitlines()
    told = [f"i={i} of {rank}, {{nosuch: NameError: name 'nosuch' is not defined}}"
            for i in (2, 3) for rank in range(4)]  # fmt: skip
    assert sorted(lines) == sorted(told)
    dbg.clear()
    dbg.break_at("6 if rank == 2 and i == 3", "program.py", log="{i / 3:.2f} {str(i)!r:>5}")
    assert dbg.run(load(LOOP), 4, step=False).finished
    assert capsys.readouterr().out == "1.00   '3'\n"
    for wrong in ("{1 +}", "{}", "{i!x}"):
        with pytest.raises(ArgumentError, match="in a log can't be compiled"):
            dbg.break_at("6", "program.py", log=wrong)


def test_every_cell_is_stepped_while_a_front_end_is_there_and_failures_stop(dbg):
    assert not dbg.is_wanted
    dbg.stops_on = frozenset({"raised"})
    try:
        assert dbg.is_wanted
        stop = dbg.run(load(LOOP.replace("total += rank", "total += 1 // rank")), step=False)
        assert stop.workers[0].reason == "raised"
    finally:
        dbg.stops_on = frozenset()
    dbg.continue_()
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        dbg.program.result()


def test_a_pause_before_the_workers_have_begun_is_not_lost(dbg, sess):
    sess.call_packed(time.sleep, 0.3)
    dbg.start(load(LOOP), 10**7, step=False)
    dbg.pause_soon()
    stop = dbg.wait(10)
    assert states_of(stop) == ["paused"] * 4
    assert set(lines_of(stop).values()) == {3}
    dbg.abort()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("step", [False, True])
def test_nobody_stands_in_a_process_that_a_worker_has_forked(dbg, step):
    """As the dataset of a DataLoader runs in: the loader would wait for ever."""
    source = """\
    import os
    def item():
        x = 5
        return x
    def program():
        pid = os.fork()
        if not pid:
            os._exit(item())
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    """
    stop = dbg.run(load(source), ranks=[0], breaks=["program.py:3"], step=step)
    while not stop.finished:
        stop = dbg.step()
    assert dbg.program.result().debug_get_from_remote(0) == 5


def test_of_a_module_that_was_edited_and_reloaded_the_new_lines_are_shown(dbg, tmp_path):
    """In a stop, in the excerpt of an error, and where a breakpoint names a function."""
    file = tmp_path / "edited_model.py"

    def edit(text):
        file.write_text(text)
        names = {"__name__": "edited_model"}
        exec(compile(text, str(file), "exec"), names)
        return names["program"]

    def seen(stop):
        spot = stop.workers[0].stack[-1]
        return stop.sources[spot.file][spot.line - 1].strip()

    assert seen(dbg.run(edit("def program():\n    a = 1\n    return 1 / 0\n"))) == "a = 1"
    dbg.continue_()
    with pytest.raises(WorkerError, match="return 1 / 0"):
        dbg.program.result()
    after = edit("# two\n# lines more\ndef program():\n    b = 2\n    return b / 0\n")
    assert dbg.break_at("program", file=str(file)).line == 4
    assert seen(dbg.run(after)) == "b = 2"
    dbg.continue_()
    with pytest.raises(WorkerError, match="return b / 0"):
        dbg.program.result()
