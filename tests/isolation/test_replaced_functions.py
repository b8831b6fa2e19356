"""Functions that workers put in place of a module's: each its own, as processes have it."""

import builtins
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from discolab import Session, current_worker
from tests.isolation.test_torch_settings import together


def counting(module: Any, name: str, counts: dict[str, int]) -> None:
    """Put a function there that counts its calls."""
    original = getattr(module, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] = counts.get(name, 0) + 1
        return original(*args, **kwargs)

    setattr(module, name, counted)


def count_calls() -> dict[str, int]:
    rank, counts = together(), dict[str, int]()
    originals = dist.all_reduce, F.gelu, F.linear
    counting(dist, "all_reduce", counts)
    if rank != 1:  # worker 1 has the others as they are
        counting(F, "gelu", counts)
        counting(F, "linear", counts)
    together()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    torch.nn.GELU()(torch.ones(2))
    layer = torch.nn.MultiheadAttention(4, 2)  # `F.multi_head_attention_forward` calls `linear`
    layer.train()(*[torch.ones(3, 1, 4)] * 3)
    together()
    dist.all_reduce, F.gelu, F.linear = originals
    assert (dist.all_reduce, F.gelu, F.linear) == originals
    together()
    dist.all_reduce(torch.ones(1))
    return counts


def test_each_worker_counts_its_own_calls(sess: Session) -> None:
    originals = dist.all_reduce, F.gelu, F.linear
    seen = sess.call_packed(count_calls).debug_get_from_all()
    all_three = seen[0]
    assert all_three["all_reduce"] == 3
    assert all_three["gelu"] == 1
    assert all_three["linear"] >= 1
    assert seen == [all_three, {"all_reduce": 3}, all_three, all_three]
    assert (dist.all_reduce, F.gelu, F.linear) == originals


def print_of_rank_0() -> list[str]:
    """As training scripts do it: they take what they find by its name, or in `builtins`."""
    rank, printed = together(), list[str]()
    plain = print if rank % 2 else builtins.print

    def print_on_rank_0(*args: Any, force: bool = False) -> None:
        if rank == 0 or force:
            printed.append(str(args[0]))
            plain(*args)

    builtins.print = print_on_rank_0  # type: ignore[assignment]
    together()
    print("hello")
    print(f"forced on {rank}", force=True)  # type: ignore[call-overload]
    together()
    builtins.print = plain
    print("all again")
    return printed


def test_rank_0_alone_prints(sess: Session) -> None:
    plain = builtins.print
    seen = sess.call_packed(print_of_rank_0).debug_get_from_all()
    assert seen == [["hello", "forced on 0"], *([f"forced on {rank}"] for rank in (1, 2, 3))]
    assert builtins.print is plain


def mocked() -> tuple[Any, int]:
    rank = together()
    with mock.patch("torch.nn.functional.relu", return_value=rank) as relu:
        together()
        found = torch.nn.ReLU()(torch.ones(1))
        together()
        return found, relu.call_count


def test_each_worker_mocks_for_itself(sess: Session) -> None:
    seen = sess.call_packed(mocked).debug_get_from_all()
    assert seen == [(rank, 1) for rank in range(4)]
    with_torchs = sess.call_packed(lambda: torch.nn.ReLU()(torch.ones(1)).item())
    assert with_torchs.debug_get_from_all() == [1.0] * 4


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + current_worker().rank


def compiled_with_its_own() -> float:
    rank = together()
    if rank:
        F.silu = twice  # type: ignore[assignment]
    together()

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.silu(x)

    found = torch.compile(f, backend="eager")(torch.ones(1)).item()
    together()
    return round(found, 4)


def test_what_is_compiled_calls_the_workers_own(sess: Session) -> None:
    seen = sess.call_packed(compiled_with_its_own).debug_get_from_all()
    sess.call_packed(put_back).debug_get_from_all()
    assert seen == [0.7311, 3.0, 4.0, 5.0]


def put_back() -> None:
    F.silu = SILU


SILU = F.silu
