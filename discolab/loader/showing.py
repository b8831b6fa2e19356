"""What a checkpoint holds and what a plan makes of it, told from the index: no weight is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..layouts.layout import Workers
from ..runtime.display import Pictured
from ..runtime.errors import ArgumentError
from ..views import Part
from .catalog import Catalog
from .formats import open_checkpoint
from .formats.checks import cast_dtype
from .plan import Plan, Resolved, matcher
from .presharded import is_presharded, logical, sharding_of
from .tables import LIMIT, catalog_parts, drawing_part, plan_parts

_SHORT = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "f16": torch.float16,
    "fp32": torch.float32,
    "f32": torch.float32,
    "fp64": torch.float64,
    "f64": torch.float64,
}


class Shown(Pictured):
    """A table of a checkpoint, or of a plan's result; draws itself as text and as HTML.

    Attributes
    ----------
    part
        What is drawn.
    catalog
        What the checkpoint holds.
    resolved
        The layout of each parameter; None if it was not asked for.
    """

    def __init__(self, part: Part, catalog: Catalog, resolved: Resolved | None = None) -> None:
        self.part = part
        self.catalog = catalog
        self.resolved = resolved

    @classmethod
    def of(
        cls,
        resolved: Resolved,
        dtype: torch.dtype | None = None,
        limit: int | None = LIMIT,
        drawn: str | None = None,
    ) -> Shown:
        """The result of a plan; see `plan_parts`."""
        part = plan_parts(resolved, dtype, limit, drawn)
        return cls(part, resolved.catalog, resolved)

    def draw(self, name: str) -> Shown:
        """One parameter, cut as the plan says.

        Raises
        ------
        ArgumentError
            If there is no plan, or no such parameter.
        """
        if self.resolved is None:
            raise ArgumentError("to draw a parameter say for how many workers: workers=4")
        if name not in self.resolved.layouts:
            raise ArgumentError(f"no parameter {name!r}{_near(name, self.resolved.layouts)}")
        return Shown(drawing_part(self.resolved, name), self.catalog, self.resolved)


def show(
    path: str | os.PathLike[str] | Catalog,
    plan: Any = None,
    workers: int | Workers | None = None,
    groups: int = 1,
    *,
    params: str | Sequence[str] | None = None,
    dtype: Any = None,
    limit: int | None = LIMIT,
) -> Shown:
    """Tell what a checkpoint holds and, given workers, what a load would do on them.

    Parameters
    ----------
    path
        A file, a folder or an index file; see `open_checkpoint`.
    plan
        Layouts, see `Plan.of`; None: a whole copy on every worker.
    workers
        How many; None: only what the checkpoint holds.
    groups
        Pipeline stages that they are in.
    params
        Globs of the parameters to show; None: all.
    dtype
        What floating point parameters would be cast to: a torch dtype or its name, also ``bf16``.
    limit
        Rows of the table at most; None: all of them.

    Raises
    ------
    CheckpointError
        If the index is not whole.
    ArgumentError
        If the plan does not fit, or nothing has such a name.

    Examples
    --------
    >>> print(show("llama.safetensors", {"*.weight": "shard(0)"}, workers=4))  # doctest: +SKIP
    """
    given = None if plan is None else Plan.of(plan)
    if given is not None and workers is None:
        raise ArgumentError("a plan is shown for a number of workers: workers=4 (--workers 4)")
    wanted = as_dtype(dtype)
    spread = None if workers is None else Workers.given(workers, groups)
    catalog = path if isinstance(path, Catalog) else open_checkpoint(path)
    sharding = sharding_of(catalog)
    if spread is not None or sharding is not None or not is_presharded(catalog):
        catalog = logical(catalog, given)  # else nothing says how it was cut: shards by their names
    if spread is None:
        if params is not None:
            chosen = chosen_names(catalog, params)
            catalog = replace(catalog, entries={name: catalog.entries[name] for name in chosen})
        return Shown(catalog_parts(catalog, limit, sharding), catalog)
    resolved = (given or Plan.of(None)).resolve(catalog, spread)
    if params is not None:
        resolved = resolved.subset(chosen_names(catalog, params))
    return Shown.of(resolved, wanted, limit)


def as_dtype(dtype: Any) -> torch.dtype | None:
    """A dtype from what people type: also ``bf16``, ``fp16``, ``f32``; None stays None.

    Raises
    ------
    ArgumentError
        If there is none of that name, or it is none to cast floating point parameters to.
    """
    return cast_dtype(_SHORT.get(dtype, dtype) if isinstance(dtype, str) else dtype)


def chosen_names(catalog: Catalog, params: str | Sequence[str]) -> list[str]:
    """The parameters that patterns match, in the checkpoint's order.

    Parameters
    ----------
    params
        As patterns of rules are; several may stand in one string, with commas between.

    Raises
    ------
    ArgumentError
        If one matches none.
    """
    texts = [params] if isinstance(params, str) else list(params)
    globs = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    chosen: set[str] = set()
    for glob in globs:
        found = list(filter(matcher(glob), catalog.entries))
        if not found:
            near = _near(glob, catalog.entries)
            raise ArgumentError(f"no parameter of {catalog.path} is named {glob!r}{near}")
        chosen.update(found)
    return [name for name in catalog.entries if name in chosen]


def _near(name: str, names: Any) -> str:
    import difflib

    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""
