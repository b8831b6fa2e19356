"""Reads layouts: from what people write (text, torch's placements, dicts), and of DTensors. Pure.

torch's placements are read by their public methods, so that its module need not be imported.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..runtime.errors import ArgumentError
from .layout import Layout

FORMS = (
    "replicate", "shard(0)", "shard(0, segments=[8, 2, 2], heads=[8, 2, 2])",
    "shard(0, segments=2)", "shard(1, pad_to=64)", "shard(0, stage=1)", "replicate(stage=1)",
    "[replicate, shard(0)]",
)  # fmt: skip
WORDS = {"replicate": "replicate", "r": "replicate", "shard": "shard", "s": "shard"}
OPTIONS = ("segments", "heads", "pad_to", "stage")
LONGEST = 10_000  # characters of a layout's text


def parse_layout(given: Any) -> Layout:
    """The layout that `given` means.

    Parameters
    ----------
    given
        A `Layout`; text as ``str(layout)`` gives it; `Shard`, `Replicate` or `_StridedShard` of
        torch (the last as that many equal segments, each cut by itself); a dict
        ``{"dim": 0, "segments": [8, 2, 2]}`` (``"dims"`` for several mesh axes, ``None`` where one
        holds copies); or a list of these, one for each mesh axis, the outermost first.

    Raises
    ------
    ArgumentError
        If it is none of these; the message has it, and forms that are near.
    """
    if isinstance(given, Layout):
        return _whole([given], given)
    if isinstance(given, str):
        return _from_text(given)
    if isinstance(given, Mapping):
        return _from_dict(given)
    if isinstance(given, Sequence):
        return _whole([parse_layout(one) for one in given], given)
    return _from_placement(given)


def _from_text(text: str) -> Layout:
    if len(text) > LONGEST:
        raise _refused(text[:40] + "…", f"is {len(text):,} characters long")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _refused(text, "can't be read as a layout") from None
    nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    return _whole([_from_node(node, text) for node in nodes], text)


def _from_node(node: ast.expr, text: str) -> Layout:
    call = node if isinstance(node, ast.Call) else None
    word = call.func if call else node
    kind = WORDS.get(word.id.lower()) if isinstance(word, ast.Name) else None
    if kind is None:
        raise _refused(text, "can't be read as a layout")
    if call is None:
        if kind == "shard":
            raise _refused(text, "does not say which dimension it cuts")
        return Layout()
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise _refused(text, "can't be read as a layout")
        options[keyword.arg] = _literal(keyword.value, text)
    if len(call.args) > 1 or (call.args and (kind == "replicate" or "dim" in options)):
        raise _refused(text, "has a number too many; name it, as in stage=1")
    if call.args:
        options["dim"] = _literal(call.args[0], text)
    if (kind == "shard") != ("dim" in options):
        said = "does not say which" if kind == "shard" else "holds copies and names a"
        raise _refused(text, f"{said} dimension")
    return _made(options, text)


def _literal(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise _refused(text, "has something other than numbers in it") from None


def _from_dict(given: Mapping[Any, Any]) -> Layout:
    if "dim" in given and "dims" in given:
        raise _refused(given, "has both dim and dims")
    return _made(dict(given), given)


def _made(options: dict[str, Any], given: Any) -> Layout:
    unknown = [key for key in options if key not in ("dim", "dims", *OPTIONS)]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), OPTIONS, 1)
        hint = f" (there is {near[0]})" if near else f" (there are {', '.join(OPTIONS)})"
        raise _refused(given, f"has an unknown option {unknown[0]!r}{hint}")
    dims = options.get("dims", [options.get("dim")])
    if not isinstance(dims, list | tuple):
        raise _refused(given, f"has dims={dims!r}; they must be a list")
    segments = options.get("segments")
    if isinstance(segments, list | tuple) and len(segments) == 1:
        raise _refused(
            given,
            f"has one segment; segments={segments[0]} is for so many equal ones, a list "
            "for their sizes",
        )
    stage = options.get("stage")
    layout = Layout(
        tuple(None if dim is None else _number(dim, "a dimension", given) for dim in dims),
        _numbers(options.get("segments"), "segments", given),
        _numbers(options.get("heads"), "heads", given),
        _number(options.get("pad_to") or 0, "pad_to", given, least=0),
        None if stage is None else _number(stage, "stage", given, least=0),
    )
    return _whole([layout], given)


def _numbers(value: Any, what: str, given: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(_number(one, f"each of {what}", given, least=1) for one in values)


def _number(value: Any, what: str, given: Any, least: int | None = None) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (least is not None and value < least):
        wanted = "an integer" if least is None else f"an integer of at least {least}"
        raise _refused(given, f"has {value!r}, and {what} must be {wanted}")
    return int(value)


def _from_placement(given: Any) -> Layout:
    from torch.distributed.tensor import Placement, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(given, Replicate):
        return Layout()
    if isinstance(given, _StridedShard):
        factor = int(given.split_factor)
        return Layout((given.dim,), (factor,) if factor > 1 else ())
    if isinstance(given, Shard):
        return Layout((given.dim,))
    if isinstance(given, Placement):
        raise _refused(given, "is no way to hold a parameter: use Shard(dim) or Replicate()")
    raise _refused(given, f"is {type(given).__name__}, which is no layout")


def _whole(parts: list[Layout], given: Any) -> Layout:
    """One layout of those for each mesh axis; what is said of several must be the same."""
    dims = tuple(dim for part in parts for dim in part.dims)
    if not dims:
        raise _refused(given, "is empty")
    if len(parts) == 1:
        made = parts[0]
    else:
        if any(len(part.dims) != 1 for part in parts):
            raise _refused(given, "has lists in a list")
        made = Layout(
            dims,
            _only(parts, lambda part: part.segments, "segments", given),
            _only(parts, lambda part: part.heads, "heads", given),
            _only(parts, lambda part: part.pad_to, "pad_to", given),
            _only(parts, lambda part: part.stage, "stage", given),
        )
    if any(made.partial):
        raise _refused(given, "is no way to hold a parameter: use Shard(dim) or Replicate()")
    if not made.cuts and (made.segments or made.heads or made.pad_to):
        raise _refused(given, "has segments, heads or padding, and splits nothing")
    return made


def _only(parts: list[Layout], of: Callable[[Layout], Any], what: str, given: Any) -> Any:
    unsaid = of(Layout())
    found = {of(part) for part in parts} - {unsaid}
    if len(found) > 1:
        raise _refused(given, f"says of {what} different things for different mesh axes")
    return found.pop() if found else unsaid


def _refused(given: Any, why: str) -> ArgumentError:
    shown = repr(given)
    if len(shown) > 200:
        shown = shown[:200] + "…"
    near = difflib.get_close_matches(given.lower(), FORMS, 2, 0.6) if isinstance(given, str) else []
    mean = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    return ArgumentError(f"layout {shown} {why}{mean} Layouts are written {', '.join(FORMS)}")


# -- with terms of a sum, as values between parameters may lie -------------------------------------


class UnknownPlacementError(ValueError):
    """A placement of a `kind` that is neither Shard nor Replicate nor Partial."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"no drawing for {kind}")
        self.kind = kind


