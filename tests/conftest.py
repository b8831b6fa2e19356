"""Fixtures for all tests: sessions on every engine, with a limit on every wait; nothing is left.

A test that takes `sess` or `pair` from here runs once on each engine, but for those marked
``one_process``: they look into workers, or share objects with them, as only threads can. Without
``--all`` some of it is left out: selection.py says what.
"""

import faulthandler
import gc
import importlib.util
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import hypothesis
import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key

from discolab import (
    DiscoError,
    Session,
    WorkerError,
    WorkerInterrupted,
    current_worker,
    make_session,
)
from discolab.isolation import table
from discolab.runtime.services import PRELOAD
from tests import selection
from tests.accelerator import sim
from tests.selection import engine_of, how_many, pytest_ignore_collect, pytest_sessionfinish
from tests.watchdog import Watchdog

__all__ = ["how_many", "pytest_ignore_collect", "pytest_sessionfinish"]  # for pytest

THREAD_PREFIX = "discolab-"
GRACE_SECONDS = 5.0
FIXTURE_SECONDS = 180.0  # what a test's fixtures may take beside its own timeout, to end sessions
WATCHDOG = pytest.StashKey[Watchdog]()

# a busy machine is no failure: what an example takes says nothing of what it tests
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What to run, and a row of the table of isolation to leave out, to see which test notices."""
    selection.pytest_addoption(parser)
    parser.addoption("--without-row", metavar="STATE", help="leave out this row of isolation")


def pytest_configure(config: pytest.Config) -> None:
    """Start the watchdog, which ends a run that hangs; let Ctrl-C be heard."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell started the run in background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.note_long and not hasattr(config, "workerinput"):  # of xdist
        config.pluginmanager.register(selection.Noting())
    config.stash[WATCHDOG] = Watchdog()
    if config.getoption("markexpr") == "accelerator":  # it changes torch for the whole process
        sim.load()
        PRELOAD.insert(0, "tests.accelerator.register")
    left_out = config.getoption("--without-row")
    if left_out is not None and table._rows.pop(left_out, None) is None:
        raise pytest.UsageError(f"the table of isolation has no row {left_out!r}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Tell the watchdog which test begins."""
    own = item.get_closest_marker("timeout")
    seconds = float(own.args[0] if own else item.config.getini("timeout"))
    item.config.stash[WATCHDOG].begins(item.nodeid, seconds + FIXTURE_SECONDS)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have where threads stand printed shortly before a test's own timeout, not before all others'.

    Python may crash when it looks at threads that run, so no test that is well must come there.
    """
    own = item.get_closest_marker("timeout")
    if own is not None:
        faulthandler.dump_traceback_later(
            max(1.0, float(own.args[0]) - 10), file=item.config.stash[fault_handler_stderr_fd_key]
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing can hang any more."""
    config.stash[WATCHDOG].close()


def _discolab_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith(THREAD_PREFIX)}


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keys and what else discolab keeps for a user: in a folder of the tests."""
    before = os.environ.get("DISCOLAB_HOME")
    os.environ["DISCOLAB_HOME"] = str(tmp_path_factory.mktemp("home"))
    yield
    if before is None:
        del os.environ["DISCOLAB_HOME"]
    else:
        os.environ["DISCOLAB_HOME"] = before


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail a test whose discolab threads still run five seconds after it ended."""
    before = _discolab_threads()
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while left := _discolab_threads() - before - KEPT.threads:
        if time.monotonic() > deadline:
            names = ", ".join(sorted(t.name for t in left))
            faulthandler.dump_traceback(all_threads=True)  # pytest shows it: for whom do they wait?
            pytest.fail(
                f"threads still running {GRACE_SECONDS:g} s after the test: {names}; "
                "shut the session down in the test, or in a fixture's clean-up; all threads: "
                + ", ".join(f"{t.name} {t.ident:#x}" for t in threading.enumerate())
            )
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    """On the simulated accelerator: fail a test in which memory was used out of order.

    Also where nobody has seen the error.
    """
    if not sim.loaded():
        yield
        return
    sim.faults()
    yield
    for index in range(sim.device_count()):
        sim.set_stream(sim.default_stream(index))
        sim.synchronize(index)
    sim.set_device(0)
    faults = sim.faults()
    assert not faults, "\n".join(faults)


@pytest.fixture(scope="session", autouse=True)
def interrupts_that_python_drops() -> Iterator[None]:
    """One that lands in a finalizer is sent again: it is no fault, and not for pytest's hook.

    That imports modules, on a worker's thread, and takes what happens there for a fault.
    """
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, WorkerInterrupted):
            before(unraisable)

    sys.unraisablehook = hook
    yield
    if sys.unraisablehook is hook:
        sys.unraisablehook = before


