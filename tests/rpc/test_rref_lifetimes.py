"""A value lives exactly as long as somebody refers to it."""

import gc
import os
import random
import signal
import time
from typing import Any

import pytest

from discolab import Session
from discolab import rpc as module
from tests.rpc import functions
from tests.rpc.conftest import Caller, counts
from tests.rpc.functions import eventually

EVERYBODY = range(-1, 4)


def gone(rpc: Any, tag: str, owner: int = 2) -> None:
    """Wait until no value of that tag is left; nobody collects garbage for it."""
    eventually(lambda: rpc.rpc_sync(owner, functions.alive, (tag,)) == 0)


def nothing_left(sess: Session) -> None:
    """Wait until nobody owns or refers to anything."""
    eventually(lambda: counts(sess, "values_owned", "references_held") == (0, 0))


def lives(rpc: Any, tag: str, owner: int) -> None:
    ref = rpc.remote(owner, functions.counted, (tag, 5))
    assert ref.rpc_sync().get() == 5
    gc.collect()
    for _ in range(20):
        assert rpc.rpc_sync(owner, functions.alive, (tag,)) == 1
        assert functions.number_of(ref) == 5
    del ref
    gone(rpc, tag, owner)


@pytest.mark.parametrize("owner", [-1, 0, 1, 2])
def test_freed_after_the_last_reference(
    caller: Caller, sess: Session, tag: str, owner: int
) -> None:
    caller(lives, tag, owner)
    nothing_left(sess)


def is_kept_elsewhere(rpc: Any, tag: str) -> None:
    for keeper in (3, 0, -1, 2, 1):
        ref = rpc.remote(2, functions.counted, (tag, keeper))
        rpc.rpc_sync(keeper, functions.keep, (tag, ref))
        del ref
        for _ in range(10):
            assert rpc.rpc_sync(keeper, functions.kept_number, (tag,)) == keeper
        assert rpc.rpc_sync(2, functions.alive, (tag,)) == 1
        rpc.rpc_sync(keeper, functions.drop, (tag,))
        gone(rpc, tag)


def test_kept_by_another_one_only(caller: Caller, sess: Session, tag: str) -> None:
    caller(is_kept_elsewhere, tag)
    nothing_left(sess)


def is_dropped_on_the_way(rpc: Any, tag: str) -> None:
    for number in range(12):
        ref = rpc.remote(2, functions.counted, (tag, number))
        seconds = 0.01 * (number % 3)
        keeping = rpc.rpc_async(3, functions.slow_keep, (seconds, tag, ref))
        del ref
        if number == 5:
            gc.collect()
        keeping.wait()
        del keeping
        assert rpc.rpc_sync(3, functions.kept_number, (tag,)) == number
        rpc.rpc_sync(3, functions.drop, (tag,))
    gone(rpc, tag)


def test_dropped_while_it_is_on_its_way(caller: Caller, sess: Session, tag: str) -> None:
    caller(is_dropped_on_the_way, tag)
    nothing_left(sess)


def runs_ahead(rpc: Any, tag: str) -> None:
    """Passed on before its value is there, each dropping it at once."""
    names = [f"{tag}{number}" for number in range(15)]
    for number, name in enumerate(names):
        ref = rpc.remote(2, functions.counted, (tag, number, 0.01 * (number % 4)))
        ranks = [[3, 0, 1], [2, 1], [0, -1, 3], [3, 2, 3, 2]][number % 4]
        rpc.rpc_async(ranks[0], functions.pass_on_at_once, (ref, ranks[1:], name))
        del ref
    for number, name in enumerate(names):
        last = [1, 1, 3, 2][number % 4]
        eventually(lambda: rpc.rpc_sync(last, _has, (name,)))  # noqa: B023
        assert rpc.rpc_sync(last, functions.kept_number, (name,)) == number
    assert rpc.rpc_sync(2, functions.alive, (tag,)) == len(names)
    for number, name in enumerate(names):
        rpc.rpc_sync([1, 1, 3, 2][number % 4], functions.drop, (name,))
    gone(rpc, tag)


def _has(name: str) -> bool:
    return name in functions.KEPT


def test_passed_on_before_it_is_made(caller: Caller, sess: Session, tag: str) -> None:
    caller(runs_ahead, tag)
    nothing_left(sess)


def comes_back(rpc: Any, tag: str) -> None:
    for to in (2, 3, -1, 0):
        ref = rpc.rpc_sync(to, functions.make_ref, (2, functions.counted, tag))
        assert functions.number_of(ref) == 0
        assert ref.owner().id == 2
        del ref
        gone(rpc, tag)
        ref = rpc.rpc_sync(to, functions.own_counted, (tag,))
        assert ref.owner().id == to
        assert rpc.rpc_sync(3, functions.number_of, (ref,)) == 0
        del ref
        gone(rpc, tag, to)


def test_one_that_comes_as_a_result(caller: Caller, sess: Session, tag: str) -> None:
    caller(comes_back, tag)
    nothing_left(sess)


