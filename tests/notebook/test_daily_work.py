"""What a cell of daily work meets: errors that can be read, Shift-Tab, ``x?``, ``await``."""

from __future__ import annotations

import ast
import contextlib
import gc
import itertools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from discolab import ThreadedSession
from discolab.notebook.awaiting import run_code

from .conftest import Kernel

MODEL = """%%disco
from torch import nn
class Block(nn.Module):
    "A block of the model."
    def __init__(self, size=4):
        super().__init__()
        self.linear = nn.Linear(size, size)
    def forward(self, x, scale: float = 1.0):
        "Scale it."
        return self.linear(x) * scale
model = nn.Sequential(nn.Sequential(Block()))
layers = [Block(8)]
if rank == 1: alone = Block()
"""


@pytest.fixture(scope="module", params=["threads", "processes"])
def two(request: Any) -> Iterator[Kernel]:
    """A kernel with two workers."""
    kernel = Kernel()
    kernel.ok(f"%load_ext discolab\n%disco_session 2 --devices cpu --engine {request.param}")
    kernel.ok(MODEL)
    yield kernel
    kernel.close()


def test_frames_of_libraries_are_one_line(two: Kernel) -> None:
    failed = two.fails("%%disco\nmodel(torch.ones(2, 5))")
    lines = failed.traceback.splitlines()
    assert sum("… 8 frames in torch.nn.modules (%disco_traceback shows all)" in x for x in lines)
    assert sum("… 2 frames in torch.nn.modules.module" in line for line in lines) == 1
    assert not any("_call_impl" in line for line in lines)
    assert any("line 10, in forward" in line for line in lines)
    assert any("return self.linear(x) * scale" in line for line in lines)
    at_last = [line for line in lines if "torch/nn/modules/linear.py:" in line]
    assert len(at_last) == 1  # where it was raised
    told = [line for line in lines if "mat1 and mat2" in line]
    assert told == ["RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)"]
    assert lines[0] == "workers 0-1 · the cell"
    assert lines[-1] == "WorkerError: workers 0-1 failed in the cell"
    assert len(lines) == 16
    whole = two.ok("%disco_traceback").stdout
    assert whole.count("_wrapped_call_impl") == 4  # a call each
    assert "frames in" not in whole
    assert two.ok("%disco_traceback -r 1").stdout.startswith("worker 1 · the cell")
    assert two.ok("%disco_debug traceback").stdout == whole


def test_colours_are_those_of_ipython(two: Kernel) -> None:
    def colour_of(result: Any, word: str) -> str:
        text = "\n".join(result.error["traceback"])
        return text[: text.rindex(word)].rpartition("\x1b[")[2].partition("m")[0]

    own = two.fails("def f(): raise ValueError('mine')\nf()")
    theirs = two.fails("%%disco\ndef f(): raise ValueError('theirs')\nf()")
    assert colour_of(own, "raise") == colour_of(theirs, "raise") != ""
    assert colour_of(own, "ValueError") == colour_of(theirs, "ValueError") != ""
    assert colour_of(own, "In[") == colour_of(theirs, "Cell In[") != ""


def test_one_stack_where_only_the_words_differ(two: Kernel) -> None:
    failed = two.fails("%%disco\nraise ValueError(f'of rank {rank}')").traceback
    assert failed.count("raise ValueError") == 1
    assert "worker 0: ValueError: of rank 0\nworker 1: ValueError: of rank 1" in failed
    assert failed.endswith("WorkerError: workers 0-1 failed in the cell")


def test_shift_tab_knows_the_workers_objects(two: Kernel) -> None:
    two.ok("model = 'the notebook has one, too'")
    shown = two.inspect("%%disco\nblock = Block(")
    assert "size=4" in shown
    assert "A block of the model." in shown
    assert "Sequential" in two.inspect("%%disco\nmodel")
    assert "(self, x, scale: float = 1.0)" in two.inspect("%%disco\nBlock.forward(x, ")
    assert "File:      Cell In[" in two.inspect("%%disco\nBlock.forward(x, ")
    two.ok("import os; home = os.environ['HOME']; os.environ['HOME'] = os.getcwd()")
    assert "File:      Cell In[" in two.inspect("%%disco\nBlock.forward(x, ")
    two.ok("os.environ['HOME'] = home")
    assert "def forward" in two.inspect("%%disco\nBlock.forward(", detail=1)
    assert two.inspect("%%disco\nalone.forward").startswith("On worker 1 alone.")
    assert two.inspect("%%disco\nno_such_name(") == ""
    assert "the notebook has one" in two.inspect("model")
    assert "Run a cell" in two.inspect("%%disco")
    assert "Run a cell" in two.inspect("%%disco\nBlock(", at=6)


