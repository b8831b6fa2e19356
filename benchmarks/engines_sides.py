"""One adapter for each runtime whose workers are processes, for engines_child.py.

All have the same methods (see `Side`), and each uses the quickest way that its runtime documents
for what is asked. Worker number `FAR` is in another process than the controller with every side,
and on the other node where there are two.

Values that workers hold: ``small``, the worker's number, and ``big``, the tensor of `make_big`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch

WORKERS = 4
FAR = 2  # the worker that big values are fetched from
BIG = 64 * 2**20 // 4  # elements of float32: 64 MB
PATIENCE = 120.0  # seconds that a start or an answer may take
WORKER_ID = "runtime.disco.worker_id"
MAKE_BIG = f"import torch; big = torch.remainder(torch.arange({BIG}, dtype=torch.float32), 251)"


def make_big() -> torch.Tensor:
    """The big value: 64 MB, no two neighbours alike, each page of it written."""
    return torch.remainder(torch.arange(BIG, dtype=torch.float32), 251)


def noop() -> None:
    """What the workers are asked to do."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end(process: subprocess.Popen[Any], patience: float = 10.0) -> None:
    """Wait until a process has ended; end it if that takes longer than `patience` seconds."""
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Side:
    """A runtime with `WORKERS` workers."""

    version = ""
    restarts = True  # whether `start` can be called again after `stop`
    pipelines = True  # whether calls can be sent without waiting for each

    def start(self) -> None:
        """Start all; it may return before the workers can answer."""
        raise NotImplementedError

    def stop(self) -> None:
        """End all."""
        raise NotImplementedError

    def send(self) -> Any:
        """Ask every worker for a no-op; what it returns is given to `wait`, unless it is None."""
        raise NotImplementedError

    def wait(self, sent: list[Any]) -> None:
        """Wait until all workers have done all that was sent."""
        raise NotImplementedError

    def call(self) -> None:
        """A no-op on all workers, and wait for all."""
        self.wait([self.send()])

    def other_calls(self) -> dict[str, Callable[[], None]]:
        """Further ways to have a no-op done by all, by name."""
        return {}

    def hold_small(self) -> None:
        """Have every worker hold its small value."""
        raise NotImplementedError

    def fetch_small(self) -> list[int]:
        """The small value of each worker, in order."""
        raise NotImplementedError

    def hold_big(self) -> None:
        """Have worker `FAR` hold the big value."""
        raise NotImplementedError

    def big_ways(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Ways to fetch the big value from worker `FAR`, by the type that travels."""
        raise NotImplementedError


class Discolab(Side):
    """A session of discolab on one of its engines."""

    engine: ClassVar[str]

    def __init__(self) -> None:
        import discolab

        self.version = discolab.__version__
        self.make = discolab.make_session

    def start(self) -> None:
        self.session = self.make(WORKERS, engine=self.engine)
        self.function = self.session.get_global_func(WORKER_ID)

    def stop(self) -> None:
        del self.function
        self.small = self.big = None
        self.session.shutdown()

    def send(self) -> None:
        self.function()  # the result is dropped at once

    def wait(self, sent: list[Any]) -> None:
        self.session.sync_all()

    def other_calls(self) -> dict[str, Callable[[], None]]:
        def python() -> None:
            self.session.call_packed(noop)
            self.session.sync_all()

        return {"python": python}

    def hold_small(self) -> None:
        self.small: Any = self.function()

    def fetch_small(self) -> list[int]:
        return self.small.debug_get_from_all()  # type: ignore[no-any-return]

    def hold_big(self) -> None:
        numbers = self.session.call_packed(torch.arange, BIG, dtype=torch.float32)
        self.big: Any = torch.remainder(numbers, 251)
        self.session.sync_all()

    def big_ways(self) -> dict[str, Callable[[], torch.Tensor]]:
        return {"tensor": lambda: self.big.debug_get_from_remote(FAR)}


class DiscolabProcesses(Discolab):
    """Worker 0 is a thread of this process, three are processes."""

    engine = "processes"


class DiscolabSockets(Discolab):
    """Two workers here, two on a node that is another process, over TCP on this machine."""

    engine = "sockets"

    def start(self) -> None:
        port, keys = free_port(), os.path.join(tempfile.gettempdir(), "discolab-benchmark.keys")
        node = ["node", "--connect", f"tcp://127.0.0.1:{port}", "--key-file", keys]
        self.node = subprocess.Popen([sys.executable, "-m", "discolab", *node])
        self.session = self.make(WORKERS, engine=self.engine, nodes=2, port=port, key_file=keys)
        self.function = self.session.get_global_func(WORKER_ID)

    def stop(self) -> None:
        super().stop()
        end(self.node)


class DiscolabRay(Discolab):
    """Worker 0 is a thread of this process, three are actors of Ray."""

    engine = "ray"

    def start(self) -> None:
        start_ray()
        super().start()

    def stop(self) -> None:
        super().stop()
        stop_ray()


class DiscoProcesses(Side):
    """TVM's ProcessSession: worker 0 is a thread of this process, three are processes."""

    def __init__(self) -> None:
        from control_plane_child import load_disco

        self.disco, self.version = load_disco()

    def start(self) -> None:
        self.session = self.disco.ProcessSession(WORKERS)
        self.function = self.session.get_global_func(WORKER_ID)

    def stop(self) -> None:
        del self.function
        self.small = self.big = None
        self.session.shutdown()
        del self.session

    def send(self) -> None:
        self.function()

    def wait(self, sent: list[Any]) -> None:
        self.session._sync_all()

    def hold_small(self) -> None:
        self.small: Any = self.function()

    def fetch_small(self) -> list[int]:
        return [self.small.debug_get_from_remote(rank)[0] for rank in range(WORKERS)]

    def hold_big(self) -> None:
        self.big: Any = self.session.empty((BIG,), "float32")
        self.big.debug_copy_from(FAR, make_big().numpy())
        self.session._sync_all()

    def big_ways(self) -> dict[str, Callable[[], torch.Tensor]]:
        return {"tensor": lambda: torch.from_dlpack(self.big.debug_get_from_remote(FAR))}


class DiscoSockets(DiscoProcesses):
    """TVM's SocketSession: two workers here, two on a node that is another process."""

    NODE = (
        "import runpy, control_plane_child; control_plane_child.load_disco(); "
        "runpy.run_module('tvm.exec.disco_remote_socket_session', run_name='__main__')"
    )

    def start(self) -> None:
        here = "127.0.0.1", str(free_port())
        self.node = subprocess.Popen([sys.executable, "-c", self.NODE, *here, "2"])
        self.session = self.disco.SocketSession(2, WORKERS // 2, 1, here[0], int(here[1]))
        self.function = self.session.get_global_func(WORKER_ID)

    def stop(self) -> None:
        super().stop()
        end(self.node)


def start_ray() -> None:
    """A Ray of our own, on this machine only."""
    import ray

    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=2**30,
    )


def stop_ray() -> None:
    """End it."""
    import ray

    ray.shutdown()


class RayActors(Side):
    """Four actors of Ray."""

    def __init__(self) -> None:
        import ray

        self.ray = ray
        self.version = ray.__version__

        @ray.remote
        class Holder:
            def __init__(self, rank: int) -> None:
                self.rank = rank

            def noop(self) -> None:
                pass

            def small(self) -> int:
                return self.rank

            def hold(self, code: str) -> None:
                names: dict[str, Any] = {}
                exec(code, names)
                self.held = names["big"]

            def tensor(self) -> Any:
                return self.held

            def array(self) -> Any:
                return self.held.numpy()

        self.Holder = Holder

    def start(self) -> None:
        start_ray()
        self.actors = [self.Holder.remote(rank) for rank in range(WORKERS)]

    def stop(self) -> None:
        del self.actors
        stop_ray()

    def send(self) -> list[Any]:
        return [actor.noop.remote() for actor in self.actors]

    def wait(self, sent: list[Any]) -> None:
        self.ray.get([ref for refs in sent for ref in refs])

    def hold_small(self) -> None:
        pass

    def fetch_small(self) -> list[int]:
        return self.ray.get([actor.small.remote() for actor in self.actors])  # type: ignore[no-any-return]

    def hold_big(self) -> None:
        self.ray.get(self.actors[FAR].hold.remote(MAKE_BIG))

    def big_ways(self) -> dict[str, Callable[[], torch.Tensor]]:
        far = self.actors[FAR]
        return {
            "tensor": lambda: self.ray.get(far.tensor.remote()),
            "numpy": lambda: torch.from_numpy(self.ray.get(far.array.remote())),
        }


_held: dict[str, Any] = {}  # what a worker of torch's RPC holds


def _rpc_worker(rank: int, port: int) -> None:
    """Body of a worker process: answer until the controller shuts down."""
    _init_rpc(f"worker{rank}", rank + 1, port)
    torch.distributed.rpc.shutdown()


def _init_rpc(name: str, rank: int, port: int) -> None:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=PATIENCE
    )
    rpc.init_rpc(name, rank=rank, world_size=WORKERS + 1, rpc_backend_options=options)


