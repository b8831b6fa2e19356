"""Which tests run: everything, or, as `make test` does, what a person runs often.

Without ``--all`` four kinds of tests are left out:

- On sockets those that are not marked ``conformance``. They run on threads and on worker processes;
  what sockets add is the connection, and a test that depends on it has the mark. On Ray, whose
  workers are those of sockets once they have started, all: it takes long to start.
- Those that take over `LONG` seconds, which long.txt lists. ``--long`` runs them, ``--note-long``
  writes down which of those that run are among them.
- Those marked ``slow``.
- Of random programs all but the first `FEW`, if their number is the parameter `seed` of a test; and
  what a test leaves out that asks `how_many` programs, rounds or seconds it may take.

A test that is named (``pytest tests/a.py::test_b``) runs whole, as with ``--all``.

Either may be run in two parts. ``--part together`` is what several processes run at a time, with
pytest-xdist. ``--part alone`` is the rest: what needs the machine for itself, marked ``alone`` or
``browser``, and what runs on Ray, which takes long to start and then serves all tests of a process.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FEW = 20
LONG = 0.6  # seconds
_RUNS_ALONE = re.compile(r"\bmark\.(alone|browser)\b")
_FILE = Path(__file__).with_name("long.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--all``, ``--part``, ``--long`` and ``--note-long``."""
    parser.addoption("--all", action="store_true", help="run what `make test` leaves out, too")
    parser.addoption(
        "--part", choices=["together", "alone"], help="run only this part of the tests"
    )
    parser.addoption("--long", action="store_true", help=f"run what takes over {LONG:g} s, too")
    parser.addoption(
        "--note-long", action="store_true", help=f"note which take over {LONG:g} s, in {_FILE.name}"
    )


def long_ones() -> set[str]:
    """The tests that are known to take long."""
    return set(_FILE.read_text("utf-8").splitlines())


class Noting:
    """A plugin that notes which of the tests that pass take long; others stay as they are noted."""

    def __init__(self) -> None:
        self.known = long_ones()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one, by what it does itself: who comes first in a file starts its kernel."""
        if report.when == "call" and report.passed:
            (self.known.add if report.duration > LONG else self.known.discard)(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write them down."""
        _FILE.write_text("".join(f"{name}\n" for name in sorted(self.known)), "utf-8")


def runs_all(config: pytest.Config) -> bool:
    """Whether nothing is left out."""
    return bool(config.option.all) or any("::" in name for name in config.args)


def slow(*values: Any) -> Any:
    """Values of ``parametrize`` with the mark ``slow``."""
    return pytest.param(*values, marks=pytest.mark.slow)


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    """What the test is given by ``parametrize``."""
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


def engine_of(item: pytest.Item) -> str | None:
    """The engine on which this test of several engines runs now."""
    params = parameters_of(item)
    return params.get("engine", params.get("kernel"))


def is_left_out(item: pytest.Item, long: set[str]) -> bool:
    """Whether this test is one for ``--all``."""
    if item.get_closest_marker("gpu"):  # skipped where there is none
        return False
    if item.get_closest_marker("slow") or item.nodeid in long:
        return True
    if engine_of(item) == "ray":
        return True
    if engine_of(item) == "sockets" and not item.get_closest_marker("conformance"):
        return True
    return bool(parameters_of(item).get("seed", 0) >= FEW)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave unread, where none but tests that run alone are wanted, files that mark none so."""
    if config.option.part != "alone" or runs_all(config) or not collection_path.is_file():
        return None
    return not _RUNS_ALONE.search(collection_path.read_text("utf-8")) or None


def part_of(item: pytest.Item) -> str:
    """The part of a run in which this test runs."""
    marked = any(map(item.get_closest_marker, ("alone", "browser")))
    return "alone" if marked or engine_of(item) == "ray" else "together"


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take from `items` what does not run."""
    everything, part = runs_all(config), config.option.part
    long = set() if config.option.long else long_ones()

    def runs(item: pytest.Item) -> bool:
        return (everything or not is_left_out(item, long)) and part in (None, part_of(item))

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = [item for item in items if runs(item)]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """That a part has no tests is no error: others that were asked for may be in the other part."""
    if session.config.option.part and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(scope="session")
def how_many(pytestconfig: pytest.Config) -> Callable[..., int]:
    """``how_many(200)``: of so many random programs, those to run; ``how_many(30, often=5)``."""

    def number(everything: int, often: int = FEW) -> int:
        return everything if runs_all(pytestconfig) else min(everything, often)

    return number
