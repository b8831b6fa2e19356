"""What a program computes between two of its modules, operation by operation.

Where the values between modules show that something is wrong and not why, both sides run forward
once more, and the operations of torch inside the module where it happens are recorded, as
functional code has no modules. They are matched by their names in the order of the program (a
worker may have more of them, as masks and slices) and compared as any other value. What differs
though all it is made of agrees is the operation to look at.
"""

from __future__ import annotations

import difflib
import itertools
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from ..ccl.checks import noticing_calls
from ..layouts.layout import ShardLayout
from ..runtime.sources import is_installed, place
from .recorder import ActivationRecorder, Entry, V, plain_path
from .results import Point

Operation: TypeAlias = tuple[str, str, str]
"""The key of an operation without its leaf, its name, the user's line."""

REARRANGING = {
    "chunk", "split", "tensor_split", "unbind", "view", "reshape", "unflatten", "split_with_sizes",
}  # fmt: skip
_MOST_BYTES = 256 * 2**20  # of values that are kept
_MOST = 4000  # operations

# What makes no value of its own.
_LEFT_OUT = {
    "__get__", "__set__", "clone", "contiguous", "detach", "requires_grad_", "to", "size", "float",
    "type", "cpu", "cuda", "expand", "view_as", "_is_view", "is_floating_point", "dim",
}  # fmt: skip


