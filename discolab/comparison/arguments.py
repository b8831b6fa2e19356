"""What `compare` is given, checked: programs, inputs, a session."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..layouts.layout import ShardLayout, Workers
from ..layouts.text import parse_value_layout
from ..loader.plan import matcher
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError
from ..runtime.session import Session
from .recorder import leaves


@dataclass(slots=True)
class Inputs:
    """What both sides are called with; `cuts` has the layouts of what each worker has a part of."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cuts: dict[str, ShardLayout] = field(default_factory=dict)


def session_of(session: Session | None, *given: Any) -> Session:
    """The session that a comparison is for.

    Raises
    ------
    ArgumentError
        If nothing tells it, or two are told.
    """
    if session is not None and not isinstance(session, Session):
        raise ArgumentError(f"compare: session= is a session, got {type(session).__name__}")
    found = {id(s): s for s in [ref.session for ref in _drefs(given)]}
    if session is not None:
        return session
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise ArgumentError("compare: DRefs of two sessions were given")
    raise ArgumentError(
        'compare: which workers? Give the sharded program as a DRef (sess["model"]), or session='
    )


def _drefs(value: Any) -> Iterator[DRef]:
    if isinstance(value, DRef):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _drefs(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _drefs(one)


def check_options(
    reference: Any, rtol: float | None, atol: float | None, losses: tuple[Any, Any]
) -> None:
    """Check what can be seen at once.

    Raises
    ------
    ArgumentError
    """
    if isinstance(reference, DRef):
        raise ArgumentError(
            "compare: the reference runs here, on the controller: give a module or function, not "
            "a DRef; two values on the workers are compared by sess.compare(a, b)"
        )
    for name, value in (("rtol", rtol), ("atol", atol)):
        good = value is None or (isinstance(value, int | float) and 0 <= value < math.inf)
        if not good or isinstance(value, bool):
            raise ArgumentError(
                f"compare: {name} is a finite number, 0 or more, or None: got {value!r:.60}"
            )
    for loss in losses:
        if loss is not None and not callable(loss):
            raise ArgumentError(
                f"compare: loss= is a function of the result, got {type(loss).__name__}"
            )


def program_of(session: Session, sharded: Any) -> Any:
    """What each worker calls."""
    if isinstance(sharded, str):
        return session.get_global_func(sharded)
    if isinstance(sharded, torch.nn.Module):
        raise ArgumentError(
            "compare: sharded is a module here, on the controller; give the workers' own: a DRef, "
            'as sess["model"] is, or the DRef of sess.call_packed(make_model)'
        )
    if not isinstance(sharded, DRef) and not callable(sharded):
        raise ArgumentError(
            "compare: sharded is a DRef of the workers' module or function, a function, or the "
            f"name of a registered one; got {type(sharded).__name__}"
        )
    return sharded


def name_of(program: Any, other: str) -> str:
    """What to call a program in a title."""
    if isinstance(program, DRef):
        return program.name or other
    if isinstance(program, str):
        return program
    if isinstance(program, torch.nn.Module):
        return type(program).__name__
    return str(getattr(program, "__name__", other))


def meshes_of(session: Session) -> list[Workers]:
    """The grids of workers in which values may be cut, the likeliest first."""
    found = [Workers((session.num_workers,))]
    mesh = session.current_mesh
    if mesh is not None and len([size for size in mesh.sizes if size > 1]) > 1:
        found.append(Workers(tuple(mesh.sizes)))
    elif mesh is None and 1 < session.num_groups < session.num_workers:
        found.append(Workers((session.num_groups, session.num_workers // session.num_groups)))
    return found


def inputs_of(
    session: Session,
    inputs: Any,
    layout_of: Callable[[str], ShardLayout | None],
    timeout: float | None,
) -> Inputs:
    """The inputs of both sides; what the workers have already is fetched.

    Raises
    ------
    ArgumentError
        If a layout does not fit.
    """
    if isinstance(inputs, Mapping):
        args: tuple[Any, ...] = ()
        kwargs = dict(inputs)
        if not all(isinstance(key, str) for key in kwargs):
            raise ArgumentError("compare: a dict of inputs has the names of arguments as keys")
    else:
        args, kwargs = (inputs if isinstance(inputs, tuple) else (inputs,)), {}
    found = Inputs((), {})

    def layout(name: str) -> ShardLayout | None:
        return layout_of(f"input.{name}") or layout_of("input")

    def whole(name: str, value: Any) -> Any:
        if isinstance(value, DRef):
            value = _fetched(session, value, layout(name), name, timeout)

        for leaf, tensor in leaves(value, name):
            given = layout(leaf)
            if given is not None and tensor.dim() and not given.is_partial:
                given.part_of(tensor, 0)  # raises if it does not fit
                found.cuts[leaf] = given
        return value

    found.args = tuple(whole(str(i), value) for i, value in enumerate(args))
    found.kwargs = {name: whole(name, value) for name, value in kwargs.items()}
    return found


def _fetched(
    session: Session, ref: DRef, layout: ShardLayout | None, name: str, timeout: float | None
) -> Any:
    """The whole of what the workers have."""
    values = session.fetch(ref, None, timeout)
    if layout is None or not layout.layout.cuts:
        return values[0]
    dims = [dim for dim in layout.dims if dim is not None]
    if len(layout.workers.sizes) > 1 or len(dims) != 1 or layout.layout.segments:
        raise ArgumentError(
            f"compare: input {name} is a DRef laid out as {layout.words}: give the whole tensor, "
            "of which each worker then takes its part"
        )
    return torch.cat(values, dims[0])


def read_layout(given: Any, meshes: Sequence[Workers]) -> ShardLayout:
    """A layout that the user has given: placements of torch, or a layout of the loader.

    Raises
    ------
    ArgumentError
        If it is none.
    """
    layout = parse_value_layout(given)
    axes = len(layout.dims)
    mesh = next((mesh for mesh in meshes if len(mesh.sizes) == axes), meshes[0])
    if axes > len(mesh.sizes):
        raise ArgumentError(
            f"compare: layout {given!r} has {axes} placements, and the workers are in a mesh "
            f"of {len(mesh.sizes)}: make one with sess.mesh(dp=2, tp=2)"
        )
    return ShardLayout(layout, mesh, "given")


class GivenLayouts:
    """The layouts that the user has given: by a pattern of names, the first that matches counts."""

    def __init__(self, layouts: Mapping[str, Any], meshes: Sequence[Workers]) -> None:
        self._rules = [(p, matcher(p), read_layout(v, meshes)) for p, v in layouts.items()]
        self._unused = set(layouts)

    def find(self, name: str) -> ShardLayout | None:
        """The layout that is given for a name."""
        for pattern, matches, layout in self._rules:
            if matches(name):
                self._unused.discard(pattern)
                return layout
        return None

    @property
    def unused(self) -> list[str]:
        """The patterns that have matched no name."""
        return sorted(self._unused)
