"""``%disco_run``: a script written for torchrun, on the workers of a real kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import argparse
import sys

import helper_of_script
import torch
import torch.distributed as dist


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    total = torch.ones(args.steps) * dist.get_rank()
    dist.all_reduce(total)
    print("rank", dist.get_rank(), "of", dist.get_world_size(), total.tolist())
    dist.destroy_process_group()
    return helper_of_script.twice(total)


if __name__ == "__main__":
    result = main()
    if "--steps=9" in sys.argv:
        raise ValueError("nine")
    if "--steps=3" in sys.argv:
        sys.exit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "helper_of_script.py").write_text("def twice(x):\n    return 2 * x\n")
    path = tmp_path / "train it.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_script_for_torchrun_runs(nb: Any, script: str) -> None:
    before = nb.ok("import sys; print(sys.argv, sys.path)").stdout
    ran = nb.ok(f"%disco_run '{script}' --steps 2")
    assert [f"[{r}] rank {r} of 4 [6.0, 6.0]" in ran.stdout for r in range(4)] == [True] * 4
    assert nb.ok("%%disco\nresult").text.startswith("DRef")
    assert nb.ok("sess['result'].debug_get_from_remote(3)").text == "tensor([12., 12.])"
    assert nb.ok("print(sys.argv, sys.path)").stdout == before


def test_every_run_begins_with_random_states_of_its_own(nb: Any, tmp_path: Path) -> None:
    path = tmp_path / "draws.py"
    path.write_text(
        "import random, torch, numpy\n"
        "drawn = torch.rand(1).item(), random.random(), numpy.random.rand()\n"
        "torch.manual_seed(7), random.seed(7), numpy.random.seed(7)\n"
    )
    runs = f"for _ in range(2):\n    get_ipython().run_line_magic('disco_run', {str(path)!r})\n"
    runs += "    every.extend(sess.pull('drawn'))"
    nb.ok(f"every = []\n{runs}")
    assert nb.ok("[len(set(numbers)) for numbers in zip(*every)]").text == "[8, 8, 8]"


def test_every_run_reads_the_modules_beside_the_script_afresh(nb: Any, tmp_path: Path) -> None:
    for folder, word in (("one", "first"), ("two", "second")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "beside.py").write_text(f"WORD = {word!r}\n")
        (tmp_path / folder / "main.py").write_text("import beside\nprint(beside.WORD)\n")
    assert "[0-3] first" in nb.ok(f"%disco_run {tmp_path}/one/main.py").stdout
    assert "[0-3] second" in nb.ok(f"%disco_run {tmp_path}/two/main.py").stdout
    (tmp_path / "two" / "beside.py").write_text("WORD = 'a third, longer'\n")
    assert "[0-3] a third" in nb.ok(f"%disco_run {tmp_path}/two/main.py").stdout


def test_objects_of_a_script_can_be_sent(nb: Any, tmp_path: Path) -> None:
    path = tmp_path / "objects.py"
    path.write_text(
        "import torch.distributed as dist\n"
        "class Config:\n    def __init__(self, n):\n        self.n = n\n"
        "found = [None] * 4\n"
        "dist.all_gather_object(found, Config(dist.get_rank()))\n"
        "print([c.n for c in found], all(type(c) is Config for c in found))\n"
    )
    assert "[0-3] [0, 1, 2, 3] True" in nb.ok(f"%disco_run {path}").stdout
    cell = "class C:\n    pass\nx = [C()] if rank == 0 else [None]\n"
    cell += "dist.broadcast_object_list(x, src=0)\ntype(x[0]) is C"
    assert nb.ok(f"%%disco\n{cell}").text == "DRef: True on all 4 workers"


def test_how_a_script_fails_is_told(nb: Any, script: str) -> None:
    raised = nb.fails(f"%disco_run '{script}' --steps=9")
    assert "ValueError: nine" in raised.traceback
    assert "train it.py:" in raised.traceback
    left = nb.fails(f"%disco_run '{script}' --steps=3")
    assert "train it.py exited with status 3 at train it.py:27" in left.error["evalue"]
    assert "SystemExit" not in left.traceback
    usage = nb.fails(f"%disco_run '{script}' --step-size 3")
    assert "unrecognized arguments: --step-size 3" in usage.stderr
    nb.ok(f"%disco_run '{script}'")


def test_a_script_that_is_not_there(nb: Any, script: str, tmp_path: Path) -> None:
    said = nb.run(f"%disco_run '{tmp_path}/trian.py'")
    assert "trian.py': No such file or directory" in said.stderr
    assert "helper_of_script.py, train it.py" in said.stderr
    (tmp_path / "broken.py").write_text("x = (\n")
    broken = nb.fails(f"%disco_run '{tmp_path}/broken.py'")
    assert "broken.py:1" in broken.traceback
    assert "SyntaxError" in broken.traceback


def test_stop_ends_a_script(nb: Any, tmp_path: Path) -> None:
    path = tmp_path / "endless.py"
    path.write_text("while True:\n    pass\n")
    stopped = nb.fails(f"%disco_run {path}", interrupt_after=1.0)
    assert stopped.error["ename"] in ("KeyboardInterrupt", "CellInterrupted")
    assert nb.ok("%%disco\nccl.all_reduce(torch.tensor(rank))").text.startswith("DRef: 6")