def test_shift_tab_on_an_item_of_a_session(two: Kernel) -> None:
    assert "Sequential" in two.inspect('sess["model"]')
    assert "Sequential" in two.inspect("print(sess['model'], 1)", at=len("print(sess['mo"))
    assert two.inspect('sess["alone"]').startswith("On worker 1 alone.")
    assert "Session" in two.inspect('sess["model"]', at=4)
    assert two.inspect('sess["nobody_has_it"]') == ""
    two.ok("plain = {'model': 1}")
    assert "dict" in two.inspect("plain['model']", at=5)


def test_question_marks_in_a_cell(two: Kernel) -> None:
    (shown,) = two.ok("%%disco\nBlock?").pages
    assert "A block of the model." in shown["text/plain"]
    (source,) = two.ok("%%disco\nn = 2\nlayers[0].forward??").pages
    assert "forward(self, x" in source["text/plain"]
    assert two.ok("%%disco\nn").text.startswith("DRef n: 2 on all")
    assert "`nothing` not found" in two.ok("%%disco\nnothing?").stdout
    for line in ("%disco Block.forward?", "%disco Block.forward??", "%disco -t 1 Block.forward?"):
        (shown,) = two.ok(line).pages
        assert "(self, x" in shown["text/plain"], line
        assert ("self.linear" in shown["text/plain"]) == ("??" in line), line
    assert "`nothing` not found on the workers" in two.ok("%disco nothing?").stdout
    assert "%disco" in two.ok("%disco?").pages[0]["text/plain"]
    (shown,) = two.ok("%%disco\nmine, same = rank, [object()]\nmine?").pages
    assert shown["text/plain"].startswith("On worker 0; another on worker 1.\n")
    (shown,) = two.ok("%%disco\nsame?").pages  # but for its address
    assert "another" not in shown["text/plain"]


def test_question_marks_where_a_program_stands(two: Kernel) -> None:
    two.ok("%%disco --step\ndef inner(only_here):\n    return 1\ninner(1)")
    two.ok("%disco_next")
    two.ok("%disco_step")
    (shown,) = two.ok("%%disco\nonly_here?").pages
    assert "int" in shown["text/plain"]
    two.ok("%disco_abort")


def test_items_of_a_session_complete(two: Kernel) -> None:
    assert any("model" in word for word in two.complete('sess["mo'))
    assert "alone" in "".join(two.complete("sess['al"))
    assert not [name for name in two.complete('sess["ra') if "rank" in name]
    assert "model" in two.complete("%%disco\nmod")


def test_keys_and_names_of_other_workers_complete(two: Kernel) -> None:
    two.ok("%%disco\nrates = {'slow': 1, 'fast': 2, 3: 4}\nnested = [rates]\n"
           "if rank == 1: only_there, own = 5, {'gamma': 1}")  # fmt: skip
    for line in ("%%disco\nrates['sl", "%disco rates['sl", "%disco_eval rates['sl"):
        assert two.complete(line) == ["slow"], line
    assert two.complete('%%disco\nx = nested[0]["') == ["fast", "slow"]
    assert two.complete("%%disco\nonly_th") == ["only_there"]
    assert two.complete("%disco_break only_th") == ["only_there"]
    assert two.complete("%%disco\nown['") == ["gamma"]
    assert two.complete("%%disco -t 1\nown.ke") == ["own.keys"]
    assert {"rates", "nested"} <= set(two.complete("%disco_eval "))
    two.complete("%%disco\nnot_there['")
    two.ok("%%disco\nprint('fine')")  # what a look has met is no failure of the next cell
    two.ok("sess.sync_all()")


