"""``%disco_explain`` after failures of every kind, on threads and on processes."""

from __future__ import annotations

import html
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Kernel, Result


@pytest.fixture(scope="module", params=["threads", "processes"])
def three(request: Any) -> Iterator[Kernel]:
    """A kernel with three workers, which the tests share."""
    kernel = Kernel()
    kernel.ok(f"%load_ext discolab\n%disco_session 3 --devices cpu --engine {request.param}")
    kernel.engine = request.param
    yield kernel
    kernel.close()


def lines(kernel: Kernel) -> list[str]:
    """What is explained, without title."""
    shown = kernel.ok("%disco_explain")
    title, *rest = shown.text.splitlines()
    assert title.startswith("explain · sess: 3 workers")
    words = html.unescape(re.sub(r"<[^>]*>", "", shown.data[-1]["text/html"]))
    assert all("".join(line.split()) in "".join(words.split()) for line in rest)
    assert sum(line[:1].isdigit() for line in rest) <= 5
    assert all(line[:1].isdigit() for line in rest[:-1])
    return rest


def number(result: Result) -> str:
    """``Cell In[3]``: which cell it was that failed."""
    found = result.traceback
    return found[found.index("Cell In[") : found.index("]") + 1]


def test_nothing_has_failed(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\nx = 1")
    assert lines(three) == ["1. nothing has failed"]
    assert three.ok("sess.explain()").text.endswith("1. nothing has failed")
    assert three.ok("sess.explain().failed").text == "False"
    assert "Examples" in three.ok("%disco_explain?").pages[0]["text/plain"]
    assert "%disco_explain" in three.complete("%disco_expl")


def test_one_raises_while_the_others_wait(three: Kernel) -> None:
    failed = three.fails("%%disco\nif rank == 1:\n    raise ValueError('x')\n"
                         "ccl.all_reduce(torch.ones(3))")  # fmt: skip
    cell = number(failed)
    assert lines(three) == [
        f"1. worker 1 raised ValueError: x · {cell}, line 3",
        "2. workers 0, 2 waited for worker 1 in all_reduce #1 of float32[3] in workers 0-2 · "
        f"{cell}, line 4",
        "%disco_pm 1 shows the variables where it was raised",
    ]
    assert "explain" in three.ok("%disco_debug explain").text


@pytest.mark.parametrize(
    ("code", "what", "first", "second"),
    [
        ("ccl.all_reduce(torch.ones(3 + rank // 2))", "the shape",
         "workers 0-1: called all_reduce(sum) of float32[3]",
         "worker 2: called all_reduce(sum) of float32[4]"),
        ("ccl.all_reduce(torch.ones(3, dtype=torch.float64 if rank else torch.float32))",
         "the dtype", "worker 0: called all_reduce(sum) of float32[3]",
         "workers 1-2: called all_reduce(sum) of float64[3]"),
        ("(ccl.all_gather if rank == 1 else ccl.all_reduce)(torch.ones(3))", "the operation",
         "workers 0, 2: called all_reduce(sum) of float32[3]",
         "worker 1: called all_gather of float32[3]"),
    ],
)  # fmt: skip
def test_collectives_that_do_not_fit(
    three: Kernel, code: str, what: str, first: str, second: str
) -> None:
    cell = number(three.fails(f"%%disco\n{code}"))
    told = lines(three)
    head = f"1. collective #1 in workers 0-2: members disagree on {what}"
    assert told[0].startswith(head)
    assert told[1] == f"2. {first} · {cell}, line 2"
    assert told[2] == f"3. {second} · {cell}, line 2"
    assert len(told) == 4


def test_one_never_comes(three: Kernel) -> None:
    three.fails("%%disco\nif rank: ccl.all_reduce(torch.ones(3))")
    told = lines(three)
    assert "all_reduce #1 of float32[3] in workers 0-2 can't complete" in told[0]
    assert re.fullmatch(r"2. worker 0: finished the call without it · Cell In\[\d+\]", told[1])
    assert "workers 1-2: called all_reduce(sum)" in told[2]


def test_one_gives_up_waiting(three: Kernel) -> None:
    code = "if rank == 2: time.sleep(2)\nccl.all_reduce(torch.ones(3), timeout=0.5)"
    cell = number(three.fails(f"%%disco\nimport time\n{code}"))
    told = lines(three)
    assert re.match(r"1. workers? (0|1|0-1) gave up after 0.5 s waiting for all_reduce #", told[0])
    assert told[0].endswith(f"in workers 0-2 (missing: worker 2) · {cell}, line 4")
    assert told[1] == f"2. workers 0-1: called all_reduce(sum) of float32[3] · {cell}, line 4"
    # what it did, not what it met when it came too late
    assert told[2] == (
        "3. worker 2: has not come to it yet: waiting for time.sleep(2) in the cell "
        f"· {cell}, line 3"
    )
    assert told[3:] in ([], ["%disco_pm 0 shows the variables where it was raised"],
                        ["%disco_pm 1 shows the variables where it was raised"])  # fmt: skip


def test_an_assertion_at_which_the_workers_stand(three: Kernel) -> None:
    three.ok("%disco_restart")
    code = "%%disco\nx = torch.ones(2)\nx[0] += rank == 1\ndisco_assert(x, 'replicated')"
    three.fails(code)
    fact = (
        "workers 0-2 failed disco_assert(x, 'replicated'): workers 0, 2 hold one value, worker 1 "
        "another; largest difference 1 at [0] (1 on worker 0, 2 on worker 1), 1 of 2 elements there"
    )
    first, advice = lines(three)
    assert first.endswith(", line 4")
    assert first.startswith(f"1. {fact} · Cell In[")
    assert advice == "%disco_where shows the variables there, %disco_continue goes on"
    assert three.ok("sess.explain().failed").text == "True"
    three.fails("%disco_continue")
    assert lines(three)[0].startswith("1. workers 0-2 raised DiscoAssertionError: disco_assert(x")


def test_a_breakpoint_is_no_failure(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\nif rank == 1:\n    breakpoint()\n    y = 1\nccl.barrier()")
    told = lines(three)
    assert told[0] == "1. nothing has failed"
    assert re.fullmatch(
        r"2. worker 1 stands in the debugger: breakpoint\(\) · Cell In\[\d+\], line 3", told[1]
    )
    assert re.fullmatch(r"3. workers 0, 2 wait for worker 1 in barrier .*, line 5", told[2]), told
    three.ok("%disco_continue")
    assert lines(three) == ["1. nothing has failed"]


def test_one_stands_at_a_breakpoint_while_another_has_failed(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\nif rank == 0:\n    breakpoint()\n    y = 1\nif rank == 1:\n"
             "    raise ValueError('x')\nccl.all_reduce(torch.ones(3))")  # fmt: skip
    patterns = (
        r"1. worker 1 raised ValueError: x · Cell In\[\d+\], line 6",
        r"2. worker 2 waited for worker 1 in all_reduce #1 of float32\[3\] in .* · .*line 7",
        r"3. worker 0 stands in the debugger: breakpoint\(\) · Cell In\[\d+\], line 3",
        r"%disco_where shows .*",
    )
    until = time.monotonic() + 20
    told = lines(three)
    while len(told) < 4 or re.search("waits|is running", "".join(told)):
        assert time.monotonic() < until, told
        told = lines(three)  # workers may not have come there yet, worker 2 not have been told
    assert len(told) == len(patterns), told
    assert all(map(re.fullmatch, patterns, told)), told
    assert three.ok("sess.explain().failed").text == "True"
    where = three.ok("%disco_where").text
    assert re.search("^worker 2 ended with CollectiveAborted: .* can't complete$", where, re.M), (
        where
    )
    three.fails("%disco_continue")
    three.ok("%%disco\nbreakpoint()\ny = 1")  # what has failed before is not told of this one
    assert lines(three)[0] == "1. nothing has failed"
    three.ok("%disco_continue")


def test_who_does_not_answer_is_named(three: Kernel) -> None:
    if three.engine == "threads":  # what workers there have recorded is read at once
        return
    three.ok("%disco_restart")
    three.ok("%%disco -a\nimport ctypes\nif rank == 2: ctypes.PyDLL(None).sleep(4)")
    told = lines(three)  # it keeps Python's lock, so it does not answer
    assert any(line.startswith("2. worker 2 has not answered") for line in told), told


def test_where_nan_is_hunted_and_where_one_has_raised(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco --nan\nx = torch.zeros(2)\nif rank == 2:\n    x = x / 0")
    (told, *_) = lines(three)
    assert told.startswith("1. worker 2: aten.div made 2 NaN in float32[2]"), told
    assert told.endswith("line 4")
    three.ok("%disco_abort")
    three.ok("%%disco --pm\nif rank == 0:\n    raise KeyError('k')")
    (told, *_) = lines(three)
    assert told.startswith("1. worker 0 raised KeyError: 'k' · Cell In["), told
    three.ok("%disco_abort")


HANG = "import time\nif rank == 2:\n    time.sleep({})\nccl.all_reduce(torch.ones(3))"


def test_a_worker_that_hangs_outside_any_collective(three: Kernel) -> None:
    three.ok("%%disco -a\n" + HANG.format(30))
    told: list[str] = []
    for _ in range(100):  # until all are where they will be
        told = lines(three)
        if len(told) > 2 and "since" in told[0] and "workers 0-1 wait" in told[1]:
            break
        time.sleep(0.1)
    assert "worker 2 is waiting for time.sleep(30) in the cell, since" in told[0]
    assert "outside any collective" in told[0]
    assert told[0].endswith("line 4")
    assert "workers 0-1 wait for worker 2 in all_reduce #1 of float32[3]" in told[1]
    assert told[1].endswith("line 5")
    three.ok("sess.interrupt()")


def test_one_fails_in_a_cell_to_which_a_busy_one_has_not_come(three: Kernel) -> None:
    busy = "import time\nif rank == 1: time.sleep(60)"
    three.fails(f"%%disco --timeout 0.5\n{busy}")
    failed = three.fails("%%disco --timeout 0.5\nif rank == 0: raise ValueError('x')")
    assert "worker 0 failed in the cell: ValueError: x" in failed.traceback.replace(" (called", "")
    told = lines(three)
    assert told[0].startswith("1. worker 0 raised ValueError: x · Cell In[")
    assert told[1].startswith("2. worker 1 is waiting for time.sleep(60) in the cell")
    assert three.ok("sess.interrupt()").text == "[]"
    # a wait that was given up leaves what it told to the next one
    later = three.fails("sess.sync_all()").error["evalue"]
    assert later == "worker 0 failed in the cell: ValueError: x"


def test_who_has_failed_is_not_told_as_stopped(three: Kernel) -> None:
    code = "%%disco\nimport time\nif rank == 0: raise ValueError('x')\ntime.sleep(60)"
    words = three.fails(code, interrupt_after=1.0).error["evalue"]
    assert re.fullmatch(
        r"stopped workers 1-2 at (Cell In\[\d+\]), line 4; "
        r"worker 0 had failed: ValueError: x at \1, line 3",
        words,
    )
    three.fails("1 / 0")  # the last error kept the cell that was stopped, whose register goes now
    three.ok("import gc; gc.collect()")
    later = three.fails("%%disco\nif rank == 1: raise KeyError('later')\nccl.barrier()")
    assert later.error["evalue"] == "worker 1 failed in the cell: KeyError: 'later'"
    assert "ValueError" not in later.traceback


def test_it_was_stopped(three: Kernel) -> None:
    three.ok("%%disco\nimport time")  # of new workers the first cell takes longer
    three.fails("%%disco\n" + HANG.format(100), interrupt_after=1.5)
    told = lines(three)
    assert told[0].startswith("1. worker 2 was stopped, outside any collective · Cell In["), told
    assert told[0].endswith("line 4")
    assert told[1].startswith("2. workers 0-1 waited for worker 2 in all_reduce(sum) of float32[3]")
    assert "line 5" in told[1]
    three.ok("%%disco\n1")
    assert lines(three) == ["1. nothing has failed"]  # who has stopped it knows of it


def test_one_that_waited_for_a_message_is_not_said_to_be_outside(three: Kernel) -> None:
    three.fails("%%disco\nimport time\nif rank == 1: ccl.recv(torch.zeros(3), 0)\n"
                "if rank == 2: ccl.barrier()\nfor _ in range(100): time.sleep(0.1)",
                interrupt_after=1.5)  # fmt: skip
    told = [line.partition(" · Cell In[")[0] for line in lines(three)]
    assert told == [
        "1. worker 0 was stopped, outside any collective",
        "2. worker 1 was in recv from worker 0 of float32[3]",
        "3. worker 2 waited for workers 0-1 in barrier",
    ]


def test_why_the_workers_stood_outlives_their_end(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\nlr = 0.1")
    three.ok("%%disco\nif rank == 2: lr = 0.2")
    three.fails("%%disco\ndisco_assert(lr, 'replicated')")
    before = lines(three)
    assert before[0].startswith("1. workers 0-2 failed disco_assert(lr, 'replicated'): ")
    three.ok("%disco_abort")
    assert lines(three) == before[:-1]  # nobody stands there any more
    three.ok("%%disco --pm\nval = [1, 2][rank]")
    three.ok("%disco_abort")
    assert lines(three)[0].startswith("1. worker 2 raised IndexError: list index out of range · ")
    three.ok("%%disco\n1")
    assert lines(three)[0] == "1. nothing has failed"
    three.ok("%%disco --step\na = 1\nb = 2")
    three.ok("%disco_abort")
    assert lines(three)[0].startswith("1. workers 0-2 were stopped · ")


def test_nan_on_one_worker_first(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\nw = torch.ones(4)\nmask = torch.tensor([0, float('-inf')])")
    three.ok("%%disco\na = 1\nif rank == 1:\n    w = w / 0 - w / 0")
    three.ok("%%disco\nw = w + 1\nccl.all_reduce(w)")
    told = lines(three)
    assert told[0] == "1. nothing has failed"
    assert told[1].startswith("2. w: NaN on worker 1 first · Cell In[")
    assert told[1].endswith("line 4")
    three.ok("%%disco\nw = torch.zeros(4)")
    assert lines(three) == ["1. nothing has failed"]


def test_since_when_values_differ(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(4, 4)\nshard = rank")
    three.ok("%%disco\nlr = 0.1")
    three.ok("%%disco\nwith torch.no_grad():\n    if rank == 2: model.weight[0, 0] += 1")
    three.ok("%%disco\nother = 2")
    told = lines(three)
    assert told[0] == "1. nothing has failed"
    assert told[1].startswith(
        "2. model: equal on all workers before, other on worker 2 since · Cell In["
    )
    assert len(told) == 2
    failed = three.fails("%%disco\nassert other == 3, 'no'")
    told = lines(three)
    assert told[0].startswith("1. workers 0-2 raised AssertionError: no · " + number(failed))
    assert "model: equal on all workers before" in told[1]


def test_each_variable_is_told_of_its_own_worker_and_line(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\nx, z = torch.ones(3), 0\ny, old = torch.ones(3), x")
    cell = "%%disco\nz += rank == 1\nif rank == 1: x += 1\nif rank == 2: y[0] = float('nan')"
    three.ok(cell)
    told = "\n".join(lines(three))
    assert re.search(r"x, z: equal on all workers before, other on worker 1 since \S+ Cell In\S+$",
                     told, re.M), told  # fmt: skip
    assert re.search(r"y: equal on all .* other on worker 2 since .*, line 4$", told, re.M), told
    assert re.search(r"y: NaN on worker 2 first .*, line 4$", told, re.M), told


def test_what_is_written_past_torchs_count_is_seen(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\nx, y, large = torch.ones(8), torch.ones(8), torch.ones(9, 9, 9)")
    three.ok("%%disco\nif rank == 1: x.data[5] = 2")
    three.ok("%%disco\nif rank == 1: y.numpy()[3] = 2")
    three.ok("%%disco\nif rank == 1: large.data.mul_(2)")
    told = "\n".join(lines(three))
    for name in ("x", "y", "large"):
        assert re.search(rf"\. {name}: equal on .*, other on worker 1 since", told), told
    three.ok("%disco_restart")
    three.ok("%%disco\nnet = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(9)])\n"
             "for p in net.parameters(): p.data.fill_(1)")  # fmt: skip
    three.ok("%%disco\nif rank == 1:\n    for p in net.parameters(): p.data.mul_(2)")
    assert "net, p: equal on all workers before, other on worker 1" in "\n".join(lines(three))


def test_what_is_equal_again_is_not_said_to_differ(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\nlarge, small = torch.ones(9, 9, 9), torch.ones(3)\nx = torch.ones(9, 9, 9)")
    three.ok("%%disco\nlarge[0, 0, 1] += rank\nsmall += rank")
    three.ok(
        "%%disco\nlarge.data[0, 0, 1] = 1; small.data.fill_(1)\nif rank == 2: x.data[0, 0, 1] = 3"
    )
    told = lines(three)
    assert re.fullmatch(
        r"2. x: equal on all workers after this cell, other on worker 2 now · Cell In\[\d+\]",
        told[1],
    ), told
    assert len(told) == 2, told


def test_what_a_busy_worker_may_have_changed_is_told_with_perhaps(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\nimport time\nw = torch.ones(3)\ngo = False")
    three.ok("%%disco\nw[0] += rank == 1")
    three.ok("%%disco -a\nif rank == 2: time.sleep(60)")
    told = lines(three)
    while not any("sleep(60)" in line for line in told):
        told = lines(three)
    assert any(
        re.search(r"w: .*, other on worker 1 since, perhaps no longer · Cell", line)
        for line in told
    ), told
    three.ok("sess.interrupt()")


def test_what_can_not_be_read_now_is_not_compared_as_it_was(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\nx, y = 1, 1\nclass Own(int):\n    pass")
    three.ok("%%disco\nx = Own(2) if rank == 1 else 2\ny += rank == 2\nbreakpoint()\nx")
    told = "\n".join(lines(three))
    assert re.search(r"y: equal on all workers .*, other on worker 2 now", told), told
    assert not re.search(r"\bx:", told), told
    three.ok("%disco_continue")


def test_what_the_failing_line_reads_comes_first(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\nmask, b, c = torch.full((1,), float('nan')), torch.zeros(2), 0\n"
             "model = torch.nn.Linear(2, 1)\nwith torch.no_grad():\n"
             "    for p in model.parameters(): p.fill_(1)\np = 0")  # fmt: skip
    three.ok("%%disco\nb[0] += rank == 2")
    three.ok("%%disco\nc += rank == 0")
    three.ok("%%disco\nif rank == 1: model.weight.data[0, 0] = 5.0")
    cell = number(three.fails("%%disco\nloss = model(torch.ones(2)).sum()\nassert loss < 4, 'no'"))
    told = lines(three)
    assert told[:2] == [
        f"1. worker 1 raised AssertionError: no · {cell}, line 3",
        f"2. loss: other on worker 1 · {cell}, line 2",
    ]
    assert told[2].startswith("3. model: equal on all workers before, other on worker 1 since · Ce")
    assert told[3].startswith("4. c: equal on all workers before, other on worker 0 since · Cell I")
    assert len(told) == 5  # with the advice
    three.fails("%%disco\nraise ValueError('v')")
    three.fails("%%disco\nraise ValueError('v')")
    assert len(lines(three)) == 2  # those were told of before


def test_what_is_not_there_on_some_workers(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\nx0, f = torch.ones(2), lambda: 1\nif rank == 2: del x0, f")
    for code in ("x0 + 1", "f()"):
        three.fails(f"%%disco\n{code}")
        name = code.partition(" ")[0].partition("(")[0]
        assert re.match(rf"2. {name}: not on worker 2 since · Cell In\[\d+\]$", lines(three)[1])
    three.ok("%%disco -t 0-1\nu = torch.ones(1)")
    three.fails("%%disco\nu += 1")
    assert re.match(r"2. u: not on worker 2 since · Cell In\[\d+\]$", lines(three)[1])
    three.ok("%%disco\nv = 1")
    three.ok("%%disco\ndel v")
    three.ok("%%disco -t 1\nv = 2")
    cell = number(three.fails("%%disco\nv + 1"))
    deleted = f"Cell In[{int(cell[8:-1]) - 2}]"  # not the one in which worker 1 made it anew
    assert lines(three)[1] == f"2. v: not on workers 0, 2 since · {deleted}"


def test_random_numbers_drawn_by_one_in_the_cell_that_fails(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\ntorch.manual_seed(0)")
    three.fails("%%disco\nif rank == 1: c = torch.rand(3)\nd = torch.rand(9)\n"
                "disco_assert(d, 'replicated')")  # fmt: skip
    told = lines(three)
    state = "2. the state of torch's random numbers: equal on all workers before, other on worker 1"
    assert told[1].startswith(f"{state} since · Cell In["), told
    three.ok("%disco_abort")


def test_what_a_variable_held_may_live_on(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\nx = torch.ones(3)\nhuge = 10**5000\nlater = 0\n"
             "class Odd:\n    __class__ = property(lambda self: 1 / 0)\nodd = Odd()")  # fmt: skip
    three.ok("%%disco\nif rank == 1: x[0] = 2")
    three.ok("%%disco\nold, x = x, torch.ones(3)\nlater = 1")
    three.ok("%%disco\nif rank == 2: later = 2")
    told = "\n".join(lines(three))
    assert re.search(r"later: equal on all workers before, other on worker 2", told), told
    assert " x" not in told


def test_no_advice_where_no_cell_has_failed(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("failed = sess.call_packed(lambda: 1 / 0)\nimport time; time.sleep(0.2)")
    assert "%disco_pm" not in "".join(lines(three))
    three.ok("%disco_restart")


def test_random_states_that_differ(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\na = 1\nw = torch.randn(3)")
    told = lines(three)
    assert told[1].startswith("2. w: another value on each worker, perhaps made with random num")
    assert "is torch.manual_seed(seed) missing?" in told[1]
    assert told[1].endswith("line 3")
    three.ok("%disco_restart")
    three.ok("%%disco\ntorch.manual_seed(0)\nw = torch.randn(3)")
    three.ok("%%disco\nif rank == 2: torch.randn(1)")
    told = lines(three)
    assert "the state of torch's random numbers: equal on all workers before" in told[1]
    assert "other on worker 2 since · Cell In[" in told[1]


def test_what_a_script_has_changed_is_not_told_of_a_cell(three: Kernel, tmp_path: Path) -> None:
    three.ok("%disco_restart")
    script = tmp_path / "draws.py"
    script.write_text("import torch\nx = torch.ones(2)\n")
    three.ok("%%disco\ntorch.manual_seed(0)")
    three.ok(f"%disco_run {script}")
    three.ok("%%disco\na = 1")
    three.fails("%%disco\nif rank == 1: torch.randn(1) / 0 + [0]")
    random = [line for line in lines(three) if "random numbers" in line]
    assert not [line for line in random if "Cell In[" in line], random


def test_numbers_that_are_meant_to_differ_are_not_asked_about(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\na = 1\nw, mine = torch.randn(3), 0\nmine = {'rank': rank}")
    told = lines(three)
    assert told[1].startswith("2. w: another value on each worker, perhaps"), told
    three.ok("%disco_restart")
    three.ok("%%disco\na = 1")
    three.ok("%%disco\ntorch.manual_seed(rank)\nw = torch.randn(3)")
    three.ok("%%disco\nv = torch.randn(3)")
    assert not [line for line in lines(three) if "missing?" in line]
    three.ok("%disco_restart")
    three.ok("%%disco\na = 1")
    three.ok("%%disco\nr = dist.get_rank()\ntwice = 2 * r\ntorch.randn(3)")
    assert not [line for line in lines(three) if "missing?" in line]


def test_out_of_memory(three: Kernel) -> None:
    three.fails("%%disco\nif rank == 1:\n    raise RuntimeError('CUDA out of memory. Tried')\n"
                "ccl.all_reduce(torch.ones(1))")  # fmt: skip
    told = lines(three)
    assert told[0].startswith("1. worker 1 ran out of memory: RuntimeError: CUDA out of memory.")
    assert told[0].endswith("line 3")


def test_an_earlier_failure_says_so(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.fails("%%disco\n1 / 0")
    three.ok("%%disco\n1")
    (told,) = lines(three)
    assert told.startswith("1. earlier: workers 0-2 raised ZeroDivisionError: division by zero")


def test_a_cell_that_could_not_be_compiled_is_the_last_one(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.fails("%%disco\nif rank == 1: raise ValueError('first')")
    three.fails("%%disco\ny = 1\nx = = 3")
    broken, earlier = lines(three)
    assert re.fullmatch(
        r"1\. the cell could not be compiled, nothing ran: SyntaxError: invalid syntax"
        r" · Cell In\[\d+\], line 3", broken), broken  # fmt: skip
    assert earlier.startswith("2. earlier: worker 1 raised ValueError: first · Cell In["), earlier
    three.ok("%%disco\ny = 1")
    (told,) = lines(three)
    assert told.startswith("1. earlier: worker 1 raised ValueError: first"), told
    three.fails("%%disco\nx = = 3")
    three.fails("sess.fetch(sess.call_packed(lambda: 1 / 0))")
    assert lines(three)[0].startswith("1. workers 0-2 raised ZeroDivisionError")


def test_what_led_to_a_failure_is_told(three: Kernel) -> None:
    """An error that is hidden behind a collective comes first, any other in the same line."""
    try_ = "%%disco\ntry:\n    {}\n    ccl.all_reduce(torch.ones(2 if rank else 3))\n{}"
    lost = "if rank == 1: raise ValueError('lost')"
    cell = number(three.fails(try_.format(lost, "finally:\n    ccl.barrier()")))
    told = lines(three)
    assert told[0] == f"1. worker 1 raised ValueError: lost · {cell}, line 3"
    assert told[1].startswith("2. collective #1 in workers 0-2: members disagree on the operation")
    more = "except Exception as e:\n    raise OSError('down') from e"
    cell = number(three.fails(try_.format("pass", more)))
    told = lines(three)
    assert told[0] == (
        f"1. collective #1 in workers 0-2: members disagree on the shape · {cell}, line 4"
    )
    assert told[3] == f"4. workers 0-2 raised OSError: down · {cell}, line 6", told
    code = "try:\n    {'a': 1}['b' if rank == 1 else 'a']\nexcept KeyError as e:\n    raise "
    for more, how in (("ValueError('w') from e", "from"), ("ValueError('w')", "while handling")):
        cell = number(three.fails(f"%%disco\n{code}{more}\nccl.barrier()"))
        told = lines(three)
        assert told[0] == (
            f"1. worker 1 raised ValueError: w at {cell}, line 5, {how} KeyError: 'b' "
            f"· {cell}, line 3"
        )
    cell = number(three.fails(f"%%disco\n{code}ValueError('w') from None"))
    assert lines(three)[0] == f"1. worker 1 raised ValueError: w · {cell}, line 5"


def test_what_a_remote_call_has_met_is_told_once(three: Kernel) -> None:
    """Not as raised at the line of the call: it was raised at another one, by another worker."""
    code = "def fail():\n    raise KeyError('k')\nif rank == 0:\n    rpc.rpc_sync(1, fail)"
    cell = number(three.fails(f"%%disco\n{code}"))
    assert lines(three)[0] == (
        f"1. worker 0 raised WorkerError: worker 1 failed in rpc of 'fail' (called at {cell}, "
        f"line 5): KeyError: 'k' · {cell}, line 5"
    )


def test_what_is_raised_while_anothers_failure_is_handled_comes_later(three: Kernel) -> None:
    cell = number(three.fails("%%disco\ntry:\n    if rank == 2: 1 / 0\n    ccl.barrier()\n"
                              "finally:\n    rank < 2 and undefined"))  # fmt: skip
    told = lines(three)
    assert told[0] == f"1. worker 2 raised ZeroDivisionError: division by zero · {cell}, line 3"
    assert told[1].startswith("2. workers 0-1 raised NameError: name 'undefined' is not defined at")
    assert told[-1].startswith("%disco_pm 2 shows"), told


def test_what_an_earlier_failure_has_told_is_not_told_again(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.fails("%%disco\nh = torch.full((2,), float('nan'))\nassert not h.isnan().any()")
    assert lines(three)[1].startswith("2. h: NaN on all workers · Cell In[")
    three.fails("%%disco\nassert rank == 0, 'other'")
    assert "h:" not in "".join(lines(three))
    three.fails("%%disco\nassert h.sum() < 1")
    assert lines(three)[1].startswith("2. h: NaN on all workers · Cell In[")


def test_a_collective_of_which_the_error_was_caught(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.fails("%%disco\n1 / 0")
    three.ok("%%disco\ntry:\n    ccl.all_reduce(torch.ones(2 if rank else 3))\n"
             "except Exception:\n    pass")  # fmt: skip
    told = [re.sub(r"Cell In\[\d+\]", "Cell", line) for line in lines(three)]
    assert told[:3] == [
        "1. collective #1 in workers 0-2: members disagree, and the error was caught"
        " · Cell, line 3",
        "2. worker 0: called all_reduce(sum) of float32[3] · Cell, line 3",
        "3. workers 1-2: called all_reduce(sum) of float32[2] · Cell, line 3",
    ]
    assert told[3].startswith("4. earlier: workers 0-2 raised ZeroDivisionError"), told
    three.ok("%%disco\n1")
    assert lines(three)[0].startswith("1. earlier: workers 0-2 raised ZeroDivisionError")


def test_errors_of_many_words(three: Kernel) -> None:
    three.ok("%disco_restart")
    cell = number(three.fails("%%disco\nraise ValueError(f'w{rank} has\\nfailed')"))
    (told, _) = lines(three)
    assert told == (
        f"1. workers 0-2 raised ValueError, each with words of its own: w0 has … · {cell}, line 2"
    )
    three.fails("%%disco\nif rank < 2: raise ValueError('a')\nraise ValueError('a\\nb')")
    assert lines(three)[1].startswith("2. worker 2 raised ValueError: a … · Cell In[")


def test_a_condition_that_has_raised_is_told(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco -b '2 if nothing > 2'\nx = 1\ny = 2")
    told = lines(three)
    assert re.match("2. workers 0-2 stand in the debugger: breakpoint 1; its condition raised Name"
                    "Error: name 'nothing' is not defined · Cell", told[1]), told  # fmt: skip
    three.ok("%disco_abort")


def test_what_a_replaced_worker_lacks(three: Kernel) -> None:
    three.ok("%disco_restart")
    three.ok("%%disco\nnoise = torch.zeros(4)")
    three.ok("%disco_restart -t 2")
    three.fails("%%disco\nnoise.sum()")
    assert "noise: not on worker 2 since its restart, made before" in lines(three)[1]


def test_a_dead_worker(three: Kernel) -> None:
    three.ok("%disco_restart --engine processes")
    # the others come to the collective before it dies
    three.fails("%%disco\nimport os, time\nif rank == 1: print('one\\ntwo'); time.sleep(1)\n"
                "if rank == 1: os.kill(os.getpid(), 9)\nccl.all_reduce(torch.ones(1))")  # fmt: skip
    waits, until = (
        "workers 0, 2: called all_reduce(sum) of float32[1] · Cell In[",
        time.monotonic() + 20,
    )
    told = lines(three)
    while not any(waits in line for line in told) and time.monotonic() < until:
        told = lines(three)  # the others may not have come there yet
    assert told[0].startswith("1. worker 1 (pid ")
    assert "killed by SIGKILL while it ran the cell; its last line of output: two · C" in told[0]
    assert any(waits in line for line in told), told
    assert not any("has died" in line for line in told)
    shown = three.ok("%disco_restart -t 1").text
    assert re.match(r"worker 1 \(pid \d+\) was killed .* ran the cell · a new one has it", shown)
    told = lines(three)
    assert told[0].startswith("1. earlier: all_reduce #1 of float32[1] in workers 0-2 can't compl")
    account = r"\d. worker 1: has died; another worker has its place now · Cell In\[\d+\]"
    assert any(re.fullmatch(account, line) for line in told), told
    doctor = three.ok("%disco_doctor").text
    assert "1  was lost; another worker has its place now" in doctor
    assert "finished without it" not in doctor
    three.fails("%%disco\ntime.time()")
    told = lines(three)
    assert re.fullmatch(r"2. time: not on worker 1 since its restart, made .* · C.*\]", told[1]), (
        told
    )
    three.ok("%disco_restart")


def test_a_session_without_a_notebook() -> None:
    from discolab import ThreadedSession, WorkerError

    def fails() -> None:
        raise ValueError("alone")

    with ThreadedSession(2) as sess:
        assert sess.explain().facts[0].text == "nothing has failed"
        with pytest.raises(WorkerError):
            sess.fetch(sess.call_packed(fails))
        found = sess.explain()
        assert found.failed
        assert found.facts[0].text == "workers 0-1 raised ValueError: alone"
        assert "test_explain.py:" in found.facts[0].place
    assert sess.explain().facts[0].text == "workers 0-1 raised ValueError: alone"


def test_a_worker_that_is_stopped_is_told_as_the_error_tells_it() -> None:
    from discolab import ProcessSession
    from discolab.debugger.explaining import explain

    words = r"\(pid \d+\) has given no sign of life.*: it is stopped \(SIGSTOP\)$"
    with ProcessSession(2) as sess:
        pid = sess.call_packed(os.getpid).debug_get_from_remote(1)
        os.kill(pid, signal.SIGSTOP)
        first, *more = explain(sess).facts  # before the heartbeat has run out
        status = sess.status()[1].detail
        os.kill(pid, signal.SIGCONT)
        assert re.match(rf"worker 1 {words}", first.text), first
        assert not any("not answered" in fact.text for fact in more), more
        assert re.match(words, status), status
        assert "sign of life" not in sess.status()[1].detail


def test_nothing_is_told_of_variables_while_a_busy_worker_has_no_record() -> None:
    from discolab.debugger.differing import Failing, Records, differing

    nan = {"x": ("a", True)}
    records = Records({0: [(1, "", nan)], 1: []}, last={0: 1, 1: -1}, joined={0: 0, 1: 2})
    for failing in (None, Failing(3, missing={"x": [1]})):
        assert differing(records, lambda names: {0: nan, 1: None}, failing) == []


def test_a_worker_stopped_before_the_first_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from discolab import ThreadedSession, WorkerError
    from discolab.notebook import cell

    # one of three does not come past what is done before a cell
    monkeypatch.setattr(cell.post_mortem, "forget", threading.Semaphore(2).acquire)
    file = str(tmp_path / "cell.py")
    with ThreadedSession(3) as sess:
        result = sess.call_packed(cell.run_cell, "import time\ntime.sleep(60)", file, None)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            if sum("time.sleep(60)" in status.detail for status in sess.status()) == 2:
                break
        sess.interrupt()
        with pytest.raises(WorkerError):
            sess.fetch(result)
        facts = sorted(sess.explain().facts, key=lambda fact: fact.place)
    assert [fact.place for fact in facts] == [file, f"{file}:2"]
    assert re.fullmatch(r"worker \d was stopped \(no line is known\)", facts[0].text), facts
    assert re.fullmatch(r"workers .* were stopped", facts[1].text), facts
