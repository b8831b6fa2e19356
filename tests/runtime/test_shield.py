"""Interrupts that a shield delays, on the thread of a worker and, as Ctrl-C, on the main thread."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from discolab import WaitTimeoutError
from discolab.runtime import interrupts
from discolab.runtime.errors import WorkerInterrupted
from discolab.runtime.interrupts import Count, Interruptible, bind_waiter, shield

# -- on the thread of a worker ---------------------------------------------------------------------


@pytest.fixture
def me() -> Iterator[Interruptible]:
    """What runs a command on this thread."""
    me = Interruptible()
    me.thread_id = threading.get_ident()
    me.running = True
    bind_waiter(me)
    yield me
    bind_waiter(None)


def on_another_thread(func: Callable[[], object]) -> None:
    thread = threading.Thread(target=func)
    thread.start()
    thread.join()


def loop(times: int = 1000) -> int:
    """Python code in which an exception would come."""
    return sum(number for number in range(times))


def within(me: Interruptible, done: list[str], interrupt: bool) -> None:
    with shield():
        if interrupt:
            on_another_thread(me.interrupt)
        loop()
        with shield():
            done.append("inner")
        done.append("outer")


def test_one_that_comes_within_raises_after(me: Interruptible) -> None:
    done = list[str]()
    with pytest.raises(WorkerInterrupted):
        within(me, done, interrupt=True)
    assert done == ["inner", "outer"]


def wait(me: Interruptible) -> None:
    me.wait_for(lambda: False, "nothing", 20)


def test_what_cleans_up_after_an_interrupt_is_done_and_does_not_raise(me: Interruptible) -> None:
    """Three steps after a wait that was interrupted."""
    done = list[str]()
    on_another_thread(me.announce_interrupt)
    with pytest.raises(WorkerInterrupted, match="waiting for nothing"):
        wait(me)
    for _ in range(3):
        within(me, done, interrupt=False)
    assert done == ["inner", "outer"] * 3
    with pytest.raises(WorkerInterrupted):
        within(me, done, interrupt=True)  # once more, as it goes on


def test_what_begins_as_an_interrupt_comes_is_done_first(me: Interruptible) -> None:
    done = list[str]()
    me.running = False  # so that it is noted, and comes at no line of this test
    on_another_thread(me.interrupt)
    me.running = True
    with pytest.raises(WorkerInterrupted):
        within(me, done, interrupt=False)
    assert done == ["inner", "outer"]
    within(me, done, interrupt=False)


def test_an_interrupt_raises_after_a_block_that_fails(me: Interruptible) -> None:
    def fail() -> None:
        with shield():
            on_another_thread(me.interrupt)
            raise ValueError("ours")

    with pytest.raises(WorkerInterrupted) as info:
        fail()
    assert isinstance(info.value.__context__, ValueError)


def test_waits_within_raise_at_once(me: Interruptible) -> None:
    with pytest.raises(WaitTimeoutError), shield():
        me.wait_for(lambda: False, "nothing", 0.01)

    def wait_within() -> None:
        with shield():
            on_another_thread(me.interrupt)
            wait(me)

    with pytest.raises(WorkerInterrupted, match="waiting for nothing"):
        wait_within()


def test_a_block_that_takes_too_long_is_interrupted(
    me: Interruptible, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "HOLD_BACK", 0.1)

    # kept: without the interpreter lock it would die on this thread, and the exception land in that
    timer = threading.Timer(0.3, me.interrupt)

    def hang() -> None:
        with shield():
            timer.start()
            while True:
                loop()

    with pytest.raises(WorkerInterrupted):
        hang()
    done = list[str]()
    with pytest.raises(WorkerInterrupted):  # what the thread does next is shielded as before
        within(me, done, interrupt=True)
    assert done == ["inner", "outer"]


def test_progress_within_a_long_block_gives_it_more_time(
    me: Interruptible, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "HOLD_BACK", 0.5)
    done = list[int]()

    def go_on() -> None:
        with shield():
            on_another_thread(me.interrupt)
            for number in range(10):
                with shield(progress=True):
                    time.sleep(0.1)
                on_another_thread(me.retry_interrupt)
                done.append(number)

    with pytest.raises(WorkerInterrupted):
        go_on()
    assert done == list(range(10))


class Victim(threading.Thread):
    """A worker's thread that counts in shields; its two numbers differ if one is cut in two."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.waiter = Interruptible()
        self.began = self.ended = self.inner = self.rounds = 0
        self.torn: list[str] = []
        self.over = False

    def run(self) -> None:
        self.waiter.thread_id = threading.get_ident()
        bind_waiter(self.waiter)
        self.waiter.serve_on(self.serve)

    def serve(self) -> None:
        """Put in order what an exception has torn out of, then run a command that never ends."""
        self.rounds += 1
        me = self.waiter
        me._absorb()
        if self.began != self.ended:
            self.torn.append(f"{self.began} began, {self.ended} ended")
        if me._shields or not me._guard.acquire(timeout=5):
            self.torn.append("a shield or the guard was left")
            return
        me.interrupts = 0
        me._async_sent = False
        me._guard.release()
        me.running = True
        while not self.over:
            self.command()

    def command(self) -> None:
        for _ in range(20):
            with shield():
                self.began += 1
                with shield():
                    self.inner += loop(3)
                self.ended += 1


