"""``--trace``: what each line has set, a variable's history, and stepping back."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from discolab import ArgumentError, ProcessSession, Session, current_worker
from discolab.debugger import Debugger, DebuggerError, debugger_of
from discolab.debugger.history import Playback, back, forth, history, names
from discolab.debugger.kept_values import Kept, is_same, mark_of
from discolab.debugger.recording import recorder_of
from discolab.runtime.services import probe

from .conftest import load

PROGRAM = """\
    import torch
    from discolab import ccl, current_worker
    def half(t, k):
        u = t / 2
        u.mul_(k)
        return u
    def program():
        rank = current_worker().rank
        x = torch.full((2,), float(rank))
        items = []
        for i in range(3):
            x = half(x + i, rank)
            items.append(i)
        s = ccl.all_reduce(x)
        del items
        return s.sum().item()
"""


def record(dbg: Debugger, source: str, *names: str, **options: Any) -> None:
    """Run a program to its end with these variables recorded; without any all of them."""
    assert dbg.run(load(source), step=False, trace=names, **options).finished
    dbg.program.result()


def heads(found: Any, rank: int) -> list[Any]:
    """The first value of each record of a worker, or its repr."""
    records = [moment.records[rank] for moment in found.moments if rank in moment.records]
    return [one["head"][0] if "head" in one else one.get("repr", one["kind"]) for one in records]


def test_a_change_is_told_of_the_line_that_made_it(dbg: Debugger) -> None:
    """Assigned, changed in place, deleted, and what a function is called with."""
    record(dbg, PROGRAM)
    x = history(dbg.session, "x")
    assert heads(x, 1) == [1.0, 0.5, 0.75, 1.375]
    assert [moment.where for moment in x.moments] == [
        "program.py:9 in program",
        "program.py:12 in program",
        "program.py:12 in program, time 2",
        "program.py:12 in program, time 3",
    ]
    u = history(dbg.session, "u", ranks=[2])
    assert [moment.where for moment in u.moments[:2]] == [
        "program.py:4 in half",
        "program.py:5 in half",  # u.mul_(k)
    ]
    assert heads(u, 2)[:2] == [1.0, 2.0]
    assert [moment.number for moment in history(dbg.session, "x", last=2).moments] == [3, 4]
    items = history(dbg.session, "items", ranks="0")
    assert [one.records[0].get("length") for one in items.moments] == [0, 1, 2, 3, None]
    assert items.moments[-1].where == "program.py:15 in program"
    assert heads(items, 0)[-1] == "deleted"
    assert history(dbg.session, "t").moments[0].where == "call of program.py:3 in half"


def test_a_statement_of_several_lines_is_one_line_of_the_recording(dbg: Debugger) -> None:
    """Its first, which has set nothing before Python has gone through the others."""
    source = """\
        def program():
            y = 0
            for i in range(2):
                y = max(
                    y,
                    i + 5,
                )
            return y
    """
    record(dbg, source)
    y = history(dbg.session, "y")
    assert [(moment.where, moment.records[0]["repr"]) for moment in y.moments] == [
        ("program.py:2 in program", "0"),
        ("program.py:4 in program", "5"),
        ("program.py:4 in program, time 2", "6"),
    ]
    assert back(dbg.session).workers[0].note == "line 3 has run"
    assert back(dbg.session).workers[0].note == "line 4 has run"


def test_workers_are_side_by_side_where_they_ran_the_same_line(dbg: Debugger) -> None:
    """One that took another branch has rows of its own, between those of all."""
    record(
        dbg,
        """\
        from discolab import current_worker
        def program():
            rank = current_worker().rank
            a = 1
            if rank == 2:
                a = 5
            a += rank
        """,
        "a",
    )
    found = history(dbg.session, "a")
    assert [sorted(moment.records) for moment in found.moments] == [[0, 1, 2, 3], [2], [0, 1, 2, 3]]
    assert [heads(found, rank)[-1] for rank in range(4)] == ["1", "2", "7", "4"]
    text = repr(found)
    assert "worker 2" in text
    assert "program.py:6 in program" in text
    assert all(moment.seconds[0] >= 0 for moment in found.moments if 0 in moment.seconds)


def test_with_names_only_lines_that_set_one_are_recorded(dbg: Debugger) -> None:
    """So that a long program's history fits."""
    record(dbg, PROGRAM, "x", "nothing")
    assert names(dbg.session) == ["x"]
    assert len(Playback(dbg.session).rows) == 4


