"""Sessions with a debugger, and programs given as text so that their lines can be named."""

import linecache
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from discolab import ThreadedSession
from discolab.debugger import Debugger, debugger_of
from discolab.runtime.session import Session


def load(source: str, file: str = "program.py", name: str = "program") -> Callable[..., Any]:
    """The function `name` that `source` defines, in a file whose lines are known."""
    source = textwrap.dedent(source)
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    names: dict[str, Any] = {"__name__": "program", "__builtins__": __builtins__}
    exec(compile(source, file, "exec"), names)
    return names[name]


def lines_of(stop: Any) -> dict[int, int | None]:
    """Rank -> the line at which it stands."""
    return {worker.rank: worker.stack[-1].line if worker.stack else None for worker in stop.workers}


def states_of(stop: Any) -> list[str]:
    """The state of each worker."""
    return [worker.state for worker in stop.workers]


@pytest.fixture(scope="module")
def shared_session() -> Iterator[Session]:
    """Four workers for the tests of a module."""
    with ThreadedSession(4, timeout=20) as session:
        session.init_ccl("local")
        yield session


@pytest.fixture
def sess(shared_session: Session) -> Iterator[Session]:
    """The session of the module, in which nothing is stepped."""
    yield shared_session
    debugger = debugger_of(shared_session)
    if debugger.is_active:
        debugger.abort()
    debugger.clear()


@pytest.fixture
def dbg(sess: Session) -> Debugger:
    """The debugger of `sess`."""
    return debugger_of(sess)
