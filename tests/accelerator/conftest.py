"""Each test here begins with no faults and must end with none but those that it takes."""

from collections.abc import Iterator

import pytest
import torch

from tests.accelerator import sim


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    """Fail a test in which memory was used out of order, even where nobody saw the error."""
    sim.faults()
    yield
    for index in range(sim.device_count()):
        torch.accelerator.set_stream(sim.default_stream(index))
        sim.synchronize(index)
    sim.set_device(0)
    found = sim.faults()
    assert not found, "\n".join(found)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let streams drift apart in several ways."""
    if "delays" in metafunc.fixturenames:
        seeds = range(1, 21 if metafunc.config.getoption("all") else 3)
        metafunc.parametrize("delays", seeds, indirect=True)


@pytest.fixture
def delays(request: pytest.FixtureRequest) -> Iterator[int]:
    """The seed of the delays that are in force."""
    sim.set_delays(request.param)
    yield request.param
    sim.set_delays(0)