def test_stepping_back_shows_how_things_were(dbg: Debugger) -> None:
    """The line that came next, the stack, the variables of that frame, what the line changed."""
    dbg.run(load(PROGRAM), breaks=["14"], trace=())
    assert dbg.is_paused
    stop = back(dbg.session)
    assert stop.reason == "recorded, 1 step back"
    assert [worker.stack[-1].line for worker in stop.workers] == [11] * 4
    assert stop.groups == ((0, 1, 2, 3),)
    first = stop.workers[1]
    assert first.note == "line 13 has run"
    assert first.changed == {"items"}
    assert list(first.variables) == ["rank", "x", "items", "i"]
    stop = back(dbg.session, 2)
    assert [(spot.function, spot.line) for spot in stop.workers[3].stack] == [
        ("program", 12),
        ("half", 6),
    ]
    assert stop.workers[3].note == "line 6 has run, and left the function"
    stop = back(dbg.session)
    assert stop.workers[3].variables["u"]["head"] == [15.375, 15.375]
    assert stop.workers[3].changed == {"u"}
    stop = back(dbg.session)
    assert stop.workers[3].variables["u"]["head"] == [5.125, 5.125]
    assert "5      u.mul_(k)" in repr(stop)
    assert "t" in stop.workers[0].variables
    stop = forth(dbg.session, 100)
    assert stop.reason == "recorded, the last line"
    assert [worker.stack[-1].line for worker in stop.workers] == [14] * 4
    stop = back(dbg.session, 1000)
    assert "where the recording begins" in stop.reason
    dbg.next()
    assert back(dbg.session).reason == "recorded, 1 step back"  # of what is recorded by now
    dbg.continue_()


def test_the_recording_is_bounded_and_says_what_it_dropped(dbg: Debugger) -> None:
    """By lines and by bytes; the last ones stay."""
    loop = """\
        import torch
        def program():
            for i in range(200):
                x = torch.full((1000,), float(i))
        """
    record(dbg, loop, capacity=50)
    found = history(dbg.session, "i", ranks=[0])
    assert heads(found, 0)[-1] == "199"
    assert len(found.moments) < 50
    assert re.search(r"the first \d+ recorded lines were dropped on worker 0", repr(found))
    assert "the first that is kept" in back(dbg.session, 1000).reason
    record(dbg, loop)
    facts = dbg.session.look(memory)
    assert all(used == sizes and dropped == 0 for used, sizes, dropped in facts.values())
    assert all(4000 * 200 < used < 6000 * 200 for used, _, _ in facts.values())


@probe
def memory(worker: Any) -> tuple[int, int, int]:
    """What a recorder counts, and what is there."""
    recorder = recorder_of(worker)
    return recorder.bytes, sum(line.size for line in recorder.ring), recorder.dropped


def test_large_values_take_no_memory_and_are_let_go(dbg: Debugger) -> None:
    """Of those only what they are: nothing of a recording keeps a tensor of the program alive."""
    import weakref

    alive: list[Any] = []

    def program() -> None:
        if current_worker().rank == 0:
            small, large = torch.ones(3), torch.ones(100_000)
            alive.extend([weakref.ref(small), weakref.ref(large)])
            both = [small, large]
            del both

    dbg.run(program, step=False, trace=())
    dbg.program.result()
    assert [ref() for ref in alive] == [None, None]
    record_ = history(dbg.session, "large").moments[0].records[0]
    assert record_["shape"] == [100_000]
    assert "stats" not in record_
    assert history(dbg.session, "small").moments[0].records[0]["stats"]["mean"] == 1.0
    assert dbg.session.look(memory)[0][0] < 20_000


