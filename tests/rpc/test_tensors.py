"""Tensors in calls: what arrives is what was sent, by reference where that can be."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from discolab import Session
from tests.rpc import functions
from tests.rpc.conftest import Caller
from tests.rpc.functions import describe, make_tensor

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn),
]
LARGE = 5_000_000  # numbers of 4 bytes: 20 MB


def samples() -> list[torch.Tensor]:
    """One of each kind."""
    base = make_tensor(6, 8)
    found = [(base * 100).to(dtype) for dtype in DTYPES]
    found += [torch.tensor(3.5), torch.tensor(7), torch.empty(0), torch.empty(3, 0, 2)]
    found += [base.t(), base[::2], base[:, 3], base[1:4, 2:5], base.expand(2, 6, 8)]
    found += [base[0, :1].expand(5), base.flip(0), torch.zeros(1).expand(1000, 1000)]
    found += [
        base.to(memory_format=torch.contiguous_format),
        make_tensor(2, 3, 4, 5).permute(3, 1, 0, 2),
    ]
    found += [make_tensor(1, 2, 3, 4).to(memory_format=torch.channels_last), make_tensor(70_000)]
    found += [torch.view_as_complex(make_tensor(4, 2)).conj(), torch.tensor([float("nan"), -0.0])]
    return found


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, shape and dtype too."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.detach().resolve_conj().contiguous(), b.detach().resolve_conj().contiguous()
    return (
        a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()
        if _numpy(a)
        else bool(
            torch.equal(
                a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b
            )
        )
    )


def _numpy(x: torch.Tensor) -> bool:
    return x.dtype not in (torch.bfloat16, torch.float8_e4m3fn)


def goes_and_comes(rpc: Any) -> None:
    given = samples()
    for to in (2, 0, rpc.get_worker_info().id, -1):
        for x in given:
            found = rpc.rpc_sync(to, functions.same, (x,))
            assert equal(found, x), (to, x.dtype, x.shape, x.stride())
            assert rpc.rpc_sync(to, describe, (x,)) == describe(x)
        many = rpc.rpc_sync(to, functions.same, ({"a": given, "b": (given[0], 1)},))
        assert all(equal(a, b) for a, b in zip(many["a"], given, strict=True))
        ref = rpc.remote(to, functions.same, (given,))
        assert all(equal(a, b) for a, b in zip(ref.to_here(), given, strict=True))


@pytest.mark.conformance
def test_all_kinds(caller: Caller) -> None:
    caller(goes_and_comes)


def is_large(rpc: Any) -> None:
    x = make_tensor(LARGE)
    for to in (2, 3):
        found = rpc.rpc_sync(to, functions.same, (x,))
        assert torch.equal(found, x)
        del found
    parts = rpc.rpc_sync(2, functions.same, (list(x.chunk(7)),))
    assert torch.equal(torch.cat(parts), x)
    crowd = [rpc.rpc_async(2, functions.extremes, (x + n,)) for n in range(3)]
    for n, future in enumerate(crowd):
        assert future.wait() == functions.extremes(x + n)
    assert torch.equal(rpc.remote(3, make_tensor, (LARGE,)).to_here(), x)


@pytest.mark.conformance
def test_large_ones(caller: Caller) -> None:
    caller(is_large)


def shares(rpc: Any) -> None:
    x = torch.zeros(6)
    for a, b in ((x, x), (x, x.view(2, 3)), (x, x[:]), (x[:4], x[:3])):
        assert rpc.rpc_sync(2, functions.shares_memory, (a.clone(), b.clone())) is False
        assert rpc.rpc_sync(2, functions.shares_memory, (a, b)), "views of one storage stay so"
    both = rpc.rpc_sync(2, _two_views)
    both[0].fill_(9)
    assert both[1].tolist() == [9, 9]
    same = rpc.rpc_sync(2, functions.same, ([x, x],))
    assert same[0] is same[1], "one object stays one"


def _two_views() -> list[torch.Tensor]:
    x = torch.zeros(5)
    return [x, x[1:3]]


def test_views_of_one_storage_in_one_message(caller: Caller) -> None:
    caller(shares)


def test_a_small_view_of_a_large_storage(sess: Session) -> None:
    x = torch.zeros(LARGE)
    x[:3] = torch.tensor([1.0, 2, 3])
    assert sess.rpc.rpc_sync(2, functions.same, (x[:3],)).tolist() == [1, 2, 3]
    assert sess.rpc.rpc_sync(2, functions.same, (x[:: LARGE // 4],)).tolist() == [1, 0, 0, 0]


def test_by_reference_between_threads(sess: Session, engine: str) -> None:
    x = make_tensor(10)
    weight = torch.nn.Parameter(torch.ones(3))
    everybody = range(-1, 4) if engine == "threads" else [-1]
    for to in everybody:
        assert sess.rpc.rpc_sync(to, functions.data_ptr, (x,)) == x.data_ptr()
        assert sess.rpc.rpc_sync(to, functions.data_ptr, (x[2:],)) == x[2:].data_ptr()
        assert sess.rpc.rpc_sync(to, functions.same, (x,)).data_ptr() == x.data_ptr()
        found = sess.rpc.rpc_sync(to, functions.data_ptr, (weight,))
        assert found == weight.data_ptr()
        assert sess.rpc.rpc_sync(to, functions.fill, (x, float(to))) is not None
        assert x[0].item() == to


def is_apart(rpc: Any) -> None:
    for count in (5, 300_000):
        x = torch.zeros(count)
        found = rpc.rpc_sync(2, functions.fill, (x, 3.0))
        assert float(found.sum()) == 3 * count
        assert float(x.abs().sum()) == 0, "what is done there is not seen here"
        rpc.rpc_sync(2, functions.keep, ("tensor", x))
        x.fill_(7)
        assert float(rpc.rpc_sync(2, _kept_sum)) == 0, "nor what is done here there"
        again = rpc.rpc_sync(2, functions.kept, ("tensor",))
        again.fill_(5)
        assert float(rpc.rpc_sync(2, _kept_sum)) == 0
        found[0] = 4  # what has come can be written to
        one, two = (rpc.rpc_sync(2, functions.kept, ("tensor",)) for _ in range(2))
        one.fill_(1)
        assert float(two.abs().sum()) == 0
    rpc.rpc_sync(2, functions.drop, ("tensor",))


def _kept_sum() -> float:
    return float(functions.KEPT["tensor"].abs().sum())


def test_copies_between_processes_are_apart(caller: Caller, engine: str) -> None:
    if engine == "threads":
        pytest.skip("by reference")
    caller(is_apart)


def keeps_flags(rpc: Any) -> None:
    leaf = torch.ones(3, requires_grad=True)
    weight = torch.nn.Parameter(torch.ones(3))
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    product = leaf * 2
    assert rpc.rpc_sync(2, describe, (torch.ones(3),)) == describe(torch.ones(3))
    for x in (leaf, weight, frozen):
        assert rpc.rpc_sync(2, describe, (x,)) == describe(x)
        found = rpc.rpc_sync(2, functions.same, (x,))
        assert describe(found) == describe(x)
        assert torch.equal(found, x)
    # what has a graph is cut from it: graphs cross in an autograd context only
    there = rpc.rpc_sync(2, describe, (product,))
    assert there[2] is False
    assert there[4] is True
    found = rpc.rpc_sync(2, functions.same, (product,))
    assert not found.requires_grad
    assert found.grad_fn is None
    assert product.requires_grad, "here it keeps it"
    result = rpc.rpc_sync(2, functions.weight)
    assert isinstance(result, torch.nn.Parameter)
    assert result.requires_grad
    made = rpc.rpc_sync(2, _with_graph)
    assert not made.requires_grad


def _with_graph() -> torch.Tensor:
    return functions.weight() * 2


def test_requires_grad_parameters_and_graphs(caller: Caller) -> None:
    caller(keeps_flags)


def test_modules_and_arrays(caller: Caller) -> None:
    def scenario(rpc: Any) -> None:
        net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).eval()
        x = make_tensor(2, 4)
        there = rpc.rpc_sync(2, functions.call_module, (net, x))
        assert torch.equal(there, net(x).detach())
        back = rpc.rpc_sync(2, functions.same, (net,))
        assert torch.equal(back(x), net(x))
        array = np.arange(12.0).reshape(3, 4)
        assert np.array_equal(rpc.rpc_sync(2, functions.same, (array[:, ::2],)), array[:, ::2])
        ref = rpc.remote(2, torch.nn.Linear, (4, 3))
        assert tuple(ref.rpc_sync().forward(x).shape) == (2, 3)

    caller(scenario)


def changes_while_it_goes(rpc: Any, folder: str) -> None:
    """In place, at once after the call: what arrives is of the call, whole."""
    for number in range(4):
        file = f"{folder}/{rpc.get_worker_info().id}{number}"
        x = torch.zeros(LARGE)
        future = rpc.rpc_async(2, functions.slow_sum, (file, x))
        x.fill_(1)
        x.mul_(2)
        functions.touch(file)
        assert future.wait() == (0, 0, 0)


def test_a_large_tensor_is_changed_after_the_call(
    caller: Caller, engine: str, tmp_path: Path
) -> None:
    if engine == "threads":
        pytest.skip("by reference: what is changed is seen")
    caller(changes_while_it_goes, str(tmp_path))


@pytest.mark.parametrize("lend", [False, True])
def test_a_large_tensor_is_dropped_after_the_call(sess: Session, lend: bool) -> None:
    futures = []
    for number in range(6):
        x = torch.full((LARGE // 2,), float(number))
        futures.append(sess.rpc.rpc_async(2, functions.extremes, (x,), lend=lend))
        del x
        torch.full((LARGE // 2,), -1.0)  # where it lay
    assert [future.wait() for future in futures] == [(float(n), float(n)) for n in range(6)]


def test_a_large_tensor_is_lent(caller: Caller, sess: Session, engine: str) -> None:
    def scenario(rpc: Any) -> None:
        x = torch.full((LARGE,), 3.0)
        assert rpc.rpc_async(2, functions.extremes, (x,), lend=True).wait() == (3, 3)
        assert rpc.remote(2, functions.extremes, (x,), lend=True).to_here() == (3, 3)
        x.fill_(4)  # it is the caller's again
        assert rpc.rpc_async(2, functions.extremes, (x,), lend=True).wait() == (4, 4)

    caller(scenario)


def test_results_that_the_callee_goes_on_changing(sess: Session, engine: str, tag: str) -> None:
    if engine == "threads":
        pytest.skip("by reference: what is changed is seen")
    sess.rpc.rpc_sync(2, functions.keep, (tag, torch.zeros(LARGE // 4)))
    for number in range(5):
        found = sess.rpc.rpc_sync(2, _fill_kept, (tag, float(number)))
        assert functions.extremes(found) == (number, number)
        sess.rpc.rpc_sync(2, _fill_kept, (tag, -1.0))
        assert functions.extremes(found) == (number, number)
    sess.rpc.rpc_sync(2, functions.drop, (tag,))


def _fill_kept(name: str, value: float) -> torch.Tensor:
    found: torch.Tensor = functions.KEPT[name].fill_(value)
    return found


def test_tensors_without_data(caller: Caller) -> None:
    def scenario(rpc: Any) -> None:
        found = rpc.rpc_sync(2, functions.same, (torch.empty(3, device="meta"),))
        assert found.device.type == "meta"
        assert tuple(found.shape) == (3,)

    caller(scenario)


def test_sparse_ones(caller: Caller) -> None:
    def scenario(rpc: Any) -> None:
        x = torch.eye(4).to_sparse()
        found = rpc.rpc_sync(2, functions.same, (x,))
        assert torch.equal(found.to_dense(), torch.eye(4))

    caller(scenario)


def test_many_tensors_of_all_sizes_from_everywhere(sess: Session) -> None:
    def swap() -> bool:
        from discolab import rpc

        me = functions.my_rank()
        futures = []
        for n in range(40):
            x = torch.full((1 + n * n * 40,), float(me * 100 + n))
            futures.append((x, rpc.rpc_async((me + 1 + n % 3) % 4, functions.same, (x,))))
        return all(torch.equal(future.wait(), x) for x, future in futures)

    assert sess.call_packed(swap).debug_get_from_all(timeout=60) == [True] * 4
