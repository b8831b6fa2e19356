"""Ctrl-C that is held back for a moment."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from discolab.runtime import ctrl_c


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def pressed_within(done: list[int]) -> None:
    with ctrl_c.held_back():
        press()
        press()
        with ctrl_c.held_back():
            done.append(1)
        done.append(2)


def test_it_comes_after() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        pressed_within(done)
    assert done == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def fails_within(presses: int) -> None:
    with ctrl_c.held_back():
        for _ in range(presses):
            press()
        raise ValueError("ours")


def test_after_an_error_it_comes_too() -> None:
    with pytest.raises(KeyboardInterrupt) as info:
        fails_within(1)
    assert isinstance(info.value.__context__, ValueError)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def test_where_none_comes_nothing_is_changed() -> None:
    with pytest.raises(ValueError, match="ours"):
        fails_within(0)
    threading.Timer(0.1, press).start()
    with pytest.raises(KeyboardInterrupt):
        sleep(20)


def test_what_hangs_within_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctrl_c, "HOLD_BACK", 0.1)
    begin = time.monotonic()
    threading.Timer(0.3, press).start()
    with pytest.raises(KeyboardInterrupt), ctrl_c.held_back():
        sleep(20)
    assert time.monotonic() - begin < 10


def test_one_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ctrl_c.held_back():
        press()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_who_sets_another_handler_within_keeps_it() -> None:
    seen = []
    with ctrl_c.held_back():
        signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    press()
    assert seen == [1]


def test_other_threads_hold_nothing_back() -> None:
    found = []

    def on_thread() -> None:
        with ctrl_c.held_back():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=on_thread)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