def test_a_cell_is_recorded_to_its_last_line(dbg: Debugger) -> None:
    """Module code: variables from before it are what it begins with, its last line counts."""

    def cell() -> None:
        worker = current_worker()
        scope = worker.namespace
        scope.update(__name__="__main__", old=torch.ones(2), other=5, rank=worker.rank)
        source = "y = old + 1\nold += y\nz = [k for k in (1, 2)]\nlast = 3"
        exec(compile(source, "cell_of_a_test.py", "exec"), scope)

    import linecache

    linecache.cache["cell_of_a_test.py"] = (1, None, ["y = old + 1\n"], "cell_of_a_test.py")
    dbg.run(cell, step=False, trace=())
    dbg.program.result()
    assert {"old", "y", "z", "last"} <= set(names(dbg.session))
    assert "other" not in names(dbg.session)
    old = history(dbg.session, "old", ranks=[0])
    assert [moment.where for moment in old.moments] == [
        "before cell_of_a_test.py:1",
        "cell_of_a_test.py:2",
    ]
    assert history(dbg.session, "last").moments[-1].where == "cell_of_a_test.py:4"


def test_the_last_expression_of_a_cell_goes_on_with_its_variables(dbg: Debugger) -> None:
    """It is code of its own; what it mentions is told as before it only if the cell did not."""
    source = "d = {}\nd['k'] = 1\nf = d.update\nd.setdefault('m', old); f(n=2)"

    def cell() -> None:
        from discolab.notebook.cell import run_cell

        current_worker().namespace["old"] = 7
        run_cell(source, "cell_with_a_value.py", None)

    dbg.run(cell, step=False, trace=())
    dbg.program.result()
    d = history(dbg.session, "d", ranks=[0])
    assert [moment.where for moment in d.moments] == [
        "cell_with_a_value.py:1",
        "cell_with_a_value.py:2",
        "cell_with_a_value.py:4",
        "cell_with_a_value.py:4, time 2",
    ]
    assert [moment.records[0]["length"] for moment in d.moments] == [0, 1, 2, 3]
    old = history(dbg.session, "old", ranks=[0])
    assert [moment.where for moment in old.moments] == ["before cell_with_a_value.py:1"]
    assert set(back(dbg.session).workers[0].variables) >= {"d", "old"}

    source = "x = 1\nx + old"
    dbg.run(cell, step=False, trace=())
    dbg.program.result()
    old = history(dbg.session, "old", ranks=[0])
    assert [moment.where for moment in old.moments] == ["before cell_with_a_value.py:2"]
    assert len(history(dbg.session, "x").moments) == 1


def test_what_a_function_does_to_a_cells_variables_is_told_of_its_line(dbg: Debugger) -> None:
    """Assigned, written to, made and deleted there; stepping back knows it too."""
    source = """\
g = 1
c = []
def work(n):
    global g, new
    c.append(n)
    for i in range(n):
        g = g + 1
    new = n
    return n
def gone():
    global g
    del g
work(2)
last = g
gone()
"""

    def cell() -> None:
        from discolab.notebook.cell import run_cell

        run_cell(source, "cell_with_globals.py", None)

    def where(name: str) -> list[str]:
        found = history(dbg.session, name, ranks=[0]).moments
        return [moment.where.removeprefix("cell_with_globals.py:") for moment in found]

    dbg.run(cell, step=False, trace=())
    dbg.program.result()
    assert where("g") == ["1", "7 in work", "7 in work, time 2", "12 in gone"]
    assert where("c") == ["2", "5 in work"]
    assert where("new") == ["8 in work"]
    at = back(dbg.session)
    while "line 14 has run" not in at.workers[0].note:
        at = back(dbg.session)
    held = at.workers[0].variables
    assert held["g"]["repr"] == held["last"]["repr"] == "3"
    assert held["c"]["length"] == 1
    dbg.run(cell, step=False, trace=("c",))
    dbg.program.result()
    assert names(dbg.session) == ["c"]
    assert where("c") == ["before cell_with_globals.py:1", "2", "5 in work"]


