"""Calls that go wrong: always the right error, never a hang, and nothing is left of them."""

import copy
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import (
    DiscoError,
    ProcessSession,
    Session,
    SessionClosedError,
    WaitTimeoutError,
    WorkerError,
    ccl,
    current_worker,
)
from discolab import rpc as module
from discolab.rpc import WorkerLostError, context
from tests.rpc import functions
from tests.rpc.conftest import Caller, counts
from tests.rpc.functions import eventually


def idle(sess: Session, *ranks: int) -> None:
    """Wait until no call runs or waits."""
    everybody = ranks or range(sess.num_workers)
    eventually(lambda: counts(sess, "calls_running", "calls_waiting", ranks=everybody) == (0, 0))


def works(sess: Session) -> None:
    """Everybody answers everybody, and the workers do commands in step."""
    for rank in range(-1, sess.num_workers):
        to = (rank + 1) % sess.num_workers
        assert sess.rpc.rpc_sync(rank, functions.call_on, (to, functions.my_rank)) == to
    ranks = sess.call_packed(functions.my_rank).debug_get_from_all()
    assert ranks == list(range(sess.num_workers))


# -- a callee that raises ------------------------------------------------------------------------


def raises(rpc: Any) -> None:
    for to in (2, 0, rpc.get_worker_info().id, -1):
        for kind, error, text in (
            ("value", ValueError, "it is bad"),
            ("key", KeyError, "name"),
            ("odd", functions.OddError, "7: odd"),
            ("group", ExceptionGroup, "both"),
            ("lock", RuntimeError, "it holds a lock"),
            ("local", ValueError, "it is local"),
            ("mean", WorkerError, "MeanError"),
            ("stop", WorkerError, "StopIteration"),
        ):
            with pytest.raises(WorkerError, match=text) as info:
                rpc.rpc_sync(to, functions.fail, (kind,))
            if error is not ExceptionGroup:  # has a layout of its own
                assert isinstance(info.value, error), (to, kind, type(info.value).__mro__)
            shown = "".join(traceback.format_exception(info.value))
            assert "functions.py" in shown, shown
            assert "in fail" in shown, "the callee's traceback is shown"
            assert ("controller" if to < 0 else f"worker {to}") in shown


@pytest.mark.conformance
def test_an_exception_keeps_its_type_and_shows_its_traceback(caller: Caller) -> None:
    caller(raises)


def raises_with_facts(rpc: Any) -> None:
    with pytest.raises(functions.OddError) as info:
        rpc.rpc_sync(2, functions.fail, ("odd",))
    assert info.value.code == 7, "attributes of the exception come along"
    with pytest.raises(LookupError) as info2:
        rpc.rpc_sync(2, functions.fail_from)
    shown = "".join(traceback.format_exception(info2.value))
    assert "because of it" in shown
    assert "it is bad" in shown, "what led to it is shown too"


def test_what_an_exception_holds_comes_too(caller: Caller) -> None:
    caller(raises_with_facts)


def raises_far_away(rpc: Any) -> None:
    with pytest.raises(KeyError) as info:
        rpc.rpc_sync(2, functions.call_on, (3, functions.fails_on, 0, "key"))
    shown = "".join(traceback.format_exception(info.value))
    assert "in fail" in shown
    with pytest.raises(ValueError, match="it is bad"):
        rpc.rpc_sync(2, functions.call_on, (3, functions.fails_on, 2, "value"))


def test_an_exception_goes_through_several_calls(caller: Caller) -> None:
    caller(raises_far_away)


def shows(rpc: Any) -> None:
    for give in (
        lambda: rpc.rpc_sync(2, functions.fail_with_code),
        lambda: rpc.rpc_async(2, functions.fail_with_code).wait(),
        lambda: rpc.remote(2, functions.fail_with_code).to_here(),
        lambda: rpc.rpc_sync(3, functions.call_on, (2, functions.fail_with_code)),
    ):
        functions.SEEN.pop("texts", None)
        with pytest.raises(KeyError) as info:
            give()
        error = info.value
        assert isinstance(error, WorkerError)
        assert "RunsCode: made at the callee" in str(error)
        assert "made at the callee" in repr(error)
        assert f"{error}" == str(error)
        assert type(str(error)) is str
        assert error._render_traceback_()[-1]
        assert str(copy.copy(error)) == str(error)
        here = threading.current_thread().name
        assert here not in [name for _, name in functions.seen("texts")]


