"""First uses at once: what raced once does not race again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def look(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.races", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_programs_that_have_found_races_find_none() -> None:
    found = look("2", "NAdam", "jit_compiled", "quantized")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.slow
@pytest.mark.timeout(610)
def test_all_programs() -> None:
    found = look("1")
    assert found.returncode == 0, found.stdout + found.stderr
