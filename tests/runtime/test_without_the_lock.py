"""What several threads do at once to one structure. Without the interpreter lock each step meets.

Where two steps must be one, another thread is let in between them: so that is tested with the
lock, too. The others prove little with it: they are for free-threaded Pythons.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest

from discolab.engines.output import OutputBuffer
from discolab.isolation.turns import Exclusive, _Holder
from discolab.rpc.outcome import Outcome
from discolab.runtime import interpreter_lock
from discolab.runtime.channel import Ticket
from discolab.runtime.controller import _every
from discolab.runtime.frames import places_of
from discolab.runtime.interpreter_lock import copied
from discolab.runtime.registers import RegisterFile

THREADS = 4


def at_once(*functions: Callable[[], object]) -> None:
    """Call each on a thread of its own, at the same moment; raises what one of them raises."""
    ready, errors = threading.Barrier(len(functions)), list[BaseException]()

    def run(function: Callable[[], object]) -> None:
        ready.wait()
        try:
            function()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_a_deque_is_copied_while_others_add_to_it() -> None:
    items, end = deque[int](maxlen=200), time.monotonic() + 0.3

    def add() -> None:
        while time.monotonic() < end:
            items.extend((1, 2))
            items.append(3)

    def look() -> None:
        while time.monotonic() < end:
            assert len(copied(items)) <= 200

    at_once(add, look, add)


def between(function: Callable[..., object], text: str, other: Callable[[], object]) -> Any:
    """Have another thread do something as this one comes to the line of `function` with `text`.

    As it may without the interpreter lock at any line. Who waits for a lock that this thread holds
    is not waited for.
    """
    lines, first = inspect.getsourcelines(function)
    place = first + next(n for n, line in enumerate(lines) if text in line)
    thread = threading.Thread(target=other)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not function.__code__:
            return None
        if event == "line" and frame.f_lineno == place and not thread.ident:
            thread.start()
            thread.join(0.3)
        return trace

    @contextmanager
    def traced() -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)
            assert thread.ident, f"no line with {text}"
            thread.join()

    return traced()


def test_an_outcome_is_settled_once() -> None:
    one, heard, error = Outcome(), list[object](), ValueError()
    one.follow(lambda it: heard.append((it.value, it.error)))
    with between(Outcome.settle, "self.value, self.error =", lambda: one.settle(None, error)):
        one.settle(1)
    assert heard == [(1, None)]
    assert (one.value, one.error) == (1, None)


def test_what_is_written_while_all_is_taken_is_taken_next() -> None:
    told, taken = list[int](), list[object]()
    buffer = OutputBuffer(lambda: told.append(1))
    buffer.add(("stdout", "a"))
    with between(OutputBuffer.add, "append(item)", lambda: taken.extend(buffer.take())):
        buffer.add(("stdout", "b"))
    assert taken == [("stdout", "a")]
    assert buffer.take() == [("stdout", "b")]
    assert len(told) == 2


def test_who_writes_first_tells_it_if_two_do() -> None:
    told = list[int]()
    buffer = OutputBuffer(lambda: told.append(1))
    with between(OutputBuffer.add, "if ", lambda: buffer.add(("stdout", "b"))):
        buffer.add(("stdout", "a"))
    assert told
    assert len(buffer.items) == 2


def test_who_was_thrown_out_is_so_once() -> None:
    exclusive = Exclusive("do a thing")
    gone = exclusive._holder = _Holder(0, None, 0)
    exclusive._lock.acquire()
    other = list[bool]()

    def throw_out_and_enter() -> None:
        exclusive._release(gone)
        exclusive.enter("it")
        other.append(True)

    with between(Exclusive._release, "self._holder = None", throw_out_and_enter):
        exclusive._release(gone)
    assert other
    assert exclusive._holder is not None
    assert exclusive._lock.locked()


def test_the_last_reply_wakes_who_asked() -> None:
    for _ in range(100):
        ticket = Ticket(range(THREADS), "an answer")
        at_once(*[partial(ticket.deliver, rank, rank) for rank in range(THREADS)])
        assert ticket.acquire(0)


def test_one_in_so_many_calls_is_told() -> None:
    due, found = _every(8), list[int]()
    at_once(*[lambda: found.append(sum(due() for _ in range(8000)))] * THREADS)
    assert sum(found) == THREADS * 1000


class Ref:
    """Stands for a DRef."""


def test_registers_come_back_from_all_threads() -> None:
    registers, lock, forgotten = RegisterFile(), threading.Lock(), list[int]()

    def use() -> None:
        for _ in range(2000):
            with lock:
                if len(registers.dropped) > 1:
                    registers.collect(forgotten.extend)
                number, ref = registers.take(), Ref()
                registers.hold(number, ref)
            del ref

    at_once(*[use] * THREADS)
    registers.collect(forgotten.extend)
    registers.validate()
    assert registers.live == 0


# -- where a thread stands -------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["lock", "no-lock"])
def looking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is done with the lock, where there is one, and without."""
    if request.param and not interpreter_lock.is_on():
        pytest.skip("needs the interpreter lock")
    monkeypatch.setattr(interpreter_lock, "is_on", lambda: request.param)


@pytest.mark.usefixtures("looking")
def test_where_a_thread_stands() -> None:
    go = threading.Event()

    def wartet_über_nacht() -> None:
        go.wait()

    thread = threading.Thread(target=wartet_über_nacht)
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            found = {place.function: place for place in places_of(thread.ident or 0)}
            if "wait" in found:
                break
        own = found["wartet_über_nacht"]
        assert own.file == __file__
        assert own.line == wartet_über_nacht.__code__.co_firstlineno + 1
        assert list(found)[-1] in ("_bootstrap", "_run_old_run_func", "run")
    finally:
        go.set()
        thread.join()
    assert places_of(thread.ident or 0) == []


@pytest.mark.usefixtures("looking")
def test_frames_that_come_and_go_are_looked_at() -> None:
    end = time.monotonic() + 0.5

    def nest(depth: int) -> int:
        return depth and nest(depth - 1)

    def work() -> None:
        while time.monotonic() < end:
            nest(20)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        for thread in threads:
            assert all(place.line >= 0 for place in places_of(thread.ident or 0))
    for thread in threads:
        thread.join()
