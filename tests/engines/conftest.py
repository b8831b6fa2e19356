"""Sessions for the tests of engines: real workers, and a limit on every wait."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from discolab import ThreadedSession


@pytest.fixture
def sess() -> Iterator[ThreadedSession]:
    """Four workers in two groups."""
    session = ThreadedSession(4, 2, devices="cpu", timeout=20)
    yield session
    session.shutdown(cancel=True)


@pytest.fixture
def pair() -> Iterator[ThreadedSession]:
    """Two workers."""
    session = ThreadedSession(2, devices="cpu", timeout=20)
    yield session
    session.shutdown(cancel=True)


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