def test_a_name_that_only_workers_have_says_so(two: Kernel) -> None:
    two.ok("%%disco\nonly_workers = 1\nif rank: only_one = 2")
    assert (
        'the workers have a variable only_workers: sess["only_workers"]'
        in two.fails("only_workers + 1").stderr
    )
    assert 'worker 1 has a variable only_one: sess["only_one"]' in two.fails("only_one").stderr
    assert not two.fails("nobody_has_it").stderr
    assert not two.fails("%%disco\nnobody_has_it").stderr


def test_await_in_a_cell(two: Kernel) -> None:
    two.ok("%%disco\nimport asyncio\nlock = asyncio.Lock()\nasync def add(a):\n    async with lock:"
           "\n        await asyncio.sleep(0.01)\n        return a + rank")  # fmt: skip
    assert two.ok("%%disco\nfirst = await add(1)\nfirst + await add(2)").text.startswith("DRef")
    assert two.ok("%disco_pull first\nfirst").text == "[1, 2]"
    two.ok("%%disco\nlater = asyncio.create_task(add(10)); await asyncio.sleep(0)")
    two.ok("%%disco\nten = await later")  # the loop is kept
    assert two.ok("%disco_pull ten\nten").text == "[10, 11]"
    failed = two.fails("%%disco\nasync def f():\n    return 1 / 0\nawait f()").traceback
    assert "line 3, in f" in failed
    assert "asyncio" not in failed  # nor a word of the loop that runs the cell
    two.ok("%%disco\nloop = asyncio.get_running_loop(); await asyncio.sleep(0)")
    two.ok("%%disco\nloop.close()")  # the next cell has another one
    assert two.ok("%%disco\nawait asyncio.sleep(0, 'fine')").text.startswith("DRef: 'fine'")


def test_parts_of_a_group_say_where_they_were_raised(two: Kernel) -> None:
    two.ok("%%disco\nimport asyncio\nasync def bad():\n    raise KeyError('x')")
    failed = two.fails("%%disco\nasync with asyncio.TaskGroup() as group:"
                       "\n    group.create_task(bad())").traceback  # fmt: skip
    assert re.search(r"  \| Cell In\[\d+\], line 4, in bad\n  \| KeyError: 'x'", failed), failed


def test_a_line_of_a_longer_statement_stands_alone(two: Kernel) -> None:
    failed = two.fails('%%disco\nraise ValueError(\n    """a\nb""",\n)').traceback
    lines = failed.splitlines()
    assert any(line.endswith("---->   2 raise ValueError(") for line in lines), failed
    assert any(line.endswith('  3     """a') for line in lines), failed
    assert "EOF" not in failed


def test_stop_ends_an_await(two: Kernel) -> None:
    began = time.monotonic()
    code = "%%disco\ntry:\n    await asyncio.sleep(100)\nfinally:\n    ended = True"
    stopped = two.fails("%%disco\nimport asyncio\n" + code.partition("\n")[2], interrupt_after=0.5)
    assert stopped.error["ename"] in ("CellInterrupted", "KeyboardInterrupt")
    assert time.monotonic() - began < 20
    where = re.search(r"stopped workers 0-1 at (Cell In\[\d+\], line 4)$", stopped.error["evalue"])
    assert where, stopped.error["evalue"]
    assert where[1] in two.ok("%disco_explain").text.splitlines()[1]
    assert two.ok("%%disco\nended").text.startswith("DRef ended: True on all")
    assert two.ok("%%disco\nawait asyncio.sleep(0, 'fine')").text.startswith("DRef: 'fine'")


