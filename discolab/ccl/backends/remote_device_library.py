"""A device's library (NCCL, RCCL) between workers in several processes, on their own devices.

Members meet at the coordinator as for Gloo; what they then do is done by their conductors as within
one process (device_library.py). Everything else (CPU tensors, messages, barriers) is as for Gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...runtime.failures import name_ranks
from ...runtime.worker import Worker
from .. import memory
from ..backend import Tensors
from ..call import Call
from ..coordinator import protocol
from ..pattern import CROSSWISE, Pattern
from ..rendezvous.client import CoordinatorClient
from ..rendezvous.conductor import Connect, Gone, ProcessGroup, Ranks
from ..rendezvous.remote import RemoteWork
from ..rendezvous.store import GroupStore
from ..work import Work
from . import device_library, encoding, libraries, nccl, steps
from .process_groups import STEP_SECONDS, moves_nothing
from .remote_gloo import RemoteGlooBackend


class RemoteDeviceLibraryBackend(RemoteGlooBackend):
    """Collectives of tensors on the workers' own devices by their library, of others by Gloo."""

    devices_only = True

    def __init__(self, worker: Worker) -> None:
        self.name = libraries.library_name()
        nccl.set_environment()
        super().__init__(worker)
        self.stream = torch.Stream(worker.device)
        end_all = functools.partial(self.client.tell, protocol.DISMISS)
        device_library.end_if_stuck(worker, end_all)
        self.connect_library: Connect = functools.partial(_connect, self.client, worker.device)

    def start(self, call: Call, pattern: Pattern, srcs: Tensors, outs: Tensors) -> Work:
        if not call.on_gpu or len(call.group) == 1:
            return super().start(call, pattern, srcs, outs)
        device_library.check_devices(call, (*srcs, *outs), self.name, "gloo")
        work = _DeviceWork(self, call, pattern, srcs, outs)
        return self.join(work, None, (srcs, outs) if pattern.kind == CROSSWISE else None)


class _DeviceWork(RemoteWork):
    """A collective by the library."""

    def __init__(
        self,
        backend: RemoteDeviceLibraryBackend,
        call: Call,
        pattern: Pattern,
        srcs: Tensors,
        outs: Tensors,
    ) -> None:
        place = steps.Place(call.group.index(call.rank), pattern.members, encoding.ARITHMETIC)
        self._program = steps.program(pattern, place, srcs, outs)
        self._srcs, self._outs, self._stream = srcs, outs, backend.stream
        self._begun = memory.record(srcs, outs)
        self._done: Sequence[memory.Event] = ()
        self.adopt = self._wait_for_device
        super().__init__(backend.client, backend.conductor, backend.connect_library, call)

    def carry_out(self, end: ProcessGroup) -> None:

        def do(step: steps.Step) -> None:
            if self.void():
                raise Gone
            if not moves_nothing(step):
                device_library.perform(end, step)

        stream, srcs, outs = self._stream, self._srcs, self._outs
        with device_library.on(stream):
            device_library.run(self._program, do, stream, self._begun, srcs, outs)()
            self._done = memory.record(srcs, outs)

    def done(self) -> bool:
        """See `Work`: once the device has done it; whoever has polled may not wait as well."""
        return super().done() and all(event.query() for event in self._done)

    def _wait_for_device(self) -> None:
        """The worker's streams wait for what this one has been given."""
        memory.wait_for(self._done, self._srcs, self._outs)


def _connect(
    client: CoordinatorClient,
    device: torch.device,
    ranks: Ranks,
    number: int,
    unwanted: Callable[[], bool],
) -> ProcessGroup:
    """This worker's end of a process group of the library."""
    store = GroupStore(client, f"{number}/device/", STEP_SECONDS, unwanted)
    made = device_library.connect(store, ranks.index(client.worker.worker_id), len(ranks), device)
    store.connected = True
    return made


def obstacle(peers: Sequence[Any]) -> str:
    """Why workers can't use it, "" if they can; from what they have said (`choose.PeerInfo`)."""
    way_out = "; use 'gloo', which moves tensors on any devices"
    gpus = {peer.rank: (peer.machine, peer.gpu) if peer.gpu else () for peer in peers}
    text = device_library.lacking_gpus(gpus, way_out, named=False)
    name = libraries.library_name()
    lacking = [peer.rank for peer in peers if peer.library != name]
    if not text and lacking:
        text = f"torch was built without {name.upper()} on {name_ranks(lacking)}{way_out}"
    return text
