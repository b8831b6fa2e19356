"""Ctrl-C at any moment of a broadcast: no worker misses a command, and none is counted twice."""

from collections.abc import Callable

import pytest

from discolab.runtime import Worker, probe
from tests.alone import output_of
from tests.selection import slow


@probe
def holds(worker: Worker) -> tuple[int, list[int]]:
    """How many calls a worker has executed, and its registers."""
    return worker.executed, sorted(worker.registers)


_PROGRAM = """
import random, signal, threading, time
import discolab
from discolab.runtime.worker import current_worker
from tests.runtime.test_broadcast import holds

main = threading.main_thread().ident

def press():
    while True:
        armed.wait()
        time.sleep(draw.random() * 0.001)
        armed.clear()
        signal.pthread_kill(main, signal.SIGINT)

def count(by):
    worker = current_worker()
    worker.namespace["count"] = worker.namespace.get("count", 0) + by

def fetch():
    return current_worker().namespace["count"]

draw = random.Random(8)
armed = threading.Event()
threading.Thread(target=press, daemon=True).start()
came = 0
with discolab.make_session(3, "ENGINE", devices="cpu") as sess:
    book = sess.track_registers()
    sess["x"] = 1
    sess.sync_all()
    before = [held for _, held in sess.look(holds, timeout=20).values()]
    for _ in range(ROUNDS):
        for _ in range(50):
            kept = []
            try:
                armed.set()
                until = time.monotonic() + 1
                while True:
                    if time.monotonic() > until:  # Python may lose one in a finalizer
                        until += 1
                        armed.set()
                    kept.append(sess.call_packed(count, 1))
                    sess.call_without_result(count, 1)
                    sess["x"] = 2
                    del kept[:-2]
            except KeyboardInterrupt:
                came += 1
            sess.sync_all()  # a call that waits for room in a queue would interrupt the workers
            del kept
        last = sess.call_packed(fetch)
        values = last.debug_get_from_all()
        assert len(set(values)) == 1, values
        assert book[last.reg_id][4] == sess.calls_sent
        looked = sess.look(holds, timeout=20)
        assert [calls for calls, _ in looked.values()] == [sess.calls_sent] * 3, looked
        del last
    sess._registers.validate()
    sess.forget_dropped()
    sess.forget_dropped()
    sess.sync_all()
    after = [held for _, held in sess.look(holds, timeout=20).values()]
    assert after == before, (after, before, sess._registers.__dict__)
print("well", came)
"""


@pytest.mark.parametrize(("kind", "rounds"), [("threads", 30), slow("processes", 8)])
def test_ctrl_c_comes_before_a_broadcast_or_after_it(
    kind: str, rounds: int, how_many: Callable[..., int]
) -> None:
    rounds = how_many(rounds, often=4)
    program = _PROGRAM.replace("ENGINE", kind).replace("ROUNDS", str(rounds))
    last = output_of(program, 120).splitlines()[-1].split()
    assert last[0] == "well"
    assert int(last[1]) == rounds * 50
