"""Each worker draws random numbers as a process of its own would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from discolab import ThreadedSession, current_worker

DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(5),
    "randn": lambda: torch.randn(2, 3),
    "randn_like": lambda: torch.randn_like(torch.ones(4)),
    "randint": lambda: torch.randint(0, 100, (5,)),
    "randperm": lambda: torch.randperm(9),
    "normal": lambda: torch.normal(torch.zeros(3), torch.ones(3)),
    "bernoulli": lambda: torch.bernoulli(torch.full((8,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(6), 3),
    "normal_": lambda: torch.empty(4).normal_(),
    "uniform_": lambda: torch.empty(4).uniform_(),
    "exponential_": lambda: torch.empty(4).exponential_(),
    "explicit None": lambda: torch.empty(4).normal_(generator=None),
    "init": lambda: torch.nn.init.kaiming_uniform_(torch.empty(4, 4)),
    "Linear": lambda: torch.nn.Linear(3, 2).weight.detach(),
    "dropout": lambda: F.dropout(torch.ones(32)),
    "Dropout": lambda: torch.nn.Dropout(0.3)(torch.ones(32)),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(32), training=True),
    "rrelu": lambda: F.rrelu(-torch.ones(8), training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.zeros(6)),
    "attention": lambda: F.scaled_dot_product_attention(
        *(torch.ones(1, 1, 4, 4) for _ in range(3)), dropout_p=0.5
    ),
    "random_split": lambda: [
        list(part.indices) for part in torch.utils.data.random_split(range(9), [5, 4])
    ],
    "default generator": lambda: torch.rand(3, generator=torch.default_generator),
    "Gamma": lambda: torch.distributions.Gamma(torch.ones(3), torch.ones(3)).sample(),
    "Dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(3)).sample(),
    "LSTM": lambda: torch.nn.LSTM(3, 4, 2, dropout=0.5)(torch.ones(5, 1, 3))[0].detach(),
    "default device": lambda: _with_device(),
}


def _with_device() -> torch.Tensor:
    with torch.device("cpu"):
        return torch.randn(3)


@pytest.fixture
def sess() -> Iterator[ThreadedSession]:
    with ThreadedSession(4, timeout=30) as session:
        yield session


def draw_with(seed: int, name: str, times: int) -> list[Any]:
    torch.manual_seed(seed)
    return [DRAWS[name]() for _ in range(times)]


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_seed_gives_the_numbers_of_a_single_process(
    sess: ThreadedSession, name: str
) -> None:
    before = torch.get_rng_state()
    expected = draw_with(7, name, 20)
    torch.set_rng_state(before)
    for values in sess.call_packed(draw_with, 7, name, 20).debug_get_from_all():
        for value, want in zip(values, expected, strict=True):
            torch.testing.assert_close(value, want, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)  # the controller's own is untouched


def test_different_seeds_differ_and_states_can_be_saved(sess: ThreadedSession) -> None:
    def work() -> tuple[list[float], list[float], int]:
        torch.manual_seed(current_worker().rank)
        state = torch.get_rng_state()
        first = torch.rand(3).tolist()
        torch.set_rng_state(state)
        return first, torch.rand(3).tolist(), torch.initial_seed()

    results = sess.call_packed(work).debug_get_from_all()
    assert all(first == again for first, again, _ in results)
    assert len({tuple(first) for first, _, _ in results}) == 4
    assert [seed for *_, seed in results] == [0, 1, 2, 3]


def test_fork_rng_and_own_generators_work(sess: ThreadedSession) -> None:
    def work() -> bool:
        torch.manual_seed(1)
        with torch.random.fork_rng(devices=[]):
            forked = torch.rand(2)
        own = torch.rand(2, generator=torch.Generator().manual_seed(1))
        return torch.equal(forked, torch.rand(2)) and torch.equal(forked, own)

    assert sess.call_packed(work).debug_get_from_all() == [True] * 4


def test_the_meta_device_and_requires_grad_still_work(sess: ThreadedSession) -> None:
    def work() -> tuple[str, bool]:
        return torch.rand(3, device="meta").device.type, torch.rand(2, requires_grad=True).is_leaf

    assert sess.call_packed(work).debug_get_from_remote(0) == ("meta", True)


def test_torch_has_its_own_functions_back_after_the_last_session() -> None:
    with ThreadedSession(1):
        assert hasattr(torch.randn, "__wrapped__")
    assert not hasattr(torch.randn, "__wrapped__")
    assert not hasattr(torch.Tensor.normal_, "discolab_wraps")
    assert "normal_" not in vars(torch.Tensor)
    assert not hasattr(torch._VF.dropout, "discolab_wraps")


class _DrawsAgain(torch.overrides.TorchFunctionMode):
    """A mode whose code draws a number of its own on each call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.rand(1)
        return func(*args, **(kwargs or {}))


def test_a_draw_inside_of_a_draw_does_not_hang(sess: ThreadedSession) -> None:
    def work() -> list[float]:
        torch.manual_seed(0)
        with _DrawsAgain():
            return torch.rand(2).tolist()

    values = sess.call_packed(work).debug_get_from_all(timeout=10)
    assert values == [values[0]] * 4
