"""Programs for PyTorch RPC run on workers with their imports changed, with the same numbers."""

import json
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import discolab
import discolab.rpc.compat as rpc
from discolab import DiscoError, Session, WorkerError, current_worker
from discolab.rpc import WorkerLostError
from discolab.rpc.compat import autograd as dist_autograd
from tests.rpc import functions

PROGRAMS = Path(__file__).with_name("torch_programs")
WORLD_SIZE = 4

IMPORTS = {
    "import torch.distributed.rpc as rpc": "import discolab.rpc.compat as rpc",
    "import torch.distributed.autograd as dist_autograd": (
        "import discolab.rpc.compat.autograd as dist_autograd"
    ),
    "from torch.distributed.optim import DistributedOptimizer": (
        "from discolab.rpc.compat import DistributedOptimizer"
    ),
    "from torch.distributed.nn.api.remote_module import RemoteModule": (
        "from discolab.rpc.compat import RemoteModule"
    ),
}

# What torch 2.13 gives; `test_torch_gives_these_numbers` runs it.
NUMBERS: dict[str, list[float]] = json.loads((PROGRAMS / "numbers.json").read_text())


def with_imports_changed(name: str) -> str:
    """The source of a program for discolab."""
    lines = (PROGRAMS / f"{name}.py").read_text().splitlines()
    text = "\n".join(IMPORTS.get(line, line) for line in lines)
    assert "torch.distributed" not in text.split('"""', 2)[2]
    return text


def run_program(name: str, source: str) -> list[float]:
    """Run it, on a worker."""
    module = types.ModuleType(f"program_{name}")
    sys.modules[module.__name__] = module  # where pickle finds its classes, in a process
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    worker = current_worker()
    numbers: list[float] = module.run(worker.rank, worker.num_workers)
    return numbers


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_a_program_gives_what_torch_gives(sess: Session, name: str) -> None:
    source = with_imports_changed(name)
    numbers = sess.call_packed(run_program, name, source).debug_get_from_all(timeout=60)[0]
    torch.testing.assert_close(torch.tensor(numbers), torch.tensor(NUMBERS[name]))
    with pytest.raises(RuntimeError, match="has not been initialized"):
        sess.rpc.rpc_sync(1, rpc.get_worker_info)
    assert sess.rpc.get_worker_info("worker1").name == "worker1", "names are forgotten"


@pytest.mark.slow
def test_torch_gives_these_numbers() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "with_torch.py"), str(WORLD_SIZE), *sorted(NUMBERS)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for name, numbers in zip(sorted(NUMBERS), lines, strict=True):
        torch.testing.assert_close(torch.tensor(numbers), torch.tensor(NUMBERS[name]))


# -- names and meanings --------------------------------------------------------------------------


@pytest.fixture
def named(sess: Session) -> Iterator[Session]:
    """A session whose workers have called init_rpc."""
    sess.call_packed(_init)
    sess.sync_all()
    yield sess
    sess.call_packed(rpc.shutdown)
    sess.sync_all()


def _init() -> None:
    rank = current_worker().rank
    options = rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=5 + rank, device_maps={"two": {"cuda:0": "cuda:0"}}
    )
    rpc.init_rpc(_name(rank), rank=rank, world_size=WORLD_SIZE, rpc_backend_options=options)


def _name(rank: int) -> str:
    return ["zero", "one", "two", "worker1"][rank]


def on_worker_1(sess: Session, scenario: Any, *args: Any) -> Any:
    """Run it there."""

    def run() -> Any:
        return scenario(*args) if current_worker().rank == 1 else None

    return sess.call_packed(run).debug_get_from_remote(1, timeout=30)


def knows_names() -> None:
    assert rpc.get_worker_info() == rpc.WorkerInfo("one", 1)
    assert rpc.get_worker_info("two").id == 2
    assert rpc.get_worker_info("worker1").id == 3, "a name that was given comes first"
    for to in ("two", 2, rpc.WorkerInfo("two", 2), rpc.get_worker_info("two")):
        assert rpc.rpc_sync(to, functions.my_rank) == 2
        assert rpc.rpc_async(to, func=functions.add, args=None, kwargs={"a": 1}).wait() == 11
        assert rpc.remote(to, functions.add, (1,), None, -1).to_here(timeout=-1.0) == 11
    assert rpc.rpc_sync("two", torch.add, args=torch.ones(2)) == 2
    for wrong in ("nobody", 4, "worker9"):
        with pytest.raises(RuntimeError, match=r"nobody|4|worker9"):
            rpc.rpc_sync(wrong, functions.my_rank)
        with pytest.raises(RuntimeError):
            rpc.get_worker_info(str(wrong))
    with pytest.raises(ValueError, match="None"):
        rpc.rpc_sync(None, functions.my_rank)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"callable|function"):
        rpc.rpc_sync("two", 3)
    with pytest.raises(RuntimeError, match="already initialized"):
        rpc.init_rpc("one", rank=1, world_size=WORLD_SIZE)
    assert rpc.get_rpc_timeout() == 6
    with pytest.raises(RuntimeError, match=r"gave up after 0\.2 s"):
        rpc.rpc_sync("two", functions.sleep, (1000,), timeout=0.2)
    with pytest.raises(ZeroDivisionError):
        rpc.rpc_sync("two", _divide, (1, 0))
    future: torch.futures.Future[Any] = rpc.rpc_async("two", functions.add, (1,))
    assert isinstance(future, torch.futures.Future)


