"""Scopes and variables: the records of the views, opened level by level.

What a client can open has a number, which counts until workers go on. A record tells its own parts
where it has them; what lies deeper is asked of the worker by the expression that leads there.
"""

from __future__ import annotations

import ast
import itertools
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..debugger.controller import DebuggerError
from ..debugger.debugger import Debugger
from ..runtime.errors import ArgumentError
from ..views.dref.contents import content_key
from ..views.formats import format_bytes
from ..views.summary import summarize

Record = Mapping[str, Any]
Child = tuple[str, Record | str, str]  # name, record or plain words, expression or ""

_FACTS = ("shape", "dtype", "device", "head", "layout", "placements", "logical_shape",
          "requires_grad", "note", "digest")  # fmt: skip
_CONTAINERS = ("list", "tuple", "dict", "dataclass")
_SIMPLE = re.compile(r"[\w.]+")
_MODULE = (
    "{{**dict({0}.named_children()), **dict({0}.named_parameters(recurse=False)), "
    "**dict({0}.named_buffers(recurse=False))}}"
)


@dataclass(frozen=True)
class _Scope:
    """The variables of a frame of one worker."""

    rank: int
    depth: int


@dataclass(frozen=True)
class _Beside:
    """The variables of a frame, those of all workers beside each other."""

    depth: int


@dataclass(frozen=True)
class _Workers:
    """One variable on each worker."""

    depth: int
    name: str
    records: Mapping[int, Record]


@dataclass(frozen=True)
class _Value:
    """A value that can be opened; `whole` if its record tells all that `describe` tells."""

    rank: int
    depth: int
    expression: str
    record: Record
    whole: bool


class Values:
    """What a client can open; used on any thread."""

    def __init__(self, debugger: Debugger) -> None:
        self._debugger = debugger
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._opened: dict[int, _Scope | _Beside | _Workers | _Value] = {}

    def clear(self) -> None:
        """Workers go on: what was shown is no more."""
        with self._lock:
            self._opened.clear()

    def scopes(self, rank: int, depth: int) -> list[dict[str, Any]]:
        """The scopes of a frame."""
        return [
            {
                "name": "Locals",
                "presentationHint": "locals",
                "variablesReference": self._number(_Scope(rank, depth)),
                "expensive": False,
            },
            {
                "name": "All workers",
                "variablesReference": self._number(_Beside(depth)),
                "expensive": True,
            },
        ]

    def children(self, number: int) -> list[dict[str, Any]]:
        """What is in something that was given a number.

        Raises
        ------
        ArgumentError
            If it was of an earlier stop.
        """
        opened = self._get(number)
        if isinstance(opened, _Scope):
            records = self._variables(opened.depth, [opened.rank]).get(opened.rank, {})
            return [self.variable(n, r, n, opened.rank, opened.depth) for n, r in records.items()]
        if isinstance(opened, _Beside):
            return self._beside(opened.depth)
        if isinstance(opened, _Workers):
            return [
                self.variable(f"worker {rank}", record, opened.name, rank, opened.depth, False)
                for rank, record in opened.records.items()
            ]
        record = self._whole(opened)
        return [
            {"name": name, "value": found, "variablesReference": 0}
            if isinstance(found, str)
            else self.variable(name, found, expression, opened.rank, opened.depth, whole=False)
            for name, found, expression in self._parts(opened, record)
        ]

    def variable(
        self,
        name: str,
        record: Record,
        expression: str,
        rank: int,
        depth: int,
        told: bool = True,
        whole: bool = True,
    ) -> dict[str, Any]:
        """A variable of the protocol; `told`: its expression means the same where one stands."""
        shown = {"name": name, "value": words_of(record), "type": str(record.get("type", "None"))}
        number = 0
        if _opens(record):
            number = self._number(_Value(rank, depth, expression, record, whole))
        more = {"evaluateName": expression} if expression and told else {}
        return {**shown, **more, "variablesReference": number}

    def evaluate(self, expression: str, rank: int, depth: int, timeout: float) -> dict[str, Any]:
        """The value of an expression on a worker that stands.

        Raises
        ------
        DebuggerError
            If it has none.
        """
        record = self._record(expression, rank, depth, timeout)
        root = expression if _SIMPLE.fullmatch(expression) else f"({expression})"
        shown = self.variable("", record, root, rank, depth)
        return {
            "result": shown["value"],
            "type": shown["type"],
            "variablesReference": shown["variablesReference"],
        }

    def assign(self, number: int, name: str, text: str) -> dict[str, Any]:
        """Give something within what was given a number a new value; as the client shows it."""
        opened = self._get(number)
        if isinstance(opened, _Scope):
            return self.assign_at(name, text, opened.rank, opened.depth)
        if isinstance(opened, _Value):
            for part, _, expression in self._parts(opened, self._whole(opened)):
                if part == name and expression:
                    return self.assign_at(expression, text, opened.rank, opened.depth)
        raise ArgumentError(f"{name!r} can't be set here: set the variable, in its own worker")

    def assign_at(self, target: str, text: str, rank: int, depth: int) -> dict[str, Any]:
        """Give what an expression names a new value on a worker that stands."""
        kind, record = self._debugger.set(target, text, [rank], depth).values[rank]
        if kind == "error":
            raise DebuggerError(record)
        shown = self.variable(target, record, target, rank, depth)
        return {key: shown[key] for key in ("value", "type", "variablesReference")}

    # -- inside ----------------------------------------------------------------------------------

    def _number(self, opened: _Scope | _Beside | _Workers | _Value) -> int:
        with self._lock:
            number = next(self._numbers)
            self._opened[number] = opened
            return number

    def _get(self, number: int) -> _Scope | _Beside | _Workers | _Value:
        with self._lock:
            found = self._opened.get(number)
        if found is None:
            raise ArgumentError(f"variablesReference {number} is not of this stop")
        return found

    def _variables(self, depth: int, ranks: list[int] | None) -> dict[int, Record]:
        stop = self._debugger.where(depth, ranks)
        return {w.rank: w.variables for w in stop.workers if w.variables is not None}

    def _beside(self, depth: int) -> list[dict[str, Any]]:
        tables = self._variables(depth, None)
        found = []
        for name in dict.fromkeys(name for table in tables.values() for name in table):
            records = {rank: table[name] for rank, table in tables.items() if name in table}
            number = self._number(_Workers(depth, name, records))
            words = _compared(records, len(tables))
            found.append({"name": name, "value": words, "variablesReference": number})
        return found

    def _record(self, expression: str, rank: int, depth: int, timeout: float) -> Record:
        kind, found = self._debugger.eval(expression, [rank], depth, timeout).values[rank]
        if kind == "error":
            raise DebuggerError(found)
        record: Record = found
        return record

    def _whole(self, value: _Value) -> Record:
        """The record of a value in full; what is known of it if it can't be had."""
        if value.whole or not value.expression:
            return value.record
        try:
            return self._record(value.expression, value.rank, value.depth, 5.0)
        except DebuggerError:
            return value.record

    def _parts(self, value: _Value, record: Record) -> Iterator[Child]:
        kind, root = record.get("kind"), value.expression
        if kind == "tensor":
            yield from _facts(record)
            if record.get("requires_grad") and root:
                grad = f"{root}.grad"
                yield "grad", self._inner(value, grad), grad
        elif kind in _CONTAINERS:
            for item in record.get("items", ()):
                yield item["key"], item["value"], _step(str(kind), root, item["key"])
            more, told = record.get("more"), len(record.get("items", ()))
            if more and root and kind != "dataclass":
                rest = f"dict(list({root}.items())[{told}:])" if kind == "dict" else (
                    f"{root}[{told}:]")  # fmt: skip
                yield f"[{told}:]", {"kind": kind, "type": record["type"], "length": more}, rest
        elif root:
            module = kind == "module"
            members = self._inner(value, _MODULE.format(root) if module else f"vars({root})")
            for item in members.get("items", ()):
                name = ast.literal_eval(item["key"])
                yield (
                    str(name),
                    item["value"],
                    (
                        f"{root}.{name}"
                        if str(name).isidentifier()
                        else f"getattr({root}, {name!r})"
                    ),
                )

    def _inner(self, value: _Value, expression: str) -> Record:
        try:
            return self._record(expression, value.rank, value.depth, 5.0)
        except DebuggerError as exc:
            return {"kind": "object", "type": "", "repr": str(exc)}


