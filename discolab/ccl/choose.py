"""Which backend a worker uses.

`Worker.shared["discolab.ccl"]` maps ranks to backends; each worker writes its own entry.
`Worker.shared["discolab.ccl.<name>"]` is the one backend object of that name that all workers of
the session in this process share.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from ..runtime import accelerators
from ..runtime.errors import ArgumentError
from ..runtime.restart import at_replaced, at_restart
from ..runtime.services import PRELOAD, SERVICES, Service
from ..runtime.worker import Worker, at_leave, current_worker
from ..transport.addresses import machine_id
from . import checks
from .backend import Backend, BackendStatistics
from .backends import libraries
from .backends.local import LocalBackend
from .call import Call, Signature, call_site
from .groups import resolve
from .rendezvous.client import has_coordinator
from .rendezvous.local import LocalRendezvous

_CHOSEN = "discolab.ccl"


def backends() -> tuple[str, ...]:
    """The names for `init_ccl`, among them that of the devices' library; ``"nccl"`` for CUDA."""
    return ("local", "gloo", libraries.library_name(), "mpi")


def backend_of(worker: Worker) -> Backend:
    """The backend of a worker; the first collective chooses "auto" if nobody has."""
    chosen = worker.shared.get(_CHOSEN)
    backend = None if chosen is None else chosen.get(worker.worker_id)
    if backend is not None:
        return cast(Backend, backend)
    return _choose(worker, _automatic(worker))


def backend_name() -> str:
    """The name of the calling worker's backend."""
    return backend_of(current_worker()).name


def statistics() -> BackendStatistics:
    """What the calling worker's backend holds: open collectives, messages on their way."""
    return backend_of(current_worker()).statistics()


def init(name: Any, device_ids: tuple[Any, ...]) -> str:
    """Choose the backend of the calling worker and, with `device_ids`, its GPU.

    A collective of all workers: none changes its backend unless all are asked for the same.

    Returns
    -------
    str
        What was chosen, and why: ``"local: 4 workers in one process on cpu"``.

    Raises
    ------
    ArgumentError
        If there is no backend of that name or no such GPU, or the workers can't use it.
    CollectiveError
        If the workers are asked for different ones.
    """
    worker = checks.calling_worker("init_ccl")
    if name == "rccl":
        name = "nccl"  # as torch calls it
        if torch.version.hip is None:
            kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
            raise ArgumentError(
                f"init_ccl: 'rccl' needs a torch for ROCm, and this one is for {kind}; "
                "'auto' chooses what it has"
            )
    if name != "auto" and name not in backends():
        names = ", ".join(map(repr, backends()))
        raise ArgumentError(
            f"init_ccl: there is no backend {name!r}; there are {names}, and 'auto' chooses"
        )
    if device_ids:
        _use_gpu(worker, device_ids)
    peers = _agree(worker, name)
    if name == "auto":
        name = _automatic(worker, peers)
    else:
        why_not = _obstacle(name, worker, peers)
        if why_not:
            raise ArgumentError(f"init_ccl: {why_not}")
    return f"{_choose(worker, name).name}: {_situation(worker, name, peers)}"


class PeerInfo(NamedTuple):
    """What one of the workers of several processes says of itself: its device, the machine that it
    is on, its GPU's own name, the library for that which it has ("": none), and, where "mpi" is
    asked for, its `remote_mpi.Standing`.
    """

    rank: int
    device: str
    machine: str
    gpu: str
    library: str
    mpi: Sequence[Any] = ()


def _agree(worker: Worker, name: str) -> Sequence[PeerInfo]:
    """Meet the other workers, which must ask for the same; what those of other processes say."""
    if has_coordinator(worker):
        infos = _exchange(worker, repr(name), json.dumps(_own_info(worker, name)))
        return [PeerInfo(*json.loads(info)) for info in infos]
    members = resolve(worker, "world", "init_ccl")
    if len(worker.peers) == len(members) > 1:
        asked = Signature(f"init_ccl({name!r})")
        call = Call("init_ccl", worker, members, asked, call_site(worker))
        _made(worker, "local").barrier(call).wait()
    return ()


def _exchange(worker: Worker, about: str, text: str) -> list[str]:
    """The texts of all workers that meet at a coordinator, by rank."""
    backend: Any = _made(worker, "gloo")
    texts: list[str] = backend.exchange(worker, about, text)
    return texts


def _own_info(worker: Worker, name: str) -> PeerInfo:
    gpu, device = "", worker.device
    if libraries.has_library(device):
        properties = accelerators.module_of(device).get_device_properties(device)
        gpu = str(getattr(properties, "uuid", device))
    has = libraries.library_name() if libraries.is_available() else ""
    standing = _library("remote_mpi").standing(worker) if name == "mpi" else ()
    return PeerInfo(worker.worker_id, str(device), machine_id(), gpu, has, standing)


def _library(name: str) -> Any:
    """A module of `backends`, imported when it is first asked for: most sessions need none."""
    return importlib.import_module(f".backends.{name}", __package__)


def _automatic(worker: Worker, peers: Sequence[Any] = ()) -> str:
    """The name of the best backend; the same on all workers, for all see the same.

    Without `peers`, workers at a coordinator do not know which GPUs the others have.
    """
    if has_coordinator(worker):
        several = accelerators.on_accelerator(worker.device) and bool(peers)
        fit = several and not _library("remote_device_library").obstacle(peers)
        return libraries.library_name() if fit else "gloo"
    if len(worker.peers) < worker.num_workers:
        return "mpi"
    several = worker.num_workers > 1 and accelerators.on_accelerator(worker.device)
    fit = several and not _library("device_library").obstacle(_workers(worker))
    return libraries.library_name() if fit else "local"


