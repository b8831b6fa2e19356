"""What a comparison found: `Comparison`, its `Point`s, and the `Finding` that comes first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...views.parts import Part
from ...views.pictures import bundle_of
from ...views.render.text import render_text
from .measuring import Row


@dataclass(frozen=True, slots=True)
class Point:
    """A value of the reference, and how the workers' agree with it.

    Attributes
    ----------
    kind : str
        ``parameter``, ``buffer``, ``input`` or ``output`` of a module, ``note``, ``argument`` or
        ``result`` of the program.
    module : str
        The path of the module, with ``#2`` at its second call; what a note is called.
    gradient : bool
        Whether it is the gradient of that.
    leaf : str
        Which value of several, as ``0``; else empty.
    shape, dtype
        Of the reference's value.
    layout : str
        How the value lies over the workers, in torch's words; "" if none was found.
    source : str
        Who says so: ``given``, ``DTensor`` or ``inferred``.
    partial : bool
        Whether the workers hold terms of a sum. It was then compared at `sampled` elements.
    agrees : bool
    error : float
        The largest difference.
    relative : float
        That, as a part of `scale`.
    scale : float
        A typical element of the reference: the root of the mean square. Of the gradient of a
        parameter a quarter of the median one of all parameters at least.
    ranks : tuple of int
        The workers that differ.
    rows : dict of rank to dict
        ``max_abs``, ``index`` (in the worker's tensor), ``a`` (there), ``b`` (in the reference),
        ``over`` (elements beyond the tolerance), ``size``. Of a sum the first worker has the row.
    problem : str
        Why it could not be compared; it then counts neither as agreeing nor as differing.
    unlike : bool
        Whether the workers' values differ among themselves where they should be the same.
    """

    kind: str
    module: str
    leaf: str
    gradient: bool
    shape: tuple[int, ...]
    dtype: str
    key: str = field(repr=False)
    theirs: str = field(repr=False)
    layout: str = ""
    source: str = ""
    partial: bool = False
    sampled: int = 0
    agrees: bool = True
    error: float = 0.0
    relative: float = 0.0
    scale: float = 0.0
    ranks: tuple[int, ...] = ()
    rows: Mapping[int, Row] = field(default_factory=dict)
    problem: str = ""
    unlike: bool = False

    @property
    def size(self) -> int:
        """Of the reference's value."""
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        """By which `layouts` may speak of it."""
        return point_name(self.kind, self.module, self.leaf, self.gradient)

    @property
    def words(self) -> str:
        """For a sentence."""
        leaf = f" ({self.leaf})" if self.leaf else ""
        whole = self.module or "the whole model"
        words = {
            "argument": "input of the program",
            "result": "result of the program",
            "input": f"input of {whole}",
            "output": f"output of {whole}",
            "note": f"note {self.module!r}",
        }.get(self.kind, f"{self.kind} {self.module}")
        words += leaf
        return f"gradient of the {words}" if self.gradient else words


def point_name(kind: str, module: str, leaf: str, gradient: bool) -> str:
    """The name of a point: ``mlp.up``, ``mlp.up.input``, ``mlp.up.weight``, each with ``.grad``."""
    name = module
    if kind == "argument":
        name = "input"
    elif kind == "input":
        name = f"{module}.input" if module else "input"
    elif kind == "result" or not module:
        name = "output"
    name += f".{leaf}" if leaf else ""
    return f"{name}.grad" if gradient else name


@dataclass(frozen=True, slots=True)
class Finding:
    """The first place where the two differ, and what the numbers say of the cause.

    Attributes
    ----------
    point : Point
    causes : tuple of str
        What the numbers prove, the strongest first; empty if they give nothing away.
    place : str
        What is known of where in the program it happens.
    """

    point: Point
    causes: tuple[str, ...] = ()
    place: str = ""

    @property
    def module(self) -> str:
        """The path of the module."""
        return self.point.module

    @property
    def ranks(self) -> tuple[int, ...]:
        """The workers that differ."""
        return self.point.ranks

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.point.words, self.place, *self.causes]))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `discolab.compare` found; shows itself as text and as HTML.

    Attributes
    ----------
    agrees : bool
        Whether something was compared, and no value differs beyond its tolerance.
    first : Finding or None
        The first place where one does: parameters, then forward, then backward.
    parameters : tuple of Point
        Parameters and buffers.
    points : tuple of Point
        What was seen in forward, in the order of the reference's program.
    gradients : tuple of Point
        What was seen in backward, in the order of the reference's.
    unmatched : tuple of Point
        Values of the reference that could not be compared; `problem` says why.
    only_in_reference, only_in_sharded : tuple of str
        Modules, parameters and notes that the other side has not.
    notes : tuple of str
        What else a reader should know.
    partly : bool
        Whether some workers, or some of what the program gives, could not be compared.
    plain : int
        How many values besides tensors and numbers were compared.
    num_workers : int
    """

    names: tuple[str, str]
    num_workers: int
    first: Finding | None
    parameters: tuple[Point, ...]
    points: tuple[Point, ...]
    gradients: tuple[Point, ...]
    unmatched: tuple[Point, ...] = ()
    only_in_reference: tuple[str, ...] = ()
    only_in_sharded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    partly: bool = False
    plain: int = 0

    @property
    def agrees(self) -> bool:
        """Whether something was compared, and no value differs beyond its tolerance."""
        return self.first is None and not self.is_empty

    @property
    def is_empty(self) -> bool:
        """Whether nothing that the programs compute was compared."""
        computed = (p for p in self.points if p.kind != "argument" and 0 not in p.shape)
        return not self.plain and next(computed, None) is None

    @property
    def worst(self) -> Point | None:
        """The value with the largest error, as a part of a typical element."""
        found = (*self.parameters, *self.points, *self.gradients)
        return max(found, key=lambda point: point.relative, default=None)

    draw: ClassVar[Callable[[Comparison], Part]]
    """How it is drawn; drawing.py sets it."""

    def __bool__(self) -> bool:
        return self.agrees

    @property
    def part(self) -> Part:
        """The picture."""
        return type(self).draw(self)

    def __repr__(self) -> str:
        return render_text(self.part)

    def __rich__(self) -> Any:
        from ...views.render.rich import render_rich

        return render_rich(self.part)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return bundle_of(self.part)
