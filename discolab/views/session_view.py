"""Draws a session and its mesh: engine and collectives, groups, and what each worker does.

Runs on the controller and asks the workers nothing: what `Session.status` knows is drawn, so a
stuck session can be looked at. Of an idle session the text is the same each time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from typing import Any

from ..runtime.mesh import Mesh
from ..runtime.session import Session
from ..runtime.status import WorkerStatus
from .dref.contents import group_ranks
from .formats import cut, format_ranks, format_workers
from .parts import Card, Column, HStack, Line, Part, Role, Row, Table, Text, VStack
from .pictures import picture_of

_ROLES: dict[str, Role] = {"idle": "muted", "dead": "error", "ended": "error"}
_LONGEST = 120
_MOMENT = 0.1  # seconds


def session_parts(session: Session) -> Part:
    """The picture of a session.

    Parameters
    ----------
    session : Session
        Live or closed.
    """
    try:
        if session.closed:
            words = " · closed: make a new one with make_session, or %disco_restart in a notebook"
            return Card(Line((Text(_name(session), "title"), Text(words, "muted"))), ())
        return _live(session, _states(session))
    except Exception as error:  # a view never raises
        return Text(f"this session could not be drawn: {type(error).__name__}", "error")


def _states(session: Session) -> Sequence[WorkerStatus]:
    """What the workers do; one that is just about to forget old values is given a moment."""
    session.forget_dropped()
    deadline = time.monotonic() + _MOMENT
    while True:
        states = session.status()
        about_to = any(state.state == "idle" and state.queued for state in states)
        if not about_to or time.monotonic() > deadline:
            return states
        time.sleep(0.002)


picture_of.register(Session, session_parts)


def _name(session: Session) -> str:
    return f"session {session.name}" if session.name else type(session).__name__


def _live(session: Session, states: Sequence[WorkerStatus]) -> Part:
    kinds = ", ".join(sorted({str(device) for device in session.devices}))
    workers = f"{session.num_workers} worker{'' if session.num_workers == 1 else 's'}"
    title = Line(
        (
            Text(_name(session), "title"),
            Text(f" · {workers} on {kinds} · "),
            _verdict(states),
        )
    )
    table: Part = _workers(session, states)
    if session.current_mesh is not None:
        pair = (table, mesh_parts(session.current_mesh))
        wide = any(state.detail for state in states)
        table = VStack(pair) if wide else HStack(pair)
    return Card(title, (*_facts(session), table))


def _verdict(states: Sequence[WorkerStatus]) -> Text:
    dead = [state.rank for state in states if state.state in ("dead", "ended")]
    if dead:
        return Text(f"{format_workers(dead)} died", "error")
    busy = [state.rank for state in states if state.state != "idle" or state.queued]
    if not busy:
        return Text("idle", "muted")
    return Text("all busy" if len(busy) == len(states) > 1 else f"{format_workers(busy)} busy")


def _facts(session: Session) -> list[Part]:
    nodes = getattr(session, "num_nodes", None)
    where = _PLACES.get(session.engine, "")
    facts = {
        "engine": session.engine + (f" on {nodes} nodes" if nodes else where),
        "collectives": session.collectives or "not chosen yet: init_ccl does",
        "groups": _groups(session),
        "timeout": "" if session.timeout is None else f"{session.timeout:g} s for each wait",
    }
    return [Line((Text(f"{key}: ", "muted"), Text(words))) for key, words in facts.items() if words]


_PLACES = {"threads": " of this process", "processes": ", one for each worker but the first"}


def _groups(session: Session) -> str:
    if session.num_groups == 1:
        return ""
    ranks = group_ranks(session.num_workers, session.num_groups)
    words = " | ".join(format_ranks(group) for group in ranks)
    return cut(f"{session.num_groups}: {words}", _LONGEST)


def _workers(session: Session, states: Sequence[WorkerStatus]) -> Table:
    size = max(session.num_workers // max(session.num_groups, 1), 1)
    rows = [(state.rank, _cells(state, size)) for state in states]
    titles = ["group"] if session.num_groups > 1 else []
    titles += ["device", "state"]
    titles += [t for t in ("doing", "for", "queued") if any(cells.get(t) for _, cells in rows)]
    right = ("for", "queued")
    return Table(
        tuple(Column(title, "right" if title in right else "left") for title in titles),
        tuple(
            Row(tuple(cells.get(title) or Text("") for title in titles), (rank,))
            for rank, cells in rows
        ),
    )


def _cells(state: WorkerStatus, size: int) -> dict[str, Any]:
    busy = state.state not in ("idle", "dead", "ended")
    return {
        "group": Text(str(state.rank // size)),
        "device": Text(state.device),
        "state": Text(state.state, _ROLES.get(state.state, "plain")),
        "doing": Text(cut(state.detail, _LONGEST)) if state.detail else None,
        "for": Text(f"{state.seconds:.1f} s") if busy else None,
        "queued": Text(str(state.queued)) if state.queued else None,
    }


# -- a mesh: a row for each place along the axes but the last, a column for each along that --------

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