def is_never_looked_at(rpc: Any, tag: str) -> None:
    for _ in range(20):
        rpc.rpc_async(2, functions.own_counted, (tag,))
        rpc.remote(2, functions.own_counted, (tag,))
        rpc.remote(2, functions.counted, (tag,))
        rpc.remote(2, functions.counted_then_fail, (tag,))
        rpc.rpc_async(3, functions.make_ref, (2, functions.counted, tag))
    # calls to one worker run side by side: wait until each has been made once
    for _ in range(3):
        gone(rpc, tag)
        time.sleep(0.05)


def test_results_that_nobody_looks_at(caller: Caller, sess: Session, tag: str) -> None:
    caller(is_never_looked_at, tag)
    nothing_left(sess)


def thousand(rpc: Any, tag: str) -> None:
    for n in range(1000):
        rpc.remote(n % 4, functions.counted, (tag, n))
    for owner in range(4):
        eventually(lambda: rpc.rpc_sync(owner, functions.alive, (tag,)) == 0)  # noqa: B023


@pytest.mark.conformance
def test_a_thousand_in_a_row_leave_nothing(caller: Caller, sess: Session, tag: str) -> None:
    caller(thousand, tag)
    nothing_left(sess)
    eventually(lambda: counts(sess, "calls_waiting", "calls_running") == (0, 0))


def owns_here(rpc: Any, tag: str) -> None:
    value = functions.Counted(tag)
    ref = rpc.RRef(value)
    del value
    gc.collect()
    assert functions.alive(tag) == 1
    assert ref.local_value().get() == 0
    rpc.rpc_sync(3, functions.keep, (tag, ref))
    del ref
    gc.collect()
    for _ in range(10):
        assert functions.alive(tag) == 1
        assert rpc.rpc_sync(3, functions.kept_number, (tag,)) == 0
    rpc.rpc_sync(3, functions.drop, (tag,))
    eventually(lambda: functions.alive(tag) == 0)
    many = [rpc.RRef(functions.Counted(tag)) for _ in range(50)]
    assert functions.alive(tag) == 50
    del many
    eventually(lambda: functions.alive(tag) == 0)


def test_a_value_of_ones_own(caller: Caller, sess: Session, tag: str) -> None:
    caller(owns_here, tag)
    nothing_left(sess)


def proxies(rpc: Any, tag: str) -> None:
    """What a call by a reference needs lives until it is over."""
    answer = rpc.remote(2, functions.counted, (tag, 3)).rpc_async().get()
    assert answer.wait() == 3
    del answer
    again = rpc.remote(2, functions.counted, (tag, 4)).remote().get()
    assert again.to_here() == 4
    proxy = rpc.remote(2, functions.counted, (tag, 5)).rpc_sync()
    assert [proxy.get() for _ in range(5)] == [5] * 5  # the first of which waits until it is made
    assert rpc.rpc_sync(2, functions.alive, (tag,)) >= 1
    del proxy
    gone(rpc, tag)


def test_calls_by_references_that_are_dropped(caller: Caller, sess: Session, tag: str) -> None:
    caller(proxies, tag)
    nothing_left(sess)


def argument_of_failing(rpc: Any, tag: str) -> None:
    ref = rpc.remote(2, functions.counted, (tag,))
    with pytest.raises(TypeError):
        rpc.rpc_sync(3, functions.add, (ref, "a"))
    with pytest.raises(LookupError):
        rpc.rpc_sync(3, "tests.rpc.nosuch", (ref,))
    assert functions.number_of(ref) == 0
    del ref
    gone(rpc, tag)


def test_arguments_of_calls_that_fail_are_let_go(caller: Caller, sess: Session, tag: str) -> None:
    caller(argument_of_failing, tag)
    nothing_left(sess)


def in_a_message_that_is_not_sent(rpc: Any, tag: str) -> None:
    import threading

    ref = rpc.remote(2, functions.counted, (tag,))
    for _ in range(3):
        try:
            rpc.rpc_sync(3, functions.same, ([ref, threading.Lock()],))
        except Exception:
            pass  # by reference it works
    assert functions.number_of(ref) == 0
    del ref
    gone(rpc, tag)


def test_a_message_that_can_not_be_sent_keeps_nothing(
    caller: Caller, sess: Session, tag: str
) -> None:
    caller(in_a_message_that_is_not_sent, tag)
    nothing_left(sess)


def test_streams_of_references(sess: Session, tag: str) -> None:
    total = 0
    for ref in sess.rpc.stream(3, _references, (10, tag)):
        total += functions.number_of(ref)
    assert total == 45
    del ref
    gone(sess.rpc, tag)
    items = sess.rpc.stream(3, _references, (10, tag))
    next(items)
    items.close()
    del items
    gone(sess.rpc, tag)
    nothing_left(sess)


def _references(count: int, tag: str) -> Any:
    for n in range(count):
        yield module.remote(2, functions.counted, (tag, n))


