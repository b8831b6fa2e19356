"""Stepping through a program on one worker: where it stops, and that nothing else changes."""

import ast
import asyncio
import functools
import gc
import sys
import threading
import traceback
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab.debugger import frames, tracer
from discolab.debugger.breaks import Break
from discolab.debugger.tracer import Tracer
from discolab.runtime.errors import WorkerInterrupted
from tests.debugger.scripted import Program, ScriptedPort

NESTED = """
    def inner(n):
        n += 1
        return n

    def outer(n):
        a = inner(n)
        b = inner(a)
        return b

    x = outer(1)
    y = x
"""


# -- step, next, out, until ----------------------------------------------------------------------


def test_step_goes_through_every_line_and_into_functions() -> None:
    port = Program(NESTED).run(then="step")
    assert port.lines == [1, 5, 10, 6, 2, 3, 7, 2, 3, 8, 11]
    assert [a.reason for a in port.arrivals] == ["entry"] + ["step"] * 10


def test_next_stays_in_its_function_and_ends_in_the_caller() -> None:
    port = Program(NESTED).run("step", "step", "step", then="next")
    assert port.places == [
        "<module>:1", "<module>:5", "<module>:10", "outer:6", "outer:7", "outer:8", "<module>:11",
    ]  # fmt: skip


def test_out_runs_until_the_function_has_returned() -> None:
    port = Program(NESTED).run(*["step"] * 4, "out", "out", "next")
    assert port.places[4:] == ["inner:2", "outer:7", "<module>:11"]


def test_next_after_the_last_line_of_recursion_is_in_the_frame_above() -> None:
    program = Program("""
        def fac(n):
            if n < 2:
                return 1
            return n * fac(n - 1)

        x = fac(3)
        y = x
    """)
    port = program.run("next", "next", then="next", breaks=[program.stop(3)])
    assert port.places == ["<module>:1", "<module>:6", "fac:3", "<module>:7"]
    port = program.run("step", "step", "next", "next", then="next")
    assert port.places == ["<module>:1", "<module>:6", "fac:2", "fac:4", "<module>:7"]


def test_until_leaves_the_loop() -> None:
    program = Program("""
        total = 0
        for i in range(3):
            total += i
        done = total
    """)
    assert program.run("next", "next", "until", then="next").lines == [1, 2, 3, 4]
    assert program.run(("until", 3), "until").lines == [1, 3, 4]


def test_until_with_a_line_that_never_comes_ends_with_the_function() -> None:
    port = Program(NESTED).run(*["step"] * 3, ("until", 99))
    assert port.places[3:] == ["outer:6", "<module>:11"]


def test_same_goes_on_as_before() -> None:
    program = Program(NESTED)
    port = program.run("next", "next", "next", then="same", breaks=[program.stop(3, "n > 2")])
    assert [(a.here.line, a.reason, a.fired) for a in port.arrivals] == [
        (1, "entry", True), (5, "step", True), (10, "step", True),
        (3, "break", False), (3, "break", True), (11, "step", True),
    ]  # fmt: skip


@pytest.mark.parametrize("mode", ["next", "out", "until", "step"])
def test_what_follows_the_outermost_frame_is_the_next_line(mode: str) -> None:
    program = Program("x = 1")
    program.port = ScriptedPort([mode])
    last = compile("x + 1", program.file, "eval")
    names: dict[str, Any] = {"body": program.code, "last": last, "names": program.namespace}
    exec("def cell():\n    exec(body, names)\n    return eval(last, names)", names)
    assert Tracer(program.worker, program.port).run(names["cell"], "step") == 2
    assert len(program.port.arrivals) == 2


def test_a_yield_leaves_to_the_consumer() -> None:
    program = Program("""
        def numbers():
            yield 1
            yield 2

        for n in numbers():
            m = n
    """)
    port = program.run("next", "step", "next", "next", "step", "next")
    assert port.places == [
        "<module>:1", "<module>:5", "numbers:2", "<module>:6", "<module>:5", "numbers:3",
        "<module>:6",
    ]  # fmt: skip


