"""No file imports another that imports it, by whatever way: imports in functions count too.

So do imports for type checkers only, but for those to `TYPED_BOTH_WAYS`: what holds parts that know
what holds them can't be typed otherwise.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import discolab

ROOT = Path(discolab.__file__).parent

TYPED_BOTH_WAYS = {
    "discolab.runtime.session": "a DRef knows its session, which makes DRefs",
    "discolab.runtime.mesh": "a worker has a mesh, which asks on which worker it is",
    "discolab.debugger.tracer": "an agent has a tracer, and each knows the other",
}

Graph = dict[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """Every module below a package's folder, by its dotted name."""
    found = {}
    for path in root.rglob("*.py"):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(name: str, path: Path) -> list[tuple[str, bool]]:
    """Absolute names that a module imports, and whether that is for type checkers only."""
    parts = name.split(".")
    package = parts if path.name == "__init__.py" else parts[:-1]

    def below(node: ast.AST, typing: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, typing) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                source = ".".join([*base, child.module] if child.module else base)
                yield from ((f"{source}.{alias.name}", typing) for alias in child.names)
            else:
                typed = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                yield from below(child, typing or typed)

    return list(below(ast.parse(path.read_text(encoding="utf-8")), False))


def graph_of(root: Path, typed_both_ways: dict[str, str]) -> Graph:
    """Which module imports which."""
    known = modules(root)
    graph: Graph = {name: set() for name in known}
    for name, path in known.items():
        for found, typing in imports(name, path):
            target = found if found in known else found.rpartition(".")[0]
            if target in known and target != name and not (typing and target in typed_both_ways):
                graph[name].add(target)
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Sets of modules that all reach each other: those that remain when the ends are taken off."""
    left = {name: set(targets) for name, targets in graph.items()}
    while True:
        ends = {name for name, targets in left.items() if not targets & left.keys()}
        ends |= left.keys() - set().union(*left.values())
        if not ends:
            break
        left = {name: targets for name, targets in left.items() if name not in ends}
    found: list[list[str]] = []
    for name in left:
        if not any(name in circle for circle in found):
            mine = _reached(left, name)
            found.append(sorted(other for other in mine if name in _reached(left, other)))
    return [circle for circle in found if len(circle) > 1]


def _reached(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for name in graph[todo.pop()] & graph.keys():
            if name not in seen:
                seen.add(name)
                todo.append(name)
    return seen


def test_no_circles() -> None:
    assert circles(graph_of(ROOT, TYPED_BOTH_WAYS)) == []


def test_each_exception_is_needed() -> None:
    for name in TYPED_BOTH_WAYS:
        others = {key: why for key, why in TYPED_BOTH_WAYS.items() if key != name}
        assert circles(graph_of(ROOT, others)), f"{name} is in no circle any more"


def test_circles_of_all_kinds_are_found(tmp_path: Path) -> None:
    root = tmp_path / "pkg"
    (root / "low").mkdir(parents=True)
    files = {
        "__init__": "from . import a",
        "a": "from .b import x\nfrom . import e",
        "b": "def f():\n    from . import c",
        "c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .low.d import D",
        "low/__init__": "",
        "low/d": "from ..b import f",
        "e": "import pkg.low",
    }
    for name, text in files.items():
        (root / f"{name}.py").write_text(text)
    assert circles(graph_of(root, {})) == [["pkg.b", "pkg.c", "pkg.low.d"]]
    assert circles(graph_of(root, {"pkg.low.d": "why"})) == []
