"""What torch.distributed keeps of process groups, once for each worker instead of once a process.

torch has all of it in one object, ``torch.distributed.distributed_c10d._world``. While worker
threads live, a `WorldProxy` stands there: on a worker it is that worker's own world, on other
threads torch's. A world makes its default group when somebody first asks for it, so that
torch.distributed is initialized in every worker from the start.

A world is in `Worker.shared`, by rank. It is used by its worker, and may be read by threads that
the worker has started.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import threading
from typing import Any

import torch.distributed.distributed_c10d

from ...runtime.interrupts import plain_lock
from ...runtime.restart import forget_when_replaced
from ...runtime.worker import Worker, current_worker_or_none
from ..rendezvous.store import store_of
from .process_group import NAME, WorkerGroup
from .registry import carry_over

c10d: Any = torch.distributed.distributed_c10d  # its private names have no types

_WORLDS = "discolab.ccl.distributed.worlds"
forget_when_replaced(_WORLDS)  # one that was left behind has not closed its own
_COMPUTED = ("pg_config_info",)  # of the other properties; holds nothing itself
_OF_A_COMMAND = ("pg_coalesce_state",)  # what a failed command leaves there is void

_INIT_WRITES = ("_backend", "_default_pg_init_method")  # global variables of torch

_numbers = itertools.count(1)
_init_lock = plain_lock()  # while init_process_group writes them


def _after_fork() -> None:
    """A child must not wait for a thread that only its parent has."""
    global _init_lock
    _init_lock = plain_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class WorkerWorld:
    """The groups of one worker. Its class is made by `_world_class`, with torch's properties.

    Attributes
    ----------
    worker
        Whose it is.
    number
        Never used again for another one, be it of another session.
    rng_tracker
        DTensor's tracker of random numbers for this worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._held: dict[Any, Any] = {}
        self._making = False
        self._ordinal = -1
        super().__init__()
        self.worker = worker
        self.number = next(_numbers)
        self.rng_tracker: Any = None
        self._made: tuple[int, dict[tuple[int, ...], int]] = (-1, {})

    def default_group(self) -> Any:
        """The default process group; made if there is none, on the worker's own thread."""
        group = self._held.get("default_pg")
        if group is None and not self._making and threading.get_ident() == self.worker.thread_id:
            self._making = True
            try:
                self._make_default_group()
            finally:
                self._making = False
            group = self._held.get("default_pg")
        return group

    def _make_default_group(self) -> None:
        worker = self.worker
        self._init(
            NAME, store=store_of(worker), rank=worker.worker_id, world_size=worker.num_workers
        )

    def use_fake_groups(self, *args: Any, **kwargs: Any) -> None:
        """Have groups of torch's that only pretend to communicate, up to `destroy_process_group`.

        Takes what `init_process_group` takes.
        """
        if self._held.get("default_pg") is not None and not self.is_fake():
            c10d.destroy_process_group()
        self._making = True
        try:
            self._init(*args, **kwargs)
        finally:
            self._making = False

    def is_fake(self) -> bool:
        """Whether the default group only pretends to communicate."""
        group = self._held.get("default_pg")
        return group is not None and not isinstance(group, WorkerGroup)

    def _init(self, *args: Any, **kwargs: Any) -> None:
        """Have torch make the default group, with all that it notes down about one."""
        with _init_lock:
            hook = sys.excepthook
            before = {name: getattr(c10d, name) for name in _INIT_WRITES if hasattr(c10d, name)}
            try:
                torch_init_process_group()(*args, **kwargs)
            finally:
                sys.excepthook = hook
                for name, value in before.items():
                    setattr(c10d, name, value)

    def make_group(self, ranks: tuple[int, ...], timeout: Any) -> WorkerGroup:
        """A process group of these ranks for this worker; what torch's backend factory gives.

        Groups are told apart by the command that made them and by how many of the same ranks
        there are in it, which is the same on all members, even after some were interrupted.
        """
        worker = self.worker
        if len(ranks) == worker.num_workers and self._making:
            return WorkerGroup(worker, ranks, "", timeout)
        ordinal, counts = self._made
        if ordinal != worker.executed:
            counts = {}
            self._made = (worker.executed, counts)
        counts[ranks] = counts.get(ranks, 0) + 1
        return WorkerGroup(worker, ranks, f"{worker.executed}.{counts[ranks]}", timeout)

    def close(self) -> None:
        """Forget all groups; on the worker's own thread, before it ends."""
        if self._held.get("default_pg") is not None:
            c10d._unregister_all_process_groups()
        self._held.clear()
        self._making = True


