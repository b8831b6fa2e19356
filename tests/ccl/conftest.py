"""Fixtures for the collectives: sessions that prove, when they close, that nothing is left."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from discolab import ccl
from discolab.engines import ThreadedSession

Start = Callable[..., AbstractContextManager[ThreadedSession]]
WAIT = 20.0  # seconds that any wait of these tests may take


@contextmanager
def _start(num_workers: int, num_groups: int = 1) -> Iterator[ThreadedSession]:
    sess = ThreadedSession(num_workers, num_groups, devices="cpu", timeout=WAIT)
    try:
        yield sess
        left = sess.call_packed(ccl.statistics).debug_get_from_remote(0)
        assert left.waiting == ()
        assert (left.collectives, left.messages) == (0, 0)
    finally:
        sess.shutdown(cancel=True)


@pytest.fixture
def start() -> Start:
    """``with start(4, 2) as sess``: a session that must leave an empty board."""
    return _start
