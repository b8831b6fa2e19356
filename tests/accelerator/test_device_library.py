"""Workers with a device each, on whose library the collectives are: where NCCL would be.

Threads and processes. What `test_ccl` runs on `local` runs here too: late input, results used at
once, inputs overwritten right after the call.
"""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from discolab import Session, WorkerError, ccl, current_worker, make_session
from discolab.ccl.backends import libraries, process_groups, remote_device_library
from tests.accelerator import sim
from tests.accelerator.test_ccl import PROGRAMS, RANKS, SIZE, never_waited, polled, run, total

pytestmark = pytest.mark.accelerator

DEVICES = [f"sim:{rank}" for rank in range(RANKS)]
ENGINES = ["threads", "processes"]
STOP_WITHIN = 2.0  # seconds from an interrupt to a usable session


def session_on(engine: str) -> Session:
    """Four workers with a device each."""
    made = make_session(RANKS, engine, devices=DEVICES, timeout=60)
    told = made.init_ccl()
    assert told.startswith(f"{sim.COLLECTIVES}: {RANKS} workers in "), told
    return made


@pytest.fixture(scope="module", params=ENGINES)
def sess(request: pytest.FixtureRequest) -> Iterator[Session]:
    """A session whose collectives go by the library unasked."""
    with session_on(request.param) as session:
        yield session


@pytest.fixture
def seed(request: pytest.FixtureRequest, sess: Session) -> Iterator[None]:
    """Let the streams of all processes drift apart; no memory may be used out of order there."""
    sess.call_packed(sim.set_delays, request.param)
    yield
    sess.call_packed(sim.set_delays, 0)
    assert sess.call_packed(sim.faults).debug_get_from_all() == [[]] * RANKS


@pytest.mark.parametrize("streams", ["default", "turns"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_collectives(sess: Session, seed: None, name: str, streams: str) -> None:
    """The values of all are right, whatever runs late."""
    assert sess.call_packed(run, name, streams, 4).debug_get_from_all() == [0] * RANKS


def begun_late() -> tuple[bool, float, float]:
    """Whether the host goes on while a device is late, and what comes of it."""
    worker = current_worker()
    x = torch.full((SIZE,), float(worker.rank), device=worker.device)
    ccl.all_reduce(x).sum().item()
    ccl.barrier()
    if worker.rank == 2:
        sim.sleep(1.5)
    began = time.perf_counter()
    out = ccl.all_reduce(x)
    given = time.perf_counter() - began
    return given < 1.0, float(out.sum()), time.perf_counter() - began


def test_the_host_goes_on_while_a_device_is_late(sess: Session) -> None:
    """The stream waits in its place."""
    for early, found, taken in sess.call_packed(begun_late).debug_get_from_all():
        assert early
        assert found == SIZE * 6.0
        assert taken > 1.2


@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
def test_what_is_done_may_be_used(sess: Session, own: bool) -> None:
    """Done is what the device has done, not what it was given."""
    assert sess.call_packed(polled, own).debug_get_from_all() == [float(RANKS)] * RANKS


@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
def test_an_input_is_kept_until_it_has_been_read(sess: Session, own: bool) -> None:
    """Though its owner never waits, and has given its memory back."""
    assert sess.call_packed(never_waited, own).debug_get_from_all() == [total(0)] * RANKS


# -- torch.distributed -----------------------------------------------------------------------------

STEPS, ROWS, WIDTH = 3, 16, 32


def model() -> nn.Sequential:
    """The same on all ranks."""
    made = torch.Generator().manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=made) / WIDTH**0.5)
    return layers


