"""``%%disco`` on workers in other processes: what a cell shows is what it shows on threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from discolab.engines import ENGINES

from .conftest import Kernel

FLAGS = {
    "processes": "--engine processes",
    "sockets": "--engine sockets --nodes local:2",
    "ray": "--engine ray",
}


SLOW = {"ray": pytest.mark.slow}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=SLOW.get(name, ())) for name in FLAGS if name in ENGINES],
)
def kernel(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A kernel with four workers on one of the engines, named `sess`."""
    if request.param == "ray":
        pytest.importorskip("ray")
    found = Kernel()
    found.ok("%load_ext discolab\nimport time\nimport discolab")
    found.started = found.ok(  # type: ignore[attr-defined]
        f"%disco_session 4 --devices cpu {FLAGS[request.param]}", timeout=110
    )
    found.engine = request.param  # type: ignore[attr-defined]
    yield found
    found.ok("%disco_shutdown")
    found.close()


@pytest.mark.conformance
def test_the_line_at_the_start(kernel: Any) -> None:
    text = kernel.started.stdout
    assert text.startswith(f"sess: workers 0-3 on cpu ({kernel.engine}")
    assert "names in %%disco: rank, world_size" in text
    assert kernel.started.stderr == "", kernel.started.stderr
    assert kernel.started.data == []


@pytest.mark.conformance
def test_what_is_printed_is_labelled_folded_and_in_its_cell(kernel: Any) -> None:
    for number in range(5):
        result = kernel.ok(f"%%disco\nprint('begin {number}')\nprint('r', rank % 2)\nprint('end')")
        lines = result.stdout.splitlines()
        assert lines == [f"[0-3] begin {number}", "[0,2] r 0", "[1,3] r 1", "[0-3] end"]


def test_much_output_is_whole_and_in_its_cell(kernel: Any) -> None:
    result = kernel.ok("%%disco\nfor i in range(2000): print(i, 'x' * 50)")
    lines = [f"[0-3] {i} {'x' * 50}" for i in range(2000)]
    assert result.stdout.splitlines() == lines
    assert "after" not in kernel.ok("print('next')").stdout


def test_stderr_threads_and_logging(kernel: Any) -> None:
    code = "import logging, sys, threading\nprint('oops', file=sys.stderr)\n"
    code += "t = threading.Thread(target=print, args=('child',))\nt.start(); t.join()\n"
    code += "logging.getLogger('mine').warning('careful')"
    result = kernel.ok(f"%%disco\n{code}")
    assert result.stdout == "[0-3] child\n"
    assert result.stderr.splitlines()[0] == "[0-3] oops"
    assert "careful" in result.stderr


def test_a_stack_printed_in_a_thread_names_the_cell(kernel: Any) -> None:
    code = "import threading\ndef g():\n    1 / 0\n"
    code += "t = threading.Thread(target=g)\nt.start(); t.join()"
    result = kernel.ok(f"%%disco\n{code}")
    assert "[0-3] ZeroDivisionError: division by zero" in result.stderr
    assert "Cell In[" in result.stderr


@pytest.mark.conformance
def test_what_c_code_writes_is_in_its_cell(kernel: Any) -> None:
    result = kernel.ok("%%disco -t 1\nimport os\nos.write(1, b'from C\\n');")
    if kernel.engine == "processes":
        assert result.stdout == "[1] from C\n"
    assert "from C" not in kernel.ok("%disco pass").stdout


def test_rich_displays_and_plain_ones(kernel: Any) -> None:
    code = "from IPython.display import HTML\ndisplay(HTML(f'<b>{rank // 2}</b>'))"
    result = kernel.ok(f"%%disco\n{code}")
    assert [d["text/html"] for d in result.data] == ["<b>0</b>", "<b>1</b>"]
    assert result.stdout.splitlines() == ["[0-1]", "[2-3]"]
    result = kernel.ok("%%disco\nfrom IPython.display import display\nprint('a')\ndisplay(rank)")
    assert result.stdout.splitlines() == ["[0-3] a", *(f"[{r}] {r}" for r in range(4))]


