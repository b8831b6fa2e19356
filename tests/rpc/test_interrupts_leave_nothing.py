"""An interrupt may land anywhere in a call: no call, no reference and no thread is lost by it."""

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import Session, SessionError, WorkerError
from discolab import rpc as module
from discolab.rpc.node import Node
from tests.alone import output_of
from tests.rpc import functions, graphs
from tests.rpc.conftest import counts
from tests.rpc.functions import eventually
from tests.selection import slow

ROUNDS = 40


def nothing_left(sess: Session) -> None:
    """Wait until nobody has a call under way, a value or a reference; nobody collects garbage."""
    names = ("calls_running", "calls_waiting", "values_owned", "references_held")

    def left() -> dict[str, tuple[int, ...]]:
        of_ranks = [counts(sess, *names, ranks=[rank]) for rank in range(-1, sess.num_workers)]
        by_name = dict(zip(names, zip(*of_ranks, strict=True), strict=True))
        return {name: numbers for name, numbers in by_name.items() if any(numbers)}

    try:
        eventually(lambda: not left())
    except AssertionError:
        assert not left(), "by name, of the controller and of each rank"


def pass_on(tag: str) -> Any:
    """A reference to a value of another worker, sent there and back for ever."""
    ref = module.remote(2, functions.counted, (tag, 0))
    yield
    while True:
        ref = module.rpc_sync(2, functions.same, (ref,))


def own_and_pass_on(tag: str) -> Any:
    ref = module.RRef(tag)
    yield
    while True:
        module.rpc_sync(2, functions.same, ([ref],))


def make(tag: str) -> Any:
    yield
    while True:
        module.remote(2, functions.counted, (tag, 0))


def fetch(tag: str) -> Any:
    ref = module.remote(2, functions.counted, (tag, 0))
    yield
    while True:
        ref.to_here()


@pytest.mark.parametrize("what", [pass_on, own_and_pass_on, make, fetch])
def test_a_callee_that_is_ended(sess: Session, tag: str, what: Any) -> None:
    draw = random.Random(8)
    for _ in range(ROUNDS):
        items = sess.rpc.stream(3, what, (tag,))
        next(items)
        time.sleep(draw.random() * 0.003)
        items.close()
    del items
    forget_the_last_failure(sess)
    nothing_left(sess)


def everything(tag: str) -> None:
    """A command that never ends, with calls under way, references made and sent."""
    me = functions.my_rank()
    kept: list[Any] = []
    while True:
        for to in range(4):
            kept += [module.remote(to, functions.counted, (tag, to)), module.RRef(me)]
            module.rpc_async((to + 1) % 4, functions.same, (kept[-2:],))
        module.rpc_sync((me + 1) % 4, functions.same, (kept[-2:],))
        del kept[:-2]


def test_commands_that_are_interrupted(sess: Session, tag: str) -> None:
    draw = random.Random(8)
    for _ in range(ROUNDS // 2):
        called = sess.call_packed(everything, tag)
        time.sleep(draw.random() * 0.02)
        assert sess.interrupt(20) == []
        with pytest.raises((WorkerError, SessionError), match=r"[Ii]nterrupted|cancelled"):
            called.debug_get_from_all()
        del called
    forget_the_last_failure(sess)
    nothing_left(sess)


def test_one_just_before_a_call_begins_leaves_nothing_for_the_collector(
    sess: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its future follows the call by then, which makes a cycle of both."""
    here, now = threading.get_ident(), Node.now

    def interrupted(node: Node) -> float:
        if threading.get_ident() == here:
            raise KeyboardInterrupt
        return now(node)

    given = torch.ones(3)
    held = weakref.ref(given)
    monkeypatch.setattr(Node, "now", interrupted)
    gc.disable()
    try:
        try:
            sess.rpc.rpc_async(1, functions.same, (given,), timeout=20)
        except KeyboardInterrupt:
            del given
        assert held() is None  # and nothing is raised any more, which would hold it
    finally:
        gc.enable()


def wait_in_a_context(file: str) -> None:
    me = functions.my_rank()
    others = [rank for rank in range(4) if rank != me]
    with module.autograd.context():
        x = torch.ones(2, requires_grad=True)
        for rank in others:
            module.rpc_sync(rank, functions.same, (x,))
        functions.touch(f"{file}{me}")
        module.rpc_sync(others[0], functions.sleep, (1000, f"{file}-{me}"))


def test_a_context_that_is_left_by_an_interrupt_ends_everywhere(
    sess: Session, tmp_path: Path
) -> None:
    file = str(tmp_path / "at")
    called = sess.call_packed(wait_in_a_context, file)
    for rank in range(4):
        assert functions.await_file(f"{file}{rank}")
    assert sess.interrupt(20) == []
    with pytest.raises((WorkerError, SessionError), match=r"[Ii]nterrupted|cancelled"):
        called.debug_get_from_all()
    for rank in range(4):
        eventually(lambda rank=rank: sess.rpc.rpc_sync(rank, graphs.contexts_here) == 0)


def forget_the_last_failure(sess: Session) -> None:
    """What the interrupted had in their variables is kept for a look at it, till the next one."""
    for _ in range(2):
        with pytest.raises(WorkerError, match="ZeroDivisionError"):
            sess.call_packed(divide).debug_get_from_all()
        for rank in range(4):
            with pytest.raises(WorkerError, match="ZeroDivisionError"):
                sess.rpc.rpc_sync(rank, divide)


def divide() -> float:
    return 1 / 0


_CTRL_C = """
import os, random, signal, threading, time
import discolab
from tests.rpc import functions

def press(after):
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGINT)

def left(sess):
    names = ("calls_running", "calls_waiting", "values_owned", "references_held")
    infos = [sess.rpc.debug_info(rank) for rank in (None, 0, 1, 2)]
    return sum(info[name] for info in infos for name in names)

draw = random.Random(8)
for _ in range(SESSIONS):
    with discolab.make_session(3, "ENGINE", devices="cpu") as sess:
        sess.import_python_module("tests.rpc.functions")
        for _ in range(PRESSES):
            try:
                threading.Thread(target=press, args=(draw.random() * 0.004,)).start()
                while True:
                    sess.rpc.rpc_sync(1, functions.same, (1,))
                    ref = sess.rpc.remote(2, functions.same, (2,))
                    sess.rpc.rpc_sync(1, functions.same, (ref,))
                    sess.rpc.rpc_async(2, functions.same, (ref,))
            except KeyboardInterrupt:
                pass
        ref = None
        until = time.monotonic() + 20
        while left(sess):
            assert time.monotonic() < until, [sess.rpc.debug_info(r) for r in (None, 0, 1, 2)]
            time.sleep(0.02)
print("well")
"""


@pytest.mark.parametrize("kind", ["threads", slow("processes")])
def test_ctrl_c_on_the_controller(kind: str, how_many: Callable[..., int]) -> None:
    """Of few sessions with many, and of those that are hit as their first call opens the routes."""
    program = _CTRL_C.replace("ENGINE", kind)
    few = program.replace("SESSIONS", "1").replace("PRESSES", str(how_many(300, often=60)))
    assert output_of(few, 120).endswith("well\n")
    many = program.replace("SESSIONS", "4").replace("PRESSES", "1")
    assert output_of(many, 120).endswith("well\n")
