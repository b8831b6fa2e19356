"""Functions of torch.distributed that do something else on a worker. No state.

Each takes torch's own function and makes one that looks which worker calls: elsewhere than on a
worker it is torch's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...runtime.errors import ArgumentError
from .process_group import NAME, WorkerGroup
from .works import DistWork, completed
from .world import WorkerWorld, world_here

Function = Callable[..., Any]
_native: Any = torch._C._distributed_c10d  # its private names have no types
FAKE = "fake"  # torch's backend that only pretends to communicate


def _over(ours: Callable[..., Any]) -> Callable[[Function], Function]:
    """A replacement for a function of torch: ``ours(world, ...)`` on a worker."""

    @functools.wraps(ours)
    def make(torchs: Function) -> Function:
        @functools.wraps(torchs)
        def either(*args: Any, **kwargs: Any) -> Any:
            world = world_here()
            return torchs(*args, **kwargs) if world is None else ours(world, *args, **kwargs)

        either.discolab_wraps = torchs  # type: ignore[attr-defined]
        return either

    return make


@_over
def init_process_group(
    world: WorkerWorld,
    backend: Any = None,
    init_method: Any = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Nothing: it is done. Every backend is discolab's, whatever the name; but "fake" is torch's.

    Raises
    ------
    ArgumentError
        If `rank` or `world_size` is given and is not this worker's.
    """
    if str(backend).lower() == FAKE:
        world.use_fake_groups(backend, init_method, timeout, world_size, rank, *args, **kwargs)
        return
    worker = world.worker
    for what, got, mine in (
        ("rank", rank, worker.worker_id),
        ("world_size", world_size, worker.num_workers),
    ):
        if got is not None and got != -1 and got != mine:
            raise ArgumentError(
                f"init_process_group: {what}={got!r} on worker {worker.worker_id} of "
                f"{worker.num_workers}, where {what} is {mine}; leave it out: workers of discolab "
                "are connected already, and this call changes nothing"
            )
    group = world.default_group()
    if timeout is not None and group is not None:
        group.set_timeout(timeout)


@_over
def monitored_barrier(
    world: WorkerWorld,
    group: Any = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """A barrier; torch has this one for Gloo alone."""
    member = world.default_group() if group is None else group
    if isinstance(member, WorkerGroup):  # and not torch's mark for a rank that is no member
        member.monitored_barrier(timeout, wait_all_ranks)


@_over
def split_group(
    world: WorkerWorld,
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    *_args: Any,
    **_kwargs: Any,
) -> Any:
    """Cut a group into several; torch has this one for NCCL alone.

    Raises
    ------
    ArgumentError
        If the ranks are no lists of different ranks of the parent.
    """
    parent = world.default_group() if parent_pg is None else parent_pg
    if not split_ranks or not all(split_ranks):
        raise ArgumentError(f"split_group: split_ranks must be lists of ranks, got {split_ranks!r}")
    everybody = [rank for part in split_ranks for rank in part]
    if len(set(everybody)) < len(everybody) or not set(everybody) <= set(range(parent.size())):
        raise ArgumentError(
            f"split_group: split_ranks {split_ranks!r} must name ranks of the parent, 0 to "
            f"{parent.size() - 1}, each at most once"
        )
    for part in split_ranks:
        if parent.rank() in part:
            ranks = [dist.get_global_rank(parent, rank) for rank in part]
            return dist.new_group(
                ranks, timeout, use_local_synchronization=True, group_desc=group_desc
            )
    return None


def new_process_group_helper(torchs: Function) -> Function:
    """torch's maker of groups, with discolab's backend in place of any other.

    A program asks for "nccl" or "gloo" as it would in processes; in threads it gets what the
    session uses. "fake" it gets.
    """
    place = list(inspect.signature(torchs).parameters).index("backend")

    @functools.wraps(torchs)
    def make(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs["backend"] if "backend" in kwargs else args[place]
        if world_here() is None or str(backend).lower() == FAKE:
            return torchs(*args, **kwargs)
        if "backend" in kwargs:
            kwargs["backend"] = NAME
        else:
            args = (*args[:place], NAME, *args[place + 1 :])
        made = torchs(*args, **kwargs)
        if isinstance(made[0], WorkerGroup):
            made[0].registered = True
        return made

    return make


def collect_all(torchs: Function) -> Function:
    """One future of several, which are to be complete."""

    @functools.wraps(torchs)
    def collect(futures: Any) -> Any:
        return torchs([completed(future) for future in futures])

    return collect


def register_comm_hook(torchs: Function) -> Function:
    """DistributedDataParallel waits in C++ for the future that a hook gives."""

    @functools.wraps(torchs)
    def register(reducer: Any, state: Any, hook: Function) -> Any:
        @functools.wraps(hook)
        def complete(state: Any, bucket: Any) -> Any:
            return completed(hook(state, bucket))

        return torchs(reducer, state, hook if world_here() is None else complete)

    return register


def set_forward_pass_work_handle(torchs: Function) -> Function:
    """DistributedDataParallel waits in C++, in backward, for what its forward started in `join`.

    C++ has its half of a work alone, whose wait has no end once Python has let go of the other. So
    the wait is here, which no rank calls before all have started it, and C++ gets the outcome.
    """

    @functools.wraps(torchs)
    def put(reducer: Any, work: Any, divide_by_initial_world_size: bool) -> None:
        if isinstance(work, DistWork):
            work = _native._create_work_from_future(completed(work.get_future()))
        torchs(reducer, work, divide_by_initial_world_size)

    return put


def make_group(options: Any, _backend_options: Any = None) -> WorkerGroup:
    """What torch calls for a group of backend "discolab".

    Raises
    ------
    ArgumentError
        Elsewhere than on a worker.
    """
    world = world_here()
    if world is None:
        raise ArgumentError(
            f"the backend {NAME!r} of torch.distributed is for workers of a discolab session; "
            "there, torch.distributed is initialized already"
        )
    ranks = options.global_ranks_in_group or range(world.worker.num_workers)
    return world.make_group(tuple(ranks), options.timeout)
