"""The session on which programs are compared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import discolab
from discolab import Session


@pytest.fixture(scope="module")
def four() -> Iterator[Session]:
    """Four workers that are threads."""
    with discolab.make_session(4, "threads", devices="cpu", timeout=60) as session:
        yield session