def test_the_text_of_an_error_is_made_where_it_was_raised(caller: Caller) -> None:
    caller(shows)


def leaves(rpc: Any) -> None:
    for to in (2, 0):
        for kind, text in (("exit", "SystemExit"), ("interrupt", "KeyboardInterrupt")):
            with pytest.raises(WorkerError, match=text):
                rpc.rpc_sync(to, functions.fail, (kind,))
        with pytest.raises(WorkerError, match="SystemExit"):
            rpc.remote(to, functions.fail, ("exit",)).to_here()
        with pytest.raises(WorkerError, match="GeneratorExit"):
            rpc.rpc_sync(to, functions.fail, ("generator",))
    assert rpc.rpc_sync(2, functions.my_rank) == 2


def test_exit_and_interrupt_of_a_callee_are_errors_of_its_call(
    caller: Caller, sess: Session
) -> None:
    caller(leaves)
    works(sess)


def test_an_error_of_a_call_in_a_command_is_that_commands(sess: Session) -> None:
    ref = sess.call_packed(lambda: module.rpc_sync(2, functions.fail, ("key",)))
    with pytest.raises(WorkerError, match="KeyError") as info:
        ref.debug_get_from_all()
    assert len(info.value.failures) == 4
    works(sess)


# -- what can't be sent --------------------------------------------------------------------------


def answers_what_cannot_be_sent(rpc: Any) -> None:
    me = rpc.get_worker_info().id
    for kind in ("lock", "generator"):
        with pytest.raises(DiscoError) as info:
            rpc.rpc_sync(2, functions.unsendable, (kind,))
        said = str(info.value)
        assert "unsendable" in said or "result" in said or "return" in said, said
        assert kind in said
        ref = rpc.remote(2, functions.unsendable, (kind,))  # it stays there: no error
        assert ref.rpc_sync().__len__() == 1
        with pytest.raises(DiscoError):
            ref.to_here()
    with pytest.raises(DiscoError, match="stream"):  # the way to do it
        rpc.rpc_sync(2, functions.numbers, (3,))
    with pytest.raises(DiscoError, match=r"RRef|remote"):
        rpc.rpc_sync(2, functions.unsendable, ("lock",))
    assert rpc.rpc_sync(me, functions.unsendable, ("lock",))["it"][0].acquire()


def test_a_result_that_can_not_be_sent(caller: Caller, engine: str) -> None:
    if engine == "threads":
        assert caller(lambda rpc: rpc.rpc_sync(2, functions.unsendable, ("lock",)))
        assert caller(lambda rpc: list(rpc.rpc_sync(2, functions.numbers, (3,)))) == [0, 1, 2]
    else:
        caller(answers_what_cannot_be_sent)


def gives_what_cannot_be_sent(rpc: Any, tag: str) -> None:
    lock = threading.Lock()
    for value in (lock, [1, {"a": lock}], (n for n in "ab"), lambda: lock):
        for ask in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(DiscoError, match=r"lock|generator"):
                ask(2, functions.note, (tag, value))
        with pytest.raises(DiscoError, match=r"lock|generator"):
            rpc.stream(2, functions.note, (tag, value))
    assert rpc.rpc_sync(2, functions.seen, (tag,)) == [], "nothing was sent"


def test_an_argument_that_can_not_be_sent(caller: Caller, engine: str, tag: str) -> None:
    if engine == "threads":
        lock = threading.Lock()
        assert caller(lambda rpc: rpc.rpc_sync(2, functions.same, (lock,))) is lock
    else:
        caller(gives_what_cannot_be_sent, tag)


def goes_deep(rpc: Any) -> None:
    many = rpc.rpc_sync(2, _wide, (100_000,))
    assert len(many) == 100_000
    assert many[99_999] == [99_999, "99999"]
    found = rpc.rpc_sync(2, functions.nested, (60,))
    depth = 0
    while found:
        found, depth = found[0], depth + 1
    assert depth == 60
    try:  # deeper than what can be written down: there or not at all
        found = rpc.rpc_sync(2, functions.nested, (100_000,))
    except DiscoError as error:
        assert "nested" in str(error) or "recursion" in str(error), error  # noqa: PT017
    else:
        while found:
            found = found[0]
    assert rpc.rpc_sync(2, functions.my_rank) == 2


def _wide(count: int) -> list[list[Any]]:
    return [[n, str(n)] for n in range(count)]


def test_a_huge_nested_result(caller: Caller) -> None:
    caller(goes_deep)


