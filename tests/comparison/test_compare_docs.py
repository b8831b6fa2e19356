"""What docs/compare.md shows is what is printed; its layouts and options are there."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from discolab import compare
from discolab.comparison.arguments import read_layout
from discolab.comparison.measure import _RTOL
from discolab.loader import Workers

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")


# What depends on the order in which a processor adds: errors that rounding made (0 on some), their
# pictures, the worst element, and which value has the largest where all agree.
ROUNDING = re.compile(
    r"-?\d+\.\d+(e-\d+)?|\d+e-\d+|(?<= )0(?=\s)|[▁▂▃▄▅▆▇█]+|\[\d, \d, \d\]"
    r"|(?<=of a typical element, ).*"
)


def without_numbers(text: str) -> list[str]:
    """The lines without what depends on the processor."""
    lines = ROUNDING.sub("·", text).splitlines()
    return [re.sub(r"\s+", " ", line).strip() for line in lines if line.strip()]


def printed(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return without_numbers(done.stdout)


@pytest.mark.slow
def test_its_example_prints_what_it_says() -> None:
    code = re.findall(r"<!-- example -->\n```python\n(.*?)```", TEXT, re.S)[0]
    wrong, right = re.findall(r"```text\n(.*?)```", TEXT, re.S)
    assert printed(code) == without_numbers(wrong)
    bias = "(nn.functional.linear(x, self.weight, self.bias))"
    assert bias in code
    mended = code.replace(bias, "(nn.functional.linear(x, self.weight)) + self.bias")
    assert printed(mended) == without_numbers(right)


def test_its_layouts_can_be_read() -> None:
    found = re.findall(r'"(shard\([^"…]*\))"', TEXT)
    assert found
    for text in found:
        assert read_layout(text, [Workers((4,))]).layout.cuts


def test_its_tolerances_are_those_of_the_program() -> None:
    names, _, numbers = (line.split("|")[2:-1] for line in TEXT.split("\n| | ")[1].split("\n")[:3])
    del names
    assert [float(n) for n in numbers] == [
        _RTOL[getattr(__import__("torch"), name)]
        for name in ("float64", "float32", "float16", "bfloat16")
    ]


def test_its_options_exist() -> None:
    known = inspect.signature(compare).parameters
    for name in re.findall(r"`(\w+)=", TEXT):
        assert name in {*known, "p", "segments"}, name
