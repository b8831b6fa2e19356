"""Delays by which streams drift apart, for tests that ask for them."""

from collections.abc import Iterator

import pytest

from tests.accelerator import sim


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let streams drift apart in several ways."""
    if "delays" in metafunc.fixturenames:
        seeds = range(1, 21 if metafunc.config.getoption("all") else 6)
        metafunc.parametrize("delays", seeds, indirect=True)


@pytest.fixture
def delays(request: pytest.FixtureRequest) -> Iterator[int]:
    """The seed of the delays that are in force."""
    sim.set_delays(request.param)
    yield request.param
    sim.set_delays(0)
