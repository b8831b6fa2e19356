"""A DRef restricted to one worker is an RRef; RRefs, one a worker, are a DRef."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from discolab import ArgumentError, DiscoError, ForeignDRefError, Session, WorkerError
from tests.rpc import functions
from tests.rpc.conftest import counts
from tests.rpc.functions import eventually


def nothing_left(sess: Session) -> None:
    eventually(lambda: counts(sess, "values_owned", "references_held") == (0, 0))


def test_what_one_worker_holds(sess: Session) -> None:
    dref = sess.call_packed(functions.rank_times, 10)
    for rank in range(4):
        ref = sess.rpc.rref(dref, rank)
        assert ref.owner().id == rank
        assert ref.to_here() == 10 * (rank + 1)
        assert sess.rpc.rpc_sync(3, functions.take, (ref,)) == 10 * (rank + 1)
        assert not ref.is_owner()
        assert ref.rpc_sync().bit_length() == (10 * (rank + 1)).bit_length()
    del ref
    nothing_left(sess)


def test_it_is_the_value_and_no_copy(sess: Session) -> None:
    dref = sess.call_packed(list)
    ref = sess.rpc.rref(dref, 2)
    ref.rpc_sync().append(7)
    assert dref.debug_get_from_all() == [[], [], [7], []]
    sess.call_packed(list.append, dref, 8).debug_get_from_all()
    assert ref.to_here() == [7, 8]


def test_of_a_value_that_is_still_being_computed(sess: Session, tmp_path: Path) -> None:
    file = str(tmp_path / "go")
    dref = sess.call_packed(functions.wait_then_add, file, 1, 2)
    ref = sess.rpc.rref(dref, 1)
    with pytest.raises(TimeoutError):
        ref.to_here(timeout=0.05)
    onward = sess.rpc.rpc_async(3, functions.take, (ref,))
    functions.touch(file)
    assert ref.to_here(30) == 3
    assert onward.wait(30) == 3


def test_of_a_poisoned_register(sess: Session) -> None:
    dref = sess.call_packed(functions.fail, "value")
    ref = sess.rpc.rref(dref, 1)
    with pytest.raises(WorkerError, match="it is bad"):
        ref.to_here()
    with pytest.raises(WorkerError, match="it is bad"):
        sess.rpc.rpc_sync(3, functions.take, (ref,))
    with pytest.raises(WorkerError):
        sess.sync_all()
    assert sess.rpc.rpc_sync(1, functions.my_rank) == 1


def test_what_makes_no_sense(sess: Session, fresh: Any) -> None:
    dref = sess.call_packed(int)
    for rank in (4, -1, 1.5, None, "worker9"):
        with pytest.raises(ArgumentError):
            sess.rpc.rref(dref, rank)
    for nothing in (3, None, sess):
        with pytest.raises(ArgumentError, match="DRef"):
            sess.rpc.rref(nothing, 1)
    refs = [sess.rpc.remote(rank, int) for rank in range(4)]
    for wrong in (refs[:3], [*refs, refs[0]], [], [*refs[:3], 5], 5, refs[0]):
        with pytest.raises(ArgumentError):
            sess.rpc.dref(wrong)


def test_of_another_session(fresh: Any) -> None:
    one, two = fresh(2), fresh(2)
    dref = one.call_packed(int)
    with pytest.raises(ForeignDRefError):
        two.rpc.rref(dref, 1)
    with pytest.raises(DiscoError):
        two.rpc.dref([one.rpc.remote(rank, int) for rank in range(2)])


def test_the_dref_may_go_first(sess: Session, tag: str) -> None:
    dref = sess.call_packed(functions.counted, tag)
    ref = sess.rpc.rref(dref, 2)
    sess.sync_all()
    del dref
    sess.sync_all()
    count = sess.call_packed(functions.alive, tag).debug_get_from_remote(2)
    assert count == 1, "of worker 2 alone, on threads all share one count"
    assert functions.number_of(ref) == 0
    del ref
    eventually(lambda: sess.rpc.rpc_sync(2, functions.alive, (tag,)) == 0)
    nothing_left(sess)


def test_the_rref_may_go_first(sess: Session, tag: str) -> None:
    dref = sess.call_packed(functions.counted, tag, 4)
    ref = sess.rpc.rref(dref, 2)
    assert functions.number_of(ref) == 4
    del ref
    nothing_left(sess)
    assert sess.call_packed(functions.Counted.get, dref).debug_get_from_all() == [4] * 4
    del dref
    sess.sync_all()
    eventually(lambda: sess.rpc.rpc_sync(2, functions.alive, (tag,)) == 0)


def test_many_at_home_to_one(sess: Session) -> None:
    refs = [sess.rpc.remote(rank, torch.full, ((2,), float(rank))) for rank in range(4)]
    dref = sess.rpc.dref(refs, placements=[Shard(0)])
    assert dref.placements == [Shard(0)] or tuple(dref.placements) == (Shard(0),)
    doubled = dref * 2
    assert [v.tolist() for v in doubled.debug_get_from_all()] == [[2.0 * r] * 2 for r in range(4)]
    del refs
    assert dref.debug_get_from_remote(3).tolist() == [3, 3]
    del dref, doubled
    sess.sync_all()
    nothing_left(sess)


def test_at_home_the_value_is_no_copy(sess: Session) -> None:
    refs = [sess.rpc.remote(rank, list) for rank in range(4)]
    dref = sess.rpc.dref(refs)
    sess.call_packed(list.append, dref, 5)
    sess.sync_all()
    assert [ref.to_here() for ref in refs] == [[5]] * 4


def test_many_from_elsewhere_to_one(sess: Session) -> None:
    """Rref i's value is in worker i's register, wherever it was."""
    refs = [sess.rpc.remote((rank + 1) % 4, functions.same, (10 * rank,)) for rank in range(3)]
    refs.append(sess.rpc.RRef(30))
    dref = sess.rpc.dref(refs)
    assert dref.debug_get_from_all() == [0, 10, 20, 30]
    one = sess.rpc.remote(2, functions.make_tensor, (3, 4))
    same = sess.rpc.dref([one] * 4, placements=[Replicate()])
    for value in same.debug_get_from_all():
        assert torch.equal(value, functions.make_tensor(3, 4))


def test_of_values_that_are_not_there_yet(sess: Session, tmp_path: Path) -> None:
    file = str(tmp_path / "go")
    refs = [sess.rpc.remote(rank, functions.wait_then_add, (file, 1, rank)) for rank in range(4)]
    dref = sess.rpc.dref(refs)
    after = dref + 1
    functions.touch(file)
    assert after.debug_get_from_all() == [2, 3, 4, 5]


def test_of_one_that_failed(sess: Session) -> None:
    refs = [sess.rpc.remote(rank, functions.same, (rank,)) for rank in range(3)]
    dref = sess.rpc.dref([*refs, sess.rpc.remote(3, functions.fail, ("value",))])
    assert dref.debug_get_from_remote(1) == 1
    with pytest.raises(WorkerError, match="it is bad"):
        dref.debug_get_from_remote(3)
    with pytest.raises(WorkerError, match="it is bad"):
        (dref + 1).debug_get_from_all()


def test_there_and_back(sess: Session) -> None:
    dref = sess.call_packed(functions.rank_times, 3)
    for _ in range(20):
        dref = sess.rpc.dref([sess.rpc.rref(dref, rank) for rank in range(4)])
    assert dref.debug_get_from_all() == [3, 6, 9, 12]
    turned = sess.rpc.dref([sess.rpc.rref(dref, 3 - rank) for rank in range(4)])
    assert turned.debug_get_from_all() == [12, 9, 6, 3]
    del dref, turned
    sess.sync_all()
    nothing_left(sess)
