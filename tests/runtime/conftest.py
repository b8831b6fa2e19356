"""Sessions for the tests of the runtime: real workers, and a limit on every wait."""

from collections.abc import Iterator

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