def test_what_ends_a_coroutine_that_computes_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not by asyncio, too, as of an exception that nobody has seen."""
    source = "import asyncio\nawait asyncio.sleep(0)\nraise KeyboardInterrupt"

    def cell() -> None:
        code = compile(source, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with contextlib.suppress(KeyboardInterrupt):
            run_code(code, None, {})
        gc.collect()

    with ThreadedSession(1) as sess:
        sess.call_packed(cell).debug_get_from_all()
    assert caplog.messages == []


def test_where_a_cell_awaits_is_told(two: Kernel) -> None:
    two.ok(
        "%%disco -a\nimport asyncio\nasync def late():\n    await asyncio.sleep(30)\nawait late()"
    )
    two.ok("import time; time.sleep(0.5)")
    assert re.search(
        r"running .* the cell at Cell In\[\d+\], line 4", two.ok("%disco_status").stdout
    )
    assert "line 4" in two.ok("%disco_explain").text
    two.ok("sess.interrupt()")


def test_await_can_be_stepped(two: Kernel) -> None:
    two.ok("%%disco --step\nimport asyncio\nasync def g(k):\n    k += 1\n    return k\nawait g(1)")
    for _ in range(2):
        two.ok("%disco_next")
    assert "in g" in two.ok("%disco_step").text
    assert "k" in two.ok("%disco_where").text
    assert two.ok("%disco_continue").text.startswith("DRef: 2 on all")


def test_disco_assert_is_there(two: Kernel) -> None:
    two.ok("%%disco\ndisco_assert(torch.ones(2), 'replicated')")
    failed = two.fails("%%disco\ndisco_assert(torch.ones(2) * rank, 'replicated')")
    assert "DiscoAssertionError" in failed.traceback
    two.ok("%disco_abort")
    assert "disco_assert" not in two.ok("%disco_whos").text


def test_stepping_out_shows_the_value_in_a_kernel(two: Kernel) -> None:
    two.ok("%%disco -b 3\ndef double(v):\n    return v * 2\nw = double(torch.ones(2))\nw + 1")
    shown = two.ok("%disco_out")
    assert "(return) double" in shown.text
    assert "all: [2, 2]" in shown.text
    assert "(return) double" in shown.data[-1]["text/html"]
    two.ok("%disco_abort")


def test_conditions_and_expressions_complete(two: Kernel) -> None:
    two.ok("%%disco\nglobal_one = 1")
    assert two.complete("%disco_break f.py:3 if global_o") == ["global_one"]
    assert two.complete('%%disco -b "3 if global_o') == ["global_one"]
    two.ok("%%disco -b 3\ndef inside(first_thing):\n    return first_thing\ninside(torch.ones(1))")
    for line in ("%disco_break 3 if first_th", "%disco_break f.py:3 if rank == 1 and first_th",
                 "%disco_eval first_th", "%disco_set first_thing = first_th",
                 "%disco_debug break 3 if first_th"):  # fmt: skip
        assert two.complete(line) == ["first_thing"], line
    assert "first_thing.shape" in two.complete("%disco_break 3 if first_thing.sha")
    assert "world_size" in two.complete("%disco_break 3 if world_s")
    two.ok("%disco_abort")
    two.fails("%%disco\ndef breaks(its_own):\n    its_own / 0\nbreaks(1)")
    assert two.complete("%disco_pm -e its_o") == ["its_own"]


def test_autoreload_reloads_on_all_workers(two: Kernel, tmp_path: Path) -> None:
    """Modules of the notebook's folders, and those that each worker has for itself."""
    age = itertools.count(100, 100)

    def edit(number: int, more: str = "") -> None:
        for name in ("ours", "own"):
            file = tmp_path / name / f"dl_{name}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"count = 0\ndef f(): return {number}\n{more}")
            os.utime(file, (later := time.time() + next(age), later))

    def now() -> str:
        """What functions give that the cell has by name and by import, and what modules keep."""
        shown = "dl_ours.f(), g(), dl_own.f(), h(), dl_ours.count > 5, dl_own.count"
        return two.ok(f"%%disco\ndl_own.count += 1; print({shown})").stdout

    edit(1)
    two.ok(f"import sys; sys.path.append({str(tmp_path / 'ours')!r})")
    two.ok("%load_ext autoreload\n%autoreload 2")
    two.ok(f"""%%disco
import sys
sys.path.insert(0, {str(tmp_path / "own")!r})
import dl_ours, dl_own
from dl_ours import f as g
from dl_own import f as h
dl_ours.count = dl_own.count = 6""")
    edit(2)
    assert now() == "[0-1] 2 2 2 2 True 7\n"
    edit(3, "nonsense(")
    failed = two.run("%%disco\nprint(g(), h())")
    assert failed.stdout == "[0-1] 2 2\n"
    assert "autoreload of dl_own failed" in failed.stderr
    two.ok("%autoreload 0")
    assert now() == "[0-1] 2 2 2 2 True 8\n"
    edit(4)
    assert now() == "[0-1] 2 2 2 2 True 9\n"
    two.ok("%autoreload")
    assert now() == "[0-1] 4 4 4 4 True 10\n"


