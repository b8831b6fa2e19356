"""The actors of one session, the placement group that holds their slots, and what became of them.

Nothing here knows the session, so that one that was dropped can be collected. The thread that
starts the session places the actors; Ray's own threads write `_fates`, entry by entry; the reader
thread looks at them (`Actors.look`), because Ray may know of a machine's end what its connection
does not tell.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..runtime.errors import ArgumentError, DiscoError
from ..runtime.link import Service
from .ray_cluster import Cluster, in_short, leave
from .remote.process_facts import process_state
from .remote.zmq_lines import ZmqLines

_GRACE = 0.5  # seconds after an actor's death that its line may take to break
_END_WITHIN = 1.0  # seconds that actors may take to say that they have ended
_FREE_WITHIN = 5.0  # seconds that Ray may take to free their slots
_ASK_EVERY = 3.0  # seconds between two questions what a process does
_ANSWER = 5.0  # seconds that the answer may take

_ENDED = "has ended"  # the fate of an actor that was told to

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
        """As Ray has it."""
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


class Actors(Service):
    """See the module.

    Parameters
    ----------
    cluster
        From `join`; left at the end.
    lines
        Of the session: those of workers that are dead are ended.
    """

    def __init__(self, cluster: Cluster, lines: ZmqLines) -> None:
        self._cluster, self._ray, self._lines = cluster, cluster.ray, lines
        self._left = False
        self._group: Any = None
        self._crew: list[Any] = []  # a handle for each bundle
        self._asked: list[Any] = []  # what each says of itself, once it is there
        self._by_rank: dict[int, int] = {}
        self._fates: dict[int, str] = {}
        self._due: dict[int, float] = {}  # when the line of one that is dead is ended
        self._states: dict[int, tuple[float, Any]] = {}  # what was asked of a process, and when
        self.facts: dict[int, dict[str, Any]] = {}  # by rank
        self.closing = False

    # -- places ------------------------------------------------------------------------------

    def reserve(self, bundles: Sequence[Bundle]) -> None:
        """Ask for slots."""
        self._group = self._ray.util.placement_group(list(bundles), strategy="PACK")

    def reserved(self) -> bool:
        """Whether they are ours; waits a second for it."""
        return bool(self._group.wait(1))

    def room(self, slot: Slot) -> tuple[int, str]:
        """How many such slots the cluster has, free or not, and what it has in words."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        fit = sum(
            min(int(node["Resources"].get(name, 0) // need) for name, need in slot.bundle.items())
            for node in nodes
        )
        has, free = self._ray.cluster_resources(), self._ray.available_resources()
        told = [
            f"{free.get(name, 0):g} of {has.get(name, 0):g} {name} free" for name in slot.bundle
        ]
        plural = "" if len(nodes) == 1 else "s"
        return fit, f"the cluster has {len(nodes)} node{plural} with {' and '.join(told)}"

    # -- actors ------------------------------------------------------------------------------

    def engage(self, index: int, bundle: Bundle) -> Any:
        """Have an actor started in the bundle of that index."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=index
        )
        actor = self._ray.remote(actor_class()).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            max_restarts=0,
            max_task_retries=0,
        ).remote()  # fmt: skip
        self._crew.append(actor)
        return actor

    def ask(self, actors: Sequence[Any], path: list[str]) -> None:
        """Have them say of themselves what `found` gives."""
        self._asked = [actor.about.remote(path) for actor in actors]

    def found(self, timeout: float) -> list[dict[str, Any]] | None:
        """What each says of itself, once all have; None: not yet.

        Raises
        ------
        DiscoError
            If one of them could not start.
        """
        asked = self._asked
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

    def told(self, timeout: float, ref: Any) -> Any:
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

    def work(self, rank: int, actor: Any, facts: dict[str, Any], settings: dict[str, Any]) -> None:
        """Have one be a worker."""
        self.facts[rank] = facts
        self._by_rank[rank] = self._crew.index(actor)
        future = actor.work.remote(settings).future()
        future.add_done_callback(lambda done: self._has_ended(rank, done))

    # -- what becomes of them ------------------------------------------------------------------

    def _has_ended(self, rank: int, future: Any) -> None:
        """On a thread of Ray's."""
        self._fates[rank] = _fate(future.exception())
        self._lines.wake()

    def is_settled(self, rank: int) -> bool:
        """Whether it is known what became of it; the reader thread asks when its line is broken."""
        return rank in self._fates or self.closing

    def next_look(self) -> float | None:
        """See `Service`."""
        for rank in self._fates.keys() - self._due.keys():
            self._due[rank] = time.monotonic() + _GRACE
        return min(self._due.values(), default=None)

    def look(self) -> None:
        """See `Service`."""
        now = time.monotonic()
        for rank, due in self._due.items():
            if due <= now:
                self._lines.end(rank)
                self._due[rank] = float("inf")

    def where(self, rank: int, pid: int | None) -> str:
        """A worker's process in words."""
        facts = self.facts.get(rank)
        if facts is None:
            return "(a Ray actor)"
        return f"(pid {pid or facts['pid']} on {facts['name']}, a Ray actor)"

    def why_ended(self, rank: int, pid: int | None) -> str:
        """What became of a worker whose line has ended."""
        fate = self._fates.get(rank, "is lost: its connection was cut")
        return f"{self.where(rank, pid)} {fate}"

    def process_state(self, rank: int, pid: int) -> str | None:
        """What the process of a worker elsewhere does, as its machine says; None: not known yet."""
        now = time.monotonic()
        asked_at, ref = self._states.get(rank, (0.0, None))
        if ref is None or now - asked_at > _ASK_EVERY + _ANSWER:
            strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                self.facts[rank]["node"], soft=False
            )
            task = self._ray.remote(process_state).options(
                num_cpus=0, max_retries=0, scheduling_strategy=strategy
            )
            self._states[rank] = now, task.remote(pid)
            return None
        if not self._ray.wait([ref], timeout=0)[0]:
            return None if now - asked_at < _ANSWER else ""
        try:
            return str(self._ray.get(ref))
        except Exception:
            return ""

    # -- the end ---------------------------------------------------------------------------------

    def end(self, wait: bool = True) -> None:
        """End what is left of them, give their slots back, leave the cluster; may be called again.

        Without `wait` nothing is waited for.
        """
        self.closing = True
        deadline = time.monotonic() + (_END_WITHIN if wait else 0.0)
        while self._by_rank.keys() - self._fates.keys() and time.monotonic() < deadline:
            time.sleep(0.005)
        ended = {self._by_rank[rank] for rank, fate in self._fates.items() if fate == _ENDED}
        left = [actor for index, actor in enumerate(self._crew) if index not in ended]
        group, self._group = self._group, None
        self._crew, self._asked, self._states, self._by_rank = [], [], {}, {}
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

    def _free(self, actors: list[Any], group: Any) -> None:
        try:
            if self._cluster.alive:
                for actor in actors:
                    self._ray.kill(actor)
                if group is not None:
                    self._ray.util.remove_placement_group(group)
        except Exception as exc:  # the cluster is going, and they with it
            if self._cluster.alive:
                sys.stderr.write(f"Ray can't end its actors: {in_short(exc)}\n")


def _fate(exc: BaseException | None) -> str:
    """How an actor has ended, in words, from what Ray says."""
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
