"""What a failed command leaves behind, who is told of it, how often, and in what words."""

import copy
import dataclasses
import gc
import pickle
import time
import traceback
import warnings
import weakref
from typing import Any

import pytest
import torch

from discolab import (
    DiscoError,
    Failure,
    Session,
    SessionError,
    ThreadedSession,
    WorkerError,
    ccl,
    current_worker,
    current_worker_or_none,
)
from discolab.runtime.failures import explain


def repr_of_type(value: object) -> str:
    return getattr(value, "__name__", type(value).__name__)


def fail(text: str = "broken", ranks: tuple[int, ...] = (0, 1, 2, 3)) -> int:
    if current_worker().rank in ranks:
        raise ValueError(text)
    return 7


class Laden(Exception):
    """Carries much that its text does not show."""

    def __init__(self, size: int) -> None:
        super().__init__("short")
        self.data = bytes(size)


@pytest.mark.conformance
@pytest.mark.parametrize("kind", ["message", "note", "attribute"])
def test_of_a_huge_exception_the_ends_are_told(sess: ThreadedSession, kind: str) -> None:
    def fail_hugely() -> None:
        if current_worker().rank == 1:
            if kind == "attribute":
                raise Laden(20_000_000)
            text = f"begin {'x' * 20_000_000} end"
            error = ValueError(text if kind == "message" else "short")
            if kind == "note":
                error.add_note(text)
            raise error

    began = time.monotonic()
    with pytest.raises(WorkerError) as info:
        sess.call_packed(fail_hugely).debug_get_from_all()
    told = "".join(traceback.format_exception(info.value))
    assert time.monotonic() - began < 5
    assert len(told) < 20_000
    if kind == "attribute":
        assert "short" in told
    else:
        assert "begin xxx" in told
        assert "xxx end" in told
        assert "x … 19,998,010 characters … x" in told
    assert len(pickle.dumps(info.value.failures[0].message)) < 10_000
    sess.sync_all()


@pytest.mark.conformance
def test_an_exception_is_told_with_ranks_command_and_call_site(sess: ThreadedSession) -> None:
    ref = sess.call_packed(fail, "broken", (1, 3))
    with pytest.raises(WorkerError) as info:
        ref.debug_get_from_all()
    error = info.value
    assert error.ranks == [1, 3]
    assert "workers 1, 3 failed in call of 'fail'" in str(error)
    assert f"called at {__file__}:" in str(error)
    assert str(error).endswith("ValueError: broken")
    assert isinstance(error.__cause__, ValueError)
    assert all(f.headline == "ValueError: broken" for f in error.failures)


@pytest.mark.conformance
def test_each_call_of_one_function_is_told_with_its_own_line(sess: ThreadedSession) -> None:
    def call(deeper: bool) -> list[Any]:
        refs = [sess.call_packed(fail)]
        if deeper:
            refs += call(False)
            refs += [sess.call_packed(fail)]
        return [*refs, sess.call_packed(fail)]

    begin = call.__code__.co_firstlineno
    for _ in range(2):
        lines = []
        for ref in call(True):
            with pytest.raises(WorkerError, match="called at") as info:
                ref.debug_get_from_all()
            lines.append(int(info.value.failures[0].call_site.rpartition(":")[2]) - begin)
        assert lines == [1, 1, 5, 4, 5]


@pytest.mark.conformance
def test_the_workers_own_traceback_is_shown_without_frames_of_discolab(
    pair: ThreadedSession,
) -> None:
    with pytest.raises(WorkerError) as info:
        pair.call_packed(fail).debug_get_from_remote(0)
    shown = "\n".join(info.value.__notes__)
    line = fail.__code__.co_firstlineno + 2
    assert f"{__file__}:{line}, in fail" in shown
    assert "raise ValueError(text)" in shown
    assert "worker.py" not in shown
    assert shown in "".join(traceback.format_exception(info.value))


@pytest.mark.conformance
def test_other_workers_keep_their_value(sess: ThreadedSession) -> None:
    ref = sess.call_packed(fail, "broken", (1,))
    assert ref.debug_get_from_remote(0) == 7
    with pytest.raises(WorkerError, match="worker 1 failed"):
        ref.debug_get_from_remote(1)


