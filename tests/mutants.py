"""Plants mistakes in discolab, one at a time, and asks the tests whether they see them.

``python -m tests.mutants 30`` takes 30 at random; ``--seed 8`` others, ``--layer rpc`` those of one
layer. Each is tried on the tests of its layer, first those of `make test`, then all. What only all
find is what the choice in selection.py costs; what none finds is perhaps no mistake.

Works on a copy, so the checkout stays as it is.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("discolab", "tests", "docs", "benchmarks", "notebooks", "pyproject.toml", "README.md")
OTHER = {
    "==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">",
    "is not": "is", "is": "is not", "not in": "in", "in": "not in",
}  # fmt: skip
OPERATOR = re.compile(r"==|!=|<=|>=|<|>|is\s+not|not\s+in|is|in")
NOT_FOUND = (0, 5)  # exit codes of pytest: all well, nothing to run


class Mutant(NamedTuple):
    """One mistake: this text in the place of those characters of that file."""

    file: Path
    line: int
    start: int
    end: int
    text: str

    def __str__(self) -> str:
        before = (ROOT / self.file).read_text()[self.start : self.end]
        return f"{self.file}:{self.line}: {before!r} becomes {self.text!r}"


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Comparisons turned round, conditions negated, statements left out."""
    source = (ROOT / file).read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:
        """Where that is, in characters; `ast` counts bytes."""
        return len(source.encode()[: starts[line - 1] + column].decode())

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            start, end = span(node.left)[1], span(node.comparators[0])[0]
            if found := OPERATOR.search(source, start, end):
                other = OTHER[" ".join(found[0].split())]
                yield Mutant(file, node.lineno, found.start(), found.end(), other)
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            start, end = span(node.test)
            yield Mutant(file, node.lineno, start, end, f"(not ({source[start:end]}))")
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Expr):
            if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call):
                continue  # a docstring
            yield Mutant(file, node.lineno, *span(node), "pass")


def finds(folder: Path, tests: Path, *options: str) -> bool:
    """Whether the tests fail."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options]
    environ = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tests)], cwd=folder, env=environ, capture_output=True, check=False
    )
    return done.returncode not in NOT_FOUND


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("number", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layer", default="*")
    chosen = parser.parse_args()
    files = sorted(file.relative_to(ROOT) for file in ROOT.glob(f"discolab/{chosen.layer}/**/*.py"))
    tested = [file for file in files if (ROOT / "tests" / file.parts[1]).is_dir()]
    every = [mutant for file in tested for mutant in mutants_of(file)]
    counts: Counter[str] = Counter()
    with TemporaryDirectory() as place:
        folder = Path(place)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        for mutant in random.Random(chosen.seed).sample(every, chosen.number):
            right = (ROOT / mutant.file).read_text()
            wrong = right[: mutant.start] + mutant.text + right[mutant.end :]
            (folder / mutant.file).write_text(wrong)
            tests = Path("tests", mutant.file.parts[1])
            if finds(folder, tests):
                outcome = "found by make test"
            else:
                outcome = "found by make test-all" if finds(folder, tests, "--all") else "not found"
            (folder / mutant.file).write_text(right)
            counts[outcome] += 1
            print(f"{outcome}: {mutant}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))


if __name__ == "__main__":
    main()