def test_an_object_that_breaks_when_it_arrives(sess: Session, engine: str) -> None:
    if engine == "threads":
        pytest.skip("by reference")
    for ask in (
        lambda: sess.rpc.rpc_sync(2, functions.same, (Breaks(),)),
        lambda: sess.rpc.rpc_sync(2, Breaks),
        lambda: sess.rpc.remote(2, Breaks).to_here(),
        lambda: next(sess.rpc.stream(2, _breaks)),
    ):
        with pytest.raises(DiscoError, match="it breaks"):
            ask()
    works(sess)


def _breaks() -> Iterator[Any]:
    yield Breaks()


def _break() -> Any:
    raise ValueError("it breaks")


class Breaks:
    """Can be pickled, not unpickled."""

    def __reduce__(self) -> Any:
        return _break, ()


# -- deadlines -----------------------------------------------------------------------------------


def hangs(rpc: Any, folder: str) -> None:
    for number, (fn, args) in enumerate(((functions.spin, ()), (functions.sleep, (1000,)))):
        file = f"{folder}/{rpc.get_worker_info().id}{number}"
        begin = time.monotonic()
        with pytest.raises(WaitTimeoutError, match=r"worker ?2") as info:
            rpc.rpc_sync(2, fn, (*args, file), timeout=0.3)
        assert 0.25 < time.monotonic() - begin < 15
        assert "0.3" in str(info.value)
        assert isinstance(info.value, TimeoutError)
    future = rpc.rpc_async(2, functions.spin, timeout=0.3)
    with pytest.raises(WaitTimeoutError):
        future.wait()
    assert future.done()
    late = rpc.rpc_async(2, functions.spin, timeout=0.3)
    eventually(late.done)  # nobody waits for it
    with pytest.raises(WaitTimeoutError):
        late.value()
    ref = rpc.remote(2, functions.spin, timeout=0.3)
    with pytest.raises(DiscoError):
        ref.to_here()


def test_a_callee_that_hangs_past_the_deadline(
    caller: Caller, sess: Session, tmp_path: Path
) -> None:
    caller(hangs, str(tmp_path))
    idle(sess, 2)  # its threads are free again
    works(sess)


def test_the_deadline_of_the_session_is_the_default(fresh: Any) -> None:
    sess = fresh(2, timeout=0.5)
    begin = time.monotonic()
    with pytest.raises(WaitTimeoutError):
        sess.rpc.rpc_sync(1, functions.spin)
    assert time.monotonic() - begin < 15
    eventually(lambda: counts(sess, "calls_running", ranks=[1]) == (0,))


def test_what_waits_there_at_the_deadline_ends_too(sess: Session, tmp_path: Path) -> None:
    """A call that itself waits for a call: both end."""
    file = str(tmp_path / "began")
    with pytest.raises(WaitTimeoutError):
        sess.rpc.rpc_sync(1, functions.call_on, (2, functions.spin, file), timeout=1)
    eventually(lambda: counts(sess, "calls_running", "calls_waiting", ranks=[1]) == (0, 0))
    works(sess)


def test_a_callee_that_swallows_the_interrupt(sess: Session, tmp_path: Path) -> None:
    file = str(tmp_path / "over")
    begin = time.monotonic()
    with pytest.raises(WaitTimeoutError):
        sess.rpc.rpc_sync(2, _stubborn, (file,), timeout=0.5)
    assert time.monotonic() - begin < 15
    works(sess)
    functions.touch(file)
    idle(sess)


def _stubborn(file: str) -> None:
    for _ in range(3):
        try:
            functions.spin()
        except BaseException:
            pass
    functions.await_file(file)


# -- collectives ---------------------------------------------------------------------------------


def test_a_collective_in_a_callee_is_refused(sess: Session) -> None:
    for kind in (_reduce, _barrier):
        for rank in (0, 2):
            begin = time.monotonic()
            with pytest.raises(DiscoError, match=r"rpc|call") as info:
                sess.rpc.rpc_sync(rank, kind)
            assert "collective" in str(info.value).lower() or "all_reduce" in str(info.value)
            assert time.monotonic() - begin < 10, "at once, not at a deadline"
    assert sess.call_packed(_reduce).debug_get_from_all() == [4.0] * 4
    works(sess)


def _reduce() -> float:
    return float(ccl.all_reduce(torch.ones(()), group="world"))


def _barrier() -> None:
    ccl.barrier(group="world")


