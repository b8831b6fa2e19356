"""Planted bugs and right programs of model families that the rules were not made for.

The cases are in families/; what the comparison says of each stands in docs/compare.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from discolab import Session
from tests.comparison.families import BUGS, RIGHT
from tests.comparison.families.case import Bug, Right, bug_row, right_row, verdict

# A lost gradient is told as a warning; transformers and torch.compile have warnings of their own.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

TABLE = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
TABLE = TABLE.partition("<!-- cases -->")[2].partition("<!-- end of cases -->")[0]
STALE = "docs/compare.md is not what is found: python -m tests.comparison.families"


def cases(known: dict[str, Any]) -> list[Any]:
    """The cases as parameters, with their marks."""
    found = []
    for name, case in known.items():
        marks = [pytest.mark.slow] if getattr(case, "slow", False) else []
        found.append(pytest.param(name, case, id=name, marks=marks))
    return found


@pytest.mark.one_process
@pytest.mark.parametrize(("name", "bug"), cases(BUGS))
def test_nothing_wrong_is_said_of_a_bug(four: Session, name: str, bug: Bug) -> None:
    found = bug.run(four)
    judged = verdict(bug, found)
    assert judged.holds, f"{judged}\n{found}"
    assert bug_row(name, bug, judged) in TABLE, STALE


@pytest.mark.one_process
@pytest.mark.parametrize(("name", "right"), cases(RIGHT))
def test_a_right_program_raises_no_alarm(four: Session, name: str, right: Right) -> None:
    found = right.run(four)
    assert found.agrees, found
    assert right_row(name, right, True) in TABLE, STALE


def test_the_tables_count_what_they_hold() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and ": " in line]
    bugs = [row for row in rows if row.endswith(("| right |", "| not known |"))]
    right = [row for row in rows if row.endswith("| no alarm |")]
    assert len(bugs) == len(BUGS) >= 60
    assert len(right) >= max(len(RIGHT), 40)
    numbers = list(map(int, re.findall(r"\d+", TABLE.strip().split("\n")[0])))
    known = sum(row.endswith("| right |") for row in bugs)
    assert numbers == [len(bugs)] * 3 + [known, len(bugs) - known, 0, len(right), 0]
