"""An interrupt leaves no lock taken: of `logging`, of a queue, of `warnings`, of a progress bar."""

import contextlib
import logging
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import tqdm

from discolab import ThreadedSession, current_worker
from discolab.runtime.interrupts import CHOOSY
from discolab.runtime.landings import give_back_locks

LOG = logging.getLogger("tests.interrupted_locks")
QUEUE: queue.Queue[int] = queue.Queue(10)
LOCK, REENTRANT = threading.Lock(), threading.RLock()
CONDITION = threading.Condition(LOCK)
NO_GRAD = "torch.autograd.grad_mode"


def write() -> None:
    LOG.warning("a step")


def name_loggers() -> None:
    for number in range(10):
        logging.getLogger(f"tests.interrupted_locks.{number}")


def set_levels() -> None:
    logging.getLogger("tests.interrupted_locks.level").setLevel(10)


def put_and_get() -> None:
    try:
        QUEUE.put_nowait(1)
        QUEUE.get_nowait()
    except (queue.Full, queue.Empty):
        pass


def catch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")


def show_progress() -> None:
    with tqdm.tqdm.get_lock():
        pass


def take() -> None:
    with LOCK:
        pass


def take_twice() -> None:
    with REENTRANT, REENTRANT:
        pass


def enumerate_threads() -> None:
    threading.enumerate()


def without_gradients() -> None:
    assert torch.is_grad_enabled()
    with torch.no_grad():
        pass


ALL = [
    write,
    name_loggers,
    set_levels,
    put_and_get,
    catch,
    show_progress,
    take,
    take_twice,
    enumerate_threads,
    without_gradients,
]


@pytest.fixture(autouse=True)
def to_nowhere() -> Iterator[None]:
    with open(os.devnull, "w") as file:
        handler = logging.StreamHandler(file)
        LOG.addHandler(handler)
        LOG.propagate = False
        yield
        LOG.removeHandler(handler)


def looped(step: Callable[[], None]) -> Callable[[], None]:
    def loop() -> None:
        while True:
            step()

    return loop


@pytest.mark.one_process
@pytest.mark.parametrize("step", ALL)
def test_what_workers_took_is_free_after_an_interrupt(
    pair: ThreadedSession, step: Callable[[], None]
) -> None:
    for _ in range(5):
        pair.call_packed(looped(step))
        time.sleep(0.01)
        assert pair.interrupt(timeout=20) == []
        pair.call_packed(step).debug_get_from_all()
        step()


@pytest.mark.one_process
def test_a_loop_that_trains_and_logs(pair: ThreadedSession) -> None:
    """It was left with a lock of `logging` taken in one of some twenty interrupts."""

    def train() -> None:
        layer = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        while True:
            optimizer.zero_grad()
            layer(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            write()

    for number in range(40):
        pair.call_packed(train)
        time.sleep(0.002 * (number % 5))
        assert pair.interrupt(timeout=20) == []
        pair.call_packed(write).debug_get_from_all()


@pytest.mark.parametrize("outer", [True, False])
def test_wherever_a_step_is_torn_gradients_are_as_before_it(outer: bool) -> None:
    """It turns them off, and at its end, which may be torn too, on again."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    left, torn = 0, 0

    def tear(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_name != "_use_grad" and frame.f_globals["__name__"] != NO_GRAD:
            return None
        left -= 1
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return tear

    def step() -> None:
        with contextlib.nullcontext() if outer else torch.no_grad():
            sys.settrace(tear)
            try:
                optimizer.step()
            finally:
                sys.settrace(None)

    before = sys.gettrace()
    try:
        while torn == 0 or left < 0:
            left = torn
            try:
                step()
            except KeyboardInterrupt as exc:
                give_back_locks(exc)
                assert torch.is_grad_enabled(), torn
            torn += 1
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(True)
    assert torn > 10


def take_by_hand() -> None:
    LOCK.acquire()
    try:
        pass
    finally:
        LOCK.release()


def take_by_condition() -> None:
    with CONDITION:
        pass


@pytest.mark.one_process
@pytest.mark.parametrize("step", [take, take_by_hand, take_by_condition, take_twice])
def test_an_interrupt_of_one_that_waits_for_a_lock(
    pair: ThreadedSession, step: Callable[[], None]
) -> None:
    """It lands as the lock is got at last."""
    stuck: list[list[int]] = []
    with LOCK, REENTRANT:
        pair.call_packed(step)
        deadline = time.monotonic() + 20
        while {status.state for status in pair.status()} != {"running"}:
            assert time.monotonic() < deadline, pair.status()
            time.sleep(0.002)
        thread = threading.Thread(target=lambda: stuck.append(pair.interrupt(timeout=20)))
        thread.start()
        time.sleep(CHOOSY + 0.5)
        assert not stuck
    thread.join(20)
    assert stuck == [[]]
    for lock in (LOCK, REENTRANT):
        assert lock.acquire(timeout=10)
        lock.release()
    pair.call_packed(step).debug_get_from_all()


@pytest.mark.one_process
def test_a_lock_that_somebody_else_holds_stays_theirs(pair: ThreadedSession) -> None:
    with REENTRANT, QUEUE.mutex:
        pair.call_packed(looped(lambda: current_worker().rank and None))
        time.sleep(0.01)
        assert pair.interrupt(timeout=20) == []
        assert QUEUE.mutex.locked()
        assert REENTRANT._is_owned()  # type: ignore[attr-defined]
