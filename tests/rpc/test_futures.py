"""Futures: what can be done with an answer that is still to come."""

import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import DiscoError, Session, WaitTimeoutError, WorkerError
from discolab import rpc as module
from tests.rpc import functions
from tests.rpc.conftest import Caller, counts
from tests.rpc.functions import eventually

WAIT = 30


def answers(rpc: Any) -> None:
    future = rpc.rpc_async(2, functions.add, (1, 2))
    assert isinstance(future, torch.futures.Future)
    assert isinstance(future, module.Future)
    assert future.wait() == 3
    assert future.done()
    assert future.value() == 3
    assert future.wait(0.001) == 3, "as often as one likes"


def test_a_future_is_one_of_torchs(caller: Caller) -> None:
    caller(answers)


def waits(rpc: Any, file: str) -> None:
    future = rpc.rpc_async(2, functions.await_file, (file,))
    assert not future.done()
    for seconds in (0.01, 0.05):
        with pytest.raises(WaitTimeoutError):
            future.wait(seconds)
    with pytest.raises(TimeoutError):
        future.wait(timeout=0.01)
    assert not future.done(), "a wait that gives up does not end the call"
    functions.touch(file)
    assert future.wait(WAIT) is True


def test_a_wait_gives_up_and_the_call_goes_on(caller: Caller, tmp_path: Path) -> None:
    caller(waits, str(tmp_path / "go"))


def chains(rpc: Any) -> None:
    first = rpc.rpc_async(2, functions.add, (1, 2))
    second = first.then(lambda done: done.wait() * 2)
    third = second.then(lambda done: done.value() + 1)
    assert third.wait() == 7
    assert second.wait() == 6
    assert rpc.rpc_async(2, functions.same, (5,)).then(lambda done: done).wait().wait() == 5
    failed = first.then(lambda done: done.value() / 0)
    with pytest.raises(Exception, match=r"ZeroDivisionError|division by zero"):
        failed.wait()
    everything = torch.futures.collect_all([rpc.rpc_async(2, functions.double, (n,)) for n in "ab"])
    assert [done.value() for done in everything.wait()] == ["aa", "bb"]
    assert torch.futures.wait_all([rpc.rpc_async(2, functions.double, (n,)) for n in (1, 2)]) == [
        2,
        4,
    ]


def test_then_and_what_torch_has_for_futures(caller: Caller) -> None:
    caller(chains)


def calls_back(rpc: Any, file: str) -> None:
    seen: list[Any] = []
    future = rpc.rpc_async(2, functions.await_file, (file,))
    future.add_done_callback(lambda done: seen.append(("before", done.value())))
    future.add_done_callback(lambda done: 1 / 0)
    future.add_done_callback(lambda done: seen.append(("after", done.value())))
    assert seen == []
    functions.touch(file)
    future.wait()
    eventually(lambda: len(seen) == 2)
    future.add_done_callback(lambda done: seen.append(("late", done.value())))
    eventually(lambda: len(seen) == 3)
    assert seen == [("before", True), ("after", True), ("late", True)]


def test_callbacks_are_called_once_each(caller: Caller, tmp_path: Path) -> None:
    caller(calls_back, str(tmp_path / "go"))


def callback_calls(rpc: Any, file: str) -> None:
    """A callback may itself call and wait: it does not stop the answers."""
    found: list[int] = []
    future = rpc.rpc_async(2, functions.await_file, (file,))
    future.add_done_callback(lambda done: found.append(rpc.rpc_sync(3, functions.add, (1, 2))))
    functions.touch(file)
    future.wait()
    eventually(lambda: found == [3])
    chained = rpc.rpc_async(2, functions.add, (1, 1)).then(
        lambda done: rpc.rpc_sync(2, functions.add, (done.value(), 3))
    )
    assert chained.wait(WAIT) == 5


def test_a_callback_may_call(caller: Caller, tmp_path: Path) -> None:
    caller(callback_calls, str(tmp_path / "go"))


def fails(rpc: Any) -> None:
    future = rpc.rpc_async(2, functions.fail, ("value",))
    for _ in range(2):
        with pytest.raises(ValueError, match="it is bad") as info:
            future.wait()
        assert isinstance(info.value, WorkerError)
    with pytest.raises(ValueError, match="it is bad"):
        future.value()
    assert future.done()
    with pytest.raises(Exception, match="it is bad"):
        future.then(lambda done: done.value()).wait()
    seen: list[Any] = []
    future.add_done_callback(seen.append)
    eventually(lambda: seen == [future])