def _rpc_hold(what: str, value: Any) -> None:
    _held[what] = make_big() if what == "big" else value


class TorchRpc(Side):
    """torch.distributed.rpc over TensorPipe: this process and four worker processes."""

    version = torch.__version__
    restarts = False  # both ends count their starts, so new workers never meet an old controller

    def __init__(self) -> None:
        import torch.distributed.rpc

        self.rpc = torch.distributed.rpc
        self.names = [f"worker{rank}" for rank in range(WORKERS)]

    def start(self) -> None:
        port = free_port()
        spawn = torch.multiprocessing.get_context("spawn")
        self.processes = [
            spawn.Process(target=_rpc_worker, args=(rank, port)) for rank in range(WORKERS)
        ]
        for process in self.processes:
            process.start()
        _init_rpc("controller", 0, port)

    def stop(self) -> None:
        self.rpc.shutdown()
        for process in self.processes:
            process.join(10)
            process.kill()
            process.join()

    def send(self) -> list[Any]:
        return [self.rpc.rpc_async(name, noop) for name in self.names]

    def wait(self, sent: list[Any]) -> None:
        for futures in sent:
            for future in futures:
                future.wait()

    def hold_small(self) -> None:
        for rank, name in enumerate(self.names):
            self.rpc.rpc_sync(name, _rpc_hold, ("small", rank))

    def fetch_small(self) -> list[int]:
        futures = [self.rpc.rpc_async(name, _held_here, ("small",)) for name in self.names]
        return [future.wait() for future in futures]

    def hold_big(self) -> None:
        self.rpc.rpc_sync(self.names[FAR], _rpc_hold, ("big", None))

    def big_ways(self) -> dict[str, Callable[[], torch.Tensor]]:
        return {"tensor": lambda: self.rpc.rpc_sync(self.names[FAR], _held_here, ("big",))}