def test_of_lines_that_were_dropped_the_last_that_set_a_name_is_known(dbg: Debugger) -> None:
    """So a variable that was set once, long ago, is told of the line that did."""
    record(
        dbg,
        """\
        import torch
        def program():
            h = torch.ones(2)
            for step in range(400):
                loss = step * 2
            del h
        """,
        "h",
        "loss",
        capacity=50,
    )
    h = history(dbg.session, "h", ranks=[0])
    assert [moment.where for moment in h.moments] == [
        "program.py:3 in program",
        "program.py:6 in program",
    ]
    assert "lines were dropped" in repr(h)
    assert "h" in back(dbg.session, 20).workers[0].variables
    assert heads(history(dbg.session, "loss", last=500), 0)[-1] == "798"
    kept = history(dbg.session, "loss", ranks=[0], last=500).moments
    assert len(kept) == 50  # 49 in the ring, and the last before these


def test_generators_exceptions_and_recursion_keep_their_frames_apart(dbg: Debugger) -> None:
    """A generator's variables are its own over all its turns; each call is a new frame."""
    record(
        dbg,
        """\
        def count(n):
            got = 0
            while got < n:
                got += 1
                yield got
        def down(n):
            here = n
            if n:
                down(n - 1)
            here = -n
        def program():
            total = 0
            for one in count(2):
                total += one
            down(2)
            try:
                bad = 1
                bad = bad / 0
            except ZeroDivisionError as error:
                caught = str(error)
        """,
    )
    assert heads(history(dbg.session, "got", ranks=[0]), 0) == ["0", "1", "2"]
    assert heads(history(dbg.session, "here", ranks=[0]), 0) == ["2", "1", "0", "0", "-1", "-2"]
    assert heads(history(dbg.session, "total", ranks=[0]), 0) == ["0", "1", "3"]
    assert heads(history(dbg.session, "bad", ranks=[0]), 0) == ["1"]
    assert heads(history(dbg.session, "error", ranks=[0]), 0)[-1] == "deleted"
    assert heads(history(dbg.session, "caught", ranks=[0]), 0) == ["'division by zero'"]


def test_a_generator_is_under_the_line_that_has_it_go_on(dbg: Debugger) -> None:
    source = """\
        def numbers():
            yield 1
            two = 2
            yield two
        def program():
            made = numbers()
            next(made)
            next(made)
    """
    record(dbg, source)
    seen = []
    for _ in range(9):
        stack = back(dbg.session).workers[0].stack
        seen += [tuple(spot.line for spot in stack)] if stack[-1].function == "numbers" else []
    assert seen == [(8, 4), (8, 4), (8, 3), (7, 2), (7, 2)]


def test_a_value_with_its_own_mind_does_not_harm_the_program(dbg: Debugger) -> None:
    """What goes wrong in a look at it is told with the history."""
    record(
        dbg,
        """\
        class Odd(int):
            def __eq__(self, other): raise RuntimeError("no")
            __hash__ = None
        class Vague:
            def __repr__(self): raise RuntimeError("no repr")
        def program():
            a, b, c = [Odd(1)], Vague(), {Odd: 1}
            a.append(Odd(2))
            return 7
        """,
    )
    assert set(dbg.program.ref.debug_get_from_all()) == {7}
    assert {"a", "b"} <= set(names(dbg.session))
    assert "repr raised" in repr(history(dbg.session, "b"))


