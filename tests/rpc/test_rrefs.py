"""References to what others have: whose they are, what can be done by them, where they can go."""

import operator
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import ArgumentError, DiscoError, Session, WaitTimeoutError, WorkerError
from discolab import rpc as module
from tests.rpc import functions
from tests.rpc.conftest import Caller
from tests.rpc.functions import Account, Parcel, eventually


def refers(rpc: Any, me: int) -> None:
    for to in (2, 0, -1, me, "worker3", rpc.get_worker_info(2)):
        ref = rpc.remote(to, operator.add, (1, 2))
        assert isinstance(ref, module.RRef)
        info = rpc.get_worker_info(to)
        assert ref.owner() == info
        assert isinstance(ref.owner(), module.WorkerInfo)
        assert ref.owner_name() == info.name
        assert ref.is_owner() is (info.id == me)
        eventually(ref.confirmed_by_owner)
        for _ in range(2):
            assert ref.to_here() == 3
        assert ref.to_here(timeout=30) == 3
        assert ("controller" if info.id < 0 else f"worker {info.id}") in repr(ref)
        if info.id == me:
            assert ref.local_value() == 3
        else:
            with pytest.raises(DiscoError, match=f"{info.name}|worker {info.id}|controller"):
                ref.local_value()
    assert rpc.remote(2, functions.add, (1,), {"b": 2, "factor": 5}).to_here() == 15
    assert rpc.remote(2, "tests.rpc.double", (4,)).to_here() == 8
    assert rpc.remote(2, lambda: me).to_here() == me
    assert rpc.remote(2, functions.same, (None,)).to_here() is None


@pytest.mark.conformance
def test_owner_and_value(caller: Caller) -> None:
    caller(refers, caller.rank)


def fails(rpc: Any) -> None:
    ref = rpc.remote(2, functions.fail, ("value",))
    for _ in range(2):
        with pytest.raises(ValueError, match="it is bad") as info:
            ref.to_here()
        assert isinstance(info.value, WorkerError)
    with pytest.raises(ValueError, match="it is bad"):
        ref.rpc_sync().bit_length()
    with pytest.raises(ValueError, match="it is bad"):
        rpc.rpc_sync(3, functions.take, (ref,))
    with pytest.raises(ValueError, match="it is bad"):
        rpc.rpc_sync(2, functions.take, (ref,))
    me = rpc.get_worker_info().id
    mine = rpc.remote(me, functions.fail, ("key",))
    with pytest.raises(KeyError):
        mine.to_here()
    with pytest.raises(KeyError):
        mine.local_value()
    with pytest.raises(LookupError):
        rpc.remote(2, "tests.rpc.nosuch").to_here()


def test_a_reference_to_what_failed(caller: Caller) -> None:
    caller(fails)


def waits(rpc: Any, file: str) -> None:
    begin = time.monotonic()
    ref = rpc.remote(2, functions.wait_then_add, (file, 1, 2))
    assert time.monotonic() - begin < 10, "remote returns at once"
    with pytest.raises(WaitTimeoutError):
        ref.to_here(timeout=0.05)
    onward = rpc.rpc_async(3, functions.take, (ref,))
    proxy = ref.rpc_async().bit_length()
    assert not onward.done()
    functions.touch(file)
    assert ref.to_here(30) == 3
    assert onward.wait(30) == 3
    assert proxy.wait(30) == 2


def test_a_value_that_is_still_being_made(caller: Caller, tmp_path: Path) -> None:
    caller(waits, str(tmp_path / "go"))


@pytest.mark.parametrize("takers", [2, 3])
@pytest.mark.parametrize("later", [2, 3])
def test_a_hundred_calls_wait_for_what_a_later_call_gives(
    sess: Session, tag: str, takers: int, later: int
) -> None:
    """They leave room for it, at the value's owner and elsewhere."""
    ref = sess.rpc.remote(2, functions.await_kept, (tag,))
    waiting = [sess.rpc.rpc_async(takers, functions.take, (ref,)) for _ in range(100)]
    eventually(lambda: sess.rpc.debug_info(takers)["calls_running"] >= 64)
    sess.rpc.rpc_sync(later, functions.call_on, (2, functions.keep, tag, 5))
    assert sess.rpc.wait_all(waiting) == [5] * 100
    sess.rpc.rpc_sync(2, functions.drop, (tag,))


def is_confirmed(rpc: Any) -> None:
    for _ in range(30):
        ref = rpc.remote(3, functions.add, (1,))
        assert rpc.rpc_sync(2, functions.is_confirmed, (ref,))
        assert rpc.rpc_sync(3, functions.is_confirmed, (ref,))
        late = rpc.remote(3, functions.sleep, (0.002,))
        assert rpc.rpc_sync(2, functions.call_on, (1, functions.is_confirmed, late))


def test_a_reference_that_was_given_is_confirmed(caller: Caller) -> None:
    caller(is_confirmed)


