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


def test_how_a_script_fails_is_told(nb: Any, script: str) -> None:
    raised = nb.fails(f"%disco_run '{script}' --steps=9")
    assert "ValueError: nine" in raised.traceback
    assert "train it.py:" in raised.traceback
    left = nb.fails(f"%disco_run '{script}' --steps=3")
    assert "exited with status 3" in left.error["evalue"]
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
