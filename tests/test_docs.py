"""What guides and tutorials tell readers to import is public, and what the reference names exists.

Links are checked by `make docs`.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
IMPORT = re.compile(r"^\s*from (discolab[\w.]*) import ([\w, ]+)", re.MULTILINE)
# What readers took for something else; and what is said in its place.
PUZZLING = {
    "lies as ": "layout: ",
    "goes wrong behind": "goes wrong after",
    "one tile a class": "one tile per distinct value",
    "last to come": "last to arrive",
    "is cut along": "is split along",
    "break point": "breakpoint",
}
FOR_TUTORIALS = ("discolab.demo",)  # the data and weights that they train on


def text_of(page: Path) -> str:
    if page.suffix == ".md":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells)


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_nobody_is_told_to_import_what_is_not_public(page: Path) -> None:
    for module, names in IMPORT.findall(text_of(page)):
        if module in FOR_TUTORIALS:
            continue
        public = importlib.import_module(module).__all__
        for name in re.findall(r"\w+", names.split(" as ")[0]):
            assert name in public, f"{module} does not export {name}"


def test_words_that_puzzled_readers_are_gone() -> None:
    said = {page: text_of(page) for page in [*PAGES, *NOTEBOOKS]}
    for file in sorted((ROOT / "discolab").rglob("*.py")):
        nodes = ast.walk(ast.parse(file.read_text()))
        texts = [n.value for n in nodes if isinstance(n, ast.Constant)]
        said[file] = "\n".join(text for text in texts if isinstance(text, str))
    for file, text in said.items():
        for words, better in PUZZLING.items():
            assert words not in text.lower(), f"{file}: {words!r}; say {better!r}"


def test_every_name_of_the_reference_exists() -> None:
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    names = [n for page in pages for n in re.findall(r"^::: ([\w.]+)", page.read_text(), re.M)]
    assert len(names) > 40
    for name in names:
        found = importlib.import_module("discolab")
        for part in name.split(".")[1:]:
            found = getattr(found, part)
