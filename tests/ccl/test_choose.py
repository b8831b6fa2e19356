"""Which backend is chosen, what is said about it, and how it is changed."""

from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.ccl import choose
from discolab.engines import ThreadedSession
from discolab.runtime import ArgumentError, WorkerError, current_worker


def rank() -> int:
    return current_worker().rank


def names(sess: ThreadedSession) -> list[str]:
    found: list[str] = sess.call_packed(ccl.backend_name).debug_get_from_all()
    return found


def total() -> float:
    return float(ccl.all_reduce(torch.tensor(rank() + 1.0), group="world"))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("auto", "local: 3 workers in one process on cpu"),
        ("local", "local: 3 workers in one process on cpu"),
        ("gloo", "gloo: 3 workers in one process on cpu"),
    ],
)
def test_it_says_what_was_chosen(start: Any, asked: str, told: str) -> None:
    with start(3) as sess:
        assert sess.init_ccl(asked) == told
        assert sess.collectives == told
        assert names(sess) == [told.partition(":")[0]] * 3
        assert sess.call_packed(total).debug_get_from_all() == [6.0] * 3


def test_one_worker(start: Any) -> None:
    with start(1) as sess:
        assert sess.init_ccl() == "local: 1 worker in one process on cpu"
        assert sess.init_ccl("gloo") == "gloo: 1 worker in one process on cpu"
        assert sess.call_packed(total).debug_get_from_all() == [1.0]


def test_without_asking_it_is_auto(start: Any) -> None:
    with start(2) as sess:
        assert sess.collectives == ""
        assert sess.call_packed(total).debug_get_from_all() == [3.0, 3.0]
        assert names(sess) == ["local", "local"]


def test_switching(start: Any) -> None:
    with start(2) as sess:
        for name in ("gloo", "local", "gloo", "gloo", "auto"):
            told = sess.init_ccl(name)
            assert names(sess) == [told.partition(":")[0]] * 2
            for _ in range(3):
                assert sess.call_packed(total).debug_get_from_all() == [3.0, 3.0]


def test_an_unknown_one_changes_nothing(start: Any) -> None:
    with start(2) as sess:
        sess.init_ccl("gloo")
        for wrong in ("pigeon", "GLOO", 3, None):
            with pytest.raises(ArgumentError, match=r"no backend .*'local', 'gloo', 'nccl', 'mpi'"):
                sess.init_ccl(wrong)
        assert names(sess) == ["gloo", "gloo"]


@pytest.mark.skipif(torch.version.hip is not None, reason="is about a torch without RCCL")
def test_rccl_is_nccl_of_torch_for_rocm(start: Any) -> None:
    with start(2) as sess:
        with pytest.raises(ArgumentError, match=r"'rccl' needs a torch for ROCm, and this one is"):
            sess.init_ccl("rccl")
        assert names(sess) == ["local", "local"]


def init_by_rank() -> None:
    choose.init("gloo" if rank() == 1 else "local", ())


def init_on_one() -> None:
    if rank() == 1:
        choose.init("gloo", ())


def init_twice() -> str:
    choose.init("gloo", ())
    total()
    choose.init("local", ())
    total()
    return choose.init("gloo", ())


def test_all_workers_must_be_asked_for_the_same(start: Any) -> None:
    with start(3) as sess:
        with pytest.raises(WorkerError) as caught:
            sess.call_packed(init_by_rank).debug_get_from_all()
        assert len(caught.value.failures) == 3
        for failure in caught.value.failures:
            assert failure.type_name == "CollectiveError"
            for words in ("disagree", "worker 1: called init_ccl('gloo')", "workers 0, 2: called"):
                assert words in failure.message
        with pytest.raises(WorkerError, match="workers 0, 2: finished the call without it"):
            sess.call_packed(init_on_one).debug_get_from_all()
        assert names(sess) == ["local"] * 3
        assert sess.call_packed(total).debug_get_from_all() == [6.0] * 3
        told = sess.call_packed(init_twice).debug_get_from_all()
        assert told == ["gloo: 3 workers in one process on cpu"] * 3


def place(name: str, devices: list[str]) -> str:
    """As if this worker had another device: what is asked about it touches none."""
    worker = current_worker()
    before, worker.device = worker.device, torch.device(devices[rank()])
    try:
        return choose.init(name, ())
    finally:
        ccl.barrier(group="world")
        worker.device = before


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (
            ["cpu", "cpu", "cpu"],
            "'nccl' needs a GPU for every worker, and there is none for workers 0-2",
        ),
        (
            ["cuda:0", "cpu", "cuda:1"],
            "'nccl' needs a GPU for every worker, and there is none for worker 1",
        ),
        (["cuda:0", "cuda:1", "cuda:0"], "workers 0, 2 share the GPU cuda:0"),
    ],
)
def test_nccl_is_refused_with_a_way_out(start: Any, devices: list[str], words: str) -> None:
    with start(3) as sess:
        with pytest.raises(WorkerError) as caught:
            sess.call_packed(place, "nccl", devices).debug_get_from_all()
        assert len(caught.value.failures) == 3
        for failure in caught.value.failures:
            assert failure.type_name == "ArgumentError"
            assert words in failure.message
            assert "use 'local'" in failure.message
        told = sess.call_packed(place, "auto", devices).debug_get_from_all()
        assert {text.partition(":")[0] for text in told} == {"local"}


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="says what is told without NCCL")
def test_torch_without_nccl(start: Any) -> None:
    with start(2) as sess:
        with pytest.raises(WorkerError, match=r"was built without NCCL; use 'local'"):
            sess.call_packed(place, "nccl", ["cuda:0", "cuda:1"]).debug_get_from_all()
        told = sess.call_packed(place, "auto", ["cuda:0", "cuda:1"]).debug_get_from_all()
        assert told == ["local: 2 workers in one process on cuda:0, cuda:1"] * 2


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.distributed.is_nccl_available() and torch.cuda.is_available()),
    reason="needs NCCL and a GPU",
)
def test_nccl() -> None:
    n = torch.cuda.device_count()
    with ThreadedSession(n, devices=[f"cuda:{i}" for i in range(n)], timeout=60) as sess:
        assert sess.init_ccl("nccl").startswith("nccl: ")

        def sums() -> list[float]:
            device = current_worker().device
            one = ccl.all_reduce(torch.ones(4, device=device))
            half = ccl.reduce_scatter(torch.ones(n, device=device, dtype=torch.bfloat16))
            parts = ccl.all_to_all(torch.full((n,), float(rank()), device=device))
            return [float(one.sum()), float(half.sum()), float(parts.sum()), total()]

        triangle = n * (n + 1) / 2
        want = [[4.0 * n, float(n), triangle - n, triangle]] * n
        assert sess.call_packed(sums).debug_get_from_all() == want
        assert sess.interrupt() == []
        assert sess.call_packed(sums).debug_get_from_all() == want