def test_calls_between_collectives(sess: Session) -> None:
    def step() -> list[float]:
        found = []
        for n in range(10):
            total = ccl.all_reduce(torch.tensor(float(functions.my_rank())), group="world")
            there = module.rpc_sync((functions.my_rank() + 1) % 4, functions.add, (total, n))
            found.append(float(there))
        return found

    assert sess.call_packed(step).debug_get_from_all() == [[6.0 + n for n in range(10)]] * 4


def test_a_callee_leaves_the_workers_own_state_alone(sess: Session) -> None:
    """Grad mode, default dtype, random numbers: those of a thread stay those of the thread."""

    def mine() -> list[bool]:
        found = []
        with torch.no_grad():
            found.append(torch.is_grad_enabled())
            module.rpc_sync(functions.my_rank(), torch.set_grad_enabled, (True,))
            found.append(torch.is_grad_enabled())
        found.append(torch.is_grad_enabled())
        return found

    assert sess.call_packed(mine).debug_get_from_all() == [[False, False, True]] * 4
    sess.rpc.rpc_sync(2, torch.set_grad_enabled, (False,))
    assert [sess.rpc.rpc_sync(2, torch.is_grad_enabled) for _ in range(20)] == [True] * 20


# -- deaths --------------------------------------------------------------------------------------


@pytest.fixture
def mortal(fresh: Callable[..., Session], engine: str) -> Session:
    """Four workers, three of which can die."""
    if engine == "threads":
        pytest.skip("workers are threads of this process")
    return fresh(4)


@pytest.mark.conformance
def test_all_who_wait_for_a_worker_that_dies_are_told(mortal: Session, tmp_path: Path) -> None:
    rpc = mortal.rpc
    file = str(tmp_path / "die")
    waiting = [rpc.rpc_async(2, functions.sleep, (1000,)) for _ in range(5)]
    waiting.append(rpc.rpc_async(3, functions.call_on, (2, functions.sleep, 1000)))
    waiting.append(rpc.rpc_async(1, functions.call_on, (3, functions.call_on, 2, functions.spin)))
    waiting.append(rpc.rpc_async(2, functions.die, (file,)))
    ref = rpc.remote(2, functions.sleep, (1000,))
    across = rpc.rpc_async(1, _talk, (3, str(tmp_path / "stop")))
    functions.touch(file)
    begin = time.monotonic()
    for future in waiting:
        with pytest.raises(ConnectionError, match="worker 2") as info:
            future.wait(30)
        assert isinstance(info.value, DiscoError)
    with pytest.raises(WorkerLostError, match=r"exit code 3|exited|ended|crashed"):
        waiting[0].wait()
    with pytest.raises(WorkerLostError):
        ref.to_here()
    assert time.monotonic() - begin < 15
    for ask in (  # from now on: at once
        lambda: rpc.rpc_sync(2, functions.my_rank),
        lambda: rpc.rpc_async(2, functions.my_rank).wait(),
        lambda: rpc.remote(2, functions.my_rank).to_here(),
        lambda: next(rpc.stream(2, functions.numbers, (3,))),
    ):
        with pytest.raises(WorkerLostError, match="worker 2"):
            ask()
    assert rpc.rpc_sync(1, functions.call_on, (3, functions.my_rank)) == 3
    assert rpc.rpc_sync(3, functions.call_on, (1, functions.my_rank)) == 1
    assert rpc.rpc_sync(0, functions.call_on, (3, functions.call_on, -1, functions.my_rank)) == -1
    with pytest.raises(WorkerLostError):
        rpc.rpc_sync(1, functions.call_on, (2, functions.my_rank))
    functions.touch(str(tmp_path / "stop"))
    assert across.wait(30) > 0, "others went on talking all the while"
    assert counts(mortal, "calls_waiting", "calls_running", ranks=[0, 1, 3]) == (0, 0)


def _talk(to: int, file: str) -> int:
    """Ask on and on until the file is there."""
    asked = 0
    while not asked or not os.path.exists(file):  # once at least: it may begin late
        assert module.rpc_sync(to, functions.add, (asked, 1)) == asked + 1
        asked += 1
    return asked


