"""Programs and values that do harm, and names that a program has not."""

import time

import pytest

from discolab.debugger import DebuggerError
from discolab.debugger.history import back

from .conftest import lines_of, load, states_of

VALUES = """\
    import threading
    import time
    class Hostile:
        def __repr__(self):
            raise KeyboardInterrupt
    class Slow:
        def __repr__(self):
            with open(path, "a") as file:
                file.write("x")
            time.sleep(1.2)
            return "slow"
    class Stuck:
        def __repr__(self):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire(timeout=3.5)
            return "stuck"
    class Odd:
        @property
        def __class__(self):
            raise SystemExit
    path = ""
    def program(kind, where=""):
        global path
        path = where
        a = kind()
        fine = 3
        more = [Stuck.__name__, {}]
        return fine
    def hostile(): return program(Hostile)
    def odd(): return program(Odd)
    def stuck(): return program(Stuck)
    def slow(where): return program(Slow, where)
"""


END = str(1 + VALUES.splitlines().index("        return fine"))


@pytest.mark.parametrize(("name", "words"), [("hostile", "KeyboardInterrupt"), ("odd", "Odd")])
def test_a_value_that_raises_when_it_is_looked_at_is_the_only_one_not_shown(dbg, name, words):
    dbg.run(load(VALUES, name=name), breaks=[END])
    stop = dbg.where()
    assert words in str(stop.workers[1].variables["a"])
    assert stop.workers[1].variables["fine"]["repr"] == "3"
    assert words in repr(stop)
    assert len(dbg.eval("a").values) == 4
    assert "3" in repr(dbg.eval("fine"))
    assert dbg.continue_().finished
    assert dbg.program.result().debug_get_from_all() == [3] * 4


def test_a_slow_value_is_asked_once(dbg, tmp_path):
    path = tmp_path / "asked"
    stop = dbg.run(load(VALUES, name="slow"), str(path), breaks=[END], ranks=[0])
    stop = dbg.where()
    assert stop.workers[0].variables["a"]["repr"] == "slow"
    assert path.read_text() == "x"
    assert "not looked at" in stop.workers[0].variables["more"]["error"]


def test_a_value_that_is_too_slow_hides_no_other(dbg):
    dbg.run(load(VALUES, name="stuck"), breaks=[END], ranks=[0])
    stop = dbg.where()
    assert "slow: not waited for" in stop.workers[0].variables["a"]["error"]
    assert stop.workers[0].variables["fine"]["repr"] == "3"
    assert "not waited for" in repr(stop)
    assert dbg.continue_().finished


def test_names_that_cells_are_given_are_known_in_any_function(dbg):
    source = """\
        def helper(v):
            w = v * 2
            return w
        def program():
            return helper(3)
    """
    stop = dbg.run(load(source), breaks=["2 if rank == 1 and v > world_size - 2"])
    assert lines_of(stop) == dict.fromkeys(range(4), 2)
    assert stop.workers[0].error == ""
    found = dbg.eval("[rank + v for _ in range(RANK)]")
    assert "[5, 5]" in repr(found)
    dbg.set("v", "rank")
    assert dbg.continue_().finished
    assert dbg.program.result().debug_get_from_all() == [0, 2, 4, 6]


def test_a_name_of_the_program_comes_before_what_cells_are_given(dbg):
    source = """\
        rank = 17
        def program(device=2):
            x = 1
            return x
    """
    dbg.run(load(source), breaks=["3 if rank == 17 and device == 2"])
    assert "17" in repr(dbg.eval("rank"))
    assert dbg.continue_().finished


def test_continue_n_counts_breakpoint_too(dbg):
    source = """\
        from discolab.debugger.tracer import stop_here
        def program():
            for i in range(6):
                stop_here("breakpoint()")
            return i
    """
    dbg.run(load(source), step=False)
    dbg.continue_(2)
    assert "all: 2" in repr(dbg.eval("i"))
    dbg.continue_(3)
    assert "all: 5" in repr(dbg.eval("i"))
    assert dbg.continue_(2).finished