def test_an_exception_is_raised_by_each_wait(caller: Caller) -> None:
    caller(fails)


def waits_for_all(rpc: Any, file: str) -> None:
    assert rpc.wait_all([]) == []
    assert rpc.wait_all([rpc.rpc_async(n % 4, functions.double, (n,)) for n in range(30)]) == [
        2 * n for n in range(30)
    ]
    mixed = [
        rpc.rpc_async(1, functions.add, (1,)),
        rpc.rpc_async(2, functions.fail, ("key",)),
        rpc.rpc_async(3, functions.fail, ("value",)),
    ]
    with pytest.raises((KeyError, ValueError)):
        rpc.wait_all(mixed)
    slow = [rpc.rpc_async(1, functions.add, (1,)), rpc.rpc_async(2, functions.await_file, (file,))]
    begin = time.monotonic()
    with pytest.raises(WaitTimeoutError):
        rpc.wait_all(slow, timeout=0.05)
    assert time.monotonic() - begin < 10
    functions.touch(file)
    assert rpc.wait_all(slow, timeout=WAIT) == [11, True]


def test_wait_all(caller: Caller, tmp_path: Path) -> None:
    caller(waits_for_all, str(tmp_path / "go"))


def stops_at_an_error(rpc: Any, file: str) -> None:
    """Also if a callee never returns: for whom nobody waits then."""
    for wait in (rpc.wait_all, torch.futures.wait_all):
        endless = rpc.rpc_async(2, functions.await_file, (file,), timeout=0)
        begin = time.monotonic()
        with pytest.raises(ValueError, match="it is bad") as info:
            wait([endless, rpc.rpc_async(3, functions.fail, ("value",)), endless])
        assert isinstance(info.value, WorkerError)
        gathered = torch.futures.collect_all([endless, rpc.rpc_async(3, functions.fail, ("key",))])
        with pytest.raises(KeyError):
            gathered.wait()
        late = module.Future()
        again = torch.futures.collect_all([endless, late])
        late.set_exception(OSError("by hand"))
        with pytest.raises(OSError, match="by hand"):
            again.wait()
        assert time.monotonic() - begin < 10
        assert not endless.done()
    functions.touch(file)
    assert torch.futures.wait_all([endless, module.Future.then(endless, lambda _: 1)]) == [True, 1]
    assert torch.futures.collect_all([]).wait() == []


def test_all_are_waited_for_until_one_fails(caller: Caller, tmp_path: Path) -> None:
    caller(stops_at_an_error, str(tmp_path / "go"))


def test_futures_of_torchs_own_among_them() -> None:
    theirs: Any = torch.futures.Future()
    ours = module.Future()
    both = torch.futures.collect_all([theirs, theirs.then(lambda done: done.value() + 1), ours])
    assert not both.done()
    ours.set_result(3)
    theirs.set_result(1)
    assert [future.value() for future in both.wait()] == [1, 2, 3]
    failing: Any = torch.futures.Future()
    failing.set_exception(KeyError("broken"))
    for wait in (module.wait_all, torch.futures.wait_all):
        with pytest.raises(KeyError, match="broken"):
            wait([module.Future(), failing])


def cancels(rpc: Any, file: str) -> None:
    future = rpc.rpc_async(2, functions.spin, (file,))
    assert functions.await_file(file)
    future.cancel()
    begin = time.monotonic()
    with pytest.raises((DiscoError, CancelledError)):
        future.wait()
    assert time.monotonic() - begin < 10
    assert future.done()
    future.cancel()  # again: nothing happens
    done = rpc.rpc_async(2, functions.add, (1, 2))
    assert done.wait() == 3
    done.cancel()
    assert done.wait() == 3, "what is there stays"


def test_cancel_ends_the_call_there(caller: Caller, sess: Session, tmp_path: Path) -> None:
    """That its thread is free again is looked for after each test, too."""
    caller(cancels, str(tmp_path / "began"))
    eventually(lambda: counts(sess, "calls_running", "calls_waiting", ranks=[2]) == (0, 0))
    assert sess.rpc.rpc_sync(2, functions.my_rank) == 2


def test_a_sleep_is_cancelled_too(sess: Session, tmp_path: Path) -> None:
    file = str(tmp_path / "began")
    future = sess.rpc.rpc_async(2, functions.sleep, (1000, file))
    assert functions.await_file(file)
    future.cancel()
    with pytest.raises((DiscoError, CancelledError)):
        future.wait()
    eventually(lambda: counts(sess, "calls_running", ranks=[2]) == (0,))


