"""The actors of one session, the placement group that holds their slots, and what became of them.

Nothing here knows the session, so that one that was dropped can be collected. The thread that
starts the session, or replaces a worker, places actors; Ray's own threads write what became of one
(`Actor.fate`); the reader thread reads it (`Actors.look`), because Ray may know of a machine's end
what its connection does not tell.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..runtime.errors import ArgumentError, DiscoError
from ..runtime.services import Service
from ..transport.addresses import machine_id
from .connections.controller_side import WorkerConnections
from .connections.tcp import TcpTransport
from .heartbeat import process_state
from .ray_cluster import Cluster, in_short, leave

_GRACE = 0.5  # seconds after an actor's death that its connection may take to break
_END_WITHIN = 1.0  # seconds that actors may take to say that they have ended
_FREE_WITHIN = 5.0  # seconds that Ray may take to free their slots
_ASK_EVERY = 1.0  # seconds between two questions what a process does
_ANSWER = 5.0  # seconds that the answer may take

_ENDED = "has ended"  # the fate of an actor that ended because the session did

Bundle = dict[str, float]


@dataclass(frozen=True)
class Slot:
    """What each worker takes of a cluster.

    Raises
    ------
    ArgumentError
        If it is nothing, or no number.
    """

    cpus: float
    gpus: float

    def __post_init__(self) -> None:
        for name, value in (("num_cpus", self.cpus), ("num_gpus", self.gpus)):
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise ArgumentError(f"{name} is how much of that a worker takes, got {value!r}")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ArgumentError(f"num_gpus above 1 is a whole number, got {self.gpus!r}")
        if not self.bundle:
            raise ArgumentError("each worker takes a slot: num_cpus and num_gpus can't both be 0")

    @property
    def bundle(self) -> Bundle:
        """The slot as a bundle of Ray's."""
        return {name: n for name, n in (("CPU", self.cpus), ("GPU", self.gpus)) if n}

    def __str__(self) -> str:
        return " and ".join(f"{number:g} {name}" for name, number in self.bundle.items())


def actor_class() -> type:
    """What runs on the cluster. Ray sends it as a copy: discolab is looked for there."""

    class DiscolabWorker:
        def about(self, path: list[str]) -> Any:
            import sys

            sys.path += [entry for entry in path if entry not in sys.path]
            from discolab.engines import ray_worker

            return ray_worker.about()

        def work(self, settings: Any) -> None:
            import ray

            from discolab.engines import ray_worker

            ray_worker.work(settings)
            ray.actor.exit_actor()

        def gpus(self) -> Any:
            import ray

            return [str(number) for number in ray.get_gpu_ids()]

    return DiscolabWorker


@dataclass(eq=False)
class Actor:
    """One actor: its handle, its place in the group, and what is known of it.

    Attributes
    ----------
    fate
        How it has ended; "" so far.
    due
        When the connection of one that has ended is ended.
    """

    handle: Any
    index: int
    bundle: Bundle
    fate: str = ""
    due: float | None = None
    asked_at: float = 0.0  # when it was asked what its process does
    asked: Any = None  # that question, while it has no answer


