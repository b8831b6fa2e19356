"""The stop button, and collectives that can't complete, in a real kernel."""

from __future__ import annotations

from typing import Any

import pytest

from tests.selection import slow

PROMPT = 2.0  # seconds from stop to a usable prompt


@pytest.mark.parametrize(
    "body",
    [
        slow("while True: pass"),
        "import time\ntime.sleep(600)",
        "while True:\n    try:\n        while True: pass\n    except Exception: pass",
        "ccl.barrier() if rank else __import__('time').sleep(600)",
        slow("x = torch.ones(4)\nwhile True: ccl.all_reduce(x)"),
        slow(
            "ccl.recv_from_worker(torch.ones(2), 1) if rank == 0 else __import__('time').sleep(600)"
        ),
    ],
    ids=["loop", "sleep", "loop-that-catches", "barrier", "all-reduces", "recv"],
)
def test_stop_ends_a_cell_on_all_workers_and_the_session_goes_on(nb: Any, body: str) -> None:
    result = nb.fails(f"%%disco\nkept = rank\n{body}", interrupt_after=1.0)
    assert result.error["ename"] in ("KeyboardInterrupt", "CellInterrupted"), result.error
    assert "Cell In[" in result.error["evalue"]
    assert result.seconds < PROMPT
    summed = nb.ok("%%disco\nccl.all_reduce(torch.tensor(kept))")
    assert summed.text == "DRef: 6 (int64) on all 4 workers"
    states = [line.split()[2] for line in nb.ok("%disco_status").stdout.splitlines()[2:6]]
    assert states == ["idle"] * 4


def test_stop_while_idle_is_harmless(nb: Any) -> None:
    nb.ok("%%disco\nkept = rank")
    nb.manager.interrupt_kernel()
    nb.run("import time; time.sleep(0.2)")
    assert nb.ok("sess['kept'].debug_get_from_all()").text == "[0, 1, 2, 3]"


def test_stop_in_a_wait_of_the_python_api(nb: Any) -> None:
    code = "def spin():\n    while True: pass\nsess.call_packed(spin); sess.sync_worker_0()"
    result = nb.fails(code, interrupt_after=1.0)
    assert result.error["ename"] == "KeyboardInterrupt"
    assert result.seconds < PROMPT
    assert nb.ok("sess.sync_all()").outputs == []


def test_stop_can_leave_the_workers_at_it(nb: Any) -> None:
    code = "import time\ntime.sleep(2)\ndone = rank"
    nb.fails(f"%%disco --signal-on-interrupt none\n{code}", interrupt_after=0.5)
    assert nb.ok("sess['done'].debug_get_from_all()").text == "[0, 1, 2, 3]"


def test_stop_drops_what_was_queued_behind(nb: Any) -> None:
    nb.ok("import time")
    nb.ok("refs = [sess.call_packed(time.sleep, 600) for _ in range(50)]")
    assert nb.fails("sess.sync_all()", interrupt_after=0.5).seconds < PROMPT
    assert nb.ok("%disco 1").text == "DRef: 1 on all 4 workers"


def test_mismatch_of_shape_names_each_worker(nb: Any) -> None:
    result = nb.fails("%%disco\nx = torch.ones(3 if rank == 2 else 4)\nccl.all_reduce(x)")
    assert "float32[3]" in result.traceback
    assert "float32[4]" in result.traceback
    assert "line 3" in result.traceback
    assert nb.ok("%disco 1").text == "DRef: 1 on all 4 workers"


def test_mismatch_of_op_names_each_worker(nb: Any) -> None:
    code = "x = torch.ones(4)\nccl.all_gather(x) if rank == 1 else ccl.all_reduce(x)"
    result = nb.fails(f"%%disco\n{code}")
    assert "all_gather" in result.traceback
    assert "all_reduce" in result.traceback
    assert nb.ok("%disco 1").text == "DRef: 1 on all 4 workers"


def test_a_member_that_raises_frees_the_others_and_is_named(nb: Any) -> None:
    code = "if rank == 1: raise ValueError('mine')\nccl.all_reduce(torch.ones(2))"
    result = nb.fails(f"%%disco\n{code}")
    assert result.seconds < 5
    assert result.error["evalue"] == "worker 1 failed in the cell: ValueError: mine"
    assert "workers 0, 2-3 ended because of it" in result.traceback


def test_a_member_that_does_not_come_is_named(nb: Any) -> None:
    result = nb.fails("%%disco\nif rank != 3: ccl.all_reduce(torch.ones(2))")
    assert "worker 3" in result.error["evalue"]
    assert result.seconds < 5


@pytest.mark.slow
def test_a_long_cell(nb: Any) -> None:
    code = "import time\nfor i in range(4):\n    time.sleep(3.1)\n    print('part', i)\nrank"
    result = nb.ok(f"%%disco --stream\n{code}", timeout=90)
    assert result.seconds > 12
    assert result.stdout.splitlines() == [f"[0-3] part {i}" for i in range(4)]
    assert sum("text" in o for o in result.outputs) == 4  # shown as it came