def learn(net: nn.Module, device: torch.device, rank: int, ranks: int) -> list[torch.Tensor]:
    """Some steps without a look at the device, each rank with rows of its own; the losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = net(rows.to(device).chunk(ranks)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def averaged(net: nn.Module) -> list[float]:
    worker = current_worker()
    losses = torch.stack(learn(net, worker.device, dist.get_rank(), RANKS))
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


def ddp() -> list[float]:
    """Gradients averaged in buckets."""
    device = current_worker().device
    return averaged(DistributedDataParallel(model().to(device), device_ids=[device]))


def fsdp() -> list[float]:
    """Parameters in shards."""
    net = model().to(current_worker().device)
    mesh = init_device_mesh(sim.NAME, (RANKS,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return averaged(fully_shard(net, mesh=mesh))


def dtensors() -> list[float]:
    """Whole, sharded, multiplied, whole again."""
    mesh = init_device_mesh(sim.NAME, (RANKS,))
    whole = torch.arange(64.0).view(8, 8)
    a = distribute_tensor(whole.to(current_worker().device), mesh, [Shard(0)])
    b = a.redistribute(mesh, [Shard(1)])
    product = (a @ b.redistribute(mesh, [Replicate()])).redistribute(mesh, [Replicate()])
    assert isinstance(product, DTensor)
    assert torch.equal(product.to_local().cpu(), whole @ whole)
    return []


@functools.cache
def alone() -> list[float]:
    """What one process learns."""
    device = torch.device("sim:0")
    return [float(loss) for loss in learn(model().to(device), device, 0, 1)]


@pytest.mark.parametrize("program", [ddp, fsdp, dtensors])
def test_distributed_programs(
    sess: Session, seed: None, program: Callable[[], list[float]]
) -> None:
    """They learn what one process learns."""
    expected = [] if program is dtensors else alone()
    for found in sess.call_packed(program).debug_get_from_all():
        assert found == pytest.approx(expected, rel=1e-5)


def pipeline(name: str, sharded: bool) -> None:
    """Stages in a row, each on its workers' devices; with `sharded` by FSDP2 on two of them."""
    worker = current_worker()
    torch.manual_seed(0)
    parts = 2 if sharded else 1
    stages = RANKS // parts
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(stages)))
    x, y = torch.randn(8 * parts, 8), torch.randn(8 * parts, 8)
    mesh = init_device_mesh(sim.NAME, (stages, parts), mesh_dim_names=("pp", "dp"))
    place, part = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    mine = copy.deepcopy(whole[place]).to(worker.device)
    if sharded:
        fully_shard(mine, mesh=mesh["dp"])
    stage = pipelining.PipelineStage(
        mine, place, stages, worker.device, group=mesh["pp"].get_group()
    )
    schedule = getattr(pipelining, name)(stage, n_microbatches=4, loss_fn=F.mse_loss)
    rows = slice(8 * part, 8 * part + 8)
    given = (x[rows].to(worker.device),) if place == 0 else ()
    if place == stages - 1:
        losses: list[torch.Tensor] = []
        out = schedule.step(*given, target=y[rows].to(worker.device), losses=losses)
        torch.testing.assert_close(out.cpu(), whole(x[rows]), atol=1e-5, rtol=1e-4)
        assert len(losses) == 4
    else:
        schedule.step(*given)
    F.mse_loss(whole(x), y).backward()
    for got, expected in zip(mine.parameters(), whole[place].parameters(), strict=True):
        grad = got.grad.full_tensor() if isinstance(got.grad, DTensor) else got.grad
        assert grad is not None
        torch.testing.assert_close(grad.cpu(), expected.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "sharded"), [("ScheduleGPipe", False), ("Schedule1F1B", False), ("Schedule1F1B", True)]
)
def test_pipelines(sess: Session, seed: None, name: str, sharded: bool) -> None:
    """Activations and gradients go from device to device, whatever runs late."""
    sess.call_packed(pipeline, name, sharded)
    sess.sync_all()


def made_in_turn() -> list[int]:
    """Where tensors are that each worker makes, the same as the others before it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    found = []
    for turn in range(RANKS):
        ccl.barrier()
        if turn == current_worker().rank:
            for _ in range(2):
                with FakeTensorMode():
                    found.append(torch.empty(7, 5, device=sim.NAME).device.index)
    return found


def test_fake_tensors_are_on_the_workers_device(sess: Session) -> None:
    """By which DTensor works out shapes: else two devices would meet in one operator."""
    found = sess.call_packed(made_in_turn).debug_get_from_all()
    assert found == [[rank, rank] for rank in range(RANKS)]


def polled_as_torch_does() -> float:
    """A result that is used once `is_completed` says so, on a stream that waits for nothing."""
    x = torch.ones(SIZE, device=current_worker().device)
    sim.sleep(0.05)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    assert sim.current_stream().query()
    return float(x[0])


def test_a_dist_work_is_done_when_the_device_is(sess: Session) -> None:
    """As one of NCCL's."""
    assert sess.call_packed(polled_as_torch_does).debug_get_from_all() == [float(RANKS)] * RANKS


# -- what goes wrong -------------------------------------------------------------------------------


def summed() -> float:
    """A collective that works."""
    worker = current_worker()
    return float(ccl.all_reduce(torch.full((SIZE,), float(worker.rank), device=worker.device))[-1])


def spin() -> None:
    """A collective whose kernel waits on all devices but one, which does not come to it; a look."""
    worker = current_worker()
    if worker.rank == 1:
        sim.sleep(4)
        out = ccl.all_reduce(torch.ones(SIZE, device=worker.device))
        time.sleep(20)
    else:
        out = ccl.all_reduce(torch.ones(SIZE, device=worker.device))
    out.sum().item()