def test_continue_n_does_not_pass_what_went_wrong(dbg):
    source = """\
        from discolab.debugger.tracer import stop_here
        def program():
            for i in range(6):
                stop_here("assert" if i == 2 else "breakpoint()")
            return i
    """
    dbg.run(load(source), step=False)
    dbg.continue_(5)
    assert "all: 2" in repr(dbg.eval("i"))


SWALLOWS = """\
    from discolab.debugger.tracer import stop_here
    def program():
        while True:
            try:
                stop_here("breakpoint()")
            except BaseException:
                pass
"""


def swallower():
    """Never ends by itself."""
    return load(SWALLOWS)


def test_a_program_that_swallows_what_ends_it_is_ended(dbg):
    dbg.run(swallower(), step=False)
    assert dbg.abort() == []
    assert states_of(dbg.stop) == ["aborted"] * 4
    assert not dbg.is_active
    stop = dbg.run(load(VALUES, name="odd"))
    assert stop.groups == ((0, 1, 2, 3),)


def test_a_worker_that_can_not_be_ended_is_said_to_go_on(dbg):
    source = """\
        import threading
        def program():
            lock = threading.Lock()
            lock.acquire()
            lock.acquire(timeout=0.6)
    """
    dbg.start(load(source), step=False)
    time.sleep(0.1)
    assert dbg.abort(timeout=0.1) == [0, 1, 2, 3]
    assert "still inside a call" in repr(dbg.where())
    stop = dbg.run(load(VALUES, name="odd"))  # which waits for them
    assert stop.groups == ((0, 1, 2, 3),)


def test_after_a_failure_it_is_said_who_can_go_on(dbg):
    source = """\
        import time
        from discolab import current_worker
        def program():
            for i in range(10**6):
                time.sleep(0.01)
                1 // (current_worker().rank - 1)
    """
    dbg.run(load(source), step=False, pm=True)
    with pytest.raises(DebuggerError, match=r"worker 1 failed here.* can: -r 0,2,3"):
        dbg.next()


def test_a_break_point_can_be_set_while_the_program_runs(dbg):
    source = """\
        import time
        def program():
            go = True
            while go:
                time.sleep(0.001)
            return go
    """
    dbg.start(load(source), step=False)
    dbg.break_at("5 if go")  # before some have begun, maybe
    assert lines_of(dbg.wait()) == dict.fromkeys(range(4), 5)


def test_a_line_without_code_is_no_place_to_stop(dbg):
    source = """\
        def program():
            exec(compile("# nothing", "program.py", "exec"), {})
            return 5
    """
    stop = dbg.run(load(source))
    seen = [lines_of(stop)[0]]
    while not stop.finished:
        stop = dbg.step()
        seen.append(lines_of(stop)[0])
    assert seen == [2, 3, None]


def test_what_tells_only_where_it_is_is_not_said_to_differ(dbg):
    source = """\
        import enum, threading
        from discolab import current_worker
        class Kind(enum.Enum):
            A = 0
            B = 1
        class Shard:
            def __repr__(self):
                return f"<Shard {self.rank}>"
        def program():
            thread = threading.Thread(name=f"of {current_worker().rank}")
            kind = Kind(current_worker().rank % 2)
            shard = Shard()
            shard.rank = current_worker().rank
            return 1
    """
    dbg.run(load(source), breaks=["14"])
    text = repr(dbg.where())
    marked = [row.split()[1] for row in text.splitlines() if "≠" in row and "<" in row]
    assert marked == ["kind", "shard"]
    assert "<Shard 3>" in text


def test_a_stop_that_was_recorded_does_not_say_how_to_go_on(dbg, sess):
    source = """\
        def program():
            a = 1
            a = 2
            return a
    """
    dbg.run(load(source), step=False, trace=())
    stop = back(sess, 100)
    assert stop.number == 1
    assert "%disco_next" not in repr(stop)
    assert "%disco_next" in repr(dbg.run(load(source)))
