"""Stepping, breakpoints and post-mortem in a real kernel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Kernel

CELL = "x = torch.ones(2) * rank\nprint('x of', rank)\ny = x + 1\ny"


@pytest.fixture
def nb(nb: Any) -> Any:
    """With the debugger's own name too."""
    nb.ok("from discolab.debugger import debugger_of")
    return nb


@pytest.fixture(scope="module")
def processes() -> Iterator[Kernel]:
    """A kernel with two workers in processes of their own."""
    kernel = Kernel()
    kernel.ok("%load_ext discolab\n%disco_session 2 --devices cpu --engine processes")
    yield kernel
    kernel.close()


def stopped_at(result: Any, line: int) -> bool:
    """Whether the arrow of the picture is at that line."""
    return any(f"→ {line}  " in row for row in result.text.splitlines())


def test_a_cell_is_stepped_to_its_value(nb: Any) -> None:
    first = nb.ok(f"%%disco --step\n{CELL}")
    assert stopped_at(first, 2)
    assert first.stdout == ""
    assert "text/html" in first.data[-1]
    assert stopped_at(nb.ok("%disco_next"), 3)
    second = nb.ok("%disco_next")  # what the workers print is below the cell that had them go on
    assert second.stdout.splitlines() == [f"[{rank}] x of {rank}" for rank in range(4)]
    assert stopped_at(second, 4)
    assert stopped_at(nb.ok("%disco_step"), 5)
    assert nb.ok("%disco_next").text.startswith("DRef y")
    assert nb.ok("_.debug_get_from_remote(3)").text == "tensor([4., 4.])"


def test_a_program_without_a_value_says_that_it_has_ended(nb: Any) -> None:
    nb.ok("%%disco --step -o z\nz = rank * 2")
    assert nb.ok("%disco_continue").stdout == "the program has ended on all workers\n"
    assert nb.ok("z.debug_get_from_all()").text == "[0, 2, 4, 6]"
    assert "no worker has a variable named 'no'" in nb.fails("%%disco --pm -o no\nz = 1").stderr


def test_its_error_is_that_of_the_cell(nb: Any) -> None:
    nb.ok("%%disco --step\nk = 0\nif rank == 2: 1 / k\n")
    nb.ok("%disco_next")
    shown = nb.fails("%disco_continue")
    assert (
        shown.error["evalue"] == "worker 2 failed in the cell: ZeroDivisionError: division by zero"
    )
    assert "---->   3 if rank == 2: 1 / k" in shown.traceback
    assert "discolab/" not in shown.traceback
    assert nb.ok("%disco 1").text == "DRef: 1 on all 4 workers"


def test_while_paused_the_kernel_is_free_and_workers_are_not(nb: Any, tmp_path: Path) -> None:
    nb.ok("%%disco\nold = 1")
    nb.ok(f"%%disco --step\n{CELL}")
    script = tmp_path / "some.py"
    script.write_text("1")
    assert nb.ok("1 + 1").text == "2"
    for code in ("%%disco\n1", "%disco 1", "%%disco --step\n1", "%disco_pull old", "%disco_push In",
                 f"%disco_run {script}", f"%disco_load {script}", "%disco_mesh dp=4",
                 "%disco_pm"):  # fmt: skip
        refused = nb.fails(code).stderr
        assert "the workers are paused at Cell In[" in refused, code
        assert "line 2: %disco_continue or %disco_abort first" in refused, code
    assert "can't be had now" in nb.fails("sess['old'].debug_get_from_all()").error["evalue"]
    assert nb.ok("sess['old']").data
    status = nb.ok("%disco_status").stdout
    assert "for the debugger at Cell In[" in status
    assert "in the cell at Cell In[" not in status  # the place once
    assert "is paused: first line at Cell In[" in status
    assert nb.ok("%disco_mesh").stdout.startswith("no mesh")
    assert nb.ok("%disco_abort").stdout == "the program was ended\n"
    assert nb.ok("%disco old").text == "DRef old: 1 on all 4 workers"