def test_a_crowd_that_forwards_forks_and_drops(sess: Session, tag: str) -> None:
    """Never freed early, always in the end; which way each one goes is drawn by chance."""
    draw = random.Random(8)
    refs = [sess.rpc.remote(owner, functions.counted, (tag, owner)) for owner in range(4)]
    waiting = []
    for number in range(120):
        ref = draw.choice(refs)
        ranks = [draw.choice(EVERYBODY) for _ in range(draw.randrange(1, 5))]
        waiting.append(
            sess.rpc.rpc_async(ranks[0], functions.pass_on, (ref, ranks[1:], f"{tag}{number % 7}"))
        )
        del ref
    sess.rpc.wait_all(waiting, timeout=60)
    del waiting
    for ref, owner in zip(refs, range(4), strict=True):
        assert functions.number_of(ref) == owner
    del ref, refs
    for rank in EVERYBODY:
        assert sess.rpc.rpc_sync(rank, _ask_kept, (tag,)) >= 0
    for rank in EVERYBODY:
        sess.rpc.rpc_sync(rank, _drop_kept, (tag,))
    for owner in range(4):
        gone(sess.rpc, tag, owner)
    nothing_left(sess)


def _ask_kept(tag: str) -> int:
    """Whatever is referred to is still there."""
    return sum(
        functions.number_of(ref)
        for name, ref in tuple(functions.KEPT.items())
        if name.startswith(tag)
    )


def _drop_kept(tag: str) -> None:
    for name in [name for name in functions.KEPT if name.startswith(tag)]:
        functions.drop(name)


# -- deaths --------------------------------------------------------------------------------------


def test_a_user_that_dies_lets_go(fresh: Any, engine: str, tag: str) -> None:
    if engine == "threads":
        pytest.skip("workers are threads of this process")
    sess = fresh(4)
    ref = sess.rpc.remote(1, functions.counted, (tag, 5))
    other = sess.rpc.remote(1, functions.counted, (f"{tag}other", 6))
    eventually(lambda: sess.rpc.rpc_sync(1, functions.alive, (tag,)) == 1)  # it has been made
    for name, given in (("a", ref), ("b", other)):
        sess.rpc.rpc_sync(2, functions.keep, (f"{tag}{name}", given))
        sess.rpc.rpc_sync(3, functions.keep, (f"{tag}{name}", given))
    sess.rpc.rpc_sync(3, functions.drop, (f"{tag}a",))
    del ref, other, given
    pid = sess.rpc.rpc_sync(2, functions.pid)
    assert sess.rpc.rpc_sync(1, functions.alive, (tag,)) == 1
    os.kill(pid, signal.SIGKILL)
    gone(sess.rpc, tag, 1)
    assert sess.rpc.rpc_sync(3, functions.kept_number, (f"{tag}b",)) == 6, "of worker 3's own"
    sess.rpc.rpc_sync(3, functions.drop, (f"{tag}b",))
    gone(sess.rpc, f"{tag}other", 1)


def test_one_that_was_being_passed_on_by_who_dies(fresh: Any, engine: str, tag: str) -> None:
    if engine == "threads":
        pytest.skip("workers are threads of this process")
    sess = fresh(4)
    ref = sess.rpc.remote(1, functions.counted, (tag, 5))
    for number in range(10):
        sess.rpc.rpc_async(2, functions.pass_on_at_once, (ref, [3], f"{tag}{number}"))
    pid = sess.rpc.rpc_sync(2, functions.pid)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ConnectionError):
        sess.rpc.rpc_sync(2, functions.my_rank)
    assert functions.number_of(ref) == 5
    del ref

    def is_gone() -> bool:
        sess.rpc.rpc_sync(3, _drop_kept, (tag,))  # what may still be on its way, too
        return bool(sess.rpc.rpc_sync(1, functions.alive, (tag,)) == 0)

    eventually(is_gone)


def test_the_owner_dies(fresh: Any, engine: str, tag: str) -> None:
    if engine == "threads":
        pytest.skip("workers are threads of this process")
    sess = fresh(4)
    ref = sess.rpc.remote(2, functions.counted, (tag, 5))
    waiting = sess.rpc.remote(2, functions.sleep, (1000,))
    assert ref.rpc_sync().get() == 5
    sess.rpc.rpc_sync(3, functions.keep, (tag, ref))
    os.kill(sess.rpc.rpc_sync(2, functions.pid), signal.SIGKILL)
    begin = time.monotonic()
    for what in (ref, waiting):
        with pytest.raises(ConnectionError) as info:
            what.to_here()
        assert isinstance(info.value, module.WorkerLostError)
        assert "2" in str(info.value)
    with pytest.raises(ConnectionError):
        ref.rpc_sync().get()
    with pytest.raises(ConnectionError):
        sess.rpc.rpc_sync(3, functions.kept_number, (tag,))
    assert time.monotonic() - begin < 15
    sess.rpc.rpc_sync(3, functions.drop, (tag,))
    del ref, waiting, what
    assert sess.rpc.rpc_sync(1, functions.add, (1, 2)) == 3
