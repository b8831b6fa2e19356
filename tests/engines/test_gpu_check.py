"""benchmarks/gpu_check.py, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


def gpu_check(*arguments: str, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_says_so_in_one_line_where_there_is_no_gpu() -> None:
    done = gpu_check()
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "no GPU" in line
    assert "--device cpu" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [["local", "streams", "interrupts", "speed"], ["distributed", "nccl"]],
    ids=["local", "process groups"],
)
def test_all_checks_pass_on_the_cpu(sections: list[str]) -> None:
    done = gpu_check("--device", "cpu", "--quick", "--only", *sections)
    assert done.returncode == 0, done.stdout + done.stderr
    for section in sections:
        assert f"\n| {section} " in done.stdout
    assert "checks, all good." in done.stdout
    assert "says nothing about any GPU" in done.stdout
    assert ("part of copy" in done.stdout) == ("speed" in sections)


@pytest.mark.slow
def test_a_section_that_crashes_is_a_failed_check(tmp_path: Path) -> None:
    """The checks go on in their own processes; the report names the one that ended."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'gpu_sections.py' in ' '.join(sys.orig_argv) and 'streams' in sys.orig_argv:\n"
        "    os._exit(7)\n"
    )
    program = f"import os, sys, runpy; os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n"
    program += f"sys.argv = [{str(PROGRAM)!r}, '--device', 'cpu', '--quick', '--only', "
    program += "'streams', 'interrupts']\n"
    program += f"sys.path.insert(0, {str(PROGRAM.parent)!r})\n"
    program += f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (failed,) = [line for line in done.stdout.splitlines() if "FAILED" in line]
    assert "streams" in failed
    assert "ended with status 7" in failed
    assert "interrupt of all_reduce" in done.stdout


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_gpu
def test_all_checks_pass_on_the_gpus() -> None:
    done = gpu_check("--quick", timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
