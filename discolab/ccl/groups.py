"""Groups: which workers take part in a collective.

A `Group` is a value: ranks in ascending order and a tag. No state is kept here; two groups of
the same ranks and tag are the same group. The mesh of a session (runtime/mesh.py) learns here what
a group is: ``group="tp"`` of a collective means the calling worker's line along that axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed

from ..runtime.errors import ArgumentError
from ..runtime.failures import name_ranks
from ..runtime.mesh import Mesh, axis_group
from ..runtime.worker import Worker, current_worker


@dataclass(frozen=True, slots=True)
class Group:
    """Some workers of a session, in ascending order of their ranks.

    Parameters
    ----------
    ranks
        Each worker once; sorted here, as `torch.distributed.new_group` does.
    tag
        Groups of the same ranks and different tags count their collectives apart, so that
        those of one may overtake those of the other.

    Raises
    ------
    ArgumentError
        If there is no rank, a rank twice, or something that is no rank.
    """

    ranks: tuple[int, ...]
    tag: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(sorted(_as_ranks(self.ranks))))

    def __len__(self) -> int:
        return len(self.ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    def __str__(self) -> str:
        return name_ranks(self.ranks)

    def index(self, rank: int) -> int:
        """The place of a worker in this group, from 0.

        Raises
        ------
        ArgumentError
            If that worker is not a member.
        """
        try:
            return self.ranks.index(rank)
        except ValueError:
            raise ArgumentError(f"worker {rank} is not a member of the group of {self}") from None


def world() -> Group:
    """All workers of the calling worker's session."""
    return _span(0, current_worker().num_workers)


def group() -> Group:
    """The calling worker's own group: one of the session's `num_groups` equal parts."""
    return resolve(current_worker(), None, "group")


def new_group(ranks: Iterable[int]) -> Group:
    """A group of these workers; may be called by any worker, and costs nothing.

    Parameters
    ----------
    ranks
        In any order; each at most once. The group is always in ascending order.

    Raises
    ------
    ArgumentError
        If `ranks` is empty, has a rank twice, or one that this session does not have.
    """
    return _check_range(current_worker(), Group(_as_ranks(ranks)))


@lru_cache(maxsize=1024)
def _part(rank: int, workers: int, groups: int) -> Group:
    """The one that has `rank` among so many equal parts of the workers."""
    size = workers // groups
    first = rank // size * size
    return _span(first, first + size)


def resolve(worker: Worker, value: Any, name: str) -> Group:
    """The group that the argument ``group=`` of collective `name` means to `worker`.

    Parameters
    ----------
    value
        None: the worker's own group; ``"world"``: all workers; the name of an axis of the
        session's mesh: the worker's line along it; a `Group` or a process group of
        torch.distributed; or ranks.

    Raises
    ------
    ArgumentError
        If it is none of these, has a rank that the session lacks, or lacks `worker`.
    """
    if value is None:
        return _part(worker.worker_id, worker.num_workers, worker.num_groups)
    if isinstance(value, str):
        return _named(worker, value, name)
    if isinstance(value, torch.distributed.ProcessGroup):  # as from new_group or a DeviceMesh
        value = Group(_as_ranks(torch.distributed.get_process_group_ranks(value)))
    if not isinstance(value, Group):
        if isinstance(value, int) or not isinstance(value, Iterable):
            raise ArgumentError(
                f'{name}: group={value!r}; give None (my group), "world", the name of a mesh '
                "axis, a Group, or a list of ranks such as group=[0, 1]"
            )
        ranks = _as_ranks(value)
        if list(ranks) != sorted(ranks):
            raise ArgumentError(
                f"{name}: group={list(ranks)}; a group is in ascending order, and roots count in "
                f"that order: group={sorted(ranks)}"
            )
        value = Group(ranks)
    members = _check_range(worker, value)
    if worker.worker_id not in members.ranks:
        raise ArgumentError(
            f"{name}: worker {worker.worker_id} is not in the group of {members}; only its "
            f"members call it: if rank in {list(members.ranks)}: …"
        )
    return members


def _named(worker: Worker, value: str, name: str) -> Group:
    if value == "world":
        return _span(0, worker.num_workers)
    found: Group | None = axis_group(worker, value)
    if found is None:
        raise ArgumentError(
            f"{name}: group={value!r}; this session has no mesh (sess.mesh(dp=2, tp=2) makes one), "
            'so that the only group with a name is "world"'
        )
    return found


@lru_cache(maxsize=1024)
def group_of(ranks: tuple[int, ...], tag: str = "") -> Group:
    """The group of these ranks.

    Two axes of a mesh have the same group only if it has the same ranks, and then it is called in
    the same order by all of them: there is nothing to keep apart.
    """
    return Group(ranks, tag)


Mesh.group_type = staticmethod(group_of)


@lru_cache(maxsize=256)
def _span(first: int, stop: int) -> Group:
    return Group(tuple(range(first, stop)))


def _as_ranks(values: Iterable[Any]) -> tuple[int, ...]:
    ranks = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ArgumentError(f"a rank is an integer, got {value!r}")
        ranks.append(int(value.__index__()))
    if not ranks:
        raise ArgumentError("a group needs at least one worker, got no ranks")
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise ArgumentError(f"{name_ranks(twice)} twice in a group: {ranks}")
    return tuple(ranks)


def _check_range(worker: Worker, value: Group) -> Group:
    if value.ranks[0] < 0 or value.ranks[-1] >= worker.num_workers:
        raise ArgumentError(
            f"a group of ranks {list(value.ranks)} is out of range: this session has workers "
            f"0 to {worker.num_workers - 1}"
        )
    return value