def words_of(record: Record) -> str:
    """A value in a line: of a tensor its shape, its device and what is in it."""
    words = summarize(record)
    if record.get("kind") == "tensor":
        device, stats = str(record.get("device", "cpu")), record.get("stats") or {}
        words += f" on {device}" if device != "cpu" else ""
        head = record.get("head")
        if head is not None and not record.get("shape"):
            words += f" = {head[0]:.6g}" if isinstance(head[0], float) else f" = {head[0]}"
        elif "mean" in stats:
            words += f" mean {stats['mean']:.4g}, {stats['min']:.4g} to {stats['max']:.4g}"
            words += f", {stats['nonfinite']} not finite" if stats.get("nonfinite") else ""
    return f"{words} ({record['error']})" if record.get("error") else words


def _facts(record: Record) -> Iterator[Child]:
    for name in _FACTS:
        if name in record:
            found = record[name]
            yield {"head": "values"}.get(name, name), str(found), ""
    for name, number in (record.get("stats") or {}).items():
        yield name, f"{number:.6g}" if isinstance(number, float) else str(number), ""
    if "nbytes" in record:
        yield "bytes", format_bytes(record["nbytes"]), ""


def _step(kind: str, root: str, key: str) -> str:
    """The expression of an item; "" if none is known."""
    if not root:
        return ""
    if kind == "dataclass" or (kind == "tuple" and key.isidentifier()):
        return f"{root}.{key}"
    try:
        ast.literal_eval(key)
    except (ValueError, SyntaxError):
        return ""
    return f"{root}[{key}]"


def _opens(record: Record) -> bool:
    kind = record.get("kind")
    if kind in ("tensor", "module"):
        return True
    if kind in _CONTAINERS:
        return bool(record.get("length"))
    return kind == "object" and bool(record.get("cut")) and "length" not in record


def _compared(records: Mapping[int, Record], workers: int) -> str:
    """How the values of one variable are: equal or not, and what they are."""
    first = words_of(next(iter(records.values())))
    if len(records) < workers:
        return f"only on {len(records)} of {workers}: {first}"
    keys = [content_key(record) for record in records.values()]
    if None in keys:
        return f"? {first}"
    different = len(set(map(str, keys)))
    return f"= {first}" if different == 1 else f"≠ {different} different values"
