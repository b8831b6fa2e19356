"""Programs made at random give the same when they are stepped as when they run freely.

To see one again: ``pytest tests/debugger/test_random_programs.py -k 'stepped and 17'``.
"""

import random

import pytest

from discolab.debugger import Debugger, Stop
from discolab.runtime.worker import current_worker

from .conftest import load
from .random_programs import make_program

_MOST = 120  # commands; then it goes on to its end


class Run:
    """Calls a program of random_programs.py."""

    def __init__(self, seed: int) -> None:
        self.program = load(make_program(seed), f"random_{seed}.py")

    def __call__(self) -> object:
        worker = current_worker()
        return self.program(worker.rank, worker.world_size)


def go_on(dbg: Debugger, choose: random.Random, stop: Stop) -> Stop:
    """A command at random."""
    kind = choose.choices(["next", "step", "out", "until", "some"], [4, 4, 1, 1, 1])[0]
    if kind == "some":
        standing = [worker.rank for worker in stop.workers if worker.state == "paused"]
        return dbg.next(ranks=choose.sample(standing, 1))
    return getattr(dbg, kind)()


@pytest.mark.parametrize("seed", range(200))
def test_stepped_to_its_end_it_gives_what_it_gives_running_freely(sess, dbg, seed):
    run, choose = Run(seed), random.Random(seed)
    free = sess.call_packed(run).debug_get_from_all()
    stop = dbg.run(run, file=f"random_{seed}.py")
    for _ in range(_MOST):
        if stop.finished:
            break
        dbg.lockstep.validate()
        stop = go_on(dbg, choose, stop)
    if not stop.finished:
        stop = dbg.continue_()
    assert stop.finished
    assert dbg.program.result().debug_get_from_all() == free


@pytest.mark.parametrize("seed", range(40))
def test_it_can_be_ended_at_any_stop(sess, dbg, seed):
    run, choose = Run(seed), random.Random(seed)
    stop = dbg.run(run, file=f"random_{seed}.py")
    for _ in range(choose.randint(0, 30)):
        if stop.finished:
            break
        stop = go_on(dbg, choose, stop)
    assert dbg.abort() == []
    assert not dbg.is_active
    ranks = sess.call_packed(_rank).debug_get_from_all()
    assert ranks == [0, 1, 2, 3]


def _rank() -> int:
    return current_worker().rank
