"""The session's collectives and Disco's worker functions, with Disco's meaning."""

from typing import Any

import numpy as np
import pytest
import torch

from discolab import ccl
from discolab.engines import ThreadedSession
from discolab.runtime import ArgumentError, DRef, WorkerError, current_worker

pytestmark = pytest.mark.any_engine


def fill(*shape: int) -> torch.Tensor:
    """Different numbers on every worker."""
    count = int(np.prod(shape))
    return torch.arange(count, dtype=torch.float32).reshape(shape) + 100 * current_worker().rank


def values(ref: DRef) -> list[Any]:
    return ref.debug_get_from_all()


def inputs(sess: ThreadedSession, *shape: int) -> tuple[DRef, list[torch.Tensor]]:
    ref = sess.call_packed(fill, *shape)
    return ref, values(ref)


def members(sess: ThreadedSession, rank: int, in_group: bool) -> range:
    size = sess.num_workers // sess.num_groups if in_group else sess.num_workers
    first = rank // size * size
    return range(first, first + size)


def test_the_kind_of_a_reduction_as_disco_sends_it(start: Any) -> None:
    with start(2) as sess:
        src, given = inputs(sess, 3)
        reduce = sess.get_global_func("runtime.disco.allreduce")
        for kind, want in (([3], given[1]), ((0,), given[0] + given[1]), (2, given[0])):
            dst = sess.empty((3,), "float32")
            reduce(src, kind, True, dst).debug_get_from_all()
            assert all(torch.equal(got, want) for got in values(dst))
        for wrong in ([5], (0, 1), []):
            with pytest.raises(WorkerError, match=r"kind .*; it is 0-4 for sum"):
                reduce(src, wrong, True, dst).debug_get_from_all()


@pytest.mark.parametrize("in_group", [True, False])
@pytest.mark.parametrize(("workers", "groups"), [(1, 1), (4, 2), (4, 1), (3, 3)])
def test_against_numpy(start: Any, workers: int, groups: int, in_group: bool) -> None:
    with start(workers, groups) as sess:
        sess.init_ccl("auto")
        src, given = inputs(sess, 2, 3)
        n = len(members(sess, 0, in_group))
        kinds = {
            "sum": lambda s: s.sum(0),
            "prod": lambda s: s.prod(0),
            "min": lambda s: s.amin(0),
            "max": lambda s: s.amax(0),
            "avg": lambda s: s.mean(0),
        }
        for op, reference in kinds.items():
            dst = sess.allreduce(src, sess.empty((2, 3), "float32"), op, in_group)
            for rank, got in enumerate(values(dst)):
                stack = torch.stack([given[i] for i in members(sess, rank, in_group)])
                assert torch.allclose(got, reference(stack)), op
        dst = sess.allgather(src, sess.empty((n, 2, 3), "float32"), in_group)
        for rank, got in enumerate(values(dst)):
            want = torch.stack([given[i] for i in members(sess, rank, in_group)])
            assert torch.equal(got, want)
        dst = sess.broadcast_from_worker0(src, sess.empty((3, 2), "float32"), in_group)
        for rank, got in enumerate(values(dst)):
            root = members(sess, rank, in_group)[0]
            assert torch.equal(got, given[root].reshape(3, 2))
        gathered = sess.empty((n, 6), "float32", worker0_only=True, in_group=in_group)
        for rank, got in enumerate(values(sess.gather_to_worker0(src, gathered, in_group))):
            ranks = members(sess, rank, in_group)
            if rank == ranks[0]:
                assert torch.equal(got, torch.stack([given[i].flatten() for i in ranks]))
            else:
                assert got is None


