"""What an interrupt does to a worker within `held_back`."""

import threading
from collections.abc import Callable

import pytest

from discolab import WaitTimeoutError
from discolab.runtime.errors import WorkerInterrupted
from discolab.runtime.interruptible import Interruptible


def begun() -> Interruptible:
    """As what runs a command on this thread."""
    me = Interruptible()
    me.thread_id = threading.get_ident()
    me.running = True
    return me


def on_another_thread(func: Callable[[], object]) -> None:
    thread = threading.Thread(target=func)
    thread.start()
    thread.join()


def loop(times: int = 1000) -> int:
    """Python code in which an exception would come."""
    return sum(number for number in range(times))


def within(me: Interruptible, done: list[str], in_any_case: bool, interrupt: bool) -> None:
    with me.held_back(in_any_case=in_any_case):
        if interrupt:
            on_another_thread(me.interrupt)
        loop()
        with me.held_back(in_any_case=in_any_case):
            done.append("inner")
        done.append("outer")


@pytest.mark.parametrize("in_any_case", [False, True])
def test_one_that_comes_within_raises_after(in_any_case: bool) -> None:
    me, done = begun(), list[str]()
    with pytest.raises(WorkerInterrupted):
        within(me, done, in_any_case, interrupt=True)
    assert done == ["inner", "outer"]


def wait(me: Interruptible) -> None:
    me.wait_for(lambda: False, "nothing", 20)


def test_what_cleans_up_after_an_interrupt_is_done_and_does_not_raise() -> None:
    """In any case: three steps after a wait that was interrupted."""
    me, done = begun(), list[str]()
    on_another_thread(me.announce_interrupt)
    with pytest.raises(WorkerInterrupted, match="waiting for nothing"):
        wait(me)
    for _ in range(3):
        within(me, done, in_any_case=True, interrupt=False)
    assert done == ["inner", "outer"] * 3
    with pytest.raises(WorkerInterrupted):
        within(me, done, in_any_case=True, interrupt=True)  # once more, as it goes on


def test_what_begins_after_an_interrupt_is_not_done_but_in_any_case() -> None:
    me, done = begun(), list[str]()
    me.running = False  # so that it is noted, and comes at no line of this test
    on_another_thread(me.interrupt)
    me.running = True
    with pytest.raises(WorkerInterrupted):
        within(me, done, in_any_case=True, interrupt=False)
    assert done == ["inner", "outer"]
    with pytest.raises(WorkerInterrupted):
        within(me, done, in_any_case=False, interrupt=False)


def test_waits_within_raise_at_once() -> None:
    me = begun()
    with pytest.raises(WaitTimeoutError), me.held_back(in_any_case=True):
        me.wait_for(lambda: False, "nothing", 0.01)
    on_another_thread(me.announce_interrupt)
    with (
        pytest.raises(WorkerInterrupted, match="waiting for nothing"),
        me.held_back(in_any_case=True),
    ):
        wait(me)
