"""Delays by which streams drift apart, for tests that ask for them."""

from collections.abc import Iterator

import pytest

from tests.accelerator import sim

SEEDS = 20
OFTEN = {"delays": 5, "seed": 2}  # without --all; of `seed` each costs a word to other processes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let streams drift apart in several ways."""
    for name, often in OFTEN.items():
        if name in metafunc.fixturenames:
            last = SEEDS if metafunc.config.getoption("all") else often
            metafunc.parametrize(name, range(1, last + 1), indirect=True)


@pytest.fixture
def delays(request: pytest.FixtureRequest) -> Iterator[int]:
    """The seed of the delays that are in force."""
    sim.set_delays(request.param)
    yield request.param
    sim.set_delays(0)
