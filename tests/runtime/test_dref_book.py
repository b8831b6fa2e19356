"""The book of live DRefs, and DRefs that are freed before they die."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from discolab import ArgumentError, DRef, Session, SessionClosedError, WorkerError, current_worker
from discolab.runtime.registers import DRefBook


def ids(book: DRefBook) -> list[int]:
    return [reg_id for reg_id, _, _ in book.alive()]


def registers() -> list[int]:
    return sorted(current_worker().registers)


def linger(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.one_process
def test_it_knows_what_lives_and_where_it_was_made(pair: Session) -> None:
    before = pair.call_packed(int, 1)
    book = pair.track_registers()
    assert pair.track_registers() is book
    book.cell = 7
    x = pair.call_packed(int, 2)
    y = x + 1
    ((_, ref, entry), (_, other, _)) = book.alive()
    assert (ref, other) == (x, y) or [ref, other][0] is x
    assert other is y
    code, line = entry[1] or (None, 0)
    assert code is test_it_knows_what_lives_and_where_it_was_made.__code__
    assert line == code.co_firstlineno + 6
    assert entry[3] == 7
    assert entry[2] <= time.monotonic()
    assert before.reg_id not in ids(book)  # made before the book was opened


@pytest.mark.one_process
def test_what_has_died_is_gone_and_its_id_means_the_next_one(pair: Session) -> None:
    book = pair.track_registers()
    x = pair.call_packed(int, 1)
    reg_id, made = x.reg_id, book[x.reg_id]
    del x
    assert ids(book) == []
    y = pair.call_packed(int, 2)
    assert y.reg_id == reg_id
    assert ids(book) == [reg_id]
    assert book[reg_id] is not made
    assert next(book.alive())[1] is y


@pytest.mark.one_process
def test_functions_and_modules_are_in_it_too(pair: Session) -> None:
    book = pair.track_registers()
    func = pair.get_global_func("runtime.disco.empty")
    module = pair.load_module("math")
    root = module["sqrt"]
    assert {type(ref).__name__ for _, ref, _ in book.alive()} == {"DPackedFunc", "DModule"}
    assert {ref.reg_id for ref in (func, module, root)} == set(ids(book))
    held = {int(reg) for reg in pair._functions.values()}
    assert held.isdisjoint(ids(book))  # the session's own


@pytest.mark.one_process
def test_a_worker_that_has_run_so_many_calls_has_the_value(pair: Session) -> None:
    book = pair.track_registers()
    pair.get_global_func("runtime.disco.empty")  # commands that are no calls
    pair.empty((2,), "float32")
    pair.copy_to_worker_0(torch.ones(2))
    pair.call_packed(linger, 30.0)
    pair.interrupt()
    x = pair.call_packed(int, 3)
    pair.sync_all()
    executed = [worker.executed for worker in pair.workers_here().values()]
    assert executed == [book[x.reg_id][4]] * 2


@pytest.mark.one_process
def test_a_session_keeps_no_book_unasked(pair: Session) -> None:
    x = pair.call_packed(int, 1)
    assert pair._book is None
    del x


def test_a_value_is_freed_while_names_hold_its_dref(pair: Session) -> None:
    pair.track_registers()
    kept = pair.call_packed(torch.ones, 3)
    x = pair.call_packed(torch.zeros, 4)
    y = x + 1
    reg_id = x.reg_id
    pair.free(x)
    with pytest.raises(ArgumentError, match=f"register {reg_id}, was freed on all workers"):
        x + kept
    assert torch.equal(y.debug_get_from_remote(1), torch.ones(4))  # it was computed before
    assert torch.equal(kept.debug_get_from_remote(0), torch.ones(3))
    assert repr(x) == f"<DRef r{reg_id}, freed>"
    assert reg_id not in ids(pair.track_registers())
    pair.sync_all()  # nobody is told of an error


USES: list[Callable[[Session, Any], Any]] = [
    lambda sess, ref: ref.debug_get_from_all(),
    lambda sess, ref: ref.debug_copy_from(0, 1),
    lambda sess, ref: sess.call_packed(int, [{"deep": ref}]),
    lambda sess, ref: sess.call_packed(ref),
    lambda sess, ref: sess.push({"name": ref}),
    lambda sess, ref: sess.copy_to_worker_0(torch.ones(1), ref),
    lambda sess, ref: sess.free(ref),
    lambda sess, ref: torch.relu(ref),
    lambda sess, ref: ref[0],
    lambda sess, ref: ref(),
    lambda sess, ref: ref.reg_id,
]


@pytest.mark.one_process
@pytest.mark.parametrize("use", USES)
def test_each_use_of_what_was_freed_is_one_clear_error(
    pair: Session, use: Callable[[Session, Any], Any]
) -> None:
    for x in (pair.call_packed(torch.zeros, 1), pair.get_global_func("runtime.disco.empty")):
        pair.free(x)
        with pytest.raises(ArgumentError, match="was freed on all workers: its value is gone"):
            use(pair, x)
        assert "reg_id" not in dir(x)  # completion looks at what there is


@pytest.mark.one_process
def test_the_value_goes_at_once_and_the_id_with_the_dref(pair: Session) -> None:
    x = pair.call_packed(torch.zeros, 1000)
    reg_id = x.reg_id
    worker = pair.workers_here()[0]
    pair.free(x)
    pair.sync_all()
    assert not isinstance(worker.registers[reg_id], torch.Tensor)
    y = pair.call_packed(int, 1)
    assert y.reg_id != reg_id  # its DRef lives: the id is not given to another
    del x
    gc.collect()
    pair._registers.validate()
    z = pair.call_packed(int, 2)
    assert z.reg_id == reg_id
    assert z.debug_get_from_all() == [2, 2]


@pytest.mark.one_process
def test_a_call_on_its_way_meets_the_failure_not_another_value(pair: Session) -> None:
    x = pair.call_packed(int, 1)
    command = pair._encode_call(int, (x,), {})  # another thread's call, just before its turn
    pair.free(x)
    with pair._lock:
        y = DRef(pair._next_register(), pair)
        pair._broadcast((3, y.reg_id, *command))
    with pytest.raises(WorkerError, match="was freed on all workers"):
        y.debug_get_from_all()


@pytest.mark.one_process
def test_a_call_without_a_result_on_its_way_is_told_by_a_sync(pair: Session) -> None:
    x = pair.call_packed(int, 1)
    command = pair._encode_call(int, (x,), {})
    pair.free(x)
    with pair._lock:
        pair._broadcast((3, 0, *command))
    with pytest.raises(WorkerError, match="was freed on all workers"):
        pair.sync_all()


@pytest.mark.one_process
def test_freeing_does_not_wait_for_busy_workers(pair: Session) -> None:
    x = pair.call_packed(torch.zeros, 10)
    pair.sync_all()
    slow = pair.call_packed(linger, 30.0)
    while any(status.state == "idle" for status in pair.status()):
        time.sleep(0.01)
    pair.free(x)
    assert all(slow.reg_id not in worker.registers for worker in pair.workers_here().values())
    pair.interrupt()
    assert pair.call_packed(int, 5).debug_get_from_all() == [5, 5]


@pytest.mark.one_process
def test_what_can_not_be_freed(pair: Session) -> None:
    with pytest.raises(ArgumentError, match="a DRef is needed, got a int"):
        pair.free(3)  # type: ignore[arg-type]
    x = pair.call_packed(int, 1)
    pair.shutdown()
    with pytest.raises(SessionClosedError):
        pair.free(x)
    assert type(x) is DRef
