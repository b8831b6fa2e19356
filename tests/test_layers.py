"""The layers of discolab: imports point down, IPython stays in notebook/, names are exported once.

Everything but the last two tests reads source text with `ast`: a layer is checked as soon as its
folder exists, and imports under `TYPE_CHECKING` or inside functions count like any other. The
checker itself is tested on small trees with violations planted in them.
"""

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import discolab

# From the bottom up. A module may import its own layer and the layers before it.
LAYERS = (
    "runtime",
    "transport",
    "isolation",
    "engines",
    "ccl",
    "layouts",
    "views",
    "loader",
    "rpc",
    "trace",
    "comparison",
    "debugger",
    "dap",
    "snapshots",
    "notebook",
)
# Layers whose work is done on workers, through a session: where these live is not theirs to know.
WITHOUT_ENGINES = {"ccl", "views", "loader", "rpc", "snapshots", "trace"}
# Packages that only the notebook layer may import.
NOTEBOOK_ONLY = {"IPython", "anywidget", "ipykernel", "ipywidgets"}

ROOT = Path(discolab.__file__).parent


def layer_names(root: Path) -> list[str]:
    """Names of the layers found on disk: folders that hold Python files."""
    return sorted(p.name for p in root.iterdir() if p.is_dir() and any(p.rglob("*.py")))


def imported_names(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) for every import in the file at `path`.

    `from a import b` gives `a.b`, since b may be a module. Calls of `import_module` and
    `__import__` count when their argument is a literal.
    """
    package = (root.name, *path.relative_to(root).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else ()
                prefix = ".".join((*base, module) if module else base)
                for alias in names:
                    yield node.lineno, f"{prefix}.{alias.name}"
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                if name.startswith("."):
                    level = len(name) - len(name.lstrip("."))
                    name = ".".join((*package[: len(package) - level + 1], name.lstrip(".")))
                yield node.lineno, name


def import_violations(root: Path) -> list[str]:
    """One line of text for each import in the package at `root` that breaks a rule."""
    rank = {name: i for i, name in enumerate(LAYERS)}
    found = [
        f"{root.name}/{name}/ is not a known layer: give it a place in LAYERS of this file"
        for name in layer_names(root)
        if name not in rank
    ]
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        layer = parts[0] if len(parts) > 1 else None
        where = f"{root.name}/{'/'.join(parts)}"
        for line, name in imported_names(path, root):
            top, *rest = name.split(".")
            if top in NOTEBOOK_ONLY and layer != "notebook":
                found.append(f"{where}:{line} imports {top}: only notebook/ may")
            if top != root.name or layer is None or layer not in rank:
                continue
            target = rest[0] if rest else None
            if target not in rank:
                found.append(f"{where}:{line} imports {name}: a layer may import layers only")
            elif rank[target] > rank[layer]:
                found.append(f"{where}:{line} imports {name}: {target} is above {layer}")
            elif target == "engines" and layer in WITHOUT_ENGINES:
                found.append(f"{where}:{line} imports {name}: {layer} works on any engine")
    return found


def exported_names(init: Path) -> list[str] | None:
    """The literal `__all__` of an `__init__.py`, or None when there is none."""
    for node in ast.parse(init.read_text(encoding="utf-8"), str(init)).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
            case ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value):
                return list(ast.literal_eval(value))
    return None


def export_violations(root: Path) -> list[str]:
    """Layers without `__all__`, and names that are exported more than once."""
    found = []
    exporters = defaultdict(list)
    for layer in layer_names(root):
        init = root / layer / "__init__.py"
        where = f"{root.name}/{layer}/__init__.py"
        names = exported_names(init) if init.exists() else None
        if names is None:
            found.append(f"{where} has no literal __all__")
            continue
        for name in names:
            exporters[name].append(where)
    for name, places in sorted(exporters.items()):
        if len(places) > 1:
            found.append(f"{name} is exported {len(places)} times: {', '.join(places)}")
    return found


def missing_names(module_name: str) -> list[str]:
    """Names in the `__all__` of an importable module that it does not have."""
    module = importlib.import_module(module_name)
    return [name for name in module.__all__ if not hasattr(module, name)]


def test_imports_point_down() -> None:
    assert import_violations(ROOT) == []


def test_each_public_name_is_exported_once() -> None:
    assert export_violations(ROOT) == []


@pytest.mark.parametrize("layer", layer_names(ROOT))
def test_exported_names_exist(layer: str) -> None:
    assert missing_names(f"discolab.{layer}") == []


def test_top_level_exports_exist_once() -> None:
    assert missing_names("discolab") == []
    assert len(discolab.__all__) == len(set(discolab.__all__))


# The checker, checked.


def make_tree(folder: Path, files: dict[str, str], name: str = "planted") -> Path:
    """Write a package of that name, with an empty `__all__` where a layer's text gives none."""
    root = folder / name
    for relative, text in files.items():
        path = root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        init = path.parent / "__init__.py"
        if not init.exists():
            init.write_text("__all__ = []\n", encoding="utf-8")
    return root


