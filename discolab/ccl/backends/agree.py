"""How the workers of several processes learn of each other before they choose a backend."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...runtime.worker import Worker
from ..board.diagnosis import call_site
from ..call import Call, Signature
from ..groups import Group
from ..rendezvous.remote import RemoteWork
from . import remote_mpi
from .remote_gloo import RemoteGlooBackend

_BOOT = "/proc/sys/kernel/random/boot_id"


class PeerInfo(NamedTuple):
    """What one worker says of itself: its device, the machine that it is on, its GPU's own name,
    and, where "mpi" is asked for, its `remote_mpi.Standing`.
    """

    rank: int
    device: str
    machine: str
    gpu: str
    nccl: bool
    mpi: Sequence[Any] = ()


def agree(backend: RemoteGlooBackend, worker: Worker, members: Group, name: str) -> list[PeerInfo]:
    """Meet all workers, who must ask for the same backend; what each says of itself, by rank.

    Raises
    ------
    CollectiveError
        If they ask for different backends.
    """
    own = json.dumps(_own_info(worker, name))
    infos = exchange(backend, worker, members, repr(name), own)
    return [PeerInfo(*json.loads(info)) for info in infos]


def exchange(
    backend: RemoteGlooBackend, worker: Worker, members: Group, about: str, text: str
) -> list[str]:
    """Meet all workers, each with a text; the texts, by rank.

    Raises
    ------
    CollectiveError
        If it is `about` something else for one of them.
    """
    call = Call("init_ccl", worker, members, Signature(f"init_ccl({about})"), call_site(worker))
    exchanged = _Exchange(backend.client, backend.conductor, backend.connect, call)
    backend.join(exchanged, text.encode()).wait()
    return [bytes(text).decode() for text in exchanged.texts]


def _own_info(worker: Worker, name: str) -> PeerInfo:
    gpu = ""
    if worker.device.type == "cuda":
        gpu = str(getattr(torch.cuda.get_device_properties(worker.device), "uuid", worker.device))
    nccl = torch.distributed.is_nccl_available()
    own = remote_mpi.standing(worker) if name == "mpi" else ()
    return PeerInfo(worker.worker_id, str(worker.device), machine(), gpu, nccl, own)


def machine() -> str:
    """The same in all processes of one machine, and different on another one."""
    try:
        with open(_BOOT, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


class _Exchange(RemoteWork):
    """A collective of a few bytes."""

    texts: Sequence[bytes] = ()

    def absorb(self, given: Sequence[bytes]) -> None:
        """See `RemoteWork`."""
        self.texts = given