def test_a_repr_of_its_own_and_clear_output(kernel: Any) -> None:
    code = "class Own:\n    def _repr_html_(self): return '<i>own</i>'\n"
    code += "from IPython.display import clear_output, display\nprint('gone')\nclear_output()\n"
    result = kernel.ok(f"%%disco\n{code}print('here')\ndisplay(Own())")
    assert result.stdout == "[0-3] here\n[0-3]\n"
    assert result.data[0]["text/html"] == "<i>own</i>"


def test_progress_bars_leave_their_last_state(kernel: Any) -> None:
    code = "from tqdm import tqdm\nfor i in tqdm(range(5), desc=f'w{rank}'): pass"
    result = kernel.ok(f"%%disco\n{code}")
    bars = [line for line in result.stderr.splitlines() if "5/5" in line]
    assert [bar[:3] for bar in bars] == [f"[{rank}]" for rank in range(4)]


def test_a_shell_command(kernel: Any) -> None:
    result = kernel.ok("%%disco\n!echo shell {rank}")
    assert result.stdout.splitlines() == [f"[{rank}] shell {rank}" for rank in range(4)]


@pytest.mark.conformance
def test_input_has_a_clear_word(kernel: Any) -> None:
    assert "can't be used on a worker" in kernel.fails("%%disco\ninput()").traceback
    assert "can't be used" in kernel.fails("%%disco\nimport getpass\ngetpass.getpass()").traceback


@pytest.mark.conformance
def test_an_error_points_at_its_line(kernel: Any) -> None:
    result = kernel.fails("%%disco\nx = 1\nif rank == 2:\n    raise ValueError('bad thing')")
    assert result.error["evalue"] == "worker 2 failed in the cell: ValueError: bad thing"
    assert "---->   4     raise ValueError('bad thing')" in result.traceback
    assert "discolab/" not in result.traceback


def test_a_function_of_an_ordinary_cell(kernel: Any) -> None:
    kernel.ok(
        "def f(n):\n    import inspect\n    print(inspect.getsource(f))\n    return 1 / (n - 2)"
    )
    call = "sess.call_packed(lambda: f(discolab.current_worker().rank)).debug_get_from_all()"
    result = kernel.fails(call)
    assert "[0-3]     return 1 / (n - 2)" in result.stdout
    assert result.error["evalue"].startswith(
        "worker 2 failed in call of '<lambda>' (called at Cell"
    )
    assert "---->   4     return 1 / (n - 2)" in result.traceback
    assert "ipykernel" not in result.traceback


def test_a_function_of_an_ordinary_cell_in_status(kernel: Any) -> None:
    kernel.ok("def g():\n    while True:\n        time.sleep(0.01)")
    kernel.ok("ref = sess.call_packed(g); time.sleep(0.3)")
    text = kernel.ok("%disco_status").stdout
    kernel.ok("sess.interrupt(); del ref")
    assert text.count("call of 'g' (called at Cell In[") == 4
    assert "ipykernel" not in text


@pytest.mark.conformance
def test_names_targets_and_variables(kernel: Any) -> None:
    code = "rank, world_size, str(device), worker.rank, ccl.__name__, torch.__name__, RANK"
    result = kernel.ok(f"%%disco -t 2\nprint({code}, WORLD_SIZE)")
    assert result.stdout.splitlines() == ["[2] 2 4 cpu 2 discolab.ccl torch 2 4"]
    kernel.ok("y = 5\n%disco_push y")
    kernel.ok("%%disco -i y -o z\nz = y * rank")
    assert kernel.ok("%disco_pull z\nz").text == "[0, 5, 10, 15]"
    assert kernel.ok("sess['z']").text.startswith("DRef z · int on 4 workers")
    kernel.ok("%disco_mesh dp=2,tp=2")
    assert kernel.ok("%disco -t tp=1 print(mesh)").stdout == "[1,3] dp=2, tp=2\n"