def test_looking_around_and_changing_values(nb: Any) -> None:
    nb.ok("%%disco\ndef f(a):\n    b = a + rank\n    return b * 2\nouter = 5")
    nb.ok("%%disco --step\nr = f(outer)\nr")
    assert "in f" in nb.ok("%disco_step").text
    nb.ok("%disco_next")
    assert "all: 5" in nb.ok("%disco_eval a").text
    assert "worker 3" not in nb.ok("%disco_eval b * 10 -r 1,2").text
    assert "{1: 6}" in nb.ok("%disco_eval -r 1 {rank: b}").text
    assert "NameError" in nb.ok("%disco_eval nonsense").text
    assert "statement" in nb.ok("%disco_eval b = 1").text
    assert "all: 5" in nb.ok("%disco_eval outer -f 1").text
    assert "outer" in nb.ok("%disco_where -f 1").text
    nb.ok("%disco_set b = 100 --ranks 3")
    assert "a name, = and" in nb.fails("%disco_set b += 1").stderr
    assert nb.complete("%disco_eval oute") == ["outer"]
    assert "b" in nb.complete("%disco_eval a + b")
    assert "--ranks" in nb.complete("%disco_step --ra")
    nb.ok("%disco_out")
    assert nb.ok("%disco_continue").text.startswith("DRef r")
    assert nb.ok("_.debug_get_from_all()").text == "[10, 12, 14, 200]"


def test_break_points_of_a_cell(nb: Any) -> None:
    loop = "total = 0\nfor i in range(6):\n    total += i\ntotal"
    first = nb.ok(f'%%disco -b "4 if rank == 1 and i > 2" --break 5\n{loop}')
    assert stopped_at(first, 4)
    assert "all: 3" in nb.ok("%disco_eval i").text
    assert "all: 5" in (nb.ok("%disco_continue 2"), nb.ok("%disco_eval i"))[1].text
    assert stopped_at(nb.ok("%disco_until"), 5)
    assert nb.ok("%disco_continue").text == "DRef total: 15 on all 4 workers"
    assert nb.ok(f"%%disco\n{loop}").text == "DRef total: 15 on all 4 workers"  # gone with the cell


def test_break_points_that_stay(nb: Any, tmp_path: Path) -> None:
    path = tmp_path / "module_with_break.py"
    path.write_text("def double(x):\n    y = 2 * x\n    return y\n")
    nb.ok(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    nb.ok("%disco import module_with_break")
    set_ = nb.ok("%disco_break module_with_break.py:3 if y > 4 --ranks 2:4").stdout
    assert "module_with_break.py:3 if y > 4 on workers 2-3" in set_
    assert "module_with_break.py" in nb.ok("%disco_break").text
    code = "%%disco\nmodule_with_break.double(rank)"
    assert "3  " in nb.ok(code).text  # worker 3 alone has 6
    assert nb.ok("%disco_continue").text.startswith("DRef")
    assert "removed breakpoint" in nb.ok("%disco_break -d all").stdout
    assert "no breakpoints" in nb.ok("%disco_break").text
    assert nb.ok(code).text.startswith("DRef")


def test_break_points_that_count_and_that_print(nb: Any) -> None:
    loop = "total = 0\nfor i in range(5):\n    total += i\ntotal"
    nb.ok(f"%%disco -b 2\n{loop}")
    assert "hit >= 3" in nb.ok("%disco_break 4 if i >= 0 --hits '>= 3' -r 1").stdout
    logs = nb.ok("%disco_break 4 --log 'total {total}, {i:02} # not \"10\"'").stdout
    assert "logs 'total {total}, {i:02} # not \"10\"'" in logs
    assert nb.ok("%disco_break --hits 2 3").stdout.rstrip().endswith("hit 2")
    listed = nb.ok("%disco_break").text
    assert ">= 3" in listed
    assert "total {total}, {i:02}" in listed
    assert nb.ok("%disco_break -d 2").stdout
    assert "hit condition 'often'" in nb.fails("%disco_break 3 --hits often").stderr
    assert "at which line?" in nb.fails("%disco_break --hits 3").stderr
    nb.ok("%disco_abort")
    nb.ok("%disco_break -d all")


def test_break_points_that_are_not_there(nb: Any) -> None:
    assert "-d which? The number of one, or all" in nb.fails("%disco_break -d").stderr
    assert nb.ok("%disco_break -d all").stdout == "there are no breakpoints\n"


def test_names_of_cells_are_known_in_modules(nb: Any, tmp_path: Path) -> None:
    (tmp_path / "helping.py").write_text("def helper(v):\n    w = v * 2\n    return w\n")
    nb.ok(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})")
    first = nb.ok(
        "%%disco -b 'helping.py:2 if rank == 1'\nfrom helping import helper\nhelper(rank)"
    )
    assert stopped_at(first, 2)
    assert "NameError" not in first.text
    assert "{4: 3}" in nb.ok("%disco_eval -r 3 {world_size: rank}").text
    assert nb.ok("%disco_continue").text.startswith("DRef")


