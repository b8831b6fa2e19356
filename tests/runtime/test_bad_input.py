"""Wrong input is an error on the controller that says what was expected; the session goes on.

What can only be seen on a worker is a `WorkerError`, told by the next wait.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from discolab import (
    ArgumentError,
    DRef,
    ForeignDRefError,
    Pickled,
    SessionClosedError,
    ThreadedSession,
    WorkerError,
    make_session,
)

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


def ring() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize("rank", [2, -1, 10**30, 1.0, "0", None, torch.tensor(0.5), [0]])
@pytest.mark.parametrize(
    "use",
    [
        lambda s, ref, rank: s.sync_worker(rank),
        lambda s, ref, rank: ref.debug_get_from_remote(rank),
        lambda s, ref, rank: ref.debug_copy_from(rank, 1),
        lambda s, ref, rank: s.fetch(ref, [0, rank]),
        lambda s, ref, rank: s.peek(ref, [0, rank]),
    ],
    ids=["sync_worker", "debug_get_from_remote", "debug_copy_from", "fetch", "peek"],
)
def test_worker_ids(pair: ThreadedSession, use: Callable[..., Any], rank: object) -> None:
    ref = pair.call_packed(int, 1)
    with pytest.raises(ArgumentError, match="worker id"):
        use(pair, ref, rank)
    assert ref.debug_get_from_all() == [1, 1]


@pytest.mark.parametrize(
    ("use", "complaint"),
    [
        (lambda s, r: s.call_packed(int, object()), "Pickled"),
        (lambda s, r: s.call_packed(int, key=object()), "Pickled"),
        (lambda s, r: s.call_packed(int, [{"a": object()}]), "Pickled"),
        (lambda s, r: s.call_packed(int, ring()), "does a list hold itself"),
        (lambda s, r: s.call_packed("name"), "get_global_func"),
        (lambda s, r: s.call_packed(3), "needs a function, got a int"),
        (lambda s, r: s.call_packed(None), "needs a function"),
        (lambda s, r: s.get_global_func(3), "a function's name is a string"),
        (lambda s, r: s.empty((2, -1), "float32"), "no negative sizes"),
        (lambda s, r: s.empty("ab", "float32"), "a shape is"),
        (lambda s, r: s.empty(2, "float33"), "unknown dtype 'float33'"),
        (lambda s, r: s.empty(2, "float32", device="gpu"), "'gpu' is not a device"),
        (lambda s, r: s.load_module("math", device="gpu"), "'gpu' is not a device"),
        (lambda s, r: s.copy_to_worker_0([1, 2]), "must be a torch tensor or a numpy array"),
        (lambda s, r: s.copy_to_worker_0(np.array(["a"])), "can't use this numpy array"),
        (lambda s, r: s.copy_to_worker_0(np.ones(2), 3), "a DRef is needed"),
        (lambda s, r: s.copy_from_worker_0([0, 0], r), "must be a torch tensor or a numpy"),
        (lambda s, r: s.copy_from_worker_0(np.ones(2), None), "a DRef is needed"),
        (lambda s, r: s.fetch("r1"), "a DRef is needed"),
        (lambda s, r: r.debug_copy_from(0, object()), "Pickled"),
        (lambda s, r: r.debug_copy_from(0, r), "not a DRef"),
        (
            lambda s, r: r.debug_copy_from(0, s.get_global_func("runtime.disco.device")),
            "not a DRef",
        ),
        (lambda s, r: r.debug_copy_from(0, np.array(["a"])), "can't use this numpy array"),
        (lambda s, r: s["not a name"], "has a Python name"),
        (lambda s, r: s[0], "has a Python name"),
        (lambda s, r: s.push({"not a name": 1}), "has a Python name"),
        (lambda s, r: s.push({"x": object()}), "Pickled"),
        (lambda s, r: list(s), "has a Python name"),
        (lambda s, r: s.load_module("math")[0], "function name"),
        (lambda s, r: s.scatter(torch.ones(3, 2)), "first dimension must be 2"),
        (lambda s, r: s.scatter(torch.tensor(1.0)), "first dimension must be 2"),
        (lambda s, r: s.broadcast([1]), "must be a torch tensor"),
        (lambda s, r: s.allreduce(r, r, op="mean"), "sum, prod, min, max, avg"),
        (lambda s, r: s.allgather(torch.ones(1), r), "a DRef is needed, got a Tensor"),
        (lambda s, r: s.init_ccl("auto", 0), "1 device ids for 2 workers"),
    ],
)
def test_arguments(
    pair: ThreadedSession, use: Callable[[ThreadedSession, DRef], Any], complaint: str
) -> None:
    ref = pair.call_packed(torch.ones, 2)
    with pytest.raises(ArgumentError, match=complaint):
        use(pair, ref)
    pair.sync_all()
    assert ref.debug_get_from_remote(1).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("use", "complaint"),
    [
        (lambda s, r: s.copy_to_worker_0(torch.ones(3), r), r"float32\[3\].*float32\[2\]"),
        (lambda s, r: s.copy_to_worker_0(np.ones(2), r), r"float64\[2\].*float32\[2\]"),
        (lambda s, r: s.copy_from_worker_0(np.ones((2, 1)), r), "dtype and number of elements"),
        (
            lambda s, r: s.copy_from_worker_0(np.ones(2), s.call_packed(int)),
            "holds a int, not a tensor",
        ),
        (lambda s, r: s["nothing"], "no variable named 'nothing'"),
        (lambda s, r: s.call_packed(r), "holds .*, not a function"),
    ],
)
def test_what_only_a_worker_can_see_is_told_by_the_next_sync(
    pair: ThreadedSession, use: Callable[[ThreadedSession, DRef], Any], complaint: str
) -> None:
    ref = pair.call_packed(torch.ones, 2)
    use(pair, ref)
    with pytest.raises(WorkerError, match=complaint):
        pair.sync_all()
    pair.sync_all()
    assert ref.debug_get_from_remote(0).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("args", "options", "complaint"),
    [
        ((0,), {}, "num_workers must be a positive integer"),
        ((-1,), {}, "num_workers must be a positive integer"),
        ((True,), {}, "num_workers must be a positive integer"),
        (("2",), {}, "num_workers must be a positive integer"),
        ((2.0,), {}, "num_workers must be a positive integer"),
        ((None,), {}, "num_workers must be a positive integer"),
        ((2,), {"num_groups": 0}, "num_groups must be a positive integer"),
        ((4,), {"num_groups": 3}, "4 workers can't be split into 3 equal groups"),
        ((2,), {"num_groups": 4}, "can't be split"),
        ((2,), {"devices": "gpu"}, "'gpu' is not a device"),
        ((2,), {"devices": "meta"}, "'cpu' or 'cuda:N'"),
        ((2,), {"devices": ["cpu"]}, "lists 1 devices for 2 workers"),
        ((2,), {"devices": ["cpu", None]}, "None is not a device"),
        ((2,), {"devices": 0}, "or a list of them, got 0"),
        ((2,), {"devices": ["cpu", object()]}, "is not a device"),
        ((2,), {"engine": "carrier pigeons"}, "there is: threads"),
    ],
)
def test_a_session_that_cannot_be(args: Any, options: Any, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        make_session(*args, **options)


@NO_CUDA
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1)])
def test_a_gpu_that_is_not_there(device: object) -> None:
    with pytest.raises(ArgumentError, match="try devices='cpu'"):
        ThreadedSession(1, devices=device)


def test_a_dref_of_another_session_is_refused_wherever_it_is_used(pair: ThreadedSession) -> None:
    with ThreadedSession(2, timeout=20) as other:
        theirs: Any = other.call_packed(torch.ones, 2)
        mine: Any = pair.call_packed(torch.zeros, 2)
        uses: list[Callable[[], Any]] = [
            lambda: pair.call_packed(torch.relu, theirs),
            lambda: pair.call_packed(theirs),
            lambda: pair.call_packed(len, [{"a": theirs}]),
            lambda: mine + theirs,
            lambda: torch.add(mine, theirs),
            lambda: mine.__setitem__(0, theirs),
            lambda: pair.fetch(theirs),
            lambda: pair.copy_to_worker_0(np.ones(2), theirs),
            lambda: pair.copy_from_worker_0(np.ones(2), theirs),
            lambda: pair.push({"x": theirs}),
        ]
        for use in uses:
            with pytest.raises(ForeignDRefError, match="belongs to another session"):
                use()
        assert theirs.debug_get_from_remote(0).tolist() == [1, 1]
    with pytest.raises(ForeignDRefError, match="belongs to a closed session"):
        pair.call_packed(torch.relu, theirs)
    assert mine.debug_get_from_remote(0).tolist() == [0, 0]


def test_a_closed_session_says_so_at_once(pair: ThreadedSession) -> None:
    ref, func = pair.call_packed(torch.ones, 2), pair.get_global_func("runtime.disco.worker_id")
    module = pair.load_module("math")
    pair.shutdown()
    pair.shutdown()
    uses: list[Callable[[], Any]] = [
        lambda: pair.call_packed(int),
        lambda: pair.call_without_result(int),
        lambda: pair.get_global_func("runtime.disco.worker_id"),
        lambda: pair.empty(2, "float32"),
        lambda: pair.copy_to_worker_0(np.ones(2)),
        lambda: pair.copy_from_worker_0(np.ones(2), ref),
        lambda: pair.load_module("math"),
        lambda: pair.init_ccl(),
        lambda: pair["x"],
        pair.sync_all,
        pair.sync_worker_0,
        pair.__enter__,
        lambda: ref + 1,
        lambda: ref.debug_get_from_remote(0),
        lambda: ref.debug_copy_from(0, 1),
        lambda: func(),
        lambda: module["sqrt"],
    ]
    for use in uses:
        with pytest.raises(SessionClosedError, match="make a new one"):
            use()
    assert pair.interrupt() == []
    assert [status.state for status in pair.status()] == ["ended", "ended"]
    assert repr(pair) == f"<{type(pair).__name__}, closed>"


def test_pickled_of_what_cannot_be_copied_is_refused(pair: ThreadedSession) -> None:
    import threading

    with pytest.raises(ArgumentError, match="can't be copied"):
        pair.call_packed(id, Pickled(threading.Lock()))
