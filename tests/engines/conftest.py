"""Programs run in a fresh interpreter, for the tests of engines."""

import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program in a fresh interpreter; give its exit code, output and errors."""

    def run(program: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
