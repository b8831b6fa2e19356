"""Mesh: the workers of a session arranged in a grid with named axes.

A `Mesh` is a value: axes, sizes, ranks. The session makes one with `Session.mesh` and remembers
the last; each worker keeps that one as `Worker.mesh`, written by its own thread only. Questions
about "my" place are answered on the worker that asks; anywhere else ``of=rank`` names a worker.

What a group of workers is, is not known here: `ccl` sets `Mesh.group_type`, and how a mesh is
drawn is not decided here either, see `drawn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .arguments import plain
from .display import Drawn
from .errors import ArgumentError
from .failures import name_ranks
from .functions import worker_function
from .worker import Worker, current_worker, current_worker_or_none

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_RESERVED = ("world",)  # group="world" means all workers


@plain
@dataclass(frozen=True, slots=True, repr=False)
class Mesh(Drawn):
    """Workers in a grid, row by row: the last axis varies fastest.

    Parameters
    ----------
    axes
        A name for each axis.
    sizes
        How many places each axis has.
    ranks
        The members in row-major order; ascending, as the ranks of a group are.

    Raises
    ------
    ArgumentError
        If these do not fit each other.

    Examples
    --------
    >>> mesh = Mesh(("dp", "tp"), (2, 3), tuple(range(6)))
    >>> mesh
    <mesh dp=2, tp=3 of workers 0-5>
    >>> mesh.coordinate(of=4), mesh.rank("tp", of=4), mesh.peers("dp", of=4)
    ((1, 1), 1, (1, 4))
    >>> mesh.submesh("tp", of=4)
    <mesh tp=3 of workers 3-5>
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    group_type: ClassVar[Callable[[tuple[int, ...]], Any]]

    def __post_init__(self) -> None:
        _check_axes(self.axes, self.sizes)
        if len(self.ranks) != math.prod(self.sizes):
            raise ArgumentError(
                f"a mesh of {self} has {math.prod(self.sizes)} places, got {len(self.ranks)} ranks"
            )
        if self.ranks[0] < 0 or any(a >= b for a, b in pairwise(self.ranks)):
            raise ArgumentError(
                f"the ranks of a mesh are ascending, row by row; got {list(self.ranks)}"
            )

    def __str__(self) -> str:
        return ", ".join(f"{a}={n}" for a, n in zip(self.axes, self.sizes, strict=True))

    def __repr__(self) -> str:
        return f"<mesh {self} of {name_ranks(self.ranks)}>"

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    def __getitem__(self, axes: str | tuple[str, ...]) -> Mesh:
        """``mesh["tp"]``, ``mesh["dp", "tp"]``: see `submesh`."""
        return self.submesh(*((axes,) if isinstance(axes, str) else axes))

    # -- places ------------------------------------------------------------------------------

    def size(self, axis: str | None = None) -> int:
        """The number of places along an axis; of workers if there is none given."""
        return len(self.ranks) if axis is None else self.sizes[self._index(axis)]

    def coordinate(self, of: int | None = None) -> tuple[int, ...]:
        """The place of a worker, an index for each axis; None: the calling worker's.

        Raises
        ------
        ArgumentError
            If that worker is not in the mesh, or none is given where there is no calling one.
        """
        rank = self._member(of)
        place = self.ranks.index(rank)
        found = []
        for size in reversed(self.sizes):
            place, index = divmod(place, size)
            found.append(index)
        return tuple(reversed(found))

    def rank(self, axis: str, of: int | None = None) -> int:
        """The place of a worker along one axis, from 0. Raises as `coordinate`."""
        index = self._index(axis)
        return self.coordinate(of)[index]

    def select(self, places: Mapping[str, Collection[int]]) -> tuple[int, ...]:
        """The ranks at these places; an axis that is not named may have any."""
        chosen = {self._index(axis): set(found) for axis, found in places.items()}
        ranges = [
            [i for i in range(size) if i in chosen.get(axis, (i,))]
            for axis, size in enumerate(self.sizes)
        ]
        return tuple(self.ranks[self._flat(place)] for place in product(*ranges))

    def peers(self, *axes: str, of: int | None = None) -> tuple[int, ...]:
        """The ranks that differ from a worker's place along these axes alone, itself included.

        Raises as `coordinate`; without axes that is the worker itself.
        """
        return _peers(self, axes, self._member(of))

    def submesh(self, *axes: str, of: int | None = None) -> Mesh:
        """The part of the mesh along these axes in which a worker is; None: the calling one.

        Raises
        ------
        ArgumentError
            As `coordinate`; or if the axes are not in the order of this mesh.
        """
        order = [self._index(axis) for axis in axes]
        if not order or any(a >= b for a, b in pairwise(order)):
            raise ArgumentError(
                f"a submesh is given by axes in the order of the mesh ({', '.join(self.axes)}), "
                f"each once; got {', '.join(axes) or 'none'}"
            )
        return Mesh(tuple(axes), tuple(self.sizes[i] for i in order), self.peers(*axes, of=of))

    def group(self, *axes: str, of: int | None = None) -> Any:
        """The `Group` along an axis (or several) in which a worker is; None: the calling one.

        ``ccl.all_reduce(x, group=mesh.group("tp"))``. Without axes: all workers of the mesh.
        Raises as `coordinate`.
        """
        return Mesh.group_type(self.peers(*(axes or self.axes), of=of))

    def to_torch(self) -> DeviceMesh:
        """The same as torch's `DeviceMesh`, on the device type of the calling worker.

        All workers of the session must call it: torch makes process groups for the axes.
        """
        from torch.distributed.device_mesh import DeviceMesh

        grid = torch.tensor(self.ranks, dtype=torch.int).reshape(self.sizes)
        return DeviceMesh(current_worker().device.type, grid, mesh_dim_names=self.axes)

    # -- inside ------------------------------------------------------------------------------

    def _index(self, axis: str) -> int:
        if axis not in self.axes:
            raise ArgumentError(f"the mesh has no axis {axis!r}; its axes are {self}")
        return self.axes.index(axis)

    def _member(self, of: int | None) -> int:
        if of is None:
            worker = current_worker_or_none()
            if worker is None:
                raise ArgumentError(
                    "which worker's place in the mesh? On the controller name one: of=rank"
                )
            of = worker.worker_id
        if of not in self.ranks:
            raise ArgumentError(f"worker {of} is not in {self!r}")
        return of

    def _flat(self, place: Iterable[int]) -> int:
        flat = 0
        for index, size in zip(place, self.sizes, strict=True):
            flat = flat * size + index
        return flat