def test_a_module_that_keeps_a_rank_for_all_is_told_of(two: Kernel, tmp_path: Path) -> None:
    threads = "threads" in two.ok("sess.engine").text
    for name in ("shared", "own", "beside"):
        (tmp_path / name).mkdir()
        for module in ("keeps", "calls"):
            (tmp_path / name / f"dl_{module}_{name}.py").write_text(
                "RANK = None\ndef init(rank):\n    global RANK\n    RANK = rank\n"
                if module == "keeps"
                else f"import dl_keeps_{name}\ndef rank(): return dl_keeps_{name}.RANK\n"
            )
    use = "from dl_calls_{0} import rank as of\nimport dl_keeps_{0}\ndl_keeps_{0}.init(rank)\n"
    use += "dist.barrier()\nprint(of())"
    two.ok(f"import os, sys; before = os.getcwd(); os.chdir({str(tmp_path / 'beside')!r})")
    two.ok(f"sys.path.append({str(tmp_path / 'shared')!r})")
    two.ok(f"%%disco\nimport sys; sys.path.insert(0, {str(tmp_path / 'own')!r})")
    for name in ("own", "beside"):
        own = two.ok(f"%%disco\n{use.format(name)}")
        assert (own.stdout, own.stderr) == ("[0] 0\n[1] 1\n", "")
    two.ok("import dl_keeps_beside")
    assert two.ok("%%disco\nprint(dl_keeps_beside.RANK)").stdout == "[0] 0\n[1] 1\n"
    if threads:
        shared = two.ok(f"%%disco\n{use.format('shared')}")
        assert shared.stdout in ("[0-1] 0\n", "[0-1] 1\n")
        assert shared.stderr.startswith("dl_keeps_shared: its functions set RANK, which workers ")
        assert "--engine processes" in shared.stderr
        assert shared.stderr.count("\n") == 1
        assert two.ok("%%disco\nimport dl_calls_shared").stderr == ""  # told once
        (tmp_path / "beside" / "dl_reads.py").write_text(
            "import os\nif True:\n    RANK: int = int(os.environ.get('RANK', 0))\n"
            "DEVICE = f'cuda:{RANK}'\nSIZE = 2\ndef name():\n    text = os.environ['RANK']\n"
        )
        two.ok("import dl_reads")
        reads = two.ok("%%disco\nfrom dl_reads import SIZE, RANK\nprint(RANK)")
        assert reads.stdout == "[0-1] 0\n"
        assert reads.stderr.startswith("dl_reads: a rank was read for RANK, DEVICE as it was imp")
        assert "import it in %%disco cells alone" in reads.stderr
        (tmp_path / "beside" / "dl_kinds.py").write_text("class Item: pass\n")
        two.ok("%%disco\nimport dl_kinds")
        known = "import dl_kinds\nprint(isinstance(item, dl_kinds.Item))"
        given = two.ok(
            "import dl_kinds, discolab\nsess.push({'item': discolab.Pickled(dl_kinds.Item())})"
        )
        looked = two.ok(f"%%disco\n{known}")  # by then the push has been done
        assert looked.stdout == "[0-1] False\n"
        told = given.stderr + looked.stderr
        assert told.startswith("item is of the notebook's class Item: workers have executed")
        assert told.count("\n") == 1
        two.ok("%disco_restart\nsess.push({'item': discolab.Pickled(dl_kinds.Item())})")
        assert two.ok(f"%%disco\n{known}").stdout == "[0-1] True\n"
    two.ok(f"sys.path.remove({str(tmp_path / 'shared')!r})")
    two.ok("os.chdir(before)")
