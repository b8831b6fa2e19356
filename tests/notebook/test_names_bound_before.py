"""Names that a notebook has bound before `%load_ext discolab` draw from each worker's own state."""

from __future__ import annotations

from .conftest import Kernel

BOUND = """
from random import gauss, random as uniform, seed, shuffle
from numpy.random import default_rng, rand, seed as numpy_seed
from torch import manual_seed, randn, randperm
from torch.nn.functional import dropout
import torch

def draws():
    manual_seed(5), seed(5), numpy_seed(5)
    found = []
    for _ in range(100):  # long enough for the threads to change over
        order = list(range(9))
        shuffle(order)
        found += [*order, uniform(), gauss(0, 1), float(rand()), randn(2).tolist()]
        found += [randperm(5).tolist(), dropout(torch.ones(9)).tolist()]
    return found

alone, then = draws(), [uniform(), float(rand()), randn(1).item()]
"""


def test_two_workers_with_one_seed_draw_what_a_process_draws(engine: str) -> None:
    notebook = Kernel()
    try:
        notebook.ok(BOUND)
        nodes = " --nodes local:2" if engine == "sockets" else ""
        start = f"%disco_session 2 --engine {engine}{nodes} --devices cpu"
        notebook.ok(f"%load_ext discolab\n{start}")
        notebook.ok("draws()")  # the notebook's own state is not the workers'
        same = "[found == alone for found in sess.call_packed(draws).debug_get_from_all()]"
        assert notebook.ok(same).text == "[True, True]"
        assert notebook.ok("[uniform(), float(rand()), randn(1).item()] == then").text == "True"
        notebook.ok("%disco_push draws alone")
        assert notebook.ok("%%disco\ndraws() == alone").text == "DRef: True on all 2 workers"
    finally:
        notebook.close()