def test_a_poisoned_value_passes_on_its_first_cause_only(sess: ThreadedSession) -> None:
    first = sess.call_packed(fail, "root cause", (2,))
    last = sess.call_packed(lambda a: a["x"][0] + 1, {"x": [sess.call_packed(lambda a: a, first)]})
    with pytest.raises(WorkerError) as info:
        last.debug_get_from_all()
    (failure,) = info.value.failures
    assert (failure.rank, failure.message) == (2, "root cause")
    assert failure.command == "call of 'fail'"
    sess.sync_all()  # told: not once more
    assert last.debug_get_from_remote(0) == 8


def test_a_poisoned_function_passes_on_its_cause(pair: ThreadedSession) -> None:
    func = pair.call_packed(fail)
    with pytest.raises(WorkerError, match="ValueError: broken"):
        pair.call_packed(func, 1).debug_get_from_all()


@pytest.mark.conformance
def test_sync_raises_each_failure_exactly_once(sess: ThreadedSession) -> None:
    sess.call_packed(fail, "a", (1,))
    sess.call_packed(fail, "b", (3,))
    sess.sync_worker_0()
    with pytest.raises(WorkerError, match=r"^worker 1 failed .*: a\n"):
        sess.sync_worker(1)
    with pytest.raises(WorkerError) as info:
        sess.sync_all()
    assert [(f.rank, f.message) for f in info.value.failures] == [(3, "b")]
    sess.sync_all()


def test_a_failure_on_any_worker_is_seen_by_sync_all(sess: ThreadedSession) -> None:
    for rank in range(4):
        sess.call_packed(fail, "here", (rank,))
        with pytest.raises(WorkerError) as info:
            sess.sync_all()
        assert info.value.ranks == [rank]


def test_of_many_failures_the_first_are_told(pair: ThreadedSession) -> None:
    for number in range(40):
        pair.call_packed(fail, f"number {number}")
    with pytest.raises(WorkerError) as info:
        pair.sync_all()
    assert info.value.failures[0].message == "number 0"
    pair.sync_all()


@pytest.mark.conformance
def test_equal_failures_are_folded_and_different_ones_are_not(sess: ThreadedSession) -> None:
    def mixed() -> None:
        rank = current_worker().rank
        raise ValueError("same" if rank != 2 else "other")

    with pytest.raises(WorkerError) as info:
        sess.call_packed(mixed).debug_get_from_all()
    first, second = str(info.value).splitlines()
    assert first.startswith("workers 0-1, 3 failed")
    assert second.startswith("worker 2 failed")


def test_of_more_errors_than_are_shown_the_workers_are_named() -> None:
    failures = [Failure(rank, "call of 'f'", "", "ValueError", f"w{rank}") for rank in range(8)]
    shown = explain(failures, hint="more shows all")
    assert "worker 3: ValueError: w3" in shown
    assert "worker 4: ValueError: w4" not in shown
    assert shown[-1] == "… and workers 4-7 with 4 more (more shows all)"
    assert "worker 7: ValueError: w7" in explain(failures, whole=True)


def test_what_was_called_without_result_is_told_by_the_next_fetch(pair: ThreadedSession) -> None:
    good = pair.call_packed(lambda: 5)
    pair.call_without_result(fail, "unseen", (1,))
    assert good.debug_get_from_remote(0) == 5
    with pytest.raises(WorkerError, match="unseen"):
        good.debug_get_from_remote(1)
    assert good.debug_get_from_all() == [5, 5]
    pair.sync_all()


def test_peek_gives_failures_as_values_and_tells_nobody(pair: ThreadedSession) -> None:
    ref = pair.call_packed(fail, "broken", (1,))
    values = pair.peek(ref)
    assert values[0] == 7
    assert isinstance(values[1], Failure)
    with pytest.raises(WorkerError, match="broken"):
        pair.sync_all()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, RecursionError])
def test_no_exception_ends_a_worker(pair: ThreadedSession, kind: type[BaseException]) -> None:
    def leave() -> None:
        raise kind("bye")

    with pytest.raises(WorkerError, match=f"{kind.__name__}: bye"):
        pair.call_packed(leave).debug_get_from_all()
    assert pair.call_packed(lambda: 1).debug_get_from_all() == [1, 1]


