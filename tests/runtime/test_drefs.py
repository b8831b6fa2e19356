"""DRefs in Python expressions and torch functions, and their life."""

import copy
import gc
import operator
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from discolab import ArgumentError, DRef, Pickled, ThreadedSession, WorkerError, current_worker
from discolab.runtime import session

BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
]


def registers(session: ThreadedSession) -> list[int]:
    return session.call_packed(lambda: len(current_worker().registers)).debug_get_from_all()


def tensor(session: ThreadedSession, *values: float) -> Any:  # torch's stubs know no DRef
    return session.call_packed(torch.tensor, [float(v) for v in values])


def value(ref: Any) -> Any:
    first, second = ref.debug_get_from_all()
    assert torch.equal(first, second)
    return first


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
def test_operators_mean_what_they_mean_on_tensors(
    pair: ThreadedSession, op: Callable[[Any, Any], Any]
) -> None:
    a, b = torch.tensor([5.0, 2.0]), torch.tensor([3.0, 4.0])
    x, y = pair.call_packed(lambda: a), pair.call_packed(lambda: b)
    assert torch.equal(value(op(x, y)), op(a, b))
    assert torch.equal(value(op(x, 3)), op(a, 3))
    assert torch.equal(value(op(3.0, x)), op(3.0, a))
    assert torch.equal(value(op(x, b)), op(a, b))
    assert torch.equal(value(op(a, y)), op(a, b))


def test_bits_matmul_and_unary(pair: ThreadedSession) -> None:
    a, m = torch.tensor([6, -3]), torch.tensor([[1, 2], [3, 4]])
    x, y = pair.call_packed(lambda: a), pair.call_packed(lambda: m)
    for op in (operator.and_, operator.or_, operator.xor):
        assert torch.equal(value(op(x, 3)), op(a, 3))
    for unary in (operator.neg, operator.invert, abs):
        assert torch.equal(value(unary(x)), unary(a))
    assert torch.equal(value(y @ x), m @ a)
    assert torch.equal(value(m @ x), m @ a)
    x += 1
    assert torch.equal(value(x), a + 1)


def test_numpy_on_the_left_leaves_the_operator_to_the_workers(pair: ThreadedSession) -> None:
    x = tensor(pair, 1, 2)
    assert value(np.float64(2) * x).tolist() == [2, 4]
    assert isinstance(np.ones(2) * x, DRef)


def test_torch_functions_run_on_the_workers(pair: ThreadedSession) -> None:
    x, w = tensor(pair, -1, 2), torch.eye(2)
    assert value(torch.relu(x)).tolist() == [0, 2]
    assert value(torch.cat([x, x])).tolist() == [-1, 2, -1, 2]
    assert value(torch.stack((x, torch.zeros(2)), dim=1)).tolist() == [[-1, 0], [2, 0]]
    assert value(torch.nn.functional.linear(x, w, bias=x)).tolist() == [-2, 4]
    assert value(torch.add(input=x, other=x, alpha=2)).tolist() == [-3, 6]
    assert value(torch.relu(x @ w) + 1).tolist() == [1, 3]
    assert value(torch.zeros(2).add(x)).tolist() == [-1, 2]


def test_index_and_assign(pair: ThreadedSession) -> None:
    x = pair.call_packed(torch.zeros, 3)
    index = pair.call_packed(lambda: current_worker().rank)
    x[index] = 1
    x[2:] = tensor(pair, 5)
    assert [v.tolist() for v in x.debug_get_from_all()] == [[1, 0, 5], [0, 1, 5]]
    assert [v.item() for v in x[index].debug_get_from_all()] == [1, 1]
    assert [v.tolist() for v in x[..., :2].debug_get_from_all()] == [[1, 0], [0, 1]]


def test_an_assignment_that_fails_is_told_by_the_next_fetch(pair: ThreadedSession) -> None:
    x = pair.call_packed(torch.zeros, 3)
    x[7] = 1
    with pytest.raises(WorkerError, match="index 7 is out of bounds"):
        x.debug_get_from_all()
    assert value(x).tolist() == [0, 0, 0]


@pytest.mark.parametrize("use", [iter, list, len, bool])
def test_what_differs_from_worker_to_worker_is_refused(
    pair: ThreadedSession, use: Callable[[DRef], Any]
) -> None:
    with pytest.raises(ArgumentError, match=r"workers|worker to worker"):
        use(pair.call_packed(torch.zeros, 3))


def test_a_repr_needs_no_worker(pair: ThreadedSession) -> None:
    ref = pair.call_packed(torch.zeros, 3)
    assert repr(ref) == f"<DRef r{ref.reg_id} on 2 workers>"
    pair.shutdown()
    assert "closed session" in repr(ref)


def test_a_handle_of_another_kind_owns_its_register_once(pair: ThreadedSession) -> None:
    for _ in range(3):
        pair.load_module("math")["sqrt"]
    refs = [pair.call_packed(int, n) for n in range(8)]
    assert 0 not in [ref.reg_id for ref in refs]
    assert len({ref.reg_id for ref in refs}) == 8
    assert [ref.debug_get_from_remote(1) for ref in refs] == list(range(8))
    pair._registers.validate()