def test_a_break_point_while_the_cell_runs(nb: Any) -> None:
    loop = "import time\nx = 0\nwhile True:\n    x += 1\n    time.sleep(0.001)"
    late = nb.fails(f"%%disco --timeout 0.3 --pm\n{loop}")
    assert "it goes on" in late.stderr + late.traceback
    assert "Cell In[" in nb.ok("%disco_break 6 if x > 3").stdout
    assert stopped_at(nb.ok("%disco_continue"), 6)


def test_many_variables_are_counted(nb: Any) -> None:
    nb.ok("%%disco\nfor n in range(1700): globals()[f'v{n}'] = n")
    text = nb.ok("%%disco --step\nv1 = v2").text
    assert "and 1,6" in text.split(" more: ")[0].splitlines()[-1]


def test_a_cell_without_code_has_no_line_to_stop_at(nb: Any) -> None:
    assert "line 0" not in str(nb.ok("%%disco --step\n# nothing").outputs)


def test_who_raised_where(nb: Any) -> None:
    nb.fails("%%disco\nif rank == 0:\n    1 / 0\nelif rank == 1:\n    1 / 0")
    head = nb.ok("%disco_pm").text.splitlines()[0]
    assert "worker 0 raised ZeroDivisionError" in head
    assert "line 3; worker 1 the same elsewhere" in head


def test_what_can_not_be_is_told_before_anything_runs(nb: Any) -> None:
    for options, word in {
        "-b 9": "has no line 9",
        '-b "3 if x ="': "can't be compiled",
        "-b 3 if x": "is put in quotes",
        "-b": "--block, to wait for the workers, is the default",
        "-b nowhere.py:3": "nowhere.py",
        "--step -a": "is waited for",
    }.items():
        result = nb.fails(f"%%disco {options}\nprint('ran')\n1")
        assert word in result.stderr, options
        assert result.stdout == ""
    assert "no breakpoint 7" in nb.fails("%disco_break -d 7").stderr
    assert "takes the number" in nb.fails("%disco_break -d one").stderr
    assert nb.ok("%%disco --block\n1").text == "DRef: 1 on all 4 workers"


def test_without_a_program_one_line_says_how_to_begin(nb: Any) -> None:
    for magic in ("step", "next", "out", "until", "continue", "eval 1", "set x = 1", "where"):
        shown = nb.fails(f"%disco_{magic}").stderr
        assert len(shown.splitlines()) == 1, magic
        assert "%%disco --step" in shown, magic
    assert "nothing to end" in nb.fails("%disco_abort").stderr
    assert "no cell has failed" in nb.fails("%disco_pm").stderr


def test_deadlines_run_on_after_an_abort(nb: Any) -> None:
    nb.ok("%%disco\nbreakpoint()\nk = 1")
    nb.ok("%disco_abort")
    late = "import time\nif rank == 1: time.sleep(1.5)\nccl.all_reduce(torch.ones(2), timeout=0.3)"
    assert "after 0.3 s" in nb.fails(f"%%disco\n{late}").traceback


def test_breakpoint_in_any_cell(nb: Any) -> None:
    stop = nb.ok("%%disco\nx = rank\nbreakpoint()\nprint('after', x)\nx * 2")
    assert stopped_at(stop, 3)
    assert stop.stdout == ""
    assert stopped_at(nb.ok("%disco_next"), 4)
    ended = nb.ok("%disco_continue")
    assert ended.stdout.splitlines() == [f"[{rank}] after {rank}" for rank in range(4)]
    assert ended.text.startswith("DRef")
    assert "pdb.set_trace()" in nb.ok("%%disco\nimport pdb; pdb.set_trace()\nz = 1").text
    nb.ok("%disco_continue")
    nb.ok("%%disco\nbreakpoint()\n1 / 0")
    assert "ZeroDivisionError" in nb.fails("%disco_continue").traceback


