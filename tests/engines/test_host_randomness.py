"""Python's and numpy's random numbers are each worker's own, and a program can be pickled."""

from __future__ import annotations

import pickle
import random
import sys
from random import gauss as bound_gauss
from random import random as bound_random
from random import seed as bound_seed
from typing import Any

import numpy as np
from numpy.random import normal as bound_normal
from numpy.random import seed as bound_numpy_seed
from numpy.random.mtrand import _rand as bound_state

from discolab.engines import ThreadedSession
from discolab.runtime import current_worker


def draws() -> tuple[Any, ...]:
    random.seed(7)
    np.random.seed(7)
    found = []
    for _ in range(200):  # long enough for the threads to change over
        found += [random.random(), float(np.random.rand()), int(np.random.sample() * 9)]
    order = list(range(20))
    random.shuffle(order)
    np.random.shuffle(order)
    return (*found, *order)


STATE = vars(random)["_inst"]


def bound_before(randint: Any = random.randint, state: Any = STATE) -> tuple[Any, ...]:
    """Draws by names that were bound before any session."""
    bound_seed(3)
    bound_numpy_seed(3)
    found: list[Any] = []
    for _ in range(200):
        found += [bound_random(), bound_gauss(0, 1), randint(0, 99), state.random()]
        found += [float(bound_normal()), float(bound_state.normal()), state.getrandbits(9)]
    saved = state.getstate()
    found += [random.random(), state.random(), len(saved)]
    state.setstate(saved)
    return (*found, random.random())


def alone(draws: Any = draws) -> tuple[Any, ...]:
    states = random.getstate(), np.random.get_state()
    try:
        return draws()
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def test_the_same_seed_gives_each_worker_the_same_numbers() -> None:
    want, before = alone(), (random.getstate(), np.random.get_state()[1].tolist())
    functions = random.random, np.random.rand, np.random.seed
    with ThreadedSession(4) as sess:
        assert sess.call_packed(draws).debug_get_from_all() == [want] * 4
        unseeded = sess.call_packed(lambda: (random.random(), np.random.rand()))
        assert len(set(unseeded.debug_get_from_all())) == 1  # they go on where the seed led
    with ThreadedSession(2) as sess:
        fresh = sess.call_packed(lambda: (random.random(), float(np.random.rand())))
        assert len(set(fresh.debug_get_from_all())) == 2
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert (random.random, np.random.rand, np.random.seed) == functions


def test_names_bound_before_the_first_session_draw_from_the_workers_state() -> None:
    want, before = alone(bound_before), (random.getstate(), np.random.get_state()[1].tolist())
    names = bound_random, bound_normal, bound_state, type(vars(random)["_inst"])
    with ThreadedSession(4) as sess:
        assert sess.call_packed(bound_before).debug_get_from_all() == [want] * 4
        assert bound_random is not names[0]
        assert alone(bound_before) == want  # the controller's are its own
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert (bound_random, bound_normal, bound_state, type(vars(random)["_inst"])) == names


PROGRAM = """
class Config:
    def __init__(self, lr):
        self.lr = lr
"""


def pickles() -> tuple[float, bool]:
    worker = current_worker()
    worker.namespace["__name__"] = "__main__"
    exec(PROGRAM, worker.namespace)
    mine = worker.namespace["Config"]
    back = pickle.loads(pickle.dumps(mine(worker.rank + 0.5)))
    return back.lr, type(back) is mine


def test_each_worker_draws_from_a_bit_generator_of_its_own() -> None:
    def drawn(number: int) -> tuple[float, str]:
        np.random.set_bit_generator(np.random.PCG64(number))
        value = float(np.random.rand())
        kind = type(np.random.get_bit_generator()).__name__
        np.random.set_bit_generator(np.random.MT19937(0))
        return value, kind

    expected = [drawn(0), drawn(1)]
    before = np.random.get_bit_generator()
    with ThreadedSession(2, devices="cpu") as sess:
        ref = sess.call_packed(lambda: drawn(current_worker().rank))
        assert ref.debug_get_from_all() == expected
        assert drawn(1) == expected[1]
        np.random.set_bit_generator(before)


def test_what_a_worker_defines_can_be_pickled_there() -> None:
    main = sys.modules["__main__"]
    kind = type(main)
    with ThreadedSession(3) as sess:
        assert sess.call_packed(pickles).debug_get_from_all() == [(r + 0.5, True) for r in range(3)]
        assert not hasattr(main, "Config")
    assert type(main) is kind