@pytest.mark.conformance
def test_a_dref_that_is_dropped_frees_its_value_without_another_command(
    pair: ThreadedSession,
) -> None:
    pair.sync_all()
    before = registers(pair)
    refs = [pair.call_packed(torch.zeros, 3) for _ in range(20)]
    pair.sync_all()
    del refs
    waited = threading.Event()
    for _ in range(200):
        if registers(pair) == before:
            break
        waited.wait(0.02)
    assert registers(pair) == before


def test_drefs_dropped_by_the_collector_on_another_thread_are_freed(
    pair: ThreadedSession,
) -> None:
    class Ring:
        def __init__(self, ref: DRef) -> None:
            self.ref, self.me = ref, self

    live = pair.statistics().live_registers
    rings = [Ring(pair.call_packed(torch.zeros, 3)) for _ in range(100)]
    rings.clear()
    for _ in range(20):  # it does nothing while a worker's thread collects
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join(20)
        if pair.statistics().live_registers == live:
            break
    assert pair.statistics().live_registers == live
    assert pair.call_packed(int, 3).debug_get_from_all() == [3, 3]


def test_a_value_reassigned_to_its_own_name_is_computed_from_the_old_one(
    pair: ThreadedSession,
) -> None:
    x = pair.call_packed(torch.zeros, 1)
    for _ in range(500):
        x = x + 1
    assert value(x).item() == 500
    assert pair.statistics().live_registers < 10


def test_the_result_never_takes_the_register_of_an_argument(pair: ThreadedSession) -> None:
    def add_up(*args: Any, **kwargs: Any) -> int:
        return int(sum(args[0]) + args[1] + kwargs["last"]["x"])

    for _ in range(100):
        made = pair.call_packed(
            add_up,
            [pair.call_packed(int, 1)],
            pair.call_packed(int, 2),
            last={"x": pair.call_packed(int, 3)},
        )
        assert made.debug_get_from_all() == [6, 6]
        assert pair.call_packed(pair.call_packed(lambda: len), "ab").debug_get_from_all() == [2, 2]


def test_equality_is_elementwise_and_hashing_by_identity(pair: ThreadedSession) -> None:
    x = pair.call_packed(torch.arange, 3)
    assert torch.equal((x == 1).debug_get_from_remote(0), torch.tensor([False, True, False]))
    assert torch.equal((x != 1).debug_get_from_remote(1), torch.tensor([True, False, True]))
    assert {x: "here"}[x] == "here"


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_dref_cannot_be_copied_or_pickled(pair: ThreadedSession, twin: Any) -> None:
    x = tensor(pair, 1, 2)
    for value_ in (x, [x], {"a": x}):
        if twin is not copy.copy or value_ is x:
            with pytest.raises(ArgumentError, match="can't be copied or pickled"):
                twin(value_)
    with pytest.raises(ArgumentError, match="can't be copied or pickled"):
        pair.call_packed(len, Pickled([x]))


def test_what_only_a_tensor_has_is_hinted_at(pair: ThreadedSession) -> None:
    x = tensor(pair, 1, 2)
    with pytest.raises(AttributeError, match=r"'sum'.*torch\.sum\(ref\) runs there"):
        x.sum()
    with pytest.raises(AttributeError, match=r"'shape'.*call_packed\(lambda t: t\.shape, ref\)"):
        _ = x.shape
    for name in ("no_such_name", "_repr_html_", "_ipython_display_", "__array_interface__"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'$"):
            getattr(x, name)
    assert not hasattr(x, "sum")
    assert "sum" not in dir(x)
    assert "debug_get_from_all" in dir(x)


def test_a_dref_is_no_array(pair: ThreadedSession) -> None:
    x = tensor(pair, 1, 2)
    for make in (np.asarray, np.array, np.mean):
        with pytest.raises(ArgumentError, match="a DRef is no array"):
            make(x)


def test_a_call_torn_in_the_making_of_its_dref_gives_the_register_back(
    pair: ThreadedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = pair.statistics().live_registers

    def torn_before(*_: object) -> None:
        raise KeyboardInterrupt

    def torn_after(*args: Any) -> None:
        DRef(*args)
        raise KeyboardInterrupt

    for torn in (torn_before, torn_after):
        monkeypatch.setattr(session, "DRef", torn)
        with pytest.raises(KeyboardInterrupt):
            pair.call_packed(lambda: 0)
        monkeypatch.undo()
        pair._registers.validate()
        assert pair.statistics().live_registers == live
    assert pair.call_packed(int).debug_get_from_all() == [0, 0]


@pytest.mark.parametrize("send", ["broadcast", "scatter"])
def test_what_the_session_makes_is_never_read_unfilled(pair: ThreadedSession, send: str) -> None:
    def late() -> None:
        if current_worker().rank == 1:
            time.sleep(1000)

    pair.call_packed(late)
    ref = getattr(pair, send)(torch.ones(2, 4))
    while pair.status()[0].state != "waiting":  # in the collective: its tensor is there
        time.sleep(0.001)
    assert pair.interrupt(timeout=20) == []
    for rank in range(2):
        with pytest.raises(WorkerError, match="WorkerInterrupted"):
            ref.debug_get_from_remote(rank)
    again = getattr(pair, send)(torch.ones(2, 4))
    assert all((value == 1).all() for value in again.debug_get_from_all())
