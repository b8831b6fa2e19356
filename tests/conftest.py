"""Fixtures for all tests: sessions with a limit on every wait; no worker thread left behind."""

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from discolab import ThreadedSession

THREAD_PREFIX = "discolab-"
GRACE_SECONDS = 5.0


def _discolab_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith(THREAD_PREFIX)}


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail a test whose discolab threads still run five seconds after it ended."""
    before = _discolab_threads()
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while left := _discolab_threads() - before:
        if time.monotonic() > deadline:
            names = ", ".join(sorted(t.name for t in left))
            pytest.fail(
                f"threads still running {GRACE_SECONDS:g} s after the test: {names}; "
                "shut the session down in the test, or in a fixture's clean-up"
            )
        time.sleep(0.01)


@pytest.fixture
def drops_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which interrupts land anywhere: Python drops one that lands in a finalizer.

    It is sent again then. pytest's own hook for dropped exceptions is Python code on the same
    thread, which an interrupt may hit as well; Python's default one is not.
    """
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)


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