def torch_init_process_group() -> Any:
    """torch's own `init_process_group`, also while ours stands in its place."""
    return getattr(c10d.init_process_group, "discolab_wraps", c10d.init_process_group)


class WorldProxy:
    """Stands for torch's world: a worker's own on a worker, torch's elsewhere."""

    def __init__(self, torchs: Any) -> None:
        object.__setattr__(self, "_torchs", torchs)
        kind: Any = type(torchs)
        object.__setattr__(self, "_class", _world_class(kind))

    _torchs: Any
    _class: Any

    def __getattr__(self, name: str) -> Any:
        world = self._here()
        if name == "default_pg" and isinstance(world, WorkerWorld) and _in_module(2):
            return None  # a worker that imports a module must not leave its own group there for all
        return getattr(world, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._here(), name, value)

    def _here(self) -> Any:
        worker = current_worker_or_none()
        if worker is None:
            carry_over(self._torchs)
            return self._torchs
        if worker.ended:
            return self._torchs
        worlds = worker.shared.get(_WORLDS)
        world = None if worlds is None else worlds.get(worker.worker_id)
        if world is None:
            worlds = worker.shared.setdefault(_WORLDS, {})
            world = worlds.setdefault(worker.worker_id, self._class(worker))
        return world


def world_here() -> WorkerWorld | None:
    """The world of the worker on whose thread this runs, None elsewhere."""
    world = c10d._world
    found = world._here() if isinstance(world, WorldProxy) else None
    return found if isinstance(found, WorkerWorld) else None


def close_world(worker: Worker) -> None:
    """Drop a worker's groups; on its own thread, when it ends."""
    world = worker.shared.get(_WORLDS, {}).pop(worker.worker_id, None)
    if world is not None:
        world.close()


def _in_module(depth: int) -> bool:
    """Whether the caller of ``group.WORLD`` is the body of a module that is being imported.

    ``def f(group=group.WORLD)`` there keeps for all workers what the first of them sees.
    """
    frame = sys._getframe(depth + 1)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function
        return False
    return bool(getattr(frame.f_globals.get("__spec__"), "_initializing", False))


@functools.lru_cache
def _world_class(base: Any) -> type[WorkerWorld]:
    """`WorkerWorld` with the properties of torch's world, each held by the object itself."""
    blank = base()
    members: dict[str, Any] = {}
    for name, member in vars(base).items():
        if isinstance(member, property) and name not in _COMPUTED:
            members[name] = _held(name, type(getattr(blank, name)))
    members["default_pg"] = property(
        WorkerWorld.default_group, lambda self, group: self._held.__setitem__("default_pg", group)
    )
    return type("WorldOfWorker", (WorkerWorld, base), members)


def _held(name: str, kind: type) -> property:
    passing = name in _OF_A_COMMAND

    def get(self: WorkerWorld) -> Any:
        held = self._held
        key = (name, self.worker.executed) if passing else name
        if key not in held:
            if passing:
                held.pop((name, self._ordinal), None)
                self._ordinal = self.worker.executed
            held[key] = kind()
        return held[key]

    def put(self: WorkerWorld, value: Any) -> None:
        self._held[name] = value

    return property(get, put)
