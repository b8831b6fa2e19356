"""A worker starts with random states of its own, as a new process does.

torch, Python and numpy seed a new process from the operating system: two ranks that set no seed
draw different numbers. A forked process has the states of the one that it was forked from.
"""

from __future__ import annotations

import random

import numpy.random
import torch

from ..runtime import accelerators
from ..runtime.worker import Worker, current_worker_or_none
from . import table
from .table import Row, Treatment
from .torch_random import shares_gpu


def fresh_random_state() -> None:
    """Begin new random states, of the calling worker or else of this process."""
    torch.default_generator.seed()
    random.seed()
    numpy.random.seed()
    worker = current_worker_or_none()
    kind = accelerators.kind() if worker is None else worker.device.type
    shared = worker is not None and shares_gpu(worker)
    if kind is not None and not shared and accelerators.in_use(device := torch.device(kind)):
        accelerators.module_of(device).seed()


def _enter(worker: Worker) -> None:
    if type(torch.default_generator) is torch.Generator:  # the worker has the process for itself
        worker.generator = torch.default_generator
        random.seed()
        numpy.random.seed()
    worker.generator.seed()


table.add(
    Row(
        state="where random numbers begin",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker, and each script that it runs, begins with states of torch, `random` "
        "and `numpy.random` that nobody else has, as a new process does.",
        test="tests/engines/test_fresh_random.py::"
        "test_no_two_workers_draw_the_same_before_they_are_seeded",
        enter=_enter,
        in_own_process=True,
        library="Python",
    )
)