def test_a_caller_that_dies_leaves_nothing_running(mortal: Session, tmp_path: Path) -> None:
    """What it asked for has nobody to answer to."""
    began = str(tmp_path / "began")
    future = mortal.rpc.rpc_async(2, functions.call_on, (3, functions.spin, began))
    assert functions.await_file(began)
    os.kill(mortal.rpc.rpc_sync(2, functions.pid), signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        future.wait(30)
    eventually(lambda: counts(mortal, "calls_running", ranks=[3]) == (0,))
    assert mortal.rpc.rpc_sync(3, functions.call_on, (1, functions.my_rank)) == 1


def test_a_worker_that_is_killed_while_it_answers(mortal: Session) -> None:
    """Whole answers or errors, nothing in between."""
    pid = mortal.rpc.rpc_sync(2, functions.pid)
    futures = [mortal.rpc.rpc_async(2, functions.make_tensor, (50_000,)) for _ in range(60)]
    futures[0].wait()
    os.kill(pid, signal.SIGKILL)
    right, answered = functions.make_tensor(50_000), 0
    for future in futures:
        try:
            found = future.wait(30)
        except WorkerLostError:
            continue
        answered += 1
        assert torch.equal(found, right)
    assert answered >= 1
    assert mortal.rpc.rpc_sync(3, functions.my_rank) == 3


def test_a_command_that_waits_for_a_worker_that_dies(mortal: Session) -> None:
    def ask() -> str:
        if functions.my_rank() != 1:
            return ""
        try:
            module.rpc_sync(3, functions.die)
        except WorkerLostError as error:
            return str(error)
        return "no error"

    ref = mortal.call_packed(ask)
    try:
        said = ref.debug_get_from_remote(1, timeout=30)
    except DiscoError as error:  # the session's own wait ends too, if it hears of the death first
        said = str(error)
    assert "worker 3" in said


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_calls_to_a_stopped_worker_end_after_the_heartbeat_wherever_they_come_from() -> None:
    words = r"worker 2 \(pid \d+\) has given no sign of life .*stopped \(SIGSTOP\)"
    with ProcessSession(3, devices="cpu", heartbeat=2) as sess:
        rpc = sess.rpc
        pid = rpc.rpc_sync(2, functions.pid)
        assert rpc.rpc_sync(1, functions.call_on, (2, functions.my_rank)) == 2
        value = rpc.remote(2, functions.my_rank)
        assert value.to_here() == 2  # it is there before the worker stands still
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            across = rpc.rpc_async(1, functions.call_on, (2, functions.my_rank))
            with pytest.raises(DiscoError, match=words):
                rpc.rpc_sync(2, functions.my_rank)
            with pytest.raises(DiscoError, match=words):
                across.wait(30)
            assert time.monotonic() - began < 8
            with pytest.raises(DiscoError, match=words):  # at once now
                rpc.rpc_sync(2, functions.my_rank)
            with pytest.raises(DiscoError, match=words):
                value.to_here()
            assert time.monotonic() - began < 8
            assert rpc.rpc_sync(1, functions.my_rank) == 1
        finally:
            os.kill(pid, signal.SIGCONT)
        sess.sync_all(timeout=30)
        eventually(lambda: not rpc.node.frozen)
        works(sess)
        assert value.to_here() == 2
        idle(sess)


# -- interrupts and the end ----------------------------------------------------------------------


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """KeyboardInterrupt on SIGINT, whatever the runner of the tests did with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c(file: str) -> threading.Thread:
    """Once the file is there, and a moment later."""

    def press() -> None:
        if functions.await_file(file):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


@pytest.mark.usefixtures("ctrl_c_raises")
@pytest.mark.parametrize("how", ["sync", "wait", "to_here", "stream", "wait_all"])
def test_ctrl_c_while_the_controller_waits(sess: Session, tmp_path: Path, how: str) -> None:
    rpc = sess.rpc
    file, over = str(tmp_path / "began"), str(tmp_path / "over")
    waits: dict[str, Callable[[], Any]] = {
        "sync": lambda: rpc.rpc_sync(2, functions.sleep, (1000, file)),
        "wait": lambda: rpc.rpc_async(2, functions.say_and_await, (file, over)).wait(),
        "to_here": lambda: rpc.remote(2, functions.say_and_await, (file, over)).to_here(),
        "stream": lambda: list(rpc.stream(2, _slow_items, (file,))),
        "wait_all": lambda: rpc.wait_all([rpc.rpc_async(2, functions.say_and_await, (file, over))]),
    }
    thread = press_ctrl_c(file)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        waits[how]()
    assert time.monotonic() - begin < 15
    thread.join(20)
    sess.interrupt(timeout=10)
    works(sess)
    if how in ("sync", "stream"):  # nobody has a handle on it: it ends there too
        idle(sess, 2)
    functions.touch(over)


def _slow_items(file: str) -> Iterator[int]:
    yield 1
    functions.sleep(1000, file)


@pytest.mark.usefixtures("drops_exceptions")
def test_an_interrupt_while_workers_wait_for_calls(sess: Session, tmp_path: Path) -> None:
    file = str(tmp_path / "began")

    def wait() -> Any:
        to = (functions.my_rank() + 1) % 4
        return module.rpc_sync(to, functions.sleep, (1000, f"{file}{to}"))

    ref = sess.call_packed(wait)
    for rank in range(4):
        assert functions.await_file(f"{file}{rank}")
    begin = time.monotonic()
    assert sess.interrupt(timeout=20) == []
    assert time.monotonic() - begin < 15
    with pytest.raises(WorkerError, match="WorkerInterrupted") as info:
        ref.debug_get_from_all()
    assert all(failure.interrupted for failure in info.value.failures)
    idle(sess)  # what they waited for has ended, too
    works(sess)


def test_what_workers_wait_for_is_said(sess: Session, tmp_path: Path) -> None:
    began, file = str(tmp_path / "began"), str(tmp_path / "go")

    def wait() -> Any:
        if functions.my_rank() == 1:
            functions.touch(began)
            module.rpc_sync(2, functions.await_file, (file,))

    ref = sess.call_packed(wait)
    assert functions.await_file(began)
    try:
        eventually(lambda: "await_file" in sess.status()[1].detail)
        assert sess.status()[1].state == "waiting"
        assert "worker 2" in sess.status()[1].detail
    finally:
        functions.touch(file)
    ref.debug_get_from_all()


def test_the_session_ends_while_calls_are_in_flight(fresh: Any, tmp_path: Path) -> None:
    sess = fresh(3)
    began = str(tmp_path / "began")
    rpc = sess.rpc
    futures = [rpc.rpc_async(to, functions.sleep, (1000, f"{began}{to}")) for to in range(3)]
    futures.append(rpc.rpc_async(1, functions.call_on, (2, functions.spin, f"{began}3")))
    ref = rpc.remote(1, functions.sleep, (1000,))
    for number in range(4):
        assert functions.await_file(f"{began}{number}")
    errors: list[BaseException] = []

    def wait(what: Callable[[], Any]) -> None:
        try:
            what()
        except BaseException as error:
            errors.append(error)

    waits = [future.wait for future in futures] + [ref.to_here]
    threads = [threading.Thread(target=wait, args=(what,)) for what in waits]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    sess.shutdown(cancel=True)
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert time.monotonic() - begin < 25
    assert len(errors) == 5
    for error in errors:  # of the call within a call, worker 1 may have been told first
        assert isinstance(error, SessionClosedError | WorkerError), error
        assert "session was shut down" in str(error), error
    assert sum(isinstance(error, SessionClosedError) for error in errors) >= 4, errors


def test_a_with_block_that_ends_while_calls_are_in_flight(fresh: Any) -> None:
    with fresh(2) as sess:
        future = sess.rpc.rpc_async(1, functions.sleep, (1000,))
    with pytest.raises(SessionClosedError):
        future.wait()


def test_references_and_futures_outlive_the_session(fresh: Any) -> None:
    sess = fresh(2)
    refs = [sess.rpc.remote(n % 2, functions.add, (n,)) for n in range(20)]
    done = sess.rpc.rpc_async(1, functions.add, (1, 2))
    assert done.wait() == 3
    assert refs[1].to_here() == 11
    sess.shutdown()
    assert done.wait() == 3
    del refs


def _open_slowly() -> None:
    """Have this worker's node hear from others before it is made."""
    make = context.open_router

    def make_slowly(*args: Any) -> Any:
        router = make(*args)
        time.sleep(0.3)
        return router

    context.open_router = make_slowly


def test_a_node_that_is_being_made_hears_whom_it_has_lost(
    fresh: Any, engine: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if engine == "threads":
        pytest.skip("its workers are in one process, which opens nothing")
    sess = fresh(3)

    def open_slowly() -> None:
        if current_worker().rank == 1:
            _open_slowly()

    sess.call_packed(open_slowly).debug_get_from_all()
    assert sess.rpc.rpc_sync(2, functions.my_rank) == 2
    os.kill(sess.processes()[2], signal.SIGKILL)
    assert sess.rpc.rpc_sync(1, functions.my_rank) == 1
    with pytest.raises(WorkerLostError, match="worker 2"):
        sess.rpc.rpc_sync(1, module.rpc_sync, args=(2, functions.my_rank))
    assert "Traceback" not in capfd.readouterr().err
