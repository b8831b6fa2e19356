"""Views of values on a GPU say what they say of the same values on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from discolab import Session, current_worker, make_session, view
from tests.gpus import GPU, needs_gpu

pytestmark = needs_gpu


@pytest.fixture(scope="module", params=["threads", "processes"])
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Session, Session]]:
    """Four workers on the GPU, and four on the CPU."""
    with (
        make_session(4, request.param, devices=str(GPU), timeout=60) as there,
        make_session(4, request.param, devices="cpu", timeout=60) as here,
    ):
        yield there, here


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def replica() -> Any:
    return numbers(64, 48).to(current_worker().device)


def shards() -> Any:
    return numbers(64, 48).chunk(4, 1)[current_worker().rank].to(current_worker().device)


def one_differs() -> Any:
    x = numbers(64, 48)
    if current_worker().rank == 2:
        x[3, 5] += 1
    return x.to(current_worker().device)


def not_finite() -> Any:
    x = numbers(64, 48)
    x[0, current_worker().rank] = float("nan")
    x[1, 1] = float("inf")
    return x.to(current_worker().device)


def bfloat16() -> Any:
    return numbers(64, 48).bfloat16().to(current_worker().device)


def integers() -> Any:
    return torch.arange(1000).view(10, 100).to(current_worker().device)


def booleans() -> Any:
    return (numbers(64, 48) > 0).to(current_worker().device)


def complex64() -> Any:
    return torch.complex(numbers(8, 8), numbers(8, 8, seed=1)).to(current_worker().device)


def strided() -> Any:
    return numbers(64, 48).to(current_worker().device).t()[::2]


def large() -> Any:
    return numbers(2048, 2048).to(current_worker().device)


def scalar() -> Any:
    return torch.tensor(1.5, device=current_worker().device)


def empty() -> Any:
    return torch.empty(0, 3, device=current_worker().device)


def module() -> Any:
    made = torch.nn.Linear(8, 4)
    with torch.no_grad():
        made.weight.copy_(numbers(4, 8))
        made.bias.fill_(float(current_worker().rank == 1))
    return made.to(current_worker().device)


def several() -> Any:
    device = current_worker().device
    return {"a": numbers(4, 4).to(device), "b": [numbers(8).to(device), 3], "rank": "x"}


def distributed() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    device = current_worker().device
    mesh = init_device_mesh(device.type, (4,))
    return distribute_tensor(numbers(64, 48).to(device), mesh, [Shard(0)])


VALUES = [replica, shards, one_differs, not_finite, bfloat16, integers, booleans, complex64,
          strided, large, scalar, empty, module, several, distributed]  # fmt: skip


def words(session: Session, make: Callable[[], Any], **options: Any) -> str:
    """The picture without the names of devices, and with numbers to three digits."""
    text = str(view(session.call_packed(make), **options))
    text = re.sub(r"(cuda|sim):\d|cpu|cuda|sim", "DEVICE", text)
    text = re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda found: f"{float(found[0]):.3g}", text)
    return re.sub(r"[ \t─]+", " ", text)


@pytest.mark.parametrize("make", VALUES, ids=lambda make: make.__name__)
def test_it_says_the_same_as_of_the_cpu(both: tuple[Session, Session], make: Any) -> None:
    there, here = both
    for options in ({}, {"stats": True}):
        assert words(there, make, **options) == words(here, make, **options)


def test_two_values_are_compared_where_they_lie(both: tuple[Session, Session]) -> None:
    found = [str(s.compare(s.call_packed(replica), s.call_packed(one_differs))) for s in both]
    there, here = (re.sub(r"(cuda|sim):\d|cpu", "DEVICE", text) for text in found)
    assert there == here