def test_a_frame_that_an_exception_leaves_has_returned() -> None:
    program = Program("""
        def bad():
            a = 1
            raise ValueError("no")

        try:
            bad()
        except ValueError:
            b = 2
        finally:
            c = 3
    """)
    port = program.run("next", "next", "step", "next", then="next")
    assert [(a.here.line, a.raising) for a in port.arrivals] == [
        (1, ""), (5, ""), (6, ""), (2, ""), (3, ""),
        (7, "ValueError: no"), (8, "ValueError: no"), (10, ""),
    ]  # fmt: skip


def test_an_exception_that_passes_through_finally_and_with_is_told() -> None:
    program = Program("""
        import contextlib

        def bad():
            try:
                raise KeyError("k")
            finally:
                a = 1

        with contextlib.suppress(KeyError):
            bad()
        b = 2
    """)
    port = program.run(then="step")
    told = {a.here.line: a.raising for a in port.arrivals if a.raising}
    assert told == {7: "KeyError: 'k'", 9: "KeyError: 'k'"}
    assert port.lines[-2:] == [9, 11]


def test_the_end_of_an_iterator_is_no_news() -> None:
    program = Program("""
        class Once:
            def __iter__(self):
                return self

            def __next__(self):
                raise StopIteration

        for _ in Once():
            pass
        x = 1
    """)
    port = program.run(then="step")
    assert port.lines[-1] == 10
    assert not any(a.raising for a in port.arrivals)


# -- kinds of code -------------------------------------------------------------------------------


def test_bodies_of_classes_decorators_and_lambdas_are_stepped_through() -> None:
    program = Program("""
        same = lambda f: f
        @same
        class A:
            b = 1
            @same
            def m(self):
                return self.b
        x = A().m()
    """)
    port = program.run(then="step")
    assert [p for p in port.places if p.startswith("A:")] == ["A:4", "A:5", "A:6", "A:5", "A:6"]
    assert [p for p in port.places if p.startswith("<lambda>")] == ["<lambda>:1"] * 2
    assert port.places[-1] == "m:7"


def test_comprehensions_are_no_steps_but_what_they_call_is() -> None:
    program = Program("""
        def f(i):
            return i

        a = [f(i) for i in range(2)]
        b = {i: i for i in range(2)}
        c = sum(i for i in range(2))
    """)
    port = program.run(then="step")
    assert port.places == [
        "<module>:1", "<module>:4", "f:2", "f:2", "<module>:5", "<module>:6",
    ]  # fmt: skip


def test_coroutines_step_like_functions() -> None:
    program = Program("""
        import asyncio

        async def one():
            await asyncio.sleep(0)
            return 1

        async def two():
            a = await one()
            return a + 1

        x = asyncio.run(two())
        y = x
    """)
    port = program.run(*["next"] * 3, "step", then="next")
    assert port.places[3:] == ["<module>:11", "two:8", "two:9", "<module>:12"]
    port = program.run(then="step")
    assert port.places[4:] == ["two:8", "one:4", "one:5", "two:9", "<module>:12"]