def owns(rpc: Any, me: int) -> None:
    value = [1, 2]
    ref = rpc.RRef(value)
    assert ref.is_owner()
    assert ref.confirmed_by_owner()
    assert ref.owner() == rpc.get_worker_info()
    assert ref.owner().id == me
    assert ref.local_value() is value
    assert ref.to_here() is value
    assert rpc.rpc_sync(2, functions.take, (ref,)) == [1, 2]
    assert rpc.rpc_sync(2, functions.call_on, (3, functions.take, ref)) == [1, 2]
    assert rpc.rpc_sync(2, functions.facts, (ref,)) == (*_facts(me), me == 2)
    theirs = rpc.rpc_sync(2, functions.own, ("it",))
    assert theirs.owner().id == 2
    assert theirs.to_here() == "it"
    assert rpc.RRef(torch.ones(2)).rpc_sync().sum().item() == 2


def _facts(rank: int) -> tuple[Any, ...]:
    name = "controller" if rank < 0 else f"worker{rank}"
    return rank, name, name


def test_a_reference_to_a_value_here(caller: Caller) -> None:
    caller(owns, caller.rank)


def uses_proxies(rpc: Any) -> None:
    ref = rpc.remote(2, Account, (10,))
    assert ref.rpc_sync().pay(5) == 15
    assert ref.rpc_sync(timeout=30).pay(5, times=2) == 25
    assert ref.rpc_async().pay(1).wait() == 26
    assert ref.remote().pay(4).to_here() == 30
    assert ref.remote(timeout=30).pay(0).owner().id == 2
    assert ref.rpc_sync().who() == (2, 2)
    with pytest.raises(KeyError):
        ref.rpc_sync().fail()
    with pytest.raises(KeyError):
        ref.rpc_async().fail().wait()
    with pytest.raises(KeyError):
        ref.remote().fail().to_here()
    with pytest.raises(AttributeError, match="nosuch"):
        ref.rpc_sync().nosuch()
    numbers = rpc.remote(2, list, ((1, 2, 3),))
    assert numbers.rpc_sync().__len__() == 3
    numbers.rpc_sync().append(4)
    assert numbers.to_here() == [1, 2, 3, 4]
    mine = rpc.RRef(Account(1))
    assert mine.rpc_sync().pay(1) == 2
    assert mine.rpc_async().pay(1).wait() == 3
    assert mine.local_value().money == 3
    slow = rpc.remote(2, Sleeper)
    with pytest.raises(WaitTimeoutError):
        slow.rpc_sync(timeout=0.1).sleep(5)


class Sleeper:
    """Its method takes a while."""

    def sleep(self, seconds: float) -> None:
        functions.sleep(seconds)


def test_methods_by_proxies(caller: Caller) -> None:
    caller(uses_proxies)


def state_stays(rpc: Any) -> None:
    ref = rpc.remote(2, Account, (0,))
    others = [rpc.rpc_async(rank, _pay, (ref, 25)) for rank in (-1, 0, 1, 2, 3)]
    rpc.wait_all(others)
    assert ref.rpc_sync().pay(0) == 125


def _pay(ref: Any, times: int) -> None:
    for _ in range(times):
        ref.rpc_sync().pay(1)


def test_all_who_refer_to_a_value_mean_the_same_one(caller: Caller) -> None:
    caller(state_stays)


def travels(rpc: Any, name: str) -> None:
    for ranks in ([3, 1, 0], [3, 2], [0, -1, 2, 3], [2], [1, 1, 1]):
        ref = rpc.remote(2, functions.counted, (name, 7))
        rpc.rpc_sync(ranks[0], functions.pass_on, (ref, ranks[1:], name))
        del ref
        assert rpc.rpc_sync(ranks[-1], functions.kept_number, (name,)) == 7
        assert rpc.rpc_sync(2, functions.alive, (name,)) == 1
        back = rpc.rpc_sync(ranks[-1], functions.kept, (name,))
        assert back.owner().id == 2
        assert functions.number_of(back) == 7
        rpc.rpc_sync(ranks[-1], functions.drop, (name,))
        assert functions.number_of(back) == 7
        del back
        eventually(lambda: rpc.rpc_sync(2, functions.alive, (name,)) == 0)


@pytest.mark.conformance
def test_passed_on_through_several_workers(caller: Caller, tag: str) -> None:
    caller(travels, tag)