@pytest.mark.parametrize("where", ENGINES)
def test_stop_while_a_kernel_spins(where: str) -> None:
    """Workers wait for their devices, which wait for each other in the library."""
    with session_on(where) as sess:
        assert sess.call_packed(summed).debug_get_from_all() == [6.0] * RANKS
        ref = sess.call_packed(spin)
        time.sleep(1)
        began = time.monotonic()
        late = sess.interrupt(timeout=10)
        taken = time.monotonic() - began
        assert not late
        assert taken < STOP_WITHIN
        with pytest.raises(WorkerError):
            ref.debug_get_from_all()
        assert sess.call_packed(summed).debug_get_from_all() == [6.0] * RANKS


def elsewhere() -> None:
    ccl.all_reduce(torch.ones(4, device=f"sim:{(current_worker().rank + 1) % RANKS}"))


def test_a_tensor_on_another_workers_device_is_refused(sess: Session) -> None:
    """With a way out."""
    with pytest.raises(
        WorkerError, match=r"on sim:\d, and 'simccl' moves those on the worker's own"
    ):
        sess.call_packed(elsewhere).debug_get_from_all()
    assert sess.call_packed(summed).debug_get_from_all() == [6.0] * RANKS


def summed_in_place(x: torch.Tensor) -> torch.Tensor:
    return ccl.all_reduce_(x)


@pytest.mark.parametrize("where", ENGINES)
def test_a_member_that_can_not_connect(where: str) -> None:
    """The others wait for it inside of the library, and come out with its words."""
    with session_on(where) as sess:
        x = sess.call_packed(lambda: torch.ones(SIZE, device=current_worker().device))
        sess.call_packed(filled, 1).debug_get_from_all()
        began = time.monotonic()
        with pytest.raises(WorkerError, match=r"simccl: OutOfMemoryError"):
            sess.call_packed(summed_in_place, x).debug_get_from_all()
        assert time.monotonic() - began < 10
        sess.call_packed(emptied).debug_get_from_all()
        assert sess.call_packed(summed).debug_get_from_all() == [6.0] * RANKS


def filled(rank: int) -> None:
    """Leave no memory on a worker's device."""
    worker = current_worker()
    if worker.rank == rank:
        sim.limit_memory(rank, sim.memory_allocated(rank))


def emptied() -> None:
    sim.limit_memory(current_worker().rank, 1 << 30)


_awake = threading.Event()


def unreachable() -> None:
    """Have worker 1's device come late to the library's first collective."""
    make = libraries.make

    def made(store: object, place: int, size: int, timeout: timedelta) -> object:
        if place == 1:
            _awake.wait(10)
        return make(store, place, size, timeout)

    libraries.make = made
    process_groups.CONNECT_SECONDS = remote_device_library.STEP_SECONDS = 1


def awaken() -> None:
    _awake.set()


@pytest.mark.parametrize("where", ENGINES)
def test_connecting_has_a_deadline(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the library would wait for a member for ever; the words say for what."""
    _awake.clear()
    monkeypatch.setattr(libraries, "make", libraries.make)  # to be as it was
    monkeypatch.setattr(process_groups, "CONNECT_SECONDS", process_groups.CONNECT_SECONDS)
    monkeypatch.setattr(remote_device_library, "STEP_SECONDS", remote_device_library.STEP_SECONDS)
    said = "gave up after 1 s waiting for the 4 workers to connect their devices: the first colle"
    with session_on(where) as sess:
        if where == "threads":  # they have one process
            unreachable()
        else:
            sess.call_packed(unreachable)
        began = time.monotonic()
        with pytest.raises(WorkerError, match=said):
            sess.call_packed(summed).debug_get_from_all()
        assert time.monotonic() - began < 9
        sess.call_packed(awaken).debug_get_from_all()


def busy_and_summed() -> float:
    """The first collective, on a device with much to do."""
    x = torch.full((SIZE,), 1.0, device=current_worker().device)
    if current_worker().rank == 2:
        sim.sleep(2.5)
    return float(ccl.all_reduce(x)[-1])


def test_a_device_may_be_late_to_the_first_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was given before is not what the deadline of connecting is for."""
    monkeypatch.setattr(process_groups, "CONNECT_SECONDS", 1)
    with session_on("threads") as sess:
        assert sess.call_packed(busy_and_summed).debug_get_from_all() == [4.0] * RANKS


def test_two_workers_on_one_device_are_refused() -> None:
    """With a way out, which "auto" takes."""
    for engine, way_out in zip(ENGINES, ("local", "gloo"), strict=True):
        with make_session(2, engine, devices=["sim:1", "sim:1"], timeout=30) as sess:
            with pytest.raises(Exception, match=f"'simccl' needs one for each .* use '{way_out}'"):
                sess.init_ccl(sim.COLLECTIVES)
            assert sess.init_ccl().startswith(way_out)
