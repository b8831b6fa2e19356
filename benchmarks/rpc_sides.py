"""One adapter for each runtime that rpc.py compares, for rpc_child.py.

Each has four workers, of which the caller calls number `TO`, in another process than the caller
unless the workers are threads. Each uses the quickest way that its runtime documents for what is
asked. The adapters are used on the main thread; their callers on the thread that calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from engines_sides import PATIENCE, free_port
from rpc_measures import FROM, THERE, TO, WORKERS, Caller, noop


class Side:
    """A runtime with `WORKERS` workers."""

    version = ""
    caller: Caller  # of the controller; there once it has started

    def start(self) -> None:
        """Start all; it may return before the workers can answer."""
        raise NotImplementedError

    def stop(self) -> None:
        """End all."""
        raise NotImplementedError

    def there(self, figure: str, calls: int, seconds: float) -> dict[str, Any]:
        """A figure of `THERE`, taken on worker `FROM`."""
        raise NotImplementedError


class RpcCaller(Caller):
    """A caller for functions named as those of `torch.distributed.rpc`."""

    def __init__(self, rpc: Any, wait_all: Callable[[list[Any]], list[Any]], names: Any) -> None:
        self.rpc, self.names, self._wait_all = rpc, names, wait_all

    def send(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return self.rpc.rpc_async(self.names[rank], function, args)

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return self.rpc.rpc_sync(self.names[rank], function, args)

    def wait_all(self, sent: list[Any]) -> list[Any]:
        return self._wait_all(sent)

    def refer(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return self.rpc.remote(self.names[rank], function, args).to_here()


# -- discolab ----------------------------------------------------------------------------------


class DiscolabCaller(RpcCaller):
    """A caller for `discolab.rpc`."""

    def lend(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return self.rpc.rpc_async(rank, function, args, lend=True)


def discolab_caller(rpc: Any) -> RpcCaller:
    """The caller for `discolab.rpc` or the ``rpc`` of a session."""
    return DiscolabCaller(rpc, rpc.wait_all, range(WORKERS))


def discolab_there(figure: str, calls: int, seconds: float) -> dict[str, Any]:
    """Runs on a worker of discolab."""
    from discolab import rpc

    return THERE[figure](discolab_caller(rpc), calls, seconds)


class Discolab(Side):
    """A session of discolab."""

    engine: ClassVar[str]

    def __init__(self) -> None:
        import discolab

        self.version = discolab.__version__
        self.make = discolab.make_session

    def start(self) -> None:
        self.session: Any = self.make(WORKERS, engine=self.engine)
        self.caller = discolab_caller(self.session.rpc)

    def stop(self) -> None:
        self.session.shutdown()

    def there(self, figure: str, calls: int, seconds: float) -> dict[str, Any]:
        args = figure, calls, seconds
        found: dict[str, Any] = self.session.rpc.rpc_sync(
            FROM, discolab_there, args, timeout=PATIENCE
        )
        return found


class DiscolabProcesses(Discolab):
    """Worker 0 is a thread of this process, three are processes."""

    engine = "processes"


class DiscolabThreads(Discolab):
    """Four threads of this process."""

    engine = "threads"


# -- torch -------------------------------------------------------------------------------------


def torch_caller() -> RpcCaller:
    """The caller for `torch.distributed.rpc`, in whatever process this is."""
    from torch.distributed import rpc

    return RpcCaller(rpc, torch.futures.wait_all, [f"worker{rank}" for rank in range(WORKERS)])


def torch_there(figure: str, calls: int, seconds: float) -> dict[str, Any]:
    """Runs on a worker of torch."""
    return THERE[figure](torch_caller(), calls, seconds)


def torch_worker(rank: int, port: int) -> None:
    """Body of a worker process: answer until the controller shuts down."""
    init_torch(rank, port)
    torch.distributed.rpc.shutdown()


def init_torch(rank: int, port: int) -> None:
    """Join the workers of torch's RPC, as users do."""
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=PATIENCE
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS, rpc_backend_options=options)