def in_containers(rpc: Any) -> None:
    refs = [rpc.remote(rank, functions.same, (10**rank,)) for rank in range(4)]
    mine = rpc.RRef(10**4)
    assert rpc.rpc_sync(2, functions.sum_of, ({"a": refs, "b": (mine, mine)},)) == 21111
    assert rpc.rpc_sync(3, functions.open_parcel, (Parcel("p", mine, refs),)) == [
        10**4,
        *(1, 10, 100, 1000),
    ]
    assert rpc.rpc_sync(1, functions.open_parcel, kwargs={"parcel": Parcel("p", refs[0])}) == [1]
    parcel = rpc.rpc_sync(3, functions.same, (Parcel("p", refs[2], [refs[3]]),))
    assert functions.open_parcel(parcel) == [100, 1000]
    assert rpc.rpc_sync(1, lambda: refs[3].to_here() + mine.to_here()) == 11000
    found = rpc.rpc_sync(3, functions.make_ref, (2, functions.own, "far"))
    assert found.to_here().to_here() == "far", "a reference to a reference"
    made = rpc.remote(3, functions.make_ref, (2, functions.add, 1)).to_here()
    assert (made.owner().id, made.to_here()) == (2, 11)
    assert rpc.remote(2, functions.open_parcel, (Parcel("p", mine),)).to_here() == [10**4]


def test_inside_of_other_things(caller: Caller) -> None:
    caller(in_containers)


def goes_home(rpc: Any, name: str, me: int) -> None:
    value = [object()]
    functions.keep(name, value)
    ref = rpc.RRef(value)
    try:
        assert functions.is_same(ref, name)
        assert rpc.rpc_sync(me, functions.is_same, (ref, name))
        back = rpc.rpc_sync(2, functions.same, (ref,))
        assert back.is_owner()
        assert back.local_value() is value
        assert rpc.rpc_sync(3, functions.call_on, (me, functions.is_same, ref, name))
        held = rpc.rpc_sync(2, functions.same, (Parcel("p", ref),))
        assert held.ref.local_value() is value
    finally:
        functions.drop(name)
    theirs = rpc.remote(2, _own_list)
    rpc.rpc_sync(2, _keep_local, (name, theirs))
    assert rpc.rpc_sync(2, functions.is_same, (theirs, name))
    assert rpc.rpc_sync(3, functions.call_on, (2, functions.is_same, theirs, name))
    rpc.rpc_sync(2, functions.drop, (name,))


def _own_list() -> list[object]:
    return [object()]


def _keep_local(name: str, ref: Any) -> None:
    functions.keep(name, ref.local_value())


def test_at_home_it_is_the_very_object(caller: Caller, tag: str) -> None:
    caller(goes_home, tag, caller.rank)


def says_where(rpc: Any) -> None:
    ref = rpc.remote(2, functions.add, (1,))
    for rank in (-1, 0, 1, 2, 3):
        found = rpc.rpc_sync(rank, functions.facts, (ref,))
        assert found == (2, "worker2", "worker2", rank == 2)
        said = rpc.rpc_sync(rank, functions.local_value_error, (ref,))
        assert (said == "") is (rank == 2)
        if said:
            assert "to_here" in said, "the message says what to do"


def test_facts_and_local_value_everywhere(caller: Caller) -> None:
    caller(says_where)


def test_futures_and_references_together(sess: Session) -> None:
    ref = sess.rpc.remote(2, torch.full, ((3,), 2.0))
    total = sess.rpc.rpc_async(3, functions.take, (ref,)).then(lambda done: done.value().sum())
    assert total.wait().item() == 6
    many = [sess.rpc.remote(n % 4, functions.double, (n,)) for n in range(200)]
    assert [r.to_here() for r in many] == [2 * n for n in range(200)]


def test_a_reference_is_not_for_other_uses(sess: Session) -> None:
    """Pickled or copied by hand nobody would count it."""
    import copy
    import pickle

    ref = sess.rpc.remote(2, functions.add, (1,))
    with pytest.raises(DiscoError, match="RRef"):
        pickle.dumps(ref)
    assert copy.deepcopy([ref])[0].to_here() == 11, "a copy is the same reference"
    with pytest.raises(ArgumentError):
        ref.to_here(timeout=-2)
    with pytest.raises(ArgumentError):
        ref.to_here(timeout="soon")
    with pytest.raises((AttributeError, TypeError)):
        ref.rpc_sync().__dict__["x"]
    assert ref.to_here() == 11


def test_a_reference_of_another_session(fresh: Any, engine: str) -> None:
    if engine == "threads":
        pytest.skip("by reference")
    one, two = fresh(2), fresh(2)
    ref = one.rpc.remote(1, functions.add, (1,))
    with pytest.raises(DiscoError, match="session"):
        two.rpc.rpc_sync(1, functions.take, (ref,))
    with pytest.raises(DiscoError, match="session"):
        two.rpc.rpc_sync(1, functions.open_parcel, (Parcel("p", ref),))
    assert one.rpc.rpc_sync(0, functions.take, (ref,)) == 11


def test_after_the_session_it_is_said(fresh: Any) -> None:
    sess = fresh(2)
    ref, mine = sess.rpc.remote(1, functions.add, (1,)), sess.rpc.RRef(5)
    assert ref.to_here() == 11
    sess.shutdown()
    with pytest.raises(DiscoError, match="session"):
        ref.to_here()
    with pytest.raises(DiscoError, match="session"):
        ref.rpc_sync().bit_length()
    repr(ref)
    repr(mine)