def test_a_failed_assertion_fails_a_plain_cell_and_the_workers_stand_there(nb: Any) -> None:
    cell = "from discolab import disco_assert\nx = rank // 2\ndisco_assert(x, 'replicated')"
    failed = nb.fails(f"%%disco\n{cell}")
    assert failed.error["ename"] == "DiscoAssertionError"
    assert "%disco_continue" in failed.traceback
    assert stopped_at(failed, 4)
    assert "2,3: 1" in nb.ok("%disco_eval x").text
    assert "DiscoAssertionError" in nb.fails("%disco_continue").traceback
    nb.ok(f"%%disco --pm\n{cell}")  # who steps is shown a stop like any other
    nb.ok("%disco_abort")


def test_stop_pauses_what_is_stepped(nb: Any) -> None:
    nb.ok("%%disco --step\nn = 0\nwhile True:\n    n += 1\n")
    paused = nb.ok("%disco_continue", interrupt_after=0.4)
    assert "paused at" in paused.text
    assert "all: True" in nb.ok("%disco_eval n > 0").text
    late = nb.fails("%disco_continue --timeout 0.2")
    assert late.error["ename"] == "WaitTimeoutError"
    assert "%disco_pause" in nb.fails("%disco_step").stderr
    assert "gave up" in nb.fails("%disco_continue --timeout 0.2").traceback  # waits once more
    assert "paused at" in nb.ok("%disco_pause").text
    nb.ok("%disco_abort")
    nb.ok("%%disco --step\nimport time\ntime.sleep(60)")
    stuck = nb.fails("%disco_continue", interrupt_after=0.4)
    assert "KeyboardInterrupt: stopped workers 0-3 at Cell In[" in stuck.traceback
    assert nb.ok("%disco 1").text == "DRef: 1 on all 4 workers"


def test_an_end_that_others_have_led_to_is_told(nb: Any) -> None:
    nb.ok("%%disco --step\n7")
    nb.ok("_ = debugger_of(sess).continue_()")
    assert nb.ok("%disco_continue").text == "DRef: 7 on all 4 workers"
    nb.ok("%%disco --step\n1 / 0")
    told = nb.ok("import time; _ = debugger_of(sess).continue_(); time.sleep(0.5)").stderr
    assert "in the background: workers 0-3 failed in the cell: ZeroDivisionError" in told
    assert nb.ok("%disco 1").stderr == ""


def test_what_was_recorded(nb: Any) -> None:
    assert "recorded" in nb.fails("%disco_history").stderr
    nb.ok("%%disco --trace loss\nfor i in range(3):\n    loss = 10 * i + rank\n    u = 1\nloss")
    assert nb.ok("%disco_history").stdout == "recorded: loss\n"
    assert nb.complete("%disco_history lo") == ["loss"]
    shown = nb.ok("%disco_history loss --ranks 2").text
    assert "12" in shown
    assert "worker 1" not in shown
    assert "there are loss" in nb.fails("%disco_history u").stderr
    assert "2 steps back" in nb.ok("%disco_back 2").text
    assert "1 step back" in nb.ok("%disco_forth").text
    assert nb.ok("%%disco --trace\nv = 3\nv").text == "DRef v: 3 on all 4 workers"
    assert "v" in nb.ok("%disco_history").stdout


def test_a_value_that_is_not_finite_is_stopped_at(nb: Any) -> None:
    stop = nb.ok("%%disco --nan\nx = torch.ones(3) * (rank - 2)\ny = torch.log(x)\nz = y * 2")
    assert stopped_at(stop, 3)
    assert "log" in stop.text
    assert nb.ok("%disco_abort").stdout == "the program was ended\n"


def test_a_cell_in_the_background_can_stop(nb: Any) -> None:
    nb.ok("handle = get_ipython().run_cell_magic('disco', '-a', 'breakpoint()\\nrank / 0')")
    nb.ok("import time\nwhile not debugger_of(sess).is_paused: time.sleep(0.01)")
    assert "are paused" in nb.fails("%disco 1").stderr
    assert "breakpoint()" in nb.ok("%disco_where").text
    assert "has ended" in nb.ok("%disco_continue").stdout
    assert "ZeroDivisionError" in nb.fails("handle.get()").traceback


