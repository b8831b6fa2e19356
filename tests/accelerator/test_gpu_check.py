"""benchmarks/gpu_check.py on the simulated accelerator, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.accelerator

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"


@pytest.mark.parametrize(
    "sections",
    [
        ["nccl"],
        pytest.param(
            ["local", "streams", "interrupts", "distributed", "speed"], marks=pytest.mark.slow
        ),
    ],
    ids=["library", "all others"],
)
@pytest.mark.timeout(600)
def test_all_checks_pass(sections: list[str]) -> None:
    command = [sys.executable, str(PROGRAM), "--device", "sim", "--quick", "--only", *sections]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks, all good." in done.stdout
    assert "sim:3: simulated device" in done.stdout
    for section in sections:
        assert f"\n| {section} " in done.stdout or section == "speed"
    assert ("simccl: interrupt" in done.stdout) == ("nccl" in sections)