def _divide(a: float, b: float) -> float:
    return a / b


def test_calls(named: Session) -> None:
    on_worker_1(named, knows_names)


class Counter:
    """Kept on a worker."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, more: int = 1) -> int:
        """Count."""
        self.count += more
        return self.count

    @rpc.functions.async_execution
    def add_later(self, to: str, more: int) -> Any:
        """Count what another worker has added."""
        return rpc.rpc_async(to, functions.add, (more, 1)).then(lambda done: self.add(done.wait()))


def keeps_references() -> None:
    ref: rpc.RRef[Counter] = rpc.remote("two", Counter, args=(5,))  # type: ignore[valid-type]
    assert isinstance(ref, rpc.PyRRef)
    assert ref.owner() == rpc.WorkerInfo("two", 2)
    assert ref.owner_name() == "two"
    assert not ref.is_owner()
    assert ref.rpc_sync().add() == 6
    assert ref.rpc_async(timeout=5).add(2).wait() == 8
    assert ref.remote().add(more=1).to_here() == 9
    assert ref.rpc_sync().add_later("zero", 0) == 10
    with pytest.raises(RuntimeError):
        ref.local_value()
    functions.eventually(ref.confirmed_by_owner)
    mine = rpc.RRef(torch.ones(2, requires_grad=True).sum(), float)
    assert mine.is_owner()
    assert mine.confirmed_by_owner()
    leaf = torch.ones(2, requires_grad=True)
    rpc.RRef(leaf.sum()).backward(-1)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1, 1]
    with dist_autograd.context() as context_id:
        assert type(context_id) is int
        far = rpc.remote("two", torch.mul, args=(leaf, 3)).remote().sum()
        far.backward(dist_autograd_ctx_id=context_id)
        assert dist_autograd.get_gradients(context_id)[leaf].tolist() == [3, 3]
    with pytest.raises(RuntimeError):
        dist_autograd.get_gradients(context_id)


def test_references_and_contexts(named: Session) -> None:
    on_worker_1(named, keeps_references)


def makes_modules() -> None:
    for to in ("two", "two/cpu", "rank:2/cpu"):
        module = rpc.RemoteModule(to, torch.nn.Linear, args=(3, 1))
        assert module.get_module_rref().owner_name() == "two"
        assert module.forward_async(torch.ones(2, 3)).wait().shape == (2, 1)
    on_meta = rpc.RemoteModule("two/meta", torch.nn.Linear, (3,), {"out_features": 1})
    assert on_meta.get_module_rref().rpc_sync().forward.__name__ == "forward"
    device = rpc.rpc_sync("two", _device_of_output, (on_meta.get_module_rref(),))
    assert device == "meta", "arguments are moved to the module's device"


def _device_of_output(module: rpc.RRef) -> str:
    return str(module.local_value()(torch.ones(2, 3)).device)


def test_modules(named: Session) -> None:
    on_worker_1(named, makes_modules)


def test_what_init_rpc_refuses(sess: Session) -> None:
    with pytest.raises(RuntimeError, match="called by workers"):
        rpc.init_rpc("notebook", rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="has not been initialized"):
        rpc.rpc_sync(0, functions.my_rank)

    def refused() -> list[str]:
        mine = current_worker().rank
        maps = rpc.TensorPipeRpcBackendOptions(device_maps={"b": {"cuda:0": "cuda:1"}})
        errors = []
        for error, arguments in (
            (ValueError, {"rank": mine + 1}),
            (ValueError, {"world_size": 5}),
            (ValueError, {"world_size": mine}),
            (ValueError, {"name": "no blanks"}),
            (ValueError, {"rpc_backend_options": maps}),
            (TypeError, {"rpc_backend_options": 7}),
            (TypeError, {"backend": "gloo"}),
            (RuntimeError, {}),
        ):
            with pytest.raises(error) as info:
                rpc.init_rpc(**{"name": "all the same"[:3], "world_size": 4, **arguments})
            errors.append(str(info.value))
        return errors

    for rank in range(WORLD_SIZE):
        texts = sess.call_packed(refused).debug_get_from_remote(rank)
        assert "same name" in texts[-1]
        break
    sess.sync_all()


def test_shutdown_waits_for_what_is_under_way(sess: Session, tmp_path: Path) -> None:
    file = str(tmp_path / "over")

    def program() -> bool:
        rank = current_worker().rank
        rpc.init_rpc(_name(rank))
        if rank == 1:
            rpc.rpc_async("two", functions.call_on, ("zero", _sleep_and_touch, file))
        rpc.shutdown()
        return Path(file).exists()

    assert sess.call_packed(program).debug_get_from_all() == [True] * WORLD_SIZE


def _sleep_and_touch(file: str) -> None:
    functions.sleep(0.2)
    functions.touch(file)


def test_init_after_one_that_was_interrupted(sess: Session) -> None:
    """A rank that never comes is waited for until somebody ends that; then all begin anew."""

    def most() -> None:
        if current_worker().rank:
            rpc.init_rpc(_name(current_worker().rank))

    def program() -> str:
        rpc.init_rpc(_name(current_worker().rank))
        found = rpc.get_worker_info().name
        rpc.shutdown(graceful=False)
        return found

    sess.call_packed(most)
    functions.sleep(0.1)
    assert sess.interrupt(timeout=10) == []
    names = sess.call_packed(program).debug_get_from_all()
    assert names == [_name(rank) for rank in range(WORLD_SIZE)]


def test_a_member_that_dies(fresh: Any, engine: str) -> None:
    if engine == "threads":
        pytest.skip("its workers do not die alone")
    sess = fresh(3)

    def program() -> None:
        rank = current_worker().rank
        rpc.init_rpc(f"w{rank}")
        if rank == 2:
            functions.die()
        rpc.shutdown()

    ref = sess.call_packed(program)
    with pytest.raises(Exception, match="worker 2") as info:
        ref.debug_get_from_remote(1, timeout=30)
    assert isinstance(info.value, WorkerError | WorkerLostError | Exception)


def test_a_program_that_has_lost_a_member_can_be_begun_again(fresh: Any) -> None:
    sess = fresh(3)

    def begin() -> str:
        rank = current_worker().rank
        rpc.init_rpc(f"w{rank}")
        return rpc.rpc_sync(f"w{(rank + 1) % 3}", rpc.get_worker_info).name

    def end(rank: int) -> None:
        if current_worker().rank == rank:
            rpc.shutdown()

    sess.call_packed(begin).debug_get_from_all()
    sess.restart_worker(2)
    with pytest.raises(WorkerError, match="WorkerLostError"):
        sess.call_packed(end, 1).debug_get_from_remote(1)
    for _ in range(2):
        assert sess.call_packed(begin).debug_get_from_all(timeout=20) == ["w1", "w2", "w0"]
        with pytest.raises(WorkerError, match="already"):
            sess.call_packed(begin).debug_get_from_all(timeout=20)
        sess.call_packed(rpc.shutdown).debug_get_from_all(timeout=20)


def test_a_restarted_member_leaves_no_name_and_no_timeout(fresh: Any) -> None:
    sess = fresh(3)

    def begin(count: int) -> None:
        rank = current_worker().rank
        if rank < count:
            options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=0.01)
            rpc.init_rpc(f"w{rank}", world_size=count, rpc_backend_options=options)

    def outlasts_it() -> None:
        if current_worker().rank == 1:
            discolab.rpc.rpc_sync(0, functions.sleep, args=(0.1,))

    sess.call_packed(begin, 2)
    sess.sync_all()
    sess.restart_worker(1)
    assert sess.call_packed(outlasts_it).debug_get_from_remote(1) is None
    assert sess.rpc.rpc_sync(1, discolab.rpc.get_worker_info).name == "worker1"

    def alone() -> None:
        if current_worker().rank == 0:
            rpc.shutdown(graceful=False)
            rpc.init_rpc("alone", world_size=1)

    sess.call_packed(alone).debug_get_from_remote(0)
    assert sess.rpc.get_worker_info("alone").id == 0
    if sess.engine == "threads":  # else worker 0 stays
        sess.restart_worker(0)
        with pytest.raises(DiscoError, match="got 'alone'"):
            sess.rpc.get_worker_info("alone")
        assert sess.rpc.get_worker_info("worker0").id == 0


def test_a_member_that_is_restarted(fresh: Any) -> None:
    """Those who wait for it hear of it at once, and it can take part again."""
    sess = fresh(3)

    def program(late: bool) -> str:
        rank = current_worker().rank
        if late and rank == 2:
            time.sleep(60)
        rpc.init_rpc(f"w{rank}")
        found = rpc.rpc_sync(f"w{(rank + 1) % 3}", rpc.get_worker_info).name
        rpc.shutdown()
        return found

    sess.call_packed(program, False).debug_get_from_all()
    ref = sess.call_packed(program, True)
    functions.eventually(lambda: sess.status()[1].state == "waiting")
    result = sess.restart_worker(2)
    assert result.seconds < 20
    with pytest.raises(WorkerError, match="worker 2"):
        ref.debug_get_from_remote(1, timeout=20)
    with suppress(WorkerError):  # of the others, who waited for it
        sess.sync_all()
    for _ in range(2):
        names = sess.call_packed(program, False).debug_get_from_all(timeout=20)
        assert names == ["w1", "w2", "w0"]