def test_futures_that_nobody_waits_for(sess: Session) -> None:
    for n in range(50):
        sess.rpc.rpc_async(n % 4, functions.add, (n,))
        sess.rpc.rpc_async(n % 4, functions.fail, ("value",))
    eventually(lambda: counts(sess, "calls_running", "calls_waiting") == (0, 0))
    sess.sync_all()  # their errors are nobody's else


def test_many_threads_wait_for_one_future(sess: Session, tmp_path: Path) -> None:
    file = str(tmp_path / "go")
    future = sess.rpc.rpc_async(2, functions.await_file, (file,))
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(future.wait(WAIT))) for _ in range(5)]
    for thread in threads:
        thread.start()
    functions.touch(file)
    for thread in threads:
        thread.join(WAIT)
    assert found == [True] * 5


def test_a_future_is_not_sent(sess: Session, engine: str) -> None:
    if engine == "threads":
        pytest.skip("by reference")
    future = sess.rpc.rpc_async(2, functions.add, (1,))
    with pytest.raises(DiscoError, match="Future"):
        sess.rpc.rpc_sync(2, functions.same, (future,))
    with pytest.raises(DiscoError, match="Future"):
        sess.rpc.rpc_sync(2, torch.futures.Future)
    assert future.wait() == 11


# -- functions that answer later -----------------------------------------------------------------


def answers_later(rpc: Any, name: str) -> None:
    waiting = [rpc.rpc_async(2, functions.later, (name,)) for _ in range(3)]
    eventually(lambda: rpc.rpc_sync(2, functions.promised, (name,)) == 3)
    assert not any(future.done() for future in waiting)
    rpc.rpc_sync(2, functions.fulfil, (name, "it"))
    assert rpc.wait_all(waiting) == ["it"] * 3
    failing = rpc.rpc_async(2, functions.later, (name,))
    eventually(lambda: rpc.rpc_sync(2, functions.promised, (name,)) == 1)
    rpc.rpc_sync(2, functions.fulfil, (name, KeyError("broken")))
    with pytest.raises(KeyError, match="broken"):
        failing.wait()


def test_async_execution_answers_when_its_future_is_done(caller: Caller, tag: str) -> None:
    caller(answers_later, tag)


def goes_on_elsewhere(rpc: Any) -> None:
    assert rpc.rpc_sync(2, functions.add_elsewhere, (3, 1, 2, 10)) == 13
    assert rpc.rpc_sync(2, functions.add_elsewhere, (2, 1, 2, 10)) == 13
    assert rpc.rpc_sync(2, functions.add_elsewhere, (-1, 1, 2, 10)) == 13
    with pytest.raises(TypeError):
        rpc.rpc_sync(2, functions.add_elsewhere, (3, 1, "a", 10))
    assert rpc.remote(2, functions.add_elsewhere, (3, 1, 2, 10)).to_here() == 13
    with pytest.raises(ValueError, match="at once"):
        rpc.rpc_sync(2, functions.raises_at_once)
    with pytest.raises(DiscoError, match="Future"):
        rpc.rpc_sync(2, functions.no_future)


def test_async_execution_with_calls_to_others(caller: Caller) -> None:
    caller(goes_on_elsewhere)


def test_what_answers_later_holds_no_thread(sess: Session, tag: str) -> None:
    waiting = [sess.rpc.rpc_async(2, functions.later, (tag,)) for _ in range(200)]
    eventually(lambda: sess.rpc.rpc_sync(2, functions.promised, (tag,)) == 200)
    assert counts(sess, "threads", ranks=[2])[0] < 100
    sess.rpc.rpc_sync(2, functions.fulfil, (tag, "it", 200))
    found = sess.rpc.wait_all(waiting)
    assert sorted(n for _, n in found) == list(range(200))


def test_async_execution_at_its_deadline(sess: Session, tag: str) -> None:
    with pytest.raises(WaitTimeoutError):
        sess.rpc.rpc_sync(2, functions.later, (tag,), timeout=0.2)
    sess.rpc.rpc_sync(2, functions.fulfil, (tag, "nobody is there"))
    assert sess.rpc.rpc_sync(2, functions.my_rank) == 2


def test_async_execution_called_here_is_the_function(sess: Session) -> None:
    with pytest.raises(ValueError, match="at once"):
        functions.raises_at_once()
    assert functions.no_future() == 3
    assert functions.no_future.__name__ == "no_future"
    assert sess.rpc.rpc_sync(-1, functions.add_elsewhere, (1, 1, 2, 3)) == 6
