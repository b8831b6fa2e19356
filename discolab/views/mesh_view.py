"""A mesh as a table of ranks: a row for each place along the axes but the last, a column for each
place along the last one.

Pure: a mesh is a value that the controller has, so nothing is asked of the workers.
"""

from __future__ import annotations

from itertools import product

from ..runtime.mesh import Mesh
from .formats import format_ranks, format_workers
from .parts import Column, Part, Row, Table, Text, VStack
from .pictures import picture_of

_MOST_COLUMNS = 16  # places of the last axis that get a column each
_MOST_ROWS = 64


def mesh_parts(mesh: Mesh) -> Part:
    """The picture of a mesh.

    Parameters
    ----------
    mesh : Mesh

    Examples
    --------
    >>> print(render_text(mesh_parts(Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3)))))
    mesh dp=2, tp=2 of workers 0-3
      dp  tp=0  tp=1
       0     0     1
       1     2     3
    """
    title = Text(f"mesh {mesh} of {format_workers(mesh.ranks)}", "title")
    *leading, last = mesh.sizes
    axis = mesh.axes[-1]
    folded = last > _MOST_COLUMNS
    heads = [f"{axis}=0 to {last - 1}"] if folded else [f"{axis}={i}" for i in range(last)]
    columns = [*mesh.axes[:-1], *heads]
    rows = []
    for number, place in enumerate(product(*map(range, leading))):
        if number == _MOST_ROWS:
            break
        line = mesh.ranks[number * last : (number + 1) * last]
        words = [format_ranks(line)] if folded else [str(rank) for rank in line]
        cells = [Text(str(index), "muted") for index in place] + [Text(word) for word in words]
        rows.append(Row(tuple(cells)))
    more = len(mesh.ranks) // last - len(rows)
    table = Table(tuple(Column(head, "right") for head in columns), tuple(rows))
    return VStack((title, table, *([Text(f"{more} more rows", "muted")] if more else [])))


picture_of.register(Mesh, mesh_parts)
