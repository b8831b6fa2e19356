"""Settings of sessions, the line while they start, output from workers elsewhere: no kernel."""

from __future__ import annotations

import linecache
from types import SimpleNamespace
from typing import Any

import pytest

from discolab import ArgumentError
from discolab.notebook.cells import CellTeller, keep_source
from discolab.notebook.config import Disco
from discolab.notebook.output import OutputCapture, WorkerOutput
from discolab.notebook.starting import Settings, StartLine
from discolab.runtime.services import SERVICES, Service

SHELL = SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=True))
NOBODY = SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=False))


def test_settings_on_another_engine_keep_what_they_were_given() -> None:
    settings = Settings(4, "processes", options={"heartbeat": 3.0})
    elsewhere = settings.on("threads", {})
    assert (elsewhere.engine, elsewhere.num_workers) == ("threads", 4)
    assert elsewhere.on("processes", {"start_timeout": 9.0}).options == {
        "heartbeat": 3.0,
        "start_timeout": 9.0,
    }
    assert settings.on(None, {}) == settings


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match="there is no engine 'rocket'"):
        Settings(4, "rocket").check()
    with pytest.raises(ArgumentError, match="takes no --start-timeout; processes, sockets"):
        Settings(4, "threads", options={"start_timeout": 3.0}).check()
    with pytest.raises(ArgumentError, match="takes no --heartbeat"):
        Settings(4).on("threads", {"heartbeat": 3.0})


def test_two_sessions_on_one_port_are_started_one_after_the_other() -> None:
    first = Settings(2, "sockets", options={"port": 5000})
    assert Settings(4, "sockets", options={"port": 5000}).takes_the_place_of(first)
    assert not Settings(4, "sockets", options={"port": 0}).takes_the_place_of(first)
    assert not Settings(4, "sockets").takes_the_place_of(first)


def test_the_line_is_written_over_and_taken_away(capsys: pytest.CaptureFixture[str]) -> None:
    line = StartLine(SHELL)
    line("starting: 1 ready")
    line("starting: all\n ready")
    line("")
    line.end()
    line.end()
    shown = capsys.readouterr().out
    assert shown.split("\r")[1:3] == ["starting: 1 ready", "starting: all ready"]
    assert _as_a_terminal_shows(shown).strip() == ""


def test_a_long_line_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    line = StartLine(SHELL)
    line("x" * 500)
    assert len(capsys.readouterr().out) < 120


def test_nobody_watches_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    line = StartLine(NOBODY)
    line("starting")
    line.end()
    assert capsys.readouterr().out == ""


def _as_a_terminal_shows(text: str) -> str:
    row: list[str] = []
    for part in text.split("\r"):
        row[: len(part)] = part
    return "".join(row)


class _Publisher:
    def __init__(self) -> None:
        self.published: list[Any] = []

    def publish(self, data: Any, metadata: Any = None, **_: Any) -> None:
        self.published.append(data)

    def clear_output(self, wait: bool = False) -> None:
        pass


class _Otherwise(Service):
    def __init__(self) -> None:
        self.received: list[Any] = []

    def receive(self, rank: int, value: Any) -> None:
        self.received.append((rank, value))


def test_output_of_workers_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    publisher, otherwise = _Publisher(), _Otherwise()
    capture = OutputCapture(SimpleNamespace(display_pub=publisher), Disco())
    worker = SimpleNamespace(shared={}, worker_id=0)
    exchange = SimpleNamespace(workers_here=lambda: {0: worker})
    before = SERVICES["output"]
    capture.install()
    try:
        assert SERVICES["output"] is not before
        service = WorkerOutput(capture, exchange, otherwise)
        capture.add(worker, ("stdout", "same\n"))  # type: ignore[arg-type]
        capture.add(worker, ("display", {"text/html": "<b>"}, {}))  # type: ignore[arg-type]
        service.receive(1, [("stdout", "gone\n")])
        service.receive(1, [("clear", ""), ("stdout", "sa"), ("stdout", "me\n")])
        service.receive(1, [("display", {"text/html": "<b>"}, {}), ("stderr", "bad\n")])
        capture.flush()
    finally:
        capture.uninstall()
    shown = capsys.readouterr()
    assert shown.out == "[0-1] same\n[0-1]\n"
    assert shown.err == "[1] bad\n"
    assert publisher.published == [{"text/html": "<b>"}]
    assert SERVICES["output"] is before
    service.receive(1, [("stdout", "later")])
    assert otherwise.received == [(1, [("stdout", "later")])]


class _Compiler:
    def __init__(self) -> None:
        self._filename_map: dict[str, int] = {}

    def cache(self, code: str, number: int) -> str:
        name = f"/tmp/ipykernel_1/{number}.py"
        self._filename_map[name] = number
        keep_source(name, code)
        return name


def test_cells_that_define_something_are_told() -> None:
    told: list[Any] = []
    exchange = SimpleNamespace(
        num_workers=3,
        workers_here=lambda: {0: None},
        tell=lambda rank, service, value: told.append((rank, service, value)),
    )
    compiler = _Compiler()
    teller = CellTeller(SimpleNamespace(compile=compiler))
    teller.install()
    try:
        compiler.cache("def early(): pass", 1)
        service = SERVICES["notebook.cells"](exchange)  # type: ignore[arg-type]
        compiler.cache("x = 1", 2)
        name = compiler.cache("def f():\n    return 1", 3)
        assert told == [
            (rank, "notebook.cells", (name, "Cell In[3]", "def f():\n    return 1\n"))
            for rank in (1, 2)
        ]
        assert list(teller.known().values()) == [
            ("Cell In[1]", "def early(): pass\n"),
            ("Cell In[3]", "def f():\n    return 1\n"),
        ]
        assert teller.name(name) == "Cell In[3]"
        assert teller.name("other.py") is None
        del service
        compiler.cache("def g(): pass", 4)
        assert len(told) == 2
    finally:
        teller.uninstall()
    assert "notebook.cells" not in SERVICES
    assert compiler.cache("y", 5) == "/tmp/ipykernel_1/5.py"
    assert linecache.getline(name, 2) == "    return 1\n"