@lru_cache(maxsize=1024)  # asked for with each collective along an axis
def _peers(mesh: Mesh, axes: tuple[str, ...], of: int) -> tuple[int, ...]:
    varied = {mesh._index(axis) for axis in axes}
    here = mesh.coordinate(of)
    fixed = {a: (here[i],) for i, a in enumerate(mesh.axes) if i not in varied}
    return mesh.select(fixed)


def make_mesh(axes: Mapping[str, int], num_workers: int) -> Mesh:
    """The mesh of all workers of a session; a size of -1 is worked out.

    Raises
    ------
    ArgumentError
        If the sizes do not multiply to the number of workers; says what would.
    """
    given = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    unknown = [axis for axis, size in axes.items() if size == -1]
    if len(unknown) > 1:
        raise ArgumentError(f"mesh({given}): only one size can be worked out, so one -1 at most")
    sizes = {axis: 1 if axis in unknown else size for axis, size in axes.items()}
    _check_axes(tuple(sizes), tuple(sizes.values()))
    for axis in unknown:
        sizes[axis] = max(1, num_workers // math.prod(sizes.values()))
    if math.prod(sizes.values()) != num_workers:
        fit = _fitting(sizes, num_workers)
        raise ArgumentError(
            f"mesh({given}): this session has {num_workers} workers, and the sizes must multiply "
            f"to that; {', '.join(f'{axis}={size}' for axis, size in fit.items())} would fit"
        )
    return Mesh(tuple(sizes), tuple(sizes.values()), tuple(range(num_workers)))


def parse_axes(text: str) -> dict[str, int]:
    """Axes from text: ``dp=2,tp=-1``.

    Raises
    ------
    ArgumentError
        If it can't be read.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        try:
            number = int(size)
        except ValueError:
            raise ArgumentError(f"{text!r} is no mesh: write axes as dp=2,tp=2") from None
        if axis in found:
            raise ArgumentError(f"{text!r}: axis {axis} is there twice")
        found[axis] = number
    return found


@worker_function("setting the mesh")
def set_mesh(mesh: Mesh | None) -> None:
    """Make `mesh` this worker's, and the name ``mesh`` of its cells (a worker function)."""
    worker = current_worker()
    worker.mesh = mesh
    if mesh is None:
        worker.namespace.pop("mesh", None)
    else:
        worker.namespace["mesh"] = mesh


def axis_group(worker: Worker, axis: str) -> Any:
    """The `Group` along an axis of the session's mesh in which `worker` is; None without a mesh.

    Raises
    ------
    ArgumentError
        If the mesh has no such axis; lists those that it has.
    """
    return None if worker.mesh is None else worker.mesh.group(axis, of=worker.worker_id)


def _check_axes(axes: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    if not axes or len(axes) != len(sizes):
        raise ArgumentError("a mesh has axes with a size each: sess.mesh(dp=2, tp=2)")
    for axis, size in zip(axes, sizes, strict=True):
        if not isinstance(axis, str) or not axis.isidentifier() or axis in _RESERVED:
            raise ArgumentError(
                f"an axis of a mesh has a Python name other than {', '.join(_RESERVED)}, "
                f"got {axis!r}"
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(
                f"axis {axis} of a mesh has a size of 1 or more, got {size!r} (-1 has it worked "
                "out by sess.mesh)"
            )
    if len(set(axes)) < len(axes):
        raise ArgumentError(f"an axis is there twice: {', '.join(axes)}")


def _fitting(sizes: Mapping[str, int], num_workers: int) -> dict[str, int]:
    """Sizes near these that multiply to the number of workers."""
    total = math.prod(sizes.values())
    for axis in reversed(list(sizes)):
        others = total // sizes[axis]
        if num_workers % others == 0:  # this one alone was wrong
            return {**sizes, axis: num_workers // others}
    fit, left = {}, num_workers
    for axis, size in sizes.items():
        fit[axis] = math.gcd(size, left)
        left //= fit[axis]
    fit[axis] *= left
    return fit
