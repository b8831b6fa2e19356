"""Workers that fork at once, and while others hold locks of torch."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from discolab import ThreadedSession, ccl, current_worker
from discolab.isolation import waits
from discolab.isolation.patches import Patches
from discolab.isolation.worker_local import own_variables

FORKING: list[int] = []  # threads, as each begins to fork and when it has
WATCHED: list[bool] = []  # whether the fork of a test is on its way


def note_thread() -> None:
    if WATCHED:
        FORKING.append(threading.get_ident())
        time.sleep(0.1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_fork_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs before a fork and after it, such as `filelock`'s, is written for one at a time."""

    def fork() -> None:
        ccl.barrier()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0) == (pid, 0)

    monkeypatch.setattr(waits, "_FORK_WITHIN", 0.45)  # for one fork; the last waits for three
    os.register_at_fork(before=note_thread, after_in_parent=note_thread)
    with ThreadedSession(4, devices="cpu") as sess:
        WATCHED.append(True)
        try:
            sess.call_packed(fork).debug_get_from_all()
        finally:
            WATCHED.clear()
    assert len(FORKING) == 8
    assert FORKING[::2] == FORKING[1::2]


def set_up(library: str, rank: int) -> Callable[[], Any]:
    """Set something of a library, each rank its own; gives what looks at it back."""
    if library == "calendar":
        import calendar

        calendar.setfirstweekday(rank + 1)
        return calendar.firstweekday
    if library == "csv":
        import csv

        csv.register_dialect("forked", delimiter=str(rank))
        return lambda: csv.get_dialect("forked").delimiter
    if library == "sqlite3":
        import sqlite3

        sqlite3.register_adapter(complex, lambda value: str(rank))

        def adapted() -> Any:
            with contextlib.closing(sqlite3.connect(":memory:")) as one:
                return one.execute("select ?", [1j]).fetchone()

        return adapted
    if library == "torch":
        import torch

        kl = torch.distributions.kl
        kinds = torch.distributions.Uniform, torch.distributions.Cauchy
        kl.register_kl(*kinds)(lambda p, q: rank)
        return lambda: kl.kl_divergence(kinds[0](0, 1), kinds[1](0, 1))
    if library == "scipy":
        from scipy import stats

        stats.norm.random_state = np.random.RandomState(rank)
        return lambda: float(stats.norm.rvs())
    if library == "tensordict":
        from tensordict import nn

        mode = nn.InteractionType.MODE if rank else nn.InteractionType.MEAN
        nn.set_interaction_type(mode).__enter__()
        return lambda: nn.interaction_type().name
    if library == "ignite":
        from ignite import distributed

        distributed.sync()
        return distributed.get_rank
    if library == "gpytorch":
        from gpytorch import settings

        settings.num_likelihood_samples._set_value(rank + 3)
        return settings.num_likelihood_samples.value
    if library == "mlflow":
        import mlflow

        mlflow.set_tracking_uri(f"file:///of/{rank}")
        return mlflow.get_tracking_uri
    raise NotImplementedError(library)


def in_a_fork(look: Callable[[], Any]) -> str:
    """What a function gives in a process that is forked here."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            found = str(look())
        except BaseException as exc:
            found = repr(exc)
        os.write(writes, found.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(reads, 1000).decode()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "library",
    ["calendar", "csv", "sqlite3", "torch", "scipy", "tensordict", "ignite", "gpytorch", "mlflow"],
)
def test_a_process_that_a_worker_forks_has_what_the_worker_has_set(library: str) -> None:
    pytest.importorskip(library)

    def program() -> tuple[Any, Any]:
        look = set_up(library, current_worker().rank)
        ccl.barrier()
        return in_a_fork(look), str(look())

    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        seen = sess.call_packed(program).debug_get_from_all()
    assert [in_child == on_worker for in_child, on_worker in seen] == [True, True], seen
    assert seen[0] != seen[1]


CHOOSES = """
chosen, extra = print, None
def choose(function):
    global chosen, extra
    chosen = function
    del extra
def use():
    return chosen(), "extra" in globals()
"""


@pytest.mark.filterwarnings("ignore")
def test_a_process_that_a_worker_forks_has_the_functions_that_it_has_chosen() -> None:
    """Not only values: a module may keep a function that was given to it."""
    module: Any = ModuleType("dl_chooses")
    exec(CHOOSES, vars(module))

    def program() -> Any:
        rank = current_worker().rank
        module.choose(lambda: rank)
        ccl.barrier()
        return in_a_fork(module.use), module.use()

    patches = Patches()
    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        own_variables(module, patches, "choose", "use")
        try:
            found = sess.call_packed(program).debug_get_from_all()
        finally:
            patches.undo()
    assert found == [(str((rank, False)), (rank, False)) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.one_process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_loaders_of_processes_while_others_seed() -> None:
    def program() -> int:
        import time

        import torch
        from torch.utils.data import DataLoader

        from discolab import current_worker

        batches = 0
        end = time.monotonic() + 6
        while time.monotonic() < end:
            if current_worker().rank:
                torch.manual_seed(1)
            else:
                data: Any = list(range(4))
                forked: Any = {"num_workers": 2, "multiprocessing_context": "fork"}
                loader = DataLoader(data, timeout=20, **forked)
                batches += sum(len(batch) for batch in loader)
        return batches

    with ThreadedSession(4, devices="cpu") as sess:
        batches = sess.call_packed(program).debug_get_from_remote(0, timeout=60)
    assert batches
    assert batches % 4 == 0
