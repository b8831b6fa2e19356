"""Which tests run: everything, or, as `make test` does, what a person runs often.

Without ``--all`` three kinds of tests are left out:

- On sockets and on Ray those that are not marked ``conformance``. They run on threads and on worker
  processes; what sockets and Ray add is the connection, and a test that depends on it has the mark.
- Those marked ``slow``.
- Of random programs all but the first `FEW`, if their number is the parameter `seed` of a test; and
  what a test leaves out that asks `how_many` programs, rounds or seconds it may take.

A test that is named (``pytest tests/a.py::test_b``) runs whole, as with ``--all``.
"""

from collections.abc import Callable
from typing import Any

import pytest

SELDOM = ("sockets", "ray")
FEW = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--all``."""
    parser.addoption("--all", action="store_true", help="run what `make test` leaves out, too")


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


def is_left_out(item: pytest.Item) -> bool:
    """Whether this test is one for ``--all``."""
    if item.get_closest_marker("slow"):
        return True
    if engine_of(item) in SELDOM and not item.get_closest_marker("conformance"):
        return True
    return bool(parameters_of(item).get("seed", 0) >= FEW)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take from `items` what does not run."""
    if runs_all(config):
        return
    left_out = [item for item in items if is_left_out(item)]
    items[:] = [item for item in items if not is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def how_many(pytestconfig: pytest.Config) -> Callable[..., int]:
    """``how_many(200)``: of so many random programs, those to run; ``how_many(30, often=5)``."""

    def number(everything: int, often: int = FEW) -> int:
        return everything if runs_all(pytestconfig) else min(everything, often)

    return number
