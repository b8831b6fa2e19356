"""A worker that was restarted takes part in rpc again; what the old one owned stays lost."""

import contextlib
import gc
import importlib.util
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from discolab import DiscoError, Session, WorkerError, current_worker, make_session, rpc
from discolab.engines.remote_session import RemoteSession
from discolab.rpc import RRef, WorkerLostError
from discolab.rpc.context import current_node
from discolab.rpc.directory import ROUTE, SERVICE, RpcService
from discolab.runtime.services import PRELOAD
from tests.rpc import functions
from tests.rpc.conftest import counts
from tests.rpc.functions import eventually, my_rank

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
PRELOAD += ["pytest"]
KINDS = ["processes", "processes-tcp", "sockets"]
ON_RAY = pytest.param(
    "ray",
    marks=[
        pytest.mark.slow,
        pytest.mark.alone,
        pytest.mark.timeout(400),
        pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray"),
    ],
)


@pytest.fixture(scope="module", params=[*KINDS, ON_RAY])
def trio(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Three workers in processes; each test restarts some of them."""
    engine, _, route = request.param.partition("-")
    options: dict[str, Any] = {"timeout": 20}
    if engine == "sockets":
        options["nodes"] = "local:1"
    if engine == "ray":
        options.update(timeout=60, start_timeout=300)
    before = os.environ.pop(ROUTE, None)
    if route:
        os.environ[ROUTE] = route
    session = make_session(3, engine, devices="cpu", **options)
    session.import_python_module(__name__)
    try:
        yield session
    finally:
        session.shutdown(cancel=True)
        del session
        with warnings.catch_warnings():  # Ray does not wait for what it kills
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        os.environ.pop(ROUTE, None)
        if before is not None:
            os.environ[ROUTE] = before


@pytest.fixture
def no_leaked_threads() -> None:
    """In place of that of all tests: the session is kept, and has threads until it ends."""


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test nobody holds a reference, and nothing is under way."""
    yield
    if "trio" in request.fixturenames:
        session = request.getfixturevalue("trio")
        names = ("calls_waiting", "calls_running", "values_owned", "references_held")
        seen: dict[str, int] = {}

        def nothing() -> bool:
            seen.update(zip(names, counts(session, *names), strict=True))
            return not any(seen.values())

        gc.collect()
        with contextlib.suppress(AssertionError):
            eventually(nothing)
        assert seen == dict.fromkeys(names, 0)  # one more question may be what runs


def restart(session: Session, rank: int, *, kill: bool = False) -> None:
    if kill:
        os.kill(session.processes()[rank], signal.SIGKILL)
    assert not session.restart_worker(rank).remarks


def call_all() -> list[int]:
    return [rpc.rpc_sync(to, my_rank) for to in range(rpc_size())]


def rpc_size() -> int:
    return current_worker().num_workers


def ranks_seen(session: Session) -> Any:
    return session.call_packed(call_all).debug_get_from_all()


class Thing:
    """Says in which process it was made, and where it is called."""

    def __init__(self) -> None:
        self.made_by = os.getpid()

    def pids(self) -> tuple[int, int]:
        return self.made_by, os.getpid()


def keep(name: str, ref: Any) -> None:
    functions.KEPT[name] = ref


def use_kept(name: str) -> Any:
    ref = functions.KEPT[name]
    return ref.rpc_sync().pids(), ref.to_here().made_by


def drop(name: str) -> None:
    functions.KEPT.pop(name)


def same(value: Any) -> Any:
    return value


def lost_nodes() -> list[int]:
    return sorted(current_node().lost)


def knows_lost(session: Session, rank: int, nodes: list[int]) -> bool:
    return bool(session.rpc.rpc_sync(rank, lost_nodes) == nodes)


def service_of(session: Session) -> RpcService:
    assert isinstance(session, RemoteSession)
    service = session.services[SERVICE]
    assert isinstance(service, RpcService)
    return service


def everybody(session: Session) -> list[list[int]]:
    return [list(range(session.num_workers))] * session.num_workers


def test_calls_to_it_and_from_it_after_each_restart(trio: Session) -> None:
    assert ranks_seen(trio) == everybody(trio)
    for rank, kill in ((2, False), (2, True), (1, True), (2, False)):
        restart(trio, rank, kill=kill)
        assert trio.rpc.rpc_sync(rank, my_rank) == rank
        assert ranks_seen(trio) == everybody(trio)
        assert trio.rpc.rpc_sync(rank, call_all) == [0, 1, 2]
        assert list(trio.rpc.stream(rank, range, args=(3,))) == [0, 1, 2]
        nodes = service_of(trio).nodes()
        before = sorted(old for one, node in enumerate(nodes) for old in range(one, node, 3))
        assert nodes[rank] % 3 == rank
        for one in range(3):  # also those that were lost before it came, or counts would stay
            eventually(partial(knows_lost, trio, one, before))


def test_a_value_of_the_old_worker_is_lost_to_all_and_never_one_of_the_new(trio: Session) -> None:
    old = trio.rpc.remote(2, Thing)
    assert old.rpc_sync().pids()[0] == trio.processes()[2]
    trio.rpc.rpc_sync(1, keep, args=("old", old))
    restart(trio, 2)
    new = trio.rpc.remote(2, Thing)
    assert new.rpc_sync().pids() == (trio.processes()[2],) * 2
    for use in (
        RRef.to_here,
        lambda ref: ref.rpc_sync().pids(),
        lambda ref: ref.rpc_async().pids().wait(),
        lambda ref: ref.remote().pids().to_here(),
        lambda ref: list(ref.stream().pids()),
    ):
        with pytest.raises(WorkerLostError, match="Another worker has its place"):
            use(old)
    with pytest.raises(WorkerLostError, match="Another worker has its place"):
        trio.rpc.rpc_sync(1, use_kept, args=("old",))
    assert "has died" in repr(old)
    # with the new worker itself, which has never known the old one
    trio.rpc.rpc_sync(2, keep, args=("old", old))
    with pytest.raises(WorkerLostError):
        trio.rpc.rpc_sync(2, use_kept, args=("old",))
    with pytest.raises(WorkerLostError):
        trio.rpc.rpc_sync(2, RRef.local_value, args=(old,))
    again = trio.rpc.rpc_sync(2, same, args=(old,))
    with pytest.raises(WorkerLostError):
        again.to_here()
    for rank in (1, 2):
        trio.rpc.rpc_sync(rank, drop, args=("old",))
    del old, again
    trio.rpc.rpc_sync(1, keep, args=("new", new))
    assert new.rpc_sync().pids() == (trio.processes()[2],) * 2
    made, fetched = trio.rpc.rpc_sync(1, use_kept, args=("new",))
    assert (*made, fetched) == (trio.processes()[2],) * 3
    trio.rpc.rpc_sync(1, drop, args=("new",))


def test_what_the_old_worker_held_is_let_go_and_what_others_hold_stays(trio: Session) -> None:
    mine, theirs = trio.rpc.RRef(Thing()), trio.rpc.remote(1, Thing)
    for name, ref in (("mine", mine), ("theirs", theirs)):
        trio.rpc.rpc_sync(2, keep, args=(name, ref))
    restart(trio, 2, kill=True)
    assert theirs.rpc_sync().pids() == (trio.processes()[1],) * 2
    for name, ref in (("mine", mine), ("theirs", theirs)):
        trio.rpc.rpc_sync(2, keep, args=(name, ref))
    del mine, theirs
    gc.collect()
    assert trio.rpc.rpc_sync(2, use_kept, args=("mine",))[1] == os.getpid()
    assert trio.rpc.rpc_sync(2, use_kept, args=("theirs",))[1] == trio.processes()[1]
    for name in ("mine", "theirs"):
        trio.rpc.rpc_sync(2, drop, args=(name,))


def test_a_dref_of_references_and_a_reference_of_a_dref(trio: Session) -> None:
    ref = trio.call_packed(my_rank)
    trio.sync_all()
    old = trio.rpc.rref(ref, 2)
    assert old.to_here() == 2
    restart(trio, 2)
    with pytest.raises(WorkerLostError):
        old.to_here()
    ref = trio.call_packed(my_rank)
    refs = [trio.rpc.rref(ref, rank) for rank in range(3)]
    assert [one.to_here() for one in refs] == [0, 1, 2]
    assert trio.rpc.dref(refs).debug_get_from_all() == [0, 1, 2]
    with pytest.raises(WorkerError, match="Another worker has its place"):
        trio.rpc.dref([*refs[:2], old]).debug_get_from_remote(2)


def product(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(2, torch.mul, args=(x, 3.0))


def test_gradients_through_it(trio: Session) -> None:
    autograd = trio.rpc.autograd
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as before:
        lost = trio.rpc.rpc_sync(2, torch.mul, args=(x, 5.0))
        restart(trio, 2)
        with pytest.raises(WorkerLostError):
            autograd.backward(before, [lost.sum()])
        y = trio.rpc.rpc_sync(1, product, args=(x,))  # in a context that was there before
        autograd.backward(before, [y.sum()])
        assert autograd.get_gradients(before)[x].tolist() == [3.0] * 3
    for _ in range(2):
        with autograd.context() as context:
            y = trio.rpc.rpc_sync(1, product, args=(x,))
            autograd.backward(context, [y.sum()])
            assert autograd.get_gradients(context)[x].tolist() == [3.0] * 3

    def there() -> list[float]:
        if my_rank() != 2:
            return [3.0]
        x = torch.ones(1, requires_grad=True)
        with rpc.autograd.context() as context:
            y = rpc.rpc_sync(1, torch.mul, args=(x, 3.0))
            rpc.autograd.backward(context, [y.sum()])
            grads: list[float] = rpc.autograd.get_gradients(context)[x].tolist()
        return grads

    assert trio.call_packed(there).debug_get_from_all(timeout=60) == [[3.0]] * 3


def test_an_optimizer_and_a_remote_module(trio: Session) -> None:
    if trio.engine != "processes" or ROUTE in os.environ:
        pytest.skip("it takes each new process seconds to import what it needs")
    old = trio.rpc.RemoteModule(2, torch.nn.Linear, args=(2, 1))
    parameters = old.remote_parameters()
    optimizer = trio.rpc.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    restart(trio, 2)
    with pytest.raises(WorkerLostError):
        old.forward(torch.ones(1, 2))
    with pytest.raises(WorkerLostError):
        old.remote_parameters()
    with trio.rpc.autograd.context() as context, pytest.raises(WorkerLostError):
        optimizer.step(context)
    # Else the optimizer imports it, and frames of that import (torch.fx.wrap keeps its own) keep
    # the call's arguments until garbage is collected, which takes long without the lock.
    trio.import_python_module("torch._dynamo")
    trio.sync_all(timeout=60)
    new = trio.rpc.RemoteModule(2, torch.nn.Linear, args=(2, 1))
    mixed = [*new.remote_parameters(), *parameters]
    with pytest.raises(WorkerLostError):
        trio.rpc.DistributedOptimizer(torch.optim.SGD, mixed, lr=0.1)
    optimizer = trio.rpc.DistributedOptimizer(torch.optim.SGD, new.remote_parameters(), lr=0.5)
    with trio.rpc.autograd.context() as context:
        before = new.forward(torch.ones(1, 2)).sum()
        trio.rpc.autograd.backward(context, [before])
        optimizer.step(context)
    assert new.forward(torch.ones(1, 2)).sum().item() == pytest.approx(before.item() - 1.5)


def test_a_call_that_is_under_way_hears_that_the_worker_is_lost(trio: Session) -> None:
    for kill in (False, True):
        waits = trio.rpc.rpc_async(2, time.sleep, args=(60,), timeout=0)
        stream = trio.rpc.stream(2, functions.numbers_then_hang, args=(1, ""))
        next(stream)
        eventually(lambda: trio.rpc.debug_info(2)["calls_running"] >= 2)
        restart(trio, 2, kill=kill)
        with pytest.raises(WorkerLostError):
            waits.wait()
        with pytest.raises(WorkerLostError):
            list(stream)
        assert trio.rpc.rpc_sync(2, my_rank) == 2
        del waits, stream


STOP: list[bool] = []


def begin() -> None:
    STOP.clear()


def stop() -> None:
    STOP.append(True)


def call_until_stopped() -> tuple[int, int, list[str]]:
    """Call and refer to all workers; how often that was well, or lost, and what else came of it."""
    good = lost = 0
    wrong: list[str] = []
    refs: list[RRef] = []
    while not STOP:
        for to in range(3):
            try:
                if rpc.rpc_sync(to, my_rank) != to:
                    wrong.append(f"another one than {to} answered")
                refs.append(rpc.remote(to, Thing))
                refs.append(rpc.rpc_sync(to, same, args=(refs[len(refs) // 2],)))
                made, where = refs[len(refs) // 3].rpc_sync().pids()
                if made != where:
                    wrong.append("the value of another process")
                good += 1
            except WorkerLostError:
                lost += 1
            except (DiscoError, RuntimeError) as exc:
                wrong.append(f"{exc!r}")
        if len(refs) > 30:
            del refs[:15]
    return good, lost, wrong


@pytest.mark.parametrize("seed", range(3))
def test_restarts_while_everybody_calls_everybody(trio: Session, seed: int) -> None:
    for rank in range(3):
        trio.rpc.rpc_sync(rank, begin)
    loops = [trio.rpc.rpc_async(rank, call_until_stopped, timeout=0) for rank in (0, 1)]
    for number in range(2):
        time.sleep(0.03 * seed)
        restart(trio, 2, kill=(number + seed) % 2 == 1)
        assert trio.rpc.rpc_sync(2, my_rank) == 2
    time.sleep(0.1)
    for rank in (0, 1):
        trio.rpc.rpc_sync(rank, stop)
    for loop in loops:
        good, _, wrong = loop.wait()
        assert good
        assert not wrong
    assert ranks_seen(trio) == everybody(trio)


def test_two_workers_that_died_at_once(trio: Session) -> None:
    refs = [trio.rpc.remote(rank, Thing) for rank in (1, 2)]
    trio.rpc.rpc_sync(1, keep, args=("two", refs[1]))
    for rank in (1, 2):
        os.kill(trio.processes()[rank], signal.SIGKILL)
    for rank in (1, 2):
        trio.restart_worker(rank)
    assert ranks_seen(trio) == everybody(trio)
    for ref in refs:
        with pytest.raises(WorkerLostError):
            ref.to_here()
    trio.rpc.rpc_sync(2, keep, args=("two", refs[0]))
    with pytest.raises(WorkerLostError):
        trio.rpc.rpc_sync(2, use_kept, args=("two",))
    trio.rpc.rpc_sync(2, drop, args=("two",))


def test_a_worker_that_dies_and_is_replaced_by_itself() -> None:
    with make_session(3, "processes", devices="cpu", timeout=20, respawn=True) as session:
        session.import_python_module(__name__)
        assert ranks_seen(session) == everybody(session)
        old = session.rpc.remote(2, Thing)
        old.to_here()
        os.kill(session.processes()[2], signal.SIGKILL)
        eventually(lambda: len(session.restarts) == 1)
        with pytest.raises(WorkerError, match="SIGKILL"):
            session.sync_all()
        with pytest.raises(WorkerLostError):
            old.to_here()
        assert session.rpc.rpc_sync(2, call_all) == [0, 1, 2]
        assert session.rpc.rpc_sync(1, call_all) == [0, 1, 2]


def test_a_worker_that_is_stopped_does_not_hold_up_the_restart_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are to know of the new node before it says anything; not at any price."""
    with make_session(3, "processes", devices="cpu", timeout=20) as session:
        session.import_python_module(__name__)
        assert ranks_seen(session) == everybody(session)
        service = service_of(session)
        known: Callable[..., None] = service._known
        late: list[tuple[int, int]] = []

        def hear(teller: int, node: int) -> None:
            if teller == 1:
                late.append((teller, node))
            else:
                known(teller, node)

        monkeypatch.setattr(service, "_known", hear)
        done = threading.Thread(target=session.restart_worker, args=(2,))
        done.start()
        done.join(15)
        assert not done.is_alive()
        assert late
        assert ranks_seen(session) == everybody(session)


def test_a_worker_thread_serves_and_owns_in_its_own_name() -> None:
    """Where all are threads of one process there is one node, which outlives them."""

    def owns() -> tuple[bool, float]:
        reference = RRef(torch.ones(1))
        return reference.is_owner(), reference.local_value().item()

    def serves() -> bool:
        worker = current_worker()
        return worker is worker.peers[worker.worker_id] and not worker.ended

    def gradients() -> list[list[float]]:
        rank = my_rank()
        x = torch.ones(2, requires_grad=True)
        with rpc.autograd.context() as context:
            loss = rpc.rpc_sync(1 - rank, torch.mul, args=(x, 3.0)).sum()
            rpc.autograd.backward(context, [loss])
            return [found.tolist() for found in rpc.autograd.get_gradients(context).values()]

    with make_session(2, "threads", devices="cpu", timeout=20) as session:
        session.rpc.rpc_sync(1, my_rank)
        for rank in (1, 0):
            session.restart_worker(rank)
            assert session.call_packed(owns).debug_get_from_all() == [(True, 1.0)] * 2
            assert [session.rpc.rpc_sync(r, serves) for r in (0, 1)] == [True] * 2
            assert session.call_packed(gradients).debug_get_from_all() == [[[3.0, 3.0]]] * 2
