"""Sessions for the tests of rpc, kept for a module and an engine; callers of every kind.

No two kept sessions are open at a time, so the tests of a module run engine by engine. Ray's
workers are processes that talk as those of the other engines do, and take seconds to start: only
what is marked ``conformance`` runs there too, in the one session that all tests on Ray share.
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from discolab import Session, WorkerError, current_worker, make_session, rpc
from discolab.runtime.services import PRELOAD
from tests.conftest import ENGINES, KEPT, OPTIONS
from tests.rpc.functions import called, eventually
from tests.selection import engine_of

PRELOAD += ["pytest"]  # what workers import with a test's module

GRACE_SECONDS = 10.0
CALLERS = ("controller", "worker", "callee")
HERE = __name__.rpartition(".")[0]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes a `caller` once for each kind of caller."""
    if "caller" in metafunc.fixturenames:
        metafunc.parametrize("caller", CALLERS, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of a module here run engine by engine; tests elsewhere stay where they are."""

    def ours_and_not_for_ray(item: pytest.Item) -> bool:
        ours = item.module.__name__.startswith(f"{HERE}.")
        return ours and engine_of(item) == "ray" and not item.get_closest_marker("conformance")

    def order(item: pytest.Item) -> tuple[bool, str, int]:
        engine = engine_of(item)
        place = ENGINES.index(engine) if engine else -1
        return engine == "ray", item.module.__name__, place

    left_out = [item for item in items if ours_and_not_for_ray(item)]
    items[:] = [item for item in items if not ours_and_not_for_ray(item)]
    config.hook.pytest_deselected(items=left_out)
    ours = [n for n, item in enumerate(items) if item.module.__name__.startswith(f"{HERE}.")]
    ordered = sorted((items[n] for n in ours), key=order)
    for n, item in zip(ours, ordered, strict=True):
        items[n] = item


def _discolab_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("discolab-")}


def _no_new_threads(before: set[threading.Thread]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while left := _discolab_threads() - before - KEPT.threads:
        if time.monotonic() > deadline:
            pytest.fail(f"threads still running: {', '.join(sorted(t.name for t in left))}")
        time.sleep(0.01)


def _as_new() -> None:
    worker = current_worker()
    worker.namespace.clear()
    worker.failed_calls.clear()
    worker.mesh = worker.program = None


class Kept:
    """At most one session, handed out again as long as it is as good as new."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.session: Session | None = None
        self._key: tuple[Any, ...] = ()

    def get(self, start: Callable[[], Session], *key: Any) -> Session:
        """The session, started if there is none of that key."""
        if self.session is None or self._key != key or self.session.closed:
            self.close()
            self.session, self._key = start(), key
            self.session.import_python_module(self.module)
            self.session.sync_all(timeout=60)
        return self.session

    def tidy(self) -> None:
        """After a test: one that is broken is not kept; no call may be left."""
        if (session := self.session) is None:
            return
        if session.closed or session.interrupt(timeout=10) != []:
            self.close()
            return
        session.timeout = 20
        session.call_without_result(_as_new)
        try:
            session.sync_all()
        except WorkerError:  # nobody had asked for it
            session.sync_all()
        except Exception:
            self.close()
            raise
        try:
            eventually(lambda: counts(session, "calls_waiting", "calls_running") == (0, 0))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it; one that all tests share goes on, with the threads that rpc has begun there."""
        session, self.session = self.session, None
        if session is None:
            return
        if session.engine in KEPT.engines:
            KEPT.threads |= _discolab_threads()
        else:
            session.shutdown(cancel=True)


def counts(sess: Session, *names: str, ranks: Any = None) -> tuple[int, ...]:
    """Sums over ranks, by default all, of what ``debug_info`` counts."""
    ranks = range(-1, sess.num_workers) if ranks is None else ranks
    found = [sess.rpc.debug_info(rank) for rank in ranks]
    return tuple(sum(info[name] for info in found) for name in names)


@pytest.fixture(scope="module")
def kept(request: pytest.FixtureRequest) -> Iterator[Kept]:
    """The session of the module and engine."""
    before = _discolab_threads()
    made = Kept(request.module.__name__)
    yield made
    made.close()
    _no_new_threads(before)


@pytest.fixture
def no_leaked_threads(kept: Kept) -> Iterator[None]:
    """In place of that of all tests: a session that is kept has threads until it ends."""
    before = _discolab_threads()
    yield
    if kept.session is None:
        _no_new_threads(before)


@pytest.fixture
def fresh(make: Callable[..., Session], kept: Kept, engine: str) -> Callable[..., Session]:
    """Start a session of its own for this test; it ends with the test."""

    def start(num_workers: int, num_groups: int = 1, **options: Any) -> Session:
        kept.close()
        if engine == "sockets" and num_workers % 2:
            options = {"nodes": "local:1", **options}  # nodes are of equal size
        return make(num_workers, num_groups, **{"timeout": 20, **options})

    return start


@pytest.fixture
def sess(make: Callable[..., Session], kept: Kept, engine: str) -> Iterator[Session]:
    """Four workers in two groups, kept for the module."""
    yield kept.get(lambda: make_kept(engine), engine)
    kept.tidy()


def make_kept(engine: str) -> Session:
    """A session that outlives the test that asks for it."""
    if engine in KEPT.engines:
        return KEPT.get(engine, 4, 2)
    options = {"devices": "cpu", "timeout": 20, **OPTIONS.get(engine, {})}
    return make_session(4, engine, num_groups=2, **options)


class Caller:
    """Runs ``scenario(rpc, *args)`` on the controller, on worker 1's thread, or in a call to it.

    `rank` is where: -1 or 1. On the controller the scenario is given ``sess.rpc``, else the
    module; they have the same functions.
    """

    def __init__(self, sess: Session, where: str) -> None:
        self.sess, self.where = sess, where
        self.rank = -1 if where == "controller" else 1

    def __call__(self, scenario: Callable[..., Any], *args: Any, timeout: float = 60) -> Any:
        if self.where == "controller":
            return scenario(self.sess.rpc, *args)
        if self.where == "callee":
            return self.sess.rpc.rpc_sync(1, called, (scenario, args), timeout=timeout)

        def run() -> Any:
            return scenario(rpc, *args) if current_worker().rank == 1 else None

        return self.sess.call_packed(run).debug_get_from_remote(1, timeout=timeout)


@pytest.fixture
def caller(sess: Session, request: pytest.FixtureRequest) -> Caller:
    """Who calls in this test."""
    return Caller(sess, request.param)


@pytest.fixture
def tag() -> str:
    """A name that no other test has."""
    return uuid.uuid4().hex