class Actors(Service):
    """See the module. A service of the session, and its `WorkerProcesses`.

    Parameters
    ----------
    cluster
        From `join`; left at the end.
    transport
        Of the session: it ends the connections of workers that are dead.
    """

    connections: WorkerConnections

    def __init__(self, cluster: Cluster, transport: TcpTransport) -> None:
        self._cluster, self._ray, self._transport = cluster, cluster.ray, transport
        self._left = False
        self._group: Any = None
        self._actors: list[Actor] = []
        self._by_rank: dict[int, Actor] = {}
        self._places: dict[int, tuple[int, Bundle]] = {}
        self.facts: dict[int, dict[str, Any]] = {}
        """What the actor of each worker says of itself, or the last one did, by rank."""
        self.closing = False
        transport.settled = self._is_settled

    # -- places ------------------------------------------------------------------------------

    def reserve(self, bundles: Sequence[Bundle]) -> None:
        """Ask for slots."""
        self._group = self._ray.util.placement_group(list(bundles), strategy="PACK")

    def reserved(self) -> bool:
        """Whether the slots are reserved; waits up to a second for it."""
        return bool(self._group.wait(1))

    def room(self, slot: Slot) -> tuple[int, str]:
        """How many such slots the cluster has, free or not, and what it has in words."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        fit = sum(
            min(int(node["Resources"].get(name, 0) // need) for name, need in slot.bundle.items())
            for node in nodes
        )
        has, free = self._ray.cluster_resources(), self._ray.available_resources()
        parts = [
            f"{free.get(name, 0):g} of {has.get(name, 0):g} {name} free" for name in slot.bundle
        ]
        plural = "" if len(nodes) == 1 else "s"
        return fit, f"the cluster has {len(nodes)} node{plural} with {' and '.join(parts)}"

    # -- actors ------------------------------------------------------------------------------

    def start(self, index: int, bundle: Bundle) -> Actor:
        """Have an actor started in the bundle of that index."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=index
        )
        handle = self._ray.remote(actor_class()).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            max_restarts=0,
            max_task_retries=0,
        ).remote()  # fmt: skip
        self._actors.append(Actor(handle, index, bundle))
        return self._actors[-1]

    def answers(self, asked: list[Any], timeout: float) -> list[dict[str, Any]] | None:
        """What actors say of themselves (`about`), once all have answered; None: not yet.

        Raises
        ------
        DiscoError
            If one of them could not start.
        """
        done, missing = self._ray.wait(asked, num_returns=len(asked), timeout=timeout)
        for ref in done:
            try:
                self._ray.get(ref)
            except Exception as exc:
                raise DiscoError(
                    f"a worker could not start as a Ray actor: {in_short(exc)}. discolab and torch "
                    "must be installed on all machines of the cluster"
                ) from None
        return None if missing else self._ray.get(asked)

    def answer(self, timeout: float, ref: Any) -> Any:
        """The value of a call on one of them.

        Raises
        ------
        DiscoError
            If there is none in time.
        """
        try:
            return self._ray.get(ref, timeout=timeout)
        except Exception as exc:
            raise DiscoError(f"a Ray actor does not answer: {in_short(exc)}") from None

    def work(
        self, rank: int, actor: Actor, facts: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        """Have an actor be a worker."""
        self.facts[rank] = facts
        self._places[rank] = actor.index, actor.bundle
        self._by_rank[rank] = actor
        future = actor.handle.work.remote(settings).future()
        future.add_done_callback(lambda done: self._has_ended(actor, done))

    def detach(self, rank: int) -> None:
        """End the actor of a worker that is lost; what is heard of it concerns nobody any more.

        To be called before another process may connect as this worker.
        """
        actor = self._by_rank.pop(rank, None)
        if actor is not None:
            self.kill(actor)

    def start_another(self, rank: int) -> Actor:
        """Have an actor started where that of a worker was, once Ray has freed its slot."""
        index, bundle = self._places[rank]
        for actor in [actor for actor in self._actors if actor.index == index]:
            self.kill(actor)  # of a restart that was interrupted
        return self.start(index, bundle)

    def kill_of(self, rank: int) -> None:
        """End the actor of a worker now, with what it has started."""
        self._kill(self._by_rank[rank])

    def kill(self, actor: Actor) -> None:
        """End an actor, with what it has started, and forget it; waits for nothing."""
        actors = self._actors  # `end` puts another list there
        if actor in actors:
            actors.remove(actor)
        self._kill(actor)

    def _kill(self, actor: Actor) -> None:
        threading.Thread(
            target=self._free, args=([actor], None), name="discolab-ray-end", daemon=True
        ).start()

    # -- what becomes of them ------------------------------------------------------------------

    def _has_ended(self, actor: Actor, future: Any) -> None:
        """Note that an actor has ended; on a thread of Ray's."""
        actor.fate = _fate(future.exception())
        self.connections.look_soon()

    def _is_settled(self, rank: int) -> bool:
        """Whether it is known what became of a worker whose connection is broken."""
        actor = self._by_rank.get(rank)
        known = actor is not None and bool(actor.fate)
        return known or self.closing or self.connections.closing

    def next_look(self) -> float | None:
        actors = list(self._by_rank.values())
        for actor in actors:
            if actor.fate and actor.due is None:
                actor.due = time.monotonic() + _GRACE
        return min((actor.due for actor in actors if actor.due is not None), default=None)

    def look(self) -> None:
        now = time.monotonic()
        for rank, actor in self._by_rank.copy().items():
            if actor.due is not None and actor.due <= now:
                self._transport.end(rank)
                actor.due = float("inf")

    def where(self, rank: int) -> str:
        """See `WorkerProcesses`."""
        facts = self.facts.get(rank)
        if facts is None:
            return "(a Ray actor)"
        pid = self.connections.joined.get(rank) or facts["pid"]
        return f"(pid {pid} on {facts['name']}, a Ray actor)"

    def exit_reason(self, rank: int) -> str:
        """See `WorkerProcesses`."""
        actor = self._by_rank.get(rank)
        fate = "" if actor is None else actor.fate
        return f"{self.where(rank)} {fate or 'is lost: its connection was cut'}"

    def pid_here(self, rank: int) -> int | None:
        """See `WorkerProcesses`."""
        facts = self.facts.get(rank) if rank in self._by_rank else None
        here = facts is not None and facts["machine"] == machine_id()
        return self.connections.joined.get(rank) if here else None

    def activity(self, rank: int) -> str:
        """See `WorkerProcesses`."""
        if rank not in self._by_rank:
            return ""
        pid = self.pid_here(rank)
        if pid is not None:
            return process_state(pid)
        return self._state_elsewhere(rank, self.connections.joined.get(rank, 0))

    def cut_off(self, rank: int) -> str:
        """See `WorkerProcesses`: that is Ray's to say, which ends such actors."""
        return ""

    def _state_elsewhere(self, rank: int, pid: int) -> str:
        """What the process of a worker elsewhere does, each time that its machine says so."""
        actor = self._by_rank.get(rank)
        if actor is None:
            return ""
        now, asked = time.monotonic(), actor.asked
        if asked is not None and self._ray.wait([asked], timeout=0)[0]:
            actor.asked = None
            try:
                return str(self._ray.get(asked))
            except Exception:
                return ""
        if now - actor.asked_at > (_ASK_EVERY if asked is None else _ANSWER):
            strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                self.facts[rank]["node"], soft=False
            )
            task = self._ray.remote(process_state).options(
                num_cpus=0, max_retries=0, scheduling_strategy=strategy
            )
            actor.asked_at, actor.asked = now, task.remote(pid)
        return ""

    # -- the end ---------------------------------------------------------------------------------

    def end(self, wait: bool = True) -> None:
        """End what is left of them, give their slots back, leave the cluster; may be called again.

        Without `wait` nothing is waited for.
        """
        self.closing = True
        deadline = time.monotonic() + (_END_WITHIN if wait else 0.0)
        working = list(self._by_rank.values())
        while not all(actor.fate for actor in working) and time.monotonic() < deadline:
            time.sleep(0.005)
        left = [actor for actor in self._actors if actor.fate != _ENDED]
        group, self._group = self._group, None
        self._actors, self._by_rank = [], {}
        # where the cluster has lost its head, Ray waits for it for ever
        free = threading.Thread(
            target=self._free, args=(left, group), name="discolab-ray-end", daemon=True
        )
        free.start()
        if wait:
            free.join(_FREE_WITHIN)
        if not self._left:
            self._left = True
            leave(self._cluster, wait)

    def _free(self, actors: Sequence[Actor], group: Any) -> None:
        try:
            if self._cluster.alive:
                for actor in actors:
                    self._ray.kill(actor.handle)
                if group is not None:
                    self._ray.util.remove_placement_group(group)
        except Exception as exc:  # the cluster is going, and they with it
            if self._cluster.alive:
                sys.stderr.write(f"Ray can't end its actors: {in_short(exc)}\n")