def test_a_script(nb: Any, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import sys\nsteps = int(sys.argv[1])\nfor i in range(steps):\n    loss = 1 / (i - 1)\n"
    )
    stop = nb.ok(f'%disco_run -b "4 if i == 1" {path} 3')
    assert "train.py" in stop.text
    assert stopped_at(stop, 4)
    assert "ZeroDivisionError" in nb.fails("%disco_continue").traceback
    assert "all: 1" in nb.ok("%disco_pm -e i").text
    assert stopped_at(nb.ok(f"%disco_run --step {path} 3"), 1)


def test_post_mortem(nb: Any) -> None:
    code = (
        "def f(a):\n    b = a + rank\n    if rank == 2: raise ValueError('two')\n    return b\nf(3)"
    )
    nb.fails(f"%%disco\n{code}")
    shown = nb.ok("%disco_pm").text
    assert "worker 2 raised ValueError: two" in shown
    assert "stop 0" not in shown
    assert "2 ✗ 4" in shown
    assert "8" in nb.ok("%disco_pm 2 -e a + b").text
    assert "6  f(3)" in nb.ok("%disco_pm 2 -f 1").text
    assert "nothing has failed on worker 1" in nb.fails("%disco_pm 1").stderr
    assert "released" in nb.ok("%disco_pm --forget").stdout
    nb.fails("%disco_pm")


def test_a_worker_that_fails_can_stay_there(nb: Any) -> None:
    stop = nb.ok("%%disco --pm\ny = 3\nif rank == 1: raise KeyError('y')\nccl.barrier()")
    assert "KeyError: 'y'" in stop.text
    assert "paused" in stop.text
    assert "can't go on" in nb.fails("%disco_step").stderr
    assert "3" in nb.ok("%disco_eval y -r 1").text
    assert "worker 1 failed" in nb.fails("%disco_continue").error["evalue"]


@pytest.mark.parametrize("magic", ["shutdown", "restart"])
def test_the_end_of_a_session_while_it_is_paused(nb: Any, magic: str) -> None:
    nb.ok(f"%%disco --step\n{CELL}")
    ended = nb.ok(f"%disco_{magic}")
    assert ended.stderr == ""
    assert "left behind" not in ended.stdout
    nb.ok("%disco_restart")
    assert nb.ok("%disco 1").text == "DRef: 1 on all 4 workers"
    assert "%%disco --step" in nb.fails("%disco_step").stderr


def test_help_and_python_names() -> None:
    from discolab import notebook
    from discolab.notebook import debug_magics, magics  # noqa: F401 - enter themselves
    from discolab.notebook.magic import MAGICS

    assert {"disco_step", "disco_where", "disco_pm", "disco_forth", "disco_compare"} <= set(MAGICS)
    for name, magic in MAGICS.items():
        if magic.family is None:
            assert getattr(notebook, name).__doc__, name
            assert name in notebook.__all__, name
    assert list(inspect.signature(notebook.disco_until).parameters) == [
        "line", "ranks", "timeout", "session",
    ]  # fmt: skip


def test_on_workers_in_other_processes(processes: Kernel) -> None:
    nb = processes
    assert stopped_at(nb.ok(f"%%disco --step\n{CELL}"), 2)
    assert stopped_at(nb.ok("%disco_next"), 3)
    assert nb.ok("%disco_next").stdout.splitlines() == ["[0] x of 0", "[1] x of 1"]
    nb.ok("%disco_set x = x * 100 -r 1")
    assert nb.ok("%disco_continue").text.startswith("DRef y")
    assert nb.ok("_.debug_get_from_remote(1)").text == "tensor([101., 101.])"
    assert stopped_at(nb.ok("%%disco\nbreakpoint()\nk = rank\nk"), 2)
    assert nb.ok("%disco_continue").text.startswith("DRef k")
    nb.fails("%%disco\nw = rank + 5\nif rank: raise ValueError('there')")
    assert "worker 1 raised ValueError: there" in nb.ok("%disco_pm").text
    assert "6" in nb.ok("%disco_pm 1 -e w").text
    nb.ok("%%disco --step\n1")
    assert nb.ok("%disco_shutdown").stdout == "sess: shut down\n"