def test_no_object_ends_a_worker_however_it_misbehaves(pair: ThreadedSession) -> None:
    class Rude:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name} here")

        def __call__(self) -> None:
            raise Unprintable

    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    with pytest.raises(WorkerError, match=r"call of 'Rude'.*unprintable Unprintable"):
        pair.call_packed(Rude()).debug_get_from_all()
    assert pair.call_packed(lambda: 1).debug_get_from_all() == [1, 1]


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    number: int


class NoVictim(Exception):
    @property
    def victim(self) -> bool:
        raise ValueError


class Rough(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize("error", [Frozen, NoVictim, Rough], ids=lambda kind: kind.__name__)
def test_no_exception_ends_a_worker_however_it_misbehaves(
    pair: ThreadedSession, error: Any
) -> None:
    def leave() -> None:
        if current_worker().rank == 1:
            raise error(1)
        ccl.barrier()

    with pytest.raises(WorkerError, match=f"worker 1 failed in .*: {error.__name__}: "):
        pair.call_packed(leave).debug_get_from_all()
    assert pair.call_packed(lambda: 1).debug_get_from_all() == [1, 1]


def test_a_failure_that_cannot_be_described_is_told_by_its_type(
    pair: ThreadedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Failure, "from_exception", never)
    with pytest.raises(WorkerError, match=r"call of 'fail'.*ValueError: <.*can't be described>"):
        pair.call_packed(fail).debug_get_from_all()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_all_the_same_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = ThreadedSession(3, timeout=20)

    def die(*_: object) -> None:
        raise MemoryError

    def meet() -> None:
        if current_worker().rank == 1:
            raise ValueError
        ccl.barrier()

    monkeypatch.setattr(session._workers[1], "_poison", die)
    ref = session.call_packed(meet)
    start = time.monotonic()
    with pytest.raises(DiscoError, match="worker 1 has died: make a new session"):
        ref.debug_get_from_all()
    assert session.status()[1].state == "dead"
    while "waiting" in [status.state for status in session.status()]:
        assert time.monotonic() - start < 5
        time.sleep(0.01)
    assert session.interrupt(timeout=10) == []
    assert session.shutdown() == []
    assert time.monotonic() - start < 5


def test_an_interrupt_of_the_users_own_is_a_failure_like_any_other(pair: ThreadedSession) -> None:
    def leave() -> None:
        raise KeyboardInterrupt("mine")

    pair.call_without_result(leave)
    with pytest.raises(WorkerError, match="KeyboardInterrupt: mine") as info:
        pair.sync_all()
    assert not any(f.interrupted for f in info.value.failures)


def poisoned_copy(session: ThreadedSession, ref: Any) -> None:
    session.copy_from_worker_0(torch.zeros(1), ref)


def poisoned_push(session: ThreadedSession, ref: Any) -> None:
    session["v"] = ref


def poisoned_item(session: ThreadedSession, ref: Any) -> None:
    session.call_packed(torch.zeros, 1)[0] = ref


def poisoned_reduction(session: ThreadedSession, ref: Any) -> None:
    session.allreduce(ref, session.empty(1, "float32"))


@pytest.mark.parametrize(
    "use", [poisoned_copy, poisoned_push, poisoned_item, poisoned_reduction], ids=repr_of_type
)
@pytest.mark.parametrize("interrupted", [False, True])
def test_what_a_poisoned_argument_left_undone_is_told(
    pair: ThreadedSession, use: Any, interrupted: bool
) -> None:
    if interrupted:
        ref = pair.call_packed(lambda: time.sleep(1000))
        while pair.status()[0].state != "waiting":
            time.sleep(0.001)
        assert pair.interrupt(timeout=20) == []
    else:
        ref = pair.call_packed(fail)
        with pytest.raises(WorkerError):
            ref.debug_get_from_all()
    use(pair, ref)
    with pytest.raises(WorkerError, match=r"\[argument poisoned by call of '") as info:
        pair.sync_all()
    assert __file__ in info.value.failures[0].call_site
    pair.sync_all()
    assert pair.call_packed(lambda: 1).debug_get_from_all() == [1, 1]


def test_a_copy_that_an_interrupt_cancels_is_not_told(pair: ThreadedSession) -> None:
    pair.call_packed(lambda: time.sleep(1000))
    pair.broadcast(torch.ones(3))
    while pair.status()[0].state != "waiting":
        time.sleep(0.001)
    assert pair.interrupt(timeout=20) == []
    pair.sync_all()


def test_unread_results_do_not_push_out_what_only_a_wait_can_tell(pair: ThreadedSession) -> None:
    for number in range(20):
        pair.call_packed(fail, f"unread {number}")
    pair.call_without_result(fail, "orphan")
    with pytest.raises(WorkerError) as info:
        pair.sync_all()
    messages = [f.message for f in info.value.failures if f.rank == 0]
    assert messages == [
        *(f"unread {number}" for number in range(16)),
        "+4 more failures not kept",
        "orphan",
    ]
    pair.sync_all()


def test_of_many_commands_without_result_the_first_are_told_and_the_others_counted(
    pair: ThreadedSession,
) -> None:
    for _ in range(2):
        for number in range(30):
            pair.call_without_result(fail, f"number {number}")
        with pytest.raises(WorkerError) as info:
            pair.sync_all()
        messages = [f.message for f in info.value.failures if f.rank == 1]
        assert messages[:16] == [f"number {number}" for number in range(16)]
        assert messages[16:] == ["+14 more failures not kept"]


@pytest.mark.conformance
def test_a_value_that_cannot_be_copied_is_an_error_of_its_fetch(pair: ThreadedSession) -> None:
    class Stubborn(torch.nn.Module):
        def __deepcopy__(self, memo: object) -> Any:
            raise TypeError("never")

    ref = pair.call_packed(Stubborn)
    with pytest.raises(WorkerError, match="fetching a value: TypeError: never"):
        ref.debug_get_from_remote(0)
    assert pair.call_packed(lambda m: type(m).__name__, ref).debug_get_from_remote(0) == "Stubborn"


@pytest.mark.one_process
def test_a_failure_keeps_no_tensor_of_the_frames_alive(pair: ThreadedSession) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def allocate_and_fail() -> None:
        big = torch.zeros(1000)
        seen.append(weakref.ref(big))
        raise ValueError("after allocating")

    ref = pair.call_packed(allocate_and_fail)
    with pytest.raises(WorkerError):
        ref.debug_get_from_all()
    gc.collect()
    assert [r() for r in seen] == [None, None]


def test_only_a_worker_is_the_current_worker(pair: ThreadedSession) -> None:
    assert current_worker_or_none() is None
    with pytest.raises(SessionError, match="runs on no worker"):
        current_worker()
    assert pair.call_packed(lambda: current_worker().world_size).debug_get_from_all() == [2, 2]


@pytest.mark.one_process
def test_a_worker_that_would_wait_for_itself_is_told_so(pair: ThreadedSession) -> None:
    ref = pair.call_packed(lambda: 5)
    pair.sync_all()
    for wait in (
        pair.sync_all,
        lambda: ref.debug_get_from_remote(0),
        pair.interrupt,
        pair.shutdown,
    ):
        with pytest.raises(WorkerError, match="can't wait for its own session"):
            pair.call_packed(wait).debug_get_from_all()
    assert ref.debug_get_from_all() == [5, 5]


@pytest.mark.one_process
def test_a_worker_may_queue_calls_on_its_own_session(pair: ThreadedSession) -> None:
    def feed() -> None:
        if current_worker().rank == 0:
            for _ in range(2000):
                pair.call_without_result(pair_count.append, 1)

    pair_count: list[int] = []
    pair.call_packed(feed).debug_get_from_all()
    pair.sync_all()
    assert len(pair_count) == 4000


def test_an_error_can_be_copied_and_pickled(pair: ThreadedSession) -> None:
    with pytest.raises(WorkerError) as info:
        pair.call_packed(fail).debug_get_from_all()
    for other in (copy.deepcopy(info.value), pickle.loads(pickle.dumps(info.value))):
        assert str(other) == str(info.value)
        assert other.ranks == [0, 1]


def test_every_error_is_a_disco_error(pair: ThreadedSession) -> None:
    with pytest.raises(DiscoError):
        pair.call_packed(fail).debug_get_from_all()


def fill_but_on_worker_1(x: torch.Tensor) -> None:
    if current_worker().rank == 1:
        raise ValueError("no luck on worker 1")
    x.fill_(1)


@pytest.mark.conformance
def test_a_failed_call_whose_result_was_dropped_is_told_by_the_next_fetch(sess: Session) -> None:
    x = sess.call_packed(torch.zeros, 2)
    sess.call_packed(fill_but_on_worker_1, x)
    assert x.debug_get_from_remote(0).tolist() == [1, 1]
    with pytest.raises(WorkerError, match="no luck on worker 1"):
        x.debug_get_from_remote(1)
    assert x.debug_get_from_remote(1).tolist() == [0, 0]
    sess.sync_all()


def test_a_result_that_is_replaced_takes_no_failure_with_it(pair: Session) -> None:
    x = pair.call_packed(torch.zeros, 2)
    for _ in range(3):
        y = pair.call_packed(fill_but_on_worker_1, x)
    y = pair.call_packed(int)
    with pytest.raises(WorkerError, match="no luck on worker 1"):
        y.debug_get_from_remote(1)
    del x, y


def test_a_failure_that_another_register_holds_is_not_told_before_it_is_read(pair: Session) -> None:
    x = pair.call_packed(torch.zeros, 2)
    failed = pair.call_packed(fill_but_on_worker_1, x)
    pair.call_packed(repr, failed)
    assert x.debug_get_from_remote(1).tolist() == [0, 0]
    with pytest.raises(WorkerError, match="no luck"):
        failed.debug_get_from_remote(1)


def test_a_call_that_fails_on_all_workers_is_one_failure(sess: Session) -> None:
    failed = sess.call_packed(lambda: 1 / 0)
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        failed.debug_get_from_remote(1)
    sess.sync_all()
    another = sess.call_packed(lambda: 1 / 0)
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        sess.sync_all()
    del another


def test_what_failed_because_of_another_worker_does_not_hide_the_cause(pair: Session) -> None:
    def one_fails() -> None:
        if current_worker().rank == 1:
            raise ValueError("the cause")
        ccl.all_reduce(torch.ones(2))

    failed = pair.call_packed(one_fails)
    with pytest.raises(WorkerError):
        failed.debug_get_from_remote(0)
    with pytest.raises(WorkerError, match="the cause"):
        pair.sync_all()


def test_what_was_never_raised_is_told_when_the_session_ends(sess: Session) -> None:
    sess.call_packed(fill_but_on_worker_1, torch.zeros(1))
    with pytest.warns(RuntimeWarning, match="never raised.*no luck on worker 1"):
        sess.shutdown()


def test_what_was_raised_is_not_told_when_the_session_ends(sess: Session) -> None:
    failed = sess.call_packed(lambda: 1 / 0)
    with pytest.raises(WorkerError):
        failed.debug_get_from_remote(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sess.shutdown()


def test_a_group_of_errors_keeps_no_frames_of_its_parts(pair: ThreadedSession) -> None:
    kept: list[Any] = []

    class Group(ExceptionGroup):  # type: ignore[type-arg]
        exceptions = property(lambda self: 1 / 0)  # type: ignore[assignment]

    def part() -> None:
        large = torch.ones(3)
        kept.append(weakref.ref(large))
        raise KeyError("x")

    def group() -> None:
        try:
            part()
        except KeyError as error:
            raise Group("two", [error]) from None

    with pytest.raises(WorkerError, match=r"in part\n  \| KeyError: 'x'"):
        pair.call_packed(group).debug_get_from_all()
    gc.collect()
    assert kept  # of worker 0 alone where the other is a process
    assert not any(ref() is not None for ref in kept)


def test_code_without_a_source_shows_no_empty_line(pair: ThreadedSession) -> None:
    with pytest.raises(WorkerError, match=r"<string>:1\nZeroDivisionError"):
        pair.call_packed(exec, "1/0", {}).debug_get_from_all()