@pytest.mark.parametrize("in_group", [True, False])
def test_scatter_from_worker0(start: Any, in_group: bool) -> None:
    def on_root(only: int) -> torch.Tensor | None:
        return fill(12) if current_worker().rank % only == 0 else None

    with start(4, 2) as sess:
        n = 2 if in_group else 4
        src = sess.call_packed(on_root, n)
        dst = sess.scatter_from_worker0(src, sess.empty((12 // n, 1), "float32"), in_group)
        for rank, got in enumerate(values(dst)):
            root, place = rank // n * n, rank % n
            want = torch.arange(12.0).reshape(n, -1)[place] + 100 * root
            assert torch.equal(got.flatten(), want)


def test_broadcast_and_scatter_of_host_arrays(start: Any) -> None:
    with start(4, 2) as sess:
        array = np.arange(8, dtype=np.float32).reshape(2, 4)
        for got in values(sess.broadcast(array)):
            assert np.array_equal(got.numpy(), array)
        for rank, got in enumerate(values(sess.scatter(array))):
            assert np.array_equal(got.numpy(), array[rank % 2])
        whole = np.arange(4, dtype=np.int64)
        assert [int(v) for v in values(sess.scatter(whole, in_group=False))] == [0, 1, 2, 3]


def test_strided_and_in_place(start: Any) -> None:
    with start(2) as sess:
        src, given = inputs(sess, 3, 4)
        turned = sess.call_packed(lambda: torch.zeros(4, 3).t())
        sess.allreduce(src, turned)
        for got in values(turned):
            assert torch.equal(got, given[0] + given[1])
        sess.allreduce(src, src)
        assert torch.equal(values(src)[1], given[0] + given[1])


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("allreduce", (5,), ["recv is float32[5]", "float32[6]", "as many elements as send"]),
        ("allgather", (6,), ["recv is float32[6]", "float32[12]"]),
        ("broadcast_from_worker0", (7,), ["recv is float32[7]"]),
        ("scatter_from_worker0", (6,), ["recv is float32[6]", "float32[3]"]),
        ("gather_to_worker0", (13,), ["recv is float32[13]", "float32[12]"]),
    ],
)
def test_wrong_sizes_are_told_by_sync_all(
    start: Any, name: str, shape: tuple[int, ...], words: list[str]
) -> None:
    with start(2) as sess:
        src, given = inputs(sess, 6)
        getattr(sess, name)(src, sess.empty(shape, "float32"))
        with pytest.raises(WorkerError) as caught:
            sess.sync_all()
        first = caught.value.failures[0]
        assert first.type_name == "ArgumentError"
        assert first.rank == 0
        for word in [name, *words]:
            assert word in first.message
        dst = sess.allreduce(src, sess.empty((6,), "float32"))
        assert torch.equal(values(dst)[0], given[0] + given[1])


def test_a_poisoned_source(start: Any) -> None:
    def bad() -> torch.Tensor:
        if current_worker().rank == 1:
            raise ValueError("boom")
        return torch.ones(3)

    with start(3) as sess:
        dst = sess.empty((3,), "float32")
        sess.allreduce(sess.call_packed(bad), dst)
        with pytest.raises(WorkerError, match="boom") as caught:
            sess.sync_all()
        kinds = {f.rank: f.type_name for f in caught.value.failures}
        assert kinds == {0: "CollectiveAborted", 1: "ValueError", 2: "CollectiveAborted"}
        assert caught.value.failures[0].rank == 1
        assert "worker 1: failed: ValueError: boom" in caught.value.failures[1].message


def test_dtype_must_be_the_same(start: Any) -> None:
    with start(2) as sess:
        src, _ = inputs(sess, 6)
        sess.allreduce(src, sess.empty((6,), "float64"))
        with pytest.raises(WorkerError, match=r"recv is float64\[6\]"):
            sess.sync_all()


@pytest.mark.one_process
def test_init_ccl(start: Any) -> None:
    with start(2) as sess:
        sess.init_ccl("local")
        assert values(sess.call_packed(ccl.backend_name)) == ["local", "local"]
        for name, words in (
            ("nccl", "use 'local'"),
            ("mpi", "use 'local'"),
            ("mine", "there are 'local', 'gloo'"),
        ):
            with pytest.raises(ArgumentError, match=words):
                sess.init_ccl(name)
        if not torch.cuda.is_available():
            with pytest.raises(ArgumentError, match="torch sees 0 GPUs"):
                sess.init_ccl("auto", 0, 1)
        sess.call_packed(sess.get_global_func("runtime.disco.sync_worker")).debug_get_from_all()


def test_point_to_point_under_discos_names(start: Any) -> None:
    with start(4, 2) as sess:
        send = sess.get_global_func("runtime.disco.send_to_next_group")
        recv = sess.get_global_func("runtime.disco.recv_from_prev_group")
        src, given = inputs(sess, 2, 3)
        dst = sess.empty((6,), "float32")
        sent, received = sess.call_packed(send, src), sess.call_packed(recv, dst)
        assert sent.debug_get_from_remote(0) is None
        for rank in (2, 3):
            assert received.debug_get_from_remote(rank) is None
            assert torch.equal(values(dst)[rank], given[rank - 2].flatten())
        for ref, rank, words in ((sent, 2, "last group"), (received, 1, "first group")):
            with pytest.raises(WorkerError, match=words):
                ref.debug_get_from_remote(rank)
        to = sess.call_packed(sess.get_global_func("runtime.disco.send_to_worker"), src, 0)
        with pytest.raises(WorkerError, match="this worker itself"):
            to.debug_get_from_remote(0)
        again = sess.empty((6,), "float32")

        def receive(buffer: torch.Tensor) -> None:
            from discolab.runtime.functions import find_func

            if current_worker().rank == 0:
                for sender in (1, 2, 3):
                    find_func("runtime.disco.recv_from_worker")(buffer, sender)
                    assert float(buffer[0]) == 100.0 * sender

        sess.call_packed(receive, again).debug_get_from_all()
        from_0 = sess.get_global_func("runtime.disco.recv_from_worker0")
        with pytest.raises(WorkerError, match="this worker itself"):
            sess.call_packed(from_0, again).debug_get_from_remote(0)
        sess.sync_all()  # what failed was raised, if on one of its workers only