class TorchRpc(Side):
    """torch.distributed.rpc over TensorPipe: worker 0 is this process, three are others."""

    version = torch.__version__

    def __init__(self) -> None:
        import torch.distributed.rpc

        self.rpc = torch.distributed.rpc
        self.processes: list[Any] = []

    def start(self) -> None:
        port = free_port()
        spawn = torch.multiprocessing.get_context("spawn")
        for rank in range(1, WORKERS):
            self.processes.append(spawn.Process(target=torch_worker, args=(rank, port)))
            self.processes[-1].start()
        init_torch(0, port)
        self.caller = torch_caller()

    def stop(self) -> None:
        self.rpc.shutdown()
        for process in self.processes:
            process.join(10)
            process.kill()
            process.join()

    def there(self, figure: str, calls: int, seconds: float) -> dict[str, Any]:
        args = figure, calls, seconds
        found: dict[str, Any] = self.rpc.rpc_sync(f"worker{FROM}", torch_there, args)
        return found


# -- Ray ---------------------------------------------------------------------------------------


class Actor:
    """A worker of Ray: what is called are its own methods, as Ray would have it."""

    def meet(self, actors: list[Any]) -> None:
        """Learn whom to call."""
        self.actors = actors

    def there(self, figure: str, calls: int, seconds: float) -> dict[str, Any]:
        """Take a figure here."""
        return THERE[figure](RayCaller(self.actors), calls, seconds)

    def noop(self) -> None:
        """Nothing."""

    def plus_one(self, number: int) -> int:
        """As the function of that name."""
        import rpc_measures

        return rpc_measures.plus_one(number)

    def count(self, value: Any) -> int:
        """As the function of that name."""
        import rpc_measures

        return rpc_measures.count(value)

    def total(self, value: Any) -> float:
        """As the function of that name."""
        import rpc_measures

        return rpc_measures.total(value)

    def give(self, way: str) -> Any:
        """As the function of that name."""
        import rpc_measures

        return rpc_measures.give(way)


class RayCaller(Caller):
    """A caller for actors. A result is always left where it is made, until it is fetched."""

    ways = ("tensor", "numpy")

    def __init__(self, actors: list[Any]) -> None:
        import ray

        self.get, self.actors = ray.get, actors

    def send(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return getattr(self.actors[rank], function.__name__).remote(*args)

    def wait_all(self, sent: list[Any]) -> list[Any]:
        return self.get(sent)

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return self.get(getattr(self.actors[rank], function.__name__).remote(*args))

    refer = call


class RayActors(Side):
    """Four actors of Ray, each a process; the controller is Ray's driver."""

    def __init__(self) -> None:
        import ray

        self.ray: Any = ray
        self.version = ray.__version__

    def start(self) -> None:
        self.ray.init(
            num_cpus=WORKERS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=2**30,
            _node_ip_address="127.0.0.1",
        )
        kind = self.ray.remote(Actor)
        self.actors = [kind.remote() for _ in range(WORKERS)]
        self.caller = RayCaller(self.actors)

    def stop(self) -> None:
        del self.actors, self.caller
        self.ray.shutdown()

    def there(self, figure: str, calls: int, seconds: float) -> dict[str, Any]:
        self.ray.get([actor.meet.remote(self.actors) for actor in self.actors])
        found: dict[str, Any] = self.ray.get(
            self.actors[FROM].there.remote(figure, calls, seconds), timeout=PATIENCE
        )
        return found


def first_call(side: Side) -> None:
    """Wait until the worker that is measured has answered."""
    side.caller.call(TO, noop)


SIDES: dict[str, Callable[[], Side]] = {
    "discolab-processes": DiscolabProcesses,
    "discolab-threads": DiscolabThreads,
    "torch-rpc": TorchRpc,
    "ray": RayActors,
}

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
