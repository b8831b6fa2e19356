"""Groups of a mesh: what collectives need to run along its axes. No state.

The mesh itself, a value of the controller and of the workers alike, is in runtime/mesh.py; it
learns here what a group is. ``group="tp"`` of a collective means `runtime.mesh.axis_group`: the
calling worker's line along that axis of the session's mesh.
"""

from __future__ import annotations

from functools import lru_cache

from ..runtime.mesh import Mesh
from .groups import Group


@lru_cache(maxsize=1024)
def group_of(ranks: tuple[int, ...]) -> Group:
    """The group of these ranks, without a tag.

    Two axes have the same group only if it has the same ranks, and then it is called in the
    same order by all of them: there is nothing to keep apart.
    """
    return Group(ranks)


Mesh.group_type = staticmethod(group_of)