@pytest.mark.parametrize("senders", [1, 3])
def test_thousands_of_interrupts_cut_no_shield_in_two(
    senders: int, how_many: Callable[..., int]
) -> None:
    victim = Victim()
    began = time.monotonic()
    seconds = how_many(3, often=1)  # at least, and until it was hit often enough
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def enough() -> bool:
        took = time.monotonic() - began
        return took > 60 or (took > seconds and victim.rounds > 100)

    def send() -> None:
        while not enough():
            victim.waiter.interrupt()
            victim.waiter.retry_interrupt()

    threads = [threading.Thread(target=send) for _ in range(senders)]
    try:
        victim.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(0.1)  # what is on its way comes in the command
        victim.over = True
        victim.join(20)
    finally:
        sys.setswitchinterval(before)
    assert not victim.is_alive()
    assert victim.torn == []
    assert victim.rounds > 100


# -- Ctrl-C ----------------------------------------------------------------------------------------


@pytest.fixture
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def pressed_within(done: list[int]) -> None:
    with shield():
        press()
        press()
        with shield():
            done.append(1)
        done.append(2)


@pytest.mark.usefixtures("handled")
class TestCtrlC:
    def test_it_comes_after(self) -> None:
        done: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            pressed_within(done)
        assert done == [1, 2]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_after_an_error_it_comes_too(self) -> None:
        with pytest.raises(KeyboardInterrupt) as info:
            fails_within(1)
        assert isinstance(info.value.__context__, ValueError)

    def test_where_none_comes_nothing_is_changed(self) -> None:
        with pytest.raises(ValueError, match="ours"):
            fails_within(0)
        threading.Timer(0.1, press).start()
        with pytest.raises(KeyboardInterrupt):
            sleep(20)

    def test_what_hangs_within_can_be_stopped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(interrupts, "HOLD_BACK", 0.1)
        begin = time.monotonic()
        threading.Timer(0.3, press).start()
        with pytest.raises(KeyboardInterrupt), shield():
            sleep(20)
        assert time.monotonic() - begin < 10

    def test_one_that_is_ignored_stays_so(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with shield():
            press()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    def test_an_alarm_is_delayed_too(self) -> None:
        def out_of_time(*_: object) -> None:
            raise TimeoutError

        def alarmed_within(done: list[int]) -> None:
            with shield(), shield():
                signal.raise_signal(signal.SIGALRM)
                done.append(1)

        done: list[int] = []
        before = signal.signal(signal.SIGALRM, out_of_time)
        try:
            with pytest.raises(TimeoutError):
                alarmed_within(done)
            assert signal.getsignal(signal.SIGALRM) is out_of_time
        finally:
            signal.signal(signal.SIGALRM, before)
        assert done == [1]

    def test_an_alarm_that_cuts_its_beginning_leaves_ctrl_c_as_it_was(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        set_handler = interrupts._set_handler

        def cut(*args: object) -> None:
            set_handler(*args)
            raise TimeoutError

        with monkeypatch.context() as patch:
            patch.setattr(interrupts, "_set_handler", cut)
            with pytest.raises(TimeoutError), shield():
                pass
        with pytest.raises(KeyboardInterrupt):
            press()
        done: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            pressed_within(done)
        assert done == [1, 2]

    def test_another_handler_that_is_set_within_stays(self) -> None:
        seen = []
        with shield():
            signal.signal(signal.SIGINT, lambda *_: seen.append(1))
        press()
        assert seen == [1]

    def test_other_threads_shield_nothing(self) -> None:
        found = []

        def on_thread() -> None:
            with shield():
                found.append(signal.getsignal(signal.SIGINT))

        on_another_thread(on_thread)
        assert found == [signal.default_int_handler]


def fails_within(presses: int) -> None:
    with shield():
        for _ in range(presses):
            press()
        raise ValueError("ours")


def sleep(seconds: float) -> None:
    time.sleep(seconds)


# -- locks and counts ------------------------------------------------------------------------------


def test_a_count_counts() -> None:
    count = Count()
    assert count.value == 0
    interrupts.run_steps(map(count.add, range(1000)))
    count.add()
    assert count.value == 1001


@pytest.mark.skipif(sys.version_info < (3, 12), reason="locks do not tell how often they are held")
def test_a_lock_whose_taking_is_interrupted_is_free() -> None:
    class Torn(interrupts._ReentrantLock):
        def acquire(self, *args: object) -> bool:
            super().acquire()
            raise KeyboardInterrupt

    def take() -> None:
        with lock:
            raise AssertionError

    lock = Torn()
    with pytest.raises(KeyboardInterrupt):
        take()
    assert not lock._is_owned()


@pytest.mark.parametrize("make", [interrupts.plain_lock, interrupts.reentrant_lock])
def test_no_interrupt_leaves_a_lock_taken(make: Callable[[], Any]) -> None:
    """Wherever it lands in ``with lock:``; CPython 3.14 looks for it just before the block, too."""

    class Interrupted(Exception):
        pass

    def take() -> None:
        while not ended:
            with lock:
                pass
            turns.add()

    def hold() -> None:
        while not ended:
            try:
                take()  # a call: CPython 3.13 has a loop's jump back outside of the `try` around it
            except Interrupted:
                caught.add()

    def wait_for(happens: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not happens():
            assert time.monotonic() < deadline
            time.sleep(0)

    lock, turns, caught = make(), Count(), Count()
    ended: list[bool] = []
    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    for number in range(60):
        before = turns.value
        wait_for(lambda: turns.value > before)  # noqa: B023
        assert thread.ident is not None
        interrupts.raise_in_thread(thread.ident, Interrupted)
        wait_for(lambda: caught.value > number)  # noqa: B023
    ended.append(True)
    thread.join(10)
    assert not thread.is_alive()