def test_collectives_in_cells(kernel: Any) -> None:
    assert "equal on all" in kernel.ok("%%disco\nccl.all_reduce(torch.ones(3) * rank)").text
    code = "shape = (3,) if rank == 3 else (4,)\nccl.all_reduce(torch.ones(shape))"
    result = kernel.fails(f"%%disco\n{code}")
    assert "members disagree on the shape" in result.error["evalue"]


def test_views(kernel: Any) -> None:
    kernel.ok(
        "%%disco\nx = torch.arange(4.) + rank\nm = torch.nn.Linear(2, 3)\ny = None if rank else 1"
    )
    shards = kernel.ok("sess['x']")
    assert shards.text.startswith(
        "DRef x · float32[4] on 4 workers · 4 different values: "
        "shards of a larger tensor, or partial sums?"
    )
    assert "<table" in shards.data[-1]["text/html"]
    placed = (
        "from torch.distributed.tensor import Shard\nx = sess['x']; x.placements = [Shard(0)]; x"
    )
    assert "[4:8]    worker 1" in kernel.ok(placed).text
    assert "Linear (9 parameters, 36 B)" in kernel.ok("sess['m']").text
    assert "None" in kernel.ok("sess['y']").text
    bad = kernel.ok("sess.call_packed(lambda v: v.nothing, sess['x'])")
    assert "failed" in bad.text
    kernel.ok("busy = sess.call_packed(time.sleep, 30)")
    pending = kernel.ok("sess['x']", timeout=5)
    assert "still busy" in pending.text
    assert pending.seconds < 1.5
    kernel.ok("sess.interrupt()")


def test_before_after_and_the_doctor(kernel: Any) -> None:
    kernel.ok("%disco a = torch.tensor([10.0**rank]); b = ccl.all_reduce(a)")
    text = kernel.ok(
        "from discolab.views import before_after\nbefore_after(sess['a'], sess['b'])"
    ).text
    assert text.splitlines()[-1].split() == ["3", "[1000]", "[1111]"]
    assert "all_reduce(sum) of float32[1]" in kernel.ok("%disco_doctor").text


def test_completion_asks_worker_0(kernel: Any) -> None:
    kernel.ok("%disco some_long_name = 3")
    assert kernel.complete("%%disco\nsome_lo") == ["some_long_name"]


def test_a_script(kernel: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "print(__name__, sys.argv[1:], dist.get_rank())\nleft = dist.get_world_size()\n"
        "if '--fail' in sys.argv:\n    raise RuntimeError('told to')\n"
    )
    result = kernel.ok(f"%disco_run {script} --lr 1")
    assert result.stdout.splitlines() == [
        f"[{rank}] __main__ ['--lr', '1'] {rank}" for rank in range(4)
    ]
    assert kernel.ok("%disco_pull left\nleft").text == "[4, 4, 4, 4]"
    assert "train.py:7" in kernel.fails(f"%disco_run {script} --fail").traceback


@pytest.mark.conformance
def test_stop_ends_a_cell_on_all_workers(kernel: Any) -> None:
    for body in ("while True: pass", "import time\ntime.sleep(600)"):
        result = kernel.fails(f"%%disco\nkept = rank\n{body}", interrupt_after=0.7)
        assert "stopped workers 0-3 at Cell In[" in result.error["evalue"]
        assert result.seconds < 2
    assert kernel.ok("%disco_pull kept\nkept").text == "[0, 1, 2, 3]"


def test_a_cell_in_the_background(kernel: Any) -> None:
    results = [kernel.ok("%%disco -a\nprint('later', rank)\n1 / 0")]
    while "in the background" not in results[-1].stderr and len(results) < 40:
        results.append(kernel.ok("time.sleep(0.5)"))
    assert "later 3" in "".join(result.stdout for result in results)
    assert "in the background: workers 0-3 failed in the cell" in results[-1].stderr