def test_next_and_out_pass_over_what_a_cell_awaits() -> None:
    """The cell's own coroutine, above which no frame is the user's, is left at each await too."""
    source = """
        import asyncio
        async def one():
            await asyncio.sleep(0)
            b = 1
            await asyncio.sleep(0)
            return b
        a = await one()
        a = await one()
        c = a
    """
    program = Program(source, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    def places(*says: str, then: str) -> list[str]:
        port = ScriptedPort(says, then)
        cell = functools.partial(asyncio.run, eval(program.code, program.namespace))
        Tracer(program.worker, port).run(cell, "step")
        return port.places

    seen = [f"<module>:{line}" for line in (1, 2, 7, 8, 9)]
    assert places(then="next") == seen
    assert places("next", "next", "step", "out", then="next") == [*seen[:3], "one:3", *seen[3:]]


def test_code_made_by_exec_is_not_the_users_unless_it_has_a_file() -> None:
    program = Program("""
        exec("a = 1")
        exec(compile("b = 1", "mine.py", "exec"))
    """)
    port = program.run(then="step")
    assert [a.here.file for a in port.arrivals] == [program.file, program.file, "mine.py"]


def test_hits_and_calls_tell_rounds_apart() -> None:
    program = Program("""
        def f(n):
            return n

        for i in range(2):
            x = f(1) + f(2)
    """)
    port = program.run(then="continue", mode="continue", breaks=[program.stop(2)])
    assert [(a.hit, a.stack[0].loops[0][2], a.here.call) for a in port.arrivals] == [
        (1, 1, 1), (2, 1, 2), (3, 2, 1), (4, 2, 2),
    ]  # fmt: skip


def test_a_module_that_calls_its_layers_tells_which_call_it_is() -> None:
    program = Program("""
        import torch

        class Layer(torch.nn.Module):
            def forward(self, x):
                return x + 1

        model = torch.nn.Sequential(Layer(), Layer())
        y = model(torch.zeros(2))
    """)
    port = program.run(mode="continue", breaks=[program.stop(5)])
    assert [a.here.call for a in port.arrivals] == [1, 2]
    assert [spot.function for spot in port.arrivals[0].stack] == ["<module>", "forward"]


def test_what_hostile_objects_do_is_no_matter() -> None:
    program = Program("""
        class Bad(Exception):
            def __repr__(self, other=None): raise RuntimeError("repr")
            __str__ = __eq__ = __bool__ = __hash__ = __repr__
        bad = Bad()
        try:
            raise bad
        except Bad:
            del bad
        x = 1
    """)
    port = program.run(then="step", mode="continue", breaks=[program.stop(5, "bad == bad")])
    assert port.arrivals[0].error.startswith("RuntimeError")
    assert program.namespace["x"] == 1
    assert port.arrivals[2].raising.startswith("Bad: <unprintable")


def test_modules_that_are_imported_meanwhile_are_not_stepped_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disco_imported.py").write_text("def f():\n    return 1\na = f()\nb = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    program = Program("""
        import disco_imported
        x = disco_imported.f()
    """)
    port = program.run(then="step")
    assert port.places == ["<module>:1", "<module>:2", "f:2"]
    del sys.modules["disco_imported"]


def test_threads_that_the_user_starts_run_freely() -> None:
    program = Program("""
        import threading
        def work():
            done.append(1)
        done = []
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """)
    port = program.run(then="step")
    assert program.namespace["done"] == [1]
    assert 3 not in port.lines


# -- breakpoints, pause -------------------------------------------------------------------------


def test_a_condition_is_worked_out_in_the_frame_and_is_a_meeting_where_it_is_false() -> None:
    program = Program("""
        def f(k):
            for i in range(3):
                x = i
        f(2)
    """)
    stop = program.stop(3, "i == 1 and any(i + k == j for j in [3])", number=7)
    port = program.run(mode="continue", then="same", breaks=[stop])
    assert [(a.fired, a.reason, a.detail, a.hit) for a in port.arrivals] == [
        (False, "break", "breakpoint 7", 1),
        (True, "break", "breakpoint 7", 2),
        (False, "break", "breakpoint 7", 3),
    ]


def test_a_condition_that_fails_stops_and_says_why() -> None:
    program = Program("x = 1\ny = 2")
    port = program.run(mode="continue", breaks=[program.stop(2, "z > 1")])
    assert [(a.fired, a.error) for a in port.arrivals] == [
        (True, "NameError: name 'z' is not defined")
    ]
    assert program.namespace["y"] == 2


def test_no_collective_can_begin_in_a_condition() -> None:
    program = Program("x = 1\ny = 2")
    alone: list[str] = []
    program.namespace["note"] = lambda: alone.append(program.worker.alone)
    program.run(mode="continue", breaks=[program.stop(2, "note()", 4)])
    assert alone == ["the condition of breakpoint 4 is worked out"]
    assert program.worker.alone == ""


def test_a_condition_that_ends_the_program_by_exit_does_not() -> None:
    program = Program("x = 1\ny = 2")
    port = program.run(mode="continue", breaks=[program.stop(2, "exit(3)")])
    assert [a.error for a in port.arrivals] == ["SystemExit: 3"]
    assert program.namespace["y"] == 2


def test_a_break_point_of_other_workers_is_only_a_meeting() -> None:
    program = Program("x = 1\ny = 2", rank=1)
    breaks = [program.stop(2, ranks=(0, 2)), program.stop(1, number=2, ranks=(1,))]
    port = program.run(mode="continue", breaks=breaks)
    assert [(a.here.line, a.fired, a.detail) for a in port.arrivals] == [
        (1, True, "breakpoint 2"),
        (2, False, "breakpoint 1"),
    ]


def test_a_line_with_a_comprehension_is_one_stop() -> None:
    program = Program("""
        def f(i):
            return i
        a = sum(f(i) for i in [f(j) for j in range(3)])
        b = [
            f(
                i
            )
            for i in range(2)
        ]
    """)
    port = program.run(mode="continue", breaks=[program.stop(3), program.stop(6, "i == 1", 2)])
    assert [(a.here.line, a.fired) for a in port.arrivals] == [(3, True), (6, False), (6, True)]


def test_a_comprehension_within_a_function_is_one_step() -> None:
    """On no line twice, whichever elements it has, nor as an error passes through it."""
    program = Program("""
        def g(n, rows):
            try:
                a = [[i / n for i in row] for row in rows]
                b = {i: [j for j in range(i)] for i in a[0]}
            except ZeroDivisionError:
                a = b = None
            return {k for k in (a, b) if k is None}, n

        x = g(1, [[], [1, 2], [3]])
        y = g(0, [[1]])
        z = [
            i
            for i in x
        ]
    """)
    port = program.run(then="step")
    first, second = (2, 3, 4, 7), (2, 3, 5, 6, 7)
    assert port.places[:13] == [
        "<module>:1", "<module>:9", *(f"g:{line}" for line in first),
        "<module>:10", *(f"g:{line}" for line in second), port.places[12],
    ]  # fmt: skip
    assert all(place.startswith("<module>") for place in port.places[12:])


def test_variables_of_a_comprehension_and_those_around_it_are_known_within_it() -> None:
    """Also in a module, where CPython 3.12 keeps the former apart and spoils them if looked at."""
    program = Program("""
        n = 5
        def f(i):
            return i
        x = [
            f(
                i + n
            )
            for i in range(3)
        ]
    """)
    seen = []

    def look(frame: Any, arrival: Any) -> None:
        around = frame if frame.f_code.co_name != "f" else frame.f_back
        names = [
            frames.evaluate(around, text) for text in ("i", "n", "f(i) + n", "[i for _ in 'a']")
        ]
        seen.append((arrival.here.function, names))
        if around is frame:
            assert {"i", "n"} <= set(frames.variables(frame))

    stops = [program.stop(6, "i + n < 7"), program.stop(3, "i == 7", 2)]  # arrivals all the same
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program.run(*[look] * 6, mode="continue", breaks=stops)
    assert [names for _, names in seen[::2]] == [[i, 5, i + 5, [i]] for i in range(3)]
    assert [where for where, _ in seen[1::2]] == ["f"] * 3
    assert program.namespace["x"] == [5, 6, 7]
    assert "i" not in program.namespace


def test_a_pause_and_a_break_point_are_seen_within_a_comprehension() -> None:
    program = Program("""
        port = None
        def f():
            for i in [
                setattr(port, "pause_wanted", i == 2) or
                i
                for i in range(5)
            ]:
                pass
        f()
    """)

    def know(frame: Any, arrival: Any) -> None:
        frame.f_globals["port"] = program.port

    port = program.run(know, mode="continue", breaks=[program.stop(9), program.stop(5, "i == 4")])
    fired = [(a.here.function in ("f", "<listcomp>"), a.reason) for a in port.arrivals if a.fired]
    assert fired == [(False, "break"), (True, "pause"), (True, "break")]


LONG = """
def add(a, b=0):
    return a + b
y = 0
for i in range(
    1,
    3,
):
    y = add(
        i,
        add(y),
    )
"""


def test_a_statement_of_several_lines_is_one_stop_at_its_first() -> None:
    """Python comes to that line again for the call itself, which is no second step and no hit."""
    program = Program(LONG)
    port = program.run(then="next")
    assert port.lines == [1, 3, 4, 5, 6, *(2 * [8, 9, 10, 4])]
    port = program.run(mode="continue", breaks=[program.stop(8), program.stop(10, number=2)])
    assert port.lines == [8, 10, 8, 10]
    port = program.run(mode="continue", breaks=[program.stop(8, hits=">= 2")])
    assert [(a.here.line, a.fired) for a in port.arrivals] == [(8, False), (8, True)]


def test_out_of_a_call_in_an_argument_stops_before_the_call_that_takes_it() -> None:
    program = Program(LONG)
    port = program.run("step", "step", "step", "out", mode="continue", breaks=[program.stop(8)])
    assert port.places[:5] == ["<module>:8", "<module>:9", "<module>:10", "add:2", "<module>:8"]
    port = program.run(*["step"] * 5, mode="continue", breaks=[program.stop(8)])
    assert port.places[4:6] == ["<module>:8", "add:2"]


@pytest.mark.parametrize(
    "source",
    [
        "x = [|f(1),|f(2),|]",
        "x = f(|1|) if f(|0|) else f(|2|)",
        "x = f(f(|1|),|f(|2|))",
        "if (f(1)|and f(1)|and f(1)|):;  x = 1",
        "for i in range(|f(1),|f(3),|):;  x = i",
        "while (n < f(3)|and f(1)|):;  n += 1",
        "with open(|os.devnull,|'rb',|) as file:;  x = 1",
        "assert f(|f(1),|2|), f(|3|)",
        "x = f(|1,|k=f(|2|)|)",
        "x = {|'a': f(1),|'b': f(2)|}['a']",
        "x = f(|[one for one in range(|3)],|2|)",
        "x = {k: v|for k, v in enumerate([|1,|f(2)|])|}",
        "x = ','.join([|'1',|*map(|str,|[1]|)|])",
    ],
)
def test_a_break_point_is_come_to_as_often_as_if_all_were_one_line(source: str) -> None:
    def times(text: str) -> int:
        begin = "import os\nn = 0\ndef f(*a, **k): return a[-1]\n"
        program = Program(begin + text.replace(";", "\n"))
        return len(program.run(mode="continue", breaks=[program.stop(4)]).lines)

    assert times(source.replace("|", "\n    ")) == times(source.replace("|", " "))


def test_a_line_that_was_passed_over_is_come_to_at_the_end_of_the_statement() -> None:
    program = Program(
        "c = 0\nx = [1 if c\n    else len('two'),\n    len('one')]\ny = [4 if c\n    else 5]"
    )
    assert 2 in program.run(mode="continue", breaks=[program.stop(2)]).lines
    program = Program("f = len\nc = 0\nx = f(\n    'a'\n) if (\n    c\n) else f(\n    'bc')")
    assert program.run(mode="continue", breaks=[program.stop(3)]).lines == [3]


def test_several_break_points_of_a_line_are_one_stop() -> None:
    program = Program("x = 1\ny = 2")
    breaks = [program.stop(2, "x == 1", 1), program.stop(2, "x == 2", 2), program.stop(2, "", 3)]
    port = program.run(mode="continue", breaks=breaks)
    assert [a.detail for a in port.arrivals] == ["breakpoints 1, 3"]


def test_a_step_that_ends_at_a_condition_that_is_false_is_a_step() -> None:
    program = Program("x = 1\ny = 2")
    port = program.run("next", breaks=[program.stop(2, "x == 2")])
    assert [(a.reason, a.fired) for a in port.arrivals] == [("entry", True), ("step", True)]


def test_break_points_set_while_it_stands_hold_in_functions_on_the_stack_too() -> None:
    program = Program(NESTED)

    def set_it(frame: Any, arrival: Any) -> None:
        program.port.breaks.replace([program.stop(8).packed(), program.stop(11, number=2).packed()])

    port = program.run(set_it, mode="continue", breaks=[program.stop(2)])
    assert port.lines == [2, 8, 11]


def test_a_break_point_in_library_code_stops_there_alone() -> None:
    code = torch.nn.Linear.forward.__code__
    line = max(n for *_, n in code.co_lines() if n)
    program = Program("""
        import torch
        model = torch.nn.Linear(2, 2)
        y = model(torch.ones(1, 2))
        y = model(y)
        z = y
    """)

    def set_it(frame: Any, arrival: Any) -> str:
        program.port.breaks.replace([Break(1, code.co_filename, line).packed()])
        return "step"

    port = program.run("next", set_it, "step", "next", "next", "out", "next")
    assert port.places == [
        "<module>:1", "<module>:2", "<module>:3", f"forward:{line}", "<module>:4",
        f"forward:{line}", "<module>:5",
    ]  # fmt: skip
    assert [spot.function for spot in port.arrivals[3].stack] == ["<module>", "forward"]
    assert [a.reason for a in port.arrivals[3:]] == ["break", "step", "break", "step"]


def test_a_break_point_reaches_a_library_frame_that_runs_already(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    library = folder / "disco_lib.py"
    library.write_text("def call(f):\n    f()\n    a = 1\n    return a\n")
    program = Program("""
        def f():
            x = 1
        call(f)
        y = 1
    """)
    exec(compile(library.read_text(), str(library), "exec"), program.namespace)

    def set_it(frame: Any, arrival: Any) -> None:
        program.port.breaks.replace([Break(1, str(library), 4).packed()])

    port = program.run(set_it, "next", "next", mode="continue", breaks=[program.stop(2)])
    assert port.places == ["f:2", "call:4", "<module>:4"]


def test_a_pause_stops_at_the_next_line() -> None:
    program = Program("""
        import threading
        x = 0
        while not ready.is_set():
            x += 1
        y = x
    """)
    ready = program.namespace["ready"] = threading.Event()

    def stop_it(frame: Any, arrival: Any) -> None:
        ready.set()

    timer = threading.Timer(0.05, lambda: setattr(program.port, "pause_wanted", True))
    timer.start()
    port = program.run(stop_it, mode="continue")
    timer.join()
    assert [a.reason for a in port.arrivals] == ["pause"]
    assert program.namespace["y"] > 0


# -- breakpoint() --------------------------------------------------------------------------------


def test_a_program_that_runs_freely_is_traced_from_where_it_stops() -> None:
    program = Program("""
        def f():
            a = 1
            stop()
            b = 2
            return g()

        def g():
            return 3

        x = f()
        y = x
    """)
    port = program.port = ScriptedPort(["next", "next", "step", "out", "next", "next"])
    tracer = Tracer(program.worker, port)
    names: dict[str, Any] = {"tracer": tracer, "sys": sys}
    exec("def stop(): tracer.stop_at(sys._getframe(1), 'breakpoint()')", names)
    program.namespace["stop"] = names["stop"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "FLOORS", {sys._getframe().f_code})
        program.execute()
        tracer.disarm()
    assert [(a.reason, a.here.function, a.here.line) for a in port.arrivals[:4]] == [
        ("breakpoint()", "f", 3), ("step", "f", 4), ("step", "f", 5), ("step", "g", 8),
    ]  # fmt: skip
    assert sys.gettrace() is None
    assert port.arrivals[0].here.loops == ()


def test_a_stop_within_an_evaluation_is_none() -> None:
    program = Program("x = 1\ny = 2")

    def ask(frame: Any, arrival: Any) -> None:
        program.tracer.stop_at(frame, "breakpoint()")

    program.namespace["stop"] = lambda: program.tracer.stop_at(sys._getframe(1), "breakpoint()")
    port = program.run(ask, mode="continue", breaks=[program.stop(2, "stop() is None")])
    assert len(port.arrivals) == 1


# -- nothing stays, nothing changes --------------------------------------------------------------


HELD = """
    import torch

    def inner(x):
        y = x + 1
        z = y
        return z

    def outer():
        x = torch.zeros(3)
        note(x)
        return inner(x)

    try:
        outer()
    finally:
        after = 1
"""


def test_an_interrupt_goes_through_and_no_frame_stays() -> None:
    program = Program(HELD)
    seen: list[weakref.ref[Any]] = []
    program.namespace["note"] = lambda x: seen.append(weakref.ref(x))

    def end(frame: Any, arrival: Any) -> None:
        raise WorkerInterrupted("end")

    gc.disable()
    try:
        with pytest.raises(WorkerInterrupted):
            program.run("next", end, mode="continue", breaks=[program.stop(4)])
        assert seen[0]() is None
        assert program.namespace["after"] == 1
        assert sys.gettrace() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", ["step", "next", "out", "until", "continue"])
def test_after_the_end_nothing_is_kept(mode: str) -> None:
    program = Program(HELD)
    seen: list[weakref.ref[Any]] = []
    program.namespace["note"] = lambda x: seen.append(weakref.ref(x))
    gc.disable()
    try:
        program.run(then=mode, mode="continue", breaks=[program.stop(4)])
        assert seen[0]() is None
    finally:
        gc.enable()


def test_frames_of_a_traceback_still_tell_their_trips() -> None:
    program = Program("for i in range(3):\n    1 / (2 - i)")
    with pytest.raises(ZeroDivisionError) as caught:
        program.run(mode="continue")
    *_, (frame, _) = traceback.walk_tb(caught.value.__traceback__)
    assert [spot.loops for spot in frames.stack_of_frames([frame], [2])] == [((1, 2, 3),)]


def test_a_generator_that_outlives_its_program_goes_on_in_the_next() -> None:
    program = Program("""
        def numbers():
            yield 1
            yield 2
        g = numbers()
        next(g)
    """)
    program.run(mode="continue")
    later = Program("next(g)")
    later.namespace["g"] = program.namespace["g"]
    port = later.run(then="step")
    assert port.places == ["<module>:1", "numbers:3"]


def test_another_trace_function_is_put_back_and_warned_of_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(tracer, "_warned", set())

    def other(frame: Any, event: str, arg: Any) -> None:
        return None

    program = Program("x = 1")
    before = sys.gettrace()
    sys.settrace(other)
    try:
        with pytest.warns(RuntimeWarning, match="another trace function"):
            port = program.run(then="step")
        program.run()  # another warning would be an error here
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert after is other
    assert port.lines == [1]


def test_a_program_that_takes_the_trace_function_away_is_told_of(monkeypatch: Any) -> None:
    monkeypatch.setattr(tracer, "_warned", set())
    program = Program("import sys\nsys.settrace(None)\nx = 1\ny = 2")
    with pytest.warns(RuntimeWarning, match=r"called sys\.settrace itself"):
        port = program.run(then="step")
    assert port.lines == [1, 2]


def test_hooks_see_each_line_before_its_stop_and_each_return() -> None:
    seen: list[Any] = []
    program = Program(NESTED)

    def note(frame: Any, arrival: Any) -> str:
        seen.append("stop")
        return "continue"

    program.run(
        note,
        mode="continue",
        breaks=[program.stop(7)],
        on_line=lambda frame: seen.append(frame.f_lineno),
        on_return=lambda frame: seen.append(frame.f_code.co_name),
    )
    assert seen == [
        1, 5, 10, 6, 2, 3, "inner", 7, "stop", 2, 3, "inner", 8, "outer", 11, "<module>",
    ]  # fmt: skip


def test_variables_shared_with_inner_functions_keep_what_an_evaluation_gave_them() -> None:
    program = Program("""
        def f():
            n = 0
            def bump():
                nonlocal n
                n += 1
            bump()
            m = n
            return n
        x = f()
    """)

    def call(frame: Any, arrival: Any) -> None:
        frames.evaluate(frame, "bump()")

    program.run(call, mode="continue", breaks=[program.stop(7), program.stop(8, "bump()", 2)])
    assert program.namespace["x"] == 3


def test_stepping_changes_no_result() -> None:
    source = """
        def walk(n):
            try:
                for i in range(n):
                    if i % 3 == 2:
                        continue
                    yield i * n
            finally:
                log.append(("closed", n))

        def pick(items, k=2):
            out = []
            for item in items:
                out.append(item)
                if len(out) == k:
                    return out
            else:
                return out + ["all"]

        log = []
        result = [pick(walk(n)) for n in range(5)]
        try:
            (lambda: {}["missing"])()
        except KeyError as error:
            result.append(str(error))
        result.append(log)
    """
    free = Program(source)
    free.execute()
    for mode in ("step", "next", "out", "until", "continue"):
        stepped = Program(source)
        stepped.run(then=mode, mode="step")
        assert stepped.namespace["result"] == free.namespace["result"]


def test_a_worker_traced_on_a_thread_leaves_other_threads_alone() -> None:
    program = Program("x = 1\ny = 2")
    traced: list[Any] = []

    def work() -> None:
        program.run(then="step")
        traced.append(sys.gettrace())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert traced == [None]
    assert program.port.lines == [1, 2]