def _obstacle(name: str, worker: Worker, peers: Sequence[Any]) -> str:
    """Why the workers can't use a backend, "" if they can."""
    if name == "mpi":
        if has_coordinator(worker):
            mpi = _library("remote_mpi")
            return str(mpi.obstacle([mpi.Standing(*peer.mpi) for peer in peers]))
        return str(_library("mpi").obstacle(worker))
    if has_coordinator(worker):
        if name == "local":
            return (
                "'local' reads the memory of all workers, and these have a process each; use "
                f"'gloo', or {libraries.library_name()!r} where each has a GPU of its own"
            )
        return "" if name == "gloo" else str(_library("remote_device_library").obstacle(peers))
    if len(worker.peers) < worker.num_workers:
        return f"{name!r} needs all workers in one process; for one process each there is 'mpi'"
    if name == "local":
        return ""
    if name == "gloo":
        return str(_library("gloo").obstacle())
    return str(_library("device_library").obstacle(_workers(worker)))


def _situation(worker: Worker, name: str, peers: Sequence[Any]) -> str:
    count = worker.num_workers
    workers = f"{count} workers" if count > 1 else "1 worker"
    if name == "mpi":
        return f"{workers}, one a process"
    if peers:
        devices = ", ".join(sorted({peer.device for peer in peers}))
        machines = len({peer.machine for peer in peers})
        where = f" of {machines} machines" if machines > 1 else ""
        return f"{workers} in {count} processes{where} on {devices}"
    devices = ", ".join(sorted({str(peer.device) for peer in worker.peers.values()}))
    return f"{workers} in one process on {devices}"


def _choose(worker: Worker, name: str) -> Backend:
    backend = _made(worker, name)
    chosen = worker.shared.setdefault(_CHOSEN, {})
    before = chosen.get(worker.worker_id)
    backend.admit(worker)
    chosen[worker.worker_id] = backend
    if before is not None and before is not backend:
        before.dismiss(worker)
    return backend


def choose_again(name: str) -> None:
    """Choose the backend that the others have, on a worker that takes a lost one's place.

    Raises
    ------
    ArgumentError
        If its members can't be replaced.
    """
    if name == "mpi":
        raise ArgumentError(
            "'mpi' has the processes that it began with, and a new one can't join them: "
            "%disco_restart, or init_ccl with another backend"
        )
    _choose(current_worker(), name)


def _for_new_worker(session: Any) -> Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    name = session.collectives.partition(":")[0]
    return [("its collectives", choose_again, (name,))] if name else []


at_restart.append(_for_new_worker)


def _backends(worker: Worker) -> list[Backend]:
    """Those that the session has in this process."""
    made = (worker.shared.get(f"{_CHOSEN}.{name}") for name in backends())
    return [backend for backend in made if backend is not None]


def _replaced(worker: Worker) -> None:
    """Another worker thread has the place of a lost one: what needs that one can't complete."""
    for backend in _backends(worker):
        backend.replaced(worker)
    worker.shared.get(_CHOSEN, {}).pop(worker.worker_id, None)


at_replaced.append(_replaced)


def _leave(worker: Worker) -> None:
    """A worker ends."""
    for backend in _backends(worker):
        backend.dismiss(worker)


def _coordinator(connections: Any) -> Service:
    made: Service = importlib.import_module(".coordinator.coordinator", __package__).Coordinator(
        connections
    )
    return made


SERVICES["ccl"] = _coordinator
PRELOAD += [f"{__package__}.backends.{name}" for name in ("remote_gloo", "remote_mpi")]


def _made(worker: Worker, name: str) -> Backend:
    """The session's one backend of that name, in this process."""
    key = f"{_CHOSEN}.{name}"
    backend = worker.shared.get(key)
    if backend is None:
        backend = worker.shared.setdefault(key, _MAKERS.get(name, _make_device_library)(worker))
    return cast(Backend, backend)


def _local(worker: Worker) -> LocalBackend:
    return cast(LocalBackend, _made(worker, "local"))


def _make_device_library(worker: Worker) -> Backend:
    made: Backend
    if has_coordinator(worker):
        made = _library("remote_device_library").RemoteDeviceLibraryBackend(worker)
    else:
        made = _library("device_library").DeviceLibraryBackend(_local(worker))
    return made


_MAKERS: dict[str, Callable[[Worker], Backend]] = {
    "local": lambda worker: LocalBackend(LocalRendezvous(worker.peers)),
    "gloo": lambda worker: (
        _library("remote_gloo").RemoteGlooBackend(worker)
        if has_coordinator(worker)
        else _library("gloo").GlooBackend(_local(worker))
    ),
    "mpi": lambda worker: (
        _library("remote_mpi").connect(worker, functools.partial(_exchange, worker))
        if has_coordinator(worker)
        else _library("mpi").backend(worker)
    ),
}


at_leave.append(_leave)


def _workers(worker: Worker) -> Sequence[Worker]:
    return [worker.peers[rank] for rank in sorted(worker.peers)]


def _use_gpu(worker: Worker, device_ids: tuple[Any, ...]) -> None:
    if len(device_ids) != worker.num_workers:
        raise ArgumentError(
            f"init_ccl got {len(device_ids)} device ids for {worker.num_workers} workers; give "
            "one for each, or none"
        )
    index, count = device_ids[worker.worker_id], accelerators.count()
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
        raise ArgumentError(
            f"init_ccl: worker {worker.worker_id} can't use GPU {index!r}: torch sees {count} GPUs"
            + ("; give no device ids to stay on the CPU" if not count else "")
        )
    device = torch.device(accelerators.kind() or "cpu", index)
    if device != worker.device:
        accelerators.set_current(device)
        worker.device = device