def test_marks_tell_whether_a_value_has_changed() -> None:
    """Kinds of values: what is the same, and what is not."""
    import numpy

    x, items, table, array = torch.ones(3), [1, [2]], {"a": 1}, numpy.zeros(4)
    with torch.inference_mode():
        inner = torch.ones(2)
        mark = mark_of(inner)
        assert is_same(mark, inner)
        inner.add_(1)
        assert not is_same(mark, inner)
    marks = [(value, mark_of(value)) for value in (x, items, table, array)]
    assert all(is_same(mark, value) for value, mark in marks)
    x.add_(1)
    items[1].append(3)
    table["a"] = 2
    array[3] = 1
    assert not any(is_same(mark, value) for value, mark in marks)
    assert is_same(mark_of(float("nan")), float("nan"))
    assert not is_same(mark_of(1), 1.0)
    assert not is_same(mark_of(1), True)
    assert is_same(mark_of("x" * 5000), "x" * 5000)
    assert not is_same(mark_of(torch.ones(1)), torch.ones(1))


def test_what_is_kept_of_a_tensor_is_what_it_was() -> None:
    """A copy of its own, whatever happens to the tensor; freed storage is not read."""
    x = torch.nn.Parameter(torch.zeros(2, 2))
    kept = Kept(x)
    with torch.no_grad():
        x.add_(1)
    record_ = kept.record()
    assert record_["head"] == [0.0] * 4
    assert record_["type"] == "Parameter"
    assert record_["requires_grad"] is True
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    assert Kept(freed).record()["note"] == "storage freed: no data"


def test_what_was_not_recorded_is_said(dbg: Debugger, sess: Session) -> None:
    """No recording, an unknown name, bad arguments."""
    sess.call_packed(forget)
    sess.sync_all()
    for ask in (lambda: history(sess, "x"), lambda: names(sess), lambda: back(sess)):
        with pytest.raises(DebuggerError, match="nothing was recorded: run a cell with"):
            ask()
    record(dbg, PROGRAM)
    with pytest.raises(ArgumentError, match=r"no value of 'itms' was recorded; did you mean items"):
        history(sess, "itms")
    with pytest.raises(ArgumentError, match=r"no value of 'loss' was recorded; there are rank, x"):
        history(sess, "loss")
    with pytest.raises(ArgumentError, match="last is how many values"):
        history(sess, "x", last=0)
    with pytest.raises(ArgumentError, match="a number of lines, 1 or more"):
        back(sess, 0)


def test_stepping_back_says_who_has_no_recording(dbg: Debugger, sess: Session) -> None:
    sess.call_packed(forget)
    sess.sync_all()

    def program() -> None:
        if current_worker().rank == 0:
            return
        x = 1
        x += 1

    dbg.run(program, step=False, trace=("x",))
    dbg.program.result()
    assert back(sess, 9).workers[0].words == "has no recording"


def forget() -> None:
    """On a worker: as if nothing had ever been recorded."""
    current_worker().shared.pop("discolab.debugger.recorders", None)


def program_in_processes() -> None:
    """A worker function that is found by its name."""
    rank = current_worker().rank
    h = torch.full((2,), float(rank))
    for _ in range(3):
        h = h + 1
    w = torch.full((8_000,), 2.0)
    dist.all_reduce(w)
    dist.all_reduce(w)


@pytest.fixture(scope="module")
def processes() -> Iterator[Session]:
    """Two worker processes."""
    session = ProcessSession(2, devices="cpu", timeout=60)
    yield session
    session.shutdown()


@pytest.mark.slow
def test_recordings_of_other_processes_are_the_same(processes: Session) -> None:
    """History and steps back travel as records."""
    dbg = debugger_of(processes)
    assert dbg.run(program_in_processes, step=False, trace=()).finished
    assert heads(history(processes, "h"), 1) == [1.0, 2.0, 3.0, 4.0]
    assert heads(history(processes, "w"), 1) == [2.0, 4.0, 8.0]  # torch knows nothing of it
    stop = back(processes, 5)
    assert stop.workers[1].variables["h"]["head"] == [3.0, 3.0]