@pytest.fixture
def drops_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which interrupts land anywhere: Python drops one that lands in a finalizer.

    It is sent again then. pytest's own hook for dropped exceptions is Python code on the same
    thread, which an interrupt may hit as well; Python's default one is not.
    """
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what takes a session of ours on every engine."""
    if "engine" in metafunc.fixturenames:
        alone = metafunc.definition.get_closest_marker("one_process") is not None
        metafunc.parametrize("engine", ENGINES[:1] if alone else ENGINES, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What runs on a kept session comes last, so that nothing else finds its threads."""
    selection.leave_out(config, items)
    if not sim.loaded():
        reason = pytest.mark.skip(reason="by themselves: pytest -m accelerator")
        for item in items:
            names = {marker.name for marker in item.iter_markers()}
            if "accelerator" in names and "gpu" not in names:
                item.add_marker(reason)
    items.sort(key=lambda item: engine_of(item) in KEPT.engines)


ENGINES = ["threads", "processes", "sockets"]
OPTIONS: dict[str, dict[str, Any]] = {"sockets": {"nodes": "local:2"}}
if importlib.util.find_spec("ray"):
    ENGINES.append("ray")


def _as_new() -> None:
    """On a worker: forget what a test has left."""
    worker = current_worker()
    worker.namespace.clear()
    worker.mesh = worker.program = None
    torch.set_default_dtype(torch.float32)


class Kept:
    """Sessions that take seconds to start: each is handed out again while it is as good as new."""

    engines = ("ray",)

    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()
        self._sessions: dict[tuple[str, int, int], Session] = {}

    def get(self, engine: str, num_workers: int, num_groups: int) -> Session:
        """A session, started if there is none."""
        key = engine, num_workers, num_groups
        if key not in self._sessions:
            before = _discolab_threads()
            self._sessions[key] = make_session(
                num_workers, engine, num_groups=num_groups, devices="cpu", timeout=20
            )
            self.threads |= _discolab_threads() - before
        return self._sessions[key]

    def tidy(self) -> None:
        """After a test: those that are closed, broken or do not stop are not kept."""
        for key, session in tuple(self._sessions.items()):
            try:
                good = not session.closed and session.interrupt(timeout=5) == []
                if good:
                    self._renew(session)
            except DiscoError:
                good = False
            if not good:
                del self._sessions[key]
                session.shutdown(cancel=True)

    def _renew(self, session: Session) -> None:
        session.timeout, session._mesh = 20, None
        session.call_without_result(_as_new)
        try:
            session.sync_all()
        except WorkerError:  # nobody had asked for it
            session.sync_all()

    def close(self) -> None:
        """End them all.

        Ray kills processes without waiting for their ends, which Python tells when it drops them:
        on a busy machine that would be an error of the whole run.
        """
        while self._sessions:
            self._sessions.popitem()[1].shutdown(cancel=True)
        self.threads.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


KEPT = Kept()


@pytest.fixture(scope="session", autouse=True)
def kept_sessions() -> Iterator[None]:
    """Ended with the last test."""
    yield
    KEPT.close()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    """The name of the engine on which this test runs now."""
    return str(request.param)


@pytest.fixture
def make(engine: str) -> Iterator[Callable[..., Session]]:
    """Start sessions on the engine of this test; they are shut down after it."""
    made: list[Session] = []

    def start(num_workers: int, num_groups: int = 1, **options: Any) -> Session:
        if engine in KEPT.engines and not options:
            return KEPT.get(engine, num_workers, num_groups)
        options = {"devices": "cpu", "timeout": 20, **OPTIONS.get(engine, {}), **options}
        session = make_session(num_workers, engine, num_groups=num_groups, **options)
        made.append(session)
        return session

    yield start
    for session in made:
        session.shutdown(cancel=True)
    if engine in KEPT.engines:
        KEPT.tidy()


class Gate:
    """An event for workers wherever they are: a file, which is there once it is set."""

    def __init__(self, path: str) -> None:
        self.path = path

    def set(self) -> None:
        """Open it."""
        with open(self.path, "w", encoding="ascii"):
            pass

    def is_set(self) -> bool:
        """Whether it is open."""
        return os.path.exists(self.path)

    def wait(self, timeout: float) -> bool:
        """Wait for it, as code that can't be interrupted at a wait of discolab's does."""
        deadline = time.monotonic() + timeout
        while not self.is_set() and time.monotonic() < deadline:
            select.select([], [], [], 0.002)
        return self.is_set()

    def __call__(self) -> Self:
        """Itself: what can be called goes to workers as it is."""
        return self


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A `Gate`; open at the end of the test at the latest."""
    made = Gate(str(tmp_path / "gate"))
    yield made
    made.set()


@pytest.fixture
def sess(make: Callable[..., Session]) -> Session:
    """Four workers in two groups."""
    return make(4, 2)


@pytest.fixture
def pair(make: Callable[..., Session]) -> Session:
    """Two workers."""
    return make(2)
