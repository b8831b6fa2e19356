"""Which variables the lines of a program read, and from which others those were made.

Read from the source alone, so what a function does out of sight of the program is not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from ..runtime.sources import lines_of

_BODIES = {"body", "orelse", "finalbody", "handlers", "cases"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def tree_of(file: str) -> ast.Module:
    """The program in a file or cell; an empty one if it can't be read."""
    try:
        return ast.parse("".join(lines_of(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def is_set(node: ast.AST) -> bool:
    """Whether a name, an attribute or an item is assigned to."""
    return isinstance(getattr(node, "ctx", None), ast.Store)


def root_of(node: ast.AST) -> ast.AST:
    """``x`` of ``x.weight[0]``."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node


def read_at(file: str, line: int) -> set[str]:
    """The names of the program that a line reads, and the conditions and loops around it."""
    found: set[str] = set()
    local: set[str] = set()
    for one in _statements(tree_of(file), into_functions=True):
        if not one.lineno <= line <= (one.end_lineno or one.lineno):
            continue
        if isinstance(one, _FUNCTIONS):
            local |= _locals(one)
        else:
            found |= _loaded(_head(one))
    return found - local


def distances(names: Iterable[str], files: Iterable[str]) -> dict[str, int]:
    """How many assignments lie between `names` and each name of which they were made.

    Parameters
    ----------
    names
        At distance 0.
    files
        The cells in which they may have been made.
    """
    made_of: dict[str, set[str]] = {}
    for file in files:
        for one in _statements(tree_of(file)):
            for name, sources in _made(one).items():
                made_of.setdefault(name, set()).update(sources)
    return _steps(dict.fromkeys(names, 0), made_of)


def _steps(found: dict[str, int], made_of: Mapping[str, set[str]]) -> dict[str, int]:
    todo = list(found)
    for name in todo:  # it grows
        for source in sorted(made_of.get(name, set()) - set(found)):
            found[source] = found[name] + 1
            todo.append(source)
    return found


def _made(one: ast.stmt) -> dict[str, set[str]]:
    """The names that a statement sets or writes to, and what it reads for that."""
    if isinstance(one, _FUNCTIONS):
        return {one.name: _loaded([one]) - _locals(one)}
    if isinstance(one, ast.ClassDef):
        return {one.name: _loaded([one])}
    head = list(_head(one))
    roots = [root_of(node) for part in head for node in ast.walk(part) if is_set(node)]
    if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
        roots.append(root_of(one.value.func))  # `x` of `x.add_(y)`
    loaded = _loaded(head)
    return {root.id: loaded for root in roots if isinstance(root, ast.Name)}


def _statements(tree: ast.AST, into_functions: bool = False) -> Iterator[ast.stmt]:
    """The statements of a program, those inside of others after these."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
        elif not isinstance(node, ast.ExceptHandler | ast.match_case):
            continue
        if into_functions or not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield from _statements(node, into_functions)


def _head(one: ast.stmt) -> Iterator[ast.AST]:
    """The parts of a statement but for the statements inside of it."""
    for field, value in ast.iter_fields(one):
        if field not in _BODIES:
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    yield part


def _loaded(parts: Iterable[ast.AST]) -> set[str]:
    return {
        node.id
        for part in parts
        for node in ast.walk(part)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The names that a function has for itself."""
    found: set[str] = set()
    shared: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and is_set(node):
            found.add(node.id)
        elif isinstance(node, ast.Global):
            shared |= set(node.names)
    return found - shared
