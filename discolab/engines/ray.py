"""Workers as Ray actors: Ray places them on a cluster, starts them and watches over them.

Worker 0 is a thread of this process. Each other worker is the main thread of an actor's process,
one bundle of a placement group each (ray_actors.py); it connects to the session's port
(connections/tcp.py), with keys made for this one session, and commands go that way: no call of
Ray's is on the path.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.arguments import parse_device
from ..runtime.errors import ArgumentError, DiscoError
from ..transport.addresses import checked_endpoint, machine_id
from ..transport.handshake import Keys
from .connections.tcp import TcpTransport
from .membership import versions
from .placement import check_world, place_workers
from .ray_actors import Actor, Actors, Slot, gpu_places, seen_here
from .ray_cluster import Cluster, join, leave
from .remote_session import (
    HEARTBEAT,
    START_TIMEOUT,
    Progress,
    RemoteSession,
    positive_seconds,
)

_LOOK = 0.2  # seconds between two checks which actors are missing


class RaySession(RemoteSession):
    """A session whose workers, but for worker 0, are actors of a Ray cluster.

    Parameters
    ----------
    num_workers, num_groups, timeout, heartbeat, start_timeout, progress
        As for `ProcessSession`; the cluster's part in starting counts too.
    devices
        ``"cpu"``, or ``"cuda"``: GPUs that Ray chooses. None: GPUs where the cluster and this
        process have some.
    address
        The cluster: ``"auto"`` is the one that runs on this machine, ``"host:port"`` and
        ``"ray://host:port"`` name one. None: the one that this process is in, or that $RAY_ADDRESS
        names; where there is neither, one of our own on this machine, which ends with the last
        session that uses it. A cluster that was there stays.
    num_cpus, num_gpus
        What each worker takes of the cluster; `num_gpus` None: one where workers compute on GPUs.
        Worker 0 takes no CPU of it, but its share of GPUs, on this machine.
    host, port
        Where this process awaits its workers. None: the loopback interface for a cluster of our
        own, else this machine's address in the cluster. Port 0: any that is free.
    respawn
        As for `ProcessSession`; a new actor takes seconds, as it imports torch.

    Raises
    ------
    ArgumentError
        If the numbers do not fit, a device is not there, or Ray is not installed.
    DiscoError
        If the cluster is not there or has no room, or a worker could not start; what was started is
        ended then.

    Examples
    --------
    >>> with RaySession(2) as sess:  # doctest: +SKIP
    ...     ranks = sess.call_packed(sess.get_global_func("runtime.disco.worker_id"))
    ...     ranks.debug_get_from_all()
    [0, 1]
    """

    engine = "ray"

    def __init__(
        self,
        num_workers: int,
        num_groups: int = 1,
        devices: Any = None,
        *,
        address: str | None = None,
        num_cpus: float = 1,
        num_gpus: float | None = None,
        host: str | None = None,
        port: int = 0,
        timeout: float | None = None,
        heartbeat: float = HEARTBEAT,
        start_timeout: float = START_TIMEOUT,
        progress: Progress | None = None,
        respawn: bool = False,
    ) -> None:
        num_workers, num_groups = check_world(num_workers, num_groups)
        wanted = _kind(num_workers, devices)
        Slot(num_cpus, 1 if num_gpus is None else num_gpus)  # an error in them is raised at once
        checked_endpoint(host or "127.0.0.1", port)
        positive_seconds(heartbeat, "heartbeat")
        seconds = positive_seconds(start_timeout, "start_timeout")
        began = time.monotonic()
        cluster = join(address, num_workers, seconds, progress or _say_nothing)
        try:
            kind = wanted or _best_kind(cluster)
            gpus = num_gpus if num_gpus is not None else float(kind == "cuda")
            if kind == "cuda" and not gpus:
                raise ArgumentError(
                    "num_gpus=0 leaves workers no GPU: devices='cpu', or num_gpus=1"
                )
            self._slot = Slot(num_cpus, gpus)
            self._keys = Keys.fresh()
            transport = TcpTransport(checked_endpoint(host or cluster.host(), port), self._keys)
        except BaseException:
            leave(cluster)
            raise
        self._transport, self._cluster = transport, cluster
        self._actors = actors = Actors(cluster, transport)
        self._texts: list[int] = []  # ends of pipes that actors have not taken yet
        self._begun = False
        try:
            super().__init__(
                num_workers,
                num_groups,
                [torch.device(kind, 0) if kind == "cuda" else torch.device(kind)] * num_workers,
                transport,
                actors,
                timeout=timeout,
                heartbeat=heartbeat,
                start_timeout=start_timeout,
                progress=progress,
                respawn=respawn,
            )
        except BaseException:
            transport.close()
            actors.end()
            raise
        self._connections.services["ray"] = actors
        self._deadline = began + self._start_timeout
        try:
            self._begin()
            self._begun = True
        finally:
            self._close_texts()

    # -- starting ----------------------------------------------------------------------------

    def _start_processes(self) -> None:
        self.hosts, self._local_ranks = [machine_id()], {0: 0}
        if self.num_workers > 1:
            self._start_actors()
        self._connections.hosts = self.hosts
        link = self._local.workers[0].link
        assert link is not None
        link.host = self._cluster.host()

    def _start_actors(self) -> None:
        actors, remote = self._actors, range(1, self.num_workers)
        bundles = [self._slot.bundle for _ in remote]
        if self._devices[0].type == "cuda":
            bundles.append(self._bundle_of_worker_0())  # last: the others have their ranks' indexes
        self._reserve(bundles)
        made = [actors.start(index, bundle) for index, bundle in enumerate(bundles)]
        answers = self._await_answers(made, f"{len(remote)} Ray actors")
        here = machine_id()
        order = sorted(
            range(len(remote)),
            key=lambda i: (answers[i]["machine"] != here, answers[i]["machine"], answers[i]["pid"]),
        )
        facts = [answers[index] for index in order]
        self.hosts += [fact["machine"] for fact in facts]
        seen: list[Any] = [None for _ in remote]
        if len(made) > len(remote):
            ours = actors.answer(_LOOK + self._left(), made[-1].handle.gpus.remote())
            seen = self._give_gpus(facts, ours)
        for rank, index in zip(remote, order, strict=True):
            settings = self._settings_of(rank, facts[rank - 1]) | {"gpus": seen[rank - 1]}
            actors.work(rank, made[index], facts[rank - 1], settings)

    def _await_answers(self, made: Sequence[Actor], what: str) -> list[dict[str, Any]]:
        """What new actors say of themselves; they have the versions that must be there."""
        asked = [actor.handle.about.remote(sys.path) for actor in made]
        answers, began = None, time.monotonic()
        while answers is None:
            answers = self._actors.answers(asked, _LOOK)
            self._check_open()
            self._check_deadline(f"{what} did not start")
            if (seconds := time.monotonic() - began) > 1 and not self._begun:
                self._say(f"starting {what}, which import torch ({seconds:.0f} s)")
        _check_versions(answers)
        return answers

    # -- another actor in the place of one that was lost -----------------------------------------

    def _prepare(self, rank: int) -> None:
        self._actors.detach(rank)
        self._deadline = time.monotonic() + self._start_timeout
        try:
            super()._prepare(rank)
        finally:
            self._close_texts()

    def _start_another(self, rank: int) -> None:
        actors = self._actors
        actor = actors.start_another(rank)
        try:
            (facts,) = self._await_answers([actor], f"another Ray actor, worker {rank},")
            self.hosts[rank] = facts["machine"]
            seen = self._give_gpus_to_another(rank, facts)
            actors.work(rank, actor, facts, self._settings_of(rank, facts) | {"gpus": seen})
        except BaseException:
            actors.kill(actor)
            raise

    def _kill_process(self, rank: int) -> None:
        self._actors.kill_of(rank)

    def _reserve(self, bundles: list[dict[str, float]]) -> None:
        actors, count = self._actors, len(bundles)
        actors.reserve(bundles)
        while not actors.reserved():
            fit, has = actors.room(self._slot)
            needed = f"Ray has no room for {count} workers that take {self._slot} each: {has}"
            if not self._left() or (fit < count and self._cluster.local):
                waited = f"; waited {self._start_timeout:g} s (start_timeout=)"
                raise DiscoError(
                    f"{needed}{'' if self._left() else waited}. Ask for fewer workers, for less of "
                    "it for each (num_cpus=, num_gpus=), or end what holds it"
                )
            self._say(f"waiting: {needed}")

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _check_deadline(self, what: str) -> None:
        if not self._left():
            raise DiscoError(f"{what} within {self._start_timeout:g} s (start_timeout=)")

    def _bundle_of_worker_0(self) -> dict[str, float]:
        """The bundle with worker 0's share of this machine's GPUs, which an idle actor holds."""
        here = self._cluster.node_here()
        for node in self._cluster.ray.nodes():
            if node["NodeID"] == here and node["Resources"].get("GPU", 0) >= self._slot.gpus:
                return {"GPU": self._slot.gpus, f"node:{node['NodeManagerAddress']}": 0.001}
        raise DiscoError(
            "worker 0 lives in this process, and the cluster has no GPU on this machine for it: "
            "start the session on a node with GPUs, or with devices='cpu'"
        )

    def _give_gpus(self, facts: list[dict[str, Any]], ours: list[str]) -> list[str]:
        """Set where each worker computes, worker 0 on `ours`; gives the GPUs each actor sees."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        own = seen_here(visible, torch.cuda.device_count())
        if ours[0] not in own:
            raise DiscoError(
                f"Ray gives worker 0 the GPU {ours[0]}, which this process does not see "
                f"(CUDA_VISIBLE_DEVICES={visible})"
            )
        places = gpu_places(facts, machine_id(), own)
        names = [f"cuda:{own.index(ours[0])}", *(device for _, device in places)]
        self._devices = tuple(torch.device(name) for name in names)
        self._local.workers[0].device = self._devices[0]
        return [seen for seen, _ in places]

    def _give_gpus_to_another(self, rank: int, facts: dict[str, Any]) -> str | None:
        """Set where a new worker computes: where the old one did, unless Ray has moved it."""
        if self._devices[rank].type != "cuda":
            return None
        own = seen_here(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())
        everywhere = {**self._actors.facts, rank: facts}
        ranks = sorted(everywhere)
        places = gpu_places([everywhere[each] for each in ranks], machine_id(), own)
        seen, device = places[ranks.index(rank)]
        devices = list(self._devices)
        devices[rank] = torch.device(device)
        self._devices = tuple(devices)
        return seen

    def _settings_of(self, rank: int, facts: dict[str, Any]) -> dict[str, Any]:
        host, cpus = self._cluster.host(), max(1, int(self._slot.cpus))
        local, beside = self._cluster.local, facts["machine"] == machine_id()
        process = {"environ": dict(os.environ), "path": sys.path, "folder": os.getcwd()}
        return self._settings(
            rank=rank,
            local_rank=self._local_rank_of(rank),
            device=str(self._devices[rank]),
            threads=max(1, torch.get_num_threads() // self.num_workers) if local else cpus,
            host=host if local else facts["address"],
            token=self._transport.token.hex(),
            keys=self._keys.as_dict(),
            connect=self._transport.endpoint.replace("//0.0.0.0:", f"//{host}:"),
            argv=sys.argv,
            like=process if local else None,
            text=self._text_of(rank) if beside else None,
        )

    def _local_rank_of(self, rank: int) -> int:
        """The least number that no other worker of its machine has; a restart may have moved it."""
        others = {
            number
            for other, number in self._local_ranks.items()
            if other != rank and self.hosts[other] == self.hosts[rank]
        }
        self._local_ranks[rank] = next(each for each in itertools.count() if each not in others)
        return self._local_ranks[rank]

    def _close_texts(self) -> None:
        while self._texts:
            os.close(self._texts.pop())

    def _text_of(self, rank: int) -> tuple[str, int, int]:
        """A pipe for what a worker writes to its descriptors 1 and 2; how it is found."""
        ours, theirs = os.pipe()
        self._texts.append(theirs)
        self._transport.watch_text(rank, ours)
        status = os.fstat(theirs)
        return f"/proc/{os.getpid()}/fd/{theirs}", status.st_dev, status.st_ino

    def _workers_here(self) -> int:
        return self.hosts.count(machine_id())


def _kind(num_workers: int, devices: Any) -> str | None:
    """What kind of device all workers compute on; None: not said.

    Raises
    ------
    ArgumentError
        If they are of two kinds, none of torch's, or particular GPUs.
    """
    if devices is None:
        return None
    kinds = {device.type for device in place_workers(num_workers, devices)}
    names = [devices] if isinstance(devices, str | torch.device) else devices
    given = [parse_device(name) for name in names]
    if any(device is not None and device.index is not None for device in given):
        raise ArgumentError("Ray chooses the GPUs: say devices='cuda', not which")
    if len(kinds) > 1:
        raise ArgumentError("with Ray all workers compute on GPUs, or all on the CPU")
    return kinds.pop()


def _best_kind(cluster: Cluster) -> str:
    has = cluster.ray.cluster_resources().get("GPU", 0) > 0
    return "cuda" if has and torch.cuda.is_available() else "cpu"


def _check_versions(answers: list[dict[str, Any]]) -> None:
    ours = versions()
    for facts in answers:
        for name, version in ours.items():
            if facts["versions"].get(name) != version:
                raise DiscoError(
                    f"{facts['name']} ({facts['address']}) has {name} "
                    f"{facts['versions'].get(name)}, the session has {version}: install the same "
                    "version on all machines of the cluster"
                )


def _say_nothing(_: str) -> None:
    pass