def parse_value_layout(given: Any) -> Layout:
    """As `parse_layout`, for a value that may be partial: torch's `Partial`, or ``"partial"``.

    Raises
    ------
    ArgumentError
        As `parse_layout`.
    """
    each = list(given) if isinstance(given, list | tuple) else [given]
    ops = tuple(_operation(one) for one in each)
    if not any(ops):
        return parse_layout(given)
    dims = [None if op else parse_layout(one).dims[0] for one, op in zip(each, ops, strict=True)]
    return Layout(tuple(dims), partial=ops)


def _operation(given: Any) -> str:
    """The operation of a `Partial`, or of the word for it; "" of anything else."""
    if isinstance(given, str) and given.strip().lower().rstrip("()") == "partial":
        return "sum"
    if type(given).__name__ == "Partial":
        return str(getattr(given, "reduce_op", "sum"))
    return ""


def read_placements(placements: Any) -> list[tuple[str, Any]]:
    """The names and details of torch's placements, one or several: ``("Shard", 0)``."""
    if not isinstance(placements, list | tuple):
        placements = (placements,)
    return [
        (type(place).__name__, getattr(place, "dim", getattr(place, "reduce_op", "")))
        for place in placements
    ]


def layout_of(placements: Sequence[Sequence[Any]], ndim: int | None = None) -> Layout:
    """The layout of placements given by name and detail: ``("Shard", 0)``, ``("Partial", "sum")``.

    Parameters
    ----------
    ndim
        Of the tensor: negative dims are counted from its end. None: dims stay as they are.

    Raises
    ------
    UnknownPlacementError
    ValueError
        For a dim out of range.
    """
    dims: list[int | None] = []
    partial: list[str] = []
    for kind, detail in placements:
        if kind not in ("Shard", "Replicate", "Partial"):
            raise UnknownPlacementError(kind)
        dim = int(detail) if kind == "Shard" else None
        if dim is not None and ndim is not None:
            if not -ndim <= dim < ndim:
                raise ValueError(f"Shard({dim}) of a tensor with {ndim} dims")
            dim %= ndim
        dims.append(dim)
        partial.append(str(detail) if kind == "Partial" else "")
    return Layout(tuple(dims), partial=tuple(partial) if any(partial) else ())