def test_checker_accepts_what_is_allowed(tmp_path: Path) -> None:
    root = make_tree(
        tmp_path,
        {
            "__init__.py": "from planted.notebook import magics\n__all__ = ['magics']\n",
            "runtime/session.py": "import torch\nfrom planted.runtime import dref\n",
            "runtime/dref.py": "from . import session\nfrom .session import torch\n",
            "engines/threads.py": "from ..runtime.session import Session\n",
            "ccl/local.py": "import planted.isolation.table\n",
            "notebook/magics.py": "import IPython.display\nfrom planted import ccl, runtime\n",
        },
    )
    assert import_violations(root) == []
    assert export_violations(root) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("runtime/a.py", "import planted.engines", "engines is above runtime"),
        ("runtime/a.py", "from ..ccl.b import c", "ccl is above runtime"),
        ("runtime/a.py", "from .. import views", "views is above runtime"),
        ("engines/a.py", "from ..ccl import b", "ccl is above engines"),
        ("runtime/a.py", "def f():\n    from planted import ccl", "ccl is above runtime"),
        (
            "ccl/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import planted.views",
            "views is above ccl",
        ),
        ("ccl/deep/a.py", "from ...views import b", "views is above ccl"),
        (
            "ccl/a.py",
            "import importlib\nimportlib.import_module('planted.rpc')",
            "rpc is above ccl",
        ),
        (
            "ccl/a.py",
            "from importlib import import_module\nimport_module('..trace', __package__)",
            "trace is above ccl",
        ),
        ("rpc/a.py", "from ..engines.hooks import hold", "rpc works on any engine"),
        ("views/a.py", "from planted import Session", "layers only"),
        ("views/a.py", "import planted", "layers only"),
        ("debugger/a.py", "from planted.__main__ import main", "layers only"),
        ("views/a.py", "from IPython.display import HTML", "only notebook/ may"),
        ("debugger/a.py", "def f():\n    import ipywidgets as w", "only notebook/ may"),
        ("__main__.py", "import ipykernel", "only notebook/ may"),
        ("widgets/a.py", "", "not a known layer"),
    ],
)
def test_checker_finds_a_planted_import(
    tmp_path: Path, path: str, source: str, complaint: str
) -> None:
    (violation,) = import_violations(make_tree(tmp_path, {path: source}))
    assert complaint in violation


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"ccl/__init__.py": "from .local import barrier\n"}, "no literal __all__"),
        (
            {"ccl/__init__.py": "__all__ = ['x']\n", "views/__init__.py": "__all__ = ('x',)\n"},
            "x is exported 2 times",
        ),
        ({"ccl/__init__.py": "__all__: list[str] = ['x', 'x']\n"}, "x is exported 2 times"),
    ],
)
def test_checker_finds_a_planted_export(
    tmp_path: Path, files: dict[str, str], complaint: str
) -> None:
    (violation,) = export_violations(make_tree(tmp_path, files))
    assert complaint in violation


def test_checker_finds_a_name_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "here = 1\n__all__ = ['here', 'gone']\n"
    make_tree(tmp_path, {"ccl/__init__.py": source}, name="planted_names")
    monkeypatch.syspath_prepend(tmp_path)
    assert missing_names("planted_names.ccl") == ["gone"]
