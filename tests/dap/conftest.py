"""Sessions on threads and on processes, served to clients."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from discolab import ProcessSession, ThreadedSession, dap
from discolab.runtime.session import Session
from tests.debugger.conftest import dbg, sess

from .adapter_client import AdapterClient

__all__ = ["dbg", "sess"]  # fixtures; `sess` is of the `shared_session` here
ENGINES = {"threads": ThreadedSession, "processes": ProcessSession}
PROGRAM = """\
import torch
from discolab import ccl, current_worker


def inner(x, rank):
    y = x * 2
    if rank == 2:
        y = y + 1
    return y


def program(n=3):
    rank = current_worker().rank
    x = torch.full((2, 3), float(rank))
    many = list(range(50))
    nested = {"a": [1, (2, x)], "b": None}
    for i in range(n):
        x = inner(x, rank)
        print(f"line {i} of {rank}")
    return ccl.all_reduce(x).sum().item()
"""


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCOLAB_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module", params=ENGINES)
def shared_session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Four workers for the tests of a module."""
    with ENGINES[request.param](4, timeout=20) as session:
        session.init_ccl()
        yield session


@pytest.fixture
def server(sess: Session) -> Iterator[dap.Server]:
    """The server of `sess`."""
    server = dap.serve(sess)
    yield server
    server.close()


@pytest.fixture
def connect(server: dap.Server) -> Iterator[Callable[[], AdapterClient]]:
    """Makes connections, which end with the test."""
    made: list[AdapterClient] = []

    def connect() -> AdapterClient:
        made.append(AdapterClient(server.port))
        return made[-1]

    yield connect
    for client in made:
        client.close()


@pytest.fixture
def client(connect: Callable[[], AdapterClient], server: dap.Server) -> AdapterClient:
    """One that is attached."""
    client = connect()
    client.begin(server.token)
    return client


@pytest.fixture
def module(tmp_path: Path) -> tuple[str, Callable[..., float]]:
    """A source file on disk, and the function `program` that it defines."""
    file = tmp_path / "model.py"
    file.write_text(PROGRAM)
    names: dict[str, object] = {"__name__": "model"}
    exec(compile(PROGRAM, str(file), "exec"), names)
    return str(file), names["program"]  # type: ignore[return-value]