class OperationRecorder(ActivationRecorder):
    """Records the operations that run inside one call of a module.

    Parameters
    ----------
    window
        The call, as ``blocks.0.attn#2``; "" for the whole program.
    """

    def __init__(self, window: str) -> None:
        super().__init__(gradients=False)
        self.window = window
        self.operations: list[Operation] = []
        self.parents: dict[str, list[str]] = {}  # by key, the keys of what a value is made of
        self.weights: dict[str, list[str]] = {}  # and the names of parameters
        self._names: dict[int, str] = {}  # of parameters, by identity
        self.calls: dict[str, tuple[str, ...]] = {}  # by key, the calls in the window around it
        self._stack: list[str] = []
        self._bytes = 0
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}

    @contextmanager
    def recording(self, module: torch.nn.Module | None) -> Iterator[None]:
        """Record while the call runs, on this thread."""
        hooks: list[Any] = []
        if module is not None:
            self._names = {id(p): plain_path(name) for name, p in module.named_parameters()}
        for path, inner in module.named_modules() if module is not None else ():
            hooks += self._watch_calls(plain_path(path), inner)
        try:
            with _Watch(self), noticing_calls(self.enter_collective):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._made.clear()

    def _watch_calls(self, path: str, module: torch.nn.Module) -> list[Any]:
        calls = itertools.count(1)

        def before(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                number = next(calls)
                self._stack.append(path if number == 1 else f"{path}#{number}")

        def after(*_: Any) -> None:
            if not torch.compiler.is_compiling() and self._stack:
                self._stack.pop()

        return [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),  # if it raises, too
        ]

    @property
    def _inside(self) -> bool:
        return not self.window or self.window in self._stack

    def take(self, kind: str, name: str, value: V) -> V:
        """Enter nothing: inputs and results are known."""
        return value

    def enter_operation(self, name: str, args: Any, result: Any) -> None:
        """Enter what an operation has made."""
        if not self._inside or len(self.operations) >= _MOST or self._bytes > _MOST_BYTES:
            return
        outputs = result if isinstance(result, tuple | list) else (result,)
        tensors = [t for t in outputs if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if not tensors or len(tensors) < len(outputs):
            return
        label = self._listed(name, _user_line())
        parents = [key for tensor in _tensors(args) if (key := self._key_of(tensor)) is not None]
        weights = [self._names[id(t)] for t in _tensors(args) if id(t) in self._names]
        for number, tensor in enumerate(tensors):
            snapshot = self._snapshot(tensor)
            self._bytes += snapshot.value.numel() * snapshot.value.element_size()
            leaf = str(number) if len(tensors) > 1 else ""
            entry = Entry("operation", label, leaf, snapshot, snapshot.gradient)
            self._add(entry)
            self.parents[entry.key] = parents
            start = self._stack.index(self.window) + 1 if self.window else 0
            self.calls[entry.key] = tuple(self._stack[start:])
            self.weights[entry.key] = weights
            self._made[id(tensor)] = weakref.ref(tensor), entry.key

    def enter_collective(self, name: str, line: str) -> None:
        """Enter that a collective runs, of which no value is taken."""
        if self._inside and len(self.operations) < _MOST:
            self._listed(name, line)

    def _listed(self, name: str, line: str) -> str:
        label = f"{len(self.operations)}:{name}"
        self.operations.append((f"operation|{label}", name, line))
        return label

    def _key_of(self, tensor: torch.Tensor) -> str | None:
        known = self._made.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def rename_operations(self, names: Mapping[str, str]) -> None:
        """Give operations the names of the reference's; others are forgotten."""
        entries = {}
        for entry in self.entries.values():
            if entry.kind == "operation":
                if entry.name not in names:
                    continue
                entry.name = names[entry.name]
            entries[entry.key] = entry
        self.entries = entries


class _Watch(TorchFunctionMode):
    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if name not in _LEFT_OUT and not caller.startswith("discolab."):
            self.recorder.enter_operation(_plain(name), (args, kwargs), result)
        return result


def _plain(name: str) -> str:
    """The name of an operation, however it is written: ``+`` and ``torch.add`` are one."""
    name = name.strip("_")
    return {
        "radd": "add", "iadd": "add", "rmul": "mul", "imul": "mul", "rsub": "sub", "isub": "sub",
        "rmatmul": "matmul", "mm": "matmul", "bmm": "matmul", "truediv": "div", "rtruediv": "div",
        "itruediv": "div", "multiply": "mul", "subtract": "sub", "divide": "div",
    }.get(name, name)  # fmt: skip


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _tensors(inner)


def _user_line() -> str:
    """The nearest line of the user's, else of a library that is not torch."""
    frame: Any = sys._getframe(1)
    library = ""
    while frame is not None:
        name, filename = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
        if not name.startswith(("discolab.", "torch.", "threading")):
            if not is_installed(filename):
                return place(filename, frame.f_lineno)
            library = library or place(filename, frame.f_lineno)
        frame = frame.f_back
    return library


def match_operations(
    ours: Sequence[Operation], theirs: Sequence[Sequence[Operation]]
) -> list[dict[str, str]]:
    """Which operation of each worker is which of the reference: labels there to labels here.

    What takes a part is matched only if all do it as often: of a loop over a sequence of which a
    worker has a part, no step need be that of the same number. Nor what a worker does far less
    often, as of a loop over experts of which it has some.
    """
    mine = [name for _, name, _ in ours]
    others = [[name for _, name, _ in operations] for operations in theirs]
    loops = {
        name for name in ("getitem", "select")
        if any(mine.count(name) != names.count(name) for names in others)
    } | {
        name for name in set(mine)
        if any(mine.count(name) >= 2 * names.count(name) + 2 for names in others)
    }  # fmt: skip
    found: list[dict[str, str]] = []
    for operations, names in zip(theirs, others, strict=True):
        labels = {}
        matcher = difflib.SequenceMatcher(None, mine, names, autojunk=False)
        for a, b, size in matcher.get_matching_blocks():
            for step in range(size):
                if mine[a + step] not in loops:
                    there, here = operations[b + step][0], ours[a + step][0]
                    labels[there.partition("|")[2]] = here.partition("|")[2]
        found.append(labels)
    return found


def other_operations(
    ours: Sequence[Operation], theirs: Sequence[Sequence[Operation]]
) -> list[tuple[str, str, str, list[int]]]:
    """Where some workers, not all, run another operation than the reference does.

    Returns
    -------
    list
        The label here, the operation there, its line, the workers.
    """
    mine = [name for _, name, _ in ours]
    found: dict[tuple[str, str, str], list[int]] = {}
    for rank, operations in enumerate(theirs):
        names = [name for _, name, _ in operations]
        matcher = difflib.SequenceMatcher(None, mine, names, autojunk=False)
        for tag, a, b, c, d in matcher.get_opcodes():
            if tag == "replace" and b - a == d - c == 1:
                label = ours[a][0].partition("|")[2]
                found.setdefault((label, operations[c][1], operations[c][2]), []).append(rank)
    return [(*key, ranks) for key, ranks in found.items() if len(ranks) < len(theirs)]


def sources(points: Sequence[Point], parents: Mapping[str, Sequence[str]]) -> list[Point]:
    """The operations that differ though all that they are made of agrees, and none behind agrees.

    What comes of an operation and agrees shows that it is only computed another way. Other
    differences count as agreeing here, so that the first that is left is the place.
    """
    known = {point.key: point for point in points}
    children: dict[str, list[str]] = {}
    for key, made_of in parents.items():
        for parent in made_of:
            children.setdefault(parent, []).append(key)

    def rejoins(key: str) -> bool:
        todo, seen = list(children.get(key, ())), set()
        while todo:
            child = todo.pop()
            if child in seen:
                continue
            seen.add(child)
            point = known.get(child)
            if point is not None and not point.problem and point.agrees and not point.partial:
                return True
            todo += children.get(child, ())
        return False

    found = []
    for point in points:
        wrong = not point.agrees and not point.problem
        origins = [known[key] for key in parents.get(point.key, ()) if key in known]
        if wrong and (rejoins(point.key) or not all(p.agrees and not p.problem for p in origins)):
            point = replace(point, agrees=True, problem="computed another way")
        found.append(point)
    return found


def settled(
    points: Sequence[Point], calls: Mapping[str, AbstractSet[str]], agreeing: AbstractSet[str]
) -> list[Point]:
    """The points where what runs inside calls of modules that agree counts as agreeing.

    What such a call puts out is right, or terms that were found to be in order.
    """
    return [
        replace(point, agrees=True, partial=False, ranks=(), unlike=False)
        if not point.problem and agreeing & calls.get(point.key, set())
        else point
        for point in points
    ]


def only_there(
    operations: Sequence[Operation],
    names: Mapping[str, str],
    end: str,
) -> list[Operation]:
    """What a worker alone runs before an operation of both.

    Of operations of one name in a row any may be the one that both run.

    Parameters
    ----------
    operations
        The worker's.
    names
        Of those that both run: labels there to labels here.
    end
        The label here of the operation.
    """
    labels = [key.partition("|")[2] for key, _, _ in operations]
    last = next((n for n, label in enumerate(labels) if names.get(label) == end), None)
    if last is None:
        return []
    return [operations[n] for n in range(last) if labels[n] not in names]


def goes_on_alone(operations: Sequence[Operation], names: Mapping[str, str], label: str) -> bool:
    """Whether a worker runs something of its own right after an operation of both.

    See `only_there`.
    """
    labels = [key.partition("|")[2] for key, _, _ in operations]
    after = [n for n, own in enumerate(labels, 1) if names.get(own) == label]
    return any(n < len(labels) and labels[n] not in names for n in after)


def mixed_parts(point: Point, parent: Point, layout: ShardLayout, weights: Sequence[str]) -> str:
    """What to say where a value that agrees is taken apart and its parts do not; "" if nothing.

    `weights`: the parameters that the value is made with. Certain: to take a value apart computes
    nothing. Its parts are wrong on the workers though each holds its piece of the whole, so the
    pieces were cut across the parts.
    """
    name = point.module.partition(":")[2]
    cuts = [dim for dim in layout.dims if dim is not None]
    if name not in REARRANGING or len(cuts) != 1 or layout.layout.segments or layout.is_partial:
        return ""
    count = _count_of_parts(point, parent, cuts[0])
    if not count:
        return ""
    what = " and ".join(weights) or parent.words
    are = "are" if len(weights) > 1 else "is"
    return (
        f"{what} {are} split in contiguous pieces, and {name} takes the result apart on each "
        f"worker: rows of its parts (q, k, v) are mixed: cut with segments={count}?"
    )


def _count_of_parts(point: Point, parent: Point, dim: int) -> int:
    if len(point.shape) == len(parent.shape):
        parts = parent.shape[dim] / max(point.shape[dim], 1)
        return int(parts) if parts == int(parts) and parts > 1 else 0
    if len(point.shape) > len(parent.shape):
        return point.shape[dim]
    return 0
