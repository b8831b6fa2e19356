"""What a call carries to the workers and what comes back."""

import math
from collections import OrderedDict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from discolab import ArgumentError, DRef, Pickled, ThreadedSession, current_worker, register_func
from tests.conftest import Gate


def rank() -> int:
    return current_worker().rank


def as_is(*args: Any, **kwargs: Any) -> Any:
    return (args, kwargs) if kwargs else args[0] if len(args) == 1 else args


@pytest.mark.parametrize(
    ("worker0_only", "in_group", "holders"),
    [
        (False, True, [0, 1, 2, 3]),
        (False, False, [0, 1, 2, 3]),
        (True, True, [0, 2]),
        (True, False, [0]),
    ],
)
def test_empty_is_made_where_it_was_asked_for(
    sess: ThreadedSession, worker0_only: bool, in_group: bool, holders: list[int]
) -> None:
    ref = sess.empty((2, 3), "float16", worker0_only=worker0_only, in_group=in_group)
    values = ref.debug_get_from_all()
    assert [r for r, value in enumerate(values) if value is not None] == holders
    assert all(v.shape == (2, 3) and v.dtype == torch.float16 for v in values if v is not None)


@pytest.mark.conformance
def test_each_worker_gets_its_own_copy_of_a_tensor(sess: ThreadedSession) -> None:
    def add_rank(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.add_(rank())

    mine = torch.zeros(2)
    values = sess.call_packed(add_rank, mine).debug_get_from_all()
    assert [v[0].item() for v in values] == [0, 1, 2, 3]
    assert mine.tolist() == [0, 0]


def test_a_tensor_is_sent_as_it_is_at_the_call(pair: ThreadedSession, gate: Gate) -> None:
    pair.call_packed(lambda: gate.wait(10))
    mine, array, net = torch.zeros(2), np.zeros(2), torch.nn.Linear(1, 1, bias=False)
    weight = net.weight.item()
    refs = pair.call_packed(as_is, mine, [array]), pair.call_packed(net, torch.ones(1))
    mine += 1
    array += 1
    with torch.no_grad():
        net.weight += 1
    gate.set()
    for tensor, (held,) in refs[0].debug_get_from_all():
        assert tensor.tolist() == held.tolist() == [0, 0]
    assert refs[1].debug_get_from_remote(0).item() == pytest.approx(weight)


def test_requires_grad_and_dtype_arrive(pair: ThreadedSession) -> None:
    def look(t: torch.Tensor) -> Any:
        t.mul(2).sum().backward()
        return t.requires_grad, t.dtype, t.grad

    mine = torch.ones(2, dtype=torch.float64, requires_grad=True)
    requires_grad, dtype, grad = pair.call_packed(look, mine).debug_get_from_remote(1)
    assert (requires_grad, dtype, grad.tolist()) == (True, torch.float64, [2, 2])
    assert mine.grad is None


@pytest.mark.conformance
def test_containers_keywords_and_nested_drefs_arrive(sess: ThreadedSession) -> None:
    mine = sess.call_packed(rank)
    ref = sess.call_packed(as_is, [mine, {"r": (mine, 7)}], key={"deep": [mine]}, func=3, self=4)
    for r, (args, kwargs) in enumerate(ref.debug_get_from_all()):
        assert args == ([r, {"r": (r, 7)}],)
        assert kwargs == {"key": {"deep": [r]}, "func": 3, "self": 4}


def test_a_handle_takes_keywords_of_any_name(pair: ThreadedSession) -> None:
    register_func("tests.keywords", lambda **kw: sorted(kw), override=True)
    func = pair.get_global_func("tests.keywords")
    assert func(self=1, func=2, args=3).debug_get_from_all() == [["args", "func", "self"]] * 2


@pytest.mark.conformance
def test_pickled_gives_each_worker_a_copy_of_any_object(pair: ThreadedSession) -> None:
    class Config:
        def __init__(self) -> None:
            self.steps = [1]

    def grow(config: Config) -> list[int]:
        config.steps.append(rank())
        return config.steps

    config = Config()
    with pytest.raises(ArgumentError, match="Pickled"):
        pair.call_packed(grow, config)
    assert pair.call_packed(grow, Pickled(config)).debug_get_from_all() == [[1, 0], [1, 1]]
    assert config.steps == [1]


def test_a_module_is_an_argument_and_a_function(pair: ThreadedSession) -> None:
    net = torch.nn.Linear(2, 2)

    def train(model: torch.nn.Linear) -> float:
        with torch.no_grad():
            model.weight += 1 + rank()
        return model.weight.sum().item()

    before = net.weight.sum().item()
    got = pair.call_packed(train, net).debug_get_from_all()
    assert got == pytest.approx([before + 4, before + 8])
    assert net.weight.sum().item() == before
    x = torch.ones(2)
    assert torch.equal(pair.call_packed(net, x).debug_get_from_remote(1), net(x))


@pytest.mark.conformance
def test_numpy_goes_in_and_comes_out(pair: ThreadedSession) -> None:
    array = np.arange(3)
    ref = pair.call_packed(lambda a, k: a * k, array, np.float32(2))
    got = ref.debug_get_from_remote(1)
    assert isinstance(got, np.ndarray)
    assert got.tolist() == [0, 2, 4]
    got += 1
    assert ref.debug_get_from_remote(1).tolist() == [0, 2, 4]


def test_what_is_fetched_is_private(pair: ThreadedSession) -> None:
    values = {
        "tensor": torch.zeros(2),
        "list": [torch.zeros(2)],
        "state_dict": OrderedDict(a=torch.zeros(2)),
        "max": torch.max(torch.zeros(2, 2), 0),
        "net": torch.nn.Linear(1, 1),
    }
    ref = pair.call_packed(lambda: values)
    got = ref.debug_get_from_remote(0)
    got["tensor"] += 1
    got["list"][0] += 1
    got["state_dict"]["a"] += 1
    got["max"].values.add_(1)
    with torch.no_grad():
        got["net"].weight.zero_()
    assert isinstance(got["state_dict"], OrderedDict)
    again = ref.debug_get_from_remote(0)
    for tensor in (
        again["tensor"],
        again["list"][0],
        again["state_dict"]["a"],
        again["max"].values,
    ):
        assert tensor.tolist() == [0, 0]
    assert again["net"].weight.item() != 0


@pytest.mark.conformance
def test_results_may_be_anything(pair: ThreadedSession) -> None:
    found = pair.call_packed(lambda: Fraction(1, 3)).debug_get_from_all()
    assert found == [Fraction(1, 3)] * 2
    assert pair.call_packed(lambda: None).debug_get_from_all() == [None, None]


@pytest.mark.conformance
def test_copies_to_and_from_worker_0(sess: ThreadedSession) -> None:
    ref = sess.copy_to_worker_0(np.arange(4, dtype=np.int32))
    assert ref.debug_get_from_all()[1:] == [None, None, None]
    host = np.zeros(4, dtype=np.int32)
    sess.copy_from_worker_0(host, ref)
    sess.sync_worker_0()
    assert host.tolist() == [0, 1, 2, 3]
    sess.copy_to_worker_0(torch.full((4,), 7, dtype=torch.int32), ref)
    tensor = torch.zeros(4, dtype=torch.int32)
    sess.copy_from_worker_0(tensor, ref, timeout=10)
    assert tensor.tolist() == [7] * 4


def test_copies_need_the_same_number_of_elements_not_the_same_shape(pair: ThreadedSession) -> None:
    flat = np.arange(12, dtype=np.float32)
    ref = pair.empty((3, 4), "float32")
    for rank in range(2):
        ref.debug_copy_from(rank, flat + rank)
    want = [(flat.reshape(3, 4) + rank).tolist() for rank in range(2)]
    assert [value.tolist() for value in ref.debug_get_from_all()] == want
    columns = pair.call_packed(torch.t, ref)  # strided, and it stays the other's memory
    columns.debug_copy_from(0, flat)
    assert ref.debug_get_from_remote(0).tolist() == flat.reshape(4, 3).T.tolist()
    host = np.zeros((2, 6), dtype=np.float32)
    pair.copy_from_worker_0(host, columns, timeout=10)
    assert host.tolist() == flat.reshape(2, 6).tolist()
    pair.copy_to_worker_0(flat[::-1].copy(), ref, timeout=10)
    assert ref.debug_get_from_remote(0).tolist() == flat[::-1].reshape(3, 4).tolist()


def test_a_read_only_array_is_read_but_never_written(pair: ThreadedSession) -> None:
    array = np.ones(3)
    array.flags.writeable = False
    ref = pair.copy_to_worker_0(array)
    with pytest.raises(ArgumentError, match="read-only"):
        pair.copy_from_worker_0(array, ref)
    pair.sync_all()


@pytest.mark.conformance
def test_debug_copy_from_sets_one_worker(pair: ThreadedSession) -> None:
    ref = pair.call_packed(torch.zeros, 2)
    held = pair.call_packed(lambda t: t, ref)  # the same tensor under another name
    ref.debug_copy_from(1, torch.ones(2))
    assert [v.tolist() for v in held.debug_get_from_all()] == [[0, 0], [1, 1]]
    for value in (3, 2.5, "text", b"x", None, [1, torch.ones(1)], Pickled({1, 2})):
        ref.debug_copy_from(0, value)
        expected = value.value if isinstance(value, Pickled) else value
        assert str(ref.debug_get_from_remote(0)) == str(expected)


@pytest.mark.parametrize(
    "wrong", [torch.ones(3), torch.ones(2, dtype=torch.float64), np.ones(2), torch.ones(2, 2)]
)
def test_a_copy_that_does_not_fit_is_an_error_and_keeps_the_value(
    pair: ThreadedSession, wrong: Any
) -> None:
    from discolab import WorkerError

    ref = pair.call_packed(torch.zeros, 2)
    with pytest.raises(WorkerError, match="dtype and number of elements must be the same"):
        ref.debug_copy_from(1, wrong)
    pair.sync_all()  # it was told already
    assert ref.debug_get_from_remote(1).tolist() == [0, 0]


@pytest.mark.conformance
def test_worker_variables(pair: ThreadedSession) -> None:
    pair["x"] = torch.ones(2)
    pair.push({"y": 3, "r": pair.call_packed(rank)})
    assert pair.pull("r") == [0, 1]
    assert pair.pull("r", [1]) == [1]
    assert (pair["x"] * pair["y"]).debug_get_from_remote(1).tolist() == [3, 3]
    assert pair["x"].name == "x"


def test_any_callable_is_a_function(pair: ThreadedSession) -> None:
    class Adder:
        def __call__(self, a: int) -> int:
            return a + 1

    assert pair.call_packed(Adder(), 1).debug_get_from_all() == [2, 2]
    assert pair.call_packed(math.sqrt, 4).debug_get_from_all() == [2, 2]
    assert pair.call_packed("a-b".split, "-").debug_get_from_all() == [["a", "b"]] * 2
    assert pair.call_packed(int, "7").debug_get_from_all() == [7, 7]
    made = pair.call_packed(lambda: lambda a: a * 2)
    assert type(made) is DRef
    assert pair.call_packed(made, 4).debug_get_from_all() == [8, 8]