def _held_here(what: str) -> Any:
    return _held[what]


class IPyParallel(Side):
    """A cluster of ipyparallel with four engines, and a DirectView on them."""

    def __init__(self) -> None:
        import ipyparallel

        self.ipp = ipyparallel
        self.version = ipyparallel.__version__

    def start(self) -> None:
        self.cluster = self.ipp.Cluster(n=WORKERS, log_level=40)
        self.client = self.cluster.start_and_connect_sync()
        self.view = self.client[:]

    def stop(self) -> None:
        self.client.close()
        self.cluster.stop_cluster_sync()

    def send(self) -> Any:
        return self.view.apply_async(noop)

    def wait(self, sent: list[Any]) -> None:
        for result in sent:
            result.get()

    def hold_small(self) -> None:
        for rank in range(WORKERS):
            self.client[rank].push({"small": rank}, block=True)

    def fetch_small(self) -> list[int]:
        return self.view.pull("small", block=True)  # type: ignore[no-any-return]

    def hold_big(self) -> None:
        self.client[FAR].execute(f"{MAKE_BIG}; array = big.numpy()", block=True)

    def big_ways(self) -> dict[str, Callable[[], torch.Tensor]]:
        far = self.client[FAR]
        return {
            "tensor": lambda: far.pull("big", block=True),
            "numpy": lambda: torch.from_numpy(far.pull("array", block=True)),
        }


class NbDistributed(Side):
    """The processes and the wire of nbdistributed, driven without its magics.

    Its magics end workers by name all over the machine; the classes below them do not.
    """

    pipelines = False

    def __init__(self) -> None:
        from importlib.metadata import version

        from nbdistributed.communication import CommunicationManager
        from nbdistributed.process_manager import ProcessManager

        self.version = version("nbdistributed")
        self.wire, self.manager = CommunicationManager, ProcessManager

    def start(self) -> None:
        # it starts "python" by that name
        os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
        self.processes = self.manager()
        self.comm = self.wire(WORKERS, self.processes.start_workers(WORKERS))
        deadline = time.monotonic() + PATIENCE
        while True:  # what is sent to a worker that has not connected yet is lost
            try:
                self.comm.send_to_all("get_status", {}, timeout=0.2)
                return
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise

    def stop(self) -> None:
        self.comm.shutdown()
        self.processes.shutdown()

    def call(self) -> None:
        self.comm.send_to_all("execute", "pass", timeout=PATIENCE)

    def hold_small(self) -> None:
        self.comm.send_to_all("execute", "small = rank", timeout=PATIENCE)

    def fetch_small(self) -> list[int]:
        answers = self.comm.send_to_all("get_var", "small", timeout=PATIENCE)
        return [answers[rank]["value"] for rank in range(WORKERS)]

    def hold_big(self) -> None:
        self.comm.send_to_rank(FAR, "execute", MAKE_BIG, timeout=PATIENCE)

    def big_ways(self) -> dict[str, Callable[[], torch.Tensor]]:
        def tensor() -> torch.Tensor:
            return self.comm.send_to_rank(FAR, "get_var", "big", timeout=PATIENCE)["value"]  # type: ignore[no-any-return]

        return {"tensor": tensor}


SIDES: dict[str, Callable[[], Side]] = {
    "discolab-processes": DiscolabProcesses,
    "tvm-processes": DiscoProcesses,
    "torch-rpc": TorchRpc,
    "ray": RayActors,
    "ipyparallel": IPyParallel,
    "nbdistributed": NbDistributed,
    "discolab-sockets": DiscolabSockets,
    "tvm-sockets": DiscoSockets,
    "discolab-ray": DiscolabRay,
}