def _fate(exc: BaseException | None) -> str:
    """Describe how an actor has ended, from what Ray says."""
    text = str(exc or "")
    if exc is None or "exit_actor()" in text:
        return _ENDED
    if "ray.kill" in text:
        return "was ended by ray.kill"
    if "node has died" in text or "node died" in text or "its node" in text:
        return f"is lost, its node has died; Ray says: {in_short(exc)}"
    if "running low on memory" in text or "memory monitor" in text:
        return f"was ended by Ray, its node runs low on memory: {in_short(exc)}"
    if "unexpectedly exits with a connection error" in text:
        return "was killed or has crashed"
    if "is unavailable" in text:
        return "is lost: Ray does not reach it either"
    return f"has died; Ray says: {in_short(exc)}"


def gpu_places(
    facts: Sequence[dict[str, Any]], here: str, seen_there: Sequence[str]
) -> list[tuple[str, str]]:
    """For each actor: which GPUs it sees (as CUDA_VISIBLE_DEVICES), and the device it computes on.

    Actors of one machine see all GPUs of theirs there, so that each has a device of its own name
    and they reach each other's; on the session's machine they see what its process sees.

    Parameters
    ----------
    facts
        Of each actor ``machine`` and ``gpus``, the numbers that Ray gives.
    here, seen_there
        The session's machine, and the GPUs that its process sees (`seen_here`).
    """
    places = []
    for fact in facts:
        there = [other for other in facts if other["machine"] == fact["machine"]]
        seen = sorted({gpu for other in there for gpu in other["gpus"]}, key=_number)
        if fact["machine"] == here:
            seen = list(seen_there) if set(seen) <= set(seen_there) else seen
        places.append((",".join(seen), f"cuda:{seen.index(fact['gpus'][0])}"))
    return places


def seen_here(visible: str | None, count: int) -> list[str]:
    """The GPUs that a process sees, as Ray names them, in the order of torch's indexes.

    Parameters
    ----------
    visible, count
        Its CUDA_VISIBLE_DEVICES, and how many torch sees.
    """
    if visible is None:
        return [str(number) for number in range(count)]
    return [name.strip() for name in visible.split(",") if name.strip()]


def _number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdigit() else (1 << 30, name)
