"""Fixtures for the collectives: sessions that prove, when they close, that nothing is left."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from discolab import Session, ccl, make_session
from discolab.runtime.services import PRELOAD

Start = Callable[..., AbstractContextManager[Session]]
WAIT = 20.0  # seconds that any wait of these tests may take

# what the tests' modules import: once for all worker processes instead of in each
PRELOAD += ["pytest", "hypothesis.strategies", "torch.distributed.tensor.parallel"]
PRELOAD += ["torch.distributed.fsdp", "torch.nn.parallel"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what is marked ``any_engine`` on processes too; the rest is about threads."""
    if "start" in metafunc.fixturenames:
        item = metafunc.definition
        both = item.get_closest_marker("any_engine") and not item.get_closest_marker("one_process")
        engines = ["threads", "processes"] if both else ["threads"]
        if os.environ.get("CCL_ENGINE"):
            engines = [os.environ["CCL_ENGINE"]]
        metafunc.parametrize("start", engines, indirect=True)


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Start:
    """``with start(4, 2) as sess``: a session that must leave an empty board."""
    engine = request.param

    @contextmanager
    def begin(num_workers: int, num_groups: int = 1, **options: Any) -> Iterator[Session]:
        options = {"devices": "cpu", "timeout": WAIT, **options}
        if engine == "sockets":
            options["nodes"] = "local:2" if num_workers % 2 == 0 else "local:1"
        sess = make_session(num_workers, engine, num_groups=num_groups, **options)
        try:
            if engine != "threads":  # what the workers' imports take is nobody's waiting time
                sess.import_python_module(request.module.__name__)
                sess.init_ccl()
            yield sess
            left = sess.call_packed(ccl.statistics).debug_get_from_remote(0)
            assert left.waiting == ()
            assert (left.collectives, left.messages) == (0, 0)
        finally:
            sess.shutdown(cancel=True)

    return begin
