"""Each worker draws random numbers as a process of its own would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import default_generator
from torch import manual_seed as bound_seed
from torch import randn as bound_randn
from torch.nn.functional import dropout as bound_dropout

from discolab import ThreadedSession, current_worker
from discolab.isolation import torch_random
from tests.selection import slow

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")

BOUND = torch.Tensor.normal_


def bound_normal_(size: int) -> torch.Tensor:
    """`Tensor.normal_` as it was looked up before any session."""
    return BOUND(torch.empty(size))


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
    "poisson": lambda: torch.poisson(torch.full((4,), 3.0)),
    "binomial": lambda: torch.binomial(torch.full((4,), 9.0), torch.full((4,), 0.5)),
    "log_normal_": lambda: torch.empty(4).log_normal_(),
    "cauchy_": lambda: torch.empty(4).cauchy_(),
    "geometric_": lambda: torch.empty(4).geometric_(0.3),
    "random_": lambda: torch.empty(4).random_(7),
    "many": lambda: torch.rand(9000),  # more than are drawn with the interpreter lock held
    "float64": lambda: torch.randn(3, dtype=torch.float64),
    "bound before": lambda: (bound_randn(3), bound_dropout(torch.ones(9)), bound_normal_(3)),
    "aten": lambda: (
        torch.ops.aten.randn.default([3]),
        torch.ops.aten.native_dropout.default(torch.ones(9), 0.5, True),
    ),
    "vmap": lambda: torch.vmap(lambda x: x + torch.rand(2), randomness="different")(torch.ones(3)),
    "seeded by a bound name": lambda: (bound_seed(3).initial_seed(), torch.rand(2)),
    "state of the default generator": lambda: _again(),
    "checkpoint": lambda: _checkpointed(),
    "compiled by aot_eager": lambda: _compiled("aot_eager"),
    "compiled by inductor": lambda: _compiled("inductor"),
}


def _again() -> list[torch.Tensor]:
    """Draw twice from one state, which the generator itself gives and takes."""
    state = default_generator.get_state()
    first = torch.rand(2, generator=default_generator)
    default_generator.set_state(state)
    return [first, torch.rand(2)]


def _checkpointed() -> torch.Tensor:
    """The gradient tells whether dropout was the same when it was computed again."""
    x = torch.ones(16, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(lambda t: F.dropout(t) * t, x, use_reentrant=False)
    out.sum().backward()
    return torch.stack([out.detach(), x.grad])  # type: ignore[list-item]


def _noisy(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x) + torch.rand(4) + torch.randn_like(x)


def _compiled(backend: str) -> torch.Tensor:
    return torch.compile(_noisy, backend=backend)(torch.ones(4))


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


@pytest.mark.parametrize("name", [slow(n) if n == "compiled by inductor" else n for n in DRAWS])
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


@pytest.mark.slow
def test_draws_of_all_kinds_while_others_compile(sess: ThreadedSession) -> None:
    """One worker after the other begins to compile while the rest draw."""
    names = [name for name in DRAWS if not name.startswith("compiled")]

    def work() -> list[Any]:
        torch.manual_seed(11)
        drawn = [DRAWS[name]() for name in names[: 5 * current_worker().rank]]
        torch.manual_seed(5)
        compiled = torch.compile(lambda x: _noisy(x) * 2, backend="aot_eager")(torch.ones(4))
        torch.manual_seed(7)
        return [compiled, *(DRAWS[name]() for _ in range(200) for name in names), len(drawn)]

    before = torch.get_rng_state()
    torch.manual_seed(5)
    compiled = torch.compile(lambda x: _noisy(x) * 2, backend="aot_eager")(torch.ones(4))
    torch.manual_seed(7)
    expected = [compiled, *(DRAWS[name]() for _ in range(200) for name in names)]
    torch.set_rng_state(before)
    for *values, _ in sess.call_packed(work).debug_get_from_all(timeout=60):
        for value, want in zip(values, expected, strict=True):
            torch.testing.assert_close(value, want, rtol=0, atol=0)


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


def test_torch_has_its_own_generator_and_operators_back_after_the_last_session() -> None:
    own, randn = torch.default_generator, torch.randn
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    with ThreadedSession(1):
        assert registered("aten::normal_", "BackendSelect")
        assert torch.default_generator is not own
        assert torch.utils.data.dataset.default_generator is torch.default_generator
    assert not registered("aten::normal_", "BackendSelect")
    assert (torch.default_generator, torch.random.default_generator) == (own, own)
    assert (torch.utils.data.dataset.default_generator, torch.randn) == (own, randn)


def test_every_operator_that_draws_on_the_cpu_is_known() -> None:
    """What torch has is either in the list, or made of what is there."""
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        if (
            schema.name.startswith("aten::")
            and any("Generator" in str(arg.type) for arg in schema.arguments)
            and torch._C._dispatch_has_kernel(name)
            and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
        ):
            found.add(name.removeprefix("aten::"))
    assert found == set(torch_random._OPERATORS)


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
